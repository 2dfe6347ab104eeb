"""Running top-k of selection blocks: sort keys of scores, candidates kept from tile to tile, and the sorted result."""

# To pyright a jit function that another calls never returns, nor does tl.static_range.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from math import comb

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import find_largest

# More levels would not stay in registers.
MAX_LEVELS = 6


def count_levels(num_selected: int, num_columns: int) -> int:
    """Return the number of candidates kept per column (partial top-k list), or 0 if too many are needed.

    With i.i.d. scores fewer than 1 % of rows need another pass because more of their blocks fall into one column.
    """
    levels = 1
    while levels < num_selected and 100 * comb(num_selected, levels) > num_columns ** (levels - 1):
        levels += 1
    return levels if levels <= MAX_LEVELS else 0


@triton.jit
def make_sort_keys(
    scores, next_scores, first_block, own_block, num_blocks, selection, CAUSAL: tl.constexpr, ADDS_TO_NEXT: tl.constexpr
):
    """Return int32 sort keys `[T, J]` of a tile's blocks: larger keys are selected first; -1 if a block must not be
    selected. Ties go to the lower block.

    scores, and the part that each block adds to the next one's score: `[J, T]`.
    """
    columns_of_tile = tl.arange(0, scores.shape[0])[None, :]
    if ADDS_TO_NEXT:
        score, adds_to_next = tl.split(tl.permute(tl.join(scores, next_scores), (1, 0, 2)))
        score += tl.gather(adds_to_next, tl.broadcast_to(tl.maximum(columns_of_tile - 1, 0), adds_to_next.shape), 1)
    else:
        score = tl.trans(scores)
    # The bits of non-negative floats are ordered like the floats.
    sort_keys = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    if ADDS_TO_NEXT:
        sort_keys = tl.where(columns_of_tile > 0, sort_keys, -1)
    is_first = first_block < selection.num_init
    if is_first | (
        first_block + scores.shape[0] > tl.minimum(tl.min(own_block, 0) - selection.num_local + 1, num_blocks)
    ):
        sort_keys = _force_blocks(
            sort_keys, first_block + columns_of_tile, own_block[:, None], num_blocks, selection, CAUSAL
        )
    return sort_keys


@triton.jit
def _force_blocks(sort_keys, block, own_block, num_blocks, selection, CAUSAL: tl.constexpr):
    """Replace the keys of forced blocks by those of geometry.forced_priority, above all scores, and the keys of blocks
    that must not be selected by -1.
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
    """Return the state of a selection without blocks: blocks `[T, N]`, padded with 2**30; their number and its limit,
    `[T, 1]`; sort key and block of the last selected block, `[T, 1]`. limit: `[T]`.
    """
    rows: tl.constexpr = limit.shape[0]
    none = tl.zeros([rows, 1], tl.int32)
    return tl.full([rows, BLOCK_N], 2**30, tl.int32), none, limit[:, None], none + (2**31 - 1), none - 1


@triton.jit
def start_topk(limit, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr):
    """Return empty candidates, sort keys and blocks: LEVELS times `[T, J]`, or `[T, N]` if LEVELS is 0."""
    rows: tl.constexpr = limit.shape[0]
    if LEVELS > 0:
        none = tl.full([rows, BLOCK_J], -1, tl.int32)
        topk = ((none, none),)
        for _ in tl.static_range(1, LEVELS):
            topk += ((none, none),)
    else:
        # Empty slots have keys below all blocks and negative blocks. Slots behind the limit are never the smallest.
        slots = tl.arange(0, BLOCK_N)[None, :]
        empty = tl.where(slots < limit[:, None], -1, 2**31 - 1)
        topk = ((empty, tl.broadcast_to(-1 - slots, [rows, BLOCK_N])),)
    return topk


@triton.jit
def update_topk(topk, sort_keys, block, selected, num_selected, LEVELS: tl.constexpr):
    """Return the candidates with a tile's sort keys added. The tile's blocks are higher than all before."""
    if LEVELS > 0:
        _, _, _, sort_key, last = selected
        sort_keys = tl.where((sort_keys < sort_key) | ((sort_keys == sort_key) & (block > last)), sort_keys, -1)
        topk = _insert(topk, sort_keys, tl.broadcast_to(block, sort_keys.shape), LEVELS)
    else:
        topk = (_replace(topk[0], sort_keys, block, num_selected),)
    return topk


@triton.jit
def _insert(columns, sort_keys, block, LEVELS: tl.constexpr):
    """Insert one sort key and block into every column of LEVELS candidates, in descending order. Threads exchange no
    data.
    """
    sort_key, held = columns[0]
    is_larger = sort_keys > sort_key
    topk = ((tl.maximum(sort_key, sort_keys), tl.where(is_larger, block, held)),)
    for level in tl.static_range(1, LEVELS):
        # The candidate displaced from the level above, or the new one. Among equal keys the lower block stays above.
        sort_keys, block = tl.minimum(sort_key, sort_keys), tl.where(is_larger, held, block)
        sort_key, held = columns[level]
        is_larger = is_larger | (sort_keys > sort_key)
        topk += ((tl.maximum(sort_key, sort_keys), tl.where(is_larger, block, held)),)
    return topk


@triton.jit
def _replace(topk, sort_keys, block, num_selected):
    """Return the largest of the candidates and a tile's sort keys, per row.

    As long as the tile's largest key is larger, it replaces the smallest candidate, among equal ones that of the
    highest block. topk: sort keys and blocks, which are lower than `block`.
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
    """Add the largest candidates to the selection. Also returns whether a row is incomplete, because a full column may
    lack candidates: then all tiles are visited again.
    """
    chosen, count, limit, sort_key, last = selected
    if LEVELS > 0:
        slots = tl.arange(0, chosen.shape[1])[None, :]
        # A full column may have lost further candidates.
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
    """Return the columns without their first candidate where it was selected."""
    sort_key, block = columns[0]
    moved = ()
    for level in tl.static_range(1, LEVELS):
        below, block_below = columns[level]
        moved += ((tl.where(is_taken, below, sort_key), tl.where(is_taken, block_below, block)),)
        sort_key, block = below, block_below
    return moved + ((tl.where(is_taken, beyond, sort_key), block),)  # noqa: RUF005


@triton.jit
def sort_blocks(blocks, num_selected):
    """Return rows of blocks in ascending order, padded with -1; the input is padded with 2**30."""
    indices = tl.full(blocks.shape, -1, tl.int32)
    slots = tl.arange(0, blocks.shape[1])[None, :]
    # By repeated minimum: tl.sort takes a minute to compile for long rows.
    for slot in tl.range(0, num_selected):
        lowest = tl.min(blocks, 1)[:, None]
        indices = tl.where((slots == slot) & (lowest < 2**30), lowest, indices)
        blocks = tl.where(blocks == lowest, 2**30, blocks)
    return indices
