"""Which keys a query reads, which queries read a key, and in what tiles they are gone through."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops._triton.varlen import count_blocks, load_extent


class Interval(NamedTuple):
    """Which keys the query at position t reads: those with t - left <= key and key * stride + reach <= t.

    left, reach: None where that side is unbounded. num_memory: keys before the first one, which every query reads
    (None: there are none); they stand before all others on the key axis. block_size, stride: keys are the compressed
    blocks of so many tokens (1, 1: the tokens themselves). num_keys: C, all keys of a row but memory.
    """

    left: int | None
    reach: int | None
    block_size: int
    stride: int
    num_memory: int | None
    num_keys: int


@triton.jit
def open_tile(interval, layout, located, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile that `locate_queries` found, of every query with every one of HEADS heads. Returns the first head; the row
    of the batch, and of each row of the tile the head, the query in the tensors and a mask; their positions; and the
    sequence's first key, memory apart, and how many there are.
    """
    sequence, row, query_start, first_query, num_queries, num_tokens, offset = located
    _, key_start, num_keys = load_extent(layout.cu_blocks, sequence, interval.num_keys, layout.num_sequences)
    num_keys = tl.minimum(count_blocks(num_tokens, interval.block_size, interval.stride), num_keys)
    tile_rows = tl.arange(0, BLOCK_M)
    queries = first_query + tile_rows // HEADS
    query_mask = queries < num_queries
    query_rows = query_start + queries
    positions = offset + queries
    row, first_head = row.to(tl.int64), tl.program_id(1).to(tl.int64) * HEADS
    heads = first_head + tile_rows % HEADS
    return first_head, (row, heads, query_rows, query_mask), positions, key_start, num_keys


@triton.jit
def key_tiles(interval, layout, located, positions, num_keys, TILE: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a tile of TILE queries, its rows at these positions, reads of num_keys keys: where that ends, in which tiles
    it is gone through (`split_range`), and what each row reads (`key_limits`).
    """
    sequence, _, _, first_query, num_queries, _, offset = located
    last_position = offset + tl.minimum(first_query + TILE, num_queries) - 1
    # As if the tile were full: queries that follow must not change in what order keys are gone through.
    end_position = offset + first_query + TILE - 1
    first, last, full_first, full_last = key_range(
        interval, offset + first_query, last_position, end_position, num_keys
    )
    if interval.num_memory is not None and sequence < layout.num_sequences:
        first = -interval.num_memory
        full_first = first
    tiles = split_range(first, last, full_first, full_last, BLOCK_N)
    return last, tiles, key_limits(interval, positions, last)


@triton.jit
def key_range(interval, first_position, last_position, end_position, num_keys):
    """Keys [first, last) that one of the queries at first_position ... last_position reads, and those [full_first,
    full_last) that all of them read, and would up to end_position, if there were as many; memory apart.
    """
    first = 0
    full_first = 0
    if interval.left is not None:
        first = tl.maximum(first_position - interval.left, 0)
        full_first = tl.maximum(end_position - interval.left, 0)
    last = num_keys
    full_last = num_keys
    if interval.reach is not None:
        last = tl.minimum(num_keys, _count(last_position, interval.reach, interval.stride))
        full_last = tl.minimum(num_keys, _count(first_position, interval.reach, interval.stride))
    return first, last, full_first, full_last


@triton.jit
def query_range(interval, first_key, last_key, num_queries, offset):
    """Queries [first, last) that read one of the keys first_key ... last_key, and those [full_first, full_last) that
    read them all, as indices in their sequence; their positions begin at offset. Memory is below 0.
    """
    first = 0
    full_first = 0
    if interval.reach is not None:
        first = _first_query(interval, first_key, offset)
        full_first = _first_query(interval, last_key, offset)
    last = num_queries
    full_last = num_queries
    if interval.left is not None:
        last = tl.minimum(num_queries, last_key + interval.left + 1 - offset)
        full_last = tl.minimum(num_queries, first_key + interval.left + 1 - offset)
    return first, last, full_first, full_last


@triton.jit
def key_limits(interval, positions, last):
    """Of the queries at these positions, the keys [firsts, lasts) before `last` that each of them reads, memory apart.
    Where `left` is None, firsts says nothing.
    """
    firsts = positions
    if interval.left is not None:
        firsts = positions - interval.left
    lasts = positions * 0 + last
    if interval.reach is not None:
        lasts = tl.minimum(last, _count(positions, interval.reach, interval.stride))
    return firsts, lasts


@triton.jit
def reads_keys(interval, limits, start, BLOCK: tl.constexpr):
    """`[rows, BLOCK]`: whether a query with these limits reads one of the keys from `start` on; memory is below 0."""
    keys = tl.arange(0, BLOCK)[None, :]
    firsts, lasts = limits
    read = keys < (lasts - start)[:, None]
    if interval.left is not None:
        is_in_window = keys >= (firsts - start)[:, None]
        if interval.num_memory is not None:
            is_in_window = is_in_window | (keys < -start)
        read = read & is_in_window
    return read


@triton.jit
def load_keys(
    source,
    start,
    last,
    key_start,
    interval,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Keys or values `[BLOCK_N, BLOCK]`, of SIZE elements, from `start` on. source: a tensor's descriptor
    (`describe_tiles`), the row of the batch and the head to read by it, and a pointer to these two. MASKED: from `last`
    on they are 0, or, where there is a descriptor, what follows in the tensor, unless CONTAIN_NONFINITE.
    """
    tiles, row, head, ptr, stride = source
    num_memory = 0 if interval.num_memory is None else interval.num_memory
    if tiles is not None and not CONTAIN_NONFINITE and (not MASKED or interval.num_memory is None):
        keys = load_tile(
            tiles, None, row, key_start + num_memory + start, head, None, True, SIZE, BLOCK_N, BLOCK, INT64_OFFSETS
        )
    else:
        keys = start + tl.arange(0, BLOCK_N)
        rows = keys + num_memory + (key_start if interval.num_memory is None else tl.where(keys < 0, 0, key_start))
        mask = keys < last if MASKED else tl.full([BLOCK_N], 1, tl.int1)
        keys = load_rows(ptr, rows, stride, mask, SIZE, BLOCK, INT64_OFFSETS)
    return keys


@triton.jit
def query_limits(interval, keys, last, offset):
    """Of these keys, the queries [firsts, lasts) before `last` that read each of them. Where `reach` is None, firsts
    says nothing.
    """
    firsts = keys
    if interval.reach is not None:
        firsts = tl.where(keys < 0, 0, keys * interval.stride + interval.reach - offset)
    lasts = keys * 0 + last
    if interval.left is not None:
        lasts = tl.where(keys < 0, last, tl.minimum(last, keys + interval.left + 1 - offset))
    return firsts, lasts


@triton.jit
def is_read_by(interval, limits, start, BLOCK: tl.constexpr):
    """`[keys, BLOCK]`: whether a key with these limits is read by one of the queries from `start` on."""
    queries = tl.arange(0, BLOCK)[None, :]
    firsts, lasts = limits
    read = queries < (lasts - start)[:, None]
    if interval.reach is not None:
        read = read & (queries >= (firsts - start)[:, None])
    return read


@triton.jit
def _first_query(interval, key, offset):
    """The first one that reads a key."""
    return tl.where(key < 0, 0, tl.maximum(key * interval.stride + interval.reach - offset, 0))


@triton.jit
def _count(position, reach, stride):
    """How many keys there are with key * stride + reach <= position."""
    return tl.maximum(position - reach + stride, 0) // stride


@triton.jit
def split_range(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """[first, last) in tiles: those at either end, which need a mask because not every row of the other side reads
    [first, full_first) and [full_last, last), and those in the middle. Tiles are counted from the left end to the right
    one and then through the middle; `find_start` takes what this returns, of which the last two are the number of tiles
    at both ends and of all.
    """
    last = tl.maximum(first, last)
    left_tiles = tl.cdiv(tl.minimum(tl.maximum(full_first, first), last) - first, BLOCK)
    middle = tl.minimum(first + left_tiles * BLOCK, last)
    right = middle + tl.maximum(full_last - middle, 0) // BLOCK * BLOCK
    end_tiles = left_tiles + tl.cdiv(last - right, BLOCK)
    return first, left_tiles, middle, right, end_tiles, end_tiles + (right - middle) // BLOCK


@triton.jit
def find_start(tiles, tile, MASKED: tl.constexpr, CONTAIN_NONFINITE: tl.constexpr, BLOCK: tl.constexpr):
    """The first element of a tile: of those at the ends where MASKED, of any where CONTAIN_NONFINITE, else of the
    middle.
    """
    first, left_tiles, middle, right, end_tiles, _ = tiles
    start = middle + (tile - end_tiles) * BLOCK
    if MASKED:
        at_end = tl.where(tile < left_tiles, first + tile * BLOCK, right + (tile - left_tiles) * BLOCK)
        start = tl.where(tile < end_tiles, at_end, start) if CONTAIN_NONFINITE else at_end
    return start
