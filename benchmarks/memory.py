"""Does a forward and backward at 64k tokens, 64 query and 4 kv heads of 128, bf16, fit in 24 GiB? And where does it go?

    python -m benchmarks.memory                                   seconds on a GPU
    python -m benchmarks.memory --device cpu --shape tiny --out /tmp/results       to try the script

Everything counts: q, k, v (for the layer: input, weights and what lies between), the gradient of the output, outputs,
gradients, workspace, and what PyTorch's allocator holds beside (`reserved`). Two answers: `nsa` on given q, k and v,
and `SparseAttention` with projections and compression networks. Writes <date>-<gpu>-memory.md and .json to --out.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import torch

from benchmarks import report
from benchmarks.backends import TITLES, make_call
from benchmarks.shapes import SHAPES

LIMIT = 24 * 2**30


def measure(what: str, shape: str, backend: str, device: str) -> dict[str, Any]:
    """Bytes: of the inputs, after the forward, at the peak of each pass, at the end. In one run, from nothing."""
    gc.collect()
    if device != 'cpu':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def allocated() -> int:
        return 0 if device == 'cpu' else torch.cuda.memory_allocated()

    def peak() -> int:
        return 0 if device == 'cpu' else torch.cuda.max_memory_allocated()

    found: dict[str, Any] = {'what': what, 'backend': backend, 'before': allocated()}
    forward, leaves = make_call(what, SHAPES[shape], backend, device)
    found['inputs'] = allocated()
    out = forward()
    found['after_forward'], found['peak_forward'] = allocated(), peak()
    dout = torch.randn_like(out)
    out.backward(dout)
    found['peak'], found['end'] = peak(), allocated()
    found['reserved'] = 0 if device == 'cpu' else torch.cuda.max_memory_reserved()
    found['gradients'] = sum(t.grad.numel() * t.grad.element_size() for t in leaves if t.grad is not None)
    found['fits'] = found['peak'] <= LIMIT
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in leaves)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    parser.add_argument('--shape', default='paper-64k-h4', help='(%(default)s)')
    parser.add_argument('--backend', default='auto', help='(%(default)s)')
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure(what, options.shape, options.backend, options.device) for what in TITLES]
    keys = ('before', 'inputs', 'after_forward', 'peak_forward', 'gradients', 'peak', 'end', 'reserved')
    body = [[TITLES[row['what']], *(row[key] / 2**30 for key in keys), 'yes' if row['fits'] else 'NO'] for row in rows]
    tables = [
        SHAPES[options.shape].described() + f', backend {options.backend}, one forward and backward. GiB:',
        report.table(('', *(key.replace('_', ' ') for key in keys), 'peak within 24 GiB'), body),
    ]
    where = report.machine(options.device, options.commit)
    report.write(options.out, where, 'memory', 'Memory of a forward and backward', tables, rows)
    print('\n\n'.join(tables))
    return 0 if all(row['fits'] for row in rows) else 1


if __name__ == '__main__':
    sys.exit(main())
