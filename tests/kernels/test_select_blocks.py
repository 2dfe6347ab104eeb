"""Block selection in Triton against eager: sizes, query positions, memory layouts, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.checks import make_compressed_sequences
from native_sparse_attention.core.geometry import Sequences, forced_priority
from native_sparse_attention.ops import chosen_scores, compressed_attention, select_blocks
from native_sparse_attention.testing import LAYOUTS
from tests.support.harness import place
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    packed,
    row_integers,
    whole,
)
from tests.support.select_blocks_problems import (
    HEADS,
    SIZES,
    Problem,
    Sizes,
    choose,
    make_counts,
    make_problem,
    settings_of,
)

# Selection blocks of a tile of float32 inputs with small heads.
TILE = 32


def assert_equals_eager(problem: Problem, **selection: Any) -> Tensor:
    result, expected = (choose(problem, backend, **selection) for backend in ('triton', 'eager'))
    assert result.dtype == torch.int32
    assert torch.equal(result, expected)
    return result


def assert_as_good_as_eager(problem: Problem, tolerance: float = 1e-5, **selection: Any) -> None:
    """Assert that the selected blocks equal eager's, except where scores differ by less than float32 roundings. Forced
    blocks, the number of blocks and their order are equal.
    """
    tensors, settings = problem
    result = choose(problem, **selection)
    exact = {name: t.double() for name, t in tensors.items()}
    expected = choose((exact, settings), 'eager', **selection)
    assert result.dtype == torch.int32
    assert result.shape == expected.shape
    if torch.equal(result, expected):
        return
    num_blocks = int(expected.max()) + 1
    assert num_blocks > int(result.max())
    member, expected_member = (_membership(t, num_blocks) for t in (result, expected))
    blocks = torch.arange(num_blocks, device=result.device)
    row = torch.where(member, blocks, num_blocks).sort(-1).values
    row = torch.nn.functional.pad(row, (0, result.shape[-1]), value=num_blocks)[..., : result.shape[-1]]
    assert torch.equal(result, torch.where(row < num_blocks, row, -1).int())
    assert torch.equal(member.sum(-1), expected_member.sum(-1))
    missed, taken = expected_member & ~member, member & ~expected_member
    position = positions(problem)[..., None, None] - selection.get('num_recent', 0)
    own_block = position // settings['selection_block_size']
    forced = [selection.get('num_init', 1), selection.get('num_local', 2), settings.get('causal', True)]
    assert not ((missed | taken) & (forced_priority(blocks, own_block, *forced) > 0)).any()
    indices = blocks.int().expand(*result.shape[:3], num_blocks).contiguous()
    scores = chosen_scores(**exact, block_indices=indices, **settings, backend='eager')
    best, worst = scores.masked_fill(~missed, -torch.inf).amax(-1), scores.masked_fill(~taken, torch.inf).amin(-1)
    assert (best - worst <= tolerance * best)[missed.any(-1)].all()


def _membership(block_indices: Tensor, num_blocks: int) -> Tensor:
    member = torch.zeros(*block_indices.shape[:3], num_blocks + 1, dtype=torch.bool, device=block_indices.device)
    return member.scatter(-1, block_indices.long() % (num_blocks + 1), True)[..., :num_blocks]


def positions(problem: Problem) -> Tensor:
    """`[B, T]`"""
    return sequences_of(problem).layout().position


def sequences_of(problem: Problem) -> Sequences:
    tensors, settings = problem
    names = ('seqlen_k', 'q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k')
    return make_compressed_sequences(
        tensors['q'],
        tensors['k_cmp'],
        settings['compress_block_size'],
        settings['compress_stride'],
        *(settings.get(name) for name in names),
    )


@pytest.mark.quick
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(
    'sizes',
    [
        (32, 16, 64),
        (4, 1, 4),
        (4, 2, 4),
        (4, 4, 4),
        (16, 16, 16),
        (4, 1, 1),
        (2, 1, 6),
        (1, 1, 3),
        (9, 4, 8),
        (8, 2, 4),
    ],
)
def test_scores_without_rounding(sizes: Sizes, causal: bool, share_group: bool, device: torch.device) -> None:
    extents = Extents(1, 7, 12 * sizes[2] + 3, {}, [12 * sizes[2] + 3])
    problem = make_counts(extents, Heads(3, 1, 4, 4), sizes, device, causal=causal)
    assert_equals_eager(problem, num_selected=5, num_init=1, num_local=1, share_group=share_group)


@pytest.mark.parametrize('sizes', [(6, 2, 8), (5, 5, 5), (8, 3, 6), (3, 1, 2), (7, 3, 3), (10, 3, 12)])
@pytest.mark.parametrize('causal', [True, False])
def test_block_sizes(sizes: Sizes, causal: bool, device: torch.device) -> None:
    problem = make_problem(whole(41), Heads(2, 1, 16, 16), sizes, device, causal=causal)
    assert_as_good_as_eager(problem, num_selected=4)


@pytest.mark.parametrize('seqlen', [1, 6, 7, 8, 9, 11, 12, 13])
def test_lengths_around_a_block(seqlen: int, device: torch.device) -> None:
    problem = make_problem(whole(seqlen), Heads(2, 1, 16, 16), (7, 3, 6), device)
    assert_as_good_as_eager(problem, num_selected=2, num_local=1)


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(('num_init', 'num_local'), [(0, 0), (1, 2), (3, 0), (0, 3), (2, 4), (99, 99), (2**31, 2**31)])
@pytest.mark.parametrize('num_selected', [1, 3, 6])
def test_forced_blocks(num_selected: int, num_init: int, num_local: int, causal: bool, device: torch.device) -> None:
    problem = make_counts(whole(32), Heads(1, 1, 4, 4), (2, 2, 4), device, causal=causal)
    assert_equals_eager(problem, num_selected=num_selected, num_init=num_init, num_local=num_local)


@pytest.mark.quick
@pytest.mark.parametrize('num_recent', [1, 7, 40, 53, 2**31])
@pytest.mark.parametrize(('heads', 'num_selected'), [(Heads(2, 1, 16, 16), 4), (Heads(8, 1, 16, 16), 3)])
def test_selection_before_a_window(heads: Heads, num_selected: int, num_recent: int, device: torch.device) -> None:
    """With and without candidates in columns; the last size is above every position."""
    for extents in (whole(52), packed([5, 0, 47])):
        problem = make_counts(extents, heads, SIZES, device)
        for num_init, num_local in ((1, 2), (0, 0)):
            selection = {'num_selected': num_selected, 'num_init': num_init, 'num_local': num_local}
            blocks = assert_equals_eager(problem, num_recent=num_recent, **selection)
            newest = (positions(problem) - num_recent) // SIZES[2]
            assert (blocks.amax((2, 3)) <= newest.clamp(min=-1)).all()


@pytest.mark.parametrize('num_selected', [0, 1, 2, 12, 13, 14, 100])
def test_rows_with_more_and_fewer_blocks_than_selected(num_selected: int, device: torch.device) -> None:
    problem = make_counts(whole(52), Heads(1, 1, 4, 4), SIZES, device)
    result = assert_equals_eager(problem, num_selected=num_selected)
    assert result.shape == (1, 52, 1, num_selected)


def test_the_longest_rows(device: torch.device) -> None:
    extents = Extents(1, 3, 530, {}, [530])
    problem = make_counts(extents, Heads(1, 1, 4, 4), (1, 1, 1), device)
    assert_equals_eager(problem, num_selected=512)


@pytest.mark.parametrize('group', [1, 2, 3, 6, 16, 32, 64])
@pytest.mark.parametrize('share_group', [True, False])
def test_groups(group: int, share_group: bool, device: torch.device) -> None:
    heads = Heads(2 * group if group < 16 else group, 2 if group < 16 else 1, 4, 4)
    if share_group or group <= 6:
        extents = Extents(1, 4, 60, {}, [60])
        problem = make_counts(extents, heads, SIZES, device)
        assert_equals_eager(problem, num_selected=6, num_local=1, share_group=share_group)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('head_dim', [1, 3, 16, 40, 64, 100, 128, 192, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 9, 60, {}, [60])
    problem = make_problem(extents, Heads(3, 1, head_dim, 4), SIZES, device, dtype)
    assert_as_good_as_eager(problem, num_selected=5)


@pytest.mark.parametrize('seqlen', [TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 3 * TILE + 5])
@pytest.mark.parametrize('causal', [True, False])
def test_several_tiles_of_blocks(seqlen: int, causal: bool, device: torch.device) -> None:
    extents = Extents(1, 6, 2 * seqlen, {}, [2 * seqlen])
    heads, sizes = Heads(2, 1, 16, 16), (3, 1, 2)
    assert_as_good_as_eager(make_problem(extents, heads, sizes, device, causal=causal), num_selected=7)
    assert_equals_eager(make_counts(extents, heads, sizes, device, causal=causal), num_selected=7)


def test_scores_that_rise_and_that_fall(device: torch.device) -> None:
    """Every block of a later tile replaces a candidate, or none does."""
    for direction in (1, -1):
        k_cmp = torch.arange(0.0, 3 * TILE)[None, :, None, None] * direction / TILE
        tensors = {'q': torch.ones(1, 1, 1, 1), 'k_cmp': k_cmp, 'lse': torch.full((1, 1, 1), 2.0)}
        extents = Extents(1, 1, 3 * TILE, {}, [3 * TILE])
        problem = place(tensors, device), settings_of((1, 1, 1), extents, device)
        result = assert_equals_eager(problem, num_selected=40, num_init=0, num_local=0)
        expected = range(3 * TILE - 40, 3 * TILE) if direction > 0 else range(40)
        assert result.flatten().tolist() == list(expected)


@pytest.mark.quick
@pytest.mark.parametrize('share_group', [True, False])
def test_equal_scores_go_to_the_lower_block(share_group: bool, device: torch.device) -> None:
    """Equal keys with rounded scores: inner blocks still tie, and the first and the last block score less."""
    num_blocks = 2 * TILE + 20
    extents = Extents(1, 2, 4 * num_blocks, {}, [4 * num_blocks])
    tensors, settings = make_problem(extents, Heads(3, 1, 16, 16), SIZES, device)
    tensors['k_cmp'] = tensors['k_cmp'][:, :1].expand_as(tensors['k_cmp'])
    for num_selected, num_local in ((1, 0), (TILE + 2, 0), (3, 1)):
        selection: dict[str, Any] = {'num_init': 0, 'num_local': num_local, 'share_group': share_group}
        blocks = choose((tensors, settings), num_selected=num_selected, **selection)
        expected = list(range(1, num_selected + 1))
        if num_local:
            expected[-1] = num_blocks - 1
        assert blocks[0, -1].tolist() == [expected] * (1 if share_group else 3)


EXTENTS = {
    'batch': whole(40, batch=2),
    'offset': Extents(2, 20, 90, {'q_offset': 35}, [90, 90]),
    'negative offset': Extents(1, 40, 40, {'q_offset': -11}, [40]),
    'offset beyond the keys': Extents(1, 20, 40, {'q_offset': 35}, [40]),
    'keys end': Extents(2, 9, 75, {}, [75, 75]),
    'row offsets': Extents(3, 20, 60, {'q_offset': row_integers([5, -15, 61])}, [60] * 3),
    'lengths': Extents(3, 20, 70, {'seqlens_k': row_integers([70, 3, 41])}, [70, 3, 41]),
    'lengths, row offsets': Extents(
        3, 20, 70, {'seqlens_k': row_integers([70, 30, 0]), 'q_offset': row_integers([20, -5, 3])}, [70, 30, 0]
    ),
    'packed': packed([0, 0, 33, 1, 40, 0, 7, 0], uncovered=5),
    'packed, one sequence': packed([30], uncovered=30),
    'packed, short sequences': packed([1, 2, 3, 4, 5, 6, 7]),
    'packed, other keys': Extents(
        1,
        60,
        110,
        {'cu_seqlens': cumulative([0, 20, 1, 33, 0]), 'cu_seqlens_k': cumulative([7, 40, 0, 50, 9])},
        [7, 40, 0, 50, 9],
    ),
    'packed, offset': Extents(
        1, 60, 60, {'cu_seqlens': cumulative([20, 40]), 'cu_seqlens_k': cumulative([50, 10]), 'q_offset': 7}, [50, 10]
    ),
    'packed, offsets': Extents(
        1,
        50,
        90,
        {
            'cu_seqlens': cumulative([20, 0, 28]),
            'cu_seqlens_k': cumulative([50, 5, 30]),
            'q_offset': row_integers([25, 3, -4]),
        },
        [50, 5, 30],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
@pytest.mark.parametrize('causal', [True, False])
def test_query_offsets_and_lengths(causal: bool, extents: Extents, device: torch.device) -> None:
    heads = Heads(2, 1, 16, 16)
    assert_as_good_as_eager(make_problem(extents, heads, SIZES, device, causal=causal), num_selected=5)
    problem = make_counts(extents, heads, SIZES, device, causal=causal)
    assert_equals_eager(problem, num_selected=4, num_local=1)


@settings(max_examples=10)
@given(
    extents=drawn_extents(max_seqlen=40),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    pairs=st.integers(0, 2),
    num_selected=st.integers(0, 6),
    num_init=st.integers(0, 3),
    num_local=st.integers(0, 3),
    num_recent=st.integers(0, 9),
    share_group=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
    layout=st.sampled_from(LAYOUTS),
)
def test_drawn_problems(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    pairs: int,
    layout: str,
    causal: bool,
    scale: float | None,
    **selection: Any,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    where: dict[str, Any] = {'causal': causal, 'scale': scale, 'pairs': pairs, 'layout': layout}
    selection['num_recent'] *= causal
    assert_as_good_as_eager(make_problem(extents, heads, sizes, device, **where), **selection)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    problem = make_problem(whole(20, batch=2), HEADS, SIZES, device, layout=layout)
    assert_as_good_as_eager(problem, num_selected=4)


def test_memory_in_other_orders(device: torch.device) -> None:
    tensors, settings = make_problem(whole(30, batch=2), HEADS, SIZES, device)
    expected = choose((tensors, settings), num_selected=4)
    spread = {name: t.mT.contiguous().mT for name, t in tensors.items()}
    assert torch.equal(choose((spread, settings), num_selected=4), expected)
    settings['cu_seqlens'] = torch.tensor([0, 30], device=device)
    long = {name: t[:1] for name, t in tensors.items()}
    assert torch.equal(choose((long, settings), num_selected=4), expected[:1])


def test_scores_of_infinite_logits(device: torch.device) -> None:
    """An infinite score is the largest of a row, whatever its source."""
    tensors, settings = make_problem(whole(40), Heads(1, 1, 16, 16), SIZES, device)
    tensors['k_cmp'][:, 9] = torch.nan
    result = choose((tensors, settings), num_selected=4, num_init=0, num_local=1)
    assert (result[:, 24:] == 4).any(-1).all()
    assert (result[:, 24:] == 5).any(-1).all()


def test_compressed_blocks_that_end_later(device: torch.device) -> None:
    """Later compressed blocks count for nothing, also at the end of a block tile whose other blocks are visible."""
    q = torch.ones(1, 1, 1, 16, device=device)
    settings: dict[str, Any] = {'compress_block_size': 8, 'compress_stride': 4, 'selection_block_size': 8}
    settings |= {'num_selected': 1, 'num_init': 0, 'num_local': 0, 'backend': 'triton'}
    for position in range(16 * TILE - 40, 16 * TILE):
        k_cmp = torch.zeros(1, 4 * TILE + 8, 1, 16, device=device)
        k_cmp[:, 3] = 0.1
        seen = (position + 1 - 8) // 4 + 1
        k_cmp[:, seen:] = 9.0
        lse = torch.zeros(1, 1, 1, device=device)
        result = select_blocks(q, k_cmp, lse, q_offset=position, seqlen_k=16 * TILE + 36, **settings)
        assert result.tolist() == [[[[1]]]]


@pytest.mark.parametrize('group', [3, 4])
def test_scores_of_keys_that_are_infinite(group: int, device: torch.device) -> None:
    """Weights of infinite keys are 0, also for the padding of a group."""
    tensors, settings = make_problem(whole(64), Heads(group, 1, 16, 16), (4, 4, 4), device)
    tensors['q'] = tensors['q'].abs()
    tensors['k_cmp'][:, 4, 0, 3] = -torch.inf
    result = choose((tensors, settings), num_selected=3, num_init=0, num_local=1)
    assert not (result[:, 24:] == 4).any()


@pytest.mark.parametrize('logit', [6e4, -6e4])
def test_large_logits(logit: float, device: torch.device) -> None:
    """Weights of nearly 1 for one block and 0 for all others."""
    tensors, settings = make_problem(whole(40), HEADS, SIZES, device, pairs=0, scale=1.0)
    tensors['q'] = torch.full_like(tensors['q'], 6e4 / 16)
    # Whole logits, exact in float32: 0 for all blocks but the seventh, for which it is 6e4 (or of none but it -6e4).
    tensors['k_cmp'] = torch.zeros_like(tensors['k_cmp'])
    tensors['k_cmp'][:, 6] = 1 if logit > 0 else -1
    q, k_cmp = tensors['q'], tensors['k_cmp']
    _, lse = compressed_attention(q, k_cmp, k_cmp, block_size=4, stride=2, scale=1.0, backend='eager')
    tensors['lse'] = lse
    for num_selected in (1, 2, 4):
        result = choose((tensors, settings), num_selected=num_selected, num_init=0, num_local=0)
        if logit > 0:
            # Compressed block 6 covers the tokens of selection block 3 and no others.
            assert (result[:, 16:] == 3).any(-1).all()
            assert num_selected == 1 or (result[:, 16:] == 0).any(-1).all()
        else:
            # Its neighbours still share tokens with selection block 3, which scores less than all inner ones.
            assert not (result[:, 24:] == 3).any()


def test_no_compressed_block(device: torch.device) -> None:
    tensors, settings = make_problem(whole(9, batch=2), Heads(2, 1, 3, 3), (16, 2, 2), device)
    tensors['k_cmp'] = tensors['k_cmp'][:, :0]
    assert_equals_eager((tensors, settings), num_selected=3, num_init=0, num_local=1)


def test_no_queries(device: torch.device) -> None:
    extents = Extents(2, 0, 40, {}, [40, 40])
    assert_equals_eager(make_counts(extents, HEADS, SIZES, device), num_selected=3)
    empty = make_counts(Extents(0, 3, 3, {}, []), HEADS, SIZES, device)
    assert_equals_eager(empty, num_selected=3)
