"""Tiles of rows and their products."""

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
