"""What a row takes: sort_keys of blocks, the largest of them that are topk from tile to tile, their order."""

# To pyright a jit function that another calls never returns, nor does tl.static_range.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from math import comb

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import find_largest

# More levels than these would not stay in registers.
MAX_LEVELS = 6


def count_levels(num_selected: int, num_columns: int) -> int:
    """How many blocks a column keeps, so that of rows whose blocks have unrelated scores fewer than one in a hundred
    takes as many from one column; 0 where these are too many.
    """
    levels = 1
    while levels < num_selected and 100 * comb(num_selected, levels) > num_columns ** (levels - 1):
        levels += 1
    return levels if levels <= MAX_LEVELS else 0


@triton.jit
def make_sort_keys(
    scores, next_scores, first_block, own_block, num_blocks, selection, CAUSAL: tl.constexpr, ADDS_TO_NEXT: tl.constexpr
):
    """Of a tile's blocks, `[T, J]`: the larger the earlier a block is selected, of equal ones the lower block; -1 where it
    is not to be selected. scores, and what the next block has besides: `[J, T]`.
    """
    places = tl.arange(0, scores.shape[0])[None, :]
    if ADDS_TO_NEXT:
        score, adds_to_next = tl.split(tl.permute(tl.join(scores, next_scores), (1, 0, 2)))
        score += tl.gather(adds_to_next, tl.broadcast_to(tl.maximum(places - 1, 0), adds_to_next.shape), 1)
    else:
        score = tl.trans(scores)
    # Bits of floats that are not negative are in the order of the floats.
    sort_keys = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    if ADDS_TO_NEXT:
        sort_keys = tl.where(places > 0, sort_keys, -1)
    is_first = first_block < selection.num_init
    if is_first | (
        first_block + scores.shape[0] > tl.minimum(tl.min(own_block, 0) - selection.num_local + 1, num_blocks)
    ):
        sort_keys = _force_blocks(sort_keys, first_block + places, own_block[:, None], num_blocks, selection, CAUSAL)
    return sort_keys


@triton.jit
def _force_blocks(sort_keys, block, own_block, num_blocks, selection, CAUSAL: tl.constexpr):
    """With the sort_keys of geometry.forced_priority, above all scores, for forced blocks, and -1 for those that are not to
    be chosen.
    """
    distance = own_block - block
    reach = tl.abs(distance)
    is_local = reach < selection.num_local
    choosable = (block < num_blocks) & (sort_keys >= 0)
    if CAUSAL:
        is_local = is_local & (distance >= 0)
        choosable = choosable & (distance >= 0)
    priority = tl.where(is_local, 2 * (selection.num_local - reach) + (distance > 0).to(tl.int32), 0)
    initial = selection.num_init - block + 2 * selection.num_local
    priority = tl.where(block < selection.num_init, tl.maximum(priority, initial), priority)
    priority = tl.where(is_local & (distance == 0), 2 * selection.num_local + selection.num_init + 1, priority)
    return tl.where(choosable, tl.where(priority > 0, 0x7F800000 + priority, sort_keys), -1)


@triton.jit
def start_selection(limit, BLOCK_N: tl.constexpr):
    """What rows have selected, which is nothing: blocks, `[T, N]`, 2**30 behind them; how many and of how many, `[T, 1]`;
    sort_key and block of the last one, `[T, 1]`, before all that is still to be selected. limit: `[T]`.
    """
    rows: tl.constexpr = limit.shape[0]
    none = tl.zeros([rows, 1], tl.int32)
    return tl.full([rows, BLOCK_N], 2**30, tl.int32), none, limit[:, None], none + (2**31 - 1), none - 1


@triton.jit
def start_topk(limit, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr):
    """Ranks and blocks of nothing: LEVELS times `[T, J]`, or, LEVELS being 0, `[T, N]`."""
    rows: tl.constexpr = limit.shape[0]
    if LEVELS > 0:
        none = tl.full([rows, BLOCK_J], -1, tl.int32)
        topk = ((none, none),)
        for _ in tl.static_range(1, LEVELS):
            topk += ((none, none),)
    else:
        # Empty slots sort_key below all blocks, and hold none that there is. Slots behind a row are never the smallest.
        slots = tl.arange(0, BLOCK_N)[None, :]
        empty = tl.where(slots < limit[:, None], -1, 2**31 - 1)
        topk = ((empty, tl.broadcast_to(-1 - slots, [rows, BLOCK_N])),)
    return topk


@triton.jit
def update_topk(topk, sort_keys, block, selected, num_selected, LEVELS: tl.constexpr):
    """What is topk, with the sort_keys of a tile, whose blocks are higher than those before."""
    if LEVELS > 0:
        _, _, _, sort_key, last = selected
        sort_keys = tl.where((sort_keys < sort_key) | ((sort_keys == sort_key) & (block > last)), sort_keys, -1)
        topk = _insert(topk, sort_keys, tl.broadcast_to(block, sort_keys.shape), LEVELS)
    else:
        topk = (_replace(topk[0], sort_keys, block, num_selected),)
    return topk


@triton.jit
def _insert(columns, sort_keys, block, LEVELS: tl.constexpr):
    """Columns of LEVELS sort_keys, the largest first, and their blocks, with one more each. No thread asks another."""
    sort_key, held = columns[0]
    is_larger = sort_keys > sort_key
    topk = ((tl.maximum(sort_key, sort_keys), tl.where(is_larger, block, held)),)
    for level in tl.static_range(1, LEVELS):
        # What has to make room in the level above, or what is new. Of equal sort_keys the lower block stays above.
        sort_keys, block = tl.minimum(sort_key, sort_keys), tl.where(is_larger, held, block)
        sort_key, held = columns[level]
        is_larger = is_larger | (sort_keys > sort_key)
        topk += ((tl.maximum(sort_key, sort_keys), tl.where(is_larger, block, held)),)
    return topk


@triton.jit
def _replace(topk, sort_keys, block, num_selected):
    """Per row the largest of both, as many as are topk: the smallest that is topk, of equal ones that of the highest
    block, makes room for the largest sort_key as long as that is larger. topk: sort_keys and their blocks, lower ones than
    `block`.
    """
    topk, topk_blocks = topk
    smallest = tl.min(topk, 1)[:, None]
    num_larger = tl.sum((sort_keys > smallest).to(tl.int32), 1)[:, None]
    for _ in tl.range(0, tl.minimum(find_largest(num_larger), num_selected)):
        largest = tl.max(sort_keys, 1)[:, None]
        best = tl.min(tl.where(sort_keys == largest, block, 2**30), 1)[:, None]
        worst = tl.max(tl.where(topk == smallest, topk_blocks, -(2**30)), 1)[:, None]
        replaced = (topk_blocks == worst) & (largest > smallest)
        topk = tl.where(replaced, largest, topk)
        topk_blocks = tl.where(replaced, best, topk_blocks)
        sort_keys = tl.where(block == best, -1, sort_keys)
        smallest = tl.min(topk, 1)[:, None]
    return topk, topk_blocks


@triton.jit
def select_largest(topk, selected, num_selected, LEVELS: tl.constexpr):
    """What rows have selected, with what they take of what was topk, and whether one has to see all tiles once more,
    because a full column gave all its blocks. It goes on behind the last one that it took.
    """
    chosen, count, limit, sort_key, last = selected
    if LEVELS > 0:
        slots = tl.arange(0, chosen.shape[1])[None, :]
        # Behind a column that is full may be anything.
        beyond = tl.where(topk[LEVELS - 1][0] >= 0, 2**31 - 1, -1)
        for _ in tl.range(0, num_selected):
            sort_keys, blocks = topk[0]
            largest = tl.max(sort_keys, 1)[:, None]
            best = tl.min(tl.where(sort_keys == largest, blocks, 2**30), 1)[:, None]
            is_known = (largest >= 0) & (largest < 2**31 - 1) & (count < limit)
            chosen = tl.where(is_known & (slots == count), best, chosen)
            sort_key, last = tl.where(is_known, largest, sort_key), tl.where(is_known, best, last)
            count += is_known.to(tl.int32)
            topk = _move_up(topk, is_known & (sort_keys == largest) & (blocks == best), beyond, LEVELS)
        is_open = (tl.max(topk[0][0], 1)[:, None] == 2**31 - 1) & (count < limit)
        is_incomplete = find_largest(is_open.to(tl.int32)) > 0
    else:
        sort_keys, blocks = topk[0]
        chosen = tl.where((sort_keys >= 0) & (blocks >= 0), blocks, chosen)
        is_incomplete = num_selected < 0
    return (chosen, count, limit, sort_key, last), is_incomplete


@triton.jit
def _move_up(columns, is_taken, beyond, LEVELS: tl.constexpr):
    """Columns without their first block where it was selected."""
    sort_key, block = columns[0]
    moved = ()
    for level in tl.static_range(1, LEVELS):
        below, block_below = columns[level]
        moved += ((tl.where(is_taken, below, sort_key), tl.where(is_taken, block_below, block)),)
        sort_key, block = below, block_below
    return moved + ((tl.where(is_taken, beyond, sort_key), block),)  # noqa: RUF005


@triton.jit
def sort_blocks(blocks, num_selected):
    """Rows of blocks ascending, 2**30 for none there and -1 for none here."""
    indices = tl.full(blocks.shape, -1, tl.int32)
    slots = tl.arange(0, blocks.shape[1])[None, :]
    # One after the other: tl.sort takes a minute to compile for long rows.
    for slot in tl.range(0, num_selected):
        lowest = tl.min(blocks, 1)[:, None]
        indices = tl.where((slots == slot) & (lowest < 2**30), lowest, indices)
        blocks = tl.where(blocks == lowest, 2**30, blocks)
    return indices
