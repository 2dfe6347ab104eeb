"""Which keys a query reads, which queries read a key, and the tiles in which loops visit them."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops._triton.varlen import count_blocks, load_extent


class Interval(NamedTuple):
    """Interval of keys of the query at position t: t - left <= key and key * stride + reach <= t.

    left, reach: None if that side is unbounded. num_memory: M memory keys, which every query reads and which stand
    before all others on the key axis; None without any. block_size, stride: of the compressed blocks that are the keys
    (1, 1: tokens). num_keys: C, all keys of a row but memory.
    """

    left: int | None
    reach: int | None
    block_size: int
    stride: int
    num_memory: int | None
    num_keys: int


class Tile(NamedTuple):
    """Sizes of a program's tiles, a compile-time constant.

    head_dim, value_dim: D, DV. block_m, block_n: queries (with several heads each, rows) and keys. block_d, block_dv:
    padded head sizes. int64_offsets: whether an element offset within one batch row may exceed int32.
    """

    head_dim: int
    value_dim: int
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    int64_offsets: bool


@triton.jit
def open_tile(interval, layout, located, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the rows of a query tile found by `locate_queries`: every query with each of HEADS heads.

    Returns the first head; the batch row and, per row of the tile, head, query index in the tensors and a mask; the
    positions; the sequence's first key without memory, and its number of keys.
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
    """Return the key tiles of a query tile of TILE queries: the end of the keys that it reads, the tiles
    (`split_range`), and the limits of each row (`key_limits`). positions: of the rows.
    """
    sequence, _, _, first_query, num_queries, _, offset = located
    last_position = offset + tl.minimum(first_query + TILE, num_queries) - 1
    # As if the tile were full: the order of the keys must not depend on the queries that follow.
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
    """Return the keys [first, last) that some query at first_position ... last_position reads, and the keys
    [full_first, full_last) that all of them would read up to end_position. Memory is not included.
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
    """Return the queries [first, last) that read some key of first_key ... last_key, and the queries [full_first,
    full_last) that read all of them, as indices in their sequence. offset: position of the first query. Memory keys are
    negative.
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
    """Return the keys [firsts, lasts) before `last` that each query at these positions reads, without memory. firsts is
    unused if `left` is None.
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
    """Return `[rows, BLOCK]`: whether a query with these limits reads a key, for the keys from `start` on. Memory keys
    are negative.
    """
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
    BLOCK: tl.constexpr,
    tile: tl.constexpr,
):
    """Load a tile of keys or values `[block_n, BLOCK]` with SIZE elements, from `start` on.

    source: the tensor's descriptor (`describe_tiles`), batch row and head for it, and a pointer to that row and head.
    MASKED: keys from `last` on are 0; loaded by the descriptor they are whatever follows in the tensor, but not with
    CONTAIN_NONFINITE.
    """
    BLOCK_N: tl.constexpr = tile.block_n
    tiles, row, head, ptr, stride = source
    num_memory = 0 if interval.num_memory is None else interval.num_memory
    if tiles is not None and not CONTAIN_NONFINITE and (not MASKED or interval.num_memory is None):
        keys = load_tile(
            tiles, None, row, key_start + num_memory + start, head, None, SIZE, BLOCK_N, BLOCK, tile.int64_offsets
        )
    else:
        keys = start + tl.arange(0, BLOCK_N)
        rows = keys + num_memory + (key_start if interval.num_memory is None else tl.where(keys < 0, 0, key_start))
        mask = keys < last if MASKED else tl.full([BLOCK_N], 1, tl.int1)
        keys = load_rows(ptr, rows, stride, mask, SIZE, BLOCK, tile.int64_offsets)
    return keys


@triton.jit
def query_limits(interval, keys, last, offset):
    """Return the queries [firsts, lasts) before `last` that read each of these keys. firsts is unused if `reach` is
    None.
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
    """Return `[keys, BLOCK]`: whether a key with these limits is read by a query, for the queries from `start` on."""
    queries = tl.arange(0, BLOCK)[None, :]
    firsts, lasts = limits
    read = queries < (lasts - start)[:, None]
    if interval.reach is not None:
        read = read & (queries >= (firsts - start)[:, None])
    return read


@triton.jit
def _first_query(interval, key, offset):
    """Return the first query that reads a key."""
    return tl.where(key < 0, 0, tl.maximum(key * interval.stride + interval.reach - offset, 0))


@triton.jit
def _count(position, reach, stride):
    """Return the number of keys with key * stride + reach <= position."""
    return tl.maximum(position - reach + stride, 0) // stride


@triton.jit
def split_range(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Split [first, last) into tiles: masked tiles at both ends, since not every row reads [first, full_first) and
    [full_last, last), and unmasked tiles in the middle.

    Tiles are numbered from the left end to the right end and then through the middle. The result is the argument of
    `find_start`; its last two entries are the number of tiles at both ends, and of all tiles.
    """
    last = tl.maximum(first, last)
    left_tiles = tl.cdiv(tl.minimum(tl.maximum(full_first, first), last) - first, BLOCK)
    middle = tl.minimum(first + left_tiles * BLOCK, last)
    right = middle + tl.maximum(full_last - middle, 0) // BLOCK * BLOCK
    end_tiles = left_tiles + tl.cdiv(last - right, BLOCK)
    return first, left_tiles, middle, right, end_tiles, end_tiles + (right - middle) // BLOCK


@triton.jit
def find_start(tiles, tile, MASKED: tl.constexpr, CONTAIN_NONFINITE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first element of a tile: one at the ends if MASKED, any if CONTAIN_NONFINITE, else
    one in the middle.
    """
    first, left_tiles, middle, right, end_tiles, _ = tiles
    start = middle + (tile - end_tiles) * BLOCK
    if MASKED:
        at_end = tl.where(tile < left_tiles, first + tile * BLOCK, right + (tile - left_tiles) * BLOCK)
        start = tl.where(tile < end_tiles, at_end, start) if CONTAIN_NONFINITE else at_end
    return start
