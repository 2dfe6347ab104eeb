"""How long does the first training step of a layer take, whose kernels are not in Triton's cache yet?

    python -m benchmarks.cold_start                                   about 3 minutes on a GPU
    python -m benchmarks.cold_start --device cpu --out /tmp/results   to try the script; nothing is compiled

Every row is a process of its own with an empty TRITON_CACHE_DIR: forward and backward of a layer of preset long of
train_enwik8.py (16,384 tokens, bfloat16 autocast, with the loss of the block scores), as it is and after
`build_kernels`. The import of PyTorch is not counted. Writes <gpu>/cold-start.md and .json to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.step_parts import VARIANTS
from benchmarks.training_speed import make_config
from native_sparse_attention import build_kernels
from train_enwik8 import build_model

TITLE = 'First training step of a layer'
FORMS = {'three branches': 'separate', 'merged': 'long'}  # variants of benchmarks.step_parts
LIMIT_SECONDS = 20.0


def measure(form: str, builds: bool, device: str) -> dict[str, Any]:
    """Return the seconds of the first and of the second step, and of `build_kernels` before them."""
    attention, flags = VARIANTS[FORMS[form]]
    length = 2**14 if device == 'cuda' else 128
    config = replace(make_config(flags, attention, length, length), depth=1)
    layer = build_model(config, 'auto', torch.device(device)).blocks[0].attention
    x = torch.randn(config.batch, length, config.dim, device=device)

    def step() -> None:
        out, block_loss = layer(x, return_block_loss=True)
        (out.sum() + block_loss).backward()
        if device == 'cuda':
            torch.cuda.synchronize()

    def seconds(function: Any) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    with torch.autocast(device, torch.bfloat16):
        row: dict[str, Any] = {'build_s': None, 'kernels': None}
        if builds:
            row['build_s'] = seconds(lambda: row.update(kernels=build_kernels(layer, x, return_block_loss=True)))
        return {**row, 'first_s': seconds(step), 'second_s': seconds(step)}


def run(form: str, builds: bool, device: str) -> dict[str, Any]:
    """Return the row of a process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, '-m', 'benchmarks.cold_start', '--worker', json.dumps([form, builds, device])]
        environment = {**os.environ, 'TRITON_CACHE_DIR': cache}
        done = subprocess.run(command, env=environment, cwd=report.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {'form': form, 'builds': builds, 'note': done.stderr.strip().splitlines()[-1]}
    return {'form': form, 'builds': builds, **json.loads(done.stdout.splitlines()[-1])}


def make_tables(rows: list[dict[str, Any]]) -> list[str]:
    body, judged = [], []
    for row in rows:
        first, build = row.get('first_s'), row.get('build_s')
        whole = None if first is None else first + (build or 0.0)
        method = 'by `build_kernels`' if row['builds'] else 'one after the other'
        times = (row.get('kernels'), build, first, whole, row.get('second_s'))
        body.append([row['form'], method, *times, row.get('note', '')])
        if row['builds'] and whole is not None:
            verdict = 'met' if whole <= LIMIT_SECONDS else 'missed'
            judged.append(f'- {row["form"]}: at most {LIMIT_SECONDS:.0f} s: {verdict}')
    columns = ('form', 'kernels compile', 'kernels', '`build_kernels`', 'first step', 'both', 'second step', '')
    return [f'Seconds, {os.cpu_count()} CPU cores.', report.table(columns, body), '\n'.join(judged)]


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(*json.loads(options.worker))))
        return
    where, rows = report.machine(options.device, options.commit), list[dict[str, Any]]()
    for form in FORMS:
        for builds in (False, True):
            rows.append(run(form, builds, options.device))
            print(json.dumps(rows[-1]), flush=True)
            report.write(options.out, where, 'cold-start', TITLE, make_tables(rows), rows)


if __name__ == '__main__':
    main()
