"""Suite `designs`: designs of kernels for small groups beside each other, checked by the error rules.

Backend `triton` is the choice in force. `candidate` takes the designs of `CANDIDATES` for every group; `union`, `block`
and `fused` force a design of selected attention.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.attention.suite import Suite, legend
from benchmarks.report import ratio
from benchmarks.runner import Call, Case, Method
from benchmarks.shapes import RHO, SHAPES, TENSORS, Shape, make_settings, make_tensors
from benchmarks.timing import PASSES, PROFILED_RUNS, measure_both

OURS, CANDIDATE, DENSE = 'triton', 'candidate', 'cudnn'
DESIGNS = ('union', 'block', 'fused')
# Constants of `plan` that the candidate changes.
CANDIDATES = {'MAX_GROUP_FUSED': 2**10, 'MAX_GROUP_FACTORS': 2**10}
CASES = {
    'selected': 'selected attention; consecutive tokens correlate',
    'selected-unrelated': 'the same with unrelated tokens',
    'factors': 'selected attention with factors of 1 and their gradient',
    'merged': 'selected blocks and window in one softmax, factors of 1 and their gradient',
    'scores': 'gradient of `straight_through_scale`',
    'nsa': 'the whole, and its longest kernels',
    'nsa-merged': 'the whole in merged mode, and its longest kernels',
}
SERVED = {
    'selected': DESIGNS,
    'selected-unrelated': DESIGNS,
    'factors': ('block', 'fused'),
    'merged': (OURS, CANDIDATE),
    'scores': (OURS,),
    'nsa': (OURS, CANDIDATE, DENSE),
    'nsa-merged': (OURS, CANDIDATE),
}
# Sizes of a problem that eager serves, at most. As with more, no kernel is compiled for a size of 1.
CHECKED = {'batch': 2, 'seqlen': 1024, 'kv_heads': 2}
NUM_KERNELS = 12


def choose_candidates() -> None:
    """Let this process, which serves one backend, take the designs of the candidate."""
    from native_sparse_attention.ops.selected_attention.triton import plan

    for name, value in CANDIDATES.items():
        setattr(plan, name, value)


def make_inputs(shape: Shape, rho: float, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Make the tensors of `nsa`, the log-sum-exp of the compressed branch and the selected blocks."""
    from native_sparse_attention import ops

    tensors = make_tensors(shape, device, TENSORS, rho)
    q, k_cmp = tensors['q'], tensors['k_cmp']
    sizes: dict[str, Any] = shape.block_sizes
    with torch.no_grad():
        _, lse = ops.compressed_attention(
            q, k_cmp, tensors['v_cmp'], block_size=shape.compress_block_size, stride=shape.compress_stride
        )
        blocks = ops.select_blocks(q, k_cmp, lse, num_selected=shape.num_selected, **sizes)
    return tensors, lse, blocks


def make_call(case: Case) -> tuple[Call, list[Tensor]]:
    from native_sparse_attention import ops

    op, backend, shape, device = case['op'], case['backend'], SHAPES[case['shape']], case['device']
    if backend == CANDIDATE:
        choose_candidates()
    tensors, lse, blocks = make_inputs(shape, 0 if op.endswith('unrelated') else RHO, device)
    if op.startswith('nsa'):
        forward, leaves = make_whole(op, backend, shape, tensors, device)
        return Call(forward, partial(find_kernels, forward, leaves, device)), leaves
    if op == 'scores':
        leaves = [t.requires_grad_() for t in (tensors['q'], tensors['k_cmp'], lse)]
        sizes: dict[str, Any] = shape.block_sizes
        scores = partial(ops.straight_through_scale, *leaves, blocks, num_init=1, num_local=2, **sizes, backend=OURS)
        return Call(scores), leaves
    leaves = [tensors[name].requires_grad_() for name in 'qkv']
    scale = None if op.startswith('selected') else torch.ones(blocks.shape, device=device, requires_grad=True)
    leaves += [] if scale is None else [scale]
    attend = attention(op, backend, shape)

    def forward() -> Tensor:
        return attend(*leaves[:3], blocks, block_scale=scale, backend=OURS)[0]

    return Call(forward, partial(check, op, backend, shape, device)), leaves


def attention(op: str, backend: str, shape: Shape) -> Any:
    """Return `selected_attention` by a backend, in the mode of a case."""
    from native_sparse_attention import ops

    options: dict[str, Any] = {'block_size': shape.selection_block_size}
    if op == 'merged':
        options |= {'window_size': shape.window_size, 'unit_scale': True}
    design = backend if backend in DESIGNS else None

    def attend(*args: Any, backend: str, **kwargs: Any) -> tuple[Tensor, Tensor]:
        forced = {'_design': design} if backend == OURS and design else {}
        return ops.selected_attention(*args, **kwargs, **options, **forced, backend=backend)

    return attend


def make_whole(op: str, backend: str, shape: Shape, tensors: dict[str, Tensor], device: str) -> Any:
    """Return the forward pass of `nsa`, or of dense attention, and the tensors to differentiate."""
    from native_sparse_attention import nsa

    if backend == DENSE:
        from benchmarks.attention.parts import make_dense
        from benchmarks.peers import Problem

        return make_dense(Problem(shape, {name: tensors[name] for name in 'qkv'}))
    settings = make_settings(shape, device)
    if op == 'nsa-merged':
        settings['merge_window'] = True
        tensors = tensors | {'gates': tensors['gates'][..., :1].contiguous()}
    leaves = [tensors[name].requires_grad_() for name in TENSORS]
    return partial(nsa, *leaves, **settings, backend=OURS), leaves


def check(op: str, backend: str, shape: Shape, device: str) -> Case:
    """Compare a small problem of the same heads and sizes with eager, by the error rules."""
    from native_sparse_attention.ops.selected_attention.triton import plan
    from native_sparse_attention.testing import assert_attention_matches

    sizes = {name: min(size, getattr(shape, name)) for name, size in CHECKED.items()}
    small = replace(shape, heads=shape.heads // shape.kv_heads * sizes['kv_heads'], **sizes)
    tensors, _, blocks = make_inputs(small, RHO, device)
    inputs = {name: tensors[name] for name in 'qkv'} | {'block_indices': blocks}
    if not op.startswith('selected'):
        inputs['block_scale'] = torch.ones(blocks.shape, device=device)
    attend = attention(op, backend, small)
    generator = torch.Generator(device).manual_seed(2)
    try:
        # The design of long sequences.
        with mock.patch.multiple(plan, MAX_BLOCK_RATIO=0, MIN_SEQLEN_BY_BLOCK=0):
            assert_attention_matches(attend, inputs, OURS, generator)
    except AssertionError as error:
        return {'rules': ' '.join(str(error).split())[:300]}
    return {'rules': 'kept'}


def find_kernels(forward: Any, leaves: list[Tensor], device: str) -> Case:
    """Return ms of the longest kernels of a forward and backward pass."""
    if device == 'cpu':
        return {}
    dout = torch.randn_like(forward())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED_RUNS):
            torch.autograd.grad(forward(), leaves, dout)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            times[event.name[:60]].append(event.device_time / 1e3 / PROFILED_RUNS)
    longest = sorted(times, key=lambda name: -sum(times[name]))[:NUM_KERNELS]
    kernels = [[name, round(sum(times[name]), 4), round(len(times[name]) / PROFILED_RUNS)] for name in longest]
    return {'kernels': kernels, 'kernels_ms': round(sum(map(sum, times.values())), 4)}


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    return [
        {'op': op, 'shape': shape, 'backend': backend}
        for op, shape, backend in product(names, shapes, backends)
        if backend in SERVED[op] and (SHAPES[shape].use_diff_topk or op not in ('factors', 'merged', 'scores'))
    ]


def make_tables(rows: list[Case]) -> list[str]:
    tables = []
    for row in rows:
        if 'kernels' in row:
            tables += [f'{row["shape"]}, {row["op"]}, {row["backend"]}: {row["kernels_ms"]} ms, of which']
            tables += [report.table(('kernel', 'ms', 'launches'), row['kernels'])]
    body = []
    for row in rows:
        first = next(r for r in rows if (r['op'], r['shape']) == (row['op'], row['shape']))
        times = [row.get(f'{what}_ms') for what in PASSES]
        gains = [ratio(first.get(f'{what}_ms'), row.get(f'{what}_ms')) for what in PASSES]
        notes = [row['note']] if row.get('note') else [row['rules']] if row.get('rules') else []
        body.append([row['shape'], row['op'], row['backend'], *times, *gains, ' '.join(notes)])
    speeds = [f'{what}: first / this' for what in PASSES]
    columns = ('shape', 'case', 'design', *(f'{what} ms' for what in PASSES), *speeds, 'error rules')
    shapes = [*dict.fromkeys(row['shape'] for row in rows)]
    return [*tables, legend(shapes), 'Medians, cold caches, queued runs:', report.table(columns, body)]


SUITE = Suite(
    title='Designs for small groups',
    about=f'candidate takes {", ".join(CANDIDATES)} of plan.py for all groups; cudnn is dense attention.',
    cases=CASES,
    backends=(OURS, CANDIDATE, *DESIGNS, DENSE),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(make_call, seconds=0.15, measure=measure_both),
    shapes='budget-16k,budget-32k,llama-32k',
    case_seconds=60,
)
