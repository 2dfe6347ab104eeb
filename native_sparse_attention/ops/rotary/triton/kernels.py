"""Kernels of the rotary embedding. A row is the vector of one head of one token; a program has BLOCK_M rows."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.rotation import pair_columns, rotate


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_strides,
    cos_strides,
    sin_strides,
    out_strides,
    num_rows,
    seqlen,
    heads,
    HEAD_DIM: tl.constexpr,
    NUM_ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x, out: `[B, T, H, D]`. cos, sin: `[B, T, F]`, with stride 0 over batch rows that share them. HALF: as in
    `pair_columns`. INVERSE: rotate by the negative angles, for gradients.
    """
    # Counted in the type of num_rows: division is much faster in int32, where that is enough.
    rows = (num_rows * 0 + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows >= 0) & (rows < num_rows)
    tokens = rows // heads
    batch, token, head = (tokens // seqlen).to(tl.int64), (tokens % seqlen).to(tl.int64), (rows % heads).to(tl.int64)
    columns = pair_columns(tl.arange(0, BLOCK_D), HALF)
    mask = row_mask[:, None] & (columns < HEAD_DIM)[None, :]
    starts = batch * x_strides[0] + token * x_strides[1] + head * x_strides[2]
    x = tl.load(x_ptr + starts[:, None] + columns.to(tl.int64)[None, :] * x_strides[3], mask=mask, other=0.0)
    cos, sin, is_rotated = load_angles(
        cos_ptr, sin_ptr, batch, token, row_mask, cos_strides, sin_strides, NUM_ANGLES, BLOCK_D // 2
    )
    if INVERSE:
        sin = -sin
    out = rotate(x, cos, sin, is_rotated)
    starts = batch * out_strides[0] + token * out_strides[1] + head * out_strides[2]
    pointers = out_ptr + starts[:, None] + columns.to(tl.int64)[None, :] * out_strides[3]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    grads,
    cos_ptr,
    sin_ptr,
    out_ptr,
    cos_strides,
    sin_strides,
    num_rows,
    seqlen,
    heads,
    HEAD_DIM: tl.constexpr,
    NUM_ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    NUM_GRADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grads, out: `[B, T, H, D]`, contiguous. The first NUM_ROTATED gradients are rotated back by cos,
    sin `[B, T, F]`. HALF: as in `pair_columns`.
    """
    # Counted in the type of num_rows: division is much faster in int32, where that is enough.
    rows = (num_rows * 0 + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows >= 0) & (rows < num_rows)
    columns = pair_columns(tl.arange(0, BLOCK_D), HALF)
    mask = row_mask[:, None] & (columns < HEAD_DIM)[None, :]
    offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in tl.static_range(NUM_ROTATED):
        total += tl.load(grads[index] + offsets, mask=mask, other=0.0).to(tl.float32)
    if NUM_ROTATED > 0:
        tokens = rows // heads
        batch, token = tokens // seqlen, tokens % seqlen
        cos, sin, is_rotated = load_angles(
            cos_ptr, sin_ptr, batch, token, row_mask, cos_strides, sin_strides, NUM_ANGLES, BLOCK_D // 2
        )
        total = rotate(total, cos, -sin, is_rotated)
    for index in tl.static_range(NUM_ROTATED, NUM_GRADS):
        total += tl.load(grads[index] + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, batch, token, mask, cos_strides, sin_strides, NUM_ANGLES: tl.constexpr, BLOCK: tl.constexpr
):
    """Load cosines, sines and a mask of rotated pairs `[M, BLOCK]` of tokens [M] from tables `[B, T,
    F]`, for `rotate`.
    """
    angles = tl.arange(0, BLOCK)
    is_rotated = mask[:, None] & (angles < NUM_ANGLES)[None, :]
    batch, token, angles = batch.to(tl.int64), token.to(tl.int64), angles.to(tl.int64)[None, :]
    starts = batch * cos_strides[0] + token * cos_strides[1]
    cos = tl.load(cos_ptr + starts[:, None] + angles * cos_strides[2], mask=is_rotated, other=1.0)
    starts = batch * sin_strides[0] + token * sin_strides[1]
    sin = tl.load(sin_ptr + starts[:, None] + angles * sin_strides[2], mask=is_rotated, other=0.0)
    return cos, sin, is_rotated
