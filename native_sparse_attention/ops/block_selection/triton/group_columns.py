"""Queries with all heads of a group as the columns of a product: load them, and sum over the heads."""

# To pyright a jit function that another calls never returns, and a number is no constant.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows


@triton.jit
def load_group_queries(
    q,
    lse,
    query_start,
    first_query,
    num_queries,
    index_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the queries `[T * G, D]` of a tile with all heads of an index head, their log-sum-exps in base 2 (inf where
    there is no query or head), and a mask.

    q, lse: tuples of a pointer to the batch row and the strides of tokens and heads.
    """
    q_ptr, q_stride, q_head_stride = q
    lse_ptr, lse_stride, lse_head_stride = lse
    query, head = _locate_columns(BLOCK_T, BLOCK_G)
    mask = (first_query + query < num_queries) & (head < GROUP)
    tokens = query_start + first_query + query
    heads = (index_head * GROUP + head).to(tl.int64)
    q = load_rows(q_ptr + heads[:, None] * q_head_stride, tokens, q_stride, mask, HEAD_DIM, BLOCK_D)
    lse_ptr += heads * lse_head_stride + tokens.to(tl.int64) * lse_stride
    # Padding of the group has weights of 0.
    return q, tl.load(lse_ptr, mask=mask, other=float('inf')).to(tl.float32) * 1.4426950408889634, mask


@triton.jit
def sum_group_heads(weights, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return the sums over heads `[J, T]` of `[J, T * G]`, with columns ordered as in `_locate_columns`."""
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    QUERIES: tl.constexpr = min(BLOCK_T, 4)
    rows: tl.constexpr = weights.shape[0]
    weights = tl.reshape(weights, [rows, BLOCK_T // QUERIES, BLOCK_G // PAIR, QUERIES, PAIR])
    return tl.reshape(tl.sum(tl.sum(weights, 4), 2), [rows, BLOCK_T])


@triton.jit
def _locate_columns(BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return query and head of every column of a product. The order puts columns of a query into one thread, which
    holds two of eight neighbouring columns.
    """
    columns = tl.arange(0, BLOCK_T * BLOCK_G)
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    QUERIES: tl.constexpr = min(BLOCK_T, 4)
    head = columns // (PAIR * QUERIES) % (BLOCK_G // PAIR) * PAIR + columns % PAIR
    query = columns // (QUERIES * BLOCK_G) * QUERIES + columns // PAIR % QUERIES
    return query, head
