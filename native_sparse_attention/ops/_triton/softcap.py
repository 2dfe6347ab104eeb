"""Soft caps of logits: softcap * tanh(logit / softcap)."""

from __future__ import annotations

import triton
import triton.language as tl

# -2 / ln(2): exp(-2 * x) is exp2(MINUS_TWO_LOG2_E * x).
MINUS_TWO_LOG2_E = tl.constexpr(-2.8853900817779268)


@triton.jit
def cap_logits(logits, softcap):
    """softcap * tanh(logits / softcap), to a few units in the last place of float32."""
    x = logits * (1.0 / softcap)
    size = tl.abs(x)
    # For small x, 1 - 2 * e / (1 + e) would cancel, so the polynomial of Cephes' tanhf is used.
    square = x * x
    near = tl.fma(square, -5.70498872745e-3, 2.06390887954e-2)
    near = tl.fma(near, square, -5.37397155531e-2)
    near = tl.fma(near, square, 1.33314422036e-1)
    near = tl.fma(near, square, -3.33332819422e-1)
    near = tl.fma(near * square, x, x)
    e = tl.exp2(size * MINUS_TWO_LOG2_E)
    far = 1.0 - 2.0 * e / (1.0 + e)
    return softcap * tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def cap_slope(logits, softcap):
    """Return the derivative of `cap_logits`, to a few units in the last place, also where it is close to 0: there 1 -
    tanh ** 2 would have no correct digit.
    """
    e = tl.exp2(tl.abs(logits * (1.0 / softcap)) * MINUS_TWO_LOG2_E)
    return 4.0 * e / ((1.0 + e) * (1.0 + e))
