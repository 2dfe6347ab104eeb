"""The checks of the test harness report the faults for which they are made."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.testing import lay_out
from tests.support.harness import MARGIN, fence, poisoned_allocations, same_bits

interpreted = pytest.mark.skipif(not is_interpreted(), reason='seen by the interpreter alone')


@triton.jit
def _copy_kernel(x_ptr, out_ptr, load_size, store_first, store_stop, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * scale, mask=i < load_size, other=0.0)
    tl.store(out_ptr + i + store_first, x, mask=i + store_first < store_stop)


@torch.library.custom_op('native_sparse_attention_tests::copy', mutates_args=())
def copy(x: Tensor, load_size: int, store_first: int, store_stop: int) -> Tensor:
    out = torch.empty_like(x)
    _launch_copy(x, out, load_size, store_first, store_stop)
    return out


def _launch_copy(x: Tensor, out: Tensor, load_size: int, store_first: int, store_stop: int, scale: int = 1) -> None:
    kernel: Any = _copy_kernel
    kernel[(1,)](x, out, load_size, store_first, store_stop, scale, BLOCK=64)


@pytest.mark.quick
@pytest.mark.parametrize('load_size', [0, 39, 40])
def test_right_accesses_pass(load_size: int, device: torch.device) -> None:
    x = torch.randn(40, device=device)
    assert copy(x, load_size, 0, 40)[:load_size].equal(x[:load_size])


def test_unwritten_memory_is_nan_inside_a_registered_op(device: torch.device) -> None:
    out = copy(torch.randn(40, device=device), 40, 0, 39)
    assert out.isnan().tolist() == [False] * 39 + [True]


@pytest.mark.quick
@interpreted
@pytest.mark.parametrize('access', [(41, 0, 40), (40, 0, 41), (40, -1, 40)])
def test_an_access_outside_the_tensors_is_reported(access: tuple[int, int, int], device: torch.device) -> None:
    with pytest.raises(Exception, match=r'(load|store) of 1 elements outside'):
        copy(torch.randn(40, device=device), *access)


@pytest.mark.quick
@pytest.mark.plain_memory(watched=False)
@pytest.mark.parametrize('stores', [(0, 41), (-1, 40)])
def test_a_store_beside_a_buffer_is_found_afterwards(stores: tuple[int, int], device: torch.device) -> None:
    with pytest.raises(AssertionError, match='written beside a buffer of 40'), poisoned_allocations():
        copy(torch.randn(40, device=device), 40, *stores)


@interpreted
def test_offsets_that_overflow_are_reported() -> None:
    x = torch.randn(64)
    with pytest.raises(Exception, match='int32 overflow detected'):
        _launch_copy(x, x.clone(), 1, 0, 64, scale=2**30)


@interpreted
def test_asserts_of_kernels_are_checked() -> None:
    with pytest.raises(Exception, match='it is negative'):
        _check_kernel[(1,)](-1)


@triton.jit
def _check_kernel(x):
    tl.device_assert(x >= 0, 'it is negative')


@pytest.mark.parametrize('layout', ['contiguous', 'sliced', 'transposed', 'expanded'])
def test_a_fence_changes_neither_values_nor_strides(layout: str) -> None:
    tensor = lay_out(torch.randn(2, 3, 4, 5), layout)
    fenced = fence(tensor)
    assert (fenced.stride(), fenced.shape) == (tensor.stride(), tensor.shape)
    assert same_bits(fenced, tensor)
    buffer = fenced.as_strided((fenced.untyped_storage().nbytes() // 4,), (1,), 0)
    assert buffer[:MARGIN].isnan().all()
    assert buffer[-MARGIN:].isnan().all()
    assert buffer[MARGIN:-MARGIN].isnan().sum() == buffer.numel() - 2 * MARGIN - tensor[:1].numel() * (
        1 if layout == 'expanded' else 2
    )


def test_integers_are_fenced_with_junk(device: torch.device) -> None:
    fenced = fence(torch.arange(5, dtype=torch.int32, device=device))
    assert fenced.tolist() == [0, 1, 2, 3, 4]
    assert torch.empty(3, dtype=torch.int32, device=device).tolist() == [0x5A5A5A5A] * 3


@interpreted
@pytest.mark.parametrize('shape', [[4], [4, 8], [8, 4]], ids=str)
@pytest.mark.parametrize('dtype', [tl.float32, tl.int32, tl.pointer_type(tl.float32)], ids=str)
def test_types_and_tensors_are_those_of_triton(dtype: Any, shape: list[Any]) -> None:
    block_type, tensor_type = cast(Any, tl.block_type), cast(Any, tl.tensor)
    expected = object.__new__(block_type)
    block_type.__init__.__wrapped__(expected, dtype, shape)
    for given in (shape, [tl.constexpr(length) for length in shape], expected.shape):
        found = block_type(dtype, given)
        assert (found, found.name, found.numel, found.scalar) == (expected, expected.name, expected.numel, dtype)
    tensor = object.__new__(tensor_type)
    tensor_type.__init__.__wrapped__(tensor, 'first', expected)
    for handle in ('second', 'third'):
        again = tensor_type(handle, block_type(dtype, shape))
        assert (again.handle, again.type, again.dtype, again.numel) == (handle, expected, dtype, tensor.numel)
        assert [length.value for length in again.shape] == shape
