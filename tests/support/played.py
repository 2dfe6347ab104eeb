"""Kernels of the interpreter that stand in for compiled ones: they get addresses and numbers, as from a launcher."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

STREAM = 7


class Played(CompiledKernel):
    """Stands in for the result of Triton's launch: runs the interpreted kernel on memory at the given addresses."""

    function, packed_metadata = 11, (1, 1, 0)

    def __init__(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], runs: list[str]) -> None:
        self.kernel, self.runs = kernel, runs
        self.layouts, self.types, self.meta = [_layout(arg) for arg in args], [type(arg) for arg in args], meta

    def run(self, *args: Any) -> None:
        x, y, z, *launch = args[:9]
        assert launch == [STREAM, self.function, self.packed_metadata, None, None, None]
        values = args[9:]
        assert not any(isinstance(t, Tensor) for value in values for t in (value, *_items(value)))
        self.runs.append(self.kernel.fn.__name__)
        positional = [self._place(*it) for it in zip(values, self.layouts, self.types, strict=False)]
        self.kernel[x, y, z](*positional, **self.meta)

    def __del__(self) -> None:
        """Triton 3.8 unloads a kernel here; this one was not loaded."""

    def _place(self, value: Any, layout: Any, kind: type) -> Any:
        if layout is None:
            return value
        if isinstance(value, tuple):
            return kind(_tensor_at(value[0], layout), *value[1:])
        return _tensor_at(value, layout)


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


class Layout(NamedTuple):
    """Properties for which a kernel was compiled. alignment: bytes of an address beyond a multiple of 16."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int


def _layout(arg: Any) -> Layout | None:
    """Return the layout of a tensor, which may be the first entry of a tuple."""
    first = arg[0] if isinstance(arg, tuple) and arg else arg
    if not isinstance(first, Tensor):
        return None
    return Layout(first.shape, first.stride(), first.dtype, first.data_ptr() % 16)


def _tensor_at(address: int, layout: Layout) -> Tensor:
    shape, strides, dtype, alignment = layout
    assert address % 16 in (0, alignment)
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    count = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
