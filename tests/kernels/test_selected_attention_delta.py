"""Low bits that the forward saves of its output, and delta."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.selected_attention.triton.dlogits.delta import add_low_bits, find_delta, split_low_bits

SIZE = 1024


@triton.jit
def low_kernel(x_ptr, rounded_ptr, low_ptr, again_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    x = tl.load(x_ptr + places)
    x, low = split_low_bits(x, rounded_ptr.dtype.element_ty)
    rounded = x.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + places, rounded)
    tl.store(low_ptr + places, low)
    tl.store(again_ptr + places, add_low_bits(rounded, low))


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x rounded, its low bits, and their sum."""
    rounded, low = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int16)
    again = torch.empty_like(x)
    low_kernel[(1,)](x, rounded, low, again, SIZE=SIZE)  # pyright: ignore[reportArgumentType]
    return rounded, low, again


def numbers(smallest: float, largest: float, device: torch.device) -> Tensor:
    exponents = torch.empty(SIZE, dtype=torch.float64).uniform_(smallest, largest)
    return (exponents.exp2() * torch.randn(SIZE).sign()).float().to(device)


@pytest.mark.skipif(is_interpreted(), reason='the interpreter rounds to bfloat16 wrongly')
def test_bfloat16_keeps_all_but_the_last_bit(device: torch.device) -> None:
    x = numbers(-100, 100, device)
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, 3.38e38, -3.38e38, 2.0])
    # Halfway between two bfloat16 numbers.
    x[8:16] = (x[100:108].view(torch.int32) & -65536 | 0x8000).view(torch.float32)
    rounded, _, again = split(x, torch.bfloat16)
    halfway = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert halfway.any()
    assert rounded[~halfway].equal(x[~halfway].bfloat16())
    assert ((rounded.float() - x).abs() <= x.abs() * 2**-8 + 2**-134).all()
    exact = (x.view(torch.int32) & 0x8000) == 0
    assert again[exact].equal(x[exact])
    assert ((again - x).abs() <= x.abs() * 2**-23).all()


def test_float16_keeps_eleven_more_bits(device: torch.device) -> None:
    x = numbers(-14, 15, device)
    rounded, _, again = split(x, torch.float16)
    assert rounded.equal(x.half())
    assert ((again - x).abs() <= x.abs() * 2**-22).all()
    small = numbers(-40, -14, device)
    again = split(small, torch.float16)[2]
    assert ((again - small).abs() <= 2**-35).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_nonfinite_values_remain(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.ones(SIZE, device=device)
    x[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    again = split(x, dtype)[2]
    assert again[:2].equal(x[:2])
    assert again[2].isnan()
    assert again[3:].equal(x[3:])


@pytest.mark.quick
@pytest.mark.parametrize(('has_dlse', 'has_gate'), [(True, False), (False, False), (False, True)])
def test_delta(has_dlse: bool, has_gate: bool, device: torch.device) -> None:
    shape = (2, 37, 3, 40)
    exact = torch.randn(*shape, device=device)
    out = exact.half()
    low = ((exact - out.float()) * 2048).half().view(torch.int16)
    dout = torch.randn(*shape, device=device).half().transpose(1, 2).contiguous().transpose(1, 2)
    lse, dlse = torch.randn(2, 3, 37, device=device), torch.randn(2, 37, 3, device=device).transpose(1, 2)
    lse[:, 1, 5] = -torch.inf
    dlse[:, 1, 5] = torch.nan
    expected = (exact.double() * dout.double()).sum(-1).transpose(1, 2)
    if has_dlse:
        expected -= torch.where(lse == -torch.inf, 0, dlse)
    # Above 0, 0, and below 0.
    gate = torch.randn(2, 3, 37, device=device).transpose(1, 2).round(decimals=1)
    gate[:, 5, 1], gate[:, ::6] = 0.5, 0
    found, delta = find_delta(out, low, dout, lse, dlse if has_dlse else None, gate if has_gate else None)
    if has_gate:
        assert (gate < 0).any()
        less = lse - gate.log().transpose(1, 2)
        torch.testing.assert_close(found, less, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert found[:, :, ::6].eq(torch.inf).all()
    else:
        assert found.equal(lse)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=2e-5)
