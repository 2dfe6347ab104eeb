"""Backward kernel for q and block_scale with one program per query and tile of the heads that share its blocks.

The gradient of a logit is p * (dp - delta), where delta is the sum of p * dp over the keys of a row. It is usually
computed as the product of the output and its gradient. But the output is rounded, which shows in rows with few keys. So
the kernel starts from that product, sums its error over the keys, and corrects dq and delta at the end.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product
from native_sparse_attention.ops.selected_attention.triton.arguments import KeySource, Selection
from native_sparse_attention.ops.selected_attention.triton.index.block_union import open_query
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import (
    ANY,
    FULL,
    TAIL,
    find_full_blocks,
    find_keys,
    load_factor,
    load_step,
)
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import load_for_gradients, store_gradients


@triton.jit
def dq_kernel(
    tensors, strides, k_tiles, v_tiles, layout, union, scale, softcap, sizes: tl.constexpr, tile: tl.constexpr
):
    """Compute dq and delta of one query and up to BLOCK_M of the heads that share its blocks.

    tensors, strides: `BackwardTensors`, `Strides`; dfactors: `[head tiles, B, T, HI, n]`. The rest is as in the
    forward kernel.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_S: tl.constexpr = tile.block_s
    head_tiles = tl.cdiv(GROUP, BLOCK_M)
    index_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    sequence, row, token, in_union = open_query(index_head, layout, union, head_tiles)
    if in_union:
        return
    key_start, readable = find_keys(sequence, token, layout, sizes.causal)
    row, token = row.to(tl.int64), token.to(tl.int64)
    head_tile = (tl.program_id(1) % head_tiles).to(tl.int64)
    in_group = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    rows = (row, token, heads, head_mask)
    index_heads = tl.num_programs(1) // head_tiles
    k_ptr = tensors.k + (row * strides.k[0] + index_head // sizes.repeats * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + index_head // sizes.repeats * strides.v[2])
    indices_ptr = tensors.indices
    indices_ptr += row * strides.indices[0] + token * strides.indices[1] + index_head * strides.indices[2]
    factors_ptr = tensors.factors
    if factors_ptr is not None:
        factors_ptr += row * strides.factors[0] + token * strides.factors[1] + index_head * strides.factors[2]
    q, dout, delta, offsets, lse, lse_log2, dlse = load_for_gradients(
        tensors, strides, rows, index_heads, layout, sizes, tile
    )
    HAS_DLSE: tl.constexpr = tensors.dlse is not None
    slots = tl.arange(0, BLOCK_S)
    blocks = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)  # [BLOCK_S]

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # In float32 the products dominate, so masks cost nothing and one loop saves seconds of compilation.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    num_slots, first_slot, tail_slot, num_tail_keys = find_full_blocks(
        blocks, readable, NUM_SELECTED, BLOCK_SIZE, BLOCK_S
    )
    num_steps = num_slots * (BLOCK_SIZE // BLOCK_N)
    # The last loop reads the few remaining keys of one block in small tiles, none of them in vain; or all keys.
    KIND: tl.constexpr = TAIL if UNMASKED else ANY
    LAST_BLOCK_N: tl.constexpr = 16 if UNMASKED else BLOCK_N
    num_last_steps = tl.cdiv(num_tail_keys, 16) if UNMASKED else NUM_SELECTED * tl.cdiv(BLOCK_SIZE, BLOCK_N)
    source = KeySource(
        k_ptr, v_ptr, k_tiles, v_tiles, row, index_head // sizes.repeats, strides.k[1], strides.v[1], key_start
    )
    inputs = (q, dout, lse_log2, dlse, head_mask, scale, softcap)
    selection = Selection(indices_ptr, blocks, readable, num_slots, first_slot, tail_slot)
    delta_error = tl.zeros([BLOCK_M], tl.float32)
    errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # per key of a tile, summed at the end
    dfactors_ptr = tensors.dfactors
    if dfactors_ptr is not None:
        # The gradient of a factor sums over heads, each with its own delta: it cannot be corrected at the end.
        delta += _find_delta_error(
            inputs,
            factors_ptr,
            source,
            selection,
            delta,
            num_steps,
            num_last_steps,
            UNMASKED,
            KIND,
            LAST_BLOCK_N,
            sizes,
            tile,
        )
        query = row * layout.seqlen_q + token
        dfactors_ptr += ((head_tile * tl.num_programs(0) + query) * index_heads + index_head) * NUM_SELECTED
        # Zeros for indices without a step.
        tl.store(dfactors_ptr + slots, tl.zeros([BLOCK_S], tl.float32), mask=slots < NUM_SELECTED)
    sums = (dq, mean_k, tl.zeros([BLOCK_M], tl.float32))
    if UNMASKED:
        # A single loop, so that the pipeline runs on from block to block.
        for step in tl.range(0, num_steps):
            is_first = step % (BLOCK_SIZE // BLOCK_N) == 0
            sums, dlogits = _add_keys(
                inputs, factors_ptr, source, selection, sums, delta, dfactors_ptr, step, is_first, HAS_DLSE, FULL,
                BLOCK_N, sizes, tile,
            )  # fmt: skip
            errors += dlogits
        delta_error += tl.sum(errors, 1)
    for step in tl.range(0, num_last_steps):
        is_first = step == 0 if UNMASKED else step % tl.cdiv(BLOCK_SIZE, BLOCK_N) == 0
        sums, dlogits = _add_keys(
            inputs, factors_ptr, source, selection, sums, delta, dfactors_ptr, step, is_first, HAS_DLSE, KIND,
            LAST_BLOCK_N, sizes, tile,
        )  # fmt: skip
        delta_error += tl.sum(dlogits, 1)
    dq, mean_k, _ = sums
    store_gradients(
        tensors, strides, rows, offsets, (dq, mean_k, delta_error), delta, lse, dlse, scale, sizes.head_dim, BLOCK_D
    )


@triton.jit
def _find_delta_error(
    inputs,
    factors_ptr,
    source,
    selection,
    delta,
    num_steps,
    num_last_steps,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    LAST_BLOCK_N: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the error of delta from a pass over all keys: full blocks if UNMASKED, then the last loop."""
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    delta_error = tl.zeros([BLOCK_M], tl.float32)
    if UNMASKED:
        errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, num_steps):
            _, _, _, _, dlogits, _, _ = _differentiate(
                inputs, factors_ptr, source, selection, delta, step, FULL, BLOCK_N, sizes, tile
            )
            errors += dlogits
        delta_error += tl.sum(errors, 1)
    for step in tl.range(0, num_last_steps):
        _, _, _, _, dlogits, _, _ = _differentiate(
            inputs, factors_ptr, source, selection, delta, step, KIND, LAST_BLOCK_N, sizes, tile
        )
        delta_error += tl.sum(dlogits, 1)
    return delta_error


@triton.jit
def _add_keys(
    inputs,
    factors_ptr,
    source,
    selection,
    sums,
    delta,
    dfactors_ptr,
    step,
    is_first,
    HAS_DLSE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add a tile of keys to dq, the weighted mean of the keys and the gradient of its factor.

    is_first: the tile is the first of its index. Returns the sums and p * (dp - delta).
    """
    dq, mean_k, dfactor = sums
    dlse, head_mask, softcap = inputs[3], inputs[4], inputs[6]
    k, slot, logits, weights, errors, factor, slope = _differentiate(
        inputs, factors_ptr, source, selection, delta, step, KIND, BLOCK_N, sizes, tile
    )
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
    factors_ptr,
    source,
    selection,
    delta,
    step,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Recompute the weights of a tile of keys and differentiate the logits.

    Returns k and its slot (`load_step`); logits, weights and gradients of the logits [BLOCK_M, BLOCK_N], the gradients
    0 for keys that are not read; the factor; and the slopes of the soft cap. The logits are before factor and soft cap,
    and before the scale where there are neither; the gradients are with respect to the capped logits.
    """
    q, dout, lse_log2, _, _, scale, softcap = inputs
    k, v, slot, is_read, read = load_step(source, selection, step, KIND, BLOCK_N, sizes, tile)
    factor = load_factor(factors_ptr, slot, is_read)
    PLAIN: tl.constexpr = softcap is None and factors_ptr is None
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')
    if not PLAIN:
        logits *= scale
    if KIND != FULL or softcap is not None:
        # A query that is not finite may read nothing here; a soft cap makes some of its logits finite.
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
    if not PLAIN or KIND != FULL:  # a tile that is read as a whole needs no mask per product
        dlogits = tl.where(read, dlogits, 0.0)
    return k, slot, logits, weights, dlogits, factor, slope
