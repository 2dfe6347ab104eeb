"""What a row takes: ranks of blocks, the largest of them that are kept from tile to tile, their order."""

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
def rank_blocks(
    scores, onward, first_block, own_block, num_blocks, choice, CAUSAL: tl.constexpr, HANDED_ON: tl.constexpr
):
    """Of a tile's blocks, `[T, J]`: the larger the earlier a block is taken, of equal ones the lower block; -1 where it
    is not to be taken. scores, and what the next block has besides: `[J, T]`.
    """
    places = tl.arange(0, scores.shape[0])[None, :]
    if HANDED_ON:
        score, handed_on = tl.split(tl.permute(tl.join(scores, onward), (1, 0, 2)))
        score += tl.gather(handed_on, tl.broadcast_to(tl.maximum(places - 1, 0), handed_on.shape), 1)
    else:
        score = tl.trans(scores)
    # Bits of floats that are not negative are in the order of the floats.
    ranks = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    if HANDED_ON:
        ranks = tl.where(places > 0, ranks, -1)
    is_first = first_block < choice.num_init
    if is_first | (first_block + scores.shape[0] > tl.minimum(tl.min(own_block, 0) - choice.num_local + 1, num_blocks)):
        ranks = _rank_forced(ranks, first_block + places, own_block[:, None], num_blocks, choice, CAUSAL)
    return ranks


@triton.jit
def _rank_forced(ranks, block, own_block, num_blocks, choice, CAUSAL: tl.constexpr):
    """With the ranks of geometry.forced_priority, above all scores, for forced blocks, and -1 for those that are not to
    be chosen.
    """
    distance = own_block - block
    reach = tl.abs(distance)
    is_local = reach < choice.num_local
    choosable = (block < num_blocks) & (ranks >= 0)
    if CAUSAL:
        is_local = is_local & (distance >= 0)
        choosable = choosable & (distance >= 0)
    priority = tl.where(is_local, 2 * (choice.num_local - reach) + (distance > 0).to(tl.int32), 0)
    initial = choice.num_init - block + 2 * choice.num_local
    priority = tl.where(block < choice.num_init, tl.maximum(priority, initial), priority)
    priority = tl.where(is_local & (distance == 0), 2 * choice.num_local + choice.num_init + 1, priority)
    return tl.where(choosable, tl.where(priority > 0, 0x7F800000 + priority, ranks), -1)


@triton.jit
def begin_taking(limit, BLOCK_N: tl.constexpr):
    """What rows have taken, which is nothing: blocks, `[T, N]`, 2**30 behind them; how many and of how many, `[T, 1]`;
    rank and block of the last one, `[T, 1]`, before all that is still to be taken. limit: `[T]`.
    """
    rows: tl.constexpr = limit.shape[0]
    none = tl.zeros([rows, 1], tl.int32)
    return tl.full([rows, BLOCK_N], 2**30, tl.int32), none, limit[:, None], none + (2**31 - 1), none - 1


@triton.jit
def begin_tiles(limit, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr):
    """Ranks and blocks of nothing: LEVELS times `[T, J]`, or, LEVELS being 0, `[T, N]`."""
    rows: tl.constexpr = limit.shape[0]
    if LEVELS > 0:
        none = tl.full([rows, BLOCK_J], -1, tl.int32)
        kept = ((none, none),)
        for _ in tl.static_range(1, LEVELS):
            kept += ((none, none),)
    else:
        # Empty slots rank below all blocks, and hold none that there is. Slots behind a row are never the smallest.
        slots = tl.arange(0, BLOCK_N)[None, :]
        empty = tl.where(slots < limit[:, None], -1, 2**31 - 1)
        kept = ((empty, tl.broadcast_to(-1 - slots, [rows, BLOCK_N])),)
    return kept


@triton.jit
def keep_largest(kept, ranks, block, taken, num_selected, LEVELS: tl.constexpr):
    """What is kept, with the ranks of a tile, whose blocks are higher than those before."""
    if LEVELS > 0:
        _, _, _, rank, last = taken
        ranks = tl.where((ranks < rank) | ((ranks == rank) & (block > last)), ranks, -1)
        kept = _insert(kept, ranks, tl.broadcast_to(block, ranks.shape), LEVELS)
    else:
        kept = (_replace(kept[0], ranks, block, num_selected),)
    return kept


@triton.jit
def _insert(columns, ranks, block, LEVELS: tl.constexpr):
    """Columns of LEVELS ranks, the largest first, and their blocks, with one more each. No thread asks another."""
    rank, held = columns[0]
    is_larger = ranks > rank
    kept = ((tl.maximum(rank, ranks), tl.where(is_larger, block, held)),)
    for level in tl.static_range(1, LEVELS):
        # What has to make room in the level above, or what is new. Of equal ranks the lower block stays above.
        ranks, block = tl.minimum(rank, ranks), tl.where(is_larger, held, block)
        rank, held = columns[level]
        is_larger = is_larger | (ranks > rank)
        kept += ((tl.maximum(rank, ranks), tl.where(is_larger, block, held)),)
    return kept


@triton.jit
def _replace(kept, ranks, block, num_selected):
    """Per row the largest of both, as many as are kept: the smallest that is kept, of equal ones that of the highest
    block, makes room for the largest rank as long as that is larger. kept: ranks and their blocks, lower ones than
    `block`.
    """
    kept, kept_block = kept
    smallest = tl.min(kept, 1)[:, None]
    num_larger = tl.sum((ranks > smallest).to(tl.int32), 1)[:, None]
    for _ in tl.range(0, tl.minimum(find_largest(num_larger), num_selected)):
        largest = tl.max(ranks, 1)[:, None]
        best = tl.min(tl.where(ranks == largest, block, 2**30), 1)[:, None]
        worst = tl.max(tl.where(kept == smallest, kept_block, -(2**30)), 1)[:, None]
        replaced = (kept_block == worst) & (largest > smallest)
        kept = tl.where(replaced, largest, kept)
        kept_block = tl.where(replaced, best, kept_block)
        ranks = tl.where(block == best, -1, ranks)
        smallest = tl.min(kept, 1)[:, None]
    return kept, kept_block


@triton.jit
def take_largest(kept, taken, num_selected, LEVELS: tl.constexpr):
    """What rows have taken, with what they take of what was kept, and whether one has to see all tiles once more,
    because a full column gave all its blocks. It goes on behind the last one that it took.
    """
    chosen, count, limit, rank, last = taken
    if LEVELS > 0:
        slots = tl.arange(0, chosen.shape[1])[None, :]
        # Behind a column that is full may be anything.
        beyond = tl.where(kept[LEVELS - 1][0] >= 0, 2**31 - 1, -1)
        for _ in tl.range(0, num_selected):
            ranks, blocks = kept[0]
            largest = tl.max(ranks, 1)[:, None]
            best = tl.min(tl.where(ranks == largest, blocks, 2**30), 1)[:, None]
            is_known = (largest >= 0) & (largest < 2**31 - 1) & (count < limit)
            chosen = tl.where(is_known & (slots == count), best, chosen)
            rank, last = tl.where(is_known, largest, rank), tl.where(is_known, best, last)
            count += is_known.to(tl.int32)
            kept = _move_up(kept, is_known & (ranks == largest) & (blocks == best), beyond, LEVELS)
        is_open = (tl.max(kept[0][0], 1)[:, None] == 2**31 - 1) & (count < limit)
        again = find_largest(is_open.to(tl.int32)) > 0
    else:
        ranks, blocks = kept[0]
        chosen = tl.where((ranks >= 0) & (blocks >= 0), blocks, chosen)
        again = num_selected < 0
    return (chosen, count, limit, rank, last), again


@triton.jit
def _move_up(columns, is_taken, beyond, LEVELS: tl.constexpr):
    """Columns without their first block where it was taken."""
    rank, block = columns[0]
    moved = ()
    for level in tl.static_range(1, LEVELS):
        below, block_below = columns[level]
        moved += ((tl.where(is_taken, below, rank), tl.where(is_taken, block_below, block)),)
        rank, block = below, block_below
    return moved + ((tl.where(is_taken, beyond, rank), block),)  # noqa: RUF005


@triton.jit
def put_in_order(blocks, num_selected):
    """Rows of blocks ascending, 2**30 for none there and -1 for none here."""
    indices = tl.full(blocks.shape, -1, tl.int32)
    slots = tl.arange(0, blocks.shape[1])[None, :]
    # One after the other: tl.sort takes a minute to compile for long rows.
    for slot in tl.range(0, num_selected):
        lowest = tl.min(blocks, 1)[:, None]
        indices = tl.where((slots == slot) & (lowest < 2**30), lowest, indices)
        blocks = tl.where(blocks == lowest, 2**30, blocks)
    return indices
