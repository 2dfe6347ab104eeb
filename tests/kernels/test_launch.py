"""Launches of compiled kernels that `launch` keeps, with stand-ins that record how they are called."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.ops._triton import launch as module
from native_sparse_attention.ops._triton.launch import launch

CPU = torch.device('cpu')
STREAM = 7


class Played(CompiledKernel):
    function, packed_metadata = 11, (1, 1, 0)

    def __init__(self, runs: list[tuple[Any, ...]]) -> None:
        self.runs = runs

    def run(self, *args: Any) -> None:
        self.runs.append(args)

    def __del__(self) -> None:
        """Triton 3.8 unloads a kernel here; this one was not loaded."""


class Kernel:
    """Stands in for a jit function. asked: how often Triton would bind arguments. runs: launches without binding."""

    arg_names = ('x', 'pair', 'strides', 'count', 'SECOND', 'FIRST')

    def __init__(self) -> None:
        self.asked, self.runs = 0, []

    def fn(self) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run

    def _run(self, *args: Any, **meta: Any) -> Played:
        self.asked += 1
        return Played(self.runs)

    def __call__(self, x: Any, y: Any = None, count: int = 3, first: int = 1) -> Any:
        args = (x, Pair(y, 5), (1, 2), count)
        return launch(self, (4, 2), *args, FIRST=first, SECOND=None, num_warps=4, device=CPU)


class Pair(NamedTuple):
    tensor: Tensor | None
    number: int


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(module.launcher, 'driver', SimpleNamespace(active=active))
    monkeypatch.setattr(module, '_COMPILED', OrderedDict())
    return Kernel()


@pytest.mark.quick
def test_a_launch_again(kernel: Kernel) -> None:
    """Tensors with equal properties: Triton's launcher gets addresses, numbers and constants in their order."""
    first = kernel(torch.zeros(8), torch.zeros(8))
    x, y = torch.zeros(9), torch.zeros(2, 2)
    assert isinstance(kernel(x, y), type(first))
    assert kernel.asked == 1
    before = (4, 2, 1, STREAM, 11, (1, 1, 0), None, None, None)
    assert kernel.runs == [(*before, x.data_ptr(), (y.data_ptr(), 5), (1, 2), 3, None, 1)]


@pytest.mark.parametrize('name', ['alignment', 'dtype', 'none', 'nested dtype', 'number', 'constant'])
def test_other_properties(kernel: Kernel, name: str) -> None:
    """Triton binds the arguments for each property by which it specialises, once for each value."""
    x, y = torch.zeros(8), torch.zeros(8)
    others = {
        'alignment': (x[1:], y),
        'dtype': (x.half(), y),
        'none': (x, None),
        'nested dtype': (x, y.int()),
        'number': (x, y, 16),
        'constant': (x, y, 3, 2),
    }
    for _ in range(2):
        kernel(x, y)
        kernel(*others[name])
    assert (kernel.asked, len(kernel.runs)) == (2, 2)


def test_descriptors(kernel: Kernel) -> None:
    described = [TensorDescriptor(torch.zeros(64), [64], [1], [rows]) for rows in (16, 16, 32)]
    for tiles in described:
        kernel(tiles)
    assert kernel.asked == 2
    assert [run[9] for run in kernel.runs] == described[1:2]


def test_kernels_of_one_call(kernel: Kernel) -> None:
    class Other(Kernel):
        def fn(self) -> None: ...

    other = Other()
    for _ in range(2):
        kernel(torch.zeros(8))
        other(torch.zeros(8))
    assert (kernel.asked, other.asked) == (1, 1)


def test_a_profiler_hears_of_launches(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel(torch.zeros(8))
    monkeypatch.setattr(knobs.runtime, 'launch_enter_hook', lambda _: None)
    kernel(torch.zeros(8))
    assert (kernel.asked, kernel.runs) == (2, [])


def test_every_launch_goes_through_a_triton_that_is_not_known(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, 'launcher', None)
    for _ in range(3):
        kernel(torch.zeros(8))
    assert (kernel.asked, kernel.runs, module._COMPILED) == (3, [], {})


def test_compiled_kernels_are_kept_alive(kernel: Kernel) -> None:
    """Triton 3.8 unloads a kernel when it is collected."""
    compiled = kernel(torch.zeros(8))
    assert [kept.compiled for kept in module._COMPILED.values()] == [compiled]
    assert module.launcher is not None
    jit: Any = SimpleNamespace(fn=lambda x, size: None)
    recorded = module.launcher.record(jit, compiled, (4, 2), (7,), {'size': 8, 'num_warps': 4})
    assert recorded.compiled is compiled
    module.launcher.driver.active.get_current_device = lambda: CPU.index
    module.launcher.replay([recorded], CPU)
    assert kernel.runs == [(4, 2, 1, STREAM, 11, (1, 1, 0), None, None, None, 7, 8)]


def test_few_are_kept(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, 'MAX_COMPILED', 4)
    for count in range(2, 20):
        older = [*module._COMPILED]
        kernel(torch.zeros(8), count=count)
        assert len(module._COMPILED) <= 4
        assert [*module._COMPILED][:-1] == older[-3:]
