"""Steps of training that `benchmarks.distributed` measures, in each process of a group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from benchmarks import timing, training_speed
from benchmarks.distributed_cases import REFERENCE, num_rows
from benchmarks.runner import Call, Case, Method
from benchmarks.shapes import RHO, SHAPES, TENSORS, make_settings, make_tensors
from native_sparse_attention import nsa
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_tp, context_parallel_nsa
from native_sparse_attention.nn.compress.apply import compress_tokens
from native_sparse_attention.transformer import Transformer
from trainer.ranks import ONE_PROCESS, Ranks

# Measured steps, fewer if they take longer than SECONDS together.
REPEATS, FEWEST_REPEATS, SECONDS = 5, 2, 4.0
LEARNING_RATE = 3e-5
COMPARED_TOKENS = 64  # of a row, whose losses are compared
# Factor of the output projection of attention at the start. At 1 attention adds so little that shards which see only
# themselves change losses of tokens by 1e-3, not much more than bfloat16 does; at 4 by 3e-2 (float32, six layers,
# 4,096 tokens), and bfloat16 by 7e-4.
ATTENTION_SCALE = 4.0
TOP_KERNELS = 12  # beside those of NCCL


@dataclass
class Process:
    """One process of the benchmark, and the name of the group that it has joined last."""

    joined: str = ''

    def method(self, case: Case) -> Method:
        measure = measure_profile if case.get('profile') else measure_step
        return Method(self.make_call, seconds=0, measure=measure)

    def make_call(self, case: Case) -> tuple[Call, list[Tensor]]:
        """Return one step of the case. Processes that the case does not need only leave their group."""
        if case['device'] == 'cuda':
            torch.cuda.set_device(case['gpu'])
        if case['group'] != self.joined:
            self.leave()
            if case['rank'] < case['gpus']:
                backend = 'gloo' if case['device'] == 'cpu' else 'cpu:gloo,cuda:nccl'
                file = f'file://{case["group"]}'
                dist.init_process_group(backend, file, rank=case['rank'], world_size=case['gpus'])
            self.joined = case['group']
        if case['rank'] >= case['gpus']:
            return Call(lambda: torch.empty(0)), []
        step, facts = STEPS[case['step']](case)
        return Call(step, facts), []

    def leave(self) -> None:
        gc.collect()  # a group with a CUDA graph cannot be left
        if dist.is_initialized():
            dist.destroy_process_group()


Step = tuple[Callable[[], Tensor], Callable[[], Case]]


def attention(case: Case) -> Step:
    """Return forward and backward of `nsa` on one GPU, of `context_parallel_nsa` on several."""
    rank, gpus = case['rank'], case['gpus']
    shape = replace(SHAPES[case['shape']], seqlen=case['tokens'])
    names = [name for name in TENSORS if not name.endswith('_cmp')]
    mine = slice(shape.seqlen * rank // gpus, shape.seqlen * (rank + 1) // gpus)
    leaves = {
        name: make_tensors(shape, case['device'], [name], RHO)[name][:, mine].clone().requires_grad_() for name in names
    }
    settings, network = make_settings(shape, case['device']), MeanPool()

    def compress(name: str) -> Tensor:
        x = leaves[name]
        positions = x.new_zeros(x.shape[2], shape.compress_block_size, x.shape[3])
        return compress_tokens(network, x, positions, shape.compress_stride, name=name, value_dim=x.shape[3])

    def forward() -> Tensor:
        if gpus == 1:
            return nsa(**leaves, k_cmp=compress('k'), v_cmp=compress('v'), **settings)  # type: ignore[arg-type]
        networks: Any = {'compress_k': network, 'compress_v': network, 'group': dist.group.WORLD}
        return context_parallel_nsa(**leaves, **networks, **settings)  # type: ignore[arg-type]

    dout = torch.randn_like(leaves['q'][..., : shape.value_dim])
    losses: list[float] = []

    def step() -> Tensor:
        out = forward()
        torch.autograd.grad(out, list(leaves.values()), dout)
        if not losses:
            losses.append(float(torch.linalg.vector_norm(out.detach(), dtype=torch.float32).square() / out.numel()))
        return out.detach()

    return step, lambda: {'losses': losses}


def trainer(case: Case) -> Step:
    """Return a step of train_enwik8.py, with the rows of the case on each GPU."""
    gpus = case['gpus']
    ranks = ONE_PROCESS
    if gpus > 1:
        mesh = init_device_mesh(case['device'], (gpus, 1, 1), mesh_dim_names=('data', 'context', 'tensor'))
        ranks = Ranks(gpus, mesh=mesh)
    call, _ = training_speed.make_call({**case, 'backend': 'sparse'}, ranks)
    return call.forward, lambda: {'losses': [call.facts()['loss']]}


def layer(case: Case) -> Step:
    """Return forward and backward of a `Transformer` of one layer, divided over tensor ranks."""
    with torch.device(case['device']):
        one = Transformer(256, use_sparse_attn=True, **case['model']).to(getattr(torch, case['dtype']))
    if case['gpus'] > 1:
        apply_tp(one, init_device_mesh(case['device'], (case['gpus'],)))
    ids = make_ids(1, case['tokens']).to(case['device'])

    def step() -> Tensor:
        loss = one(ids, return_loss=True)
        loss.backward()
        one.zero_grad()
        return loss.detach()

    return step, lambda: {'losses': [float(step())]}


def make_ids(rows: int, length: int) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def model(case: Case) -> Step:
    """Return a training step of a `Transformer` that is divided over data, context and tensor ranks.

    Weights are sharded over data x context ranks. With more data ranks than rows of REFERENCE, these repeat.
    """
    device, length = case['device'], case['length']
    fsdp, cp, tp = (case['layout'].get(name, 1) for name in ('fsdp', 'cp', 'tp'))
    with torch.device(device):
        whole = Transformer(256, use_sparse_attn=True, **case['model'])
    with torch.no_grad():
        for block in whole.blocks:
            block.attention.combine_heads.weight.mul_(ATTENTION_SCALE)
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    mesh = init_device_mesh(device, (fsdp, cp, tp), mesh_dim_names=('data', 'context', 'tensor'))
    optimizer = divide(whole, mesh, getattr(torch, case['dtype']))
    every = make_ids(REFERENCE['fsdp'], length)[torch.arange(num_rows(case['layout'])) % REFERENCE['fsdp']]
    rows = torch.arange(len(every)).tensor_split(fsdp)[mesh.get_local_rank('data')]
    shard = torch.arange(length).tensor_split(cp)[mesh.get_local_rank('context')]
    ids = every[rows][:, shard].to(device)
    losses, token_losses = list[Tensor](), dict[str, float]()

    def step() -> Tensor:
        loss = whole(ids, return_loss=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == 1:
            token_losses.update(find_token_losses())
        return losses[-1]

    @torch.no_grad()
    def find_token_losses() -> dict[str, float]:
        """Return the losses of evenly spaced tokens of this rank, by row and position."""
        stride = max(1, length // COMPARED_TOKENS)
        taken = ((shard + 1) % stride == 0) & (shard < length - 1)
        targets = every[rows][:, shard[taken] + 1]
        logits = whole(ids)[:, taken.to(device)].float()
        found = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(device), reduction='none').tolist()
        names = [f'{row % REFERENCE["fsdp"]}:{i}' for row in rows.tolist() for i in shard[taken].tolist()]
        return dict(zip(names, (round(value, 6) for value in found), strict=True))

    def facts() -> Case:
        return {'losses': [float(x) for x in losses[:2]], 'token_losses': token_losses, 'parameters': parameters}

    return step, facts


def divide(whole: Transformer, mesh: DeviceMesh, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Divide a model over the dimensions data, context and tensor of a mesh, and return its optimizer."""
    if mesh['tensor'].size() > 1:
        apply_tp(whole, mesh['tensor'])
    if mesh['context'].size() > 1:
        apply_cp(whole, mesh['context'])
    whole.gradient_checkpointing_enable()
    dims = [name for name in ('data', 'context') if mesh[name].size() > 1] or ['data']
    assert len(dims) == 1 or mesh['tensor'].size() == 1
    # On the mesh of both, each data rank would have copies of the shards.
    shards = mesh[dims[0]] if len(dims) == 1 else init_device_mesh(mesh.device_type, (mesh.size(),))
    apply_fsdp(whole, shards, MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    return torch.optim.AdamW(whole.parameters(), LEARNING_RATE, fused=True)


STEPS: dict[str, Callable[[Case], Step]] = {'attention': attention, 'trainer': trainer, 'layer': layer, 'model': model}


def measure_step(step: Callable[[], Tensor], leaves: Any, device: str, *_: Any) -> Case:
    """Return ms of steps that are queued, as many on every rank, and the peak of all tensors in bytes."""
    step()
    timing.reset_peak(device)
    seconds = torch.tensor(timing.seconds_of(step, device))
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    repeats = max(FEWEST_REPEATS, min(REPEATS, int(SECONDS / float(seconds))))
    times = timing.run_times(step, device, None, repeats)
    return {'times': [round(ms, 3) for ms in times], 'peak_bytes': timing.peak(device) or None}


def measure_profile(step: Callable[[], Tensor], leaves: Any, device: str, *_: Any) -> Case:
    """Return ms of a step in which kernels of NCCL run, other kernels and copies, both, NCCL alone, and neither."""
    step()
    if device == 'cpu':
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    return summary([(event.name, event.time_range.start, event.time_range.end) for event in events])


def summary(events: list[tuple[str, float, float]]) -> Case:
    """Return the times of a profile. events: name, start and end in microseconds."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    kernels: dict[str, list[float]] = {}
    for name, start, end in events:
        spans['nccl' in name.lower()].append((start, end))
        kernels.setdefault(name, []).append(end - start)
    nccl, others, either = (covered(part) for part in (spans[True], spans[False], spans[True] + spans[False]))
    total = max((end for *_, end in events), default=0) - min((start for _, start, _ in events), default=0)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    shown = [(name, times) for i, (name, times) in enumerate(longest) if i < TOP_KERNELS or 'nccl' in name.lower()]
    parts = {'total_ms': total, 'nccl_ms': nccl, 'compute_ms': others, 'both_ms': nccl + others - either}
    parts |= {'exposed_ms': either - others, 'idle_ms': total - either}
    return {
        **{name: round(value / 1e3, 3) for name, value in parts.items()},
        'kernels': [[name[:100], len(times), round(sum(times) / 1e3, 3)] for name, times in shown],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -float('inf')
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
