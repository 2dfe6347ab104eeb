"""Steps of training that `benchmarks.parallel` measures, in each process of a group."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks import timing, training_speed
from benchmarks.runner import Call, Case, Method
from benchmarks.shapes import RHO, SHAPES, TENSORS, make_settings, make_tensors
from native_sparse_attention import nsa
from native_sparse_attention.compress import MeanPool
from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_tp, context_parallel_nsa
from native_sparse_attention.nn.compress.apply import compress_tokens
from native_sparse_attention.transformer import Transformer
from trainer.ranks import ONE_PROCESS, Ranks

REPEATS = 5
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
        if case['gpus'] > 1 and case['group'] != self.joined:
            self.leave()
            if case['rank'] < case['gpus']:
                backend = 'gloo' if case['device'] == 'cpu' else 'cpu:gloo,cuda:nccl'
                file = f'file://{case["group"]}'
                dist.init_process_group(backend, file, rank=case['rank'], world_size=case['gpus'])
            self.joined = case['group']
        if case['rank'] >= case['gpus']:
            return Call(lambda: torch.empty(0)), []
        step, facts = {'attention': attention, 'trainer': trainer, 'layers': layers}[case['step']](case)
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

    def step() -> Tensor:
        out = forward()
        torch.autograd.grad(out, list(leaves.values()), dout)
        return out.detach()

    return step, lambda: {'loss': float(step().float().square().mean())}


def trainer(case: Case) -> Step:
    """Return a step of train_enwik8.py, with the rows of the case on each GPU."""
    gpus = case['gpus']
    ranks = ONE_PROCESS
    if gpus > 1:
        mesh = init_device_mesh(case['device'], (gpus, 1, 1), mesh_dim_names=('data', 'context', 'tensor'))
        ranks = Ranks(gpus, mesh=mesh)
    call, _ = training_speed.make_call({**case, 'backend': 'sparse'}, ranks)
    return call.forward, call.facts


def layers(case: Case) -> Step:
    """Return forward and backward of a `Transformer` that is divided over data, context and tensor ranks."""
    dp, cp, tp = (case['layout'].get(name, 1) for name in ('dp', 'cp', 'tp'))
    with torch.device(case['device']):
        model = Transformer(256, use_sparse_attn=True, **case['model']).to(getattr(torch, case['dtype']))
    ids = torch.randint(256, (dp, case['tokens'] // dp), generator=torch.Generator().manual_seed(1))
    if case['gpus'] > 1:
        mesh = init_device_mesh(case['device'], (dp, cp, tp), mesh_dim_names=('data', 'context', 'tensor'))
        ids = ids[mesh.get_local_rank('data')][None].tensor_split(cp, 1)[mesh.get_local_rank('context')]
        if tp > 1:
            apply_tp(model, mesh['tensor'])
        if cp > 1:
            apply_cp(model, mesh['context'])
        if dims := tuple(name for name, size in (('data', dp), ('context', cp)) if size > 1):
            apply_fsdp(model, mesh[dims])
    ids = ids.to(case['device'])

    def step() -> Tensor:
        loss = model(ids, return_loss=True)
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step, lambda: {'loss': float(step())}


def measure_step(step: Callable[[], Tensor], leaves: Any, device: str, *_: Any) -> Case:
    """Return ms of REPEATS steps that are queued, and the peak of all tensors in bytes."""
    step()
    timing.reset_peak(device)
    step()
    times = timing.run_times(step, device, None, REPEATS)
    return {'times': [round(ms, 3) for ms in times], 'peak_bytes': timing.peak(device) or None}


def measure_profile(step: Callable[[], Tensor], leaves: Any, device: str, *_: Any) -> Case:
    """Return ms of a step in which kernels of NCCL run, other kernels and copies, both, NCCL alone, and neither."""
    step()
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
