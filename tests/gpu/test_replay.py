"""Replayed calls of `nsa` on a GPU have the bits of calls without replay.

python -m pytest -m gpu -n 8 tests/gpu/test_replay.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.autograd import replay
from tests.support.replay_problems import Problem, assert_same, programs, without_replay

launches: Any = pytest.importorskip('native_sparse_attention.ops._triton.launch', reason='triton is not installed')

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    'compress_block_size': 32,
    'compress_stride': 16,
    'selection_block_size': 64,
    'num_selected': 8,
    'window_size': (127, 0),
}
BASE = Problem(batch=2, seqlen=1500, heads=16, kv_heads=2, head_dim=64, dtype=torch.bfloat16, sizes=SIZES)
LONG = BASE._replace(batch=1, seqlen=4096, heads=16, kv_heads=1, head_dim=128)
PROBLEMS = {
    'separate': BASE,
    'merged': BASE._replace(merged='gate'),
    'scores': BASE._replace(merged='scores', memory=True),
    'packed': BASE._replace(batch=1, lengths=(700, 0, 31, 900), memory=True),
    'packed, merged': BASE._replace(batch=1, lengths=(700, 0, 31, 900), merged='scores'),
    'padded': BASE._replace(padded=True),
    'padded, merged': BASE._replace(padded=True, merged='gate'),
    'sinks and softcap': BASE._replace(features=True, memory=True),
    'sinks and softcap, merged': BASE._replace(features=True, merged='gate'),
    'group of 1': BASE._replace(heads=4, kv_heads=4),
    'group of 2': BASE._replace(heads=4),
    'group of 4, merged': BASE._replace(heads=8, merged='scores'),
    'group of 16': LONG,
    'group of 16, merged': LONG._replace(merged='scores'),
    'float16': BASE._replace(dtype=torch.float16),
    'float32': BASE._replace(dtype=torch.float32, seqlen=600),
    'head size of 80': BASE._replace(head_dim=80),
    'differentiable': BASE._replace(settings={'use_diff_topk': True}),
    'own blocks': BASE._replace(settings={'share_group': False}),
    'window alone': BASE._replace(sizes={**SIZES, 'num_selected': 0}),
}


@pytest.fixture(autouse=True)
def record_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, 'MIN_CALLS', 2)
    replay._calls.clear()
    yield
    replay._calls.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the kernels that are launched without replay."""
    names: list[str] = []
    monkeypatch.setattr(launches, 'recorders', [lambda known, grid, args: names.append(known.kernel.fn.__name__)])
    return names


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fill new memory with NaN by PyTorch, so that unwritten results show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(problem: Problem, device: torch.device, seeds: range, launched: list[str], recorded: int) -> None:
    """Assert that calls have the bits of calls without replay. recorded: index of the call from which on calls are
    replayed.
    """
    for seed in seeds:
        with without_replay():
            expected = problem.results(problem.make(device, seed))
        tensors = problem.make(device, seed)
        launched.clear()
        found = problem.results(tensors)
        assert bool(launched) == (seed <= recorded), seed
        assert_same(found, expected)


@pytest.mark.filterwarnings('ignore:.*deterministic')
@pytest.mark.parametrize('name', PROBLEMS)
def test_bits(name: str, device: torch.device, launched: list[str], unwritten_is_nan: None) -> None:
    check(PROBLEMS[name], device, range(5), launched, 1)
    (program,) = programs()
    assert program.differentiable


@pytest.mark.parametrize('name', ['separate', 'scores'])
def test_without_gradients(name: str, device: torch.device, launched: list[str]) -> None:
    problem = PROBLEMS[name]._replace(needs=())
    with torch.no_grad():
        check(problem, device, range(4), launched, 1)
    with torch.inference_mode():
        check(problem, device, range(4), launched, 1)


def test_sizes_back_and_forth(device: torch.device) -> None:
    problems = [BASE, BASE._replace(seqlen=300), BASE._replace(merged='scores'), BASE._replace(batch=1)]
    for seed in range(5):
        for problem in problems:
            with without_replay():
                expected = problem.results(problem.make(device, seed))
            assert_same(problem.results(problem.make(device, seed)), expected)
    assert len(programs()) == len(problems)


def record(problem: Problem, device: torch.device) -> None:
    for _ in range(2):
        problem.results(problem.make(device))
    assert programs()


def test_a_graph_kept_and_read_twice(device: torch.device) -> None:
    record(BASE, device)
    tensors = BASE.make(device)
    leaves = [t for t in tensors.values() if t.requires_grad]
    out = BASE.call(tensors)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    assert_same([*second], [*first])


@pytest.mark.parametrize('kind', ['expanded', 'strided', 'misaligned'])
def test_other_gradients_of_the_output(kind: str, device: torch.device) -> None:
    record(BASE, device)
    tensors = BASE.make(device)
    out = BASE.call(tensors)
    dout = {
        'expanded': lambda: torch.ones((), device=device, dtype=out.dtype).expand(out.shape),
        'strided': lambda: torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2),
        'misaligned': lambda: torch.randn(out.numel() + 1, device=device).to(out.dtype)[1:].view(out.shape),
    }[kind]()
    with without_replay():
        expected = BASE.results(BASE.make(device), dout)
    assert_same(BASE.results(BASE.make(device), dout), expected)


def test_layouts(device: torch.device, launched: list[str]) -> None:
    """Slices of one projection, transposed and misaligned inputs."""

    def changed(seed: int, kind: str) -> dict[str, Tensor]:
        tensors = BASE.make(device, seed)
        match kind:
            case 'slices':
                parts = torch.cat([tensors[name].detach() for name in 'qkv'], 2).split([16, 2, 2], 2)
                made = dict(zip('qkv', parts, strict=True))
            case 'transposed':
                made = {name: tensors[name].detach().transpose(1, 2).contiguous().transpose(1, 2) for name in 'qkv'}
            case _:
                flat = [torch.cat((t.new_zeros(1), t.detach().flatten()))[1:] for t in (tensors[n] for n in 'qkv')]
                made = {name: t.view(tensors[name].shape) for name, t in zip('qkv', flat, strict=True)}
        return tensors | {name: t.requires_grad_() for name, t in made.items()}

    for kind in ('slices', 'transposed', 'misaligned'):
        for seed in range(4):
            with without_replay():
                expected = BASE.results(changed(seed, kind))
            launched.clear()
            assert_same(BASE.results(changed(seed, kind)), expected)
            assert bool(launched) == (seed < 2)


def test_another_stream(device: torch.device) -> None:
    """Launches follow earlier work on their stream, forward and backward."""
    record(BASE, device)
    with without_replay():
        expected = BASE.results(BASE.make(device, 5))
    source, stream = BASE.make(device, 5), torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in source.items()}
        found = BASE.results(tensors)
    torch.cuda.current_stream(device).wait_stream(stream)
    assert_same(found, expected)


@pytest.mark.parametrize('name', ['separate', 'scores', 'packed'])
def test_a_captured_graph(name: str, device: torch.device, launched: list[str]) -> None:
    problem = PROBLEMS[name]
    record(problem, device)
    tensors = problem.make(device)
    dout = torch.randn_like(problem.call(tensors).detach())
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        problem.results(tensors, dout)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    launched.clear()
    with torch.cuda.graph(graph):
        found = problem.results(tensors, dout)
    assert not launched
    for seed in range(2, 4):
        other = problem.make(device, seed)
        with torch.no_grad():
            for key, t in tensors.items():
                t.copy_(other[key])
        graph.replay()
        with without_replay():
            expected = problem.results(other, dout)
        assert_same(found, expected)


def test_nothing_is_recorded_in_a_capture(device: torch.device) -> None:
    problem = BASE._replace(needs=())
    tensors = problem.make(device)
    with without_replay():
        problem.call(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            problem.call(tensors)
    assert not programs()


def test_a_layer(device: torch.device, launched: list[str]) -> None:
    """The hooks of saved tensors that recompute rotated queries take part."""
    torch.manual_seed(0)
    layer = SparseAttention(256, 64, 8, 128, 32, 16, 64, 8, kv_heads=2, causal=True, backend='triton')
    layer = layer.to(device, torch.bfloat16)
    x = torch.randn(2, 1000, 256, device=device, dtype=torch.bfloat16)

    def results() -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        return [out.detach(), *torch.autograd.grad(out, [leaf, *layer.parameters()], out.detach(), allow_unused=True)]

    with without_replay():
        expected = results()
    for _ in range(4):
        assert_same(results(), expected)
    assert len(programs()) == 1


@pytest.mark.parametrize('kind', ['vmap', 'is_grads_batched'])
def test_batched_gradients(kind: str, device: torch.device) -> None:
    record(BASE, device)
    tensors = BASE.make(device)
    out, leaves = BASE.call(tensors), [tensors['q'], tensors['k_cmp']]
    douts = torch.randn((2, *out.shape), device=device).to(out.dtype)
    expected = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    if kind == 'vmap':
        found = torch.vmap(lambda dout: torch.autograd.grad(out, leaves, dout))(douts)
    else:
        found = torch.autograd.grad(out, leaves, douts, is_grads_batched=True)
    assert_same([*found], [torch.stack(grads) for grads in zip(*expected, strict=True)])


def test_saved_inputs_with_other_data(device: torch.device) -> None:
    """The data of parameters has another address and alignment in the backward pass."""
    problem = BASE._replace(memory=True, features=True)

    def results() -> list[Tensor | None]:
        tensors = problem.make(device)
        out = problem.call(tensors)
        for name in ('mem_k', 'mem_v', 'k'):
            data = tensors[name].detach()
            tensors[name].data = torch.cat((data.new_zeros(1), data.flatten()))[1:].view(data.shape)
        return [*torch.autograd.grad(out, [t for t in tensors.values() if t.requires_grad], torch.ones_like(out))]

    record(problem, device)
    with without_replay():
        expected = results()
    assert_same(results(), expected)


@pytest.mark.parametrize('backward', [True, False], ids=['backward inside', 'backward outside'])
def test_autocast(backward: bool, device: torch.device) -> None:
    problem = BASE._replace(dtype=torch.float32, seqlen=600, features=True)

    def results(backward: bool) -> list[Tensor | None]:
        tensors = problem.make(device)
        with torch.autocast('cuda', torch.bfloat16):
            out = problem.call(tensors)
        leaves = [t for t in tensors.values() if t.requires_grad]
        with torch.autocast('cuda', torch.bfloat16, enabled=backward):
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)]

    with without_replay():
        expected = results(backward=False)
    for _ in range(4):
        assert_same(results(backward), expected)
    assert programs()


def test_memory(device: torch.device) -> None:
    """Saved tensors are released after their last use, so replayed calls take no more memory (but for block sizes)."""
    record(LONG, device)

    def peak() -> tuple[int, int]:
        tensors = LONG.make(device)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        LONG.results(tensors)
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before

    with without_replay():
        plain, _ = peak()
    replayed, left = peak()
    assert left == 0
    assert replayed <= plain * 1.02, (replayed, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two GPUs')
def test_the_second_device(device: torch.device) -> None:
    second = torch.device('cuda', 1)
    for seed in range(4):
        for each in (device, second):
            with without_replay():
                expected = BASE.results(BASE.make(each, seed))
            assert_same(BASE.results(BASE.make(each, seed)), expected)
    assert {program.device.index for program in programs()} == {0, 1}


def test_many_times(device: torch.device) -> None:
    with without_replay():
        expected = BASE.results(BASE.make(device))
    for _ in range(100):
        assert_same(BASE.results(BASE.make(device)), expected)
