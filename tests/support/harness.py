"""Shared parts of the kernel tests: poisoned memory, Triton's interpreter with strict checks, the comparison with
eager.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.testing import outputs_and_gradients, row_errors
from tests.support.problems import Extents, Heads

# Elements of the margins on both sides of a buffer.
MARGIN = 256
# Buffers beyond this are left alone: filling them would cost more memory than a test has.
MAX_POISONED_BYTES = 2**28
JUNK = 0x5A5A5A5A5A5A5A5A

Tensors = Mapping[str, Tensor]


def junk_of(dtype: torch.dtype) -> float | int:
    """Return the content of unwritten memory: NaN, or an integer that is no size, index or offset of a test."""
    if dtype.is_floating_point:
        return float('nan')
    return True if dtype == torch.bool else JUNK & torch.iinfo(dtype).max


def is_junk(tensor: Tensor) -> Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor == junk_of(tensor.dtype)


def fence(tensor: Tensor) -> Tensor:
    """Return the values of `tensor` with its strides, in a buffer that is NaN (integers: junk) everywhere else."""
    if tensor.numel() == 0:
        return tensor
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    buffer = torch.full((size + 2 * MARGIN,), junk_of(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    fenced = buffer.as_strided(tensor.shape, tensor.stride(), MARGIN)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
    fenced[once] = tensor.detach()[once]
    return fenced


def far_apart(tensor: Tensor, dim: int) -> Tensor:
    """Return the same values, with the last entry of a dimension more than 2 ** 31 elements behind the first."""
    strides = list(tensor.contiguous().stride())
    strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 16
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, strides).copy_(tensor)


class Allocations:
    """Uninitialised memory, filled with junk and fenced by margins of junk."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def poison(self, tensor: Tensor) -> Tensor:
        """Another tensor of the same shape and strides, full of junk."""
        if type(tensor) is not Tensor or tensor.is_meta or _get_current_dispatch_mode() is not None:
            return tensor  # of a fake implementation, or of an observing mode
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if size == 0 or tensor.requires_grad or size * tensor.element_size() > MAX_POISONED_BYTES:
            return tensor
        buffer = torch.full((size + 2 * MARGIN,), junk_of(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
        self.buffers.append((buffer, size))
        return buffer.as_strided(tensor.shape, tensor.stride(), MARGIN)

    def check(self) -> None:
        for buffer, size in self.buffers:
            margins = torch.cat((buffer[:MARGIN], buffer[MARGIN + size :]))
            assert is_junk(margins).all(), f'written beside a buffer of {size} {buffer.dtype}'


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill all uninitialised memory with junk. On leaving, the margins must be unchanged.

    The allocation functions themselves are replaced, because modes of PyTorch do not reach into a registered op.
    """
    allocations = Allocations()

    def poisoning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: allocations.poison(function(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, 'empty'), (torch, 'empty_like'), (Tensor, 'new_empty'), (torch, 'empty_strided')):
            patch.setattr(owner, name, poisoning(getattr(owner, name)))
        yield
    allocations.check()


@contextmanager
def strict_interpreter() -> Iterator[None]:
    """Make interpreted kernels report int32 overflow, failing asserts, and every load and store outside the tensors of
    a launch; float32 products have the same bits on every processor. Kernels on a GPU are not affected.
    """
    if not is_interpreted():
        yield
        return
    extents = np.zeros((0, 2), dtype=np.uint64)
    starts, stops = [], []
    launch = interpreter.GridExecutor.__call__
    load, store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store

    def launch_watched(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal extents, starts, stops
        extents = _merged_extents(_tensors_in((args, tuple(kwargs.values()))))
        starts, stops = extents.T.tolist()
        launch(self, *args, **kwargs)

    def check(pointers: Any, mask: Any, what: str) -> None:
        # A mask that branches put together may be of another type than bool, and index otherwise.
        read, shape = np.asarray(mask.data, dtype=bool), pointers.data.shape
        addresses = pointers.data[read if read.shape == shape else np.broadcast_to(read, shape)]
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        if addresses.size:
            # Mostly the first and the last address are in one tensor, and so are all.
            first, last = np.minimum.reduce(addresses).item(), np.maximum.reduce(addresses).item()
            holder = bisect_right(starts, first) - 1
            if holder >= 0 and last + int(size) <= stops[holder]:
                return
            index = np.searchsorted(extents[:, 0], addresses, side='right') - 1
            inside = (index >= 0) & (addresses + size <= extents[index, 1]) if len(extents) else np.zeros(1, bool)
            assert np.logical_and.reduce(inside), (
                f'{what} of {int((~inside).sum())} elements outside the tensors of the launch'
            )

    def load_watched(self: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        check(pointers, mask, 'load')
        return load(self, pointers, mask, *args, **kwargs)

    def store_watched(self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        check(pointers, mask, 'store')
        return store(self, pointers, value, mask, *args, **kwargs)

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_alike(self: Any, a: Any, b: Any, total: Any, *args: Any) -> Any:
        """Multiply with one order of summation; numpy's library uses another one on every kind of processor."""
        if not {a.data.dtype.type, b.data.dtype.type} <= {np.float16, np.float32} or total.data.dtype != np.float32:
            return multiply(self, a, b, total, *args)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, 'create_dot', multiply_alike)
        patch.setattr(interpreter.interpreter_builder, 'options', interpreter.InterpreterOptions(debug=True))
        patch.setattr(interpreter.GridExecutor, '__call__', launch_watched)
        patch.setattr(TritonSemantic, 'binary_op_sanitize_overflow_impl', _refuse_overflow)
        # The maximum of a number and NaN is the number on a GPU.
        for name, function in (('create_maxnumf', np.fmax), ('create_minnumf', np.fmin)):
            take = partialmethod(interpreter.InterpreterBuilder.binary_op, op=function)
            patch.setattr(interpreter.InterpreterBuilder, name, take)
        patch.setattr(interpreter.InterpreterBuilder, 'create_masked_load', load_watched)
        patch.setattr(interpreter.InterpreterBuilder, 'create_masked_store', store_watched)
        # Values that are not finite are part of the tests.
        with np.errstate(all='ignore'):
            yield


def _refuse_overflow(self: Any, a: Any, b: Any, operation: Any) -> None:
    """Check overflow as Triton does, in a few operations instead of ten of the interpreter's."""
    bits = a.type.scalar.int_bitwidth
    if bits < 64:
        lhs, rhs, name = a.handle.data, b.handle.data, operation.__name__
        lowest, highest = _range_of(lhs.dtype.char)
        if lhs.size == rhs.size == 1:
            lowest_found = highest_found = getattr(operator, name)(lhs.item(), rhs.item())
        else:
            function = {'add': np.add, 'sub': np.subtract, 'mul': np.multiply}[name]
            result = function(lhs, rhs, dtype=np.int64)
            lowest_found, highest_found = np.minimum.reduce(result, axis=None), np.maximum.reduce(result, axis=None)
        is_within = lowest <= lowest_found and highest_found <= highest
        assert is_within, f'int{bits} overflow detected for operation {name}'


@cache
def _range_of(char: str) -> tuple[int, int]:
    limits = None if char == '?' else np.iinfo(char)
    return (0, 1) if limits is None else (int(limits.min), int(limits.max))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_in(item)


def _merged_extents(tensors: Iterator[Tensor]) -> np.ndarray:
    """Return uint64 `[N, 2]`: the addresses [start, stop) of tensors, ascending and disjoint."""
    merged: list[list[int]] = []
    extents = []
    for t in tensors:
        if t.numel():
            last = sum((length - 1) * stride for length, stride in zip(t.shape, t.stride(), strict=True))
            extents.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    for start, stop in sorted(extents):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return np.array(merged, dtype=np.uint64).reshape(-1, 2)


def place(value: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Return tensors on the device, fenced, and floating ones in the dtype; also those in tuples and dictionaries."""
    if isinstance(value, Tensor):
        return fence(value.to(device, dtype) if value.is_floating_point() else value.to(device))
    if isinstance(value, tuple):
        return tuple(place(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return {name: place(item, device, dtype) for name, item in value.items()}
    return value


def make_grads(
    extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return gradients of the output and the log-sum-exp of an attention."""
    batch, seqlen = extents.batch, extents.seqlen_q
    return [
        torch.randn(batch, seqlen, heads.heads, heads.value_dim, device=device, dtype=dtype),
        torch.randn(batch, heads.heads, seqlen, device=device),
    ]


def run_triton(
    op: Callable[..., Any], tensors: Tensors, grads: list[Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Return outputs and gradients by name, as `outputs_and_gradients` does."""
    return outputs_and_gradients(lambda **leaves: op(**leaves, **settings, backend='triton'), tensors, grads)


def run_eager(
    op: Callable[..., Any], tensors: Tensors, grads: list[Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    return outputs_and_gradients(lambda **leaves: op(**leaves, **settings, backend='eager'), tensors, grads)


def assert_close_to_eager(
    op: Callable[..., Any], tensors: Tensors, grads: list[Tensor] | None = None, **settings: Any
) -> None:
    """Assert float32 within 1e-5 of eager in float64, for problems too small for the error rules;
    float16 within 2e-3.
    """
    gold = run_eager(op, {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, grads, **settings)
    is_half = any(t.dtype == torch.float16 for t in tensors.values())
    for name, t in run_triton(op, tensors, grads, **settings).items():
        # Gradients depend on rounded weights, whatever their own dtype.
        tolerance = 2e-3 if t.dtype == torch.float16 or (is_half and name.startswith('grad')) else 1e-5
        torch.testing.assert_close(
            t.double(), gold[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f'{n}: {m}'
        )


def assert_slopes_at_the_cap(op: Callable[..., Any], tensors: Tensors, grads: list[Tensor], **settings: Any) -> None:
    """Check gradients of queries and keys where every logit is near 7 times the cap. Slopes of 1e-6 keep their digits
    there, which 1 - tanh ** 2 in float32 loses. tensors: of random numbers, q and k among them.
    """
    q, k = (1 + 0.1 * tensors[name] for name in 'qk')
    tensors = {**tensors, 'q': 7 / q.shape[3] * q, 'k': k}
    settings |= {'scale': 1.0, 'softcap': 1.0}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    gold, result = run_eager(op, wide, grads, **settings), run_triton(op, tensors, grads, **settings)
    for name in ('grad of q', 'grad of k'):
        assert row_errors(result[name], gold[name]).max() < 2**-14, name


def assert_same_bits(result: Tensors, expected: Tensors) -> None:
    assert result.keys() == expected.keys()
    for name in expected:
        assert same_bits(result[name], expected[name]), name


def fewer_examples(share: float) -> hypothesis.settings:
    """Use a share of the profile's examples, for tests that take long in the interpreter."""
    profile = hypothesis.settings()
    return hypothesis.settings(profile, max_examples=max(1, round(profile.max_examples * share)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.contiguous().view(integers).equal(b.contiguous().view(integers))


def make_sequences(extents: Extents, device: torch.device) -> Sequences:
    where = place(extents.where, device)
    cu_seqlens = where.get('cu_seqlens')
    borders = (cu_seqlens, where.get('cu_seqlens_k', cu_seqlens))
    sizes = (extents.batch, extents.seqlen_q, extents.seqlen_k)
    return Sequences(*sizes, device, where.get('q_offset'), where.get('seqlens_k'), *borders)
