"""Kernels of the block-major backward pass for delta and dq; see backward.py.

The first has one program per KV block and chunk of the queries that selected it, and stores what the block contributes
to each of them. The second adds up the contributions to a query.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import load_entries, split_rows
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite, store_rows
from native_sparse_attention.ops.selected_attention.triton.by_block.partials import (
    find_unit,
    invert_power,
    locate_partials,
    open_chunk,
    sort_columns,
    store_partials,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    count_masked_entries,
    load_factors,
    locate_entries,
)


class Inputs(NamedTuple):
    """Tensors that `block_dq_kernel` reads and, in the pass for delta, that the sum kernel has not written yet.

    Shapes are as in `BackwardTensors`. inverse_units: float32 `[B, HQ, T]`, inverse units of the gradients of the
    logits where partial results are float16, or None.
    """

    q: Any
    k: Any
    v: Any
    factors: Any
    lse: Any
    dout: Any
    delta: Any
    inverse_units: Any


@triton.jit
def block_dq_kernel(
    tensors,
    partials,
    strides,
    layout,
    csr,
    scale,
    softcap,
    COMPUTE_DQ: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute the partial results of one block for up to `tile.chunk` of its entries. BLOCK_N holds the whole block.

    COMPUTE_DQ: store parts of dq in `data` and of the gradients of factors in `second`, each unless it is None.
    Otherwise store the sum of p * dp over the keys of the block in `first`, and in `unit` 1, or where partial results
    are float16 the sum of the absolute values, at least 2 ** -100; and with `third`, the sums of p * dp and of p, times
    the logits, in `second` and `third`. tensors, strides: `Inputs`, `Strides`. One program per pair and chunk.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_M: tl.constexpr = tile.block_m
    num_entries, entries_ptr, pair, row, kv_head, key_start, keys, key_mask, offset = open_chunk(
        tl.program_id(0), layout, csr, partials, sizes, tile
    )
    if num_entries <= 0:
        return
    k_ptr = tensors.k + (row * strides.k[0] + kv_head * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + kv_head * strides.v[2])
    k = load_rows(k_ptr, key_start + keys, strides.k[1], key_mask, sizes.head_dim, tile.block_d)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, strides.v[1], key_mask, sizes.value_dim, tile.block_dv)
    num_masked = count_masked_entries(entries_ptr, num_entries, keys, key_mask, offset, csr, tile.chunk, sizes)
    num_rows = num_entries * GROUP
    first_unmasked = tl.cdiv(num_masked * GROUP, BLOCK_M) * BLOCK_M
    num_heads = csr.kv_heads * sizes.repeats * GROUP
    q_ptr = tensors.q + row * strides.q[0]
    dout_ptr = tensors.dout + row * strides.dout[0]
    lse_ptr = tensors.lse + row * num_heads * layout.seqlen_q
    delta_ptr = tensors.delta + row * num_heads * layout.seqlen_q
    inverse_units_ptr = tensors.inverse_units
    if inverse_units_ptr is not None:
        inverse_units_ptr += row * num_heads * layout.seqlen_q
    pointers = (q_ptr, dout_ptr, tensors.factors, strides)
    block = (num_rows, pair, row, kv_head, keys, key_mask, offset)
    row_sources = (entries_ptr, lse_ptr, delta_ptr, num_rows, kv_head, layout.seqlen_q)
    # For partial results, keys that some row does not read must be finite; all others are multiples of a unit.
    finite_k, largest, unit = k, 0.0, 1.0
    if COMPUTE_DQ and partials.data is not None:
        finite_k, _ = split_finite(k)
        largest = tl.max(tl.abs(finite_k.to(tl.float32)), 1)  # [BLOCK_N]
    rows = _load_rows(row_sources, inverse_units_ptr, 0, csr, COMPUTE_DQ, sizes, tile)
    # One stage, since two copies of k leave little shared memory; such rows are few.
    for first_row in tl.range(0, tl.minimum(first_unmasked, num_rows), BLOCK_M, num_stages=1):
        following = _load_rows(row_sources, inverse_units_ptr, first_row + BLOCK_M, csr, COMPUTE_DQ, sizes, tile)
        _differentiate(
            pointers, block, k, v, finite_k, largest, rows, first_row, partials, csr, scale, softcap,
            inverse_units_ptr is not None, COMPUTE_DQ, MASKED=True, sizes=sizes, tile=tile,
        )  # fmt: skip
        rows = following
    if COMPUTE_DQ and inverse_units_ptr is not None:
        # The inverse is a power of two, so scaling loses no bits of keys within 2 ** 126 of the largest.
        unit, inverse = find_unit(tl.max(largest, 0) * 4096)
        k = (k.to(tl.float32) * inverse).to(k.dtype)
    for first_row in tl.range(first_unmasked, num_rows, BLOCK_M):
        following = _load_rows(row_sources, inverse_units_ptr, first_row + BLOCK_M, csr, COMPUTE_DQ, sizes, tile)
        _differentiate(
            pointers, block, k, v, k, unit, rows, first_row, partials, csr, scale * unit, softcap,
            inverse_units_ptr is not None, COMPUTE_DQ, MASKED=False, sizes=sizes, tile=tile,
        )  # fmt: skip
        rows = following


@triton.jit
def _load_rows(
    sources, inverse_units_ptr, first_row, csr, COMPUTE_DQ: tl.constexpr, sizes: tl.constexpr, tile: tl.constexpr
):
    """Load entries, log-sum-exps and, with COMPUTE_DQ, deltas and inverse units of a tile of rows, one step ahead."""
    BLOCK_M: tl.constexpr = tile.block_m
    entries_ptr, lse_ptr, delta_ptr, num_rows, kv_head, seqlen = sources
    entry = load_entries(entries_ptr, first_row, num_rows, sizes.group, BLOCK_M)
    mask = first_row + tl.arange(0, BLOCK_M) < num_rows
    _, in_group = split_rows(first_row, sizes.group, BLOCK_M)
    token, _, head = locate_entries(entry, in_group, kv_head, csr, sizes)
    offsets = (head.to(tl.int64) if tile.int64_offsets else head) * seqlen + token
    lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0)
    delta, inverse = lse, lse
    if COMPUTE_DQ:
        delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
        if inverse_units_ptr is not None:
            inverse = tl.load(inverse_units_ptr + offsets, mask=mask, other=0.0)
    return entry, lse, delta, inverse


@triton.jit
def _differentiate(
    pointers,
    block,
    k,
    v,
    scaled_k,
    unit,
    rows,
    first_row,
    partials,
    csr,
    scale,
    softcap,
    HAS_UNITS: tl.constexpr,
    COMPUTE_DQ: tl.constexpr,
    MASKED: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Store the partial results of a tile of rows (from `_load_rows`).

    Not MASKED: all rows read all keys, and scaled_k is in multiples of `unit`. MASKED: scaled_k is finite, unit is the
    largest element of every key [BLOCK_N], and each row gets a unit from the keys that it reads. HAS_UNITS: partial
    results are float16.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_D: tl.constexpr = tile.block_d
    q_ptr, dout_ptr, factors_ptr, strides = pointers
    num_rows, pair, row, kv_head, keys, key_mask, offset = block
    entry, lse, delta, inverse = rows
    mask = first_row + tl.arange(0, BLOCK_M) < num_rows
    _, in_group = split_rows(first_row, GROUP, BLOCK_M)
    token, index_head, head = locate_entries(entry, in_group, kv_head, csr, sizes)
    positions = offset + token
    if tile.int64_offsets:
        token, head = token.to(tl.int64), head.to(tl.int64)
    offsets = token * strides.q[1] + head * strides.q[2]
    q = load_rows(q_ptr, offsets, 1, mask, sizes.head_dim, BLOCK_D)
    offsets = token * strides.dout[1] + head * strides.dout[2]
    dout = load_rows(dout_ptr, offsets, 1, mask, sizes.value_dim, tile.block_dv)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if factors_ptr is not None:
        factor = load_factors(factors_ptr, strides.factors, row, token, index_head, entry, mask, sizes.num_selected)
    scale_log2 = scale * 1.4426950408889634 * factor
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is None:
        weights = tl.exp2(tl.fma(products, scale_log2[:, None], -lse_log2[:, None]))
    else:
        logits_log2 = products * scale_log2[:, None]
        capped_log2 = cap_logits(logits_log2, softcap * 1.4426950408889634)
        weights = tl.exp2(capped_log2 - lse_log2[:, None])
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    # Always true: the loads of the next rows are issued before a branch, not behind it (docs/kernels.md).
    if first_row < num_rows:
        read = key_mask[None, :] & mask[:, None]
        if sizes.causal:
            read = read & (keys[None, :] <= positions[:, None])
        partial_offsets = (pair * csr.num_entries + entry) * GROUP + in_group
        if not COMPUTE_DQ:
            terms = weights * dweights
            if MASKED:
                terms = tl.where(read, terms, 0.0)
            tl.store(partials.first + partial_offsets, tl.sum(terms, 1), mask=mask)
            units = tl.full([BLOCK_M], 1.0, tl.float32)
            if partials.data.dtype.element_ty == tl.float16:
                units = tl.maximum(tl.sum(tl.abs(terms), 1), 7.888609052210118e-31)
            tl.store(partials.unit + partial_offsets, units, mask=mask)
            if partials.third is not None:
                logits = products * scale
                if softcap is not None:
                    logits *= cap_slope(logits_log2, softcap * 1.4426950408889634)
                if MASKED:
                    logits = tl.where(read, logits, 0.0)
                    weights = tl.where(read, weights, 0.0)
                tl.store(partials.second + partial_offsets, tl.sum(terms * logits, 1), mask=mask)
                tl.store(partials.third + partial_offsets, tl.sum(weights * logits, 1), mask=mask)
        else:
            dlogits = weights * (dweights - delta[:, None])
            if softcap is not None:
                # The slope is at most 1, so bounds of gradients hold.
                dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)
            logits = products * scale
            if MASKED:
                dlogits = tl.where(read, dlogits, 0.0)
                logits = tl.where(read, logits, 0.0)
            if partials.second is not None:
                tl.store(partials.second + partial_offsets, tl.sum(dlogits * logits, 1), mask=mask)
            dlogits *= factor[:, None]
            units = tl.full([BLOCK_M], 1.0, tl.float32)
            if HAS_UNITS and partials.data is not None:
                if factors_ptr is not None:
                    # Bounded, so that the inverse remains finite.
                    inverse *= find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]
                    inverse = tl.maximum(inverse, 1.1754943508222875e-38)
                if MASKED:
                    units_of_k, inverse_of_k = find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * 4096)
                    dlogits *= inverse_of_k[:, None]
                else:
                    units_of_k = unit
                # Neither 0, which marks an absent row, nor more than invert_power takes.
                units = tl.maximum(units_of_k * invert_power(inverse), 1.1754943508222875e-38)
                units = tl.minimum(units, 8.507059173023462e37)
                dlogits *= inverse[:, None]
            if partials.data is not None:
                dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                dq = add_product(dlogits.to(scaled_k.dtype), scaled_k, dq)
                store_partials(partials, partial_offsets, dq, units, mask, sizes.head_dim, BLOCK_D)


@triton.jit
def sum_kernel(
    partials,
    delta_ptr,
    inverse_units_ptr,
    lse_ptr,
    dlse_ptr,
    gate_ptr,
    dq_ptr,
    dlse_strides,
    gate_strides,
    dq_strides,
    layout,
    csr,
    num_tokens,
    scale,
    COMPUTE_DQ: tl.constexpr,
    sizes: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up partial results, for num_tokens tokens. One program per pair and tile of the heads of these tokens.

    COMPUTE_DQ: store dq, multiplied by the gate `[B, T, HQ]` if there is one. Otherwise store delta `[B, HQ, T]` minus
    the gradient of the log-sum-exp; the inverse units of the gradients of the logits, times the gate if there is one
    (`find_unit`), if there are; and with `third`, the gradient of the factor for one head of every entry in `second`.
    """
    GROUP: tl.constexpr = sizes.group
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    HEAD_DIM: tl.constexpr = sizes.head_dim
    mask, row, token, head, offsets = locate_partials(tl.program_id(0), csr, num_tokens, sizes, BLOCK_M)
    num_heads = csr.kv_heads * sizes.repeats * GROUP
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    for first_slot in tl.range(0, NUM_SELECTED, UNROLLED):
        for in_step in tl.static_range(UNROLLED):
            is_slot = mask & (first_slot + in_step < NUM_SELECTED)
            partial_offsets = offsets + (first_slot + in_step) * GROUP
            unit = tl.load(partials.unit + partial_offsets, mask=is_slot, other=0.0)
            is_partial = unit != 0
            # The masks do not include the unit, so that these loads need not wait for it.
            if COMPUTE_DQ:
                values = load_rows(partials.data, partial_offsets, HEAD_DIM, is_slot, HEAD_DIM, BLOCK_D).to(tl.float32)
                dq = tl.fma(tl.where(is_partial[:, None], values, 0.0), unit[:, None], dq)
            else:
                term = tl.load(partials.first + partial_offsets, mask=is_slot, other=0.0)
                delta += tl.where(is_partial, term, 0.0)
                spread += unit
    gate = tl.full([BLOCK_M], 1.0, tl.float32)
    if gate_ptr is not None:
        gate_offsets = row * gate_strides[0] + token * gate_strides[1] + head * gate_strides[2]
        gate = tl.load(gate_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
    if COMPUTE_DQ:
        dq = sort_columns(partials, dq, HEAD_DIM, BLOCK_D)
        if gate_ptr is not None:
            lse = tl.load(lse_ptr + (row * num_heads + head) * layout.seqlen_q + token, mask=mask, other=0.0)
            # The gate of an empty row may be anything.
            dq *= tl.where(lse == float('-inf'), 0.0, gate)[:, None]
        dq_ptr += row * dq_strides[0]
        dq_offsets = token * dq_strides[1] + head * dq_strides[2]
        store_rows(dq_ptr, dq_offsets, 1, dq * scale, mask, HEAD_DIM, BLOCK_D)
    else:
        row_offsets = (row * num_heads + head) * layout.seqlen_q + token
        if dlse_ptr is not None:
            dlse_ptr += row * dlse_strides[0] + head * dlse_strides[1] + token * dlse_strides[2]
            dlse = tl.load(dlse_ptr, mask=mask, other=0.0)
            # The log-sum-exp of an empty row has no gradient; logaddexp of two of them returns NaN.
            lse = tl.load(lse_ptr + row_offsets, mask=mask, other=0.0)
            dlse = tl.where(lse == float('-inf'), 0.0, dlse)
            delta -= dlse
            spread += tl.abs(dlse)
        tl.store(delta_ptr + row_offsets, delta, mask=mask)
        if inverse_units_ptr is not None:
            # Over the keys of a block |p * (dp - delta)| sums to at most twice the spread; p may be slightly off.
            if gate_ptr is not None:
                spread *= tl.abs(gate)
            _, inverse = find_unit(4 * spread)
            tl.store(inverse_units_ptr + row_offsets, inverse, mask=mask)
        if partials.third is not None:
            for slot in tl.range(0, NUM_SELECTED):
                partial_offsets = offsets + slot * GROUP
                unit = tl.load(partials.unit + partial_offsets, mask=mask, other=0.0)
                dfactor = tl.load(partials.second + partial_offsets, mask=mask, other=0.0)
                dfactor -= delta * tl.load(partials.third + partial_offsets, mask=mask, other=0.0)
                tl.store(partials.second + partial_offsets, tl.where(unit == 0, 0.0, dfactor), mask=mask)
