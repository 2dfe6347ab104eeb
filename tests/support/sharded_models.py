"""Small models for tests of parallelism, and comparisons with one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention.nn import attention
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.transformer import Transformer

NUM_TOKENS, SEQLEN = 29, 33
SPARSE: dict[str, Any] = {
    'sliding_window_size': 4,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
}
# Settings of the attention by name, and of the model.
KINDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    'separate': ({'use_diff_topk': True, 'num_sinks': 1}, {}),
    'merged': ({'merge_window': True, 'output_gate': True, 'qk_norm': True}, {'tie_embeddings': True}),
    'scores': ({'merge_window': True, 'compressed_output': False, 'use_diff_topk': True}, {}),
    'branches': ({'independent_branch_kv': True, 'recompute': True, 'dim_value_head': 6}, {}),
    'dense': (None, {'dense_output_gate': True}),
}


def make_model(kind: str = 'separate', seed: int = 0, **changes: Any) -> Transformer:
    """Return a float64 model in training mode with random weights, the same on every rank."""
    torch.manual_seed(seed)
    sparse, settings = KINDS[kind]
    sizes: dict[str, Any] = {'dim': 16, 'depth': 2, 'dim_head': 8, 'heads': 8, 'kv_heads': 4, **settings}
    if sparse is not None:
        own = {**SPARSE, **sparse, **changes.pop('sparse', {})}
        sizes |= {'use_sparse_attn': True, 'backend': 'eager', 'sparse_attn_kwargs': own}
    model = Transformer(NUM_TOKENS, **(sizes | changes))
    if not next(model.parameters()).is_meta:
        randomize(model)
    return model.double()


def learned_rotary() -> RotaryEmbedding:
    return RotaryEmbedding(8, learned_freq=True)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Move every weight from its start, such as the zeros of the gate."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)


def make_ids(batch: int, seqlen: int = SEQLEN, seed: int = 1) -> Tensor:
    return torch.randint(NUM_TOKENS, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


@contextmanager
def recorded_blocks(module: Any = attention) -> Iterator[list[Tensor]]:
    """Collect the block indices `[B, T, H, n]` of every call inside the context. module: the one that selects blocks,
    or that leaves the selection to `nsa`.
    """
    blocks: list[Tensor] = []

    def record(*args: Any, **settings: Any) -> Tensor:
        blocks.append(select_blocks(*args, **settings))
        return blocks[-1]

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, 'select_blocks'):
            patch.setattr(module, 'select_blocks', record)
        else:
            patch.setattr(module, 'nsa', partial(module.nsa, choose=record))
        yield blocks


def whole(tensor: Tensor | None) -> Tensor:
    """Return a tensor that may be sharded, whole; it must be there."""
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor  # type: ignore[attr-defined]


def assert_near(found: Tensor, expected: Tensor, name: str = '') -> None:
    """Relative to the largest value: 1e-9 in float64, 1e-5 in float32."""
    limit = {torch.float64: 1e-9, torch.float32: 1e-5}[expected.dtype]
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape, name
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= limit, f'{name}: relative error {error:.2g}'


def assert_same_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """expected: of one process. Parameters of the model may be sharded."""
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(found[name], gradient, name)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def joined(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the entries of queries, keys and values of each projection, as in a model that is not divided."""
    out: dict[str, Tensor] = {}
    for name, value in values.items():
        parent, of_qkv, _ = name.partition('to_qkv.')
        key = f'{parent}to_qkv.weight' if of_qkv else name
        out[key] = torch.cat([out[key], value]) if key in out else value
    return out
