"""Soft caps of logits: softcap * tanh(logit / softcap)."""

from __future__ import annotations

import triton
import triton.language as tl

# -2 / ln(2): e^(-2x) is exp2 of so many x.
MINUS_TWO_LOG2_E = tl.constexpr(-2.8853900817779268)


@triton.jit
def cap_logits(logits, softcap):
    """softcap * tanh(logits / softcap), to a few units in the last place of float32."""
    x = logits * (1.0 / softcap)
    size = tl.abs(x)
    # Where 1 - tanh is not small the difference would cancel; there the polynomial of Cephes' tanhf.
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
    """The derivative of `cap_logits`, to a few units in the last place, where it is next to 0 too: 1 - tanh ** 2 would
    have no digit right there.
    """
    e = tl.exp2(tl.abs(logits * (1.0 / softcap)) * MINUS_TWO_LOG2_E)
    return 4.0 * e / ((1.0 + e) * (1.0 + e))
