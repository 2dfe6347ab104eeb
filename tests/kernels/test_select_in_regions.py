"""Block selection inside regions of compressed blocks in Triton, against its definition and `select_blocks`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.call import Call, Regions, SelectionRules
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops.block_selection import triton
from native_sparse_attention.ops.block_selection.triton.in_regions import unsupported_sizes
from tests.kernels.test_select_blocks import EXTENTS
from tests.support.harness import far_apart, fewer_examples, place
from tests.support.problems import (
    Extents,
    Heads,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    packed,
    whole,
)
from tests.support.region_problems import assert_selects_as_well, in_regions, select_in_regions
from tests.support.select_blocks_problems import HEADS, SIZES, Problem


def at_end(num_queries: int, num_tokens: int, batch: int = 1) -> Extents:
    """The last queries of a sequence."""
    return Extents(batch, num_queries, num_tokens, {}, [num_tokens] * batch)


def select(problem: Problem, backend: str = 'triton', **choice: Any) -> Tensor:
    tensors, settings = problem
    return select_in_regions(**tensors, **settings, **choice, backend=backend)


def select_from_all(problem: Problem, **choice: Any) -> Tensor:
    tensors, settings = problem
    given: dict[str, Any] = {**tensors, **settings}
    del given['regions'], given['region_size']
    return select_blocks(**given, **choice, backend='triton')


def assert_equals_definition(problem: Problem, **choice: Any) -> Tensor:
    """For problems whose scores are counts."""
    result = select(problem, **choice)
    assert result.dtype == torch.int32
    assert torch.equal(result, select(problem, 'eager', **choice))
    return result


def assert_as_good_as_definition(problem: Problem, **choice: Any) -> None:
    assert_selects_as_well(select(problem, **choice), problem, **choice)


@pytest.mark.quick
@pytest.mark.parametrize('group', [1, 2, 4, 16])
@pytest.mark.parametrize('exact', [True, False])
def test_groups(exact: bool, group: int, device: torch.device) -> None:
    heads = Heads(2 * group, 2, 16, 16)
    problem = in_regions(at_end(6, 100), heads, SIZES, device, region_size=4, num_regions=4, exact=exact)
    if exact:
        result = assert_equals_definition(problem, num_selected=6)
        # Other blocks than those of the whole sequence.
        assert not torch.equal(result, select_from_all(problem, num_selected=6))
    else:
        assert_as_good_as_definition(problem, num_selected=6)


@pytest.mark.parametrize('head_dim', [40, 64, 128])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_head_sizes(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    problem = in_regions(at_end(4, 100), Heads(4, 1, head_dim, 1), (8, 4, 8), device, region_size=6, exact=True)
    tensors, settings = problem
    tensors = {name: t.to(dtype) if name in ('q', 'k_cmp') else t for name, t in tensors.items()}
    assert_equals_definition((tensors, settings), num_selected=5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ('sizes', 'region_size'),
    [
        ((32, 16, 64), 64),
        ((4, 2, 4), 2),
        ((4, 1, 4), 8),
        ((6, 2, 8), 12),
        ((5, 5, 5), 7),
        ((8, 4, 12), 9),
        ((1, 1, 1), 3),
        ((9, 1, 2), 4),
        ((16, 2, 4), 2),
        ((4, 2, 4), 70),
    ],
)
@pytest.mark.parametrize('causal', [True, False])
def test_block_sizes(causal: bool, sizes: tuple[int, int, int], region_size: int, device: torch.device) -> None:
    length = min(5 * region_size * sizes[1] + 3 * sizes[2] + 3, 400)
    extents = at_end(3, length + 2)
    problem = in_regions(extents, Heads(2, 1, 16, 1), sizes, device, region_size=region_size, exact=True, causal=causal)
    assert_equals_definition(problem, num_selected=5)
    assert_equals_definition(problem, num_selected=6, num_init=0, num_local=0)


def test_keys_of_a_block_in_several_tiles(device: torch.device) -> None:
    """Tiles of fewer keys than a selection block, in regions of one block and of two."""
    for region_size in (80, 160):
        problem = in_regions(
            at_end(3, 500), Heads(2, 1, 16, 1), (4, 1, 80), device, region_size=region_size, exact=True
        )
        assert_equals_definition(problem, num_selected=4, num_local=1)


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('exact', [True, False])
def test_every_region_is_the_whole(exact: bool, share_group: bool, causal: bool, device: torch.device) -> None:
    """The same blocks as `select_blocks`, also where no compressed block is visible."""
    for extents in (whole(14), at_end(5, 90), packed([9, 0, 13], uncovered=1)):
        problem = in_regions(
            extents,
            HEADS,
            SIZES,
            device,
            region_size=4,
            share_group=share_group,
            exact=exact,
            every=True,
            causal=causal,
        )
        choices: tuple[dict[str, Any], ...] = ({'num_selected': 4}, {'num_selected': 5, 'num_init': 0, 'num_local': 0})
        for choice in choices:
            assert torch.equal(select(problem, **choice), select_from_all(problem, **choice))


@pytest.mark.parametrize(
    'choice',
    [
        {'num_selected': 1},
        {'num_selected': 2, 'num_init': 3},
        {'num_selected': 3, 'num_init': 1, 'num_local': 5},
        {'num_selected': 9, 'num_init': 2, 'num_local': 30},
        {'num_selected': 8, 'num_init': 40, 'num_local': 2},
        {'num_selected': 7, 'num_init': 0, 'num_local': 0},
        {'num_selected': 40},
        {'num_selected': 40, 'num_init': 0, 'num_local': 0},
        {'num_selected': 5, 'num_init': 4, 'num_local': 1},
        {'num_selected': 0},
    ],
)
@pytest.mark.parametrize('causal', [True, False])
def test_forced_blocks_and_few_candidates(causal: bool, choice: dict[str, Any], device: torch.device) -> None:
    """Forced blocks may lie outside of the read regions; rows are padded where candidates are missing."""
    heads = Heads(2, 1, 16, 1)
    problem = in_regions(at_end(4, 90), heads, SIZES, device, region_size=2, exact=True, causal=causal)
    result = assert_equals_definition(problem, **choice)
    if choice['num_selected'] == 40:
        assert (result[..., -1] == -1).all()
        tensors, settings = problem
        # Without the first and the newest region.
        few = tensors | {'regions': tensors['regions'][..., 1:2].contiguous()}
        assert_equals_definition((few, settings), **choice)


@pytest.mark.parametrize('num_recent', [1, 5, 64, 2**31])
def test_candidates_before_a_window(num_recent: int, device: torch.device) -> None:
    problem = in_regions(at_end(4, 90), HEADS, SIZES, device, region_size=4, exact=True)
    assert_equals_definition(problem, num_selected=5, num_recent=num_recent)


@pytest.mark.parametrize('share_group', [True, False])
def test_ties_go_to_the_lower_block(share_group: bool, device: torch.device) -> None:
    problem = in_regions(at_end(3, 130), HEADS, SIZES, device, region_size=4, num_regions=9, share_group=share_group)
    tensors, settings = problem
    tensors['k_cmp'] = tensors['k_cmp'][:, :1].expand_as(tensors['k_cmp'])
    result = assert_equals_definition((tensors, settings), num_selected=12, num_init=0, num_local=0)
    assert (result >= 0).all()


def test_candidates_of_several_rankings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from native_sparse_attention.ops._triton.launch import Settings
    from native_sparse_attention.ops.block_selection.triton import settings

    table = {key: Settings(2, 16, *rest) for key, (_, _, *rest) in settings.IN_REGIONS.items()}
    problem = in_regions(at_end(4, 200), HEADS, SIZES, device, region_size=20, num_regions=4, exact=True)
    expected = assert_equals_definition(problem, num_selected=7)
    monkeypatch.setattr(settings, 'IN_REGIONS', table)
    assert torch.equal(select(problem, num_selected=7), expected)


@pytest.mark.parametrize('counts', [0, 2, 9, 'rows'])
def test_block_counts(counts: Any, device: torch.device) -> None:
    problem = in_regions(at_end(5, 90), HEADS, SIZES, device, region_size=4, exact=True)
    if counts == 'rows':
        counts = torch.randint(-1, 8, (1, 5, 2), dtype=torch.int32, device=device)
        assert_equals_definition(problem, num_selected=6, block_counts=place(counts, device))
        return
    assert_equals_definition(problem, num_selected=6, block_counts=torch.full((1, 5, 2), counts, device=device))


@pytest.mark.quick
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize('causal', [True, False])
def test_query_offsets_and_lengths(causal: bool, extents: Extents, device: torch.device) -> None:
    problem = in_regions(extents, Heads(2, 1, 16, 16), SIZES, device, region_size=4, exact=True, causal=causal)
    assert_equals_definition(problem, num_selected=4)


@fewer_examples(0.4)
@given(
    extents=drawn_extents(max_seqlen=30),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(largest=6),
    blocks_of_region=st.integers(1, 3),
    num_regions=st.integers(1, 4),
    num_selected=st.integers(0, 6),
    num_init=st.integers(0, 3),
    num_local=st.integers(0, 3),
    num_recent=st.integers(0, 9),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
def test_drawn_problems(
    extents: Extents,
    heads: Heads,
    sizes: tuple[int, int, int],
    blocks_of_region: int,
    num_regions: int,
    share_group: bool,
    causal: bool,
    softcap: float | None,
    **choice: Any,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    region: dict[str, Any] = {'region_size': blocks_of_region * (sizes[2] // sizes[1]), 'num_regions': num_regions}
    problem = in_regions(extents, heads, sizes, device, share_group=share_group, causal=causal, **region)
    problem[1]['softcap'] = softcap
    choice['num_recent'] *= causal
    assert_as_good_as_definition(problem, **choice)


@pytest.mark.quick
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_unread_keys_change_nothing(junk: float, device: torch.device) -> None:
    tensors, settings = in_regions(at_end(1, 90), Heads(4, 1, 16, 1), SIZES, device, region_size=4)
    expected = select((tensors, settings), num_selected=6)
    region = torch.arange(tensors['k_cmp'].shape[1], device=device) // 4
    is_read = (tensors['regions'][0, 0, 0] == region[:, None]).any(1)
    spoiled = tensors | {'k_cmp': tensors['k_cmp'].masked_fill(~is_read[:, None, None], junk)}
    assert torch.equal(select((spoiled, settings), num_selected=6), expected)


def test_a_score_that_is_not_finite_is_the_largest(device: torch.device) -> None:
    tensors, settings = in_regions(at_end(2, 60), Heads(1, 1, 16, 1), SIZES, device, region_size=4, every=True)
    tensors['k_cmp'][:, 9] = torch.nan
    result = select((tensors, settings), num_selected=4, num_init=0, num_local=1)
    assert (result == 4).any(-1).all()
    assert (result == 5).any(-1).all()


def test_rows_do_not_depend_on_others(device: torch.device) -> None:
    tensors, settings = in_regions(at_end(4, 60, batch=2), HEADS, SIZES, device, region_size=4)
    together = select((tensors, settings), num_selected=5)
    assert torch.equal(select((tensors, settings), num_selected=5), together)
    alone = {name: t[1:] for name, t in tensors.items()}
    assert torch.equal(select((alone, settings), num_selected=5), together[1:])
    last = {'q': tensors['q'][:, 2:], 'lse': tensors['lse'][..., 2:], 'regions': tensors['regions'][:, 2:]}
    assert torch.equal(select((tensors | last, settings), num_selected=5), together[:, 2:])


@pytest.mark.parametrize('causal', [True, False])
def test_any_content_stays_inside_memory(causal: bool, device: torch.device) -> None:
    """Regions that do not exist, are not ascending, repeat each other or lie in the future."""
    tensors, settings = in_regions(whole(12, batch=2), HEADS, SIZES, device, region_size=4, causal=causal)
    junk = torch.tensor([[2**31 - 1, -(2**31), 0], [1, 0, 0], [-1, 1, 7], [0, 100, -5]], dtype=torch.int32)
    tensors['regions'] = place(junk[torch.randint(len(junk), (2, 12, 2))], device)
    result = select((tensors, settings), num_selected=4)
    assert ((result >= -1) & (result < 3)).all()
    content = {name: torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32) for name in ('seqlens_k', 'q_offset')}
    sequences = Sequences(2, 12, 2**63 - 1, device, **place(content, device))
    call, rules = Call(sequences, causal, 0.25), SelectionRules(3, 1, 2, 0, share_group=True)
    q, k_cmp, lse, regions = tensors.values()
    result = triton.select_in_regions(q, k_cmp, lse, Regions(regions, 4), SIZES, call, rules)
    assert (result >= -1).all()


def test_offsets_beyond_int32(device: torch.device) -> None:
    tensors, settings = in_regions(at_end(3, 70), HEADS, SIZES, device, region_size=4)
    expected = select((tensors, settings), num_selected=5)
    for name in ('q', 'k_cmp'):
        far = tensors | {name: far_apart(tensors[name], 1)}
        assert torch.equal(select((far, settings), num_selected=5), expected), name


def test_layouts(device: torch.device) -> None:
    tensors, settings = in_regions(at_end(4, 70, batch=2), HEADS, SIZES, device, region_size=4)
    expected = select((tensors, settings), num_selected=5)
    moved = {name: t.mT.contiguous().mT for name, t in tensors.items()}
    assert torch.equal(select((moved, settings), num_selected=5), expected)


@pytest.mark.parametrize('extents', [whole(0), whole(3), Extents(0, 3, 3, {}, [])])
def test_nothing_to_select(extents: Extents, device: torch.device) -> None:
    problem = in_regions(extents, HEADS, SIZES, device, region_size=4, num_regions=1, exact=True)
    assert_equals_definition(problem, num_selected=3)
    tensors, settings = problem
    assert_equals_definition((tensors | {'k_cmp': tensors['k_cmp'][:, :0]}, settings), num_selected=3, num_local=0)


def test_no_gradient(device: torch.device) -> None:
    tensors, settings = in_regions(at_end(3, 60), HEADS, SIZES, device, region_size=4)
    leaves = {name: t.requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    assert not select((leaves, settings), num_selected=3).requires_grad


def test_sizes_that_the_kernel_does_not_support() -> None:
    assert unsupported_sizes((32, 16, 64)) is None
    assert unsupported_sizes((128, 1, 1)) is None
    reason = unsupported_sizes((129, 1, 1))
    assert reason is not None
    assert 'compress_block_size is 129' in reason
