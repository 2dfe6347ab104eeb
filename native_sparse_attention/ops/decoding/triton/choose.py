"""The third launch of a step: the best blocks of every chunk of a row, from the sums that the second one left."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops.decoding.triton.storage import (
    let_next_launch_begin,
    load_lengths,
    wait_for_launch_before,
)

# Most keys that are put in order by comparing all pairs of them, in registers.
MAX_COUNTED = tl.constexpr(128)
# Less than any key.
TAKEN = tl.constexpr(-(2**40))


class Choice(NamedTuple):
    """num_selected: n, the blocks that a query reads. num_init, num_local: forced ones. A constant of kernels."""

    num_selected: int
    num_init: int
    num_local: int


@triton.jit
def choose_kernel(
    stats_ptr,
    sums_ptr,
    maxima_ptr,
    best_ptr,
    chosen_ptr,
    lengths_ptr,
    capacity,
    num_splits,
    room,
    step: tl.constexpr,
    sizes: tl.constexpr,
    choice: tl.constexpr,
    GROUP: tl.constexpr,
    CHOOSERS: tl.constexpr,
    HANDED_ON: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row, token, chooser and chunk of BLOCK_J selection blocks. GROUP: heads of a key head, of which
    each of CHOOSERS has its share; TILE: blocks that have a maximum in common.

    best: int64 `[B, T, choosers, chunks, n]`, the first n of a chunk in their order: what `rank` gives in the upper
    half of the bits, and in the lower one the complement of the block; negative where there are no more. chosen: int32
    `[B, T, choosers, n]`, their blocks where a row is one chunk, -1 where there are no more.
    """
    query, chunk = tl.program_id(0), tl.program_id(1)
    choosers: tl.constexpr = step.kv_heads * CHOOSERS
    chooser = query % choosers
    token = query // choosers % step.num_tokens
    row = query // choosers // step.num_tokens
    old, length = load_lengths(lengths_ptr, row, capacity, step)
    position = old + token
    wait_for_launch_before(OVERLAPS)
    let_next_launch_begin(OVERLAPS)

    tiles: tl.constexpr = BLOCK_J // TILE
    tile = chunk * tiles + tl.arange(0, tiles)
    num_tiles = tl.cdiv(length, TILE * sizes.selection_block_size)
    # The last tile of the chunk before, which hands on to the first block of this one.
    tile_before = chunk * tiles - 1 + tl.arange(0, 1)
    score, onward = tl.zeros([BLOCK_J], tl.float32), tl.zeros([BLOCK_J], tl.float32)
    before = tl.zeros([TILE], tl.float32)
    share: tl.constexpr = GROUP // CHOOSERS
    splits = tl.arange(0, BLOCK_S)
    for start in range(0, share, BLOCK_G):
        heads = start + tl.arange(0, BLOCK_G)
        is_head = heads < share
        unit = row.to(tl.int64) * step.kv_heads + chooser // CHOOSERS
        member = (unit * step.num_tokens + token) * GROUP + chooser % CHOOSERS * share + heads
        # All loads first: they do not wait for each other.
        own = _load_sums(sums_ptr, maxima_ptr, member, is_head, tile, num_tiles, room, TILE)
        if HANDED_ON:
            onward_ptr = sums_ptr + room.num_blocks
            handed = _load_sums(onward_ptr, maxima_ptr, member, is_head, tile, num_tiles, room, TILE)
            handed_before = _load_sums(onward_ptr, maxima_ptr, member, is_head, tile_before, num_tiles, room, TILE)
        stats = stats_ptr + 2 * ((member * num_splits)[:, None] + splits[None, :])
        mask = is_head[:, None] & (splits < num_splits)[None, :]
        largest = tl.load(stats, mask=mask, other=float('-inf'))
        total = tl.load(stats + 1, mask=mask, other=0.0)
        base = tl.max(largest, 1)
        base = tl.where(base == float('-inf'), 0.0, base)
        total = tl.sum(total * tl.exp2(largest - base[:, None]), 1)  # [BLOCK_G]
        score += _add_heads(own, base, total)
        if HANDED_ON:
            onward += _add_heads(handed, base, total)
            before += _add_heads(handed_before, base, total)

    places = tl.arange(0, BLOCK_J)
    if HANDED_ON:
        last = tl.sum(tl.where(tl.arange(0, TILE) == TILE - 1, before, 0.0), 0)
        score += tl.where(places == 0, last, tl.gather(onward, tl.maximum(places - 1, 0), 0))
    block = chunk * BLOCK_J + places
    own_block = position // sizes.selection_block_size
    choosable = (block <= own_block) & (block < tl.cdiv(length, sizes.selection_block_size))
    keys = (rank(score, block, own_block, choice).to(tl.int64) << 32) + (2**31 - 1 - block)
    keys = tl.where(choosable, keys, -1 - block)
    best_ptr += (query.to(tl.int64) * tl.num_programs(1) + chunk) * choice.num_selected
    chosen_ptr += query.to(tl.int64) * choice.num_selected
    if BLOCK_J <= MAX_COUNTED:
        place = count_larger(keys)
        tl.store(best_ptr + place, keys, mask=place < choice.num_selected)
        if tl.num_programs(1) == 1:
            tl.store(chosen_ptr + place, block_of(keys), mask=place < choice.num_selected)
    for slot in range(0 if BLOCK_J <= MAX_COUNTED else choice.num_selected):
        best = tl.max(keys, 0)
        tl.store(best_ptr + slot, best)
        if tl.num_programs(1) == 1:
            tl.store(chosen_ptr + slot, block_of(best))
        keys = tl.where(keys == best, TAKEN, keys)


@triton.jit
def count_larger(keys):
    """How many of keys `[J]` are larger, for each of them."""
    return tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)


@triton.jit
def block_of(keys):
    """The blocks of keys, -1 for what is none."""
    return tl.where(keys < 0, -1, 2**31 - 1 - (keys & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def _load_sums(sums_ptr, maxima_ptr, member, is_head, tile, num_tiles, room, TILE: tl.constexpr):
    """Sums of the blocks of tiles `[G, tiles, TILE]`, and what they are relative to, `[G, tiles]`."""
    mask = is_head[:, None] & ((tile >= 0) & (tile < num_tiles))[None, :]
    offsets = (member * 2 * room.num_blocks)[:, None] + (tile * TILE)[None, :]
    pointers = sums_ptr + offsets[:, :, None] + tl.arange(0, TILE)[None, None, :]
    sums = tl.load(pointers, mask=mask[:, :, None], other=0.0)
    maxima = tl.load(maxima_ptr + (member * room.num_tiles)[:, None] + tile[None, :], mask=mask, other=0.0)
    return sums, maxima


@triton.jit
def _add_heads(sums_and_maxima, base, total):
    """Sums `[G, tiles, TILE]` as weights of a softmax, added up over heads, `[tiles * TILE]`."""
    sums, maxima = sums_and_maxima
    factors = tl.exp2(maxima - base[:, None]) * (1.0 / total)[:, None]
    # Where nothing is seen there are no weights to scale.
    weights = tl.where(sums != 0, sums * factors[:, :, None], 0.0)
    return tl.reshape(tl.sum(weights, 0), [weights.shape[1] * weights.shape[2]])


@triton.jit
def rank(score, block, own_block, choice: tl.constexpr):
    """The larger the earlier a block is taken. Forced blocks have the ranks of geometry.forced_priority, above all
    scores.
    """
    distance = own_block - block
    is_local = (distance >= 0) & (distance < choice.num_local)
    priority = tl.where(is_local, 2 * (choice.num_local - distance) + (distance > 0).to(tl.int32), 0)
    initial = choice.num_init - block + 2 * choice.num_local
    priority = tl.where(block < choice.num_init, tl.maximum(priority, initial), priority)
    priority = tl.where(is_local & (distance == 0), 2 * choice.num_local + choice.num_init + 1, priority)
    # Bits of floats that are not negative are in the order of the floats.
    bits = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    return tl.where(priority > 0, 0x7F800000 + priority, bits)
