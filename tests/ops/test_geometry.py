"""Block arithmetic on ints and on tensors, against counting tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_sparse_attention.core import geometry

small = st.integers(1, 9)


@given(length=st.integers(0, 40), stride=small, extra=st.integers(0, 9))
def test_compressed_blocks_are_the_complete_ones(length: int, stride: int, extra: int) -> None:
    block_size = stride + extra
    complete = [c for c in range(50) if c * stride + block_size <= length]
    count = geometry.num_compressed_blocks(length, block_size, stride)
    assert count == len(complete)
    assert geometry.num_compressed_blocks(torch.tensor(length), block_size, stride) == count
    assert [geometry.compressed_block_end(c, block_size, stride) < length for c in range(50)].count(True) == count
    longest = geometry.max_length_of_compressed(count, block_size, stride)
    assert geometry.num_compressed_blocks(longest, block_size, stride) == count
    assert geometry.num_compressed_blocks(longest + 1, block_size, stride) == count + 1


@given(stride=small, extra=st.integers(0, 12), multiple=st.integers(1, 5))
def test_overlaps_count_shared_tokens(stride: int, extra: int, multiple: int) -> None:
    block_size, selection = stride + extra, stride * multiple
    offsets = geometry.overlapping_blocks(block_size, stride, selection)
    overlaps = {offset: geometry.shared_tokens(offset, block_size, stride, selection) for offset in offsets}
    on_tensors = geometry.shared_tokens(torch.tensor(offsets), block_size, stride, selection)
    assert on_tensors.tolist() == list(overlaps.values())
    for block, compressed in itertools.product(range(5), range(40)):
        tokens = set(range(block * selection, (block + 1) * selection))
        shared = len(tokens & set(range(compressed * stride, compressed * stride + block_size)))
        assert overlaps.get(compressed - block * multiple, 0) == shared
    assert all(overlaps.values())


def test_overlaps_of_the_paper() -> None:
    offsets = geometry.overlapping_blocks(32, 16, 64)
    assert list(offsets) == [-1, 0, 1, 2, 3]
    assert [geometry.shared_tokens(offset, 32, 16, 64) for offset in offsets] == [16, 32, 32, 32, 16]


@given(own=st.integers(0, 9), init=st.integers(0, 4), local=st.integers(0, 4), causal=st.booleans())
def test_forced_blocks_in_their_order(own: int, init: int, local: int, causal: bool) -> None:
    order = [own] if local else []
    order += [block for block in range(init) if block not in order]
    for reach in range(1, local):
        for block in [own - reach] if causal else [own - reach, own + reach]:
            if block >= 0 and block not in order:
                order.append(block)
    blocks = range(20)
    priority = [geometry.forced_priority(block, own, init, local, causal) for block in blocks]
    assert sorted((b for b in blocks if priority[b] > 0), key=lambda b: -priority[b]) == order
    assert len({priority[b] for b in order}) == len(order)
    assert geometry.forced_priority(torch.arange(20), torch.tensor(own), init, local, causal).tolist() == priority
    assert len(order) <= geometry.num_forced_blocks(init, local, causal)


@given(position=st.integers(0, 9), left=st.integers(-1, 5), right=st.integers(-1, 5))
def test_windows(position: int, left: int, right: int) -> None:
    read = [key for key in range(12) if geometry.in_window(key, position, left, right)]
    low = 0 if left < 0 else max(0, position - left)
    high = 11 if right < 0 else min(11, position + right)
    assert read == list(range(low, high + 1))
    tensor = geometry.in_window(torch.arange(12), torch.tensor(position), left, right)
    assert tensor.nonzero().flatten().tolist() == read


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    beyond=st.integers(0, 3),
    offset=st.one_of(st.none(), st.integers(0, 4)),
)
def test_layout_of_packed_sequences(lengths: list[tuple[int, int]], beyond: int, offset: int | None) -> None:
    block_size, stride = 3, 2
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(side)]) for side in zip(*lengths, strict=True))
    total = int(cu_q[-1]) + beyond
    sequences = geometry.Sequences(1, total, int(cu_k[-1]), torch.device('cpu'), offset, None, cu_q.int(), cu_k.int())
    layout, (compressed, tokens) = sequences.layout(), sequences.compressed_layout(block_size, stride)
    block_start = 0
    for sequence, (queries, keys) in enumerate(lengths):
        blocks = geometry.num_compressed_blocks(keys, block_size, stride)
        for t in range(queries):
            at = (0, int(cu_q[sequence]) + t)
            assert layout.position[at] == t + (keys - queries if offset is None else offset)
            assert (layout.key_start[at], layout.key_len[at], tokens[at]) == (cu_k[sequence], keys, keys)
            assert (compressed.key_start[at], compressed.key_len[at]) == (block_start, blocks)
            assert compressed.position[at] == layout.position[at]
        block_start += blocks
    assert layout.covered[0].tolist() == [True] * (total - beyond) + [False] * beyond
    assert layout.key_len[0, total - beyond :].eq(0).all()
    rows = torch.arange(0, total, 2)[None]
    drawn = sequences.layout(rows), sequences.compressed_layout(block_size, stride, rows)[0]
    for some, every in zip(drawn, (layout, compressed), strict=True):
        assert all(torch.equal(a, b[:, ::2]) for a, b in zip(vars(some).values(), vars(every).values(), strict=True))


@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=5), beyond=st.integers(0, 4), stride=small, extra=small
)
def test_starts_of_packed_blocks(lengths: list[int], beyond: int, stride: int, extra: int) -> None:
    block_size = stride + extra
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths) + beyond
    expected = [
        start + c * stride
        for start, length in zip(cu_seqlens.tolist(), lengths, strict=False)
        for c in range(geometry.num_compressed_blocks(length, block_size, stride))
    ]
    starts = geometry.packed_block_starts(cu_seqlens, total, block_size, stride)
    assert len(starts) == total // stride >= len(expected)
    assert starts[: len(expected)].tolist() == expected
    assert all(0 <= start <= max(0, total - block_size) for start in starts.tolist())


@pytest.mark.parametrize('offset', [None, 3, torch.tensor([2, 5], dtype=torch.int32)])
def test_layout_of_rows(offset: int | torch.Tensor | None) -> None:
    seqlens_k = torch.tensor([7, 9], dtype=torch.int32)
    sequences = geometry.Sequences(2, 4, 9, torch.device('cpu'), offset, seqlens_k)
    layout, rows = sequences.layout(), torch.tensor([[0, 3], [1, 2]])
    first = [3, 5] if offset is None else offset
    first = first.tolist() if isinstance(first, torch.Tensor) else [first] * 2 if isinstance(first, int) else first
    assert layout.position.tolist() == [[start + t for t in range(4)] for start in first]
    assert layout.key_len.tolist() == [[7] * 4, [9] * 4]
    position, own = layout.key_position(torch.arange(10)[None, None])
    assert own.sum(-1).tolist() == [[7] * 4, [9] * 4]
    assert position.shape == (2, 4, 10)
    for some, every in zip(vars(sequences.layout(rows)).values(), vars(layout).values(), strict=True):
        assert torch.equal(some, every.gather(1, rows))
