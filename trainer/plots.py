"""Pictures of runs, yardsticks, and the comparison of runs."""

from __future__ import annotations

import gzip
import io
import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from trainer.console import UserError, say
from trainer.folder import read_rows, write_atomically

Row = dict[str, Any]
SMOOTHED_LINES = 20  # of the log, the longest running mean of the training curve


def gzip_bits(text: Tensor) -> float:
    """Bits per byte of uint8 text [N] by gzip -9."""
    return 8 * len(gzip.compress(text.numpy().tobytes(), 9)) / len(text)


def unigram_bits(train: Tensor, text: Tensor) -> float:
    """Bits per byte of uint8 text [N] under the byte frequencies of `train`, each count raised by 1."""
    counts = torch.bincount(train, minlength=256).double() + 1
    return -(counts / counts.sum()).log2()[text.long()].mean().item()


def coverage(row: Row) -> str:
    part = 'all' if row['bytes'] == row['bytes_of_split'] else f'first {row["bytes"]:,} of'
    return f'{part} {row["bytes_of_split"]:,} bytes'


def smoothed(values: list[float]) -> list[float]:
    """Return running means over the last fifth of the lines so far, at most `SMOOTHED_LINES`."""
    means = []
    for end in range(1, len(values) + 1):
        span = max(1, min(SMOOTHED_LINES, end // 5))
        means.append(sum(values[end - span : end]) / span)
    return means


def curve(rows: list[Row], split: str, over: str = 'step') -> tuple[list[float], list[float]]:
    found = [row for row in rows if row.get('split') == split]
    return [row[over] for row in found], [row['bpb'] for row in found]


def save_figure(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format='png', dpi=120)
    write_atomically(path, content.getvalue())


def draw_yardsticks(axes: Axes, rows: list[Row]) -> None:
    found = [row for row in rows if row.get('of') == 'valid']
    for row, style in zip(found, ('--', ':'), strict=False):
        axes.axhline(row['bpb'], color='gray', linestyle=style, label=f'{row["yardstick"]}: {row["bpb"]:.3f}')


def plot_run(path: Path, rows: list[Row], title: str) -> None:
    """Write the curves of a run: train raw (faint) and smoothed, validation, yardsticks."""
    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = figure.add_subplot(xlabel='step', ylabel='bits per byte', title=title)
    steps, train = curve(rows, 'train')
    axes.plot(steps, train, color='C0', alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(train), color='C0', label='train, running mean')
    covered = coverage([row for row in rows if row.get('split') == 'valid'][-1])
    axes.plot(*curve(rows, 'valid'), 'o-', color='C1', markersize=4, label=f'valid, {covered}')
    draw_yardsticks(axes, rows)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def compare(folders: list[Path], path: Path) -> int:
    """Print a table of runs and write their curves over steps and over training seconds to `path`.

    Raises:
        UserError: a log has no validation or no elapsed seconds, or the runs evaluate different texts.
    """
    logs = {folder: read_rows(folder) for folder in folders}
    texts = {}
    for folder, rows in logs.items():
        valid = [row for row in rows if row.get('split') == 'valid']
        if not valid or 'config' not in rows[0]:
            raise UserError(f'{folder}/log.jsonl: has no validation to compare')
        if not all('seconds' in row and 'bpb' in row for row in rows if 'split' in row):
            raise UserError(f'{folder}/log.jsonl: has no elapsed seconds (it is of an older version)')
        texts[folder] = f'{valid[-1]["corpus"]}, {coverage(valid[-1])}'
    if len(set(texts.values())) > 1:
        raise UserError(f'--compare: different texts: {"; ".join(f"{f}: {text}" for f, text in texts.items())}')
    print_table(logs)
    figure = Figure(figsize=(13, 5), layout='constrained')
    for axes, over in zip(figure.subplots(1, 2, sharey=True), ('step', 'seconds'), strict=True):
        for number, (folder, rows) in enumerate(logs.items()):
            at, train = curve(rows, 'train', over)
            axes.plot(at, smoothed(train), color=f'C{number % 10}', alpha=0.35, linewidth=0.8)
            axes.plot(*curve(rows, 'valid', over), 'o-', color=f'C{number % 10}', markersize=4, label=folder.name)
        draw_yardsticks(axes, logs[folders[0]])
        axes.set(xlabel={'step': 'step', 'seconds': 'seconds of training steps'}[over], ylabel='bits per byte')
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f'valid (dots) and train (faint): {texts[folders[0]]}')
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    say(f'picture: {path}')
    return 0


def print_table(logs: dict[Path, list[Row]]) -> None:
    head = ('run', 'attention', 'parameters', 'steps', 'seconds', 'best valid', 'last valid', 'test')
    body: list[tuple[str, ...]] = [head]
    for folder, rows in logs.items():
        (*_, steps), valid = curve(rows, 'valid')
        seconds = max(row.get('seconds', 0.0) for row in rows)
        test = curve(rows, 'test')[1]
        size = rows[0].get('parameters', {}).get('total', math.nan)
        figures = f'{steps:,}', f'{seconds:,.1f}', f'{min(valid):.4f}', f'{valid[-1]:.4f}'
        last = f'{test[-1]:.4f}' if test else '-'
        body.append((str(folder), rows[0]['config']['attention'], f'{size:,}', *figures, last))
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    for row in body:
        left, right = row[:2], row[2:]
        cells = [text.ljust(width) for text, width in zip(left, widths, strict=False)]
        say('  '.join(cells + [text.rjust(width) for text, width in zip(right, widths[2:], strict=True)]))
