"""How fast is each op alone, by backend? Forward, backward, peak memory; dense attention of PyTorch beside them.

    python -m benchmarks.ops --jobs 15                           every op and backend, the shapes of design and trainer
    python -m benchmarks.ops --ops selected,choice --shapes 'paper-64k-*' --backends triton
    python -m benchmarks.ops --device cpu --shapes tiny --out /tmp/results     to try the script

`selected` reads blocks of which the forced ones are shared and the others drawn at random; for `selected, alike` 16
neighbours share most of them, as in trained models. Writes <gpu>/ops.md and .json to --out after every case.
On an H100, without --jobs: Triton takes about 3 minutes for the default shapes, all backends about 8.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.backends import work_of
from benchmarks.runner import Case, add_arguments, run, serve
from benchmarks.shapes import SHAPES, Shape, find_shapes, make_blocks, make_inputs

OPS = ('window', 'compressed', 'choice', 'scores', 'selected', 'selected, alike', 'sum', 'rotary', 'dense')
BACKENDS = ('triton', 'flex', 'eager', 'sdpa')
WITHOUT_FLEX = ('choice', 'scores', 'sum', 'rotary', 'dense')
DEFAULT_SHAPES = 'paper-8k-h4,paper-32k-*,paper-64k-h4,trainer,head-64,packed'


def first(function: Any) -> Tensor:
    """The first output of a call."""
    outputs = function()
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def make_call(op: str, shape: Shape, backend: str, device: str) -> tuple[Any, list[Tensor]]:
    """A forward, and what is differentiated."""
    from native_sparse_attention import ops

    tensors, settings = make_inputs(shape, device)
    where = {'causal': shape.causal}
    if 'cu_seqlens' in settings:
        where['cu_seqlens'] = settings['cu_seqlens']
    q, k, v, k_cmp, v_cmp, gates = (t.requires_grad_() for t in tensors.values())
    sizes = {name: settings[name] for name in ('compress_block_size', 'compress_stride', 'selection_block_size')}
    if op == 'window':
        return partial(ops.window_attention, q, k, v, window_size=shape.window_size, backend=backend, **where), [
            q,
            k,
            v,
        ]
    if op == 'dense':
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return partial(attend, q, k, v, is_causal=shape.causal, enable_gqa=True), [q, k, v]
    if op == 'rotary':
        angles = torch.rand(1, shape.seqlen, shape.head_dim // 2, device=device) * shape.seqlen
        return partial(ops.rotary, q, angles.cos(), angles.sin(), backend=backend), [q]
    if op == 'sum':
        branches = [torch.randn_like(q[..., :1].expand(*q.shape[:3], shape.value_dim)) for _ in range(3)]
        branches = [t.requires_grad_() for t in branches]
        return partial(ops.gated_sum, gates, *branches, backend=backend), [gates, *branches]
    blocks = partial(make_blocks, shape, device)
    if op.startswith('selected'):
        indices = blocks(16 if 'alike' in op else 1)
        settings = {'block_size': shape.selection_block_size, 'backend': backend, **where}
        return partial(ops.selected_attention, q, k, v, indices, **settings), [q, k, v]
    compressed = partial(
        ops.compressed_attention,
        *(q, k_cmp, v_cmp),
        block_size=shape.compress_block_size,
        stride=shape.compress_stride,
        **where,
    )
    if op == 'compressed':
        return partial(compressed, backend=backend), [q, k_cmp, v_cmp]
    with torch.no_grad():
        _, lse = compressed(backend='auto')
    if op == 'choice':
        choice = {'num_selected': shape.num_selected, 'share_group': shape.share_group}
        return partial(ops.select_blocks, q, k_cmp, lse, **choice, **sizes, **where, backend=backend), []
    lse.requires_grad_()
    return partial(ops.chosen_scores, q, k_cmp, lse, blocks(), **sizes, **where, backend=backend), [q, k_cmp, lse]


def call_of(case: Case) -> tuple[Any, list[Tensor]]:
    forward, leaves = make_call(case['op'], SHAPES[case['shape']], case['backend'], case['device'])
    return partial(first, forward), leaves


def serves(op: str, backend: str, shape: Shape) -> bool:
    if (op == 'dense') != (backend == 'sdpa'):
        return False
    if op == 'dense':
        return not shape.num_sequences and shape.dtype != torch.float32
    return backend != 'flex' or op not in WITHOUT_FLEX


def make_tables(rows: list[Case]) -> list[str]:
    columns = ('op', 'shape', 'backend', 'forward ms', 'backward ms', 'both ms', 'peak GiB', '')
    keys = ('op', 'shape', 'backend', 'forward_ms', 'backward_ms', 'total_ms')
    order = sorted(rows, key=lambda row: (OPS.index(row['op']), [*SHAPES].index(row['shape'])))
    body = [[*(row.get(key) for key in keys), report.gib(row.get('peak_bytes')), row.get('note', '')] for row in order]
    legend = [[name, SHAPES[name].described()] for name in SHAPES if name in {row['shape'] for row in rows}]
    return [
        'Medians; caches cold; peak beyond the inputs, gradients included.',
        report.table(columns, body),
        report.table(('shape', ''), legend),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, DEFAULT_SHAPES, BACKENDS, case_seconds=60)
    parser.add_argument('--ops', default=','.join(op for op in OPS if ' ' not in op) + ',alike', help='(%(default)s)')
    options = parser.parse_args()
    if options.worker:
        return serve(call_of, seconds=0.5)
    ops = ['selected, alike' if op == 'alike' else op for op in options.ops.split(',')]
    cases = [
        {'op': op, 'shape': shape.name, 'backend': backend, 'device': options.device, 'work': work_of(shape)}
        for shape in find_shapes(options.shapes)
        for op in ops
        for backend in options.backends.split(',')
        if serves(op, backend, shape)
    ]
    run(cases, options, 'ops', 'Each op alone, by backend', make_tables)


if __name__ == '__main__':
    main()
