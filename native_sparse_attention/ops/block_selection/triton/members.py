"""Queries with all heads of a group, the columns of a product: loaded, and added up."""

# To pyright a jit function that another calls never returns, and a number is no constant.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows


@triton.jit
def load_members(
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
    """q, lse: pointers to a row of the batch, and their strides of tokens and heads. Returns the queries `[T * G, D]`,
    log-sum-exps in bits, inf where there is no query or head, and where there is one.
    """
    q_ptr, q_stride, q_head_stride = q
    lse_ptr, lse_stride, lse_head_stride = lse
    query, head = _find_members(BLOCK_T, BLOCK_G)
    mask = (first_query + query < num_queries) & (head < GROUP)
    tokens = query_start + first_query + query
    heads = (index_head * GROUP + head).to(tl.int64)
    q = load_rows(q_ptr + heads[:, None] * q_head_stride, tokens, q_stride, mask, HEAD_DIM, BLOCK_D)
    lse_ptr += heads * lse_head_stride + tokens.to(tl.int64) * lse_stride
    # What pads the group has weights of 0.
    return q, tl.load(lse_ptr, mask=mask, other=float('inf')).to(tl.float32) * 1.4426950408889634, mask


@triton.jit
def add_members(weights, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """`[J, T * G]`, columns as `_find_members` has them -> `[J, T]`, the sums of the heads."""
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    QUERIES: tl.constexpr = min(BLOCK_T, 4)
    rows: tl.constexpr = weights.shape[0]
    weights = tl.reshape(weights, [rows, BLOCK_T // QUERIES, BLOCK_G // PAIR, QUERIES, PAIR])
    return tl.reshape(tl.sum(tl.sum(weights, 4), 2), [rows, BLOCK_T])


@triton.jit
def _find_members(BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """Query and head of every column of a product, in an order in which columns of a query lie in one thread: of eight
    neighbouring columns a thread has two.
    """
    members = tl.arange(0, BLOCK_T * BLOCK_G)
    PAIR: tl.constexpr = min(BLOCK_G, 2)
    QUERIES: tl.constexpr = min(BLOCK_T, 4)
    head = members // (PAIR * QUERIES) % (BLOCK_G // PAIR) * PAIR + members % PAIR
    query = members // (QUERIES * BLOCK_G) * QUERIES + members // PAIR % QUERIES
    return query, head
