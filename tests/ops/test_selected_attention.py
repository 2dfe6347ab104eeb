"""Selected attention: its definition, rows of indices as sets, and invalid indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.testing import INDEX_KINDS, make_block_indices
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    drawn_extents,
    drawn_heads,
    make_qkv,
    normal,
    packed,
    whole,
)

INT32 = torch.iinfo(torch.int32)
JUNK = (-1, -2, INT32.min, INT32.max, 10**6)


def assert_is_its_definition(q: Tensor, k: Tensor, v: Tensor, *indices: Tensor, **settings: Any) -> None:
    """indices: block_indices, and block_scale or nothing."""
    op, by_definition = (
        lambda q, k, v, blocks, scale=None, f=f: f(q, k, v, blocks, block_scale=scale, **settings)
        for f in (selected_attention, definition.selected_attention)
    )
    assert_agree(op, by_definition, q, k, v, *indices)


@given(
    extents=drawn_extents(),
    heads=drawn_heads(),
    block_size=st.integers(1, 7),
    num_selected=st.integers(0, 5),
    alone=st.booleans(),
    scaled=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_definition(
    extents: Extents,
    heads: Heads,
    block_size: int,
    num_selected: int,
    alone: bool,
    scaled: bool,
    causal: bool,
    scale: float | None,
    index_dtype: torch.dtype,
) -> None:
    shape = (extents.batch, extents.seqlen_q, heads.heads if alone else heads.kv_heads, num_selected)
    # Blocks of every kind, some of them replaced by invalid indices; repeats occur by chance.
    block_indices = torch.randint(-1, extents.seqlen_k // block_size + 2, shape).int()
    junk = torch.tensor(JUNK).int()[torch.randint(0, len(JUNK), shape)]
    block_indices = torch.where(torch.rand(shape) < 0.1, junk, block_indices).to(index_dtype)
    indices = (block_indices, 1 + 0.5 * normal(*shape)) if scaled else (block_indices,)
    settings: dict[str, Any] = {'block_size': block_size, 'causal': causal, 'scale': scale, **extents.where}
    assert_is_its_definition(*make_qkv(extents, heads), *indices, **settings)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('kind', INDEX_KINDS)
@pytest.mark.parametrize('seqlen', [1, 3, 4, 5, 22])
def test_every_kind_of_indices(seqlen: int, kind: str, causal: bool) -> None:
    heads = Heads(6, 2, 4, 3)
    blocks = make_block_indices(kind, 2, seqlen, 2, 3, seqlen_k=seqlen, block_size=4, causal=causal)
    inputs = make_qkv(whole(seqlen, batch=2), heads)
    assert_is_its_definition(*inputs, blocks, 0.5 + torch.rand(blocks.shape).double(), block_size=4, causal=causal)


def all_blocks(q: Tensor, index_heads: int, num_blocks: int) -> Tensor:
    return torch.arange(num_blocks, dtype=torch.int32).expand(*q.shape[:2], index_heads, num_blocks)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('heads', [Heads(6, 2, 5, 5), Heads(4, 4, 3, 7), Heads(5, 1, 4, 2)])
def test_all_blocks_are_dense_attention(heads: Heads, causal: bool) -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    def selected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Eight blocks of 5 hold more than the 33 tokens.
        return selected_attention(q, k, v, all_blocks(q, heads.kv_heads, 8), block_size=5, causal=causal)[0]

    assert_agree(selected, dense, *make_qkv(whole(33, batch=2), heads))


def test_a_row_is_a_set() -> None:
    q, k, v = make_qkv(whole(20), Heads(4, 2, 3, 5))
    expected = selected_attention(q, k, v, torch.tensor([0, 2, 4]).expand(1, 20, 2, 3), block_size=4)
    for row in ([4, 0, 2], [2, 2, 4, 0, 4, 2, 0], [-1, 4, -1, 0, 2, 4, -1], [*JUNK, 2, 5, 4, 0], [0, 2, 4, 5, 9]):
        blocks = torch.tensor(row).expand(1, 20, 2, len(row))
        for result, same in zip(selected_attention(q, k, v, blocks, block_size=4), expected, strict=True):
            torch.testing.assert_close(result, same, rtol=1e-12, atol=1e-12)


def test_the_first_occurrence_sets_the_factor() -> None:
    q, k, v = make_qkv(whole(12), Heads(2, 1, 3, 3))
    once = torch.tensor([[2.0, 0.5, -1.0]], dtype=torch.float64).expand(12, 1, 3)[None].clone().requires_grad_()
    often = torch.tensor([[7.0, 2.0, 0.5, 9.0, -1.0, 9.0, 7.0]], dtype=torch.float64).expand(12, 1, 7)[None]
    often = often.clone().requires_grad_()
    results = []
    for row, block_scale in ([0, 1, 2], once), ([-1, 0, 1, 0, 2, 1, 50], often):
        blocks = torch.tensor(row, dtype=torch.int32).expand(1, 12, 1, len(row))
        out, lse = selected_attention(q, k, v, blocks, block_size=4, block_scale=block_scale)
        (out.sum() + lse.sum()).backward()
        results.append((out, lse))
    for result, same in zip(*results, strict=True):
        torch.testing.assert_close(result, same, rtol=1e-12, atol=1e-12)
    assert once.grad is not None
    assert often.grad is not None
    torch.testing.assert_close(often.grad[..., [1, 2, 4]], once.grad, rtol=1e-12, atol=1e-12)
    assert often.grad[..., [0, 3, 5, 6]].eq(0).all()


def test_factors_of_unread_blocks_may_be_anything() -> None:
    q, k, v = make_qkv(whole(8), Heads(2, 1, 3, 3))
    blocks = torch.tensor([0, 0, -1, 9], dtype=torch.int32).expand(1, 8, 1, 4)
    block_scale = torch.tensor([1.5, torch.nan, torch.inf, torch.nan]).double().expand(1, 8, 1, 4)
    assert_is_its_definition(q, k, v, blocks, block_scale.clone(), block_size=4)


def test_unselected_blocks_are_not_read() -> None:
    q, k, v = make_qkv(whole(24), Heads(4, 2, 3, 5))
    for tensor in (k, v):
        tensor[:, 8:12] = torch.nan
        tensor[:, 20:] = torch.nan
    blocks = torch.tensor([-1, 0, 4, 1, 3], dtype=torch.int32).expand(1, 24, 2, 5)
    assert_is_its_definition(q, k, v, blocks, block_size=4)


def test_the_future_inside_the_own_block_is_not_read() -> None:
    q, k, v = make_qkv(Extents(1, 3, 12, {'q_offset': 4}, [12]), Heads(2, 1, 3, 3))
    for tensor in (k, v):
        tensor[:, 7:] = torch.nan
    blocks = torch.tensor([0, 1, 2], dtype=torch.int32).expand(1, 3, 1, 3)
    assert_is_its_definition(q, k, v, blocks, block_size=4, q_offset=4)


def test_an_index_reaches_into_no_other_sequence() -> None:
    extents = packed([6, 0, 9, 3], uncovered=2)
    q, k, v = make_qkv(extents, Heads(2, 1, 3, 3))
    blocks = torch.arange(-1, 6, dtype=torch.int32).expand(1, 20, 1, 7)
    for causal in (True, False):
        assert_is_its_definition(q, k, v, blocks, block_size=4, causal=causal, **extents.where)


def test_heads_may_select_alone() -> None:
    q, k, v = make_qkv(whole(20), Heads(4, 2, 3, 5))
    together = make_block_indices('valid', 1, 20, 2, 2, seqlen_k=20, block_size=4)
    results = [selected_attention(q, k, v, b, block_size=4) for b in (together, together.repeat_interleave(2, 2))]
    for result, same in zip(*results, strict=True):
        torch.testing.assert_close(result, same, rtol=1e-12, atol=1e-12)


def call(**changes: Any) -> None:
    q, k, v = make_qkv(whole(12, batch=2), Heads(4, 2, 3, 5))
    blocks = torch.zeros(2, 12, 2, 3, dtype=torch.int32)
    selected_attention(**({'q': q, 'k': k, 'v': v, 'block_indices': blocks, 'block_size': 4} | changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'block_size': 0}, r'block_size is 0, but must be an integer of at least 1'),
        (
            {'block_indices': torch.zeros(2, 12, 2, 3)},
            r'block_indices has dtype torch.float32, but must be int32 or int64',
        ),
        (
            {'block_indices': torch.zeros(2, 12, 3, 3, dtype=torch.int32)},
            r'block_indices has shape \(2, 12, 3, 3\), but must have \(2, 12, 2 or, per query head, 4, n\)',
        ),
        ({'block_indices': torch.zeros(2, 11, 2, 3, dtype=torch.int32)}, r'block_indices has shape \(2, 11, 2, 3\)'),
        ({'block_indices': torch.zeros(2, 12, 2, dtype=torch.int32)}, r'block_indices has shape \(2, 12, 2\)'),
        (
            {'block_scale': torch.ones(2, 12, 4, 3)},
            r'block_scale has shape \(2, 12, 4, 3\), but block_indices has \(2, 12, 2, 3\)',
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
