"""Compressed attention: its definition, memory pairs, and the number of keys in tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_sparse_attention.ops import compressed_attention
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

HEADS = Heads(6, 2, 4, 3)  # groups of three


def assert_is_its_definition(extents: Extents, heads: Heads, pairs: int, more: int = 0, **settings: Any) -> None:
    sizes = settings['block_size'], settings['stride']
    q, _, _ = make_qkv(extents, heads)
    settings = {'seqlen_k': extents.seqlen_k, **settings, **extents.where}
    op, by_definition = (
        lambda q, k, v, mem_k, mem_v, f=f: f(q, k, v, mem_kv=(mem_k, mem_v) if pairs else None, **settings)
        for f in (compressed_attention, definition.compressed_attention)
    )
    assert_agree(op, by_definition, q, *make_compressed(extents, heads, *sizes, more), *make_mem_kv(heads, pairs))


@given(
    drawn_extents(),
    drawn_heads(),
    drawn_block_sizes(),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 0.7]),
)
def test_definition(
    extents: Extents,
    heads: Heads,
    sizes: tuple[int, int, int],
    pairs: int,
    more: int,
    causal: bool,
    scale: float | None,
) -> None:
    block_size, stride, _ = sizes
    settings: dict[str, Any] = {'block_size': block_size, 'stride': stride, 'causal': causal, 'scale': scale}
    assert_is_its_definition(extents, heads, pairs, more, **settings)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('pairs', [0, 1, 2])
@pytest.mark.parametrize('seqlen', [1, 6, 7, 8, 9, 10, 23])
def test_lengths_around_one_block(seqlen: int, pairs: int, causal: bool) -> None:
    assert_is_its_definition(whole(seqlen), HEADS, pairs, block_size=7, stride=3, causal=causal)


@pytest.mark.parametrize('where', [{}, {'q_offset': 5}, {'q_offset': -3}, {'q_offset': 0}])
def test_the_number_of_keys_by_default(where: dict[str, Any]) -> None:
    q = normal(2, 12, 4, 3)
    seqlen_k = 12 + where.get('q_offset', 0)
    blocks = definition.count_compressed_blocks(seqlen_k, 4, 2)
    k_cmp, v_cmp = normal(2, blocks + 2, 2, 3), normal(2, blocks + 2, 2, 5)
    k_cmp[:, blocks:] = v_cmp[:, blocks:] = torch.nan
    for causal in (True, False):
        sizes: dict[str, Any] = {'block_size': 4, 'stride': 2, 'causal': causal, **where}
        op, by_definition = (partial(f, **sizes) for f in (compressed_attention, definition.compressed_attention))
        assert_agree(op, by_definition, q, k_cmp, v_cmp)


def test_the_number_of_keys_may_be_left_out_where_rows_or_sequences_tell_it() -> None:
    lengths = row_integers([3, 11])
    q, k_cmp, v_cmp = normal(2, 4, 2, 3), normal(2, 4, 1, 3), normal(2, 4, 1, 3)
    k_cmp[0] = v_cmp[0] = torch.nan
    for where in ({'seqlens_k': lengths}, {'seqlens_k': lengths, 'q_offset': row_integers([1, 2])}):
        op, by_definition = (
            partial(f, block_size=5, stride=2, **where) for f in (compressed_attention, definition.compressed_attention)
        )
        assert_agree(op, by_definition, q, k_cmp, v_cmp)
    extents = packed([4, 0, 9, 1], uncovered=2)
    assert_is_its_definition(extents, HEADS, 1, more=3, block_size=5, stride=2, seqlen_k=None)


def test_memory_is_visible_before_the_first_block_and_at_every_position() -> None:
    heads = Heads(2, 1, 3, 3)
    mem_kv = make_mem_kv(heads, 1)
    q, _, _ = make_qkv(whole(6), heads)
    k_cmp, v_cmp = make_compressed(whole(6), heads, 5, 1)
    out, lse = compressed_attention(q, k_cmp, v_cmp, block_size=5, stride=1, mem_kv=mem_kv)
    assert torch.equal(out[:, :4], mem_kv[1][:, 0].expand_as(out[:, :4]))
    assert lse.isfinite().all()
    assert not torch.equal(out[:, 4], mem_kv[1][:, 0].expand_as(out[:, 4]))


def test_memory_has_no_gradient_from_tokens_that_belong_to_no_sequence() -> None:
    heads = Heads(2, 1, 3, 3)
    extents = packed([0, 0], uncovered=3)
    q, _, _ = make_qkv(extents, heads)
    mem_k, mem_v = (t.requires_grad_() for t in make_mem_kv(heads, 2))
    k_cmp, v_cmp = make_compressed(extents, heads, 2, 1, more=2)
    out, lse = compressed_attention(
        q, k_cmp, v_cmp, block_size=2, stride=1, mem_kv=(mem_k, mem_v), cu_seqlens=extents.where['cu_seqlens']
    )
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    out.sum().backward()
    assert mem_k.grad is None or mem_k.grad.eq(0).all()


def test_no_memory_pairs_are_no_memory() -> None:
    heads = Heads(2, 1, 3, 3)
    q, _, _ = make_qkv(whole(12), heads)
    compressed = make_compressed(whole(12), heads, 4, 2)
    empty = make_mem_kv(heads, 0)
    results = [compressed_attention(q, *compressed, block_size=4, stride=2, mem_kv=mem) for mem in (None, empty)]
    for with_none, with_empty in zip(*results, strict=True):
        assert torch.equal(with_none, with_empty)


def call(**changes: Any) -> None:
    heads = Heads(4, 2, 3, 5)
    q, _, _ = make_qkv(whole(12, batch=2), heads)
    k_cmp, v_cmp = make_compressed(whole(12, batch=2), heads, 4, 2)
    arguments: dict[str, Any] = {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp, 'block_size': 4, 'stride': 2}
    compressed_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'block_size': 0}, r'block_size is 0, but must be an integer of at least 1'),
        ({'stride': 0}, r'stride is 0, but must be an integer of at least 1'),
        ({'stride': 5}, r'stride is 5, but must be at most block_size, 4'),
        ({'seqlen_k': 14}, r'k_cmp has 5 compressed blocks, but seqlen_k = 14 makes 6'),
        ({'seqlen_k': -1}, r'seqlen_k is -1, but must be an integer of at least 0'),
        ({'q_offset': 2}, r'k_cmp has 5 compressed blocks, but seqlen_k = 14 makes 6'),
        ({'q_offset': row_integers([0, 0])}, r'seqlen_k is not given, but is needed where q_offset is per row'),
        ({'seqlens_k': row_integers([12, 14]), 'seqlen_k': 14}, r'k_cmp has 5 compressed blocks, but .* make 6'),
        (
            {'seqlens_k': row_integers([12, 13]), 'seqlen_k': 12},
            r'seqlens_k lies in \[12, 13\], but must lie in \[0, 12\]',
        ),
        (
            {'mem_kv': (normal(1, 1, 3), normal(1, 1, 5))},
            r'mem_kv\[0\] has shape \(1, 1, 3\), but must have \(2, M, 3\)',
        ),
        (
            {'mem_kv': (normal(2, 1, 3), normal(2, 1, 3))},
            r'mem_kv\[1\] has shape \(2, 1, 3\), but must have \(2, M, 5\)',
        ),
        ({'mem_kv': (normal(2, 1, 3), normal(2, 2, 5))}, r'mem_kv holds 1 keys and 2 values, but must hold pairs'),
        (
            {'mem_kv': (normal(2, 1, 3).float(), normal(2, 1, 5))},
            r'mem_kv\[0\] has dtype torch.float32, but q has torch.float64',
        ),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
