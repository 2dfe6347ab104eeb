"""Distributed training waits for a gradient of every parameter, so there is one at every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from native_sparse_attention import SparseAttention
from tests.layer.test_compress import NETWORKS

DIM, HEADS, DIM_HEAD, BLOCK = 8, 2, 4, 4
Make = Callable[[int, int, int], nn.Module]
networks = pytest.mark.parametrize('make', [pytest.param(make, id=name) for name, make in NETWORKS.items()])


def make_layer(make: Make = NETWORKS['mlp'], **changes: Any) -> SparseAttention:
    settings = {
        'sliding_window_size': 3,
        'compress_block_size': BLOCK,
        'compress_block_sliding_stride': 2,
        'selection_block_size': 4,
        'num_selected_blocks': 5,
        'kv_heads': HEADS,
        'causal': True,
        'compress_mlp': make(HEADS, DIM_HEAD, BLOCK),
    }
    return SparseAttention(DIM, DIM_HEAD, 2 * HEADS, **settings | changes)


def every_gradient(layer: SparseAttention, x: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    layer(x, **inputs).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    found = {name: grad for name, grad in gradients.items() if grad is not None}
    assert found.keys() == gradients.keys()
    assert all(grad.isfinite().all() for grad in found.values())
    return found


@networks
@pytest.mark.parametrize('seqlen', [1, BLOCK - 1, BLOCK])
def test_every_parameter_has_a_gradient(make: Make, seqlen: int) -> None:
    """Networks φ have a gradient of 0 where there are no blocks."""
    gradients = every_gradient(make_layer(make, backend='eager'), torch.randn(2, seqlen, DIM))
    of_blocks = ('k_compress.', 'v_compress.', 'k_intrablock_positions', 'v_intrablock_positions')
    assert seqlen == BLOCK or not any(grad.any() for name, grad in gradients.items() if name.startswith(of_blocks))


@pytest.mark.full
@pytest.mark.parametrize('backend', ['eager', 'triton', pytest.param('flex', marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    'changes',
    [
        {'use_diff_topk': True},
        {'num_compressed_mem_kv': 0, 'independent_branch_kv': True},
        {'num_selected_blocks': 0, 'recompute': True},
        {'compress_block_sliding_stride': 4, 'causal': False},
        {'num_sinks': 1, 'softcap': 5.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize('seqlen', [1, BLOCK - 1])
def test_with_every_backend(backend: str, changes: dict[str, Any], seqlen: int, device: torch.device) -> None:
    if backend == 'flex' and 'num_sinks' in changes:
        pytest.skip('flex has no sinks')
    layer = make_layer(backend=backend, **changes).to(device)
    every_gradient(layer, torch.randn(1, seqlen, DIM, device=device))


def test_networks_of_another_device_without_a_block() -> None:
    """A call without gradients does not read weights that are offloaded until they are needed."""
    layer = make_layer(backend='eager')
    layer.k_compress.to('meta')
    with torch.no_grad():
        assert layer(torch.randn(1, BLOCK - 1, DIM)).isfinite().all()


def test_packed_sequences_without_a_block() -> None:
    for borders in ([0, 1, 3], [0, 3, 5, 8]):
        x = torch.randn(1, borders[-1], DIM)
        every_gradient(make_layer(backend='eager'), x, cu_seqlens=torch.tensor(borders, dtype=torch.int32))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures('one_process')
@networks
def test_steps_of_data_parallel_training(make: Make) -> None:
    """The second step is the first to notice a missing gradient, in one process as in several."""
    module = DistributedDataParallel(make_layer(make, backend='eager'))
    for seqlen in (1, BLOCK - 1, BLOCK, 1):
        module(torch.randn(2, seqlen, DIM)).sum().backward()


@pytest.mark.usefixtures('one_process')
def test_a_network_that_is_sharded_by_itself() -> None:
    """Without blocks the network is not called, and only a part of its weights is local."""
    fully_shard = pytest.importorskip('torch.distributed.fsdp').fully_shard
    layer = make_layer(backend='eager')
    for part in (layer.k_compress, layer.v_compress, layer):
        fully_shard(part, mesh=torch.distributed.init_device_mesh('cpu', (1,)))
    for seqlen in (1, BLOCK, BLOCK - 1):
        layer(torch.randn(2, seqlen, DIM)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)
        layer.zero_grad()
