"""Does training with the kernels follow training with eager? Two runs of train_enwik8.py, one plot.

    python -m benchmarks.loss_curve                               about 2 minutes on a GPU
    python -m benchmarks.loss_curve --device cpu --steps 5 --out /tmp/results -- --preset cpu    to try the script

Both runs have the same seed, text and settings and share one GPU; one has --backend auto, the other eager. Flags after
`--` go to both. Writes <gpu>/loss.md, .json and .png to --out, and prints the largest difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from trainer.record import sparse_backend

BACKENDS = ('auto', 'eager')
# Preset base with sizes that eager can train; training losses only.
FLAGS = {
    '--preset': 'base', '--seq-len': 1024, '--batch': 4, '--warmup': 50, '--seed': 0, '--log-every': 1,
    '--eval-every': 100_000, '--eval-bytes': 65_536, '--save-every': 100_000, '--sample-every': 100_000,
    '--sample-bytes': 1,
}  # fmt: skip


def start(backend: str, options: argparse.Namespace, folder: Path) -> subprocess.Popen:
    flags = [str(part) for pair in FLAGS.items() for part in pair]
    command = [
        *(sys.executable, str(report.ROOT / 'train_enwik8.py'), *flags, '--steps', str(options.steps)),
        *('--data', options.data, '--device', options.device, '--runs-dir', str(folder), '--name', backend),
        *('--backend', backend, *options.flags),
    ]
    print(' '.join(command), flush=True)
    log = (folder / f'{backend}.txt').open('w')
    return subprocess.Popen(command, cwd=report.ROOT, stdout=log, stderr=subprocess.STDOUT)


def losses(folder: Path, backend: str) -> tuple[dict[str, Any], list[float]]:
    """Return the settings of a run and its bits per byte, step by step."""
    lines = (folder / backend / 'log.jsonl').read_text().splitlines()
    first, *rows = map(json.loads, lines)
    return first, [row['bpb'] for row in rows if row.get('split') == 'train']


def chosen_backend(config: dict[str, Any], device: str) -> str:
    """Return the backend that 'auto' is in these runs."""
    from train_enwik8 import Config, build_model

    model = build_model(Config(**config), 'auto', torch.device(device))
    x = torch.empty(1, config['seq_len'], config['dim'], device=device)
    with torch.autocast(device, torch.bfloat16, enabled=config['amp'] and device == 'cuda'):
        return str(sparse_backend(model, x))


def plot(path: Path, curves: dict[str, list[float]], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout='constrained')
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for (name, curve), style in zip(curves.items(), ('-', '--'), strict=True):
        above.plot(range(1, len(curve) + 1), curve, style, label=name)
    first, second = curves.values()
    below.plot(range(1, len(first) + 1), [a - b for a, b in zip(first, second, strict=True)])
    above.set(ylabel='bits per byte', title=title)
    below.set(xlabel='step', ylabel='difference')
    above.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = report.make_parser(__doc__)
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--data', default='stdlib', help='text, as train_enwik8.py takes it (%(default)s)')
    parser.add_argument('--limit', type=float, default=540, help='seconds for both runs (%(default)s)')
    parser.add_argument('flags', nargs='*', help='of train_enwik8.py')
    options = parser.parse_args()
    where = report.machine(options.device, options.commit)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.monotonic()
        runs = {backend: start(backend, options, folder) for backend in BACKENDS}
        try:
            for backend, run in runs.items():
                code = run.wait(max(1.0, options.limit - (time.monotonic() - started)))
                if code:
                    print((folder / f'{backend}.txt').read_text()[-3000:])
                    return 1
        except subprocess.TimeoutExpired:
            print(f'stopped after {options.limit:.0f} s')
            for backend in BACKENDS:
                print(backend, (folder / f'{backend}.txt').read_text()[-500:])
            return 1
        finally:
            for run in runs.values():
                run.kill()
        seconds = time.monotonic() - started
        settings, _ = losses(folder, 'auto')
        curves = {backend: losses(folder, backend)[1] for backend in BACKENDS}
    auto = chosen_backend(settings['config'], options.device)
    first, second = curves.values()
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    # Change of the loss from step to step, caused by the data.
    noise = sum(abs(a - b) for a, b in pairwise(second)) / max(1, len(second) - 1)
    facts = {
        'steps': len(first),
        'auto is': auto,
        'last loss, auto': first[-1],
        'last loss, eager': second[-1],
        'largest difference': differences[worst],
        'at step': worst + 1,
        'mean difference': sum(differences) / len(differences),
        'mean change from step to step': noise,
        'seconds for both': round(seconds),
    }
    title = f'Loss with backend auto ({auto.split(" ")[0]}) and eager, {settings["corpus"]}, same seed'
    image = report.path(options.out, where, 'loss', '.png')
    plot(image, {f'auto: {auto.split(" ")[0]}': first, 'eager': second}, title)
    config = ', '.join(f'{name} {value}' for name, value in settings['config'].items())
    tables = [
        report.table(('', 'bits per byte'), list(facts.items())),
        f'![both curves]({image.name})',
        f'Settings: {config}.',
    ]
    report.write(options.out, where, 'loss', title, tables, {'facts': facts, 'curves': curves, **settings})
    print(report.table(('', ''), list(facts.items())))
    return 0


if __name__ == '__main__':
    sys.exit(main())
