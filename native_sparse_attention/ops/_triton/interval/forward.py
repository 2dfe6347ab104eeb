"""Forward kernel of interval attention: one program per tile of queries with HEADS heads that share keys."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

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
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """q, out: `[B, T, HQ, D and DV]`; k, v: `[B, M + C, H, D and DV]`; lse: `[B, HQ, T]`."""
    tile_of_queries = tl.program_id(0)
    if interval.left is None:
        # The last queries, which have the most to do, first: what is left at the end is short.
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
    q = load_rows(q_ptr, query_rows, q_strides[1], query_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]

    last, tiles, limits = key_tiles(interval, layout, located, positions, num_keys, BLOCK_M // HEADS, BLOCK_N)
    end_tiles, num_tiles = tiles[4], tiles[5]
    rows = (row_of_modifiers(modifiers, row), heads, query_rows, query_mask)

    first_max, first_total = first_sums(modifiers, heads, BLOCK_M)
    empty_sums = (first_max, first_total, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32))
    sums = empty_sums
    # Where a scale is negative products are, so that the largest makes the largest logit, and -inf a weight of 0.
    scale_log2 = tl.where(scale == 0, 1e-37, tl.abs(scale) * 1.4426950408889634)
    if modifiers.softcap is not None or modifiers.bias is not None:
        scale_log2 = 1.0
    for tile in range(end_tiles):
        sums = _attend(
            q, keys, values, sums, None, rows, limits, tiles, tile, last, key_start, interval, scale, scale_log2, modifiers,
            NEGATIVE, True, False, False, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
    # Weights of float16 have no room for a maximum that is too low. Where pairs are masked, many rows may read nothing,
    # which look like rows whose weights vanished.
    FIXED: tl.constexpr = (
        q.dtype != tl.float16
        and modifiers.bias is None
        and modifiers.attn_mask is None
        and modifiers.query_segments is None
    )
    if FIXED:
        sums = (tl.where(sums[0] == float('-inf'), 0.0, sums[0]), sums[1], sums[2])
    for tile in range(end_tiles, num_tiles):
        sums = _attend(
            q, keys, values, sums, None, rows, limits, tiles, tile, last, key_start, interval, scale, scale_log2, modifiers,
            NEGATIVE, False, False, FIXED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
    row_max, total = sums[0], sums[1]
    are_near = tl.min(_is_near(total).to(tl.int32), 0) != 0 if FIXED else True
    if not (is_finite_tile(sums[2]) and are_near):
        # Perhaps for values that some rows of the tile do not read: once more, with care. And once more for rows whose
        # maximum at the ends was not near that of the middle; the others keep their bits.
        is_fixed = tl.full([BLOCK_M], FIXED, tl.int1)
        for _ in tl.range(2 if FIXED else 1):
            sums = empty_sums
            for tile in tl.range(num_tiles, num_stages=1):
                sums = _attend(
                    q, keys, values, sums, is_fixed & (tile >= end_tiles), rows, limits, tiles, tile, last, key_start,
                    interval, scale, scale_log2, modifiers, NEGATIVE, True, True, False, HEAD_DIM, VALUE_DIM, BLOCK_N,
                    BLOCK_D, BLOCK_DV, INT64_OFFSETS,
                )  # fmt: skip
            is_fixed = is_fixed & _is_near(sums[1]) & (tl.sum(sums[2] - sums[2], 1) == 0)
        # Whatever the values are, a log-sum-exp has the same bits.
        is_first = _is_near(total) & FIXED
        row_max, total = tl.where(is_first, row_max, sums[0]), tl.where(is_first, total, sums[1])

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    out = sums[2] * (1.0 / tl.where(empty, 1.0, sums[1]))[:, None]
    if modifiers.keep_factor is not None:
        out = out * modifiers.keep_factor
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    out_ptr += row * out_strides[0] + heads[:, None] * out_strides[2]
    store_rows(out_ptr, query_rows, out_strides[1], out, query_mask, VALUE_DIM, BLOCK_DV)
    # The heads, with what is the same for all of them added up first.
    row_of_lse = (row * tl.num_programs(1) * HEADS + first_head + tl.arange(0, BLOCK_M) % HEADS) * layout.seqlen_q
    tl.store(lse_ptr + row_of_lse + query_rows, lse, mask=query_mask)


@triton.jit
def _is_near(total):
    """Whether sums of weights that were relative to a fixed number are ones to rely on: neither too large nor so small
    that products with small values could vanish. A row that reads nothing has none.
    """
    return (total > 2.0**-20) & (total < 2.0**60)


@triton.jit
def _attend(
    q,
    keys,
    values,
    sums,
    is_fixed,
    rows,
    limits,
    tiles,
    tile,
    last,
    key_start,
    interval,
    scale,
    scale_log2,
    modifiers,
    NEGATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    FIXED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Adds a tile of keys to a running softmax. Not MASKED: every row reads all of it. CONTAIN_NONFINITE: values that
    are not finite reach those alone who read them. FIXED: what weights are relative to stays as it is; is_fixed: or
    that of these rows, where it is not None.
    """
    row_max, total, out = sums
    start = find_start(tiles, tile, MASKED, CONTAIN_NONFINITE, BLOCK_N)
    k = load_keys(
        keys, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, HEAD_DIM, BLOCK_N, BLOCK_D, INT64_OFFSETS
    )
    v = load_keys(
        values, start, last, key_start, interval, MASKED, CONTAIN_NONFINITE, VALUE_DIM, BLOCK_N, BLOCK_DV, INT64_OFFSETS
    )
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    products = -products if NEGATIVE else products
    coordinates = tile_coordinates(rows, key_start, start, last, BLOCK_N)
    products, _, read = modify_logits(products, scale, modifiers, coordinates)
    if MASKED:
        read = read & reads_keys(interval, limits, start, BLOCK_N)
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
