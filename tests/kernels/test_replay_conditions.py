"""Conditions of a call and of its backward pass that a recorded program does not contain, on CPUs as `test_replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention import nsa, ops
from native_sparse_attention.autograd import replay
from native_sparse_attention.ops._triton import launch as launches
from native_sparse_attention.ops._triton.support import is_interpreted
from tests.support.replay_kernels import play
from tests.support.replay_problems import SMALL, Problem, assert_same, programs, without_replay

pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels'),
    pytest.mark.plain_memory(watched=False),
]

CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from play(monkeypatch)


def test_another_thread_may_end_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread removes its recorder while this thread reports a launch; later recorders are still called."""
    seen: list[Any] = []

    def ends(*_: Any) -> None:
        launches.recorders.remove(ends)

    recorders = [ends, lambda known, grid, args: seen.append(known)]
    monkeypatch.setattr(launches, 'recorders', [recorders[1]])
    with without_replay():
        SMALL.results(SMALL.make(CPU))
        expected = len(seen)
        launches.recorders[:] = recorders
        SMALL.results(SMALL.make(CPU))
    assert len(seen) == 2 * expected


# --- Arguments ---


@pytest.mark.parametrize('kind', ['negative', 'zero'])
def test_values_that_memory_does_not_hold(kind: str, runs: list[str]) -> None:
    """A view with the negative bit, and a tensor of zeros without memory."""
    tensors = SMALL._replace(needs=()).make(CPU)
    SMALL.call(tensors)
    q = tensors['q'].neg()
    tensors['q'] = torch._neg_view(q) if kind == 'negative' else torch._efficientzerotensor(q.shape)
    with without_replay():
        expected = SMALL.call(tensors)
    runs.clear()
    assert_same([SMALL.call(tensors)], [expected])
    assert not runs
    assert len(programs()) == 1


def test_queries_by_keyword(runs: list[str]) -> None:
    """q, whose device, size and dtype decide, may be given by keyword."""
    problem = SMALL._replace(features=True)
    tensors = problem.make(CPU)
    with without_replay():
        expected = problem.call(tensors)
    values = {'sinks': tensors.pop('sinks'), **tensors, **problem.sizes, 'softcap': 5.0, 'backend': 'triton'}
    assert_same([nsa(**values).detach()], [expected.detach()])
    assert runs
    assert programs()


def test_dropout_is_compared_where_it_can_be() -> None:
    problem = SMALL._replace(settings={'dropout_p': torch.zeros(2)})
    with pytest.raises(ValueError, match='dropout_p is'):
        problem.call(problem.make(CPU))


def test_programs_may_go_while_one_is_recorded(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    """Another thread, with calls of many sizes, clears the programs meanwhile."""
    record = replay._record

    def clears(*args: Any) -> Any:
        program = record(*args)
        replay._calls.clear()
        return program

    monkeypatch.setattr(replay, '_record', clears)
    SMALL.call(SMALL.make(CPU))
    assert runs


# --- Autograd ---


@pytest.mark.parametrize('first', ['below autograd', 'outside'])
def test_below_autograd(first: str) -> None:
    """Inside the kernel of an op no graph is recorded, though gradients are enabled and required."""
    for is_below in (first != 'outside', first == 'outside') * 2:
        with torch._C._AutoDispatchBelowAutograd() if is_below else nullcontext():
            out = SMALL.call(SMALL.make(CPU))
        assert out.requires_grad != is_below


@pytest.mark.parametrize('kind', ['is_grads_batched', 'vmap', 'compiled autograd', 'dispatch mode'])
def test_observers_of_a_backward_pass(kind: str, runs: list[str]) -> None:
    """Hooks and modes observe one op per gradient."""

    def results() -> list[Tensor | None]:
        tensors = SMALL.make(CPU)
        leaves = [tensors['q'], tensors['v']]
        out = SMALL.call(tensors)
        douts = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(1))
        match kind:
            case 'is_grads_batched':
                return [*torch.autograd.grad(out, leaves, douts, is_grads_batched=True)]
            case 'vmap':
                return [*torch.vmap(lambda dout: torch.autograd.grad(out, leaves, dout))(douts)]
            case 'dispatch mode':
                with Mode() as mode:
                    grads = torch.autograd.grad(out, leaves, douts[0])
                assert mode.calls
                return [*grads]
            case _:
                with compiled_autograd._enable(torch.compile(backend='eager', fullgraph=True)):
                    out.backward(douts[0])
                return [t.grad for t in leaves]

    with without_replay():
        expected = results()
    for _ in range(2):
        assert_same(results(), expected)
    assert len(programs()) == 1


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == 'native_sparse_attention':
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_opcheck(runs: list[str]) -> None:
    out = SMALL.call(SMALL.make(CPU))
    with Mode() as mode:
        out.sum().backward()
    assert len(mode.calls) == len(programs()[0].differentiable)
    for function, args in mode.calls:
        torch.library.opcheck(function, tuple(t.detach() if isinstance(t, Tensor) else t for t in args))


@pytest.mark.parametrize('kind', ['transposed', 'misaligned'])
def test_saved_inputs_with_other_data(kind: str) -> None:
    """Sharding and offload replace the `data` of a parameter after the forward pass by a tensor of other layout."""
    problem = Problem(seqlen=16, memory=True, features=True)

    def results() -> list[Tensor | None]:
        tensors = problem.make(CPU)
        out = problem.call(tensors)
        for name in ('k', 'mem_k', 'sinks'):
            data = tensors[name].detach()
            if kind == 'misaligned':
                data = torch.cat((data.new_zeros(1), data.flatten()))[1:].view(data.shape)
            tensors[name].data = data.transpose(0, -1).contiguous().transpose(0, -1) if kind == 'transposed' else data
        return [*torch.autograd.grad(out.sum(), [t for t in tensors.values() if t.requires_grad])]

    with without_replay():
        expected = results()
    for _ in range(2):
        assert_same(results(), expected)
    assert len(programs()) == 1


@pytest.mark.parametrize('merged', [None, 'gate', 'scores'])
def test_saved_tensors_are_released_after_their_last_use(merged: str | None, runs: list[str]) -> None:
    problem = Problem(merged, memory=True, features=True)
    tensors = problem.make(CPU)
    out = problem.call(tensors)
    dout = torch.ones_like(out)
    saved = [*out.grad_fn.saved_tensors]  # type: ignore[union-attr]
    (program,) = programs()
    body = program.source.partition('def backward')[2]
    names = body.splitlines()[1].partition('=')[0].strip(' (),').split(', ')
    assert len(names) == len(saved)
    assert all(f'    del {name}\n' in body for name in names)
    program.differentiate(dout, saved)
    assert not saved
    out.backward(dout)
    with pytest.raises(RuntimeError, match='a second time'):
        out.backward(dout)


# --- Modes ---


@replay.replayed
def project_and_rotate(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A call with a matrix product outside autocast, as eager ops make beside kernels."""
    with torch.autocast('cpu', enabled=False):
        q = q @ weight
    return ops.rotary(q, cos, sin, backend='triton')


@pytest.mark.parametrize('backward', [True, False], ids=['backward inside', 'backward outside'])
@pytest.mark.parametrize('forward', [True, False], ids=['forward inside', 'forward outside'])
def test_autocast(forward: bool, backward: bool, runs: list[str]) -> None:
    """A recorded operation is not cast a second time, and gradients do not depend on the context of the recording."""
    tensors = [torch.randn(1, 8, 2, 16), torch.randn(16, 16), torch.randn(1, 8, 8), torch.randn(1, 8, 8)]

    def results(forward: bool, backward: bool) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(i < 2) for i, t in enumerate(tensors)]
        with torch.autocast('cpu', enabled=forward):
            out = project_and_rotate(*leaves)
        with torch.autocast('cpu', enabled=backward):
            return [out.detach(), *torch.autograd.grad(out, leaves[:2], torch.ones_like(out))]

    with without_replay():
        expected = results(forward, False)
    for _ in range(2):
        assert_same(results(forward, backward), expected)
    assert len(programs()) == 1


# --- Operations ---


def rotated(q: Tensor) -> Tensor:
    angles = torch.zeros(1, q.shape[1], 8)
    return ops.rotary(q, angles + 1, angles, backend='triton')


def reads_values(q: Tensor) -> Tensor:
    return rotated(q) * q.to('meta').shape[0]  # stands for a copy to the host, which PyTorch does not see


def changes_a_shape(q: Tensor) -> Tensor:
    return rotated(q).unsqueeze_(0)[0] * 2


def returns_an_input(q: Tensor) -> Tensor:
    rotated(q)
    return q[:, :1]


@pytest.mark.parametrize('function', [reads_values, changes_a_shape, returns_an_input])
def test_operations_that_are_not_recorded(function: Any, runs: list[str]) -> None:
    q = torch.randn(1, 8, 2, 16)
    assert_same([replay.replayed(function)(q)], [function(q)])
    assert not runs
    assert not programs()


def test_other_results_are_released(runs: list[str]) -> None:
    """A result that nothing reads does not live until the end of a program."""

    @replay.replayed
    def call(q: Tensor) -> Tensor:
        return rotated(q.sort().values)

    q = torch.randn(1, 8, 2, 16)
    expected = rotated(q.sort().values)
    assert_same([call(q)], [expected])
    (program,) = programs()
    lines = [line.strip() for line in program.source.splitlines()]
    assert any(', _ = ' in line and 'del _' in lines[i + 1 :][:2] for i, line in enumerate(lines)), program.source
