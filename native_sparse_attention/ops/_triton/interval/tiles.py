"""Which keys a query reads, which queries read a key, and in what tiles they are gone through."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Interval(NamedTuple):
    """Which keys the query at position t reads: those with t - left <= key and key * stride + reach <= t.

    left, reach: None where that side is unbounded. num_memory: keys before the first one, which every query reads;
    they stand before all others on the key axis. block_size, stride: keys are the compressed blocks of so many tokens
    (1, 1: the tokens themselves). num_keys: C, all keys of a row but memory.
    """

    left: int | None
    reach: int | None
    block_size: int
    stride: int
    num_memory: int
    num_keys: int


@triton.jit
def key_range(interval, first_position, last_position, num_keys):
    """Keys [first, last) that one of the queries at first_position ... last_position reads, and those [full_first,
    full_last) that all of them read; memory apart.
    """
    first = 0
    full_first = 0
    if interval.left is not None:
        first = tl.maximum(first_position - interval.left, 0)
        full_first = tl.maximum(last_position - interval.left, 0)
    last = num_keys
    full_last = num_keys
    if interval.reach is not None:
        last = tl.minimum(num_keys, _count(last_position, interval.reach, interval.stride))
        full_last = tl.minimum(num_keys, _count(first_position, interval.reach, interval.stride))
    return first, last, full_first, full_last


@triton.jit
def query_range(interval, first_key, last_key, num_queries, offset):
    """Queries [first, last) that read one of the keys first_key ... last_key, and those [full_first, full_last) that
    read them all, as indices in their sequence; their positions begin at offset.
    """
    first = 0
    full_first = 0
    if interval.reach is not None:
        first = tl.maximum(first_key * interval.stride + interval.reach - offset, 0)
        full_first = tl.maximum(last_key * interval.stride + interval.reach - offset, 0)
    last = num_queries
    full_last = num_queries
    if interval.left is not None:
        last = tl.minimum(num_queries, last_key + interval.left + 1 - offset)
        full_last = tl.minimum(num_queries, first_key + interval.left + 1 - offset)
    return first, last, full_first, full_last


@triton.jit
def is_read(interval, key, position):
    """Whether the query at `position` reads `key`, which exists; memory has the keys below 0."""
    read = key == key
    if interval.left is not None:
        read = read & (position - key <= interval.left)
    if interval.reach is not None:
        read = read & (key * interval.stride + interval.reach <= position)
    if interval.num_memory > 0:
        read = read | (key < 0)
    return read


@triton.jit
def _count(position, reach, stride):
    """How many keys there are with key * stride + reach <= position."""
    return tl.maximum(position - reach + stride, 0) // stride


@triton.jit
def split_range(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """[first, last) in tiles: those at either end, which need a mask because not every row of the other side reads
    [first, full_first) and [full_last, last), and those in the middle. Returns the number of tiles at the left end, the
    first element behind them, the first element of the right end, and the number of tiles at both ends.
    """
    last = tl.maximum(first, last)
    left_tiles = tl.cdiv(tl.minimum(tl.maximum(full_first, first), last) - first, BLOCK)
    middle = tl.minimum(first + left_tiles * BLOCK, last)
    right = middle + tl.maximum(full_last - middle, 0) // BLOCK * BLOCK
    return left_tiles, middle, right, left_tiles + tl.cdiv(last - right, BLOCK)
