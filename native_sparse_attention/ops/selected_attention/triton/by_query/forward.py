"""Forward kernel of selected attention: one program per query and tile of the heads that share its choice."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows
from native_sparse_attention.ops.selected_attention.triton.fp16_values import (
    FITS,
    HEADROOM,
    add_exact_product,
    find_flags,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_union import open_query
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import (
    ANY,
    PART,
    WHOLE,
    find_keys,
    find_whole_blocks,
    load_factor,
    load_step,
)
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import store_output


@triton.jit
def forward_kernel(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    ONES: tl.constexpr,
):
    """q, out: `[B, T, HQ, D and DV]`; k, v: `[B, S, H, D and DV]`; indices, factors (or None): `[B, T, HI, n]`; lse:
    `[B, HQ, T]`. GROUP: HQ / HI, heads that share a choice. REPEATS: HI / H, choices of a kv head.
    sharing: what the kernel of neighbours does is left to it. k_tiles, v_tiles: tensor descriptors of k and v, tiles of
    `[1, BLOCK_N, 1, BLOCK_D and BLOCK_DV]`, or None. softcap: of the logits, or None, as in all of these kernels.

    low: int16 `[B, T, HQ, DV]`, what rounding leaves out of out (`split_low_bits`), or None. Where it is asked for,
    weights meet v with eleven bits: halves, half_tiles: v in float16 (`HalfValues`), or None. ONES: such weights are
    added up by a product with columns of ones.
    """
    parts = tl.cdiv(GROUP, BLOCK_M)
    index_head = tl.program_id(1) // parts
    sequence, row, token, is_shared = open_query(index_head, place, sharing, parts)
    if is_shared:
        return
    key_start, readable = find_keys(sequence, token, place, CAUSAL)
    row, token = row.to(tl.int64), token.to(tl.int64)
    in_group = tl.program_id(1) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    kv_head = (index_head // REPEATS).to(tl.int64)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + index_head.to(tl.int64) * indices_strides[2]
    if factors_ptr is not None:
        factors_ptr += (
            row * factors_strides[0] + token * factors_strides[1] + index_head.to(tl.int64) * factors_strides[2]
        )
    q_ptr += row * q_strides[0] + token * q_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], head_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slots = tl.arange(0, BLOCK_S)
    choice = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)  # [BLOCK_S]

    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    surplus = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    EXACT: tl.constexpr = low_ptr is not None
    scale_log2 = scale * 1.4426950408889634
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    if BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32:
        num_slots, first_slot, last_slot, num_left = find_whole_blocks(
            choice, readable, NUM_SELECTED, BLOCK_SIZE, BLOCK_S
        )
        chosen = (indices_ptr, choice, readable, num_slots, first_slot, last_slot)
        num_steps = num_slots * (BLOCK_SIZE // BLOCK_N)
        if halves is not None:
            # All of them in float16, or none: what does not fit is found out while it is tried, and done anew.
            whole = (choice >= 0) & (choice < readable // BLOCK_SIZE)
            pair = row * (tl.num_programs(1) // parts // REPEATS) + kv_head
            flags_ptr = find_flags(halves, pair, sequence, key_start, place, BLOCK_SIZE)
            flags = tl.load(flags_ptr + tl.where(whole, choice, 0), mask=whole, other=FITS)
            half_ptr = halves.half + row * half_strides[0] + kv_head * half_strides[2]
            half = (k_ptr, half_ptr, k_tiles, half_tiles, row, kv_head, k_strides[1], half_strides[1], key_start)
            row_max, total, surplus, out = _attend_to_blocks(
                q, half, chosen, factors_ptr, num_steps, scale_log2, softcap, EXACT, True, ONES, BLOCK_SIZE, HEAD_DIM,
                VALUE_DIM, BLOCK_S, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            if tl.min(flags.to(tl.int32), 0) != FITS:
                row_max, total, surplus, out = _attend_to_blocks(
                    q, source, chosen, factors_ptr, num_steps, scale_log2, softcap, EXACT, False, False, BLOCK_SIZE,
                    HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
                )  # fmt: skip
        else:
            row_max, total, surplus, out = _attend_to_blocks(
                q, source, chosen, factors_ptr, num_steps, scale_log2, softcap, EXACT, False, False, BLOCK_SIZE,
                HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
        # Few keys are left, of one block: in smaller tiles, none of which is read in vain. In a short pipeline, since
        # what fills one is most of what there is to do.
        for step in tl.range(0, tl.cdiv(num_left, 16), num_stages=3):
            k, v, slot, is_read, read = load_step(
                source,
                chosen,
                step,
                PART,
                BLOCK_SIZE,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_S,
                16,
                BLOCK_D,
                BLOCK_DV,
                INT64_OFFSETS,
            )
            factor = load_factor(factors_ptr, slot, is_read)
            row_max, total, surplus, out = _attend(
                q, k, v, row_max, total, surplus, out, factor * scale_log2, softcap, read, True, EXACT, False, False
            )
    else:
        chosen = (indices_ptr, choice, readable, 0, 0, 0)
        for step in tl.range(0, NUM_SELECTED * tl.cdiv(BLOCK_SIZE, BLOCK_N)):
            k, v, slot, is_read, read = load_step(
                source,
                chosen,
                step,
                ANY,
                BLOCK_SIZE,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_S,
                BLOCK_N,
                BLOCK_D,
                BLOCK_DV,
                INT64_OFFSETS,
            )
            factor = load_factor(factors_ptr, slot, is_read)
            row_max, total, surplus, out = _attend(
                q, k, v, row_max, total, surplus, out, factor * scale_log2, softcap, read, True, EXACT, False, False
            )

    sums = (row_max, total, None if halves is None else surplus, out)
    rows, num_heads = (row, token, heads, head_mask), tl.num_programs(1) // parts * GROUP
    store_output(out_ptr, lse_ptr, low_ptr, out_strides, rows, num_heads, place, sums, VALUE_DIM, BLOCK_DV)


@triton.jit
def _attend_to_blocks(
    q,
    source,
    chosen,
    factors_ptr,
    num_steps,
    scale_log2,
    softcap,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    ONES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """The running softmax of whole blocks, steps of `load_step`: of each row the logit that weights are relative to,
    their sum, by how much the sum of those that met v is above it, and the sum of the values.
    """
    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up over the keys of a tile at the end
    SUMS: tl.constexpr = ([BLOCK_M, 8] if ONES else [BLOCK_M, BLOCK_N]) if HALF else [BLOCK_M]
    sums = tl.zeros(SUMS, tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # One loop, whose next step is fetched in time, be a block one tile or several.
    for step in tl.range(0, num_steps):
        k, v, slot, is_read, read = load_step(
            source,
            chosen,
            step,
            WHOLE,
            BLOCK_SIZE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_S,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            INT64_OFFSETS,
        )
        factor = load_factor(factors_ptr, slot, is_read)
        row_max, totals, sums, out = _attend(
            q, k, v, row_max, totals, sums, out, factor * scale_log2, softcap, read, False, EXACT, HALF, ONES
        )
    total = tl.sum(totals, 1)
    if HALF:
        row_max -= HEADROOM
        sums = tl.max(sums, 1) - total if ONES else tl.sum(sums, 1)
    return row_max, total, sums, out


@triton.jit
def _attend(
    q,
    k,
    v,
    row_max,
    total,
    sums,
    out,
    scale_log2,
    softcap,
    read,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    ONES: tl.constexpr,
):
    """Adds a tile of keys to a running softmax. read: which keys are, the others being 0; or, not MASKED, whether all
    are. total: [BLOCK_M], or, not MASKED, with a column for every key of a tile; sums: likewise, by how much the sum of
    the weights that meet v is above it, or with ONES that sum, in columns. EXACT: these weights have more bits than v.
    HALF: v is float16 (half_values.py).
    """
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if MASKED or softcap is not None:
        # A query that is not finite, and reads nothing; its other logits may be finite where they are capped.
        products = tl.where(read, products, 0.0)
    if softcap is not None:
        products = cap_logits(products * scale_log2, softcap * 1.4426950408889634)
        scale_log2 = 1.0
    bias = tl.where(read, 0.0, float('-inf'))
    new_max = tl.maximum(row_max, tl.max(tl.fma(products, scale_log2, bias), 1))
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    rescale = tl.exp2(row_max - reference)
    if HALF:
        reference -= HEADROOM
    weights = tl.exp2(tl.fma(products, scale_log2, bias - reference[:, None]))
    total = tl.fma(total, rescale, tl.sum(weights, 1)) if MASKED else tl.fma(total, rescale[:, None], weights)
    if HALF:
        rounded = weights.to(v.dtype)
        if ONES:
            sums = add_product(rounded, tl.full([v.shape[0], 8], 1.0, v.dtype), sums * rescale[:, None])
        else:
            sums = tl.fma(sums, rescale[:, None], rounded.to(tl.float32) - weights)
        out = add_product(rounded, v, out * rescale[:, None])
    elif EXACT:
        sums = sums * rescale
        out = add_exact_product(weights, v, out * rescale[:, None])
    else:
        out = add_product(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, total, sums, out
