"""`chosen_scores` and `straight_through_scale` of compressed blocks in the regions that a query reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import chosen_scores
from native_sparse_attention.ops.block_selection.triton import scores
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    far_apart,
    fence,
    fewer_examples,
    run_eager,
    run_triton,
)
from tests.support.problems import Extents, Heads, drawn_block_sizes, drawn_extents, drawn_heads, packed, whole
from tests.support.region_problems import in_regions, scores_in_regions
from tests.support.select_blocks_problems import HEADS, SIZES, Problem


def make_problem(
    extents: Extents,
    heads: Heads,
    sizes: tuple[int, int, int],
    device: torch.device,
    num_selected: int = 4,
    **more: Any,
) -> Problem:
    """Return a problem with random block indices, some of them missing, too large or in the future."""
    share_group = more.get('share_group', True)
    tensors, settings = in_regions(extents, heads, sizes, device, **more)
    del settings['share_group']
    shape = (*tensors['q'].shape[:2], heads.kv_heads if share_group else heads.heads, num_selected)
    count = max(1, extents.seqlen_k // sizes[2])
    return tensors | {'block_indices': fence(torch.randint(-1, count + 2, shape, device=device).int())}, settings


def grads_of(problem: Problem) -> list[Tensor]:
    return [torch.randn(problem[0]['block_indices'].shape, device=problem[0]['q'].device)]


def check(problem: Problem, **more: Any) -> None:
    tensors, settings = problem
    assert_close_to_eager(scores_in_regions, tensors, grads_of(problem), **settings, **more)


@pytest.mark.quick
@pytest.mark.parametrize(
    ('heads', 'share_group', 'dtype'),
    [
        (Heads(1, 1, 40, 1), True, torch.float32),
        (Heads(4, 2, 64, 1), True, torch.float32),
        (Heads(16, 1, 128, 1), True, torch.float32),
        (Heads(4, 2, 16, 1), False, torch.float32),
        (Heads(4, 2, 20, 1), True, torch.float16),
        (Heads(70, 1, 16, 1), True, torch.float32),
    ],
)
def test_heads(heads: Heads, share_group: bool, dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 5, 60, {}, [60])
    tensors, settings = make_problem(extents, heads, SIZES, device, region_size=4, share_group=share_group)
    check(({n: t.to(dtype) if n in ('q', 'k_cmp') else t for n, t in tensors.items()}, settings))


@pytest.mark.parametrize(
    ('sizes', 'region_size'),
    [((32, 16, 64), 8), ((4, 2, 4), 2), ((6, 2, 8), 12), ((5, 5, 5), 7), ((9, 1, 2), 4), ((16, 2, 4), 2)],
)
@pytest.mark.parametrize('causal', [True, False])
def test_block_sizes(causal: bool, sizes: tuple[int, int, int], region_size: int, device: torch.device) -> None:
    """Blocks at the start of a region overlap blocks of regions before, which may not be read."""
    length = 5 * region_size * sizes[1] + sizes[0]
    extents = Extents(1, 4, length, {}, [length])
    check(make_problem(extents, Heads(2, 1, 16, 1), sizes, device, 8, region_size=region_size, causal=causal))


@pytest.mark.quick
@pytest.mark.parametrize('extents', [packed([0, 9, 1, 6, 0], uncovered=2), whole(11, batch=2)])
@pytest.mark.parametrize('forced', [None, (0, 1, 0), (1, 2, 0)])
def test_straight_through_scale(forced: Any, extents: Extents, device: torch.device) -> None:
    check(make_problem(extents, HEADS, SIZES, device, region_size=2, num_regions=2), forced=forced)


@fewer_examples(0.4)
@given(
    extents=drawn_extents(max_seqlen=14),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(largest=6),
    blocks_of_region=st.integers(1, 3),
    num_regions=st.integers(1, 3),
    num_selected=st.integers(0, 4),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
def test_drawn_problems(
    extents: Extents,
    heads: Heads,
    sizes: tuple[int, int, int],
    blocks_of_region: int,
    softcap: float | None,
    **more: Any,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    problem = make_problem(extents, heads, sizes, device, region_size=blocks_of_region * (sizes[2] // sizes[1]), **more)
    check(problem, softcap=softcap)


def test_every_region_is_the_whole(device: torch.device) -> None:
    problem = make_problem(Extents(1, 5, 60, {}, [60]), HEADS, SIZES, device, region_size=4, every=True)
    tensors, settings = problem
    grads = grads_of(problem)
    result = run_triton(scores_in_regions, tensors, grads, **settings)
    tensors = {name: t for name, t in tensors.items() if name != 'regions'}
    del settings['region_size']
    assert_same_bits(result, run_triton(chosen_scores, tensors, grads, **settings))


def test_unread_keys_change_nothing(device: torch.device) -> None:
    problem = make_problem(Extents(1, 1, 60, {}, [60]), Heads(2, 1, 16, 1), SIZES, device, 8, region_size=4)
    tensors, settings = problem
    grads = grads_of(problem)
    expected = run_triton(scores_in_regions, tensors, grads, **settings)
    region = torch.arange(tensors['k_cmp'].shape[1], device=device) // 4
    is_read = (tensors['regions'][0, 0, 0] == region[:, None]).any(1)
    spoiled = tensors | {'k_cmp': tensors['k_cmp'].masked_fill(~is_read[:, None, None], torch.nan)}
    assert_same_bits(run_triton(scores_in_regions, spoiled, grads, **settings), expected)
    assert (expected['grad of k_cmp'][:, ~is_read] == 0).all()


def test_no_region_is_read(device: torch.device) -> None:
    problem = make_problem(whole(9), HEADS, SIZES, device, region_size=2)
    tensors, settings = problem
    for regions in (tensors['regions'].fill_(-1), tensors['regions'][..., :0]):
        result = run_triton(scores_in_regions, tensors | {'regions': regions}, grads_of(problem), **settings)
        assert all((t == 0).all() for t in result.values())


def test_index_rows_in_many_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(packed([3, 17]), Heads(2, 1, 16, 1), (3, 1, 1), device, 3, region_size=2)
    tensors, settings = problem
    tensors['block_indices'][..., 0] = 1
    grads = grads_of(problem)
    expected = run_eager(scores_in_regions, tensors, grads, **settings)['grad of k_cmp']
    monkeypatch.setattr(scores, 'CHUNK_ROWS', {4: 8})
    monkeypatch.setattr(scores, 'WORKSPACE', 15 * 3 * 16 * 4)
    result = run_triton(scores_in_regions, tensors, grads, **settings)['grad of k_cmp']
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-6)


def test_layouts_and_offsets_beyond_int32(device: torch.device) -> None:
    problem = make_problem(Extents(1, 4, 60, {}, [60]), HEADS, SIZES, device, region_size=4)
    tensors, settings = problem
    run = partial(run_triton, scores_in_regions, grads=grads_of(problem), **settings)
    expected = run(tensors)['out0']
    moved = tensors | {'regions': tensors['regions'].mT.contiguous().mT}
    assert torch.equal(run(moved)['out0'], expected)
    far = tensors | {'regions': far_apart(tensors['regions'], 1)}
    assert torch.equal(run(far)['out0'], expected)
