"""Gradient of the bias of interval attention: one program per query tile, key tile, bias row and bias head."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.interval.modifiers import find_exponents, is_kept
from native_sparse_attention.ops._triton.interval.tiles import key_limits
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops._triton.varlen import load_num_keys, load_position, locate_tokens


@triton.jit
def dbias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    stats_ptr,
    dout_ptr,
    dbias_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dbias_strides,
    layout,
    interval,
    scale,
    modifiers,
    shape,
    NUM_STATS: tl.constexpr,
    GROUP: tl.constexpr,
    tile: tl.constexpr,
):
    """dbias: `[bias rows, bias heads, T, S]`. shape: (B, HQ, bias rows, bias heads). stats: NUM_STATS row statistics of
    `dq_kernel`. Batch rows and heads that share a bias are added in order; elements that no query reads are 0.
    """
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    batch, num_heads, bias_rows, bias_heads = shape
    key_tiles = tl.cdiv(interval.num_keys, BLOCK_N)
    query_tiles = tl.cdiv(layout.seqlen_q, BLOCK_M)
    index = tl.program_id(0)
    first_key = (index % key_tiles) * BLOCK_N
    index = index // key_tiles
    queries = (index % query_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    bias_head = index // query_tiles % bias_heads
    bias_row = index // query_tiles // bias_heads
    keys = first_key + tl.arange(0, BLOCK_N)
    query_mask, key_mask = queries < layout.seqlen_q, keys < interval.num_keys
    rows_of_head, heads_of_row = tl.cdiv(batch, bias_rows), tl.cdiv(num_heads, bias_heads)

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for shared_row in range(rows_of_head):
        row = bias_row + shared_row  # one of the two is 0
        firsts, lasts = _key_limits(interval, layout, queries, query_mask, row)
        is_read = (tl.min(firsts, 0) < first_key + BLOCK_N) & (tl.max(lasts, 0) > first_key)
        read = (keys[None, :] >= firsts[:, None]) & (keys[None, :] < lasts[:, None])
        for shared_head in range(tl.where(is_read, heads_of_row, 0)):
            row_of_q, head = row.to(tl.int64), (bias_head + shared_head).to(tl.int64)
            coordinates = (row_of_q, head, queries[:, None], keys[None, :], query_mask[:, None], key_mask[None, :])
            q_of_head = q_ptr + row_of_q * q_strides[0] + head * q_strides[2]
            k_of_head = k_ptr + row_of_q * k_strides[0] + head // GROUP * k_strides[2]
            v_of_head = v_ptr + row_of_q * v_strides[0] + head // GROUP * v_strides[2]
            dout_of_head = dout_ptr + row_of_q * dout_strides[0] + head * dout_strides[2]
            q = load_rows(q_of_head, queries, q_strides[1], query_mask, tile.head_dim, tile.block_d, tile.int64_offsets)
            k = load_rows(k_of_head, keys, k_strides[1], key_mask, tile.head_dim, tile.block_d, tile.int64_offsets)
            v = load_rows(v_of_head, keys, v_strides[1], key_mask, tile.value_dim, tile.block_dv, tile.int64_offsets)
            dout = load_rows(
                dout_of_head, queries, dout_strides[1], query_mask, tile.value_dim, tile.block_dv, tile.int64_offsets
            )
            stats_of_head = stats_ptr + (row_of_q * num_heads + head) * NUM_STATS * layout.seqlen_q
            lse_log2 = tl.load(stats_of_head + queries, mask=query_mask, other=0.0)
            sign = 1.0
            if NUM_STATS == 3:
                of_negative = tl.load(stats_of_head + 2 * layout.seqlen_q + queries, mask=query_mask, other=0.0)
                is_negative = of_negative == of_negative  # NaN unless the gate is negative
                lse_log2 = tl.where(is_negative, of_negative, lse_log2)
                sign = tl.where(is_negative, -1.0, 1.0)[:, None]
            delta = tl.load(stats_of_head + layout.seqlen_q + queries, mask=query_mask, other=0.0)
            products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
            exponents, _, allowed = find_exponents(products, lse_log2[:, None], scale, modifiers, coordinates)
            reads = read & allowed
            weights = tl.exp2(tl.where(reads, exponents, float('-inf')))
            dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
            if modifiers.seed is not None:
                dweights = tl.where(is_kept(modifiers, coordinates), dweights * modifiers.keep_factor, 0.0)
            sums += tl.where(reads, sign * weights * (dweights - delta[:, None]), 0.0)
    pointers = dbias_ptr + bias_row.to(tl.int64) * dbias_strides[0] + bias_head.to(tl.int64) * dbias_strides[1]
    pointers += queries.to(tl.int64)[:, None] * dbias_strides[2] + keys[None, :]
    tl.store(pointers, sums.to(dbias_ptr.dtype.element_ty), mask=query_mask[:, None] & key_mask[None, :])


@triton.jit
def _key_limits(interval, layout, queries, query_mask, row):
    """Return the keys [firsts, lasts), as indices of the tensors, that each query of a batch row reads."""
    if layout.cu_seqlens is not None:
        _, positions, key_starts, num_keys = locate_tokens(queries, query_mask, layout)
    else:
        num_keys = load_num_keys(layout, row)
        positions = load_position(layout, row, layout.seqlen_q, num_keys) + queries
        key_starts = 0
    firsts, lasts = key_limits(interval, positions, num_keys)
    if interval.left is None:
        firsts = positions * 0
    firsts = tl.where(query_mask, key_starts + tl.maximum(firsts, 0), interval.num_keys)
    return firsts, tl.where(query_mask, key_starts + tl.maximum(lasts, 0), 0)
