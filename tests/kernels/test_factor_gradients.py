"""Gradient of the factors of selected blocks. Merged: before the window by every design, and inside the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.merged import dscale
from tests.support.harness import assert_close_to_eager, fewer_examples, make_grads, run_triton
from tests.support.problems import Extents, Heads, drawn_extents, packed, row_integers, whole
from tests.support.selected_attention_problems import SHARES_OFTEN, make_indices, make_inputs

# Block size and window: some selected blocks are inside the window as a whole, or none is.
OVERLAPS = {'blocks inside': (3, 11), 'blocks across': (8, 5)}
EXTENTS = {
    'whole': whole(26),
    'packed': packed([9, 0, 14, 1], uncovered=2),
    'lengths': Extents(2, 8, 20, {'seqlens_k': row_integers([13, 20])}, [13, 20]),
    'offsets': Extents(2, 8, 20, {'q_offset': row_integers([-3, 30])}, [20, 20]),
}


def force(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call take one design, and most tiles the union where it is mixed."""
    monkeypatch.setattr(plan, 'choose_design', lambda *_, **__: design)
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', SHARES_OFTEN)


def make_problem(
    extents: Extents, heads: Heads, device: torch.device, indices: Tensor, **inputs: Any
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Any]]:
    """Return tensors with factors of 1, gradients of the results, and the arguments that place the queries."""
    tensors = make_inputs(extents, heads, device, indices, **inputs)
    tensors['block_scale'] = torch.ones(indices.shape, device=device)
    where = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in extents.where.items()}
    dtype = tensors['q'].dtype
    return tensors, make_grads(extents, heads, device, dtype), {**where, 'unit_scale': True}


@pytest.mark.parametrize('kind', EXTENTS)
@pytest.mark.parametrize('features', ['plain', 'softcap, sinks'])
@pytest.mark.parametrize('overlap', OVERLAPS)
@pytest.mark.parametrize('group', [1, 2, 4, 8, 16])
@pytest.mark.parametrize('design', plan.DESIGNS)
def test_every_design(
    design: str,
    group: int,
    overlap: str,
    features: str,
    kind: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(design, monkeypatch)
    extents, heads = EXTENTS[kind], Heads(2 * group, 2, 16, 16)
    block_size, window = OVERLAPS[overlap]
    indices = make_indices(extents, 2, 5, block_size)
    tensors, grads, settings = make_problem(extents, heads, device, indices)
    if features != 'plain':
        settings['softcap'] = 1.5
        tensors['sinks'] = torch.linspace(-1, 1, heads.heads, device=device)
    assert_close_to_eager(
        selected_attention, tensors, grads, block_size=block_size, window_size=(window - 1, 0), **settings
    )


@pytest.mark.parametrize('design', plan.DESIGNS)
def test_heads_that_select_alone_in_half_precision(
    design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(design, monkeypatch)
    extents, heads = whole(40), Heads(4, 2, 32, 16)
    indices = make_indices(extents, 4, 3, 16)
    tensors, grads, settings = make_problem(extents, heads, device, indices, dtype=torch.float16)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=16, window_size=(9, 0), **settings)


@pytest.mark.parametrize('design', plan.DESIGNS)
def test_delta_is_exact(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding changes the output by more than values differ, and delta as far as it is computed from the output."""
    force(design, monkeypatch)
    extents, heads = whole(30), Heads(4, 2, 16, 16)
    indices = make_indices(extents, 2, 3, 4)
    tensors, grads, _ = make_problem(extents, heads, device, indices, dtype=torch.float16)
    tensors['v'] = 30 + tensors['v']
    tensors['block_scale'] += 0.5 * torch.rand(indices.shape).to(device)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=4)


@pytest.mark.parametrize('design', ['query', 'union'])
def test_blocks_of_several_tiles(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(design, monkeypatch)
    extents, heads = Extents(1, 12, 150, {'q_offset': 130}, [150]), Heads(4, 2, 16, 24)
    tensors, grads, settings = make_problem(extents, heads, device, make_indices(extents, 2, 3, 70))
    assert_close_to_eager(selected_attention, tensors, grads, block_size=70, window_size=(80, 0), **settings)


def test_more_heads_than_rows_in_a_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force('query', monkeypatch)
    extents, heads = whole(10), Heads(70, 1, 16, 16)
    tensors, grads, settings = make_problem(extents, heads, device, make_indices(extents, 1, 3, 3))
    assert_close_to_eager(selected_attention, tensors, grads, block_size=3, window_size=(4, 0), **settings)


@pytest.mark.parametrize('most', [1, 16, 64])
def test_tiles_of_few_queries(most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many indices leave room for few queries in a tile."""
    force('query', monkeypatch)
    monkeypatch.setattr(plan, 'MAX_TILE_INDICES', most)
    extents, heads = whole(19), Heads(2, 1, 16, 16)
    tensors, grads, settings = make_problem(extents, heads, device, make_indices(extents, 1, 9, 2))
    assert_close_to_eager(selected_attention, tensors, grads, block_size=2, window_size=(6, 0), **settings)


@pytest.mark.quick
@fewer_examples(0.4)
@given(
    design=st.sampled_from(plan.DESIGNS),
    extents=drawn_extents(max_seqlen=14),
    left=st.integers(-1, 15),
    block_size=st.sampled_from([3, 8]),
)
def test_random_problems(design: str, extents: Extents, left: int, block_size: int) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    heads = Heads(2, 1, 16, 16)
    tensors, grads, settings = make_problem(extents, heads, device, make_indices(extents, 1, 2, block_size))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if extents.seqlen_k:
            force(design, monkeypatch)
        assert_close_to_eager(
            selected_attention, tensors, grads, block_size=block_size, window_size=(left, 0), **settings
        )


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
@pytest.mark.parametrize('name', ['k', 'v'])
@pytest.mark.parametrize('design', plan.DESIGNS)
def test_keys_of_other_queries(
    design: str, name: str, junk: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is not finite changes nothing in queries of the same tile that do not read it."""
    force(design, monkeypatch)
    extents, heads = whole(24), Heads(4, 2, 16, 16)
    indices = torch.arange(3, dtype=torch.int32).expand(1, 24, 2, 3)
    tensors, grads, settings = make_problem(extents, heads, device, indices)
    settings |= {'block_size': 8, 'window_size': (1, 0)}
    expected = run_triton(selected_attention, tensors, grads, **settings)['grad of block_scale']
    tensors[name] = tensors[name].clone()
    tensors[name][:, 22] = junk  # of the last block, whose first keys are before the windows of queries from 18 on
    result = run_triton(selected_attention, tensors, grads, **settings)['grad of block_scale']
    reads = torch.arange(24, device=device) >= 22
    torch.testing.assert_close(result[:, ~reads], expected[:, ~reads], rtol=1e-5, atol=1e-6)
    assert not result[:, reads].isfinite().all()


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
@pytest.mark.parametrize('design', plan.DESIGNS)
def test_queries_that_are_not_finite(
    design: str, junk: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their factors have no gradient where the index names no block or repeats one."""
    force(design, monkeypatch)
    extents, heads = whole(30), Heads(4, 2, 16, 16)
    indices = torch.tensor([0, 0, -1, 5, 1, 10**6]).int().expand(1, 30, 2, 6)
    tensors, grads, settings = make_problem(extents, heads, device, indices)
    tensors['q'][:, 25, 1] = junk
    settings |= {'block_size': 4, 'window_size': (6, 0)}
    result = run_triton(selected_attention, tensors, grads, **settings)['grad of block_scale']
    is_nan = torch.zeros(indices.shape, dtype=torch.bool, device=device)
    is_nan[:, 25, 0, [0, 3, 4]] = True
    assert result.isnan().equal(is_nan)
    assert result[:, :, :, [1, 2, 5]].eq(0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU runs the compiled kernel, which has no functions')
def test_blocks_before_the_window_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no query selected a block of its window, the kernel for the keys inside it reads no key."""
    extents, heads = whole(24), Heads(4, 2, 16, 16)
    before = (torch.arange(24) - 4) // 4  # blocks of 4 that end before the window of 5 keys
    indices = torch.arange(5, dtype=torch.int32).expand(1, 24, 2, 5)
    indices = torch.where(indices < before[:, None, None], indices, -1)
    tensors, grads, settings = make_problem(extents, heads, device, indices)
    monkeypatch.setattr(dscale, '_add_keys', None)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=4, window_size=(4, 0), **settings)
    with pytest.raises(Exception, match='not callable'):
        assert_close_to_eager(selected_attention, tensors, grads, block_size=4, window_size=(5, 0), **settings)
