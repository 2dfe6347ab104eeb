"""Tiles of rows: loaded, stored, cleared of what is not finite, multiplied."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_product(a, b, total):
    """total + a @ b.

    In float32 the product is added up by itself first: a sum over thousands of rows is more exact in two steps, and
    eager's is taken in several too. The multiplication by 1 keeps the compiler from making one step of them.
    """
    if a.dtype == tl.float32:
        total = tl.fma(tl.dot(a, b, input_precision='ieee'), tl.full(total.shape, 1.0, tl.float32), total)
    else:
        total = tl.dot(a, b, total, input_precision='ieee')
    return total


@triton.jit
def load_rows(ptr, rows, stride, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of SIZE elements, padded to BLOCK with zeros; 0 in rows that the mask leaves out."""
    offsets = tl.arange(0, BLOCK)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + offsets[None, :]
    if SIZE == BLOCK:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    return tl.load(pointers, mask=mask[:, None] & (offsets < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, rows, stride, values, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + offsets[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (offsets < SIZE)[None, :])


@triton.jit
def split_finite(x):
    """x with 0 for what is not finite, and per row 0, or NaN where something was not. 0 * NaN is NaN: rows that a query
    does not read must not meet its weights of 0 with such values.
    """
    difference = x - x  # [BLOCK, BLOCK_D], NaN where x is not finite
    return tl.where(difference == 0, x, 0.0).to(x.dtype), tl.sum(difference.to(tl.float32), 1)
