"""Suite `features`: dense and window attention with one feature each, and dense attention beside cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.attention.parts import make_dense
from benchmarks.attention.suite import Suite
from benchmarks.peers import Problem
from benchmarks.report import ratio
from benchmarks.runner import Case, Method
from benchmarks.shapes import SHAPES, Shape, make_tensors
from benchmarks.timing import PASSES

OURS, CUDNN = 'triton', 'cudnn'
# Causal with an unbounded window, and with the window of the shape.
BASES = ('dense', 'window')
# Limits of dense attention in multiples of cuDNN's time, forward and backward.
LIMITS = (1.35, 2.1)
FEATURES = {
    '': 'without a feature',
    'softcap': 'soft cap',
    'sinks': 'sinks, with their gradient',
    'segments': 'four segments of equal length',
    'mask': 'key mask',
    'bias': 'bias, with its gradient',
    'attn_mask': 'boolean mask of pairs',
    'dropout': 'dropout',
}
CASES = {
    f'{base}+{feature}' if feature else base: f'{base} attention, {about}'
    for base in BASES
    for feature, about in FEATURES.items()
}


def make_settings(feature: str, shape: Shape, device: str) -> dict[str, Any]:
    """Return the arguments of `window_attention` that switch a feature on."""
    size = (shape.seqlen, shape.seqlen)
    generator = torch.Generator(device).manual_seed(1)
    draw: Callable[..., Tensor] = partial(torch.randn, device=device, generator=generator)
    match feature:
        case 'softcap':
            return {'softcap': 30.0}
        case 'sinks':
            return {'sinks': draw(shape.heads)}
        case 'segments':
            ids = torch.arange(shape.seqlen, dtype=torch.int32, device=device) * 4 // shape.seqlen
            return {'segment_ids': ids.expand(shape.batch, -1)}
        case 'mask':
            mask = torch.ones(shape.batch, shape.seqlen, dtype=torch.bool, device=device)
            mask[:, shape.seqlen // 2 : shape.seqlen // 2 + 64] = False
            return {'mask': mask}
        case 'bias':
            return {'bias': draw(1, 1, *size, dtype=shape.dtype)}
        case 'attn_mask':
            return {'attn_mask': draw(1, 1, *size) > -1}
        case 'dropout':
            return {'dropout_p': 0.1, 'dropout_seed': 0}
        case _:
            return {}


def make_call(case: Case) -> tuple[Callable[[], Tensor], list[Tensor]]:
    from native_sparse_attention.ops import window_attention

    shape, device = SHAPES[case['shape']], case['device']
    base, _, feature = case['op'].partition('+')
    tensors = make_tensors(shape, device, ('q', 'k', 'v'))
    if case['backend'] == CUDNN:
        return make_dense(Problem(shape, tensors))
    settings = make_settings(feature, shape, device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    leaves += [settings[name].requires_grad_() for name in ('sinks', 'bias') if name in settings]
    window = (-1, 0) if base == 'dense' else shape.window_size
    return lambda: window_attention(**tensors, window_size=window, **settings, backend=OURS)[0], leaves


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    return [
        {'op': op, 'shape': shape, 'backend': backend}
        for shape, op, backend in product(shapes, names, backends)
        if backend == OURS or op == 'dense'
    ]


def make_tables(rows: list[Case]) -> list[str]:
    shapes = dict.fromkeys(row['shape'] for row in rows)
    return [table for shape in shapes for table in shape_tables(shape, [row for row in rows if row['shape'] == shape])]


def shape_tables(shape: str, rows: list[Case]) -> list[str]:
    found = {(row['op'], row['backend']): row for row in rows}

    def ms(op: str, what: str, backend: str = OURS) -> float | None:
        return found.get((op, backend), {}).get(f'{what}_ms')

    compared = []
    for what, limit in zip(PASSES, LIMITS, strict=True):
        over = ratio(ms('dense', what), ms('dense', what, CUDNN))
        verdict = None if over is None else 'met' if over <= limit else 'missed'
        compared.append([what, ms('dense', what), ms('dense', what, CUDNN), over, limit, verdict])
    body = []
    for op in CASES:
        if (op, OURS) in found:
            times = [ms(op, what) for what in PASSES]
            plain = [ratio(time, ms(op.partition('+')[0], what)) for time, what in zip(times, PASSES, strict=True)]
            body.append([op, *times, *plain, found[op, OURS].get('note', '')])
    columns = ('', 'ours ms', 'cuDNN ms', 'ours / cuDNN', 'at most', '')
    return [
        f'{SHAPES[shape].described()}. Medians; cold caches.',
        'Dense causal attention, `window_size=(-1, 0)`:',
        report.table(columns, compared),
        'One feature at a time; plain: without a feature:',
        report.table(('case', 'forward ms', 'backward ms', 'forward over plain', 'backward over plain', ''), body),
    ]


SUITE = Suite(
    title='Features of window attention',
    about='dense is causal with an unbounded window; backend cudnn is for dense.',
    cases=CASES,
    backends=(OURS, CUDNN),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(make_call, seconds=0.5),
    shapes='paper-16k-h4',
    case_seconds=60,
)
