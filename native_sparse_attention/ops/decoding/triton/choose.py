"""Third launch of a step: the top n blocks of every row, from the score sums of the second launch."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.varlen import floor_divide
from native_sparse_attention.ops.decoding.triton.storage import (
    let_next_launch_begin,
    load_lengths,
    wait_for_launch_before,
)

# Sort keys of padding and of selected blocks; a number above every block.
NOTHING, TAKEN = tl.constexpr(-1), tl.constexpr(-2)
NO_BLOCK = tl.constexpr(2**31 - 1)


class Selection(NamedTuple):
    """num_selected: n. num_init, num_local: forced blocks. num_recent: as in `select_blocks`.

    A compile-time constant.
    """

    num_selected: int
    num_init: int
    num_local: int
    num_recent: int


@triton.jit(do_not_specialize=['num_splits'])
def choose_kernel(
    stats_ptr,
    sums_ptr,
    maxima_ptr,
    topk_ptr,
    counts_ptr,
    chosen_ptr,
    lengths,
    num_splits,
    scratch,
    step: tl.constexpr,
    sizes: tl.constexpr,
    selection: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    ADDS_TO_NEXT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    FAN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Select the n best blocks of each query by a tree of partial top-k lists.

    One program per row, token, index head and chunk of BLOCK_J selection blocks. GROUP: query heads of a KV head, which
    has REPEATS index heads. TILE: blocks with one common maximum. best: int32 `[B, T, HI, 2, num_lists, n]`, sort keys
    and blocks of the sorted top n of every chunk, then of every FAN chunks, and so on. chosen: int32 `[B, T, HI, n]`,
    the top n of all blocks, padded with -1. counts: int32 `[B, T, HI, num_lists]`, the number of finished programs per
    list, 0 before and after the launch: the last of FAN programs to finish merges their lists.
    """
    query, chunk = tl.program_id(0), tl.program_id(1)
    index_heads: tl.constexpr = step.kv_heads * REPEATS
    index_head = query % index_heads
    token = query // index_heads % step.num_tokens
    row = query // index_heads // step.num_tokens
    old, length = load_lengths(lengths, row, step)
    position = old + token
    wait_for_launch_before(OVERLAPS)

    block = chunk * BLOCK_J + tl.arange(0, BLOCK_J)
    # Sums are stored in whole tiles.
    KINDS: tl.constexpr = 2 if ADDS_TO_NEXT else 1
    of_chunk = chunk * BLOCK_J * KINDS + tl.arange(0, BLOCK_J * KINDS)
    in_tile = of_chunk // (KINDS * TILE) < tl.cdiv(length, TILE * sizes.selection_block_size)
    # Blocks of a run share one maximum; short runs keep it within one thread.
    RUN: tl.constexpr = min(TILE, 4)
    run = chunk * (BLOCK_J // RUN) + tl.arange(0, BLOCK_J // RUN)
    # The last block of the chunk before adds to the score of this chunk's first block.
    before = chunk * BLOCK_J - 1
    score, next_scores, first = tl.zeros([BLOCK_J], tl.float32), tl.zeros([BLOCK_J], tl.float32), 0.0
    share: tl.constexpr = GROUP // REPEATS
    unit = row.to(tl.int64) * step.kv_heads + index_head // REPEATS
    first_row = (unit * step.num_tokens + token) * GROUP + index_head % REPEATS * share
    num_blocks = tl.multiple_of(scratch.num_blocks, TILE)
    sums_ptr += first_row * KINDS * num_blocks
    maxima_ptr += first_row * scratch.num_tiles
    stats_ptr += 2 * first_row * num_splits
    splits = tl.arange(0, BLOCK_S)
    for start in range(0, share, BLOCK_G):
        heads = start + tl.arange(0, BLOCK_G)
        is_head = heads < share
        sums_of_head, maxima_of_head = sums_ptr + heads * KINDS * num_blocks, maxima_ptr + heads * scratch.num_tiles
        # All loads first, so that they overlap.
        mask = is_head[:, None] & in_tile[None, :]
        sums = tl.load(sums_of_head[:, None] + of_chunk[None, :], mask=mask, other=0.0)
        if ADDS_TO_NEXT:
            next_before = tl.load(sums_of_head + 2 * before + 1, mask=is_head & (chunk > 0), other=0.0)
            maxima_before = tl.load(maxima_of_head + before // TILE, mask=is_head & (chunk > 0), other=0.0)
        mask = is_head[:, None] & (run * RUN * sizes.selection_block_size < length)[None, :]
        maxima = tl.load(maxima_of_head[:, None] + run[None, :] // (TILE // RUN), mask=mask, other=0.0)
        stats = stats_ptr + 2 * ((heads * num_splits)[:, None] + splits[None, :])
        mask = is_head[:, None] & (splits < num_splits)[None, :]
        largest = tl.load(stats, mask=mask, other=float('-inf'))
        total = tl.load(stats + 1, mask=mask, other=0.0)
        base = tl.max(largest, 1)
        base = tl.where(base == float('-inf'), 0.0, base)
        total = tl.sum(total * tl.exp2(largest - base[:, None]), 1)  # [BLOCK_G]
        factors = tl.exp2(maxima - base[:, None]) * (1.0 / total)[:, None]
        factors = tl.reshape(tl.broadcast_to(factors[:, :, None], [BLOCK_G, BLOCK_J // RUN, RUN]), [BLOCK_G, BLOCK_J])
        if ADDS_TO_NEXT:
            sums, next_sums = tl.split(tl.reshape(sums, [BLOCK_G, BLOCK_J, 2]))
            next_scores += _add_heads(next_sums, factors)
            first += _add_heads(next_before, tl.exp2(maxima_before - base) * (1.0 / total))
        score += _add_heads(sums, factors)

    if ADDS_TO_NEXT:
        in_chunk = tl.arange(0, BLOCK_J)
        score += tl.where(in_chunk == 0, first, tl.gather(next_scores, tl.maximum(in_chunk - 1, 0), 0))
    own_block = floor_divide(position - selection.num_recent, sizes.selection_block_size)
    choosable = (block <= own_block) & (block < tl.cdiv(length, sizes.selection_block_size))
    sort_keys = tl.where(choosable, make_sort_key(score, block, own_block, selection), NOTHING)
    let_next_launch_begin(OVERLAPS)
    chosen_ptr += query.to(tl.int64) * selection.num_selected
    counts_ptr += query.to(tl.int64) * scratch.num_lists
    sort_keys_ptr = topk_ptr + query.to(tl.int64) * 2 * scratch.num_lists * selection.num_selected
    blocks_ptr = sort_keys_ptr + scratch.num_lists * selection.num_selected
    # A level has `count` partial lists of n blocks, stored behind those of the levels before.
    level, count, index = 0, tl.num_programs(1), chunk
    _store_topk(sort_keys, block, sort_keys_ptr, blocks_ptr, chosen_ptr, index, count, selection.num_selected)
    while count > 1:
        leader = level + index // FAN * FAN
        num_merged = tl.minimum(level + count - leader, FAN)
        tl.debug_barrier()
        if tl.atomic_add(counts_ptr + leader, 1) == num_merged - 1:
            tl.store(counts_ptr + leader, 0)
            level, count, index = level + count, tl.cdiv(count, FAN), index // FAN
            candidates = tl.arange(0, BLOCK_C)
            is_candidate = candidates < num_merged * selection.num_selected
            candidates += leader * selection.num_selected
            best_keys = tl.load(sort_keys_ptr + candidates, mask=is_candidate, other=TAKEN, cache_modifier='.cg')
            best_blocks = tl.load(blocks_ptr + candidates, mask=is_candidate, other=-1, cache_modifier='.cg')
            list_index = level + index
            _store_topk(
                best_keys, best_blocks, sort_keys_ptr, blocks_ptr, chosen_ptr, list_index, count, selection.num_selected
            )
        else:
            count = 1


@triton.jit
def _store_topk(sort_keys, blocks, sort_keys_ptr, blocks_ptr, chosen_ptr, list_index, count, N: tl.constexpr):
    """Store the N largest sort keys and their blocks as the partial list `list_index`, or as the result if it is the
    last list. Ties go to the lower block; missing blocks are -1.
    """
    sort_keys_ptr += list_index * N
    blocks_ptr = tl.where(count == 1, chosen_ptr, blocks_ptr + list_index * N)
    for slot in range(N):
        best = tl.max(sort_keys, 0)
        block = tl.min(tl.where(sort_keys == best, blocks, NO_BLOCK), 0)
        tl.store(sort_keys_ptr + slot, best)
        tl.store(blocks_ptr + slot, tl.where(best < 0, -1, block))
        sort_keys = tl.where(blocks == block, TAKEN, sort_keys)


@triton.jit
def _add_heads(sums, factors):
    """Return the score sums of heads `[G, ...]`, scaled to softmax weights and added over heads; 0 where none is
    visible.
    """
    return tl.sum(tl.where(sums != 0, sums * factors, 0.0), 0)


@triton.jit
def make_sort_key(score, block, own_block, selection: tl.constexpr):
    """Return the sort keys of blocks: larger keys are selected first. Forced blocks have keys from
    geometry.forced_priority, above all scores.
    """
    distance = own_block - block
    is_local = (distance >= 0) & (distance < selection.num_local)
    priority = tl.where(is_local, 2 * (selection.num_local - distance) + (distance > 0).to(tl.int32), 0)
    initial = selection.num_init - block + 2 * selection.num_local
    priority = tl.where(block < selection.num_init, tl.maximum(priority, initial), priority)
    priority = tl.where(is_local & (distance == 0), 2 * selection.num_local + selection.num_init + 1, priority)
    # The bits of non-negative floats are ordered like the floats.
    bits = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    return tl.where(priority > 0, 0x7F800000 + priority, bits)
