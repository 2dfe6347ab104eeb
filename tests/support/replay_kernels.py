"""Kernels of the interpreter that stand in for compiled ones, for replayed calls on CPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from native_sparse_attention.autograd import replay
from native_sparse_attention.core import checks
from native_sparse_attention.ops._triton import launch as launches
from tests.support.played import STREAM, _layout, _tensor_at


class Played(CompiledKernel):
    """Runs a kernel of the interpreter as a compiled one, whose tensors may be in nested tuples."""

    function, packed_metadata = 11, (1, 1, 0)

    def __init__(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], runs: list[str]) -> None:
        self.kernel, self.meta, self.runs = kernel, meta, runs
        self.layouts = [_layouts(arg) for arg in args]

    def run(self, *args: Any) -> None:
        x, y, z, *leading = args[:9]
        assert leading == [STREAM, self.function, self.packed_metadata, None, None, None]
        self.runs.append(self.kernel.fn.__name__)
        placed = [_place(*pair) for pair in zip(args[9:], self.layouts, strict=False)]
        run_interpreted(self.kernel, *placed, grid=(x, y, z), warmup=False, **self.meta)

    def __del__(self) -> None:
        """Triton 3.8 unloads a kernel here; this one was not loaded."""


LOCK = threading.RLock()


def run_interpreted(*args: Any, **settings: Any) -> None:
    with LOCK:  # the interpreter does not support threads
        INTERPRET(*args, **settings)


INTERPRET = InterpretedFunction.run


def _layouts(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return type(arg), [_layouts(item) for item in arg]
    return _layout(arg)


def _place(value: Any, layout: Any) -> Any:
    assert not isinstance(value, Tensor)
    if isinstance(value, tuple):
        kind, layouts = layout
        items = [_place(*pair) for pair in zip(value, layouts, strict=True)]
        return tuple(items) if kind is tuple else kind(*items)
    return value if layout is None else _tensor_at(value, layout)


class Forgetful(dict[Any, Any]):
    """Compile each launch again: a stand-in knows the shapes of its tensors."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the kernels that have been launched by address, by name. Calls are recorded when they first occur."""
    runs: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> Played:
        with _disable_current_modes():  # the interpreter computes with PyTorch
            run_interpreted(self, *args, grid=grid, warmup=warmup, **meta)
        return Played(self, args, meta, runs)

    monkeypatch.setattr(InterpretedFunction, 'run', run)
    monkeypatch.setattr(launches, '_COMPILED', Forgetful())
    active = SimpleNamespace(get_current_device=lambda: None, get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(launches.launcher, 'driver', SimpleNamespace(active=active))
    monkeypatch.setattr(checks, 'is_readable', lambda tensor: False)  # as on a GPU
    monkeypatch.setattr(replay, 'DEVICE_TYPES', ('cpu',))
    monkeypatch.setattr(replay, 'MIN_CALLS', 1)
    replay._calls.clear()
    yield runs
    replay._calls.clear()
