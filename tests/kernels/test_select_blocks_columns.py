"""Block selection by columns: rows that select many blocks of one column, and the kernel's helper functions."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from math import comb
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops.block_selection.triton import select
from native_sparse_attention.ops.block_selection.triton.group_columns import load_group_queries, sum_group_heads
from native_sparse_attention.ops.block_selection.triton.topk import MAX_LEVELS, count_levels
from tests.support.harness import place
from tests.support.problems import Extents, Heads, packed, row_integers, whole
from tests.support.select_blocks_problems import Problem, choose, make_counts, settings_of

GROUP = 8
# Selection blocks of a tile of float32 inputs with small heads; a tile does not select its first one.
COLUMNS = 31
SIZES = (2, 1, 2)


def make_scores(levels: Tensor, device: torch.device) -> Problem:
    """Return a query behind all blocks with scores ordered as `levels`, whole numbers `[blocks]`. A block's first
    compressed key has the weight 2 ** level, a quarter of which counts for the block before, and its second key has
    weight 0.
    """
    num_blocks = len(levels)
    k_cmp = torch.full((2 * num_blocks - 1,), -1000.0)
    k_cmp[::2] = levels.float()
    q = torch.ones(1, 1, GROUP, 1)
    tensors = {'q': q, 'k_cmp': k_cmp[None, :, None, None], 'lse': torch.zeros(1, GROUP, 1)}
    extents = Extents(1, 1, 2 * num_blocks, {}, [2 * num_blocks])
    return place(tensors, device), settings_of(SIZES, extents, device, scale=0.6931471805599453)


def one_column(num_blocks: int, column: int) -> Tensor:
    return torch.arange(num_blocks) % COLUMNS == column


@pytest.mark.quick
@pytest.mark.parametrize('num_selected', [1, 3, 5, 9, 16])
@pytest.mark.parametrize('direction', [1, -1])
def test_rows_that_take_many_blocks_of_one_column(num_selected: int, direction: int, device: torch.device) -> None:
    assert 0 < count_levels(num_selected, COLUMNS + 1) <= MAX_LEVELS
    num_blocks = 14 * COLUMNS
    rising = torch.arange(num_blocks) // COLUMNS * direction
    for column in (0, 7, COLUMNS - 1):
        levels = torch.where(one_column(num_blocks, column), 20 + rising, rising % 3)
        problem = make_scores(levels, device)
        result = choose(problem, num_selected=num_selected, num_init=0, num_local=0)
        assert torch.equal(result, choose(problem, 'eager', num_selected=num_selected, num_init=0, num_local=0))
        best = levels.float().topk(min(num_selected, 14)).indices
        assert set(best.tolist()) <= set(result.flatten().tolist())


def test_equal_blocks_of_one_column_and_of_others(device: torch.device) -> None:
    """Ties go to the lower block, in whichever pass a column returns it."""
    num_blocks = 14 * COLUMNS
    generator = torch.Generator().manual_seed(0)
    for share in (0.02, 0.3):
        others = torch.rand(num_blocks, generator=generator) < share
        levels = torch.where(one_column(num_blocks, 5) | others, 4, 0)
        problem = make_scores(levels, device)
        for forced in ({'num_init': 0, 'num_local': 0}, {'num_init': 2, 'num_local': 3}):
            result, expected = (choose(problem, backend, num_selected=12, **forced) for backend in ('triton', 'eager'))
            assert torch.equal(result, expected)


@pytest.mark.parametrize('levels', [1, 2])
def test_columns_of_score_0(levels: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks tie, so rows select the first ones; the first column holds more of them than it keeps."""
    monkeypatch.setattr(select, 'count_levels', lambda *_: levels)
    problem = make_scores(torch.full((8 * COLUMNS,), -10000), device)
    for num_selected in (COLUMNS + 1, 2 * COLUMNS + 3):
        result = choose(problem, num_selected=num_selected, num_init=0, num_local=0)
        assert result.flatten().tolist() == list(range(num_selected))


def test_what_has_columns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found, launch = [], select.launch

    def spy(*args: Any, **meta: Any) -> Any:
        found.append(meta['LEVELS'])
        return launch(*args, **meta)

    monkeypatch.setattr(select, 'launch', spy)
    for group, num_selected in ((GROUP, 5), (1, 5), (GROUP, 512)):
        problem = make_counts(whole(9), Heads(group, 1, 4, 4), SIZES, device)
        choose(problem, num_selected=num_selected)
    assert found[0] == found[1] > 0
    assert found[2] == 0


DESCRIBED = {
    'alone': (whole(90, batch=2), (4, 2, 8)),
    'packed': (packed([33, 0, 1, 70, 7], uncovered=4), (4, 2, 8)),
    'three keys a block': (Extents(2, 20, 95, {'q_offset': row_integers([60, -5])}, [95, 95]), (4, 2, 6)),
    'reaching beyond a block': (packed([50, 41], uncovered=0), (8, 2, 4)),
}


@pytest.mark.quick
@pytest.mark.parametrize('case', DESCRIBED)
@pytest.mark.parametrize('group', [2, 9])
def test_keys_by_descriptor(case: str, group: int, described: list[Tensor], device: torch.device) -> None:
    """For half types only: float32 products take no operand from shared memory."""
    extents, sizes = DESCRIBED[case]
    tensors, settings = make_counts(extents, Heads(2 * group, 2, 8, 8), sizes, device)
    expected = choose((tensors, settings), num_selected=4)
    assert not described
    assert torch.equal(choose((tensors, settings), 'eager', num_selected=4), expected)
    half = {**tensors, 'q': tensors['q'].half(), 'k_cmp': tensors['k_cmp'].half()}
    assert torch.equal(choose((half, settings), num_selected=4), expected)
    assert len(described) == 1


@pytest.mark.parametrize('group', [1, GROUP])
def test_an_infinite_weight_counts_for_its_own_blocks(group: int, device: torch.device) -> None:
    """The log-sum-exp is not that of the keys."""
    k_cmp = torch.zeros(1, 10, 1, 1)
    k_cmp[:, 6] = 200
    tensors = {'q': torch.ones(1, 1, group, 1), 'k_cmp': k_cmp, 'lse': torch.zeros(1, group, 1)}
    problem = place(tensors, device), settings_of((2, 2, 4), Extents(1, 1, 20, {}, [20]), device, scale=1.0)
    for backend in ('eager', 'triton'):
        assert choose(problem, backend, num_selected=2, num_init=0, num_local=0).flatten().tolist() == [0, 3]


def test_counts_of_rows_that_take_many_blocks_of_one_column(device: torch.device) -> None:
    num_blocks = 14 * COLUMNS
    levels = torch.where(one_column(num_blocks, 3), torch.arange(num_blocks) // COLUMNS, 0)
    problem = make_scores(levels, device)
    for count in (-2, 0, 1, 5, 6, 11, 40):
        counts = torch.full((1, 1, 1), count, device=device)
        result, expected = (
            choose(problem, backend, num_selected=12, block_counts=counts) for backend in ('triton', 'eager')
        )
        assert torch.equal(result, expected)


def test_rows_of_a_tile_need_different_numbers_of_passes(device: torch.device) -> None:
    """Queries of one tile, each with its own feature: some select blocks of one column, others unrelated blocks."""
    num_blocks, queries = 14 * COLUMNS, 4
    generator = torch.Generator().manual_seed(1)
    levels = torch.rand(num_blocks, queries, generator=generator) * 4
    levels[one_column(num_blocks, 9), 1] += 8
    levels[one_column(num_blocks, 20) | one_column(num_blocks, 21), 3] += 8
    k_cmp = torch.full((2 * num_blocks - 1, queries), -1000.0)
    k_cmp[::2] = levels.round(decimals=1)
    q = torch.eye(queries)[None, :, None].expand(1, queries, GROUP, queries).contiguous()
    tensors = {'q': q, 'k_cmp': k_cmp[None, :, None], 'lse': torch.zeros(1, GROUP, queries)}
    extents = Extents(1, queries, 2 * num_blocks, {}, [2 * num_blocks])
    problem = place(tensors, device), settings_of(SIZES, extents, device, scale=1.0)
    result = choose(problem, num_selected=13)
    assert torch.equal(result, choose(problem, 'eager', num_selected=13))
    for query in range(queries):
        alone = {'q': q[:, query : query + 1], 'k_cmp': tensors['k_cmp'], 'lse': tensors['lse'][..., query : query + 1]}
        where = {**problem[1], 'q_offset': 2 * num_blocks - queries + query}
        assert torch.equal(choose((place(alone, device), where), num_selected=13), result[:, query : query + 1])


def test_how_many_levels_a_column_has() -> None:
    for num_selected in (1, 2, 4, 8, 16, 24, 32, 64, 512):
        for columns in (16, 32, 64):
            levels = count_levels(num_selected, columns)
            assert levels <= MAX_LEVELS
            if levels > 0:
                assert levels == num_selected or 100 * comb(num_selected, levels) <= columns ** (levels - 1)
                assert levels == 1 or 100 * comb(num_selected, levels - 1) > columns ** (levels - 2)
    assert (count_levels(16, 64), count_levels(32, 64), count_levels(16, 32)) == (4, 6, 5)
    assert count_levels(512, 64) == 0


@pytest.mark.parametrize('per_selection', [1, 3, 4])
@pytest.mark.parametrize('num_compressed', [1, 2, 4, 11, 12])
def test_keys_of_a_step_are_neighbours(per_selection: int, num_compressed: int, device: torch.device) -> None:
    k_cmp = torch.randn(2, num_compressed, 3, 5, device=device)
    keys = select.spread_keys(k_cmp, per_selection)
    assert keys.shape == (2, 3, per_selection, -(-num_compressed // per_selection), 5)
    assert keys.is_contiguous()
    for key in range(num_compressed):
        assert torch.equal(keys[:, :, key % per_selection, key // per_selection], k_cmp[:, key])


@triton.jit
def columns_kernel(
    q_ptr, lse_ptr, out_ptr, sums_ptr, num_queries, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr
):
    """q: `[queries, GROUP, 16]`; lse: `[GROUP, queries]`; out: `[2, T]`, sums over heads of q's first column and of
    log-sum-exps; sums: the mask's.
    """
    q, lse, mask = load_group_queries(
        (q_ptr, GROUP * 16, 16), (lse_ptr, 1, num_queries), 0, 0, num_queries, 0, GROUP, 16, BLOCK_T, BLOCK_G, 16
    )
    first = tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, q, 0.0), 1)
    lse = tl.where(mask, lse, 0.0)
    rows = tl.arange(0, 2)[:, None]
    both = tl.where(rows == 0, first[None, :], lse[None, :])
    places = rows * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    tl.store(out_ptr + places, sum_group_heads(both, BLOCK_T, BLOCK_G))
    tl.store(
        sums_ptr + places, sum_group_heads(tl.where(rows == 0, mask[None, :].to(tl.float32), 0.0), BLOCK_T, BLOCK_G)
    )


@pytest.mark.parametrize(('group', 'block_g'), [(1, 1), (2, 2), (3, 4), (8, 8), (13, 16), (64, 64)])
@pytest.mark.parametrize('block_t', [1, 2, 4, 16])
def test_every_query_meets_every_head_once(group: int, block_g: int, block_t: int, device: torch.device) -> None:
    num_queries = max(1, block_t - 1)
    q = torch.randint(-9, 9, (num_queries, group, 16), device=device).float()
    lse = torch.randint(-9, 9, (group, num_queries), device=device).float()
    out, sums = torch.empty(2, block_t, device=device), torch.empty(2, block_t, device=device)
    columns_kernel[(1,)](q, lse, out, sums, num_queries, GROUP=group, BLOCK_T=block_t, BLOCK_G=block_g)  # pyright: ignore[reportArgumentType]
    assert sums[0].tolist() == [group] * num_queries + [0] * (block_t - num_queries)
    torch.testing.assert_close(out[0, :num_queries], q[:, :, 0].sum(1))
    torch.testing.assert_close(out[1, :num_queries], lse.sum(0) * 1.4426950408889634)
