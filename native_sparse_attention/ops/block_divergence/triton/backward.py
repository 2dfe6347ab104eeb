"""Backward kernels of `block_divergence`: gradients of the drawn queries and of the compressed keys."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import dot_exact, load_rows, store_rows
from native_sparse_attention.ops.block_divergence.triton.tiles import LOG2_E, NO_KEY, locate_rows, share_of


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    drawn,
    saved,
    dq_ptr,
    q_strides,
    k_strides,
    dq_strides,
    sizes,
    scale,
    softcap,
    meta: tl.constexpr,
    SHARE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """q, dq: `[B, T, HQ, D]`. k: `[B, C, H, D]`. saved: dscores, lse and delta, as `divergence_kernel` writes them,
    and dloss and weight of the mean, one number each. dq is written at the drawn queries alone.

    One program per tile of BLOCK_M queries, each with the heads of a KV head. Its tiles of compressed keys are
    l' / d keys apart, so that the keys of a tile begin in BLOCK_N consecutive selection blocks.
    """
    tiles = tl.cdiv(sizes.num_queries * meta.group, BLOCK_M)
    batch_row, kv_head = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    places, tokens, heads, is_query, first_keys, visible = locate_rows(
        tl.program_id(0) % tiles, drawn, batch_row, kv_head, sizes, meta, BLOCK_M
    )
    q_ptr += batch_row * q_strides[0] + heads[:, None] * q_strides[2]
    q = load_rows(q_ptr, tokens, q_strides[1], visible > 0, meta.head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    k_ptr += batch_row * k_strides[0] + kv_head * k_strides[2]
    dscores_ptr, lse, delta = _load_saved(saved, places, heads, kv_head, is_query, sizes, meta, SHARE_GROUP)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = tl.min(tl.where(visible > 0, first_keys, NO_KEY), 0)
    stop = tl.max(tl.where(visible > 0, first_keys + visible, 0), 0)
    span = BLOCK_N * meta.per_selection
    for tile in tl.range(0, tl.cdiv(stop - start, span) * meta.per_selection):
        first = start + tile // meta.per_selection * span + tile % meta.per_selection
        keys = first + tl.arange(0, BLOCK_N) * meta.per_selection
        k = load_rows(k_ptr, keys, k_strides[1], keys < stop, meta.head_dim, BLOCK_D, meta.int64_offsets)
        products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
        dlogits = _differentiate_logits(
            products,
            (first - first_keys)[:, None],
            tl.arange(0, BLOCK_N)[None, :],
            visible[:, None],
            lse[:, None],
            delta[:, None],
            dscores_ptr[:, None],
            sizes,
            scale,
            softcap,
            meta,
        )
        dq = dot_exact(dlogits, k, dq)
    dq *= tl.load(saved[3]) * tl.load(saved[4]) * scale
    dq_ptr += batch_row * dq_strides[0] + heads[:, None] * dq_strides[2]
    store_rows(dq_ptr, tokens, dq_strides[1], dq, is_query, meta.head_dim, BLOCK_D)


@triton.jit
def dk_kernel(
    q_ptr,
    k_ptr,
    drawn,
    saved,
    dk_ptr,
    q_strides,
    k_strides,
    dk_strides,
    sizes,
    scale,
    softcap,
    meta: tl.constexpr,
    SHARE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dk: `[B, C, H, D]`; the rest as in `dq_kernel`.

    One program per BLOCK_N compressed keys of a KV head, l' / d keys apart. It loops over tiles of BLOCK_M queries with
    their heads.
    """
    span = BLOCK_N * meta.per_selection
    key_tiles = tl.cdiv(sizes.num_compressed, span) * meta.per_selection
    batch_row, kv_head = (tl.program_id(0) // key_tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) % key_tiles
    first = tile // meta.per_selection * span + tile % meta.per_selection
    keys = first + tl.arange(0, BLOCK_N) * meta.per_selection
    is_key = keys < sizes.num_compressed
    k_ptr += batch_row * k_strides[0] + kv_head * k_strides[2]
    k = load_rows(k_ptr, keys, k_strides[1], is_key, meta.head_dim, BLOCK_D, meta.int64_offsets)  # [BLOCK_N, BLOCK_D]
    q_ptr += batch_row * q_strides[0]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for tile in tl.range(0, tl.cdiv(sizes.num_queries * meta.group, BLOCK_M)):
        places, tokens, heads, is_query, first_keys, visible = locate_rows(
            tile, drawn, batch_row, kv_head, sizes, meta, BLOCK_M
        )
        sees = (visible > 0) & (first_keys < first + span) & (first_keys + visible > first)
        if tl.max(sees.to(tl.int32), 0) > 0:
            rows_ptr = q_ptr + heads[:, None] * q_strides[2]
            q = load_rows(rows_ptr, tokens, q_strides[1], sees, meta.head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
            dscores_ptr, lse, delta = _load_saved(saved, places, heads, kv_head, is_query, sizes, meta, SHARE_GROUP)
            dlogits = _differentiate_logits(
                products,
                (first - first_keys)[None, :],
                tl.arange(0, BLOCK_N)[:, None],
                visible[None, :],
                lse[None, :],
                delta[None, :],
                dscores_ptr[None, :],
                sizes,
                scale,
                softcap,
                meta,
            )
            dk = dot_exact(dlogits, q, dk)
    dk *= tl.load(saved[3]) * tl.load(saved[4]) * scale
    dk_ptr += batch_row * dk_strides[0] + kv_head * dk_strides[2]
    store_rows(dk_ptr, keys, dk_strides[1], dk, is_key, meta.head_dim, BLOCK_D, meta.int64_offsets)


@triton.jit
def _load_saved(saved, places, heads, kv_head, is_query, sizes, meta: tl.constexpr, SHARE_GROUP: tl.constexpr):
    """Return for each row the pointer to its dscores, its log-sum-exp and its delta."""
    num_heads = tl.num_programs(1) * meta.group
    lse = tl.load(saved[1] + places * num_heads + heads, mask=is_query, other=0.0)
    delta = tl.load(saved[2] + places * num_heads + heads, mask=is_query, other=0.0)
    rows = places * tl.num_programs(1) + kv_head if SHARE_GROUP else places * num_heads + heads
    return saved[0] + rows * sizes.num_blocks, lse, delta


@triton.jit
def _differentiate_logits(
    products, first, steps, visible, lse, delta, dscores_ptr, sizes, scale, softcap, meta: tl.constexpr
):
    """Return the gradient of the divergence of a row by its logits, before the soft cap: weight * (dweight - delta).

    products: of queries and keys, with rows in either dimension. first: index of the tile's first key in the row's
    sequence, negative before it. steps: 0, 1, ... for the keys of the tile, which are l' / d apart. visible, lse,
    delta, dscores_ptr: of each row. All as they are broadcast to products.
    """
    keys = first + steps * meta.per_selection
    seen = (keys >= 0) & (keys < visible)
    logits = products * scale
    if softcap is not None:
        logits = cap_logits(logits, softcap)
    weights = tl.exp2(tl.where(seen, logits * LOG2_E - lse, float('-inf')))
    offset = first % meta.per_selection
    offset = tl.where(offset < 0, offset + meta.per_selection, offset)
    columns = (first - offset) // meta.per_selection + steps
    dweights = tl.zeros(products.shape, tl.float32)
    for ahead in tl.static_range(meta.reach + 1):
        share = share_of(offset - ahead * meta.per_selection, meta)
        mask = seen & (share > 0) & (columns < sizes.num_blocks - ahead)
        dweights += tl.load(dscores_ptr + columns + ahead, mask=mask, other=0.0) * share
    dlogits = weights * (dweights - delta)
    if softcap is not None:
        dlogits *= cap_slope(products * scale, softcap)
    return tl.where(seen, dlogits, 0.0)
