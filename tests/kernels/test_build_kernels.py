"""`build_kernels` compiles what a call and its backward pass launch, and launches nothing."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils.checkpoint import checkpoint
from triton.runtime import driver

from native_sparse_attention import build, build_kernels
from native_sparse_attention.core.building import is_building
from native_sparse_attention.ops._triton import launch

CPU = torch.device('cpu')


class Mode:
    """Stands in for `AsyncCompileMode` of Triton."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def __enter__(self) -> None:
        modes.append(self)

    def __exit__(self, *_: object) -> None:
        modes.remove(self)


modes: list[Mode] = []


class Kernel:
    """Stands in for a kernel; records its warm-ups."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        modes[-1].executor.submit(lambda: SimpleNamespace(src=self, metadata=len(self.calls))).result()


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What launchers are built for: kernels and their metadata."""
    built: list[tuple[Any, Any]] = []
    active = SimpleNamespace(launcher_cls=lambda src, metadata: built.append((src, metadata)))
    monkeypatch.setattr(driver, '_active', active)
    return built


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, launchers: list[Any]) -> None:
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(triton, 'knobs', knobs)
    monkeypatch.setattr(triton, 'AsyncCompileMode', Mode)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(x)
        assert launch.launch(kernel, (1,), x, 1.0, device=CPU, BLOCK=16) is None
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        launch.launch(ctx.kernel, (2,), x, grad, device=CPU, BLOCK=32)
        launch.launch(ctx.kernel, (0,), x, grad, device=CPU, BLOCK=64)
        return 2 * x * grad, None


@pytest.mark.usefixtures('on_gpu')
def test_forward_and_backward_are_compiled(launchers: list[tuple[Any, Any]]) -> None:
    kernel, x, weight = Kernel(), torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(3))
    state = torch.get_rng_state()

    def step(scale: float, *, key: str) -> dict[str, Any]:
        out = Square.apply(torch.dropout(x, 0.5, True) * weight, kernel)
        return {key: [out.sum() * scale, 'text', None, x.detach()]}

    assert build_kernels(step, 2.0, key='out', num_workers=2) == 2
    (forward, forward_settings), (backward, settings) = kernel.calls
    assert len(forward) == len(backward) == 2
    assert forward_settings == {'grid': (1,), 'enable_fp_fusion': False, 'BLOCK': 16}
    assert settings == {'grid': (2,), 'enable_fp_fusion': False, 'BLOCK': 32}
    assert x.grad is weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert launchers == [(kernel, 1), (kernel, 2)]
    assert not modes
    assert not is_building.get()


@pytest.mark.usefixtures('on_gpu')
def test_without_gradients_the_forward_alone_is_compiled() -> None:
    kernel, x = Kernel(), torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert build_kernels(Square.apply, x, kernel) == 1


@pytest.mark.usefixtures('on_gpu')
def test_an_error_ends_it() -> None:
    def fail() -> None:
        raise KeyError('of the function')

    with pytest.raises(KeyError, match='of the function'):
        build_kernels(fail)
    assert not modes
    assert not is_building.get()


@pytest.mark.usefixtures('on_gpu')
def test_refused_settings() -> None:
    with pytest.raises(ValueError, match='num_workers is 0, but must be'):
        build_kernels(print, num_workers=0)
    with pytest.raises(ValueError, match='build_kernels is called inside another call of it'):
        build_kernels(lambda: build_kernels(print))


def test_nothing_is_called_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        raise AssertionError('called')

    assert build_kernels(call) == 0  # in the interpreter
    monkeypatch.setattr(triton, 'knobs', SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert build_kernels(call) == 0


def test_leaves_of_a_checkpointed_layer() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.randn(1, 2)
    out = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    assert {id(t) for t in build._leaves([out])} == {id(x), id(layer.weight), id(layer.bias)}


@pytest.mark.full
@pytest.mark.parametrize('merged', [False, True], ids=['separate', 'merged'])
def test_a_layer_launches_no_other_kernels(merged: bool) -> None:
    """In a process of its own, since Triton's interpreter cannot be switched off again."""
    command = [sys.executable, '-m', 'tests.support.build_layer', str(merged)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
