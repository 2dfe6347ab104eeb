"""Several GPUs over NCCL: sharded and divided models have the results of one GPU.

python -m pytest -m gpu tests/gpu/test_distributed.py
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train_enwik8
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import gradients, joined, recorded_blocks
from tests.support.training_runs import command, rows, write_words

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_pp, apply_tp, next_token_loss

pytestmark = pytest.mark.gpu
SPARSE: dict[str, Any] = {
    'sliding_window_size': 64,
    'compress_block_size': 16,
    'compress_block_sliding_stride': 8,
    'selection_block_size': 16,
    'num_selected_blocks': 4,
    'use_diff_topk': True,
}
SEQLEN = 1023
# Relative to the norm of a gradient, or to the loss. A unit of φ whose ReLU is at 0 up to rounding changes gradients by
# 1e-3.
SETTINGS = [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]  # merged, dtype
LIMIT = {torch.float32: 5e-3, torch.bfloat16: 5e-2}


def make_model(device: str, merged: bool, depth: int = 2) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(
        64,
        dim=128,
        depth=depth,
        dim_head=64,
        heads=8,
        kv_heads=4,
        use_sparse_attn=True,
        sparse_attn_kwargs={**SPARSE, 'merge_window': merged, 'qk_norm': merged},
    )
    return model.to(device)


def train(kind: str, merged: bool, dtype: torch.dtype, device: str) -> None:
    """kind: 'fsdp', 'tp', 'tp sequence', 'cp' or 'pp', or two of them, of two ranks each: 'fsdp x cp' or 'cp x tp'."""
    rank, ranks = int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])
    if device == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group('nccl' if device == 'cuda' else 'gloo')
    flat = init_device_mesh(device, (ranks,))
    depth = 2 * ranks if kind == 'pp' else 2
    one, setting = make_model(device, merged, depth), f'{kind}, merged {merged}, {dtype}'
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (ranks, SEQLEN), generator=generator).to(device)
    model, mine, stage = copy.deepcopy(one), (slice(None), slice(None)), None
    if kind in ('tp', 'tp sequence'):
        apply_tp(model, flat, sequence_parallel=kind == 'tp sequence')
    elif kind == 'pp':
        stage = apply_pp(model, flat)
        model.forward = autocast(device, dtype)(model.forward)  # the schedule runs forward and backward
    elif kind == 'cp':
        apply_fsdp(apply_cp(model, flat), flat)
        mine = (slice(None), shard_of(rank, ranks))
    elif kind == 'fsdp x cp':
        mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=('data', 'context'))
        apply_fsdp(apply_cp(model, mesh['context']), mesh)
        mine = (slice(rank // 2 * 2, rank // 2 * 2 + 2), shard_of(rank % 2, 2))
    elif kind == 'cp x tp':
        mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=('context', 'tensor'))
        apply_cp(apply_tp(model, mesh['tensor']), mesh['context'])
        apply_fsdp(model, mesh['context'])
        mine = (slice(None), shard_of(rank // (ranks // 2), 2))
    else:
        apply_fsdp(model, flat)
        mine = (slice(rank, rank + 1), slice(None))
    with recorded_blocks() as expected_blocks:
        expected = loss_of(one, ids, device, dtype)
    expected.backward()
    with recorded_blocks() as blocks:
        loss = loss_of(model, ids[mine], device, dtype) if stage is None else step_of(stage, ids)
    if stage is None:
        loss.backward()
    else:  # PyTorch runs a stage once more before the micro-batches, and runs the last token, which the loss omits
        expected_blocks = expected_blocks[2 * rank : 2 * rank + 2]
        blocks = [torch.cat(blocks[-2 * ranks :][layer::2])[:, : SEQLEN - 1] for layer in range(2)]
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert_near(total / ranks, expected, dtype, f'{setting}: loss')
    if 'cp' not in kind and dtype == torch.float32:
        per_rank = expected_blocks[0].shape[2] // ranks
        heads = slice(rank * per_rank, (rank + 1) * per_rank) if kind.startswith('tp') else slice(None)
        share = [torch.equal(a, b[mine][:, :, heads]) for a, b in zip(blocks, expected_blocks, strict=True)]
        assert all(share), f'{setting}: another block is selected'
    found, wanted = joined(gradients(model)), gradients(one)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name in found if kind == 'pp' else wanted:
        assert_near(found[name], wanted[name], dtype, f'{setting}: {name}', largest)
    dist.destroy_process_group()


def shard_of(rank: int, ranks: int) -> slice:
    return slice(SEQLEN * rank // ranks, SEQLEN * (rank + 1) // ranks)


def autocast(device: str, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


def loss_of(model: Transformer, ids: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    with autocast(device, dtype):
        return model(ids, return_loss=True)


def step_of(stage: Any, ids: Tensor) -> Tensor:
    """Run forward and backward with one row per micro-batch. The mean over the stages of the results is the loss."""
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, len(ids), loss_fn=next_token_loss)
    schedule.step(*[ids] * stage.is_first, target=ids if stage.is_last else None, losses=losses)
    return torch.stack(losses).mean() * len(ids) if stage.is_last else torch.zeros((), device=ids.device)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str, largest: float = 0.0) -> None:
    """In half types a block that is selected otherwise changes single elements, so norms are compared.

    largest: norm of the largest gradient; rounding in a gradient that is 0 but for rounding is relative to it.
    """
    difference, size = (found - expected).float().norm(), expected.float().norm()
    assert difference <= LIMIT[dtype] * max(size, 0.01 * largest), f'{name}: relative error {difference / size:.2g}'


@pytest.mark.parametrize('kind', ['fsdp', 'tp', 'tp sequence', 'cp', 'pp', 'fsdp x cp', 'cp x tp'])
def test_equals_one_gpu(kind: str, tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < (needed := 4 if ' x ' in kind else 2):
        pytest.skip(f'fewer than {needed} GPUs')
    ranks -= ranks % 2  # ranks divide the KV heads

    def run(merged: bool, dtype: torch.dtype) -> None:
        (folder := tmp_path / f'merged-{merged}-{dtype}').mkdir()
        run_processes(train, ranks, folder, kind, merged, dtype, 'cuda', joins=False, time_limit=240)

    # Compilation takes most of the time, so the settings run side by side.
    with ThreadPoolExecutor(len(SETTINGS)) as pool:
        list(pool.map(run, *zip(*SETTINGS, strict=True)))


def decode(merged: bool, sequence_parallel: bool) -> None:
    """Compare decoding after apply_tp, with and without a CUDA graph, with one GPU."""
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    dist.init_process_group('nccl')
    compare_decoding(merged, sequence_parallel)  # the graphs are gone before the process leaves the group
    dist.destroy_process_group()


def compare_decoding(merged: bool, sequence_parallel: bool) -> None:
    one = make_model('cuda', merged).eval()
    mesh = init_device_mesh('cuda', (dist.get_world_size(),))
    model = apply_tp(copy.deepcopy(one), mesh, sequence_parallel=sequence_parallel)
    ids = torch.randint(64, (2, 160), generator=torch.Generator().manual_seed(1)).cuda()
    expected = one.generate(ids[:, :100], 24, temperature=0)
    for use_graph in (True, False):
        assert torch.equal(model.generate(ids[:, :100], 24, temperature=0, use_graph=use_graph), expected), use_graph
    caches = [each.init_cache(2, 160) for each in (one, model, model)]
    for each, cache in zip((one, model, model), caches, strict=True):
        each.prefill(ids[:, :100], cache)
    steps = [
        DecodeStep(each, cache, use_graph=use_graph)
        for each, cache, use_graph in zip((one, model, model), caches, (False, True, False), strict=True)
    ]
    for t in range(100, 160):
        if t == 130:  # the graph is captured anew
            model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
        wanted, replayed, launched = (step(ids[:, t : t + 1]) for step in steps)
        assert_near(replayed, wanted, torch.float32, f'merged {merged}: logits of token {t}')
        assert_near(replayed, launched, torch.float32, f'merged {merged}: logits of token {t} with a graph')
    assert steps[1]._graph is not None


@pytest.mark.parametrize(('merged', 'sequence_parallel'), [(False, False), (True, False), (True, True)])
def test_decoding_of_a_divided_model(merged: bool, sequence_parallel: bool, tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip('one GPU')
    run_processes(decode, ranks - ranks % 2, tmp_path, merged, sequence_parallel, joins=False, time_limit=240)


def call_trainer(flags: list[str]) -> None:
    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    with contextlib.redirect_stdout(io.StringIO()):
        assert train_enwik8.main(flags) == 0


def test_captured_steps(tmp_path: Path) -> None:
    """A run of sharded data, with validation and samples, is the same with its steps as a CUDA graph, and it ends."""
    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU')
    text, losses = write_words(tmp_path), []
    for name, flag in (('captured', '--graph'), ('whole', '--no-graph')):
        flags = command(text, tmp_path, flag, '--device', 'cuda', '--dp', '2', '--name', name, dim_head=16, log_every=1)
        (folder := tmp_path / f'{name}-processes').mkdir()
        run_processes(call_trainer, 2, folder, flags, joins=False, time_limit=240)
        losses.append([row['bpb'] for row in rows(tmp_path / name) if 'bpb' in row])
    assert len(losses[0]) > 12
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2, atol=0)
