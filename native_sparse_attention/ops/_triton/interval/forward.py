"""Forward kernel of interval attention: one program per query tile and HEADS heads that share a KV head."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.interval.modifiers import (
    first_sums,
    is_kept,
    modify_logits,
    row_of_modifiers,
    tile_coordinates,
)
from native_sparse_attention.ops._triton.interval.tiles import find_start, key_tiles, load_keys, open_tile, reads_keys
from native_sparse_attention.ops._triton.tiles import add_product, is_finite_tile, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import locate_queries


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    k_tiles,
    v_tiles,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    layout,
    interval,
    scale,
    modifiers,
    NEGATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    tile: tl.constexpr,
):
    """q, out: `[B, T, HQ, D and DV]`. k, v: `[B, M + C, H, D and DV]`, the M memory pairs first. lse: `[B, HQ, T]`.

    The tiles at the ends of the interval, which need a mask, come first; they set the softmax maximum that the fully
    visible tiles keep. If a sum is not finite or that maximum was too far off, all tiles are computed again, masked and
    with non-finite values contained.
    """
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_DV: tl.constexpr = tile.block_dv
    tile_of_queries = tl.program_id(0)
    if interval.left is None:
        # The last queries first, since they read the most keys: the short programs fill up the end of the launch.
        tile_of_queries = tl.num_programs(0) - 1 - tile_of_queries
    located = locate_queries(tile_of_queries, layout, BLOCK_M // HEADS)
    _, _, _, first_query, num_queries, _, _ = located
    if first_query >= num_queries:
        return
    first_head, tile_rows, positions, key_start, num_keys = open_tile(interval, layout, located, HEADS, BLOCK_M)
    row, heads, query_rows, query_mask = tile_rows

    kv_head = first_head // GROUP
    keys = (k_tiles, row, kv_head, k_ptr + row * k_strides[0] + kv_head * k_strides[2], k_strides[1])
    values = (v_tiles, row, kv_head, v_ptr + row * v_strides[0] + kv_head * v_strides[2], v_strides[1])
    q_ptr += row * q_strides[0] + heads[:, None] * q_strides[2]
    q = load_rows(q_ptr, query_rows, q_strides[1], query_mask, tile.head_dim, tile.block_d)  # [BLOCK_M, BLOCK_D]

    last, tiles, limits = key_tiles(interval, layout, located, positions, num_keys, BLOCK_M // HEADS, tile.block_n)
    end_tiles, num_tiles = tiles[4], tiles[5]
    rows = (row_of_modifiers(modifiers, row), heads, query_rows, query_mask)

    first_max, first_total = first_sums(modifiers, heads, BLOCK_M)
    empty_sums = (first_max, first_total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32))
    sums = empty_sums
    # With a negative scale products are negated, so that their maximum is that of the logits and -inf has weight 0.
    scale_log2 = tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)
    if modifiers.softcap is not None or modifiers.bias is not None:
        scale_log2 = 1.0
    source, bounds, scales = (keys, values, rows, key_start), (limits, tiles, last), (scale, scale_log2)
    for index in range(end_tiles):
        sums = _attend(
            q, sums, None, index, source, bounds, scales, interval, modifiers, tile,
            NEGATIVE=NEGATIVE, MASKED=True, CONTAIN_NONFINITE=False, FIXED=False,
        )  # fmt: skip
    # float16 weights overflow if the fixed maximum is too low. With masks many rows may read nothing, which look like
    # rows whose weights vanished.
    FIXED: tl.constexpr = (
        q.dtype != tl.float16
        and modifiers.bias is None
        and modifiers.attn_mask is None
        and modifiers.query_segments is None
    )
    if FIXED:
        sums = (tl.where(sums[0] == float('-inf'), 0.0, sums[0]), sums[1], sums[2])
    for index in range(end_tiles, num_tiles):
        sums = _attend(
            q, sums, None, index, source, bounds, scales, interval, modifiers, tile,
            NEGATIVE=NEGATIVE, MASKED=False, CONTAIN_NONFINITE=False, FIXED=FIXED,
        )  # fmt: skip
    row_max, total = sums[0], sums[1]
    are_near = tl.min(_is_near(total).to(tl.int32), 0) != 0 if FIXED else True
    if not (is_finite_tile(sums[2]) and are_near):
        # A value that some rows do not read may be non-finite: recompute with CONTAIN_NONFINITE. A second pass updates
        # the maximum of the rows whose fixed maximum was not near; the other rows keep their bits.
        is_fixed = tl.full([BLOCK_M], FIXED, tl.int1)
        for _ in tl.range(2 if FIXED else 1):
            sums = empty_sums
            for index in tl.range(num_tiles, num_stages=1):
                sums = _attend(
                    q, sums, is_fixed & (index >= end_tiles), index, source, bounds, scales, interval, modifiers, tile,
                    NEGATIVE=NEGATIVE, MASKED=True, CONTAIN_NONFINITE=True, FIXED=False,
                )  # fmt: skip
            is_fixed = is_fixed & _is_near(sums[1]) & (tl.sum(sums[2] - sums[2], 1) == 0)
        # The bits of the log-sum-exp must not depend on the values.
        is_first = _is_near(total) & FIXED
        row_max, total = tl.where(is_first, row_max, sums[0]), tl.where(is_first, total, sums[1])

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    out = sums[2] * (1.0 / tl.where(empty, 1.0, sums[1]))[:, None]
    if modifiers.keep_factor is not None:
        out = out * modifiers.keep_factor
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    out_ptr += row * out_strides[0] + heads[:, None] * out_strides[2]
    store_rows(out_ptr, query_rows, out_strides[1], out, query_mask, tile.value_dim, BLOCK_DV)
    # The offset that all heads share is added up first.
    row_of_lse = (row * tl.num_programs(1) * HEADS + first_head + tl.arange(0, BLOCK_M) % HEADS) * layout.seqlen_q
    tl.store(lse_ptr + row_of_lse + query_rows, lse, mask=query_mask)


@triton.jit
def _is_near(total):
    """Return whether softmax sums relative to a fixed maximum are usable: neither too large nor so small that products
    with small values could vanish. A row without keys has a sum of 0, which is not.
    """
    return (total > 2.0**-20) & (total < 2.0**60)


@triton.jit
def _attend(
    q,
    sums,
    is_fixed,
    index,
    source,
    bounds,
    scales,
    interval,
    modifiers,
    tile: tl.constexpr,
    NEGATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Add a key tile to the online softmax. Without MASKED every row reads the whole tile.

    CONTAIN_NONFINITE: non-finite values reach only the rows that read them. FIXED: the maximum stays as it is;
    is_fixed: only that of these rows does, or None.
    """
    row_max, total, out = sums
    keys, values, rows, key_start = source
    limits, tiles, last = bounds
    scale, scale_log2 = scales
    start = find_start(tiles, index, MASKED, CONTAIN_NONFINITE, tile.block_n)
    k = load_keys(keys, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, tile.head_dim, tile.block_d, tile)
    v = load_keys(
        values, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, tile.value_dim, tile.block_dv, tile
    )
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    products = -products if NEGATIVE else products
    coordinates = tile_coordinates(rows, key_start, start, last, tile.block_n)
    products, _, read = modify_logits(products, scale, modifiers, coordinates)
    if MASKED:
        read = read & reads_keys(interval, limits, start, tile.block_n)
    products = tl.where(read, products, float('-inf'))
    if CONTAIN_NONFINITE:
        v, nonfinite_rows = split_finite(v)
        out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]
    new_max = row_max
    if not FIXED:
        new_max = tl.maximum(row_max, tl.max(products, 1) * scale_log2)
        if is_fixed is not None:
            new_max = tl.where(is_fixed, tl.where(row_max == float('-inf'), 0.0, row_max), new_max)
    reference = new_max if FIXED else tl.where(new_max == float('-inf'), 0.0, new_max)
    weights = tl.exp2(tl.fma(products, scale_log2, -reference[:, None]))
    if not FIXED:
        rescale = tl.exp2(row_max - reference)
        total = total * rescale
        out = out * rescale[:, None]
    total += tl.sum(weights, 1)
    if modifiers.seed is not None:
        weights = tl.where(is_kept(modifiers, coordinates), weights, 0.0)
    out = add_product(weights.to(v.dtype), v, out)
    return new_max, total, out
