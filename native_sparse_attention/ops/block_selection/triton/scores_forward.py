"""Kernels of `chosen_scores` with one program per query and index head: the scores, and the gradients of q and lse."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import dot_exact, load_rows, store_rows
from native_sparse_attention.ops.block_selection.triton.scores_tiles import (
    before_cap,
    is_forced,
    locate_query,
    overlapping_columns,
    share_of,
    weigh,
)


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    indices_ptr,
    out_ptr,
    q_strides,
    k_strides,
    lse_strides,
    indices_strides,
    out_strides,
    layout,
    sizes,
    scale,
    softcap,
    meta: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """q: `[B, T, HQ, D]`. k: `[B, C, H, D]`. lse: `[B, HQ, T]`. indices, out: `[B, T, HI, n]`."""
    GROUP: tl.constexpr = meta.group
    HEAD_DIM: tl.constexpr = meta.head_dim
    row, token, is_query, position, num_tokens, key_start, num_keys = locate_query(tl.program_id(0), layout, sizes)
    if not is_query:
        return
    row, token, head = row.to(tl.int64), token.to(tl.int64), tl.program_id(1).to(tl.int64)
    q_ptr += row * q_strides[0] + token * q_strides[1]
    k_ptr += row * k_strides[0] + (head // meta.repeats) * k_strides[2] + key_start.to(tl.int64) * k_strides[1]
    lse_ptr += row * lse_strides[0] + token * lse_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + head * indices_strides[2]
    out_ptr += row * out_strides[0] + token * out_strides[1] + head * out_strides[2]
    BLOCK_N: tl.constexpr = BLOCK_S * BLOCK_O
    for first_slot in range(0, meta.num_selected, BLOCK_S):
        slots = first_slot + tl.arange(0, BLOCK_S)
        scores = tl.zeros([BLOCK_S], tl.float32)
        for first_offset in range(meta.first_offset, meta.per_selection, BLOCK_O):
            offsets = first_offset + tl.arange(0, BLOCK_O)
            _, keys, seen = overlapping_columns(
                indices_ptr, slots[:, None], offsets[None, :], position, num_tokens, num_keys, sizes, meta
            )
            columns = tl.reshape(seen, [BLOCK_N])
            k = load_rows(k_ptr, tl.reshape(keys, [BLOCK_N]), k_strides[1], columns, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
            total = tl.zeros([BLOCK_N], tl.float32)
            for first_row in range(0, GROUP, BLOCK_G):
                tile_rows = first_row + tl.arange(0, BLOCK_G)
                heads = head * GROUP + tile_rows
                q = load_rows(q_ptr, heads, q_strides[2], tile_rows < GROUP, HEAD_DIM, BLOCK_D)  # [BLOCK_G, BLOCK_D]
                lse = tl.load(lse_ptr + heads * lse_strides[1], mask=tile_rows < GROUP, other=0.0).to(tl.float32)
                products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_G, BLOCK_N]
                weights = weigh(products, lse[:, None], scale, softcap)
                seen_by_rows = columns[None, :] & (tile_rows < GROUP)[:, None]
                total += tl.sum(tl.where(seen_by_rows, weights, 0.0), 0)
            share = share_of(offsets, sizes, meta) / GROUP
            shared = tl.where(seen, tl.reshape(total, [BLOCK_S, BLOCK_O]) * share[None, :], 0.0)
            scores += tl.sum(shared, 1)
        tl.store(out_ptr + slots, scores, mask=slots < meta.num_selected)


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    indices_ptr,
    dout_ptr,
    dq_ptr,
    dlse_ptr,
    q_strides,
    k_strides,
    lse_strides,
    indices_strides,
    dout_strides,
    dq_strides,
    dlse_strides,
    layout,
    sizes,
    scale,
    softcap,
    meta: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Shapes as in the forward kernel; one program per query and BLOCK_G heads of an index head."""
    row, token, is_query, position, num_tokens, key_start, num_keys = locate_query(tl.program_id(0), layout, sizes)
    if not is_query:
        return
    tiles_of_group: tl.constexpr = (meta.group + BLOCK_G - 1) // BLOCK_G
    row, token, head = row.to(tl.int64), token.to(tl.int64), (tl.program_id(1) // tiles_of_group).to(tl.int64)
    k_ptr += row * k_strides[0] + (head // meta.repeats) * k_strides[2] + key_start.to(tl.int64) * k_strides[1]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + head * indices_strides[2]
    dout_ptr += row * dout_strides[0] + token * dout_strides[1] + head * dout_strides[2]
    tile_rows = (tl.program_id(1) % tiles_of_group) * BLOCK_G + tl.arange(0, BLOCK_G)
    row_mask = tile_rows < meta.group
    heads = head * meta.group + tile_rows
    q_ptr += row * q_strides[0] + token * q_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], row_mask, meta.head_dim, BLOCK_D)  # [BLOCK_G, BLOCK_D]
    lse_ptr += row * lse_strides[0] + token * lse_strides[2]
    lse = tl.load(lse_ptr + heads * lse_strides[1], mask=row_mask, other=0.0).to(tl.float32)
    dq = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    dlse = tl.zeros([BLOCK_G], tl.float32)
    NUM_OFFSETS: tl.constexpr = meta.per_selection - meta.first_offset
    for first_column in range(0, meta.num_selected * NUM_OFFSETS, BLOCK_N):
        columns = first_column + tl.arange(0, BLOCK_N)  # every slot with every offset
        slots = columns // NUM_OFFSETS
        offsets = meta.first_offset + columns % NUM_OFFSETS
        blocks, keys, learns = overlapping_columns(
            indices_ptr, slots, offsets, position, num_tokens, num_keys, sizes, meta
        )
        learns = learns & ~is_forced(blocks, position, sizes, meta)
        k = load_rows(k_ptr, keys, k_strides[1], learns, meta.head_dim, BLOCK_D, INT64_OFFSETS)
        products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_G, BLOCK_N]
        weights = weigh(products, lse[:, None], scale, softcap)
        dscores = tl.load(dout_ptr + slots.to(tl.int64) * dout_strides[3], mask=learns, other=0.0)
        dweights = dscores * (share_of(offsets, sizes, meta) / meta.group)
        dlogits = tl.where(learns[None, :], weights * dweights[None, :], 0.0)
        dlse -= tl.sum(dlogits, 1)
        dlogits = before_cap(dlogits, products, learns[None, :], scale, softcap)
        dq = dot_exact(dlogits, k, dq)
    dq_ptr += row * dq_strides[0] + token * dq_strides[1]
    store_rows(dq_ptr, heads, dq_strides[2], dq * scale, row_mask, meta.head_dim, BLOCK_D)
    dlse_ptr += row * dlse_strides[0] + token * dlse_strides[2]
    tl.store(dlse_ptr + heads * dlse_strides[1], dlse.to(dlse_ptr.dtype.element_ty), mask=row_mask)
