"""Rotary embedding inside a kernel: pairs of neighbouring features turned by their angles."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(x, cos, sin, is_turned):
    """x `[M, D]` with its pairs turned; cos, sin, is_turned: `[M, D / 2]` or to be broadcast to it. What is not turned
    stays as it is, infinities too. Float32.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    # Of a pair the even and the odd feature: [M, D / 2]
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [rows, columns // 2, 2]))
    turned_even = tl.where(is_turned, even * cos - odd * sin, even)
    turned_odd = tl.where(is_turned, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), [rows, columns])
