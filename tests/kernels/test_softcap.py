"""Soft caps of the kernels against tanh in float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope

SIZE = 2**16
# A unit in the last place of 1.
UNIT = 2.0**-23


@triton.jit
def cap_kernel(logits_ptr, out_ptr, softcap, SIZE: tl.constexpr):
    """out: `[2, SIZE]`."""
    places = tl.arange(0, SIZE)
    logits = tl.load(logits_ptr + places)
    tl.store(out_ptr + places, cap_logits(logits, softcap))
    tl.store(out_ptr + SIZE + places, cap_slope(logits, softcap))


def cap(logits: Tensor, softcap: float) -> Tensor:
    out = torch.empty(2, SIZE, device=logits.device)
    launch(cap_kernel, (1,), logits, out, softcap, SIZE=SIZE, device=logits.device)
    return out.double()


@pytest.mark.quick
@pytest.mark.parametrize('softcap', [2.0**-20, 0.7, 1.0, 30.0, 1e30])
def test_values_and_slopes(softcap: float, device: torch.device) -> None:
    x = torch.cat([torch.linspace(-12, 12, SIZE // 2), torch.linspace(-1, 1, SIZE // 2) ** 9]).to(device)
    logits = x * softcap
    exact = (logits.double() / softcap).requires_grad_()
    expected = exact.tanh()
    slope = (2 / (exact.exp() + (-exact).exp())) ** 2
    capped, by_kernel = cap(logits, softcap)
    assert ((capped / softcap - expected).abs() <= 6 * UNIT * expected.abs()).all()
    assert ((by_kernel - slope).abs() <= 40 * UNIT * slope).all()


def test_logits_that_are_not_finite(device: torch.device) -> None:
    logits = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -0.0], device=device)
    capped, slope = cap(torch.nn.functional.pad(logits, (0, SIZE - 7)), 5.0)
    expected = torch.tensor([5.0, -5.0, torch.nan, 5.0, -5.0, 0.0, 0.0], dtype=torch.float64, device=device)
    torch.testing.assert_close(capped[:7], expected, equal_nan=True, rtol=0, atol=0)
    expected = torch.tensor([0.0, 0.0, torch.nan, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64, device=device)
    torch.testing.assert_close(slope[:7], expected, equal_nan=True, rtol=0, atol=0)
