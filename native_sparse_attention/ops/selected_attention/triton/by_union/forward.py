"""Kernels of selected attention in which neighbouring queries fill a tile together and share what they read.

A query with few heads leaves most rows of a tile empty, and neighbours with many heads may have chosen the same. So a
program has several neighbours and goes in order through the blocks that at least one of them chose (`Sharing`). Shapes
and names are those of the kernels per query. This is the forward; neighbours_backward.py has the gradients of q.
"""

# To pyright a jit function that another calls never returns, and a number is no constant.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import LARGE, is_small_tile
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton.fp16_values import add_exact_product
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import store_output
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    count_in_union,
    find_reference,
    find_slot,
    find_union,
    for_heads,
    is_left_out,
    load_choices_and_factors,
    load_counts,
    load_entry,
    load_keys,
    members_of_tile,
    open_step,
    pick_factor,
    rows_of_tile,
)

# Weights of whole blocks that meet converted values are in units of 2 ** -FIXED_HEADROOM: as far below the largest one
# they keep all of their bits, and as far above what they are relative to there is room in float16.
FIXED_HEADROOM = tl.constexpr(4.0)


@triton.jit
def neighbours_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    half_tiles,
    indices_ptr,
    factors_ptr,
    out_ptr,
    lse_ptr,
    low_ptr,
    q_strides,
    k_strides,
    v_strides,
    half_strides,
    indices_strides,
    factors_strides,
    out_strides,
    halves,
    place,
    sharing,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    UNION: tl.constexpr,
    ONES: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """One program per tile of BLOCK_M / BLOCK_G queries and per index head; BLOCK_G holds the heads of a group.
    sharing: tiles without a flag are left to the kernel per query. Others are as in that one.
    """
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(
        sharing.first_tile + tl.program_id(0), place, BLOCK_T
    )
    if first_query >= num_queries:
        return
    # Before the flag, so that nothing waits for it.
    counts = load_counts(sharing)
    if is_left_out(sharing):
        return
    _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    queries, heads, mask = rows_of_tile(first_query, num_queries, index_head, GROUP, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr += row * k_strides[0] + index_head // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + index_head // REPEATS * v_strides[2]
    q_ptr += row * q_strides[0]
    q = load_rows(q_ptr, tokens * q_strides[1] + heads * q_strides[2], 1, mask, HEAD_DIM, BLOCK_D)
    if NEGATIVE:
        # So that the largest product of a row makes its largest logit.
        q, scale = -q, -scale
    member_tokens, member_mask = members_of_tile(query_start, first_query, num_queries, BLOCK_T)
    choices, factors = load_choices_and_factors(
        indices_ptr, factors_ptr, indices_strides, factors_strides, row, index_head, member_tokens, member_mask,
        NUM_SELECTED, BLOCK_S,
    )  # fmt: skip

    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    blocks_ptr, members_ptr = find_union(sharing, index_head, UNION)
    pair = row * (tl.num_programs(1) // REPEATS) + index_head // REPEATS
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, index_head // REPEATS, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    # With factors, a block's logits say nothing of another's.
    FIXED: tl.constexpr = UNMASKED and factors_ptr is None
    row_max, is_read = tl.full([BLOCK_M], float('-inf'), tl.float32), tl.full([BLOCK_M], 0, tl.int1)
    if FIXED:
        row_max, is_read = find_reference(
            q, source, blocks_ptr, members_ptr, counts[0], offset + first_query,
            num_keys, scale, softcap, BLOCK_SIZE, HEAD_DIM, BLOCK_T, BLOCK_G, BLOCK_D, INT64_OFFSETS, CAUSAL,
            halves is None,
        )  # fmt: skip
    EXACT: tl.constexpr = low_ptr is not None
    surplus = tl.zeros([BLOCK_M], tl.float32)
    if halves is not None:
        row_max, total, surplus, out = _attend_in_halves(
            q, source, blocks_ptr, members_ptr, counts, halves, half_tiles,
            half_strides, is_read, mask, row_max, total, out, num_keys, positions, scale, softcap, CAUSAL, BLOCK_SIZE,
            SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS, ONES,
        )  # fmt: skip
    else:
        in_union = count_in_union(counts, sharing, pair, is_small_tile(q), UNMASKED)
        row_max, total, out = _attend_as_they_are(
            q, source, blocks_ptr, members_ptr, in_union, counts[1], choices, factors,
            is_read, mask, row_max, total, out, num_keys, positions, scale, softcap, factors_ptr is not None,
            UNMASKED, FIXED, EXACT, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N,
            BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip

    sums = (row_max, total, None if halves is None else surplus, out)
    rows, num_heads = (row, tokens, heads, mask), tl.num_programs(1) * GROUP
    store_output(out_ptr, lse_ptr, low_ptr, out_strides, rows, num_heads, place, sums, VALUE_DIM, BLOCK_DV)


@triton.jit
def _attend_as_they_are(
    q,
    source,
    blocks_ptr,
    members_ptr,
    counts,
    num_whole,
    choices,
    factors,
    is_read,
    mask,
    reference,
    total,
    out,
    num_keys,
    positions,
    scale,
    softcap,
    SCALED: tl.constexpr,
    UNMASKED: tl.constexpr,
    FIXED: tl.constexpr,
    EXACT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """A tile's running softmax over its union, with values in their own dtype: first over whole blocks, without masks
    and relative to `reference` where that is FIXED, then over the others; or over all of them with care, where they are
    not small, and once more with a running maximum for rows that are not near what was fixed. Others have their bits in
    all of these passes.
    """
    num_blocks, num_clean, num_unmasked = counts
    ROWS: tl.constexpr = BLOCK_T * BLOCK_G
    no_sums = tl.zeros([ROWS], tl.float32)
    first = num_whole * SPLIT
    is_fixed = tl.full([ROWS], FIXED, tl.int1)
    passes = 2 if FIXED else 1
    row_max = reference
    if UNMASKED:
        entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
        for step in tl.range(0, num_unmasked * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, _, out = _attend(
                q, source, entry, None, None, choices, factors, row_max, total, no_sums, out, step, num_keys, positions,
                scale, softcap, SCALED, False, False, EXACT, False, False, FIXED, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM,
                VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
        if FIXED:
            is_fixed = _are_near(total, is_read, num_unmasked, q.dtype) | (mask == 0)
            row_max = tl.where(total == 0, float('-inf'), row_max)
            if tl.min(is_fixed.to(tl.int32), 0) == 0:
                num_clean, passes = 0, 1
        for step in tl.range(first, num_clean * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, _, out = _attend(
                q, source, entry, None, None, choices, factors, row_max, total, no_sums, out, step, num_keys, positions,
                scale, softcap, SCALED, True, False, EXACT, False, False, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM,
                VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
    if num_clean < num_blocks:
        for _turn in tl.range(passes):
            row_max = tl.where(is_fixed, reference, float('-inf'))
            total, whole_total, out = no_sums, no_sums, tl.zeros([ROWS, BLOCK_DV], tl.float32)
            entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
            for step in tl.range(0, num_blocks * SPLIT, num_stages=2):
                following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
                row_max = tl.where((step >= first) & (total == 0), float('-inf'), row_max)
                row_max, total, _, out = _attend(
                    q, source, entry, None, is_fixed & (step < first), choices, factors, row_max, total, no_sums, out,
                    step, num_keys, positions, scale, softcap, SCALED, True, True, EXACT, False, False, False, CAUSAL,
                    BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV,
                INT64_OFFSETS, )  # fmt: skip
                whole_total = tl.where(step < first, total, whole_total)
                entry = following
            is_fixed = is_fixed & (_are_near(whole_total, is_read, num_whole, q.dtype) | (mask == 0))
    return row_max, total, out


@triton.jit
def _are_near(total, is_read, num_whole, dtype: tl.constexpr):
    """Whether sums of weights that were relative to a fixed number are ones to rely on: neither too large nor so small
    that products with small values could vanish. Where that is a logit that is read (`is_read`), they are small only
    beside what the rest of the union has.
    """
    LEAST: tl.constexpr = 1.0 if dtype == tl.float16 else 2.0**-20
    MOST: tl.constexpr = 2.0**15 if dtype == tl.float16 else 2.0**60
    return ((is_read | (total > LEAST)) & (total < MOST)) | (num_whole == 0)


@triton.jit
def _attend_in_halves(
    q,
    source,
    blocks_ptr,
    members_ptr,
    counts,
    halves,
    half_tiles,
    half_strides,
    is_read,
    mask,
    row_max,
    total,
    out,
    num_keys,
    positions,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    ONES: tl.constexpr,
):
    """A tile's running softmax over its union: first over whole blocks that fit float16, then over the others, with
    care where they are not small. So a row has its bits whatever neighbours chose, and whatever comes later.
    """
    k_ptr, _, k_tiles, _, row, kv_head, k_stride, _, key_start = source
    half_ptr = halves.half + row * half_strides[0] + kv_head * half_strides[2]
    half = (k_ptr, half_ptr, k_tiles, half_tiles, row, kv_head, k_stride, half_strides[1], key_start)
    num_blocks, num_fitting, are_small = counts
    are_small = are_small != 0
    is_small_row = tl.min((tl.abs(q.to(tl.float32)) < LARGE).to(tl.int32), 1) != 0
    BLOCK_M: tl.constexpr = BLOCK_T * BLOCK_G
    SUMS: tl.constexpr = [BLOCK_M, 8] if ONES else [BLOCK_M]
    sums = tl.zeros(SUMS, tl.float32)
    entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
    for step in tl.range(0, num_fitting * SPLIT):
        following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
        row_max, total, sums, out = _attend(
            q, half, entry, None, None, 0, 0, row_max, total, sums, out, step, num_keys, positions, scale, softcap,
            False, False, False, True, True, ONES, True, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S,
            BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
        entry = following
    surplus = tl.max(sums, 1) - total if ONES else sums
    # With a reference that is read, sums are small only beside what the rest of the union has.
    is_near = (is_read | (total > 2.0**FIXED_HEADROOM)) & (surplus - surplus == 0)
    is_kept = (is_small_row & (is_near | (num_fitting == 0))) | (mask == 0)
    # What weights were in units of.
    row_max = tl.where(total == 0, float('-inf'), row_max - FIXED_HEADROOM)

    first = num_fitting * SPLIT
    if tl.min(is_kept.to(tl.int32), 0) == 0:
        # Products of other rows may be no numbers, for blocks that they did not choose, too: anew, with care.
        first, are_small = 0, False
        row_max, out = tl.where(is_kept, row_max, float('-inf')), tl.where(is_kept[:, None], out, 0.0)
        total, surplus = tl.where(is_kept, total, 0.0), tl.where(is_kept, surplus, 0.0)
    if are_small:
        # Of one block most often.
        entry = load_entry(blocks_ptr, members_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT, num_stages=2):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                q, source, entry, None, None, 0, 0, row_max, total, surplus, out, step, num_keys, positions, scale,
                softcap, False, True, False, True, False, False, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM,
                BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
    else:
        entry = load_entry(blocks_ptr, members_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                q, source, entry, (is_kept & (step < num_fitting * SPLIT)) == 0, None, 0, 0, row_max, total, surplus,
                out, step, num_keys, positions, scale, softcap, False, True, True, True, False, False, False, CAUSAL,
                BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV,
            INT64_OFFSETS, )  # fmt: skip
            entry = following
    return row_max, total, surplus, out


@triton.jit
def _attend(
    q,
    source,
    entry,
    takes,
    is_fixed,
    choices,
    factors,
    row_max,
    total,
    sums,
    out,
    step,
    num_keys,
    positions,
    scale,
    softcap,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    ONES: tl.constexpr,
    FIXED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Adds a tile of keys to a running softmax: part step % SPLIT of block step // SPLIT of the union, for those rows
    that `takes` names, or None for all. Not MASKED: who chose the block reads all of the tile. Not CONTAIN_NONFINITE:
    all products are finite. EXACT, HALF: as in the kernel per query. sums: by how much the sum of the weights that meet
    v is above total; with ONES, that sum. FIXED: what weights are relative to stays as it is; is_fixed: it does for
    these rows, or None. scale is not negative.
    """
    block, chosen, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, BLOCK_G, BLOCK_N
    )
    if takes is not None:
        chosen = chosen & takes
    k, v = load_keys(source, first, key_mask, MASKED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS)
    scale_log2 = tl.full([BLOCK_T * BLOCK_G], scale * 1.4426950408889634, tl.float32)
    if SCALED:
        scale_log2 *= for_heads(pick_factor(factors, find_slot(choices, block, BLOCK_S), BLOCK_S), BLOCK_T, BLOCK_G)
    read = chosen[:, None] & key_mask[None, :]
    if MASKED and CAUSAL:
        read = read & (keys[None, :] <= positions[:, None])
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        products = cap_logits(products * scale_log2[:, None], softcap * 1.4426950408889634)
        scale_log2 = tl.full([BLOCK_T * BLOCK_G], 1.0, tl.float32)
    # What decides for a whole row need not be asked of every product; factors may be negative, or anything.
    BY_ROW: tl.constexpr = not MASKED and not SCALED
    if CONTAIN_NONFINITE:
        v, nonfinite_rows = split_finite(v)
        out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]
    new_max, reference = row_max, row_max
    if FIXED:
        reference = row_max - FIXED_HEADROOM if HALF else row_max
    else:
        if BY_ROW:
            largest = tl.where(chosen, tl.max(products, 1) * scale_log2, float('-inf'))
        else:
            largest = tl.max(tl.where(read, products * scale_log2[:, None], float('-inf')), 1)
        new_max = tl.maximum(row_max, largest)
        if is_fixed is not None:
            new_max = tl.where(is_fixed, row_max, new_max)
        reference = tl.where(new_max == float('-inf'), 0.0, new_max)
        rescale = tl.exp2(row_max - reference)
        total, out = total * rescale, out * rescale[:, None]
        sums = sums * rescale
    shift = tl.where(chosen, -reference, float('-inf')) if BY_ROW else -reference
    weights = tl.exp2(tl.fma(products, scale_log2[:, None], shift[:, None]))
    if not BY_ROW:
        weights = tl.where(read, weights, 0.0)
    total += tl.sum(weights, 1)
    if HALF:
        rounded = weights.to(v.dtype)
        if ONES:
            sums = add_product(rounded, tl.full([BLOCK_N, 8], 1.0, v.dtype), sums)
        else:
            sums += tl.sum(rounded.to(tl.float32) - weights, 1)
        out = add_product(rounded, v, out)
    elif EXACT:
        out = add_exact_product(weights, v, out)
    else:
        out = add_product(weights.to(v.dtype), v, out)
    return new_max, total, sums, out
