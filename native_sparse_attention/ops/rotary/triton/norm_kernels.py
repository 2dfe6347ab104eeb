"""Kernels of RMSNorm followed by rotary embedding. A row is the vector of one head of one token."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.rotation import pair_columns, rotate
from native_sparse_attention.ops.rotary.triton.kernels import load_angles


@triton.jit
def norm_rotary_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    rotated_ptr,
    plain_ptr,
    x_strides,
    cos_strides,
    sin_strides,
    eps,
    num_rows,
    seqlen,
    heads,
    HEAD_DIM: tl.constexpr,
    NUM_ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x: `[B, T, H, D]`; weight: `[D]`; cos, sin: `[B, T, F]`; rotated, plain: like x, contiguous; an output that is
    not needed is None. HALF: as in `pair_columns`.
    """
    # Counted in the type of num_rows: division is much faster in int32, where that is enough.
    rows = (num_rows * 0 + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pair_columns(tl.arange(0, BLOCK_D), HALF)
    row_mask, mask = _masks(rows, num_rows, columns, HEAD_DIM)
    x = tl.load(_tile(x_ptr, x_strides, rows, seqlen, heads, columns), mask=mask, other=0.0).to(tl.float32)
    weight = _load_weight(weight_ptr, columns, HEAD_DIM, x_ptr.dtype.element_ty)
    normalised = x * _inverse_rms(x, eps, HEAD_DIM)[:, None] * weight[None, :]
    # Rounded before the rotation, so that the rotated rows have the bits of `rotary` of the plain ones.
    normalised = normalised.to(x_ptr.dtype.element_ty)
    offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    if plain_ptr is not None:
        tl.store(plain_ptr + offsets, normalised, mask=mask)
    if rotated_ptr is not None:
        tokens = rows // heads
        batch, token = tokens // seqlen, tokens % seqlen
        cos, sin, is_rotated = load_angles(
            cos_ptr, sin_ptr, batch, token, row_mask, cos_strides, sin_strides, NUM_ANGLES, BLOCK_D // 2
        )
        rotated = rotate(normalised, cos, sin, is_rotated)
        tl.store(rotated_ptr + offsets, rotated.to(rotated_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_rotary_backward_kernel(
    grads,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    dweight_ptr,
    grads_strides,
    x_strides,
    cos_strides,
    sin_strides,
    eps,
    num_rows,
    seqlen,
    heads,
    num_tiles,
    HEAD_DIM: tl.constexpr,
    NUM_ANGLES: tl.constexpr,
    HALF: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    NUM_GRADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grads: `[B, T, H, D]` each, of which the first NUM_ROTATED are rotated back; dx: like x, contiguous; dweight:
    float32 `[programs, D]`, the sums of each program. A result that is not needed is None. Other arguments as in the
    forward kernel. A program has num_tiles tiles of BLOCK_M rows, one in each equal part of the rows.
    """
    columns = pair_columns(tl.arange(0, BLOCK_D), HALF)
    weight = _load_weight(weight_ptr, columns, HEAD_DIM, x_ptr.dtype.element_ty)
    dweight = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in range(num_tiles):
        # Counted in the type of num_rows: division is much faster in int32, where that is enough.
        tile = num_rows * 0 + index * tl.num_programs(0) + tl.program_id(0)
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask, mask = _masks(rows, num_rows, columns, HEAD_DIM)
        grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.static_range(NUM_ROTATED):
            pointers = _tile(grads[i], grads_strides[i], rows, seqlen, heads, columns)
            grad += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if NUM_ROTATED > 0:
            tokens = rows // heads
            batch, token = tokens // seqlen, tokens % seqlen
            cos, sin, is_rotated = load_angles(
                cos_ptr, sin_ptr, batch, token, row_mask, cos_strides, sin_strides, NUM_ANGLES, BLOCK_D // 2
            )
            grad = rotate(grad, cos, -sin, is_rotated)
        for i in tl.static_range(NUM_ROTATED, NUM_GRADS):
            pointers = _tile(grads[i], grads_strides[i], rows, seqlen, heads, columns)
            grad += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(_tile(x_ptr, x_strides, rows, seqlen, heads, columns), mask=mask, other=0.0).to(tl.float32)
        # 0 in rows that do not exist: with eps = 0 it would be infinite there, and 0 * infinity is NaN.
        inverse = tl.where(row_mask, _inverse_rms(x, eps, HEAD_DIM), 0.0)[:, None]
        x *= inverse
        dweight += grad * x
        if dx_ptr is not None:
            grad *= weight[None, :]
            dx = (grad - x * (tl.sum(grad * x, 1) / HEAD_DIM)[:, None]) * inverse
            offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dweight_ptr is not None:
        # In two steps, since a sum of many rows one after the other is less exact.
        total = tl.sum(tl.sum(tl.reshape(dweight, [BLOCK_M // 8, 8, BLOCK_D]), 1), 0)
        offsets = tl.program_id(0).to(tl.int64) * HEAD_DIM + columns
        tl.store(dweight_ptr + offsets, total, mask=columns < HEAD_DIM)


@triton.jit
def _masks(rows, num_rows, columns, HEAD_DIM: tl.constexpr):
    """Return masks of the rows that exist `[M]`, and of their elements `[M, D]`."""
    row_mask = (rows >= 0) & (rows < num_rows)
    return row_mask, row_mask[:, None] & (columns < HEAD_DIM)[None, :]


@triton.jit
def _tile(ptr, strides, rows, seqlen, heads, columns):
    """Return pointers `[M, D]` of rows, counted through `[B, T, H]`."""
    tokens = rows // heads
    starts = (tokens // seqlen).to(tl.int64) * strides[0] + (tokens % seqlen).to(tl.int64) * strides[1]
    starts += (rows % heads).to(tl.int64) * strides[2]
    return (ptr + starts)[:, None] + columns.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _load_weight(weight_ptr, columns, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Load the weight [D] in float32, rounded to the dtype of x."""
    return tl.load(weight_ptr + columns, mask=columns < HEAD_DIM, other=0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _inverse_rms(x, eps, HEAD_DIM: tl.constexpr):
    """Return 1 / sqrt(mean of x ** 2 + eps) of rows `[M, D]`, padded with zeros, as [M]."""
    return tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
