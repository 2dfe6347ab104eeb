"""Suite `backends`: each op, `nsa` and the layer by backend, beside dense attention of PyTorch."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.attention.suite import Suite, legend
from benchmarks.runner import Case, Method
from benchmarks.shapes import SHAPES, Shape, make_blocks, make_inputs, make_settings

OURS, FLEX, EAGER, SDPA = 'triton', 'flex', 'eager', 'sdpa'
LAYERS = {
    'layer': '`SparseAttention`, projections included',
    'recompute': '`SparseAttention(recompute=True)`, projections included',
    'dense-layer': '`DenseAttention`, projections included',
}
OPS = {
    'window': 'window attention',
    'compressed': 'compressed attention',
    'selection': 'block selection',
    'scores': 'scores of the selected blocks',
    'selected': 'selected attention of random blocks',
    'selected-overlapping': 'the same, where 16 consecutive queries share most blocks, as in trained models',
    'sum': 'gated sum of the branches',
    'loss': 'loss of the block scores, 512 queries of each batch row',
    'rotary': 'rotary embedding of the queries',
    'dense': 'dense attention of PyTorch',
    'nsa': '`nsa`: compress, select, attend, gate',
    **LAYERS,
}
WITHOUT_FLEX = ('selection', 'scores', 'sum', 'loss', 'rotary')
DIM = 2048


def work_of(shape: Shape) -> int:
    """Return what eager's time is proportional to: keys gathered for the selected branch, and compressed weights."""
    per_index_head = shape.num_selected * shape.selection_block_size * (shape.head_dim + shape.value_dim)
    return shape.batch * shape.seqlen * (shape.index_heads * per_index_head + 4 * shape.heads * shape.num_compressed)


def first(function: Any) -> Tensor:
    """Return the first output of a call."""
    outputs = function()
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def make_call(op: str, shape: Shape, backend: str, device: str) -> tuple[Any, list[Tensor]]:
    """Return a forward and the tensors to differentiate. The forward may return several outputs."""
    from native_sparse_attention import nsa, ops

    if op in LAYERS:
        layer = make_layer(op, shape, backend, device)
        size = (shape.batch, shape.seqlen, layer.to_qkv.in_features)
        x = torch.randn(size, dtype=shape.dtype, device=device, requires_grad=True)
        cu_seqlens = make_settings(shape, device).get('cu_seqlens')
        return partial(layer, x, cu_seqlens=cu_seqlens), [x, *(p for p in layer.parameters() if p.requires_grad)]
    tensors, settings = make_inputs(shape, device)
    where = {'causal': shape.causal}
    if 'cu_seqlens' in settings:
        where['cu_seqlens'] = settings['cu_seqlens']
    q, k, v, k_cmp, v_cmp, gates = (t.requires_grad_() for t in tensors.values())
    if op == 'nsa':
        return partial(nsa, **tensors, **settings, backend=backend), [*tensors.values()]
    sizes: dict[str, Any] = shape.block_sizes
    if op == 'window':
        settings = {'window_size': shape.window_size, 'backend': backend, **where}
        return partial(ops.window_attention, q, k, v, **settings), [q, k, v]
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
    if op == 'loss':
        from native_sparse_attention.losses import block_score_loss  # an older tree may lack it

        settings = {'window_size': shape.window_size, 'share_group': shape.share_group, 'seed': 0, 'backend': backend}
        return partial(block_score_loss, q, k, q, k_cmp, **settings, **sizes, **where), [q, k_cmp]
    blocks = partial(make_blocks, shape, device)
    if op.startswith('selected'):
        indices = blocks(16 if op == 'selected-overlapping' else 1)
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
    if op == 'selection':
        selected = {'num_selected': shape.num_selected, 'share_group': shape.share_group}
        return partial(ops.select_blocks, q, k_cmp, lse, **selected, **sizes, **where, backend=backend), []
    lse.requires_grad_()
    return partial(ops.chosen_scores, q, k_cmp, lse, blocks(), **sizes, **where, backend=backend), [q, k_cmp, lse]


def make_layer(op: str, shape: Shape, backend: str, device: str) -> Any:
    from native_sparse_attention import SparseAttention

    dim = DIM if device != 'cpu' else 64
    sizes: dict[str, Any] = {'kv_heads': shape.kv_heads, 'dim_value_head': shape.value_dim, 'causal': shape.causal}
    if op == 'dense-layer':
        from native_sparse_attention.nn.dense import DenseAttention  # an older tree has it elsewhere

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
            recompute=op == 'recompute',
        )
    return layer.to(device, shape.dtype)


def call_of(case: Case) -> tuple[Any, list[Tensor]]:
    forward, leaves = make_call(case['op'], SHAPES[case['shape']], case['backend'], case['device'])
    return partial(first, forward), leaves


def serves(op: str, backend: str, shape: Shape) -> bool:
    if op.startswith('dense') != (backend == SDPA):
        return False
    if op == 'dense':
        return not shape.num_sequences and shape.dtype != torch.float32
    return backend != FLEX or op not in WITHOUT_FLEX


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    """Keep the cases of a shape and op together, shortest first, so that a run cut short has whole comparisons."""
    return [
        {'op': op, 'shape': shape, 'backend': backend, 'work': work_of(SHAPES[shape])}
        for shape, op, backend in product(sorted(shapes, key=lambda name: SHAPES[name].tokens), names, backends)
        if serves(op, backend, SHAPES[shape])
    ]


def make_tables(rows: list[Case]) -> list[str]:
    rows = sorted(rows, key=lambda row: ([*OPS].index(row['op']), SHAPES[row['shape']].tokens))
    columns = ('op', 'shape', 'backend', 'forward ms', 'backward ms', 'both ms', 'peak GiB', '')
    keys = ('op', 'shape', 'backend', 'forward_ms', 'backward_ms', 'total_ms')
    body = [[*(row.get(key) for key in keys), report.gib(row.get('peak_bytes')), row.get('note', '')] for row in rows]
    named = {(row['op'], row['shape'], row['backend']): row for row in rows}
    compared = []
    for op, shape in dict.fromkeys((row['op'], row['shape']) for row in rows):
        ratios = [
            report.ratio(named.get((op, shape, other), {}).get(key), named.get((op, shape, OURS), {}).get(key))
            for other in (FLEX, EAGER)
            for key in ('forward_ms', 'backward_ms')
        ]
        if any(ratios):
            compared.append([op, shape, *ratios])
    known = [(f'{op} of {shape}', ratio) for op, shape, *ratios in compared for ratio in ratios if ratio is not None]
    slower = dict.fromkeys(name for name, ratio in known if ratio <= 1)
    exceptions = f', except in {", ".join(slower)}' if slower else ''
    return [
        'Medians; cold caches; peak beyond the inputs, gradients included. A pass of more than a second runs once, for '
        'eager the first time, which allocates memory too.',
        report.table(columns, body),
        'Times of the others over those of Triton:',
        report.table(('op', 'shape', 'flex forward', 'flex backward', 'eager forward', 'eager backward'), compared),
        f'In {len(known)} comparisons Triton is the faster{exceptions}.',
        legend([name for name in SHAPES if name in {row['shape'] for row in rows}]),
    ]


SUITE = Suite(
    title='Each op, `nsa` and the layer, by backend',
    about=f'Backend {SDPA} is for dense attention.',
    cases=OPS,
    backends=(OURS, FLEX, EAGER, SDPA),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(call_of, seconds=1),
    shapes='*',
    case_seconds=100,
)
