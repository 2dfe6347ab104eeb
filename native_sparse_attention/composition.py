"""Checks of the arguments of `nsa`, and the backends of its ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import BackendChoice, Candidates, choose_backends, slowest
from native_sparse_attention.core.call import Call, SelectionRules, make_call
from native_sparse_attention.core.geometry import Sequences, packed_block_starts
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.core.plain import refuse_context_parallel
from native_sparse_attention.core.random import as_seed, check_dropout
from native_sparse_attention.ops.block_selection import api as block_selection
from native_sparse_attention.ops.compressed_attention import api as compressed_attention
from native_sparse_attention.ops.gated_sum import api as gated_sum
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.selected_attention import api as selected_attention
from native_sparse_attention.ops.window_attention import api as window_attention

MemoryPairs = tuple[Tensor, Tensor | None] | None


class Branches(NamedTuple):
    """Branches that a call of `nsa` computes. scores: the selection or its gradient needs block scores."""

    compressed: bool
    selected: bool
    window: bool
    scores: bool = False


class Inputs(NamedTuple):
    """Checked arguments of `nsa`, with 0 at padding.

    compressed, selected, window: q, k and v of each branch. gates: one tensor, or None for merged attention without a
    compressed output. rules: its num_selected is n, also where blocks are given.
    """

    compressed: tuple[Any, Any, Any]
    selected: tuple[Any, Any, Any]
    window: tuple[Any, Any, Any]
    mem_kv: Any
    gates: Any
    branches: Branches
    call: Call
    rules: SelectionRules
    window_size: tuple[int, int]
    modifiers: Modifiers
    sinks_cmp: Tensor | None


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    gates: Tensor | Sequence[Tensor | None] | None,
    *,
    q_cmp: Tensor | None,
    of_window: dict[str, Tensor | None],
    mem_kv: MemoryPairs,
    sizes: tuple[int, int, int],
    selection: tuple[Any, ...],
    block_indices: Tensor | None,
    placed: tuple[Any, ...],
    window_size: tuple[int, int],
    sinks: Tensor | None,
    sinks_cmp: Tensor | None,
    dropout: tuple[float, int | Tensor | None],
    merge_window: bool,
    use_diff_topk: bool,
    backend: str,
) -> tuple[Inputs, dict[str, str]]:
    """Check the arguments of `nsa`; return them and the backend of each op.

    of_window: q_window, k_window and v_window. sizes: (l, d, l'). selection: the fields of `SelectionRules`. placed:
    the arguments of `make_call` from segment_ids on. dropout: dropout_p and dropout_seed.
    """
    num_selected, num_init, num_local, num_recent, share_group, block_counts = selection
    checks.check_flags(merge_window=merge_window, share_group=share_group, use_diff_topk=use_diff_topk)
    checks.check_qkv(q, k, v)
    stacked, branches = check_gates(gates, q, v_cmp, mem_kv, sinks_cmp, merge_window, **of_window)
    checks.check_block_sizes(*sizes)
    refuse_context_parallel()
    checks.check_not_negative(num_init=num_init, num_local=num_local, num_recent=num_recent)
    num_selected, branches = check_selection(
        q, k, branches, num_selected, block_indices, block_counts, share_group, use_diff_topk
    )
    call, padding = make_call(q, k, *placed)
    checks.check_num_recent(num_recent, call.causal)
    window_size = checks.check_window(window_size, call.causal)
    optional = {'q_cmp': q_cmp, **of_window}
    for (name, tensor), like in zip(optional.items(), (q, q, k, v), strict=True):
        if tensor is None:
            continue
        checks.check_tensors(**{name: tensor})
        if tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
        checks.check_same_kind(q=q, **{name: tensor})
    dropout_p, seed = dropout
    check_dropout(dropout_p, seed, q)
    sinks, sinks_cmp = reduce_sinks(sinks, q), reduce_sinks(sinks_cmp, q, 'sinks_cmp')
    if branches.compressed or branches.scores:
        v_cmp, mem_kv = check_compressed(
            q if q_cmp is None else q_cmp, k_cmp, v_cmp, mem_kv, k, v, call.sequences, sizes[:2], merge_window
        )
    tokens: Any = (q, k, v, *optional.values(), stacked)
    tokens, (k_cmp, v_cmp) = clear_padding(padding, call.sequences, sizes[:2], tokens, (k_cmp, v_cmp))
    q, k, v, q_cmp, q_window, k_window, v_window, stacked = tokens
    compressed, selected = (q if q_cmp is None else q_cmp, k_cmp, v_cmp), (q, k, v)
    window: Any = (q if q_window is None else q_window, *((k, v) if k_window is None else (k_window, v_window)))

    tensors: dict[str, Any] = {'compressed': compressed, 'window': window, 'mem_kv': mem_kv, 'gates': gates}
    tensors |= {'block_indices': block_indices, 'sinks': sinks, 'sinks_cmp': sinks_cmp}
    settings: dict[str, Any] = {'num_selected': num_selected, 'share_group': share_group, 'softcap': call.softcap}
    settings |= {'dropout_p': dropout_p, 'causal': call.causal, 'merge_window': merge_window}
    settings |= {'compressed_output': branches.compressed, 'use_diff_topk': use_diff_topk}
    ops = {op: choice.name for op, choice in backend_of(q, k, v, **tensors, **settings, backend=backend).ops.items()}
    if q_cmp is None and (merge_window or q_window is None):
        by_kernels = 'triton' if 'triton' in ops.values() else 'eager'
        q, q_cmp, *rest = shared_input(q, 2 if merge_window else 3, backend=by_kernels)
        compressed, selected, window = (q_cmp, *compressed[1:]), (q, k, v), ((rest or [q])[0], *window[1:])
    seed = as_seed(seed, q.device) if dropout_p and (merge_window or branches.window) else None
    modifiers = Modifiers(call.softcap, sinks, dropout_p=dropout_p, dropout_seed=seed)
    rules = SelectionRules(num_selected, num_init, num_local, num_recent, share_group, block_counts)
    inputs = Inputs(
        *(compressed, selected, window, mem_kv, stacked, branches, call, rules, window_size, modifiers, sinks_cmp)
    )
    return inputs, ops


def check_gates(
    gates: Tensor | Sequence[Tensor | None] | None,
    q: Tensor,
    v_cmp: Tensor | None,
    mem_kv: MemoryPairs,
    sinks_cmp: Tensor | None,
    merge_window: bool,
    **of_window: Tensor | None,
) -> tuple[Any, Branches]:
    """Return the gates as one tensor, or None for merged attention without a compressed output; and the branches.

    of_window: queries, keys and values of the window branch.
    """
    if not merge_window:
        if gates is None:
            raise ValueError('gates is None, but must be given unless merge_window is set')
        stacked, has_gates = gated_sum.stack_gates(gates, q)
        if (of_window['k_window'] is None) != (of_window['v_window'] is None):
            raise ValueError('k_window and v_window must be given together or not at all')
        return stacked, Branches(*has_gates)
    gate = check_merged(gates, q, mem_kv, sinks_cmp, **of_window)
    if (v_cmp is None) != (gate is None):
        given, missing = ('v_cmp', 'gates') if gate is None else ('gates', 'v_cmp')
        raise ValueError(f'{missing} is None, but {given} is given: they must be None together')
    return gate, Branches(compressed=gate is not None, selected=True, window=False)


def check_merged(
    gates: Tensor | Sequence[Tensor | None] | None,
    q: Tensor,
    mem_kv: MemoryPairs,
    sinks_cmp: Tensor | None,
    **of_window: Tensor | None,
) -> Tensor | None:
    """Return the gates `[B, T, HQ, 1 or 2]` of merged attention, or None for scores of the compressed branch alone.

    Raises ValueError for gates of another shape, for queries, keys or values of a window branch, and, where gates is
    None, for memory values and compressed sinks.
    """
    for name, tensor in of_window.items():
        if tensor is not None:
            raise ValueError(f'{name} is given, but must be None where merge_window is set')
    if gates is not None:
        checks.check_tensors(gates=gates)
        assert isinstance(gates, Tensor)
        num_gates = 2 if gates.shape[-1:] == (2,) else 1
        checks.check_gate('gates', gates, (*q.shape[:3], num_gates), '(B, T, HQ, 1 or 2)', q)
        return gates
    if mem_kv is not None:
        if not isinstance(mem_kv, tuple | list) or len(mem_kv) != 2:
            raise ValueError(
                f'mem_kv is a {type(mem_kv).__name__}, but must be a pair (keys, None) where gates is None'
            )
        checks.check_tensors(**{'mem_kv[0]': mem_kv[0]})
    for name, tensor in (('mem_kv[1]', None if mem_kv is None else mem_kv[1]), ('sinks_cmp', sinks_cmp)):
        if tensor is not None:
            raise ValueError(f'{name} is given, but must be None where gates is: only block scores are computed')
    return None


def check_selection(
    q: Tensor,
    k: Tensor,
    branches: Branches,
    num_selected: int | None,
    block_indices: Tensor | None,
    block_counts: int | Tensor | None,
    share_group: bool,
    use_diff_topk: bool,
) -> tuple[int, Branches]:
    """Return n, from num_selected or from the shape of block_indices; and the branches that n leaves."""
    kv_heads = k.shape[2] if share_group else q.shape[2]
    if block_indices is None:
        if num_selected is None and branches.selected:
            raise ValueError('num_selected is None, but must be given where no block_indices are')
        num_selected = 0 if num_selected is None else num_selected
        checks.check_not_negative(num_selected=num_selected)
    else:
        checks.check_block_indices(block_indices, q, k)
        *_, kv_heads, count = block_indices.shape
        if num_selected not in (None, count):
            raise ValueError(
                f'num_selected is {num_selected}, but must be {count} or None: block_indices has {count} blocks'
            )
        num_selected = count
    selected = branches.selected and num_selected > 0
    if selected and block_counts is not None:
        checks.check_block_counts(block_counts, kv_heads, q)
    scores = selected and (block_indices is None or use_diff_topk)
    return num_selected, branches._replace(selected=selected, scores=scores)


def check_compressed(
    q_cmp: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    mem_kv: Any,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    sizes: tuple[int, int],
    merge_window: bool,
) -> tuple[Tensor, Any]:
    """Check the inputs of the compressed branch; return v_cmp and mem_kv.

    For scores alone, these are narrow stand-ins: only the log-sum-exp is used.
    """
    if k_cmp is None or (v_cmp is None and not merge_window):
        name = 'k_cmp' if k_cmp is None else 'v_cmp'
        raise ValueError(f'{name} is None, but must be given for the compressed branch and for the scores of blocks')
    if v_cmp is None:
        checks.check_tensors(k_cmp=k_cmp)
        values = k_cmp.detach()[..., :16] if k_cmp.ndim else k_cmp
        if mem_kv is not None:
            checks.check_tensors(mem_kv=mem_kv[0])
            mem_kv = (mem_kv[0], mem_kv[0].detach()[..., :16] if mem_kv[0].ndim else mem_kv[0])
    else:
        values = v_cmp
    checks.check_qkv(q_cmp, k_cmp, values, 'k_cmp', 'v_cmp')
    checks.check_compressed_heads(k_cmp, k)
    if v_cmp is not None and v_cmp.shape[-1] != v.shape[-1]:
        raise ValueError(f'v_cmp has head size {v_cmp.shape[-1]}, but v has {v.shape[-1]}')
    if mem_kv is not None:
        compressed_attention.check_memory(mem_kv, q_cmp, k_cmp, values)
    checks.check_num_compressed(k_cmp, sequences, *sizes)
    return values, mem_kv


def clear_padding(
    padding: Tensor | None, sequences: Sequences, sizes: tuple[int, int], tokens: Iterable[Any], blocks: Iterable[Any]
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Return tensors or None with 0 at padding, bool `[1, T]`: some of tokens `[1, T, ...]`, some of compressed blocks.

    Padding then reaches neither outputs nor shared gradients, such as those of sinks. sizes: (l, d).
    """
    if padding is None:
        return tokens, blocks
    assert sequences.cu_seqlens is not None
    of_blocks = padding[:, packed_block_starts(sequences.cu_seqlens, padding.shape[1], *sizes)]
    return [_clear(t, padding) for t in tokens], [_clear(t, of_blocks) for t in blocks]


def _clear(tensor: Any, padding: Tensor) -> Any:
    """Return `[1, N, heads, ...]` with 0 where padding `[1, M]` is True; M may differ from N."""
    if tensor is None:
        return None
    count = tensor.shape[1]
    padding = F.pad(padding[:, :count], (0, max(0, count - padding.shape[1])))
    return tensor.masked_fill(padding[..., None, None], 0)


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Tensor | Sequence[Tensor | None] | None = None,
    num_selected: int = 1,
    share_group: bool = True,
    use_diff_topk: bool = False,
    block_indices: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = True,
    merge_window: bool = False,
    compressed_output: bool = True,
    compressed: tuple[Tensor, Tensor, Tensor] | None = None,
    window: tuple[Tensor, Tensor, Tensor] | None = None,
    mem_kv: MemoryPairs = None,
    backend: str = 'auto',
) -> BackendChoice:
    """Return the backend that `nsa` would take, with the backend of each op in `ops`.

    Where the three attentions have different backends, the slowest one is returned.

    Args:
        gates: as in `nsa`; None stands for all branches.
        compressed_output: False where the compressed branch of merged attention computes block scores alone.
        compressed: q, k and v of the compressed branch; default those given.
        window: q, k and v of the window branch; default those given.
    """
    given = (True, True, True) if gates is None or isinstance(gates, Tensor) else [gate is not None for gate in gates]
    num_selected = num_selected if block_indices is None else block_indices.shape[3]
    has_selected = given[1] and num_selected > 0
    has_compressed = given[0] and compressed_output
    q_cmp, k_cmp, v_cmp = (q, k, v) if compressed is None else compressed
    attentions: dict[str, Candidates] = {}
    if has_compressed or (has_selected and (block_indices is None or use_diff_topk)):
        attentions['compressed_attention'] = compressed_attention.candidates(
            q_cmp, k_cmp, v_cmp, mem_kv=mem_kv, modifiers=Modifiers(softcap, sinks_cmp), backend=backend
        )
    if num_selected == 0 if merge_window else given[2]:
        of_window, modifiers = (q, k, v) if window is None else window, Modifiers(softcap, sinks, dropout_p=dropout_p)
        attentions['window_attention'] = window_attention.candidates(*of_window, modifiers=modifiers, backend=backend)
    others: dict[str, Candidates] = {}
    if has_compressed or not merge_window:
        # Gates of several dtypes are stacked in the widest of them.
        all_gates = [gates] if isinstance(gates, Tensor) else [gate for gate in gates or () if gate is not None]
        others['gated_sum'] = gated_sum.candidates(next((t for t in all_gates if t.dtype == torch.float64), q), v)
    if has_selected:
        # A tensor in place of the factors of `straight_through_scale`, which require gradients where it does.
        scored = [t for t in (q_cmp, k_cmp, sinks_cmp, *(mem_kv or ())[:1]) if t is not None and t.requires_grad]
        settings: dict[str, Any] = {'num_selected': num_selected}
        settings['block_scale'] = (scored or [q_cmp])[0] if use_diff_topk else None
        attentions['selected_attention'] = (
            selected_attention.merged_candidates(
                q, k, v, causal=causal, unit_scale=True, dropout_p=dropout_p, **settings
            )
            if merge_window
            else selected_attention.candidates(q, k, v, backend=backend, **settings)
        )
        group_size = q.shape[2] // k.shape[2] if share_group else 1
        for op, is_run in (('select_blocks', block_indices is None), ('straight_through_scale', use_diff_topk)):
            if is_run:
                others[op] = block_selection.candidates(op, q, k, group_size=group_size, num_selected=num_selected)
    choices = choose_backends(backend, q.device, {**attentions, **others}, flex_or_eager=True)
    chosen, rest = ({op: choices[op] for op in part} for part in (attentions, others))
    return slowest(chosen or rest, rest)


def attentions_take_gates(q: Tensor, ops: Mapping[str, str]) -> bool:
    """Return whether the attentions apply the gradient of their gates themselves, so that the sum has no backward.

    The kernels can do this where log-sum-exps have no gradients. In float16, products of small gates and weights would
    lose bits. ops: backend of each op.
    """
    if not torch.is_grad_enabled() or q.dtype == torch.float16:
        return False
    has_attention = any(op.endswith('_attention') for op in ops)  # without one, no attention receives the gates
    return has_attention and all(name == 'triton' for op, name in ops.items() if op != 'select_blocks')
