"""Backward kernel of interval attention for the gradient of q; key_gradients.py has the gradients of k and v.

The gradient of a logit is p * (dp - delta), where delta is the sum of p * dp over a row's keys. Usually delta is the
product of output and output gradient, but the output is rounded, which shows in rows of few keys. This kernel runs
first: it starts from that product, sums up its error, and corrects both dq and delta.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.interval.modifiers import (
    find_exponents,
    is_kept,
    row_of_modifiers,
    tile_coordinates,
)
from native_sparse_attention.ops._triton.interval.tiles import find_start, key_tiles, load_keys, open_tile, reads_keys
from native_sparse_attention.ops._triton.tiles import add_product, is_finite_tile, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import locate_queries


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    gate_ptr,
    dq_ptr,
    stats_ptr,
    k_tiles,
    v_tiles,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dlse_strides,
    gate_strides,
    dq_strides,
    layout,
    interval,
    scale,
    modifiers,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    tile: tl.constexpr,
):
    """Shapes as in the forward kernel. dlse: `[B, HQ, T]` or None. gate: `[B, T, HQ]`, a factor of dout, or None.

    stats: float32 `[B, HQ, 2 or 3, T]`, the row statistics for the other kernels: the log-sum-exp in base 2 (0 for a
    row without keys) and delta. With a gate, log2(gate) is subtracted from the first, so that it leads to gate * p, or
    to NaN if the gate is negative; the third is the log-sum-exp minus log2(-gate).
    """
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_D: tl.constexpr = tile.block_d
    located = locate_queries(tl.program_id(0), layout, BLOCK_M // HEADS)
    _, _, _, first_query, num_queries, _, _ = located
    if first_query >= num_queries:
        return
    first_head, tile_rows, positions, key_start, num_keys = open_tile(interval, layout, located, HEADS, BLOCK_M)
    row, heads, query_rows, query_mask = tile_rows

    kv_head = first_head // GROUP
    keys = (k_tiles, row, kv_head, k_ptr + row * k_strides[0] + kv_head * k_strides[2], k_strides[1])
    values = (v_tiles, row, kv_head, v_ptr + row * v_strides[0] + kv_head * v_strides[2], v_strides[1])
    q_ptr += row * q_strides[0] + heads[:, None] * q_strides[2]
    out_ptr += row * out_strides[0] + heads[:, None] * out_strides[2]
    dout_ptr += row * dout_strides[0] + heads[:, None] * dout_strides[2]
    dq_ptr += row * dq_strides[0] + heads[:, None] * dq_strides[2]
    q = load_rows(q_ptr, query_rows, q_strides[1], query_mask, tile.head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(
        dout_ptr, query_rows, dout_strides[1], query_mask, tile.value_dim, tile.block_dv
    )  # [BLOCK_M, BLOCK_DV]
    out = load_rows(out_ptr, query_rows, out_strides[1], query_mask, tile.value_dim, tile.block_dv)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row_of_lse = (row * tl.num_programs(1) * HEADS + heads) * layout.seqlen_q
    lse = tl.load(lse_ptr + row_of_lse + query_rows, mask=query_mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    NUM_STATS: tl.constexpr = 2 if gate_ptr is None else 3
    stats_ptr += NUM_STATS * row_of_lse
    if gate_ptr is None:
        tl.store(stats_ptr + query_rows, lse_log2, mask=query_mask)
    dlse = tl.zeros([BLOCK_M], tl.float32)
    HAS_DLSE: tl.constexpr = dlse_ptr is not None
    if HAS_DLSE:
        # The log-sum-exp of a row without keys has no gradient; logaddexp of two such rows sends NaN.
        dlse = _load_per_row(dlse_ptr, dlse_strides, tile_rows, lse)

    last, tiles, limits = key_tiles(interval, layout, located, positions, num_keys, BLOCK_M // HEADS, tile.block_n)
    end_tiles, num_tiles = tiles[4], tiles[5]
    rows = (row_of_modifiers(modifiers, row), heads, query_rows, query_mask)

    missing = tl.zeros([BLOCK_M], tl.float32)
    if modifiers.sinks is not None:
        # A sink is a key with a value of 0.
        missing = -delta * tl.exp2(tl.load(modifiers.sinks + heads) * 1.4426950408889634 - lse_log2)
    empty_sums = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32), missing)
    sums = empty_sums
    stats, source, bounds = (lse_log2, delta, dlse), (keys, values, rows, key_start), (limits, tiles, last)
    # In float32 CONTAIN_NONFINITE costs little beside the products, and a loop takes seconds to compile: only the last
    # loop exists.
    if q.dtype != tl.float32:
        for index in range(end_tiles):
            sums = _add_keys(
                q, dout, sums, stats, index, source, bounds, scale, interval, modifiers, tile,
                HAS_DLSE=HAS_DLSE, MASKED=True, CONTAIN_NONFINITE=False,
            )  # fmt: skip
        if end_tiles < num_tiles:  # so that the assembler need not move the sums of the loop before (docs/kernels.md)
            for index in range(end_tiles, num_tiles):
                sums = _add_keys(
                    q, dout, sums, stats, index, source, bounds, scale, interval, modifiers, tile,
                    HAS_DLSE=HAS_DLSE, MASKED=False, CONTAIN_NONFINITE=False,
                )  # fmt: skip
    if q.dtype == tl.float32 or not is_finite_tile(sums[0] + sums[1]):
        # A key that some rows do not read may be non-finite: recompute with CONTAIN_NONFINITE.
        sums = empty_sums
        for index in tl.range(num_tiles, num_stages=1):
            sums = _add_keys(
                q, dout, sums, stats, index, source, bounds, scale, interval, modifiers, tile,
                HAS_DLSE=HAS_DLSE, MASKED=True, CONTAIN_NONFINITE=True,
            )  # fmt: skip
    dq, mean_k, missing = sums
    dq = (dq - missing[:, None] * mean_k) * scale
    if gate_ptr is not None:
        gate = _load_per_row(gate_ptr, (gate_strides[0], gate_strides[2], gate_strides[1]), tile_rows, lse)
        dq *= gate[:, None]
        tl.store(stats_ptr + query_rows, lse_log2 - tl.log2(gate), mask=query_mask)
        tl.store(stats_ptr + 2 * layout.seqlen_q + query_rows, lse_log2 - tl.log2(-gate), mask=query_mask)
    store_rows(dq_ptr, query_rows, dq_strides[1], dq, query_mask, tile.head_dim, BLOCK_D)
    tl.store(stats_ptr + layout.seqlen_q + query_rows, delta + missing - dlse, mask=query_mask)


@triton.jit
def _load_per_row(ptr, strides, tile_rows, lse):
    """Load one float32 number per row of a tile; 0 for rows without keys, whose value is arbitrary. strides: of batch
    rows, heads and queries.
    """
    row, heads, query_rows, query_mask = tile_rows
    ptr += row * strides[0] + heads * strides[1]
    numbers = tl.load(ptr + query_rows.to(tl.int64) * strides[2], mask=query_mask, other=0.0).to(tl.float32)
    return tl.where(lse == float('-inf'), 0.0, numbers)


@triton.jit
def _add_keys(
    q,
    dout,
    sums,
    stats,
    index,
    source,
    bounds,
    scale,
    interval,
    modifiers,
    tile: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
):
    """Add a key tile to dq, computed with the delta that is off by `missing`, and to the mean of the keys, the
    derivative of dq by delta. Without MASKED every row reads the whole tile. CONTAIN_NONFINITE: non-finite values reach
    only the rows that read them.
    """
    dq, mean_k, missing = sums
    lse_log2, delta, dlse = stats
    keys, values, rows, key_start = source
    limits, tiles, last = bounds
    start = find_start(tiles, index, MASKED, CONTAIN_NONFINITE, tile.block_n)
    k = load_keys(keys, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, tile.head_dim, tile.block_d, tile)
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    coordinates = tile_coordinates(rows, key_start, start, last, tile.block_n)
    exponents, slope, read = find_exponents(logits, lse_log2[:, None], scale, modifiers, coordinates)
    if MASKED:
        read = read & reads_keys(interval, limits, start, tile.block_n)
    weights = tl.exp2(tl.where(read, exponents, float('-inf')))
    v = load_keys(
        values, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, tile.value_dim, tile.block_dv, tile
    )
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    if modifiers.seed is not None:
        dweights = tl.where(is_kept(modifiers, coordinates), dweights * modifiers.keep_factor, 0.0)
    dlogits = weights * (dweights - delta[:, None])
    if CONTAIN_NONFINITE:
        dlogits = tl.where(read, dlogits, 0.0)
        k, _ = split_finite(k)
    missing += tl.sum(dlogits, 1)
    if HAS_DLSE:
        dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if modifiers.softcap is not None:
        slope = tl.where(read, slope, 0.0) if CONTAIN_NONFINITE else slope
        dlogits *= slope
        weights *= slope
    dq = add_product(dlogits.to(k.dtype), k, dq)
    mean_k = add_product(weights.to(k.dtype), k, mean_k)
    return dq, mean_k, missing
