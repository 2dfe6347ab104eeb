"""Context parallelism together with tensor parallelism and sharding: each equals one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import assert_near, gradients, joined, make_ids, make_model, recorded_blocks, whole

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_tp
from tests.distributed.test_context_parallel import assert_same_blocks, line


def train_with_other_parallelism() -> None:
    """Train on meshes of two dimensions, in the order of `docs/distributed.md`; one shard may be empty."""
    ids, rank, even = make_ids(2), dist.get_rank(), [range(16), range(16, 33)]
    by_tensor = init_device_mesh('cpu', (2, 2), mesh_dim_names=('context', 'tensor'))
    by_data = init_device_mesh('cpu', (2, 2), mesh_dim_names=('data', 'context'))
    for kind, shards, dtype in (
        ('separate', even, torch.float32),
        ('separate', even, torch.float64),
        ('merged', [range(33), range(33, 33)], torch.float64),
    ):
        one = make_model(kind).to(dtype)
        model = apply_cp(apply_tp(copy.deepcopy(one), by_tensor['tensor']), by_tensor['context'])
        apply_fsdp(model, by_tensor['context'])
        assert_trained_together(model, one, ids, shards, rank // 2)
        model = apply_cp(copy.deepcopy(one), by_data['context'])
        model.gradient_checkpointing_enable()
        for block in model.blocks:
            block.compile(backend='eager')
        apply_fsdp(model, by_data)
        assert_trained_together(model, one, ids, shards, rank % 2, slice(rank // 2, rank // 2 + 1))

    shard = [range(9), range(9, 10), range(10, 33), range(33, 33)][rank]
    model = DistributedDataParallel(apply_cp(copy.deepcopy(one), line()))
    model(ids[:, shard.start : shard.stop], return_loss=True).backward()
    one(ids, return_loss=True).backward()
    for name, wanted in gradients(one).items():
        assert_near(whole(model.module.get_parameter(name).grad), wanted, name)


def assert_trained_together(
    model: Transformer, one: Transformer, ids: Tensor, shards: list[range], rank: int, rows: slice = slice(None)
) -> None:
    """rank: among the context ranks. rows: of the data rank."""
    shard, layer = shards[rank], model.blocks[0].attention
    with recorded_blocks() as expected_blocks:
        one(ids, return_loss=True).backward()
    with recorded_blocks() as blocks:
        loss = model(ids[rows, shard.start : shard.stop], return_loss=True)
    loss.backward()
    expected_blocks = [b[rows].chunk(layer.head_ranks, 2)[layer.head_rank] for b in expected_blocks]
    assert_same_blocks(blocks, expected_blocks, shards, rank)
    assert_near(loss, one(ids[rows], return_loss=True), 'loss')
    found = joined(gradients(model))
    for name, wanted in gradients(one).items():
        assert_near(found[name], wanted, name)
    one.zero_grad()


@pytest.mark.full
def test_with_tensor_parallelism_and_sharding(tmp_path: Path) -> None:
    run_processes(train_with_other_parallelism, 4, tmp_path)
