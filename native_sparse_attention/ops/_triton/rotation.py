"""Rotary embedding inside a kernel: rotate pairs of features by their angles."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# HALF of pairs of neighbouring features.
NEIGHBOURS = tl.constexpr(0)


@triton.jit
def pair_columns(columns, HALF: tl.constexpr):
    """Return the features that tile columns hold so that the two of a pair stand side by side.

    HALF: feature i is paired with i + HALF, and those from 2 HALF on with none; NEIGHBOURS: 2 i with 2 i + 1.
    """
    if HALF == NEIGHBOURS:
        return columns
    return tl.where(columns < 2 * HALF, columns // 2 + columns % 2 * HALF, columns)


@triton.jit
def rotate(x, cos, sin, is_rotated):
    """Apply rotary embedding to x `[M, D]`, in float32, with pairs side by side. Pairs outside `is_rotated` pass
    through unchanged, infinities too.

    cos, sin, is_rotated: `[M, D / 2]`, or broadcastable to it.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    # Even and odd feature of each pair: [M, D / 2]
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [rows, columns // 2, 2]))
    rotated_even = tl.where(is_rotated, even * cos - odd * sin, even)
    rotated_odd = tl.where(is_rotated, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(rotated_even, rotated_odd), [rows, columns])


@triton.jit
def cos_and_sin(x):
    """Return cosine and sine of float32 angles up to 2 ** 23, to within 2 units in the last place of 1.

    tl.cos and tl.sin handle the whole range of float32, which takes thousands of instructions.
    """
    # Range reduction by multiples of pi / 2, subtracted in three parts (Cody and Waite 1980).
    quarters = tl.floor(tl.fma(x, 0.6366197723675814, 0.5))
    rest = tl.fma(quarters, -1.5703125, x)
    rest = tl.fma(quarters, -4.837512969970703125e-4, rest)
    rest = tl.fma(quarters, -7.549789948768648e-8, rest)
    square = rest * rest
    # Minimax polynomials from -pi / 4 to pi / 4 (Moshier's Cephes library, sinf and cosf).
    sin = tl.fma(tl.fma(-1.9515295891e-4, square, 8.3321608736e-3), square, -1.6666654611e-1)
    sin = tl.fma(sin * square, rest, rest)
    cos = tl.fma(tl.fma(2.443315711809948e-5, square, -1.388731625493765e-3), square, 4.166664568298827e-2)
    cos = tl.fma(cos * square, square, tl.fma(square, -0.5, 1.0))
    quadrant = quarters.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    new_cos, new_sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    return tl.where((quadrant == 1) | (quadrant == 2), -new_cos, new_cos), tl.where(quadrant >= 2, -new_sin, new_sin)
