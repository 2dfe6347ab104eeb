"""Kernels of the interpreter that play compiled ones: they get addresses and numbers alone, as from a launcher."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.compiler import CompiledKernel

STREAM = 7


class Played(CompiledKernel):
    """What Triton would return for a launch: runs the kernel of the interpreter on memory at the addresses it gets."""

    function, packed_metadata = 11, (1, 1, 0)

    def __init__(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], runs: list[str]) -> None:
        self.kernel, self.runs = kernel, runs
        self.layouts, self.meta = [_layout(arg) for arg in args], meta

    def run(self, *args: Any) -> None:
        x, y, z, *launch = args[:9]
        assert launch == [STREAM, self.function, self.packed_metadata, None, None, None]
        values = args[9:]
        assert not any(map(_has_tensor, values))
        self.runs.append(self.kernel.fn.__name__)
        with _disable_current_modes():  # a GPU calls no operation of PyTorch
            positional = [_place(value, layout) for value, layout in zip(values, self.layouts, strict=False)]
            self.kernel[x, y, z](*positional, **self.meta)

    def __del__(self) -> None:
        """Triton 3.8 unloads a kernel here; this one was not loaded."""


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_has_tensor, value)))


def _place(value: Any, layout: Any) -> Any:
    if isinstance(layout, Layout):
        return _tensor_at(value, layout)
    if not isinstance(layout, Record):
        return value
    items = [_place(*pair) for pair in zip(value, layout.items, strict=True)]
    return layout.kind(*items) if hasattr(layout.kind, '_fields') else layout.kind(items)


class Record(NamedTuple):
    """A tuple among the arguments, by its type and the layouts of its items."""

    kind: type
    items: list[Any]


class Layout(NamedTuple):
    """What a kernel was compiled for. alignment: bytes that addresses lie behind what 16 divides."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int


def _layout(arg: Any) -> Layout | Record | None:
    """Return the layout of a tensor or of a tuple, None of a number."""
    if isinstance(arg, tuple):
        return Record(type(arg), [_layout(item) for item in arg])
    if not isinstance(arg, Tensor):
        return None
    return Layout(arg.shape, arg.stride(), arg.dtype, arg.data_ptr() % 16)


def _tensor_at(address: int, layout: Layout) -> Tensor:
    shape, strides, dtype, alignment = layout
    assert address % 16 in (0, alignment)
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    count = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
