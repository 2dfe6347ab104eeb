"""The second launch of a step: compressed attention and the block scores in one read of the compressed keys.

The compressed blocks of a row are split over programs, and their results are put together by those who read them. A
score is a sum of weights over heads, which nobody knows before all log-sum-exps are: a program stores every head's sums
relative to the largest logit that it has met, and that logit.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.placement import count_blocks
from native_sparse_attention.ops.decoding.triton.storage import (
    load_at,
    load_lengths,
    locate,
    store_at,
    wait_for_launch_before,
)


class Split(NamedTuple):
    """num_splits: programs that share the blocks of a row. num_blocks: selection blocks that sums are kept for, a
    multiple of a tile's. num_tiles: tiles that hold them.
    """

    num_splits: int
    num_blocks: int
    num_tiles: int


@triton.jit
def compressed_kernel(
    q,
    cached_k,
    cached_v,
    new_k,
    new_v,
    mem_k_ptr,
    mem_v_ptr,
    lengths_ptr,
    out_ptr,
    stats_ptr,
    sums_ptr,
    maxima_ptr,
    pages,
    step,
    sizes,
    split,
    scale,
    GROUP: tl.constexpr,
    NUM_MEM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HANDED_ON: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per split and tile of the rows of a key head: a row r is token r / G with head r % G of the group.

    q: `[B, T, HQ, D]`; cached_k, cached_v: `[B, C, H, D]` or pages; new_k, new_v: `[B, K, H, D]`, the blocks that the
    step completes, stored into the cache here; mem_k, mem_v: `[H, M, D]`. Of rows `[B, H, T * G]`: out `[..., splits,
    DV]`, not normalised; stats `[..., splits, 2]`, the largest logit and the sum of weights; sums `[..., 2, blocks]`:
    weights in tokens, of the compressed blocks that begin in a selection block and, with HANDED_ON, what these share
    with the next one; maxima `[..., tiles]`, what the sums are relative to.
    """
    wait_for_launch_before(OVERLAPS)
    num_rows = step.num_tokens * GROUP
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    part = tl.program_id(0) % split.num_splits
    unit = tl.program_id(0) // split.num_splits
    members = (unit % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_member = members < num_rows
    unit = unit // row_tiles
    row, head = (unit // step.kv_heads).to(tl.int64), (unit % step.kv_heads).to(tl.int64)
    old, length = load_lengths(lengths_ptr, row, step)
    num_keys = count_blocks(length, sizes.block_size, sizes.stride)
    first_new = count_blocks(old, sizes.block_size, sizes.stride)
    last_seen = old + members // GROUP - sizes.block_size + 1  # first tokens of blocks up to here
    scale_log2 = scale * 1.4426950408889634

    skipped = 0 if HANDED_ON else (sizes.block_size - 1) // sizes.stride
    per_selection = sizes.selection_block_size // sizes.stride
    num_tiles = tl.cdiv(tl.cdiv(length, sizes.selection_block_size), BLOCK_J)
    of_part = tl.cdiv(num_tiles, split.num_splits)
    first_tile = part * of_part
    last_tile = tl.minimum(first_tile + of_part, num_tiles)
    # All programs that read a new block store it, each for itself.
    for index in range(step.num_new):
        block = tl.zeros([1], tl.int32) + first_new + index
        is_read = (block < num_keys) & (block < last_tile * BLOCK_J * per_selection)
        is_read = is_read & (block >= first_tile * BLOCK_J * per_selection - skipped)
        offsets, found = locate(block, is_read, row, pages, cached_k.strides)
        k = load_at(new_k.ptr, block * 0 + _offset(new_k, row, index, head), found, HEAD_DIM, BLOCK_D)
        store_at(cached_k.ptr, offsets + head * cached_k.strides[2], k, found, HEAD_DIM, BLOCK_D)
        offsets, found = locate(block, is_read, row, pages, cached_v.strides)
        v = load_at(new_v.ptr, block * 0 + _offset(new_v, row, index, head), found, VALUE_DIM, BLOCK_DV)
        store_at(cached_v.ptr, offsets + head * cached_v.strides[2], v, found, VALUE_DIM, BLOCK_DV)
    tl.debug_barrier()

    tokens, heads = (members // GROUP).to(tl.int64), head * GROUP + members % GROUP
    q = load_at(
        q.ptr,
        row * q.strides[0] + tokens * q.strides[1] + heads * q.strides[2],
        is_member,
        HEAD_DIM,
        BLOCK_D,
    )
    largest = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if part == 0:
        for start in range(0, NUM_MEM, BLOCK_J * STEPS):
            places = start + tl.arange(0, BLOCK_J * STEPS)
            exists = places < NUM_MEM
            k = load_at(mem_k_ptr, (head * NUM_MEM + places) * HEAD_DIM, exists, HEAD_DIM, BLOCK_D).to(q.dtype)
            v = load_at(mem_v_ptr, (head * NUM_MEM + places) * VALUE_DIM, exists, VALUE_DIM, BLOCK_DV).to(q.dtype)
            logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale_log2
            logits = tl.where(exists[None, :], logits, float('-inf'))
            weights, shrink, largest = soften(logits, largest)
            total = total * shrink + tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision='ieee')

    sums_ptr += ((unit.to(tl.int64) * num_rows + members) * 2 * split.num_blocks)[:, None]
    maxima_ptr += (unit.to(tl.int64) * num_rows + members) * split.num_tiles
    # A tile has STEPS places for every selection block, of which some may be empty.
    places = tl.arange(0, BLOCK_J * STEPS)
    steps = places % STEPS - skipped
    begins, ends = steps * sizes.stride, steps * sizes.stride + sizes.block_size
    shared = tl.minimum(ends, sizes.selection_block_size) - tl.maximum(begins, 0)
    beyond = tl.maximum(ends - sizes.selection_block_size, 0)
    for tile in tl.range(first_tile, last_tile):
        compressed = (tile * BLOCK_J + places // STEPS) * per_selection + steps
        exists = (compressed >= 0) & (compressed < num_keys) & (steps < per_selection)
        is_own = exists & (steps >= 0)
        offsets_k, found_k = locate(compressed, exists, row, pages, cached_k.strides)
        offsets_v, found_v = locate(compressed, is_own, row, pages, cached_v.strides)
        k = load_at(cached_k.ptr, offsets_k + head * cached_k.strides[2], found_k, HEAD_DIM, BLOCK_D)
        v = load_at(cached_v.ptr, offsets_v + head * cached_v.strides[2], found_v, VALUE_DIM, BLOCK_DV)
        logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale_log2  # [BLOCK_M, BLOCK_J * STEPS]
        visible = exists[None, :] & ((compressed * sizes.stride)[None, :] <= last_seen[:, None])
        weights, shrink, largest = soften(tl.where(visible, logits, float('-inf')), largest)
        of_block = (tile * BLOCK_J + tl.arange(0, BLOCK_J))[None, :]
        own = _add_steps(weights * shared.to(tl.float32)[None, :], STEPS)
        tl.store(sums_ptr + of_block, own, mask=is_member[:, None])
        if HANDED_ON:
            onward = _add_steps(weights * beyond.to(tl.float32)[None, :], STEPS)
            tl.store(sums_ptr + split.num_blocks + of_block, onward, mask=is_member[:, None])
        tl.store(maxima_ptr + tile, largest, mask=is_member)
        if not HANDED_ON:
            weights = tl.where(is_own[None, :], weights, 0.0)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision='ieee')

    results = (unit.to(tl.int64) * num_rows + members) * split.num_splits + part
    tl.store(stats_ptr + 2 * results, largest, mask=is_member)
    tl.store(stats_ptr + 2 * results + 1, total, mask=is_member)
    store_at(out_ptr, results * VALUE_DIM, out, is_member, VALUE_DIM, BLOCK_DV)


@triton.jit
def _add_steps(weights, STEPS: tl.constexpr):
    """`[M, J * STEPS]` to `[M, J]`."""
    return tl.sum(tl.reshape(weights, [weights.shape[0], weights.shape[1] // STEPS, STEPS]), 2)


@triton.jit
def _offset(tensor, row, index, head):
    return row * tensor.strides[0] + index * tensor.strides[1] + head * tensor.strides[2]


@triton.jit
def soften(logits, largest):
    """Weights `[M, N]` of logits in base 2 relative to the largest so far, what shrinks earlier ones, and that."""
    new = tl.maximum(largest, tl.max(logits, 1))
    base = tl.where(new == float('-inf'), 0.0, new)
    return tl.exp2(logits - base[:, None]), tl.exp2(largest - base), new
