"""Selected blocks and window in one softmax in Triton, with every design of the selected part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.selected_attention.triton.merged import op as merged
from native_sparse_attention.testing import assert_attention_matches, make_block_indices
from tests.support.harness import assert_close_to_eager, fewer_examples, make_grads, make_sequences
from tests.support.problems import Extents, Heads, drawn_extents, packed, row_integers, whole
from tests.support.selected_attention_problems import (
    TWO_GROUPS,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
    per_tile,
)


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('softcap', [None, 2.0])
def test_rules(dtype: torch.dtype, softcap: float | None, device: torch.device) -> None:
    extents = Extents(1, 9, 40, {'q_offset': 29}, [40])
    indices = make_block_indices('duplicates', 1, 9, 2, 3, seqlen_k=40, block_size=7, q_offset=29)
    tensors = make_inputs(extents, Heads(8, 2, 32, 24), device, indices, dtype=dtype)
    settings: dict[str, Any] = {'block_size': 7, 'q_offset': 29, 'softcap': softcap, 'window_size': (9, 0)}
    assert_attention_matches(selected_attention, tensors, 'triton', **settings)


@pytest.mark.parametrize('alone', [False, True])
def test_straight_through_scale(alone: bool, device: torch.device) -> None:
    """Factors of 1 have a gradient, which includes tokens inside the window; so do sinks."""
    extents = whole(21)
    indices = make_indices(extents, 4 if alone else 2, 3, 5)
    tensors = make_inputs(extents, TWO_GROUPS, device, indices)
    tensors['block_scale'] = torch.ones(indices.shape, device=device)
    tensors['sinks'] = torch.linspace(-1, 1, TWO_GROUPS.heads, device=device)
    grads = make_grads(extents, TWO_GROUPS, device)
    settings: dict[str, Any] = {'block_size': 5, 'window_size': (6, 0), 'softcap': 1.5, 'unit_scale': True}
    assert_close_to_eager(selected_attention, tensors, grads, **settings)


@pytest.mark.parametrize(
    'extents',
    [
        packed([9, 0, 14, 1], uncovered=2),
        Extents(2, 8, 20, {'seqlens_k': row_integers([13, 20])}, [13, 20]),
        Extents(2, 8, 20, {'q_offset': row_integers([-3, 30])}, [20, 20]),
    ],
    ids=['packed', 'lengths', 'offsets'],
)
def test_extents(extents: Extents, device: torch.device) -> None:
    tensors = make_inputs(extents, TWO_GROUPS, device, make_indices(extents, 2, 3, 4))
    where = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in extents.where.items()}
    grads = make_grads(extents, TWO_GROUPS, device)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=4, window_size=(5, 0), **where)


@per_tile
@fewer_examples(0.4)
@given(extents=drawn_extents(max_seqlen=14), left=st.integers(-1, 15), block_size=st.sampled_from([3, 8]))
def test_random_problems(extents: Extents, left: int, block_size: int) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    heads = Heads(2, 1, 16, 16)
    tensors = make_inputs(extents, heads, device, make_indices(extents, 1, 2, block_size))
    where = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in extents.where.items()}
    grads = make_grads(extents, heads, device)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=block_size, window_size=(left, 0), **where)


@per_tile
@pytest.mark.plain_memory
def test_registered_op(device: torch.device) -> None:
    extents = whole(12)
    tensors = make_inputs(extents, Heads(2, 1, 16, 16), device, make_indices(extents, 1, 2, 4))
    q, k, v, indices = (tensors[name] for name in ('q', 'k', 'v', 'block_indices'))
    flat = merged.flatten(make_sequences(extents, device))
    scale, sinks = torch.ones(indices.shape, device=device), torch.zeros(2, device=device)
    arguments = (q.requires_grad_(), k, v, indices, scale, sinks, *flat, 3, 4, 0.25, 2.0, False, True)
    torch.library.opcheck(merged._forward, arguments)


@per_tile
@pytest.mark.parametrize(
    ('settings', 'reason'),
    [
        ({'causal': False, 'window_size': (3, 3)}, 'causal is False, but with window_size its kernels are causal'),
        ({'block_scale': None}, 'block_scale may differ from 1'),
        ({'dropout_p': 0.5}, 'dropout_p is 0.5, but with window_size its kernels drop no weights'),
    ],
)
def test_refusals(settings: dict[str, Any], reason: str, device: torch.device) -> None:
    extents = whole(8)
    tensors = make_inputs(extents, Heads(2, 1, 16, 16), device, make_indices(extents, 1, 2, 4))
    if 'block_scale' in settings:
        settings = {'block_scale': torch.ones(tensors['block_indices'].shape, device=device)}
    with pytest.raises(ValueError, match=reason):
        selected_attention(**tensors, block_size=4, **{'window_size': (3, 0), **settings}, backend='triton')
