"""Soft caps of logits: softcap * tanh(logit / softcap)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cap_logits(logits, softcap):
    """softcap * tanh(logits / softcap), to a few units in the last place of float32."""
    x = logits / softcap
    # 1 - 2 / (e^2x + 1) cancels near 0, where the first terms of the series are exact.
    square = x * x
    series = tl.fma(square, 0.021869488536155203, -0.05396825396825397)
    series = tl.fma(series, square, 0.13333333333333333)
    series = tl.fma(series, square, -0.3333333333333333)
    series = tl.fma(series * square, x, x)
    closed = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return softcap * tl.where(tl.abs(x) < 0.3, series, closed)


@triton.jit
def cap_slope(capped, softcap):
    """The derivative of `cap_logits` where it gave `capped`."""
    ratio = capped / softcap
    return tl.fma(-ratio, ratio, 1.0)
