"""Backward kernel of selected attention for the gradients of q and of the factors: one program per query and tile of
the heads that share its choice.

The gradient of a logit is p * (dp - delta), where delta is the sum of p * dp over the keys of a row. It is commonly
taken as the product of the output and its gradient, but the output is rounded, and in rows of few keys that shows. So
the kernel starts from that product, adds up by how much it is off, and corrects both its result and delta.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product
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
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import load_for_gradients, store_gradients


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    indices_ptr,
    factors_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    gate_ptr,
    dq_ptr,
    delta_ptr,
    dfactors_ptr,
    q_strides,
    k_strides,
    v_strides,
    indices_strides,
    factors_strides,
    out_strides,
    dout_strides,
    dlse_strides,
    gate_strides,
    dq_strides,
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
):
    """Shapes as in the forward kernel; dlse may be None, and is `[B, HQ, T]` like lse and delta, where the gradient of
    a logit is p * (dp - delta). gate: `[B, T, HQ]`, what dout is still to be multiplied by, or None. dfactors: float32
    `[parts, B, T, HI, n]`, for the tiles of the heads of a choice, or None.
    """
    parts = tl.cdiv(GROUP, BLOCK_M)
    index_head = (tl.program_id(1) // parts).to(tl.int64)
    sequence, row, token, is_shared = open_query(index_head, place, sharing, parts)
    if is_shared:
        return
    key_start, readable = find_keys(sequence, token, place, CAUSAL)
    row, token = row.to(tl.int64), token.to(tl.int64)
    part = (tl.program_id(1) % parts).to(tl.int64)
    in_group = part * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    rows = (row, token, heads, head_mask)
    index_heads = tl.num_programs(1) // parts
    k_ptr += row * k_strides[0] + index_head // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + index_head // REPEATS * v_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + index_head * indices_strides[2]
    if factors_ptr is not None:
        factors_ptr += row * factors_strides[0] + token * factors_strides[1] + index_head * factors_strides[2]
    pointers = (q_ptr, out_ptr, dout_ptr, dlse_ptr, lse_ptr)
    strides = (q_strides, out_strides, dout_strides, dlse_strides)
    q, dout, delta, places, lse, lse_log2, dlse = load_for_gradients(
        pointers, strides, rows, index_heads, place, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV
    )
    HAS_DLSE: tl.constexpr = dlse_ptr is not None
    slots = tl.arange(0, BLOCK_S)
    choice = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)  # [BLOCK_S]

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    num_slots, first_slot, last_slot, num_left = find_whole_blocks(choice, readable, NUM_SELECTED, BLOCK_SIZE, BLOCK_S)
    num_steps = num_slots * (BLOCK_SIZE // BLOCK_N)
    # What is left is a few keys of one block, in smaller tiles, none of which is read in vain; or everything.
    KIND: tl.constexpr = PART if UNMASKED else ANY
    BLOCK_L: tl.constexpr = 16 if UNMASKED else BLOCK_N
    num_last_steps = tl.cdiv(num_left, 16) if UNMASKED else NUM_SELECTED * tl.cdiv(BLOCK_SIZE, BLOCK_N)
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, index_head // REPEATS, k_strides[1], v_strides[1], key_start)
    inputs = (q, dout, lse_log2, dlse, head_mask, factors_ptr, scale, softcap)
    chosen = (indices_ptr, choice, readable, num_slots, first_slot, last_slot)
    missing = tl.zeros([BLOCK_M], tl.float32)
    errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up over the keys of a tile at the end
    if dfactors_ptr is not None:
        # The gradient of a factor is a sum over heads, each with a delta of its own: it cannot be corrected at last.
        delta += _find_missing(
            inputs, source, chosen, delta, num_steps, num_last_steps, UNMASKED, KIND, BLOCK_SIZE, HEAD_DIM, VALUE_DIM,
            BLOCK_S, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
        query = row * place.seqlen_q + token
        dfactors_ptr += ((part * tl.num_programs(0) + query) * index_heads + index_head) * NUM_SELECTED
        # Of indices that no step belongs to.
        tl.store(dfactors_ptr + slots, tl.zeros([BLOCK_S], tl.float32), mask=slots < NUM_SELECTED)
    sums = (dq, mean_k, tl.zeros([BLOCK_M], tl.float32))
    if UNMASKED:
        # One loop, whose next step is fetched in time, be a block one tile or several.
        for step in tl.range(0, num_steps):
            sums, dlogits = _add_keys(
                inputs, source, chosen, sums, delta, dfactors_ptr, step, step % (BLOCK_SIZE // BLOCK_N) == 0,
                HAS_DLSE, WHOLE, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            errors += dlogits
        missing += tl.sum(errors, 1)
    for step in tl.range(0, num_last_steps):
        is_first = step == 0 if UNMASKED else step % tl.cdiv(BLOCK_SIZE, BLOCK_N) == 0
        sums, dlogits = _add_keys(
            inputs, source, chosen, sums, delta, dfactors_ptr, step, is_first, HAS_DLSE, KIND, BLOCK_SIZE, HEAD_DIM,
            VALUE_DIM, BLOCK_S, BLOCK_L, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
        missing += tl.sum(dlogits, 1)
    dq, mean_k, _ = sums
    store_gradients(
        dq_ptr, delta_ptr, gate_ptr, dq_strides, gate_strides, rows, places, (dq, mean_k, missing),
        delta, lse, dlse, scale, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _find_missing(
    inputs,
    source,
    chosen,
    delta,
    num_steps,
    num_last_steps,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """By how much delta is off, in steps through all keys: of whole blocks, UNMASKED, and of what is left."""
    missing = tl.zeros([BLOCK_M], tl.float32)
    if UNMASKED:
        errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, num_steps):
            _, _, _, _, dlogits, _, _ = _differentiate(
                inputs, source, chosen, delta, step, WHOLE, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D,
                BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            errors += dlogits
        missing += tl.sum(errors, 1)
    for step in tl.range(0, num_last_steps):
        _, _, _, _, dlogits, _, _ = _differentiate(
            inputs, source, chosen, delta, step, KIND, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_L, BLOCK_D,
            BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
        missing += tl.sum(dlogits, 1)
    return missing


@triton.jit
def _add_keys(
    inputs,
    source,
    chosen,
    sums,
    delta,
    dfactors_ptr,
    step,
    is_first,
    HAS_DLSE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Adds a tile of keys to dq, to the mean of the keys and to the gradient of a factor, which begins with the first
    tile of an index. Gives p * (dp - delta), too.
    """
    dq, mean_k, dfactor = sums
    dlse, head_mask, softcap = inputs[3], inputs[4], inputs[7]
    k, slot, logits, weights, errors, factor, slope = _differentiate(
        inputs, source, chosen, delta, step, KIND, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV,
        INT64_OFFSETS,
    )  # fmt: skip
    dlogits = errors
    if HAS_DLSE:
        dlogits = tl.fma(weights, dlse[:, None], errors)
    if softcap is not None:
        dlogits *= slope
        weights *= slope
    if dfactors_ptr is not None:
        # Logits of keys that are not read may be anything.
        terms = tl.where(dlogits == 0, 0.0, dlogits * logits)
        dfactor = tl.where(is_first, 0.0, dfactor) + tl.sum(terms, 1)
        tl.store(dfactors_ptr + slot, tl.sum(tl.where(head_mask, dfactor, 0.0), 0))
    dq = add_product((dlogits * factor).to(k.dtype), k, dq)
    mean_k = add_product((weights * factor).to(k.dtype), k, mean_k)
    return (dq, mean_k, dfactor), errors


@triton.jit
def _differentiate(
    inputs,
    source,
    chosen,
    delta,
    step,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """A tile of keys (`load_step`), its index, and [BLOCK_M, BLOCK_N]: their logits without the factor, their weights,
    and the gradients of the logits, 0 for keys that are not read; the factor; and the slopes of what is capped. Logits
    are without the factor and the cap, their gradients beside both; and without the scale where there are neither.
    """
    q, dout, lse_log2, _, _, factors_ptr, scale, softcap = inputs
    k, v, slot, is_read, read = load_step(
        source, chosen, step, KIND, BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS
    )
    factor = load_factor(factors_ptr, slot, is_read)
    PLAIN: tl.constexpr = softcap is None and factors_ptr is None
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')
    if not PLAIN:
        logits *= scale
    if KIND != WHOLE or softcap is not None:
        # Of a query that is not finite, and reads nothing; its other logits may be finite where they are capped.
        logits = tl.where(read, logits, 0.0)
    bias = tl.where(read, 0.0, float('-inf')) - lse_log2[:, None]
    slope = 1.0
    if PLAIN:
        weights = tl.exp2(tl.fma(logits, scale * 1.4426950408889634, bias))
    elif softcap is None:
        weights = tl.exp2(tl.fma(logits, factor * 1.4426950408889634, bias))
    else:
        scaled = logits * factor
        capped = cap_logits(scaled, softcap)
        slope = cap_slope(scaled, softcap)
        weights = tl.exp2(tl.fma(capped, 1.4426950408889634, bias))
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    dlogits = weights * (dweights - delta[:, None])
    if not PLAIN or KIND != WHOLE:  # what decides for a whole tile need not be asked of every product
        dlogits = tl.where(read, dlogits, 0.0)
    return k, slot, logits, weights, dlogits, factor, slope
