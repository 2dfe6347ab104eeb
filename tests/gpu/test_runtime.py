"""Kernels with the runtime of a GPU: devices, graphs, synchronisation, determinism, registration, compilation.

python -m pytest -m gpu -n 8 tests/gpu/test_runtime.py
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention import SparseAttention, nsa
from native_sparse_attention.core.geometry import num_compressed_blocks
from tests.support.gpu_problems import make_nsa

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
ROOT = Path(__file__).parents[2]


def environment_here() -> dict[str, str]:
    """Return the environment of another process that imports the same package."""
    return os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def integers(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def run(tensors: dict[str, Tensor], settings: dict[str, Any], backend: str = BACKEND) -> dict[str, Tensor]:
    """Return output and gradients of `nsa`."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = nsa(**leaves, **settings, backend=backend)
    generator = torch.Generator(out.device).manual_seed(5)
    dout = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {'out': out.detach(), **dict(zip(leaves, grads, strict=True))}


def packed_settings(lengths: list[int], total: int, device: torch.device) -> dict[str, Any]:
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    assert borders[-1] <= total
    return {'cu_seqlens': integers(*borders, device=device)}


def variants(batch: int, seqlen: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return settings that take different paths through the ops, with values on the device."""
    rows = {
        'seqlens_k': integers(*(seqlen - 7 * row for row in range(batch)), device=device),
        'q_offset': integers(*(-3 * row for row in range(batch)), device=device),
    }
    return {
        'plain': {},
        'scores': {'use_diff_topk': True},
        'heads alone': {'share_group': False, 'use_diff_topk': True},
        'not causal': {'causal': False, 'window_size': (30, 20)},
        'rows': rows | {'use_diff_topk': True},
    }


VARIANTS = ('plain', 'scores', 'heads alone', 'not causal', 'rows')


@pytest.mark.parametrize('variant', VARIANTS)
def test_no_synchronisation(variant: str, device: torch.device):
    """Neither forward nor backward waits for the GPU."""
    tensors, settings = make_nsa(2, 500, device=device)
    settings |= variants(2, 500, device)[variant]
    run(tensors, settings)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        run(tensors, settings)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_no_synchronisation_of_packed_sequences(device: torch.device):
    tensors, settings = make_nsa(1, 500, device=device)
    settings |= packed_settings([0, 200, 31, 250], 500, device)
    run(tensors, settings)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        run(tensors, settings)
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('repeats', [20, 1000])
@pytest.mark.parametrize('variant', VARIANTS)
def test_repeated_runs_give_the_same_bits(variant: str, repeats: int, device: torch.device):
    """Many programs at once, and a small case a thousand times."""
    batch, seqlen = (2, 4000) if repeats == 20 else (2, 300)
    tensors, settings = make_nsa(batch, seqlen, heads=16, device=device)
    settings |= variants(batch, seqlen, device)[variant]
    expected = run(tensors, settings)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(repeats):
        result = run(tensors, settings)
        for name, tensor in result.items():
            differs |= (tensor != expected[name]).any()  # nothing here is NaN
    assert not any(t.isnan().any() for t in expected.values())
    assert not differs


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_row_does_not_depend_on_its_neighbours(variant: str, device: torch.device):
    """A row alone has the bits of the row in a batch, outputs and gradients."""
    tensors, settings = make_nsa(3, 700, device=device)
    settings |= variants(3, 700, device)[variant]
    generator = torch.Generator(device).manual_seed(5)
    dout = torch.randn(3, 700, 8, 64, dtype=torch.bfloat16, device=device, generator=generator)

    def gradients(rows: slice) -> list[Tensor]:
        leaves = {name: t[rows].detach().requires_grad_() for name, t in tensors.items()}
        where: dict[str, Any] = {n: t[rows] if isinstance(t, Tensor) else t for n, t in settings.items()}
        out = nsa(**leaves, **where, backend=BACKEND)
        return [out, *torch.autograd.grad(out, list(leaves.values()), dout[rows])]

    together = gradients(slice(None))
    for row in range(3):
        alone = gradients(slice(row, row + 1))
        for name, all_rows, own in zip(('out', *tensors), together, alone, strict=True):
            same = harness.same_bits(all_rows[row : row + 1], own)
            assert same, f'row {row}: {name}'


HASH = f"""
import sys, torch
from {__name__} import digest, make_nsa, run, variants
device = torch.device(sys.argv[1])
for name, changes in variants(2, 900, device).items():
    tensors, settings = make_nsa(2, 900, device=device)
    print(name, digest(run(tensors, settings | changes, sys.argv[2])))
"""


def digest(results: dict[str, Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in results.values():
        whole.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest()


def test_processes_give_the_same_bits(device: torch.device, tmp_path: Path):
    """A process that compiles every kernel, a process that finds them compiled, and another order of calls."""
    environment = environment_here() | {'TRITON_CACHE_DIR': str(tmp_path)}
    command = [sys.executable, '-c', HASH, device.type, BACKEND]
    outputs = [
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    names = list(variants(2, 900, device))
    assert [line.rsplit(' ', 1)[0] for line in outputs[0].splitlines()] == names
    digests = dict(line.rsplit(' ', 1) for line in outputs[0].splitlines())
    for name in reversed(names):
        tensors, settings = make_nsa(2, 900, device=device)
        assert digest(run(tensors, settings | variants(2, 900, device)[name])) == digests[name], name


@contextmanager
def captured(function: Any) -> Iterator[tuple[torch.cuda.CUDAGraph, Tensor]]:
    """Return a CUDA graph of function() and the output that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    yield graph, out


@pytest.mark.parametrize('seqlen_q', [1, 64, 600])
@torch.no_grad()
def test_graph_replays_with_other_lengths(seqlen_q: int, device: torch.device):
    """A captured forward, replayed with other data and other `seqlens_k`, equals a call."""
    seqlen = 600
    tensors, settings = make_nsa(2, seqlen, device=device)
    for name in ('q', 'gates'):
        tensors[name] = tensors[name][:, :seqlen_q].contiguous()
    lengths = integers(seqlen, seqlen - 100, device=device)
    settings |= {'seqlens_k': lengths}
    with captured(lambda: nsa(**tensors, **settings, backend=BACKEND)) as (graph, out):
        for seed, values in ((0, (seqlen, 500)), (1, (610 - seqlen_q, 3)), (2, (0, seqlen)), (3, (1, 64))):
            other, _ = make_nsa(2, seqlen, device=device, seed=seed)
            for name, tensor in tensors.items():
                tensor.copy_(other[name][:, : tensor.shape[1]])
            lengths.copy_(torch.tensor(values).clamp(0, seqlen))
            out.fill_(torch.nan)
            graph.replay()
            expected = nsa(**tensors, **settings, backend=BACKEND)
            same = harness.same_bits(out, expected)
            assert same, values
            assert out.isfinite().all()


@torch.no_grad()
def test_graph_replays_with_other_packings(device: torch.device):
    tensors, settings = make_nsa(1, 600, device=device)
    settings |= packed_settings([100, 200, 0, 300], 600, device)
    with captured(lambda: nsa(**tensors, **settings, backend=BACKEND)) as (graph, out):
        for lengths in ([100, 200, 0, 300], [0, 0, 0, 600], [600, 0, 0, 0], [31, 32, 33, 100], [150] * 4):
            settings['cu_seqlens'].copy_(packed_settings(lengths, 600, device)['cu_seqlens'])
            out.fill_(torch.nan)
            graph.replay()
            same = harness.same_bits(out, nsa(**tensors, **settings, backend=BACKEND))
            assert same, lengths
            assert out.isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
@pytest.mark.parametrize('variant', VARIANTS)
def test_another_gpu_than_the_current_one(variant: str):
    results = []
    for index in range(2):
        device = torch.device('cuda', index)
        tensors, settings = make_nsa(2, 500, device='cuda:0')
        tensors = {name: t.to(device) for name, t in tensors.items()}
        settings |= variants(2, 500, device)[variant]
        assert torch.cuda.current_device() == 0
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        out = nsa(**leaves, **settings, backend=BACKEND)
        out.float().square().sum().backward()
        assert out.device == device
        results.append([out.detach().cpu(), *(t.grad.cpu() for t in leaves.values() if t.grad is not None)])
    for first, second in zip(*results, strict=True):
        same = harness.same_bits(first, second)
        assert same


class Calls(TorchDispatchMode):
    """Record the first call of each registered op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == 'native_sparse_attention':
            self.calls.setdefault(func.name(), (func, args))
        return func(*args, **(kwargs or {}))


def test_registered_ops(device: torch.device):
    """Every op of the composition, forward and backward, passes torch's own check of its registration."""
    tensors, settings = make_nsa(1, 100, dtype=torch.float32, head_dim=16, device=device)
    with Calls() as recorded:
        run(tensors, settings | {'use_diff_topk': True})
    names = {name.split('::')[1].split('.')[0] for name in recorded.calls}
    assert len(names) >= 9, names
    for name, (op, args) in recorded.calls.items():
        forward = 'backward' not in name
        leaves = [
            t.detach().clone().requires_grad_(forward and t.is_floating_point()) if isinstance(t, Tensor) else t
            for t in args
        ]
        if 'select' in name and 'attention' not in name:  # block selection has no gradient
            leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
        utils = ['test_schema', 'test_faketensor', *(['test_autograd_registration'] if forward else [])]
        torch.library.opcheck(op, tuple(leaves), test_utils=utils)


def make_layer(backend: str, device: torch.device, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {'kv_heads': 4, 'causal': True, 'use_diff_topk': True, 'backend': backend}
    return SparseAttention(128, 32, 8, 64, 32, 16, 64, 4, **settings | changes).to(device)


def train_step(layer: Any, function: Any, seqlen: int, device: torch.device, amp: bool) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seqlen)
    x = torch.randn(2, seqlen, 128, device=device, generator=generator, requires_grad=True)
    layer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        out = function(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def assert_near(result: list[Tensor], expected: list[Tensor], limit: float) -> None:
    assert len(result) == len(expected)
    for tensor, other in zip(result, expected, strict=True):
        error = (tensor.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6)
        assert error < limit, (tuple(other.shape), float(error))


@pytest.mark.parametrize('amp', [False, True], ids=['float32', 'autocast'])
def test_layer_trains_as_with_eager(amp: bool, device: torch.device):
    layers = [make_layer(backend, device) for backend in (BACKEND, 'eager')]
    for seqlen in (1, 40, 500):
        result, expected = (train_step(layer, layer, seqlen, device, amp) for layer in layers)
        assert_near(result, expected, 0.03 if amp else 1e-4)


@pytest.mark.parametrize('amp', [False, True], ids=['float32', 'autocast'])
def test_compiled_layer(amp: bool, device: torch.device):
    """Forward and backward compile into one graph, without a new compilation per length."""
    torch._dynamo.reset()
    layer = make_layer(BACKEND, device)
    compiled = torch.compile(layer, fullgraph=True)
    graphs = []
    for seqlen in (500, 333, 700, 650, 411):
        result = train_step(layer, compiled, seqlen, device, amp)
        assert_near(result, train_step(layer, layer, seqlen, device, amp), 0.02 if amp else 1e-4)
        graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    assert graphs[-1] == graphs[2], graphs


BUILT = f"""
import sys, torch, triton
from {__name__} import make_layer
from native_sparse_attention import build_kernels
layer = make_layer(sys.argv[2], torch.device(sys.argv[1]))
x = torch.randn(2, 500, 128, device=sys.argv[1])
assert build_kernels(layer, x) > 10
assert all(p.grad is None for p in layer.parameters())
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found)
layer(x).square().mean().backward()
assert not compiled, len(compiled)
assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
print('done')
"""


FRESH = f"""
import sys, torch
from {__name__} import assert_near, make_layer, train_step
device = torch.device(sys.argv[1])
layer = make_layer(sys.argv[2], device)
compiled = train_step(layer, torch.compile(layer, fullgraph=True, dynamic=True), 500, device, False)
assert_near(compiled, train_step(layer, layer, 500, device, False), 1e-4)
print('done')
"""


@pytest.mark.parametrize('code', [BUILT, FRESH], ids=['build_kernels', 'torch.compile'])
def test_first_call_of_a_process(code: str, device: torch.device):
    """In a process of its own, `build_kernels` leaves nothing to compile, and compilation of a layer works."""
    command = [sys.executable, '-c', code, device.type, BACKEND]
    environment = environment_here()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith('done\n'), done.stderr


def test_compressed_lengths_are_those_of_the_composition():
    """The number of compressed keys that these tests make for S tokens is the number that the ops count."""
    tensors, settings = make_nsa(1, 77, device='cpu', sizes=(8, 4, 16, 4, 9))
    sizes = settings['compress_block_size'], settings['compress_stride']
    assert tensors['k_cmp'].shape[1] == num_compressed_blocks(77, *sizes)
