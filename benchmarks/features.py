"""What does a feature of `window_attention` cost? Dense and window attention, without any and with one each.

    python -m benchmarks.features --jobs 15                     everything, at 16k tokens
    python -m benchmarks.features --cases 'dense,dense+s*'      some of it
    TRITON_INTERPRET=1 python -m benchmarks.features --device cpu --shape tiny --out /tmp/results    to try the script

Dense is causal with an unbounded window, and held against dense attention of PyTorch by cuDNN. A feature that has a
gradient of its own (sinks, bias) is differentiated, too. Writes <gpu>/features.md and .json to --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.parts import make_dense
from benchmarks.peers import Problem
from benchmarks.report import ratio
from benchmarks.runner import Case, add_run_arguments, run, serve
from benchmarks.shapes import SHAPES, Shape, find_names, make_tensors

OURS, CUDNN = 'triton', 'cudnn'
SHAPE = 'paper-16k-h4'
BASES = ('dense', 'window')
PASSES = ('forward', 'backward')
# Of cuDNN's time, forward and backward.
LIMITS = (1.35, 2.1)


def make_settings(feature: str, shape: Shape, device: str) -> dict[str, Any]:
    """Arguments of `window_attention` that switch a feature on."""
    size = (shape.seqlen, shape.seqlen)
    generator = torch.Generator(device).manual_seed(1)
    draw: Callable[..., Tensor] = partial(torch.randn, device=device, generator=generator)
    match feature:
        case 'softcap':
            return {'softcap': 30.0}
        case 'sinks':
            return {'sinks': draw(shape.heads)}
        case 'segments':
            # Four of them, of equal length.
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


FEATURES = ('softcap', 'sinks', 'segments', 'mask', 'bias', 'attn_mask', 'dropout')
CASES = tuple(f'{base}+{feature}' if feature else base for base in BASES for feature in ('', *FEATURES))


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


def make_tables(rows: list[Case]) -> list[str]:
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
        f'{SHAPES[rows[0]["shape"]].described()}. Medians; caches cold.',
        'Dense causal attention, `window_size=(-1, 0)`:',
        report.table(columns, compared),
        'Features, one at a time, and what they take over none:',
        report.table(('case', 'forward ms', 'backward ms', 'forward over plain', 'backward over plain', ''), body),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, case_seconds=60)
    parser.add_argument('--cases', default='*', help='patterns, separated by commas (%(default)s)')
    parser.add_argument('--shape', choices=SHAPES, default=SHAPE, help='(%(default)s)')
    options = parser.parse_args()
    if options.worker:
        return serve(make_call, seconds=0.5)
    where = {'shape': options.shape, 'device': options.device}
    cases = [{'op': op, 'backend': OURS, **where} for op in find_names(CASES, options.cases)]
    if cases[0]['op'] == 'dense' and options.device != 'cpu':
        cases.insert(1, cases[0] | {'backend': CUDNN})
    run(cases, options, 'features', 'Features of window attention', make_tables)


if __name__ == '__main__':
    main()
