"""How much memory does a forward and backward take at 64k tokens, 64 query and 4 KV heads of 128, bfloat16?

    python -m benchmarks.memory                                   seconds on a GPU
    python -m benchmarks.memory --device cpu --shape tiny --out /tmp/results       to try the script

The limit is 24 GiB. All memory counts: q, k, v (for the layer input, weights and intermediate tensors), outputs,
gradients and workspace; `reserved` is that of PyTorch's allocator. Cases: `nsa` on given q, k and v, `SparseAttention`
with projections and compression networks, the same with recompute=True, and `DenseAttention`. `kept`: tensors that the
forward saves for the backward, with the input and without the output. `of dense`: kept over what a dense layer must
save, its input before and after the norm, q, k, v, the output of attention and its log-sum-exp. Writes
<gpu>/memory.md and .json to --out.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from benchmarks import report
from benchmarks.attention.backends import OPS, make_call
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import peak, reset_peak

LIMIT = 24 * 2**30
CASES = ('nsa', 'layer', 'recompute', 'dense-layer')
# Limits of the saved bytes, in multiples of what a dense layer saves.
MOST_KEPT = {'layer': 3.0, 'recompute': 1.6}


def measure(op: str, shape: str, backend: str, device: str) -> dict[str, Any]:
    """Return bytes of the inputs, after the forward, at the peak of each pass and at the end, from one run."""

    def allocated() -> int:
        return 0 if device == 'cpu' else torch.cuda.memory_allocated()

    gc.collect()
    found: dict[str, Any] = {'op': op, 'backend': backend, 'before': reset_peak(device)}
    forward, leaves = make_call(op, SHAPES[shape], backend, device)
    found['inputs'] = allocated()
    out = forward()
    found['after_forward'], found['peak_forward'] = allocated(), peak(device)
    if op != 'nsa':
        x = leaves[0]
        found['kept'] = found['after_forward'] - found['inputs'] - size_of(out) + size_of(x) if device != 'cpu' else 0
        found['of_dense'] = found['kept'] / bytes_of_dense(SHAPES[shape], x)
    dout = torch.randn_like(out)
    out.backward(dout)
    found['peak'], found['end'] = peak(device), allocated()
    found['reserved'] = 0 if device == 'cpu' else torch.cuda.max_memory_reserved()
    found['gradients'] = sum(size_of(t.grad) for t in leaves if t.grad is not None)
    found['fits'] = found['peak'] <= LIMIT and found.get('of_dense', 0) <= MOST_KEPT.get(op, float('inf'))
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in leaves)
    return found


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_of_dense(shape: Shape, x: torch.Tensor) -> int:
    """Return bytes of input, normalised input, q, k, v, output and log-sum-exp of a dense layer."""
    features = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim)
    return 2 * size_of(x) + shape.tokens * (features * x.element_size() + 4 * shape.heads)


def main() -> int:
    parser = report.make_parser(__doc__)
    parser.add_argument('--shape', default='paper-64k-h4', help='(%(default)s)')
    parser.add_argument('--backend', default='auto', help='(%(default)s)')
    options = parser.parse_args()
    where = report.machine(options.device, options.commit)
    torch.manual_seed(0)
    rows = [measure(op, options.shape, options.backend, options.device) for op in CASES]
    keys = ('before', 'inputs', 'after_forward', 'peak_forward', 'gradients', 'peak', 'end', 'reserved')
    body = [
        [
            OPS[row['op']],
            *(row[key] / 2**30 for key in keys),
            report.gib(row.get('kept')),
            row.get('of_dense'),
            'yes' if row['fits'] else 'NO',
        ]
        for row in rows
    ]
    tables = [
        SHAPES[options.shape].described() + f', backend {options.backend}, one forward and backward. GiB:',
        report.table(('', *(key.replace('_', ' ') for key in keys), 'kept', 'of dense', 'within limits'), body),
        'Limits: a peak of 24 GiB; kept at most '
        + ', '.join(f'{most} times what dense must keep by {OPS[op]}' for op, most in MOST_KEPT.items())
        + '.',
    ]
    report.write(options.out, where, 'memory', 'Memory of a forward and backward', tables, rows)
    print('\n\n'.join(tables))
    return 0 if all(row['fits'] for row in rows) else 1


if __name__ == '__main__':
    sys.exit(main())
