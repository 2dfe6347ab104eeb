"""The loss of block scores and its kernels among the machinery of a GPU: graphs, repetition, compilation, long rows.

python -m pytest -m gpu tests/gpu/test_block_mass.py
python -m pytest -m gpu -n 15 tests/gpu/test_rules.py -k block_mass      the error rules, and every launch setting
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.ops.block_mass.triton import op
from native_sparse_attention.testing import make_qkv

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
SIZES: dict[str, Any] = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}


def make_loss(
    batch: int, seqlen: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return tensors and settings of the loss; the tensors of the scores require gradients."""
    generator = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {'heads': 8, 'kv_heads': 4, 'head_dim': head_dim, 'dtype': dtype, 'device': device}
    q, k, _ = make_qkv(batch, seqlen, seqlen, **shape, generator=generator)
    q_cmp, k_cmp, _ = make_qkv(batch, seqlen, (seqlen - 32) // 16 + 1, **shape, generator=generator)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    settings = {'window_size': (127, 0), 'num_queries': 64, 'seed': seed, **SIZES}
    return [q, k, q_cmp.requires_grad_(), k_cmp.requires_grad_()], settings


def run(tensors: list[Tensor], settings: dict[str, Any], backend: str = BACKEND) -> list[Tensor]:
    """Return the loss and the gradients of the scores."""
    loss = block_score_loss(*tensors, **settings, backend=backend)
    return [loss.detach(), *torch.autograd.grad(loss, tensors[2:])]


def packed(device: torch.device, *borders: int) -> dict[str, Any]:
    return {'cu_seqlens': torch.tensor(borders, dtype=torch.int32, device=device)}


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('is_packed', [False, True])
def test_loss_of_the_kernels(is_packed: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The loss in float32, and gradients of half types that differ by their last rounding alone."""
    tensors, settings = make_loss(1 if is_packed else 2, 2000, device, dtype)
    if is_packed:
        number = (1000 - 32) // 16 + 1 + (900 - 32) // 16 + 1
        tensors[3] = tensors[3].detach()[:, :number].requires_grad_()
        settings |= packed(device, 0, 1000, 1000, 1900)
    results = [run(tensors, settings, backend) for backend in (BACKEND, 'eager')]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for grad, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert (grad.double() - expected.double()).norm() <= 2**-8 * expected.double().norm()


@pytest.mark.parametrize('is_packed', [False, True])
def test_repeated_runs_give_the_same_bits(is_packed: bool, device: torch.device) -> None:
    tensors, settings = make_loss(1 if is_packed else 4, 8000, device)
    settings |= packed(device, 0, 3000, 8000) if is_packed else {}
    if is_packed:
        number = (3000 - 32) // 16 + 1 + (5000 - 32) // 16 + 1
        tensors[3] = tensors[3].detach()[:, :number].requires_grad_()
    expected = run(tensors, settings)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(200):
        for result, first in zip(run(tensors, settings), expected, strict=True):
            differs |= (result != first).any()
    assert all(t.isfinite().all() for t in expected)
    assert not differs


def test_no_synchronisation(device: torch.device) -> None:
    tensors, settings = make_loss(2, 2000, device)
    run(tensors, settings)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        run(tensors, settings)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_a_graph_replays_with_other_tensors_and_seeds(device: torch.device) -> None:
    tensors, settings = make_loss(2, 2000, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(tensors, settings)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, settings)
    losses = []
    for seed in range(3):
        settings['seed'].fill_(seed)
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for result, expected in zip(captured, run(tensors, settings), strict=True):
            assert harness.same_bits(result, expected)
        losses.append(float(captured[0]))
    assert len(set(losses)) == 3


@pytest.mark.parametrize('head_dim', [64, 100, 128])
def test_long_rows(head_dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last queries of 100,000 tokens, in several passes."""
    monkeypatch.setattr(op, 'WORKSPACE', 2**20)
    generator = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {'heads': 12, 'kv_heads': 4, 'head_dim': head_dim, 'dtype': torch.bfloat16}
    q, k, _ = make_qkv(2, 40, 100_000, **shape, device=device, generator=generator)
    settings: dict[str, Any] = {'block_size': 64, 'window_size': (1023, 0)}
    with harness.poisoned_allocations():
        mass = block_mass(q, k, **settings, backend=BACKEND)
    gold = block_mass(q.double(), k.double(), **settings, backend='eager')
    torch.testing.assert_close(mass.double(), gold, rtol=1e-3, atol=1e-7)
    assert (mass.double() - gold).norm() <= 1e-5 * gold.norm()
    assert harness.same_bits(block_mass(q, k, **settings, backend=BACKEND), mass)


def make_layer(backend: str, device: torch.device) -> SparseAttention:
    torch.manual_seed(0)
    settings: dict[str, Any] = {'kv_heads': 4, 'causal': True, 'use_diff_topk': True, 'merge_window': True}
    return SparseAttention(128, 32, 8, 64, 32, 16, 64, 4, **settings, backend=backend).to(device)


def train_step(layer: SparseAttention, function: Any, seqlen: int, device: torch.device, amp: bool) -> list[Tensor]:
    """Outputs and gradients. Lengths are those of which every query is drawn, so that two calls draw the same.

    A constant that is added to all compressed keys changes no score: the gradient of such a bias is rounding alone.
    """
    assert seqlen <= 512
    generator = torch.Generator(device).manual_seed(seqlen)
    x = torch.randn(2, seqlen, 128, device=device, generator=generator, requires_grad=True)
    layer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        out, loss = function(x, return_block_loss=True)
    (out.float().square().mean() + loss).backward()
    assert x.grad is not None
    parameters = [p for name, p in layer.named_parameters() if name != 'k_compress.to_out.bias']
    return [out.detach(), loss.detach(), x.grad, *(p.grad.clone() for p in parameters if p.grad is not None)]


def assert_near(result: list[Tensor], expected: list[Tensor], limit: float) -> None:
    assert len(result) == len(expected)
    for tensor, other in zip(result, expected, strict=True):
        error = (tensor.double() - other.double()).norm() / other.double().norm().clamp(min=1e-6)
        assert error < limit, (tuple(other.shape), float(error))


@pytest.mark.parametrize('amp', [False, True], ids=['float32', 'autocast'])
def test_layer_trains_as_with_eager(amp: bool, device: torch.device) -> None:
    layers = [make_layer(backend, device) for backend in (BACKEND, 'eager')]
    for seqlen in (300, 500):
        result, expected = (train_step(layer, layer, seqlen, device, amp) for layer in layers)
        assert result[1] > 0
        assert_near(result, expected, 0.03 if amp else 1e-4)


@pytest.mark.parametrize('amp', [False, True], ids=['float32', 'autocast'])
def test_compiled_layer(amp: bool, device: torch.device) -> None:
    """Forward and backward compile into one graph."""
    torch._dynamo.reset()
    layer = make_layer(BACKEND, device)
    compiled = torch.compile(layer, fullgraph=True)
    for seqlen in (500, 333):
        result = train_step(layer, compiled, seqlen, device, amp)
        assert_near(result, train_step(layer, layer, seqlen, device, amp), 0.02 if amp else 1e-4)
