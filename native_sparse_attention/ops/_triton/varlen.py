"""Sequence boundaries and query offsets, as a kernel argument (varlen): `geometry.Sequences` on the device.

A tile of queries or of keys belongs to one sequence. The first token of a sequence begins a tile, so a packed sequence
is computed exactly as it is alone. Token indices are int32 and become int64 before they are multiplied by a stride.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences, num_compressed_blocks
from native_sparse_attention.ops._triton.support import MAX_TOKENS


class SequenceLayout(NamedTuple):
    """Sequence boundaries as one kernel argument. Tensors are int32 or int64, contiguous, or None where they are not
    needed.

    num_sequences, seqlen_q, seqlen_k: N (not packed: B), T, S. q_offset: offset of all sequences, or None; q_offsets:
    one per sequence. cu_seqlens, cu_seqlens_k, seqlens_k: as the ops take them. cu_blocks: `[N + 1]`, packed only:
    first compressed block of every sequence.
    """

    num_sequences: int
    seqlen_q: int
    seqlen_k: int
    q_offset: int | None
    q_offsets: Tensor | None
    seqlens_k: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    cu_blocks: Tensor | None


def make_layout(sequences: Sequences, block_size: int = 1, stride: int = 1) -> SequenceLayout:
    """Return the layout of a call. block_size, stride: of the compressed blocks in `cu_blocks`; (1, 1) stands for
    tokens.
    """
    offset, offsets = sequences.q_offset, None
    if isinstance(offset, Tensor):
        offset, offsets = None, offset
    tensors = (offsets, sequences.seqlens_k, sequences.cu_seqlens, sequences.cu_seqlens_k)
    q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k = (t if t is None else t.contiguous() for t in tensors)
    cu_blocks = cu_seqlens_k
    if cu_seqlens_k is not None and (block_size, stride) != (1, 1):
        blocks = num_compressed_blocks(cu_seqlens_k.diff(), block_size, stride)
        cu_blocks = torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))
    return SequenceLayout(
        sequences.batch if cu_seqlens is None else len(cu_seqlens) - 1,
        sequences.seqlen_q,
        min(sequences.seqlen_k, MAX_TOKENS),
        None if offset is None else min(max(offset, -MAX_TOKENS), MAX_TOKENS),
        q_offsets,
        seqlens_k,
        cu_seqlens,
        cu_seqlens_k,
        cu_blocks,
    )


def num_tiles(layout: SequenceLayout, length: int, tile: int) -> int:
    """Return the number of programs that cover an axis of `length` tokens (or blocks) with tiles of one sequence each.

    For packed sequences this is an upper bound that does not depend on values on the device; it includes tokens behind
    the last sequence.
    """
    if layout.cu_seqlens is None:
        return layout.num_sequences * -(-length // tile)
    return length // tile + layout.num_sequences + 1


@triton.jit
def find_tile(index, starts_ptr, length, num_sequences, TILE: tl.constexpr):
    """Return the sequence of tile `index` and the tile's first token in it. Packed: tokens that no sequence covers form
    sequence N.

    Sequence i owns the tile indices from starts[i] // TILE + i on: these suffice for its tiles, and no two sequences
    overlap.
    """
    if starts_ptr is None:
        tiles = tl.cdiv(length, TILE)
        sequence = index // tiles
        first = (index % tiles) * TILE
    else:
        sequence = 0
        above = num_sequences
        while sequence < above:
            middle = (sequence + above + 1) // 2
            if _first_tile(starts_ptr, middle, length, TILE) <= index:
                sequence = middle
            else:
                above = middle - 1
        first = (index - _first_tile(starts_ptr, sequence, length, TILE)) * TILE
        # Starts that begin above 0 or decrease leave tiles without a sequence: these lie behind every sequence.
        first = tl.where(first < 0, length, first)
    return sequence, first


@triton.jit
def _first_tile(starts_ptr, sequence, length, TILE: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(starts_ptr + sequence), 0), length).to(tl.int32) // TILE + sequence


@triton.jit
def find_query(index, layout):
    """Return sequence, row and token of query `index` of all rows. Packed: tokens behind the last sequence form
    sequence N.
    """
    if layout.cu_seqlens is None:
        sequence = index // layout.seqlen_q
        row = sequence
        token = index % layout.seqlen_q
    else:
        row = 0
        token = index
        sequence = 0
        above = layout.num_sequences
        while sequence < above:
            middle = (sequence + above + 1) // 2
            if tl.load(layout.cu_seqlens + middle).to(tl.int32) <= token:
                sequence = middle
            else:
                above = middle - 1
    return sequence, row, token


@triton.jit
def load_extent(starts_ptr, sequence, length, num_sequences):
    """Return row, first token and number of tokens of a sequence on an axis of `length`; packed: of sequence N too."""
    if starts_ptr is None:
        row = sequence
        start = 0
        stop = length
    else:
        row = 0
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + sequence).to(tl.int32), 0), length)
        stop = length
        if sequence < num_sequences:
            stop = tl.minimum(tl.maximum(tl.load(starts_ptr + sequence + 1).to(tl.int32), start), length)
    return row, start, stop - start


@triton.jit
def locate_tokens(tokens, mask, layout):
    """Locate tokens of a packed row. Returns for each token its sequence, its position there, the sequence's first key
    along S, and the sequence's keys in tokens. The number of keys is 0 for tokens of no sequence (sequence N), and for
    a token outside the sequence found for it because the boundaries are not in order.
    """
    sequences = tokens * 0
    step = 1
    while 2 * step <= layout.num_sequences:
        step *= 2
    while step > 0:
        later = sequences + step
        found = mask & (later <= layout.num_sequences)
        starts = tl.load(layout.cu_seqlens + later, mask=found, other=0).to(tl.int32)
        sequences = tl.where(found & (starts <= tokens), later, sequences)
        step = step // 2
    mask = mask & (sequences < layout.num_sequences)
    starts, num_queries = _load_extents(layout.cu_seqlens, sequences, mask, layout.seqlen_q)
    key_starts, num_keys = _load_extents(layout.cu_seqlens_k, sequences, mask, layout.seqlen_k)
    if layout.seqlens_k is not None:
        limits = tl.load(layout.seqlens_k + sequences, mask=mask, other=0).to(tl.int32)
        num_keys = tl.minimum(tl.maximum(limits, 0), num_keys)
    if layout.q_offsets is not None:
        offsets = tl.load(layout.q_offsets + sequences, mask=mask, other=0)
        offsets = tl.minimum(tl.maximum(offsets, -(2**30)), 2**30).to(tl.int32)
    elif layout.q_offset is not None:
        offsets = layout.q_offset
    else:
        offsets = num_keys - num_queries
    queries = tokens - starts
    num_keys = tl.where((queries >= 0) & (queries < num_queries), num_keys, 0)
    return sequences, offsets + queries, key_starts, num_keys


@triton.jit
def _load_extents(starts_ptr, sequences, mask, length):
    """Return first token and number of tokens of sequences on an axis of `length`; 0 and 0 where masked."""
    starts = tl.load(starts_ptr + sequences, mask=mask, other=0).to(tl.int32)
    stops = tl.load(starts_ptr + sequences + 1, mask=mask, other=0).to(tl.int32)
    starts = tl.minimum(tl.maximum(starts, 0), length)
    return starts, tl.minimum(tl.maximum(stops, starts), length) - starts


@triton.jit
def load_num_keys(layout, sequence):
    """Return the keys of a sequence in tokens; 0 for sequence N."""
    num_keys = 0
    if sequence < layout.num_sequences:
        _, _, num_keys = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
        if layout.seqlens_k is not None:
            num_keys = tl.minimum(tl.maximum(tl.load(layout.seqlens_k + sequence).to(tl.int32), 0), num_keys)
    return num_keys


@triton.jit
def load_position(layout, sequence, num_queries, num_keys):
    """Return the position of a sequence's first query."""
    if layout.q_offsets is not None:
        offset = 0
        if sequence < layout.num_sequences:
            offset = tl.load(layout.q_offsets + sequence)
            offset = tl.minimum(tl.maximum(offset, -(2**30)), 2**30).to(tl.int32)
    elif layout.q_offset is not None:
        offset = layout.q_offset
    else:
        offset = num_keys - num_queries
    return offset


@triton.jit
def locate_queries(index, layout, TILE: tl.constexpr):
    """Locate query tile `index`. Returns sequence, row, first token of the sequence, the tile's first query (at or
    behind the last query if the tile is empty), and the sequence's number of queries, its keys in tokens, and its first
    query's position.
    """
    sequence, first_query = find_tile(index, layout.cu_seqlens, layout.seqlen_q, layout.num_sequences, TILE)
    row, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    num_tokens = load_num_keys(layout, sequence)
    offset = load_position(layout, sequence, num_queries, num_tokens)
    return sequence, row, query_start, first_query, num_queries, num_tokens, offset


@triton.jit
def count_blocks(num_tokens, block_size, stride):
    """Return the number of compressed blocks that `num_tokens` tokens complete."""
    return tl.maximum(num_tokens - block_size + stride, 0) // stride


@triton.jit
def floor_divide(a, b):
    """Return a // b rounded down, also below 0, where division on the device rounds towards 0."""
    return tl.maximum(a, 0) // b - (tl.maximum(-a, 0) + b - 1) // b


def last_dim_contiguous(*tensors: Any) -> Any:
    """Return the tensors, copied where the last dimension is not contiguous."""
    return tuple(t if t is None or t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous() for t in tensors)


def flatten(sequences: Sequences) -> tuple[Any, ...]:
    """Return the sequences as arguments of a registered op (`registered.SEQUENCES`)."""
    offset, offsets = sequences.q_offset, None
    if isinstance(offset, Tensor):
        offset, offsets = None, offset
    tensors = (sequences.seqlens_k, sequences.cu_seqlens, sequences.cu_seqlens_k)
    return min(sequences.seqlen_k, MAX_TOKENS), offset, offsets, *tensors


def unflatten(q: Tensor, flat: Iterable[Any]) -> Sequences:
    """Return the sequences from the result of `flatten`; q is `[B, T, ...]`."""
    seqlen_k, q_offset, q_offsets, *tensors = flat
    return Sequences(*q.shape[:2], seqlen_k, q.device, q_offset if q_offsets is None else q_offsets, *tensors)
