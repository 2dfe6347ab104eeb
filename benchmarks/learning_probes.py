"""Probes of the attention layers of a model on a few sequences: gates, attention mass, norms of branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.learning_variants import GATES, role
from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from native_sparse_attention.ops import select_blocks

QUERIES = 256  # of a sequence, evenly spaced, for which the dense attention weights are computed
SEPARATE = ('compressed', 'selected', 'window')


@torch.no_grad()
def gate_means(model: Transformer, ids: Tensor, autocast: Callable[[], Any]) -> dict[str, list[list[float] | None]]:
    """Return the mean sigmoid of each kind of gate: a list over branches per layer, None if a layer lacks the gate.

    ids: `[B, T + 1]`. Means are over heads and tokens. The second gate of `SparseAttention(output_gate=True)` counts as
    'output_gate', as the gate of a dense layer does.
    """
    found: dict[str, list[list[float] | None]] = {}
    handles = []
    for index, block in enumerate(model.blocks):
        for name in GATES:
            module = getattr(block.attention, name, None)
            if isinstance(module, nn.Module):
                means = found.setdefault(name, [None] * len(model.layers))
                hook = partial(_keep_means, means, index, block.attention.heads)
                handles.append(module.register_forward_hook(hook))
    if not handles:
        return {}
    was_training = model.training
    try:
        model.eval()
        with autocast():
            model(ids[:, :-1])
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    for index, block in enumerate(model.blocks):
        if has_output_gate(block.attention) and (means := found['to_strategy_combine'][index]) is not None:
            found['to_strategy_combine'][index] = means[:1]
            found.setdefault('output_gate', [None] * len(model.layers))[index] = means[1:]
    return found


def has_output_gate(attention: nn.Module) -> bool:
    """Return whether the layer is sparse and has the gate of the output beside that of the compressed branch."""
    return isinstance(attention, SparseAttention) and attention.output_gate


def _keep_means(means: list[Any], index: int, heads: int, _: nn.Module, __: Any, logits: Tensor) -> None:
    gates = logits.float().sigmoid().unflatten(-1, (heads, -1))
    means[index] = gates.mean((0, 1, 2)).tolist()


def probe_layers(
    model: Transformer, ids: Tensor, autocast: Callable[[], Any], sparse: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a dict of floats per layer, from one forward and backward of ids `[B, T + 1]`.

    mass, mass_selected, mass_window: share of the layer's own dense softmax (its rotated q and k, all visible keys)
    that selected blocks and window hold together and alone; mass_best: that the window and the blocks with the most
    mass hold, as many as are selected, one choice per KV head. Dense layers have mass_window and mass_best, of sparse's
    sizes.
    selected_keys: mean share of visible keys that lie in selected blocks or window.
    <branch>_out, <branch>_grad: root mean square of the gated output of a branch and of its gradient, both before the
    gate of the whole output.
    """
    probes = [_probe(block.attention, sparse) for block in model.blocks]
    model.zero_grad()
    with autocast():
        loss = model(ids, return_loss=True)
    loss.backward()
    rows = [probe.finish() for probe in probes]
    for row, block in zip(rows, model.blocks, strict=True):
        for name, parameters in _roles(block.attention).items():
            grads = [p.grad.float().norm() for p in parameters if p.grad is not None]
            if grads:
                row[f'{name}_parameter_grad'] = torch.stack(grads).norm().item()
    model.zero_grad()
    return rows


def _roles(attention: nn.Module) -> dict[str, list[nn.Parameter]]:
    roles: dict[str, list[nn.Parameter]] = {}
    for name, parameter in attention.named_parameters():
        roles.setdefault(role(name), []).append(parameter)
    return roles


def _probe(attention: SparseAttention | DenseAttention, sparse: Mapping[str, Any]) -> Any:
    kind = _SparseProbe if isinstance(attention, SparseAttention) else _DenseProbe
    return kind(attention, sparse)


class _DenseProbe:
    def __init__(self, attention: Any, sparse: Mapping[str, Any]) -> None:
        self.attention, self.sparse, self.project = attention, sparse, attention._project
        self.q: Any = None
        attention._project = self.record

    def record(self, x: Tensor, positions: Tensor) -> Any:
        self.q, self.k, v = self.project(x, positions)
        return self.q, self.k, v

    def finish(self) -> dict[str, float]:
        del self.attention._project
        sizes = (self.sparse[n] for n in ('selection_block_size', 'sliding_window_size', 'num_selected_blocks'))
        mass = attention_mass(self.q.detach(), self.k.detach(), None, *sizes)
        return {name: mass[name] for name in ('mass_window', 'mass_best')}


class _SparseProbe:
    """Replacement of `_nsa` of a layer for one forward and backward."""

    def __init__(self, attention: Any, _: Mapping[str, Any]) -> None:
        self.attention, self.nsa, self.blocks = attention, attention._nsa, None
        attention._nsa = self.record

    def record(self, q: Tensor, k: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        choose = settings.get('choose', select_blocks)

        def record_choice(*args: Any, **options: Any) -> Tensor:
            self.blocks = choose(*args, **options)
            return self.blocks

        out = self.nsa(q, k, *tensors, **{**settings, 'choose': record_choice})
        out.retain_grad()
        self.out, self.q, self.k, self.inputs, self.settings = out, q, k, (q, k, *tensors), settings
        return out

    @torch.no_grad()
    def finish(self) -> dict[str, float]:
        del self.attention._nsa
        layer, row = self.attention, {}
        assert self.out.grad is not None
        grad = self.out.grad * self.inputs[-1][..., 1:] if has_output_gate(layer) else self.out.grad
        for name, gate, out in self.branches():
            row[f'{name}_out'] = _rms(gate * out)
            row[f'{name}_grad'] = _rms(gate * grad)
        sizes = (layer.selection_block_size, layer.sliding_window_size, layer.num_selected_blocks)
        return row | attention_mass(self.q.detach(), self.k.detach(), self.blocks, *sizes)

    def branches(self) -> list[tuple[str, Any, Tensor]]:
        """Return name, gate and output before the gate: outputs of `nsa` under gates of 0 and 1."""
        *before, gates = self.inputs
        if gates is None:
            return [('merged', 1.0, self.out)]

        def under(values: tuple[float, ...]) -> Tensor:
            return self.nsa(*before, torch.tensor(values).to(gates).expand_as(gates), **self.settings).float()

        if gates.shape[-1] < 3:
            ones = (1.0,) * (gates.shape[-1] - 1)
            merged = under((0.0, *ones))
            return [('merged', 1.0, merged), ('compressed', gates[..., :1], under((1.0, *ones)) - merged)]
        alone = torch.eye(3).tolist()
        return [(name, gates[..., i, None], under(tuple(alone[i]))) for i, name in enumerate(SEPARATE)]


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


@torch.no_grad()
def attention_mass(
    q: Tensor, k: Tensor, blocks: Tensor | None, block_size: int, window: int, num_selected: int
) -> dict[str, float]:
    """Return shares of causal softmax weights: means over rows, heads and QUERIES evenly spaced queries.

    q: `[B, T, HQ, D]`, k: `[B, T, H, D]`, rotated. blocks: int `[B, T, H or HQ, n]`, selected, or None for none.
    """
    length, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    count = min(QUERIES, length)
    # The last query of each of `count` parts, so that most queries have a past.
    position = torch.arange(1, count + 1, device=q.device) * length // count - 1
    key = torch.arange(length, device=q.device)
    distance = position[:, None] - key
    visible, near = distance >= 0, (distance >= 0) & (distance < window)
    columns = length // block_size + 2
    totals: dict[str, list[Tensor]] = {
        n: [] for n in ('mass', 'mass_selected', 'mass_window', 'mass_best', 'selected_keys')
    }
    for row, kv_head in product(range(len(q)), range(kv_heads)):
        group = slice(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads)
        logits = q[row, position, group].float().transpose(0, 1) @ k[row, :, kv_head].float().mT
        weights = (logits * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(-1)  # [G, count, T]
        selected = torch.zeros_like(weights, dtype=torch.bool)
        if blocks is not None:
            index_group = group if blocks.shape[2] == heads else slice(kv_head, kv_head + 1)
            chosen = blocks[row, position, index_group].long().transpose(0, 1)
            is_chosen = torch.zeros(len(chosen), count, columns, dtype=torch.bool, device=q.device)
            is_chosen.scatter_(2, chosen + 1, True)  # padding, -1, is column 0
            selected = is_chosen[..., 1:].repeat_interleave(block_size, 2)[..., :length] & visible
        read = selected | near
        far = nn.functional.pad((weights * ~near).sum(0), (0, (columns - 1) * block_size - length))
        by_block = far.unflatten(-1, (-1, block_size)).sum(-1)
        best = by_block.topk(min(num_selected, columns - 1), -1).values.sum(-1) / len(weights)
        totals['mass'].append((weights * read).sum(-1).mean())
        totals['mass_selected'].append((weights * selected).sum(-1).mean())
        totals['mass_window'].append((weights * near).sum(-1).mean())
        totals['mass_best'].append(totals['mass_window'][-1] + best.mean())
        totals['selected_keys'].append((read.sum(-1) / visible.sum(-1)).mean())
    return {name: torch.stack(values).mean().item() for name, values in totals.items()}
