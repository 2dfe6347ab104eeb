"""How fast is Native Sparse Attention as a whole, by backend? Forward, backward, peak memory.

    python -m benchmarks.backends --jobs 15                         every shape, every backend, `nsa`
    python -m benchmarks.backends --shapes 'paper-8k-*,trainer'     some of them
    python -m benchmarks.backends --backends eager --add            a backend more, for the table of an earlier run
    python -m benchmarks.backends --what layer                      `SparseAttention`, projections and all
    python -m benchmarks.backends --what recompute                  the same with recompute=True
    python -m benchmarks.backends --device cpu --shapes 'tiny*' --out /tmp/results    to try the script

Writes <gpu>/<what>.md and .json to --out after every case, so that a run that is cut short leaves what it has;
--add keeps what is there of the same GPU, commit and versions. With --jobs, so many processes compile what the
cases need, side by side, before the first is measured: FlexAttention compiles for most of a minute for every head
layout and setting. A case that takes longer than --case-seconds is stopped; eager ones that would are not begun.
--budget bounds it all.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.runner import Case, add_arguments, run, serve
from benchmarks.shapes import SHAPES, Shape, find_shapes, make_inputs

BACKENDS = ('triton', 'flex', 'eager')
TITLES = {
    'nsa': '`nsa`: compress, choose, attend, gate',
    'layer': '`SparseAttention`, projections and all',
    'recompute': '`SparseAttention(recompute=True)`, projections and all',
    'dense': '`DenseAttention`, projections and all',
}
DIM = 2048


def work_of(shape: Shape) -> int:
    """What eager's time is proportional to: keys gathered for the selected branch, and compressed weights."""
    per_index_head = shape.num_selected * shape.selection_block_size * (shape.head_dim + shape.value_dim)
    return shape.batch * shape.seqlen * (shape.index_heads * per_index_head + 4 * shape.heads * shape.num_compressed)


def make_call(what: str, shape: Shape, backend: str, device: str) -> tuple[Any, list[torch.Tensor]]:
    """A forward, and what is differentiated."""
    from native_sparse_attention import nsa

    if what == 'nsa':
        tensors, settings = make_inputs(shape, device)
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        return partial(nsa, **leaves, **settings, backend=backend), list(leaves.values())
    layer = make_layer(what, shape, backend, device)
    width = layer.to_qkv.in_features
    x = torch.randn(shape.batch, shape.seqlen, width, dtype=shape.dtype, device=device, requires_grad=True)
    borders = make_inputs(shape, device)[1].get('cu_seqlens') if shape.num_sequences else None
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return partial(layer, x, cu_seqlens=borders), [x, *parameters]


def make_layer(what: str, shape: Shape, backend: str, device: str) -> Any:
    from native_sparse_attention import SparseAttention
    from native_sparse_attention.nn.dense import DenseAttention

    dim = DIM if device != 'cpu' else 64
    sizes: dict[str, Any] = {'kv_heads': shape.kv_heads, 'dim_value_head': shape.value_dim, 'causal': shape.causal}
    if what == 'dense':
        return DenseAttention(dim, shape.head_dim, shape.heads, **sizes).to(device, shape.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        layer = SparseAttention(
            dim,
            shape.head_dim,
            shape.heads,
            shape.window,
            shape.compress_block_size,
            shape.compress_stride,
            shape.selection_block_size,
            shape.num_selected,
            **sizes,
            use_diff_topk=shape.use_diff_topk,
            query_heads_share_selected_kv=shape.share_group,
            backend=backend,
            recompute=what == 'recompute',
        )
    return layer.to(device, shape.dtype)


def call_of(case: Case) -> tuple[Any, list[torch.Tensor]]:
    return make_call(case['what'], SHAPES[case['shape']], case['backend'], case['device'])


def make_cases(shapes: str, backends: str, what: str, device: str) -> list[Case]:
    """Those of a shape stand together, so that a run that is cut short has whole comparisons."""
    return [
        {'shape': shape.name, 'backend': backend, 'what': what, 'device': device, 'work': work_of(shape)}
        for shape in find_shapes(shapes)
        for backend in backends.split(',')
    ]


def make_tables(rows: list[Case]) -> list[str]:
    rows = sorted(rows, key=lambda row: (SHAPES[row['shape']].tokens, [*SHAPES].index(row['shape'])))
    columns = ('shape', 'backend', 'forward ms', 'backward ms', 'both ms', 'peak GiB', '')
    keys = ('shape', 'backend', 'forward_ms', 'backward_ms', 'total_ms')
    body = [[*(row.get(key) for key in keys), report.gib(row.get('peak_bytes')), row.get('note', '')] for row in rows]
    named = {(row['shape'], row['backend']): row for row in rows}
    compared = []
    for name in dict.fromkeys(row['shape'] for row in rows):
        ours = named.get((name, 'triton'), {})
        ratios = [
            report.ratio(named.get((name, other), {}).get(key), ours.get(key))
            for other in ('flex', 'eager')
            for key in ('forward_ms', 'backward_ms')
        ]
        compared.append([name, *ratios])
    met = [(row[0], ratio) for row in compared for ratio in row[1:] if ratio is not None]
    slower = dict.fromkeys(name for name, ratio in met if ratio <= 1)
    verdict = f'Of {len(met)} comparisons Triton is the faster in all' + (
        f' but some of {", ".join(slower)}' if slower else ''
    )
    legend = [[name, SHAPES[name].described()] for name in dict.fromkeys(row['shape'] for row in rows)]
    return [
        'Medians; caches cold; peak beyond the inputs, gradients included. '
        'A pass of more than a second is one run; of eager it is the first, which allocates the memory, too.',
        report.table(columns, body),
        'Times of the others over those of Triton:',
        report.table(('shape', 'flex forward', 'flex backward', 'eager forward', 'eager backward'), compared),
        f'{verdict}.',
        report.table(('shape', ''), legend),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, shapes='*', backends=BACKENDS, case_seconds=100)
    parser.add_argument('--what', choices=TITLES, default='nsa')
    options = parser.parse_args()
    if options.worker:
        return serve(call_of, seconds=1)
    cases = make_cases(options.shapes, options.backends, options.what, options.device)
    run(cases, options, options.what, TITLES[options.what] + ', by backend', make_tables)


if __name__ == '__main__':
    main()
