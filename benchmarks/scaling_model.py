"""How far do context, tensor and data parallelism scale? A model of time and memory, fitted on a measurement.

    python -m benchmarks.scaling_model benchmarks/results/h200/parallel-*.json    results of benchmarks.distributed
    python -m benchmarks.scaling_model benchmarks/results/h200/parts-long.json --bandwidth 300
                                                                of benchmarks.attention, which has one GPU alone

Attention of one GPU takes a S² + b S for S tokens, forward and backward. Each of N ranks computes 1 / N of it and
receives bytes that follow from the shapes, at one bandwidth: the effective one, with copies and waiting. Coefficients
are fitted on the rows of one and of two GPUs, and compared with those of four and eight; benchmarks/scaling_steps.py
does the same for training steps of a whole model. Of a case that several results have, the first one counts. Beyond
--node GPUs the bandwidth is at most --network. Left out: latencies, stragglers, overlap. Writes <gpu>/scaling.md, .json
and .png to --out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.distributed_cases import name_of
from benchmarks.scaling_steps import Steps, exchanged, fit_steps, gathered_memory
from benchmarks.shapes import SHAPES, Shape

TITLE = 'Model of time and memory on many GPUs'
LENGTHS = (2**20, 2**22, 2**24)
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
LIMIT = 0.15  # difference between the model and a measurement
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Attention:
    """Context parallelism of one layer of attention.

    quadratic, linear: ms per token² and per token on one GPU. bandwidth: bytes per ms that a rank receives. local:
    bytes of memory per token of a rank.
    """

    shape: Shape
    quadratic: float
    linear: float
    bandwidth: float = np.inf
    local: float = 0.0

    def one_ms(self, tokens: int) -> float:
        return self.quadratic * tokens**2 + self.linear * tokens

    def ms(self, tokens: int, ranks: int, in_model: bool = False) -> float:
        return self.one_ms(tokens) / ranks + received(self.shape, tokens, ranks, in_model) / self.bandwidth

    def peak(self, tokens: int, ranks: int) -> float:
        return self.local * tokens / ranks + gathered_memory(self.shape, tokens)

    def efficiency(self, tokens: int, ranks: int) -> float:
        return self.one_ms(tokens) / ranks / self.ms(tokens, ranks, in_model=True)


def received(shape: Shape, tokens: int, ranks: int, in_model: bool) -> float:
    """Return the bytes that a rank receives in forward and backward.

    in_model: tokens are moved before the first and after the last layer, which is left out, not in each call.
    """
    features, size = shape.head_dim + shape.value_dim, shape.dtype.itemsize
    moved = tokens / ranks / 2 * ((shape.heads + shape.kv_heads) * features * size + shape.heads * 3 * 4)
    return exchanged(shape, tokens, ranks) + (0 if in_model else 2 * moved)


def slope(x: Sequence[float], y: Sequence[float], scale: Sequence[float]) -> float:
    """Return s >= 0 of y = s x by least squares of errors relative to scale."""
    a, b = np.array(x) / np.array(scale), np.array(y) / np.array(scale)
    return max(0.0, float((a * b).sum() / (a * a).sum()))


def fit_attention(rows: Rows, bandwidth: float | None = None) -> Attention:
    """Fit rows of attention. bandwidth: in place of a fitted one; then memory without rows of two GPUs is that of one.

    SystemExit if the result lacks a second length, or two GPUs and bandwidth.
    """
    one, two = ({row['tokens']: row for row in rows if row['gpus'] == gpus} for gpus in (1, 2))
    if len(one) < 2 or not (two or bandwidth):
        raise SystemExit('the result needs attention of two lengths on one GPU, and on two (or --bandwidth)')
    shape = SHAPES[next(iter(one.values()))['shape']]
    tokens, times = np.array(sorted(one), float), np.array([one[n]['ms'] for n in sorted(one)])
    (quadratic, linear), *_ = np.linalg.lstsq(np.stack([tokens**2, tokens], 1) / times[:, None], np.ones(len(one)))
    fit = Attention(shape, float(quadratic), float(linear))
    if bandwidth is None:
        rest = [row['ms'] - fit.one_ms(n) / 2 for n, row in two.items()]
        per_byte = slope([received(shape, n, 2, False) for n in two], rest, [row['ms'] for row in two.values()])
        bandwidth = 1 / per_byte if per_byte else np.inf
    peaks = {n: row['peak_bytes'] for n, row in (two or one).items() if row.get('peak_bytes')}
    ranks = 2 if two else 1
    own = [peak - (gathered_memory(shape, n) if two else 0) for n, peak in peaks.items()]
    local = slope([n / ranks for n in peaks], own, [*peaks.values()]) if peaks else 0.0
    return replace(fit, bandwidth=bandwidth, local=local)


def predict_layouts(rows: Rows) -> dict[int, float]:
    """Return ms by number of GPUs for rows of one case, whose traffic grows as (N - 1) / N.

    Data ranks have as many tokens each as one GPU; tensor ranks divide the work.
    """
    ms = {row['gpus']: row['ms'] for row in rows}
    if not {1, 2} <= ms.keys():
        return {}
    divides = any('tp' in row['layout'] for row in rows)
    work = {n: ms[1] / n if divides else ms[1] for n in ms}
    return {n: work[n] + 2 * (ms[2] - work[2]) * (n - 1) / n for n in ms}


def compare(rows: Rows, fit: Attention, steps: Steps | None) -> list[dict[str, Any]]:
    """Return measured and modelled values of the rows of several GPUs; the model is None where it lacks a coefficient.

    is_fitted: coefficients come from the value.
    """
    found = []
    for row in rows:
        ms, peak = None, None
        if row['step'] == 'attention':
            ms, peak = fit.ms(row['tokens'], row['gpus']), fit.peak(row['tokens'], row['gpus'])
        elif row['step'] != 'model':
            ms = predict_layouts([r for r in rows if r['op'] == row['op']]).get(row['gpus'])
        elif steps is not None:
            ms, peak = steps.ms(row), steps.peak(row)
        if row['gpus'] == 1:
            continue
        known, is_fitted = {name: row[name] for name in ('op', 'layout', 'gpus')}, row['gpus'] == 2
        found.append({**known, 'what': 'ms', 'measured': row['ms'], 'model': ms, 'is_fitted': is_fitted})
        if peak is not None and row.get('peak_bytes'):
            is_fitted &= row['step'] == 'attention' or 'fsdp' in row['layout']
            sizes = {'measured': row['peak_bytes'] / 2**30, 'model': peak / 2**30}
            found.append({**known, 'what': 'GiB', **sizes, 'is_fitted': is_fitted})
    return found


def usable(results: Sequence[Rows]) -> list[dict[str, Any]]:
    """Return the measured rows of several results, each case once. Rows of `benchmarks.attention` have one GPU.

    Of two kinds of parallelism together, those of the model alone.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for rows in results for row in rows):
        if row['op'] == 'nsa' and row.get('total_ms') and row['shape'].endswith('-h4'):
            named = {'step': 'attention', 'gpus': 1, 'layout': {}, 'tokens': SHAPES[row['shape']].seqlen}
            found.setdefault((row['shape'], ''), {**row, **named, 'ms': row['total_ms']})
        elif row.get('ms') and not row.get('graph') and (len(row['layout']) <= 1 or row['step'] == 'model'):
            found.setdefault((row['op'], name_of(row['layout'])), row)
    return [*found.values()]


def verdict(row: dict[str, Any]) -> str:
    """Return how a value of `compare` differs from its measurement."""
    if row['model'] is None:
        return 'not predicted'
    if row['is_fitted']:
        return 'fitted'
    return 'within' if abs(row['model'] / row['measured'] - 1) <= LIMIT else 'outside'


def extrapolate(fit: Attention, node: int, network: float) -> list[dict[str, Any]]:
    """Return the values of one layer in a model for LENGTHS and RANKS. network: bytes per ms."""
    across = replace(fit, bandwidth=min(fit.bandwidth, network))
    return [
        {
            'tokens': tokens,
            'ranks': ranks,
            'ms': (within := fit if ranks <= node else across).ms(tokens, ranks, in_model=True),
            'efficiency': within.efficiency(tokens, ranks),
            'received': received(fit.shape, tokens, ranks, True),
            'peak': fit.peak(tokens, ranks),
        }
        for tokens in LENGTHS
        for ranks in RANKS
    ]


def make_tables(fit: Attention, compared: Rows, far: Rows, node: int, network: float, source: str) -> list[str]:
    checked: dict[int, list[str]] = {}
    for row in compared:
        if not row['is_fitted']:
            checked.setdefault(row['gpus'], []).append(verdict(row))
    verdicts = [
        f'{gpus} GPUs within {LIMIT:.0%}: {found.count("within")} of {len(found)} values.'
        for gpus, found in sorted(checked.items())
    ]
    body = [
        [row['op'], name_of(row['layout']), row['what'], row['measured'], row['model'],
         None if row['model'] is None else f'{row["model"] / row["measured"] - 1:+.0%}', verdict(row)]
        for row in compared
    ]  # fmt: skip
    table = [
        [f'{row["tokens"]:,}', str(row['ranks']), row['ms'], f'{row["efficiency"]:.0%}', row['received'] / 1e9,
         row['peak'] / 2**30]
        for row in far
    ]  # fmt: skip
    scale = 2**17
    about = (
        f'One GPU: {fit.quadratic * scale**2:.3g} ms · (S / {scale:,})² + {fit.linear * scale:.3g} ms · S / {scale:,}. '
        f'Bandwidth between {node} GPUs of a node: {fit.bandwidth / 1e6:.0f} GB/s ({source}); across nodes at most '
        f'{network / 1e6:.0f} GB/s per GPU (assumed). A rank needs {fit.local / 1024:.1f} KiB per token of its own.'
    )
    dim = fit.shape.heads * fit.shape.head_dim
    weights = dim * (2 * dim + fit.shape.kv_heads * (fit.shape.head_dim + fit.shape.value_dim) + 8 * dim)
    size, tokens = fit.shape.dtype.itemsize, LENGTHS[0]
    traffic = [
        ['context', received(fit.shape, tokens, 8, True) / 1e9, 'S'],
        ['tensor', 8 * 7 / 8 * tokens * dim * size / 1e9, 'S'],
        ['FSDP', 3 * 7 / 8 * weights * size / 1e9, 'weights of a layer'],
    ]
    return [
        about,
        *verdicts,
        *([report.table(('', 'layout', '', 'measured', 'model', 'difference', ''), body)] if body else []),
        'One layer of attention under `apply_cp`, forward and backward; a feed-forward network exchanges nothing. '
        'Efficiency: speed over N times that of one GPU.',
        report.table(('tokens', 'GPUs', 'ms', 'efficiency', 'GB received per rank', 'GiB per GPU'), table),
        f'Traffic of a layer of width {dim:,} with a feed-forward network of 4 x, {tokens:,} tokens on 8 ranks:',
        report.table(('parallelism', 'GB received per rank', 'proportional to'), traffic),
    ]


def plot(path: Path, far: Rows, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = figure.add_subplot(xlabel='GPUs', ylabel='efficiency', title=title)
    for tokens in LENGTHS:
        rows = [row for row in far if row['tokens'] == tokens]
        label = f'{tokens // 2**20}M tokens'
        axes.plot([row['ranks'] for row in rows], [row['efficiency'] for row in rows], 'o-', label=label)
    axes.set_xscale('log', base=2)
    axes.set_xticks(RANKS, map(str, RANKS))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter('{x:.0%}')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('results', type=Path, nargs='+', help='JSON files of benchmarks.distributed')
    add('--node', type=int, default=8, help='GPUs of a node (%(default)s)')
    add('--bandwidth', type=float, help='GB/s between GPUs of a node (fitted on two GPUs)')
    add('--network', type=float, default=50, help='GB/s per GPU between nodes (%(default)s)')
    add('--out', type=Path, default=report.RESULTS, help='folder of the results (%(default)s)')
    options = parser.parse_args()
    found = [json.loads(path.read_text(encoding='utf-8')) for path in options.results]
    rows, network = usable([result['rows'] for result in found]), options.network * 1e6
    bandwidth = None if options.bandwidth is None else options.bandwidth * 1e6
    fit = fit_attention([row for row in rows if row['step'] == 'attention'], bandwidth)
    steps = fit_steps([row for row in rows if row['step'] == 'model'])
    compared, far = compare(rows, fit, steps), extrapolate(fit, options.node, network)
    where = found[0]['machine'] | {'commands': [' '.join(['python -m', *report.module_command()])]}
    image = report.path(options.out, where, 'scaling', '.png')
    plot(image, far, f'Context parallelism of attention, a model from {where["gpu"]}')
    source = 'assumed' if bandwidth else 'fitted'
    others = [f'{path.name}: commit {result["machine"]["commit"]}, date {result["machine"]["date"]}.'
              for path, result in zip(options.results[1:], found[1:], strict=True)]  # fmt: skip
    tables = [*others, *make_tables(fit, compared, far, options.node, network, source)]
    tables += [f'![Efficiency over GPUs]({image.name})']
    report.write(options.out, where, 'scaling', TITLE, tables, {'compared': compared, 'model': far})
    print('\n\n'.join(tables))


if __name__ == '__main__':
    main()
