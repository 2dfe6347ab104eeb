"""Features of block selection and of the scores of selected blocks: soft caps, block counts per query, segment ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import chosen_scores, select_blocks, straight_through_scale
from tests.definition import definition
from tests.ops.test_block_selection import Sizes, make_problem
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    cumulative,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_qkv,
    normal,
    packed,
    row_integers,
    whole,
)

HEADS = Heads(4, 2, 3, 3)
SIZES = (4, 2, 4)
SOFTCAPS = (0.3, 1.0, 20.0)
# Sequences of a packed row by their ids; an id may occur again.
RUNS = ((3, 9), (-1, 4), (-5, 2), (7, 1), (3, 12), (0, 6))
SEQLEN = sum(length for _, length in RUNS)


def make_segments() -> Tensor:
    return torch.cat([torch.full((1, length), number) for number, length in RUNS], 1)


def count_rows(extents: Extents, heads: Heads, share_group: bool) -> tuple[int, int, int]:
    return extents.batch, extents.seqlen_q, heads.kv_heads if share_group else heads.heads


@given(
    extents=drawn_extents(),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    num_selected=st.integers(0, 6),
    num_init=st.integers(0, 3),
    num_local=st.integers(0, 3),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, *SOFTCAPS]),
    counts=st.sampled_from(['none', 'int', 'int32', 'int64']),
)
def test_definition_of_block_selection(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    num_selected: int,
    num_init: int,
    num_local: int,
    share_group: bool,
    causal: bool,
    softcap: float | None,
    counts: str,
) -> None:
    q, k_cmp, lse, settings = make_problem(extents, heads, sizes, causal=causal)
    block_counts: int | Tensor | None = None
    if counts == 'int':
        block_counts = int(torch.randint(-1, num_selected + 3, ()))
    elif counts != 'none':
        shape = count_rows(extents, heads, share_group)
        block_counts = torch.randint(-1, num_selected + 3, shape, dtype=getattr(torch, counts))
    selection: dict[str, Any] = {
        'num_selected': num_selected,
        'num_init': num_init,
        'num_local': num_local,
        'share_group': share_group,
        'softcap': softcap,
        'block_counts': block_counts,
    }
    blocks = select_blocks(q, k_cmp, lse, **settings, **selection)
    assert blocks.dtype == torch.int32
    assert torch.equal(blocks, definition.select_blocks(q, k_cmp, lse, **settings, **selection))


@given(
    extents=drawn_extents(max_seqlen=12),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from(SOFTCAPS),
)
def test_definition_of_the_scores(
    extents: Extents, heads: Heads, sizes: Sizes, share_group: bool, causal: bool, softcap: float
) -> None:
    q, k_cmp, lse, settings = make_problem(extents, heads, sizes, causal=causal)
    settings |= {'softcap': softcap}
    blocks = torch.randint(-1, extents.seqlen_k // sizes[2] + 2, (*count_rows(extents, heads, share_group), 3)).int()
    assert_agree(
        lambda q, k_cmp, lse: chosen_scores(q, k_cmp, lse, blocks, **settings),
        lambda q, k_cmp, lse: definition.chosen_scores(q, k_cmp, lse, blocks, **settings),
        q,
        k_cmp,
        lse,
    )


@pytest.mark.parametrize('op', [chosen_scores, partial(straight_through_scale, num_init=1, num_local=1)])
def test_second_derivatives_with_a_soft_cap(op: Any) -> None:
    q, k_cmp, lse, settings = make_problem(whole(9), Heads(2, 1, 3, 3), SIZES)
    settings |= {'softcap': 0.7}
    blocks = torch.randint(-1, 3, (1, 9, 1, 2)).int()
    # Without keys of no sequence, and without rows that read nothing, where differences are not finite.
    k_cmp, lse = k_cmp[:, :3], lse.masked_fill(lse == -torch.inf, 0)
    leaves = tuple(t.requires_grad_() for t in (q, k_cmp, lse))
    assert torch.autograd.gradgradcheck(lambda *inputs: op(*inputs, blocks, **settings), leaves)
    if op is chosen_scores:
        assert torch.autograd.gradcheck(lambda *inputs: op(*inputs, blocks, **settings), leaves)


def test_slope_of_the_straight_through_scale() -> None:
    q, k_cmp, lse, settings = make_problem(packed([5, 17]), HEADS, SIZES)
    settings |= {'softcap': 0.5}
    blocks = torch.randint(-1, 5, (1, 22, 2, 3)).int()
    q, k_cmp, lse = (t.requires_grad_() for t in (q, k_cmp, lse))
    scale = straight_through_scale(q, k_cmp, lse, blocks, num_init=0, num_local=0, **settings)
    assert (scale == 1).all()
    scores = chosen_scores(q, k_cmp, lse, blocks, **settings)
    weights = normal(*scores.shape)
    grads, expected = (torch.autograd.grad((t * weights).sum(), (q, k_cmp, lse)) for t in (scale, scores))
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)


def test_a_soft_cap_changes_the_selection() -> None:
    """Without a cap the block with much weight of one head is selected, with it the block with weight of both heads."""
    q = torch.eye(2, dtype=torch.float64).reshape(1, 1, 2, 2)
    k_cmp = torch.tensor([[6.0, -6.0], [5.0, 5.0]], dtype=torch.float64).reshape(1, 2, 1, 2)
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    settings: dict[str, Any] = {**dict.fromkeys(names, 1), 'seqlen_k': 2, 'scale': 1.0}
    selection: dict[str, Any] = {'num_selected': 1, 'num_init': 0, 'num_local': 0}
    lse = torch.zeros(1, 2, 1, dtype=torch.float64)
    for softcap, expected in ((None, 0), (1e6, 0), (1.0, 1)):
        assert select_blocks(q, k_cmp, lse, softcap=softcap, **settings, **selection).item() == expected
    blocks = torch.tensor([0, 1], dtype=torch.int32).reshape(1, 1, 1, 2)
    scores = chosen_scores(q, k_cmp, lse, blocks, softcap=4.0, **settings)
    torch.testing.assert_close(scores[0, 0, 0], (4 * (k_cmp / 4).tanh()).exp().mean(-1)[0, :, 0])


@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('causal', [True, False])
def test_a_smaller_count_takes_less_of_the_same(causal: bool, share_group: bool) -> None:
    q, k_cmp, lse, settings = make_problem(whole(30, batch=2), HEADS, SIZES, causal=causal)
    settings |= {'num_selected': 6, 'share_group': share_group}
    shape = (2, 30, 2 if share_group else 4)
    rows = {
        count: select_blocks(q, k_cmp, lse, block_counts=torch.full(shape, count), **settings) for count in range(-1, 9)
    }
    assert (rows[-1] == -1).all()
    assert torch.equal(rows[8], select_blocks(q, k_cmp, lse, **settings))
    for count, row in rows.items():
        assert row.shape == (*shape, 6)
        assert torch.equal(row, select_blocks(q, k_cmp, lse, block_counts=count, **settings))
        assert ((row >= 0).sum(-1) == (rows[8] >= 0).sum(-1).clamp(max=max(count, 0))).all()
        if count > 0:
            found = (rows[count - 1][..., :, None] == row[..., None, :]).any(-1)
            assert found[rows[count - 1] >= 0].all()
    # Every row by itself.
    counts = torch.randint(0, 7, shape, dtype=torch.int32)
    mixed = select_blocks(q, k_cmp, lse, block_counts=counts, **settings)
    for count in range(7):
        assert torch.equal(mixed[counts == count], rows[count][counts == count])


def test_forced_blocks_within_a_count() -> None:
    """The own block, then the initial ones, then the other local ones, nearer first."""
    q, k_cmp, lse, settings = make_problem(whole(40), Heads(1, 1, 3, 3), SIZES)
    settings |= {'num_selected': 6, 'num_init': 2, 'num_local': 3}
    rows = [select_blocks(q, k_cmp, lse, block_counts=count, **settings)[0, -1, 0].tolist() for count in range(6)]
    assert rows == [
        [-1, -1, -1, -1, -1, -1],
        [9, -1, -1, -1, -1, -1],
        [0, 9, -1, -1, -1, -1],
        [0, 1, 9, -1, -1, -1],
        [0, 1, 8, 9, -1, -1],
        [0, 1, 7, 8, 9, -1],
    ]


def make_segmented(softcap: float | None = 0.7) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and settings of the rows that RUNS names, with NaN in all padding."""
    _, _, lse, settings = make_problem(packed([length for _, length in RUNS]), HEADS, SIZES)
    del settings['cu_seqlens'], settings['seqlen_k']
    extents = packed([length for _, length in RUNS])
    q, _, _ = make_qkv(extents, HEADS)
    k_cmp, _ = make_compressed(extents, HEADS, *SIZES[:2])
    tensors = {'q': q, 'k_cmp': k_cmp, 'lse': torch.where(lse.isfinite(), lse, 0)}
    return tensors, settings | {'softcap': softcap}


def runs_of(tensors: dict[str, Tensor]) -> list[tuple[int, slice, dict[str, Tensor]]]:
    """Return id, tokens and tensors of every run."""
    found, start, first_block = [], 0, 0
    for number, length in RUNS:
        blocks = definition.count_compressed_blocks(length, *SIZES[:2])
        tokens, compressed = slice(start, start + length), slice(first_block, first_block + blocks)
        own = {name: t[:, compressed if name == 'k_cmp' else tokens] for name, t in tensors.items() if name != 'lse'}
        found.append((number, tokens, own | {'lse': tensors['lse'][..., tokens]}))
        start, first_block = start + length, first_block + blocks
    return found


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
@pytest.mark.parametrize('causal', [True, False])
def test_segments_are_sequences_of_their_own(causal: bool, dtype: torch.dtype) -> None:
    tensors, settings = make_segmented()
    settings |= {'causal': causal}
    selection: dict[str, Any] = {'num_selected': 3, 'num_init': 1, 'num_local': 1}
    counts = torch.randint(0, 4, (1, SEQLEN, 2))
    ids = make_segments().to(dtype)
    blocks = select_blocks(**tensors, **settings, **selection, block_counts=counts, segment_ids=ids)
    every_block = torch.arange(3).int().expand(1, SEQLEN, 2, 3)
    scores = chosen_scores(**tensors, block_indices=every_block, **settings, segment_ids=ids)
    for number, tokens, own in runs_of(tensors):
        expected = definition.select_blocks(**own, **settings, **selection, block_counts=counts[:, tokens])
        alone = definition.chosen_scores(**own, block_indices=every_block[:, tokens], **settings)
        assert torch.equal(blocks[:, tokens], expected if number >= 0 else torch.full_like(expected, -1))
        torch.testing.assert_close(scores[:, tokens], alone if number >= 0 else torch.zeros_like(alone))


def test_padding_among_segments_has_no_gradient() -> None:
    tensors, settings = make_segmented()
    ids = make_segments()
    for number, _, own in runs_of(tensors):
        if number < 0:
            for t in own.values():
                t.fill_(torch.nan)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    blocks = torch.zeros(1, SEQLEN, 2, 1, dtype=torch.int32)
    scores = chosen_scores(**leaves, block_indices=blocks, **settings, segment_ids=ids)
    scale = straight_through_scale(**leaves, block_indices=blocks, **settings, num_init=0, num_local=0, segment_ids=ids)
    assert (scale == 1).all()
    for t in (scores, scale):
        grads = torch.autograd.grad(t.sum(), tuple(leaves.values()), retain_graph=True)
        for name, grad in zip(leaves, grads, strict=True):
            assert grad.isfinite().all(), name
            assert grad.any(), name
        for number, _, own in runs_of(dict(zip(leaves, grads, strict=True))):
            assert number >= 0 or not any(t.any() for t in own.values())


@pytest.mark.parametrize('softcap', [1, 2.0**-20, 1e30])
def test_any_number_above_0_caps(softcap: float) -> None:
    q, k_cmp, lse, settings = make_problem(whole(12), HEADS, SIZES)
    assert (select_blocks(q, k_cmp, lse, num_selected=3, softcap=softcap, **settings)[0, -1] >= 0).all()


def call(op: Any = select_blocks, **changes: Any) -> Tensor:
    q, k_cmp, lse, settings = make_problem(whole(12), HEADS, SIZES)
    arguments = {'q': q, 'k_cmp': k_cmp, 'lse': lse, **settings}
    arguments |= {'num_selected': 3} if op is select_blocks else {'block_indices': torch.zeros(1, 12, 2, 3).int()}
    arguments |= {'num_init': 1, 'num_local': 1} if op is straight_through_scale else {}
    return op(**(arguments | changes))


IDS = torch.zeros(1, 12, dtype=torch.int32)


@pytest.mark.parametrize('op', [select_blocks, chosen_scores, straight_through_scale])
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'softcap': 0}, r'softcap is 0, but must be a finite number above 0, or None'),
        ({'softcap': -1.5}, r'softcap is -1.5, but must be a finite number above 0, or None'),
        ({'softcap': float('inf')}, r'softcap is inf, but must be a finite number above 0, or None'),
        ({'softcap': float('nan')}, r'softcap is nan, but must be a finite number above 0, or None'),
        ({'softcap': True}, r'softcap is True, but must be a finite number above 0, or None'),
        ({'softcap': '20'}, r"softcap is '20', but must be a finite number above 0, or None"),
        ({'segment_ids': IDS[:, 1:]}, r'segment_ids has shape \(1, 11\), but must have \(1, 12\)'),
        ({'segment_ids': IDS.double()}, r'segment_ids has dtype torch.float64, but must be int32 or int64'),
        ({'q_offset': 0}, r'q_offset is given, but cannot be combined with segment_ids'),
        ({'seqlens_k': row_integers([12])}, r'seqlens_k is given, but cannot be combined with segment_ids'),
        ({'cu_seqlens': cumulative([5, 7])}, r'cu_seqlens is given, but cannot be combined with segment_ids'),
        ({'cu_seqlens_k': cumulative([5, 7])}, r'cu_seqlens_k is given, but cannot be combined with segment_ids'),
    ],
)
def test_wrong_arguments(op: Any, changes: dict[str, Any], message: str) -> None:
    ids = {} if 'softcap' in changes else {'segment_ids': IDS}
    with pytest.raises(ValueError, match=message) as error:
        call(op, **(ids | changes))
    assert '\n' not in str(error.value)
    call(op, **ids)


@pytest.mark.parametrize(
    ('counts', 'message'),
    [
        (1.0, r'block_counts is 1.0, but must be an int, an integer tensor or None'),
        (True, r'block_counts is True, but must be an int, an integer tensor or None'),
        ([1], r'block_counts is \[1\], but must be an int, an integer tensor or None'),
        (torch.ones(1, 12, 2), r'block_counts has dtype torch.float32, but must be int32 or int64'),
        (torch.ones(1, 12, 2).bool(), r'block_counts has dtype torch.bool, but must be int32 or int64'),
        (torch.ones(1, 12, 4).int(), r'block_counts has shape \(1, 12, 4\), but must have \(1, 12, 2\)'),
        (torch.ones(12, 2).int(), r'block_counts has shape \(12, 2\), but must have \(1, 12, 2\)'),
        (torch.ones(1, 12, 2, device='meta').int(), r'block_counts is on meta, but q is on cpu'),
    ],
)
def test_wrong_counts(counts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call(block_counts=counts)
    assert '\n' not in str(error.value)


def test_counts_that_fit() -> None:
    for counts in (2, -(2**40), 2**40, torch.full((1, 12, 2), 2**40), torch.full((1, 12, 2), -(2**40))):
        call(block_counts=counts)
    call(block_counts=torch.ones(1, 12, 4).int(), share_group=False)
    with pytest.raises(ValueError, match=r'block_counts has shape \(1, 12, 2\), but must have \(1, 12, 4\)'):
        call(block_counts=torch.ones(1, 12, 2).int(), share_group=False)
