"""The kernels of the divergence of block scores on a GPU: eager, graphs, repetition, sizes, the trained layer.

python -m pytest -m gpu tests/gpu/test_block_divergence.py tests/gpu/test_block_mass.py
python -m pytest -m gpu -n 15 tests/gpu/test_rules.py -k 'block_loss or block_divergence'      the error rules, settings
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from native_sparse_attention import losses
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops.block_divergence.triton import op
from native_sparse_attention.testing import assert_matches, make_qkv
from tests.gpu.test_block_mass import make_layer, train_step

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'


def make_problem(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int = 2,
    seqlen: int = 2000,
    heads: tuple[int, int] = (8, 4),
    head_dim: int = 64,
    sizes: tuple[int, int, int] = (32, 16, 64),
    **changes: Any,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the tensors of the loss and its settings. Only those of the scores are differentiated."""
    generator = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {'heads': heads[0], 'kv_heads': heads[1], 'head_dim': head_dim, 'dtype': dtype}
    q, k, _ = make_qkv(batch, seqlen, seqlen, **shape, device=device, generator=generator)
    num_compressed = (seqlen - sizes[0]) // sizes[1] + 1
    q_cmp, k_cmp, _ = make_qkv(batch, seqlen, num_compressed, **shape, device=device, generator=generator)
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    settings = {'window_size': (127, 0), 'num_queries': 64, 'seed': seed, **dict(zip(names, sizes, strict=True))}
    return [q, k, q_cmp.requires_grad_(), k_cmp.requires_grad_()], settings | changes


def run(tensors: list[Tensor], settings: dict[str, Any], backend: str = BACKEND) -> list[Tensor]:
    """Return 256 times the loss, so that float16 gradients have enough digits, and the gradients of the scores."""
    loss = 256 * block_score_loss(*tensors, **settings, backend=backend)
    return [loss.detach(), *torch.autograd.grad(loss, tensors[2:])]


def run_beside_mass(tensors: list[Tensor], settings: dict[str, Any]) -> list[Tensor]:
    """Return the same with the divergence in eager beside the kernels of the mass."""
    diverge = losses.block_divergence

    def in_eager(*arguments: Any) -> Tensor:
        *others, _ = arguments
        return diverge(*others, backend='eager')

    with mock.patch.object(losses, 'block_divergence', in_eager):
        return run(tensors, settings)


def assert_obeys_the_rules(tensors: list[Tensor], settings: dict[str, Any]) -> list[Tensor]:
    with harness.poisoned_allocations():
        found = run(tensors, settings)
    same_dtype = run(tensors, settings, 'eager')
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    gold = run(wide, settings, 'eager')
    names = ('loss', 'grad of q_cmp', 'grad of k_cmp')
    for name, result, expected, reference in zip(names, found, gold, same_dtype, strict=True):
        assert_matches(result, expected, reference, name=name, row_dims=min(1, result.dim()))
    return found


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'sizes': (16, 8, 16), 'heads': (16, 1)},
        {'sizes': (8, 4, 8), 'heads': (6, 2), 'share_group': False},
        {'sizes': (4, 4, 8), 'heads': (4, 4), 'softcap': 2.0},
        {'sizes': (6, 2, 2), 'head_dim': 96, 'seqlen': 700},
        {'head_dim': 16, 'causal': False, 'window_size': (60, 60)},
        {'head_dim': 128, 'window_size': None, 'heads': (64, 4), 'seqlen': 5000},
        {'head_dim': 256, 'heads': (4, 2), 'num_queries': 512},
        {'batch': 1, 'seqlen': 200_000, 'num_queries': 100},
    ],
)
def test_rules(changes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    if changes.get('seqlen', 0) == 200_000 and dtype == torch.float32:
        changes = {**changes, 'seqlen': 50_000}
    found = assert_obeys_the_rules(*make_problem(device, dtype, **changes))
    assert found[0] > 0


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_packed(dtype: torch.dtype, device: torch.device) -> None:
    """Sequences of any length, with NaN behind them and rows without candidates."""
    lengths = (1000, 0, 31, 33, 700, 100)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    tensors, settings = make_problem(device, dtype, batch=1, cu_seqlens=cu_seqlens, num_queries=500)
    number = sum(max(0, (length - 32) // 16 + 1) for length in lengths)
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[:, sum(lengths) :] = torch.nan
        tensors[3][:, number:] = torch.nan
    found = assert_obeys_the_rules(tensors, settings)
    assert all(t.isfinite().all() for t in found)


def test_the_divergence_alone(device: torch.device) -> None:
    """The divergence with the mass of the same kernels, in float32."""
    tensors, settings = make_problem(device, torch.float32, seqlen=8000, num_queries=512)
    for result, expected in zip(run(tensors, settings), run_beside_mass(tensors, settings), strict=True):
        assert (result - expected).norm() <= 1e-5 * expected.norm()


def test_several_passes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, settings = make_problem(device, seqlen=8000, num_queries=512)
    expected = run(tensors, settings)
    monkeypatch.setattr(op, 'WORKSPACE', 2**20)
    for result, other in zip(run(tensors, settings), expected, strict=True):
        assert harness.same_bits(result, other)


def test_repeated_runs_give_the_same_bits(device: torch.device) -> None:
    tensors, settings = make_problem(device, batch=4, seqlen=16_384, num_queries=512)
    expected = run(tensors, settings)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(200):
        for result, first in zip(run(tensors, settings), expected, strict=True):
            differs |= (result != first).any()
    assert all(t.isfinite().all() for t in expected)
    assert not differs


def test_no_synchronisation(device: torch.device) -> None:
    tensors, settings = make_problem(device)
    run(tensors, settings)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        run(tensors, settings)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_a_graph_replays_with_other_tensors_and_seeds(device: torch.device) -> None:
    tensors, settings = make_problem(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(tensors, settings)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, settings)
    for seed in range(3):
        settings['seed'].fill_(seed)
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for result, expected in zip(captured, run(tensors, settings), strict=True):
            assert harness.same_bits(result, expected)


@pytest.mark.parametrize('amp', [False, True], ids=['float32', 'autocast'])
def test_layer_compiles_in_one_graph(amp: bool, device: torch.device) -> None:
    """The loss in a compiled layer equals that of the layer in eager."""
    torch._dynamo.reset()
    layer, eager = make_layer(BACKEND, device), make_layer('eager', device)
    compiled = torch.compile(layer, fullgraph=True)
    for seqlen in (500, 333):
        result = train_step(layer, compiled, seqlen, device, amp)
        expected = train_step(eager, eager, seqlen, device, amp)
        for tensor, other in zip(result, expected, strict=True):
            error = (tensor.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6)
            assert error < (0.03 if amp else 1e-4), (tuple(other.shape), float(error))
