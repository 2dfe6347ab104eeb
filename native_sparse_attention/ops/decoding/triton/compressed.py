"""Second launch of a step: compressed attention and block scores in one pass over the compressed keys.

The compressed blocks of a row are split over programs; their readers combine the partial results. A block score is a
sum of weights over heads, which needs all log-sum-exps. A program therefore stores every head's sums relative to the
largest logit so far, and that logit.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import split_finite
from native_sparse_attention.ops._triton.varlen import count_blocks
from native_sparse_attention.ops.decoding.triton.storage import (
    let_next_launch_begin,
    load_at,
    load_lengths,
    locate,
    store_at,
    wait_for_launch_before,
)


class ScratchSizes(NamedTuple):
    """Sizes of the scratch buffers of a row: selection blocks, rounded up to whole tiles; these tiles; partial top-k
    lists.
    """

    num_blocks: int
    num_tiles: int
    num_lists: int


@triton.jit
def compressed_kernel(
    q,
    cached_k,
    cached_v,
    new_k,
    new_v,
    mem_k_ptr,
    mem_v_ptr,
    lengths,
    out_ptr,
    stats_ptr,
    sums_ptr,
    maxima_ptr,
    pages,
    scratch,
    scale,
    step: tl.constexpr,
    sizes: tl.constexpr,
    dims: tl.constexpr,
    NUM_MEM: tl.constexpr,
    ADDS_TO_NEXT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row, KV head, row tile and split. Row r of a KV head is token r / G with head r % G of the group.

    q: `[B, T, HQ, D]`. cached_k, cached_v: `[B, C, H, D]` or pages. new_k, new_v: `[B, K, H, D]`, the blocks that the
    step completes, stored in the cache here. mem_k, mem_v: `[H, M, D]`. Partial results of the rows `[B, H, T * G]`:
    out `[..., splits, DV]`, not normalised; stats `[..., splits, 2]`, the largest logit and the sum of the weights;
    sums `[..., blocks, 2]` with ADDS_TO_NEXT: weights times the tokens that the compressed blocks beginning in a
    selection block share with it, and with the next one; without, `[..., blocks]`, over all overlapping compressed
    blocks; maxima `[..., tiles]`, the reference of the sums. cached_v, new_v, mem_v_ptr and out_ptr are None where
    blocks are only scored.
    """
    num_rows: tl.constexpr = step.num_tokens * dims.group
    row_tiles: tl.constexpr = (num_rows + BLOCK_M - 1) // BLOCK_M
    part, num_splits = tl.program_id(1), tl.num_programs(1)
    unit = tl.program_id(0) // row_tiles
    tile_rows = (tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = tile_rows < num_rows
    row, head = (unit // step.kv_heads).to(tl.int64), (unit % step.kv_heads).to(tl.int64)
    old, length = load_lengths(lengths, row, step)
    num_keys = count_blocks(length, sizes.block_size, sizes.stride)
    first_new = count_blocks(old, sizes.block_size, sizes.stride)
    last_seen = old + tile_rows // dims.group - sizes.block_size + 1  # largest visible first token of a block
    scale_log2 = scale * 1.4426950408889634
    skipped: tl.constexpr = 0 if ADDS_TO_NEXT else (sizes.block_size - 1) // sizes.stride
    per_selection: tl.constexpr = sizes.selection_block_size // sizes.stride
    tile_tokens: tl.constexpr = sizes.selection_block_size * BLOCK_J
    num_tiles = tl.cdiv(length, tile_tokens)
    of_part = tl.cdiv(num_tiles, num_splits)
    first_tile = part * of_part
    last_tile = tl.minimum(first_tile + of_part, num_tiles)
    first_block, last_block = first_tile * BLOCK_J * per_selection - skipped, last_tile * BLOCK_J * per_selection
    if (first_new < tl.minimum(num_keys, last_block)) & (num_keys > first_block):
        # Every program that reads a new block stores it itself.
        wait_for_launch_before(OVERLAPS)
        new = (first_new, num_keys, first_block, last_block)
        _store_new(new_k, cached_k, new, row, head, pages, step, dims.head_dim, dims.block_d)
        if cached_v.ptr is not None:
            _store_new(new_v, cached_v, new, row, head, pages, step, dims.value_dim, dims.block_dv)
        tl.debug_barrier()
    tokens, heads = (tile_rows // dims.group).to(tl.int64), head * dims.group + tile_rows % dims.group
    offsets_q = row * q.strides[0] + tokens * q.strides[1] + heads * q.strides[2]
    q = load_at(q.ptr, offsets_q, is_row, dims.head_dim, dims.block_d)
    largest, total = tl.full([BLOCK_M], float('-inf'), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    BLOCK_DV: tl.constexpr = dims.block_dv
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if NUM_MEM > 0:  # noqa: SIM102 - a constant, without which there is nothing to compile
        if part == 0:
            largest, total, out = _read_memory(
                q, mem_k_ptr, mem_v_ptr, head, scale_log2, NUM_MEM, dims.head_dim, dims.value_dim, largest, total, out
            )

    KINDS: tl.constexpr = 2 if ADDS_TO_NEXT else 1
    sums_ptr += ((unit.to(tl.int64) * num_rows + tile_rows) * KINDS * scratch.num_blocks)[:, None]
    maxima_ptr += (unit.to(tl.int64) * num_rows + tile_rows) * scratch.num_tiles
    # A tile has STEPS columns per selection block, of which some may be empty.
    tile_columns = tl.arange(0, BLOCK_J * STEPS)
    steps = tile_columns % STEPS - skipped
    shared, beyond = _count_shared(steps, sizes)
    # Reduced over columns after the loop, since the reduction synchronises warps.
    totals = tl.zeros([BLOCK_M, BLOCK_J * STEPS], tl.float32)
    for tile in tl.range(first_tile, last_tile):
        compressed = (tile * BLOCK_J + tile_columns // STEPS) * per_selection + steps
        exists = (compressed >= 0) & (compressed < num_keys) & (steps < per_selection)
        is_own = exists & (steps >= 0)
        offsets_k, found_k = locate(compressed, exists, row, pages, cached_k.strides)
        if cached_v.ptr is not None:
            offsets_v, found_v = locate(compressed, is_own, row, pages, cached_v.strides)
        k = load_at(cached_k.ptr, offsets_k + head * cached_k.strides[2], found_k, dims.head_dim, dims.block_d)
        if cached_v.ptr is not None:
            v = load_at(cached_v.ptr, offsets_v + head * cached_v.strides[2], found_v, dims.value_dim, dims.block_dv)
        logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale_log2  # [BLOCK_M, BLOCK_J * STEPS]
        visible = exists[None, :] & ((compressed * sizes.stride)[None, :] <= last_seen[:, None])
        weights, shrink, largest = soften(tl.where(visible, logits, float('-inf')), largest)
        sums = _add_steps(weights * shared.to(tl.float32)[None, :], STEPS)
        if ADDS_TO_NEXT:
            next_scores = _add_steps(weights * beyond.to(tl.float32)[None, :], STEPS)
            sums = tl.reshape(tl.join(sums, next_scores), [BLOCK_M, BLOCK_J * KINDS])
        of_tile = tile * BLOCK_J * KINDS + tl.arange(0, BLOCK_J * KINDS)
        tl.store(sums_ptr + of_tile[None, :], sums, mask=is_row[:, None])
        tl.store(maxima_ptr + tile, largest, mask=is_row)
        if not ADDS_TO_NEXT:
            weights = tl.where(is_own[None, :], weights, 0.0)
        total *= shrink
        totals = totals * shrink[:, None] + weights
        if cached_v.ptr is not None:
            if step.num_tokens > 1:
                # A non-finite block that only later rows see must not reach earlier ones through a weight of 0.
                v, spoiled = split_finite(v)
                totals += tl.where(weights > 0, spoiled[None, :], 0.0)
            out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision='ieee')
    total += tl.sum(totals, 1)
    wait_for_launch_before(OVERLAPS)
    let_next_launch_begin(OVERLAPS)
    results = (unit.to(tl.int64) * num_rows + tile_rows) * num_splits + part
    store_partial(out_ptr, stats_ptr, results, (largest, total), out, is_row, dims.value_dim, dims.block_dv)


@triton.jit
def _count_shared(steps, sizes: tl.constexpr):
    """Return how many tokens a compressed block shares with a selection block and with the next one.

    steps: strides from the start of the selection block to the start of the compressed block.
    """
    begins, ends = steps * sizes.stride, steps * sizes.stride + sizes.block_size
    shared = tl.minimum(ends, sizes.selection_block_size) - tl.maximum(begins, 0)
    return shared, tl.maximum(ends - sizes.selection_block_size, 0)


@triton.jit
def _read_memory(
    q,
    mem_k_ptr,
    mem_v_ptr,
    head,
    scale_log2,
    NUM_MEM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    largest,
    total,
    out,
):
    """Add the memory pairs of a head to the online softmax. They are too few for a matrix product."""
    columns, columns_v = tl.arange(0, q.shape[1]), tl.arange(0, out.shape[1])
    for index in range(NUM_MEM):
        memory_row = head * NUM_MEM + index
        k = tl.load(mem_k_ptr + memory_row * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        if mem_v_ptr is not None:
            v = tl.load(mem_v_ptr + memory_row * VALUE_DIM + columns_v, mask=columns_v < VALUE_DIM, other=0.0)
        logits = tl.sum(q.to(tl.float32) * k[None, :], 1)[:, None] * scale_log2  # [M, 1]
        weights, shrink, largest = soften(logits, largest)
        total = total * shrink + tl.sum(weights, 1)
        if mem_v_ptr is not None:
            out = out * shrink[:, None] + weights * v.to(tl.float32)[None, :]
    return largest, total, out


@triton.jit
def _store_new(new, cached, blocks, row, head, pages, step: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store those of the new blocks first_new ... num_keys that lie in first_block ... last_block in the cache."""
    first_new, num_keys, first_block, last_block = blocks
    for index in range(step.num_new):
        block = tl.zeros([1], tl.int32) + first_new + index
        is_read = (block < num_keys) & (block >= first_block) & (block < last_block)
        to, found = locate(block, is_read, row, pages, cached.strides)
        offsets = row * new.strides[0] + index * new.strides[1] + head * new.strides[2]
        x = load_at(new.ptr, tl.zeros([1], tl.int64) + offsets, found, SIZE, BLOCK)
        store_at(cached.ptr, to + head * cached.strides[2], x, found, SIZE, BLOCK)


@triton.jit
def _add_steps(weights, STEPS: tl.constexpr):
    """Return the sums `[M, J]` of `[M, J * STEPS]`."""
    return tl.sum(tl.reshape(weights, [weights.shape[0], weights.shape[1] // STEPS, STEPS]), 2)


@triton.jit
def store_partial(out_ptr, stats_ptr, results, stats, out, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the partial results of a branch; out_ptr may be None."""
    largest, total = stats
    tl.store(stats_ptr + 2 * results, largest, mask=mask)
    tl.store(stats_ptr + 2 * results + 1, total, mask=mask)
    if out_ptr is not None:
        store_at(out_ptr, results * SIZE, out, mask, SIZE, BLOCK)


@triton.jit
def soften(logits, largest):
    """Return weights `[M, N]` of base-2 logits relative to the running maximum, the factor that rescales earlier sums,
    and the new maximum.
    """
    new = tl.maximum(largest, tl.max(logits, 1))
    base = tl.where(new == float('-inf'), 0.0, new)
    return tl.exp2(logits - base[:, None]), tl.exp2(largest - base), new
