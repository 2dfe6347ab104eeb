"""Where queries stand among keys, as kernels see it: geometry.Sequences on the device.

A tile of queries or of keys belongs to one sequence, so the first token of a sequence begins a tile and a packed
sequence is computed as it is alone. Tokens are counted in int32 and become int64 before a stride is multiplied.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences, num_compressed_blocks
from native_sparse_attention.ops._triton.support import MAX_TOKENS


class SequenceLayout(NamedTuple):
    """One argument of a kernel. Tensors are int32 or int64, contiguous, or None where a call does without them.

    num_sequences, seqlen_q, seqlen_k: N (not packed: B), T, S. q_offset: of all sequences, or None; q_offsets: one per
    sequence. cu_seqlens, cu_seqlens_k, seqlens_k: as the ops take them. cu_blocks: `[N + 1]`, packed: where the
    compressed blocks of a sequence begin.
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
    """block_size, stride: of the compressed blocks that `cu_blocks` counts; 1 and 1 stand for tokens."""
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
    """Programs that cover an axis of `length` tokens (or blocks) in tiles of one sequence each; packed: a bound that
    does not depend on values on the device, with the tokens behind the last sequence among them.
    """
    if layout.cu_seqlens is None:
        return layout.num_sequences * -(-length // tile)
    return length // tile + layout.num_sequences + 1


@triton.jit
def find_tile(index, starts_ptr, length, num_sequences, TILE: tl.constexpr):
    """Sequence of tile `index` and its first token in that sequence. Packed: what no sequence covers is sequence N.

    Sequence i owns the indices from starts[i] // TILE + i on: these are enough for its tiles, and no two overlap.
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
        # Starts that begin above 0 or decrease leave tiles to nobody: these lie behind every sequence.
        first = tl.where(first < 0, length, first)
    return sequence, first


@triton.jit
def _first_tile(starts_ptr, sequence, length, TILE: tl.constexpr):
    return tl.minimum(tl.maximum(tl.load(starts_ptr + sequence), 0), length).to(tl.int32) // TILE + sequence


@triton.jit
def find_query(index, layout):
    """Sequence, row and token of query `index` of all rows. Packed: tokens behind the last one form sequence N."""
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
    """Row, first token and number of tokens of a sequence on an axis of `length`; packed: of sequence N too."""
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
    """Of each token of a packed row: the sequence, the token's position there, the sequence's first key along S, and
    its keys in tokens: none for what no sequence covers (sequence N), and for a token that lies outside of the sequence
    found for it because the borders are not in order.
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
    """First token and number of tokens of sequences on an axis of `length`; 0 and 0 where the mask leaves one out."""
    starts = tl.load(starts_ptr + sequences, mask=mask, other=0).to(tl.int32)
    stops = tl.load(starts_ptr + sequences + 1, mask=mask, other=0).to(tl.int32)
    starts = tl.minimum(tl.maximum(starts, 0), length)
    return starts, tl.minimum(tl.maximum(stops, starts), length) - starts


@triton.jit
def load_num_keys(layout, sequence):
    """Keys of a sequence in tokens; 0 for the tokens that no sequence covers."""
    num_keys = 0
    if sequence < layout.num_sequences:
        _, _, num_keys = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
        if layout.seqlens_k is not None:
            num_keys = tl.minimum(tl.maximum(tl.load(layout.seqlens_k + sequence).to(tl.int32), 0), num_keys)
    return num_keys


@triton.jit
def load_position(layout, sequence, num_queries, num_keys):
    """Position of a sequence's first query."""
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
    """Of tile `index` of the queries: sequence, row, first token of the sequence, the tile's first query (at or behind
    the last one where it holds none), and of the sequence the queries, the keys in tokens, the first query's position.
    """
    sequence, first_query = find_tile(index, layout.cu_seqlens, layout.seqlen_q, layout.num_sequences, TILE)
    row, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    num_tokens = load_num_keys(layout, sequence)
    offset = load_position(layout, sequence, num_queries, num_tokens)
    return sequence, row, query_start, first_query, num_queries, num_tokens, offset


@triton.jit
def count_blocks(num_tokens, block_size, stride):
    """Compressed blocks that `num_tokens` tokens complete."""
    return tl.maximum(num_tokens - block_size + stride, 0) // stride


@triton.jit
def floor_divide(a, b):
    """Rounded down, below 0 too, where a division on the device rounds towards 0."""
    return tl.maximum(a, 0) // b - (tl.maximum(-a, 0) + b - 1) // b


def last_dim_contiguous(*tensors: Any) -> Any:
    """The tensors, copied where neighbours in the last dimension are not neighbours in memory."""
    return tuple(t if t is None or t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous() for t in tensors)


# The sequences of a call as a registered op takes them: seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens,
# cu_seqlens_k.
FlatSequences = tuple[int, int | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def flatten(sequences: Sequences) -> FlatSequences:
    offset = sequences.q_offset
    offsets = offset if isinstance(offset, Tensor) else None
    return (
        min(sequences.seqlen_k, MAX_TOKENS),
        None if isinstance(offset, Tensor) else offset,
        offsets,
        sequences.seqlens_k,
        sequences.cu_seqlens,
        sequences.cu_seqlens_k,
    )


def unflatten(q: Tensor, flat: FlatSequences) -> Sequences:
    """What `flatten` was given; q is `[B, T, ...]`."""
    seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k = flat
    offset = q_offset if q_offsets is None else q_offsets
    return Sequences(*q.shape[:2], seqlen_k, q.device, offset, seqlens_k, cu_seqlens, cu_seqlens_k)
