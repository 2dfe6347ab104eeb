"""Block selection: scores of equation 9, forced blocks, ties, and differentiable scores of selected blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import chosen_scores, compressed_attention, select_blocks, straight_through_scale
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_mem_kv,
    make_qkv,
    normal,
    packed,
    row_integers,
    whole,
)

Sizes = tuple[int, int, int]
JUNK = torch.tensor([-1, -2, 2**31 - 1, -(2**31), 99], dtype=torch.int32)


def make_problem(
    extents: Extents, heads: Heads, sizes: Sizes, pairs: int = 0, **settings: Any
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return q, k_cmp, the log-sum-exp of their attention, and the settings of both ops."""
    block_size, stride, selection_block_size = sizes
    settings = {'seqlen_k': extents.seqlen_k, **settings, **extents.where}
    q, _, _ = make_qkv(extents, heads)
    k_cmp, v_cmp = make_compressed(extents, heads, block_size, stride, more=1)
    _, lse = compressed_attention(
        q, k_cmp, v_cmp, block_size=block_size, stride=stride, mem_kv=make_mem_kv(heads, pairs), **settings
    )
    sizes_by_name = {
        'compress_block_size': block_size,
        'compress_stride': stride,
        'selection_block_size': selection_block_size,
    }
    return q, k_cmp, lse, sizes_by_name | settings


counts = st.integers(0, 3)


@given(
    extents=drawn_extents(),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    pairs=st.integers(0, 2),
    num_selected=st.integers(0, 6),
    num_init=counts,
    num_local=counts,
    num_recent=st.integers(0, 9),
    share_group=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_definition_of_block_selection(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    pairs: int,
    num_selected: int,
    num_init: int,
    num_local: int,
    num_recent: int,
    share_group: bool,
    causal: bool,
    scale: float | None,
) -> None:
    q, k_cmp, lse, settings = make_problem(extents, heads, sizes, pairs, causal=causal, scale=scale)
    selection: dict[str, Any] = {
        'num_selected': num_selected,
        'num_init': num_init,
        'num_local': num_local,
        'num_recent': num_recent if causal else 0,
        'share_group': share_group,
    }
    blocks = select_blocks(q, k_cmp, lse, **settings, **selection)
    assert blocks.dtype == torch.int32
    assert torch.equal(blocks, definition.select_blocks(q, k_cmp, lse, **settings, **selection))


@given(
    extents=drawn_extents(max_seqlen=16),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    pairs=st.integers(0, 2),
    num_selected=st.integers(0, 4),
    share_group=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_definition_of_the_scores(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    pairs: int,
    num_selected: int,
    share_group: bool,
    causal: bool,
    scale: float | None,
) -> None:
    q, k_cmp, lse, settings = make_problem(extents, heads, sizes, pairs, causal=causal, scale=scale)
    # Any index may be given, not only selected ones.
    shape = (extents.batch, extents.seqlen_q, heads.kv_heads if share_group else heads.heads, num_selected)
    blocks = torch.randint(-1, extents.seqlen_k // sizes[2] + 2, shape).int()
    blocks = torch.where(torch.rand(shape) < 0.1, JUNK[torch.randint(0, len(JUNK), shape)], blocks)

    assert_agree(
        lambda q, k_cmp, lse: chosen_scores(q, k_cmp, lse, blocks, **settings),
        lambda q, k_cmp, lse: definition.chosen_scores(q, k_cmp, lse, blocks, **settings),
        q,
        k_cmp,
        lse,
    )


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('seqlen', [1, 5, 6, 7, 8, 23])
def test_lengths_around_one_block(seqlen: int, causal: bool) -> None:
    q, k_cmp, lse, settings = make_problem(whole(seqlen), Heads(6, 2, 4, 4), (7, 3, 6), causal=causal)
    for num_selected in (1, 2, 4):
        blocks = select_blocks(q, k_cmp, lse, num_selected=num_selected, **settings)
        assert torch.equal(blocks, definition.select_blocks(q, k_cmp, lse, num_selected=num_selected, **settings))


@pytest.mark.parametrize(
    ('sizes', 'weights'),
    [
        # Sixteenths of the paper's sizes: blocks 4j - 1 ... 4j + 3 count 1, 2, 2, 2, 1.
        ((2, 1, 4), {-1: 1, 0: 2, 1: 2, 2: 2, 3: 1}),
        ((4, 4, 4), {0: 4}),
        ((4, 1, 2), {-3: 1, -2: 2, -1: 2, 0: 2, 1: 1}),
        ((5, 2, 4), {-2: 1, -1: 3, 0: 4, 1: 2}),
        ((1, 1, 3), {0: 1, 1: 1, 2: 1}),
    ],
)
def test_the_weight_of_a_compressed_block_is_shared_by_the_tokens(sizes: Sizes, weights: dict[int, int]) -> None:
    block_size, stride, selection_block_size = sizes
    seqlen = 16
    num_blocks = seqlen // selection_block_size
    num_compressed = definition.count_compressed_blocks(seqlen, block_size, stride)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    blocks = torch.arange(num_blocks, dtype=torch.int32).expand(1, 1, 1, num_blocks)
    for c in range(num_compressed):
        k_cmp = torch.full((1, num_compressed, 1, 1), -torch.inf, dtype=torch.float64)
        k_cmp[:, c] = 0
        scores = chosen_scores(
            q,
            k_cmp,
            torch.zeros(1, 1, 1, dtype=torch.float64),
            blocks,
            compress_block_size=block_size,
            compress_stride=stride,
            selection_block_size=selection_block_size,
            seqlen_k=seqlen,
        )
        shared = [weights.get(c - j * selection_block_size // stride, 0) for j in range(num_blocks)]
        assert (scores * block_size).flatten().tolist() == pytest.approx(shared, abs=1e-12)


def selected_without_scores(position: int, causal: bool = True, **selection: Any) -> list[int]:
    """Return the selected blocks of a query whose blocks of four tokens all score 0, since compressed blocks have no
    weight.
    """
    settings: dict[str, Any] = {'compress_block_size': 4, 'compress_stride': 4, 'selection_block_size': 4}
    q, k_cmp = torch.ones(1, 1, 1, 1).double(), torch.full((1, 10, 1, 1), -torch.inf).double()
    lse = torch.zeros(1, 1, 1).double()
    blocks = select_blocks(q, k_cmp, lse, q_offset=position, seqlen_k=40, causal=causal, **settings, **selection)
    return blocks.flatten().tolist()


@pytest.mark.parametrize(
    ('num_selected', 'row'),
    [
        (1, [7]),
        (2, [0, 7]),
        (3, [0, 1, 7]),
        (4, [0, 1, 6, 7]),
        (5, [0, 1, 5, 6, 7]),
        (6, [0, 1, 2, 5, 6, 7]),
        (10, [0, 1, 2, 3, 4, 5, 6, 7, -1, -1]),
    ],
)
def test_forced_blocks_in_their_order(num_selected: int, row: list[int]) -> None:
    assert selected_without_scores(30, num_selected=num_selected, num_init=2, num_local=3) == row


@pytest.mark.parametrize(
    ('num_selected', 'row'),
    [
        (1, [4]),
        (2, [0, 4]),
        (3, [0, 3, 4]),
        (4, [0, 3, 4, 5]),
        (5, [0, 2, 3, 4, 5]),
        (6, [0, 2, 3, 4, 5, 6]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_forced_blocks_on_both_sides(num_selected: int, row: list[int]) -> None:
    assert selected_without_scores(17, causal=False, num_selected=num_selected, num_init=1, num_local=3) == row


@pytest.mark.parametrize(
    ('position', 'num_init', 'num_local', 'row'),
    [
        (30, 0, 0, [0, 1, 2]),
        (30, 0, 1, [0, 1, 7]),
        (30, 0, 2, [0, 6, 7]),
        (30, 9, 0, [0, 1, 2]),
        (2, 1, 2, [0, -1, -1]),
        (5, 1, 2, [0, 1, -1]),
        (9, 1, 2, [0, 1, 2]),
        (45, 1, 2, [0, 1, 2]),  # Blocks 0 to 9 exist, but not the own block nor the one before it.
        (41, 1, 2, [0, 1, 9]),
        (-1, 1, 2, [-1, -1, -1]),
    ],
)
def test_forced_blocks_at_the_edges(position: int, num_init: int, num_local: int, row: list[int]) -> None:
    assert selected_without_scores(position, num_selected=3, num_init=num_init, num_local=num_local) == row


@pytest.mark.parametrize('share_group', [True, False])
def test_equal_scores_go_to_the_lower_block(share_group: bool) -> None:
    # Equal keys: every compressed block weighs the same, so inner selection blocks tie and the outer ones score less.
    # Dot products of small integers are exact in any order of summation.
    q, k_cmp = (torch.randint(-2, 3, shape).double() for shape in ((1, 40, 6, 4), (1, 1, 2, 4)))
    k_cmp = k_cmp.expand(1, 19, 2, 4)
    sizes = {'compress_block_size': 4, 'compress_stride': 2}
    _, lse = compressed_attention(q, k_cmp, k_cmp, block_size=4, stride=2)
    for num_selected in range(1, 10):
        selection: dict[str, Any] = {**sizes, 'selection_block_size': 4, 'num_selected': num_selected}
        selection |= {'num_init': 0, 'num_local': 1, 'share_group': share_group}
        blocks = select_blocks(q, k_cmp, lse, **selection)
        assert torch.equal(blocks, definition.select_blocks(q, k_cmp, lse, **selection))
        expected = [*range(1, min(num_selected, 9)), 9] if num_selected < 9 else list(range(1, 10))
        assert blocks[0, 39].tolist() == [expected] * (2 if share_group else 6)


def test_rows_of_equal_scores_are_equal_wherever_they_stand() -> None:
    # All scores are 0 without a compressed block: ties alone decide.
    q, k_cmp = normal(2, 9, 2, 3), normal(2, 0, 1, 3)
    _, lse = compressed_attention(q, k_cmp, k_cmp, block_size=16, stride=2)
    sizes: dict[str, Any] = {'compress_block_size': 16, 'compress_stride': 2, 'selection_block_size': 2}
    blocks = select_blocks(q, k_cmp, lse, num_selected=3, num_init=0, num_local=1, **sizes)
    rows = [sorted({*range(min(2, t // 2)), t // 2}) for t in range(9)]
    assert blocks[:, :, 0].tolist() == [[row + [-1] * (3 - len(row)) for row in rows]] * 2


def test_heads_of_a_group_add_their_scores() -> None:
    q, k_cmp, lse, settings = make_problem(whole(40), Heads(6, 2, 4, 4), (4, 2, 4))
    settings |= {'num_selected': 4, 'num_init': 0, 'num_local': 0}
    together = select_blocks(q, k_cmp, lse, **settings)
    alone = select_blocks(q, k_cmp, lse, share_group=False, **settings)
    assert together.shape == (1, 40, 2, 4)
    assert alone.shape == (1, 40, 6, 4)
    assert not torch.equal(together.repeat_interleave(3, 2), alone)
    blocks = torch.arange(10, dtype=torch.int32).expand(1, 40, 6, 10)
    del settings['num_selected'], settings['num_init'], settings['num_local']
    per_head = chosen_scores(q, k_cmp, lse, blocks, **settings)
    per_group = chosen_scores(q, k_cmp, lse, blocks[:, :, :2], **settings)
    torch.testing.assert_close(per_head.unflatten(2, (2, 3)).mean(3), per_group, rtol=1e-12, atol=1e-12)


def test_scores_lie_between_zero_and_the_share_of_a_block() -> None:
    for sizes in ((4, 2, 4), (8, 2, 4), (5, 3, 9)):
        q, k_cmp, lse, settings = make_problem(whole(40), Heads(6, 2, 4, 4), sizes)
        blocks = torch.arange(8, dtype=torch.int32).expand(1, 40, 2, 8)
        scores = chosen_scores(q * 30, k_cmp, lse * 0 + 1e9, blocks, **settings)
        assert scores.eq(0).all()
        scores = chosen_scores(q, k_cmp, lse, blocks, **settings)
        assert scores.min() >= 0
        assert scores.max() <= sizes[2] / sizes[0] + 1e-12


def test_selection_has_no_gradient() -> None:
    q, k_cmp, lse, settings = make_problem(whole(20), Heads(2, 1, 4, 4), (4, 2, 4))
    for tensor in (q, k_cmp, lse):
        tensor.requires_grad_()
    blocks = select_blocks(q, k_cmp, lse, num_selected=3, **settings)
    assert not blocks.requires_grad


def test_scores_of_padding_are_zero_and_have_no_gradient() -> None:
    q, k_cmp, lse, settings = make_problem(packed([0, 5, 12], uncovered=3), Heads(2, 1, 4, 4), (4, 2, 4))
    for tensor in (q, k_cmp, lse):
        tensor.requires_grad_()
    blocks = torch.full((1, 20, 1, 3), -1, dtype=torch.int32)
    blocks[:, 17:] = torch.tensor([0, 1, 2])
    scores = chosen_scores(q, k_cmp, lse, blocks, **settings)
    assert scores.eq(0).all()
    for grad in torch.autograd.grad(scores.sum(), (q, k_cmp, lse), allow_unused=True):
        assert grad is None or grad.nan_to_num(7).eq(0).all()


@pytest.mark.parametrize('alone', [False, True])
def test_gradcheck(alone: bool) -> None:
    q, k_cmp, lse, settings = make_problem(Extents(2, 5, 14, {}, [14, 14]), Heads(4, 2, 3, 3), (4, 2, 4))
    k_cmp = k_cmp[:, :-1].clone()
    blocks = torch.tensor([0, 2, -1, 1, 3, 9], dtype=torch.int32).expand(2, 5, 4 if alone else 2, 6)
    for tensor in (q, k_cmp, lse):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, lse: chosen_scores(q, k, lse, blocks, **settings), (q, k_cmp, lse))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_scores_of_half_inputs_are_float32(dtype: torch.dtype) -> None:
    q, k_cmp = normal(1, 200, 4, 16).to(dtype), normal(1, 49, 2, 16).to(dtype)
    _, lse = compressed_attention(q, k_cmp, k_cmp, block_size=8, stride=4)
    assert lse.dtype == torch.float32
    sizes: dict[str, Any] = {'compress_block_size': 8, 'compress_stride': 4, 'selection_block_size': 8}
    blocks = select_blocks(q, k_cmp, lse, num_selected=6, **sizes)
    assert torch.equal(blocks, select_blocks(q.float(), k_cmp.float(), lse, num_selected=6, **sizes))
    scores = chosen_scores(q, k_cmp, lse, blocks, **sizes)
    assert scores.dtype == torch.float32
    expected = chosen_scores(q.double(), k_cmp.double(), lse.double(), blocks, **sizes)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('logit', [6e4, -6e4])
def test_large_logits(logit: float) -> None:
    q, k_cmp, _, settings = make_problem(whole(30), Heads(4, 2, 4, 4), (4, 2, 4), scale=1.0)
    q = q / q.norm(dim=-1, keepdim=True) * abs(logit) ** 0.5
    k_cmp = (k_cmp / k_cmp.norm(dim=-1, keepdim=True) * abs(logit) ** 0.5)[:, :-1]
    k_cmp = k_cmp + q[:, :1, ::2] * (1 if logit > 0 else -1)
    _, lse = compressed_attention(q, k_cmp, k_cmp, block_size=4, stride=2, scale=1.0)
    blocks = select_blocks(q, k_cmp, lse, num_selected=4, **settings)
    assert blocks[0, -1, :, [0, 2, 3]].tolist() == [[0, 6, 7]] * 2
    for dtype in (torch.float32, torch.bfloat16):
        rounded_q, rounded_k = (t.to(dtype).requires_grad_() for t in (q, k_cmp))
        _, lse = compressed_attention(rounded_q, rounded_k, rounded_k, block_size=4, stride=2, scale=1.0)
        scores = chosen_scores(rounded_q, rounded_k, lse, blocks, **settings)
        assert scores.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(scores.sum(), (rounded_q, rounded_k)))


def call(op: Any = select_blocks, **changes: Any) -> None:
    q, k_cmp, lse, settings = make_problem(whole(12, batch=2), Heads(4, 2, 3, 3), (4, 2, 4))
    arguments = {'q': q, 'k_cmp': k_cmp, 'lse': lse, **settings}
    arguments |= {'num_selected': 3} if op is select_blocks else {'block_indices': torch.zeros(2, 12, 2, 3).int()}
    op(**(arguments | changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_selected': -1}, r'num_selected is -1, but must be an integer of at least 0'),
        ({'num_init': -1}, r'num_init is -1, but must be an integer of at least 0'),
        ({'num_local': -1}, r'num_local is -1, but must be an integer of at least 0'),
        ({'num_recent': -1}, r'num_recent is -1, but must be an integer of at least 0'),
        ({'num_recent': 4, 'causal': False}, r'num_recent is 4, but must be 0 where causal is False'),
        (
            {'backend': 'flex'},
            r"backend 'flex' cannot serve this call of select_blocks: select_blocks has no flex backend",
        ),
    ],
)
def test_wrong_selections(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize('op', [select_blocks, chosen_scores])
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'compress_block_size': 0}, r'compress_block_size is 0, but must be an integer of at least 1'),
        ({'compress_stride': 5}, r'compress_stride is 5, but must be at most compress_block_size, 4'),
        ({'selection_block_size': 0}, r'selection_block_size is 0, but must be an integer of at least 1'),
        ({'selection_block_size': 5}, r'selection_block_size is 5, but must be a multiple of compress_stride, 2'),
        ({'lse': torch.zeros(2, 12, 4)}, r'lse has shape \(2, 12, 4\), but must have \(2, 4, 12\) \(B, HQ, T\)'),
        ({'seqlen_k': 18}, r'k_cmp has 6 compressed blocks, but seqlen_k = 18 makes 8'),
        ({'q_offset': row_integers([0])}, r'q_offset has 1 entries, but must have 2'),
    ],
)
def test_wrong_arguments(op: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(op, **changes)


@pytest.mark.parametrize('name', ['num_init', 'num_local', 'num_recent'])
def test_wrong_numbers_of_forced_blocks(name: str) -> None:
    blocks = torch.zeros(2, 12, 2, 3, dtype=torch.int32)
    forced = {'num_init': 0, 'num_local': 0} | {name: -1}
    with pytest.raises(ValueError, match=f'{name} is -1, but must be an integer of at least 0'):
        call(straight_through_scale, block_indices=blocks, **forced)


def test_scores_of_indices_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r'block_indices has shape \(2, 12, 3, 3\), but must have'):
        call(chosen_scores, block_indices=torch.zeros(2, 12, 3, 3).int())
