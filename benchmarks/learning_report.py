"""Tables and pictures of the runs that `benchmarks.learning` left in a folder.

A file notes.md in the folder, such as one about runs without a record, becomes part of the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import sqrt
from operator import itemgetter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.report import table

Record = dict[str, Any]
# 97.5 % points of Student's t distribution, by degrees of freedom from 1 on; then the normal one.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
STUDENT += (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)


class Runs:
    """Finished runs by variant and seed."""

    def __init__(self, folder: Path, against: str) -> None:
        self.against = against
        self.runs: dict[str, dict[int, Record]] = {}
        for path in sorted(folder.glob('*-seed*.json')):
            record = json.loads(path.read_text(encoding='utf-8'))
            self.runs.setdefault(record['variant'], {})[record['seed']] = record
        first = self.runs.pop(against, {})
        if first:
            self.runs = {against: first, **self.runs}

    def all(self) -> list[Record]:
        return [record for records in self.runs.values() for record in records.values()]

    def pairs(self, variant: str) -> list[tuple[Record, Record]]:
        """(run, run of `against`) for the seeds that both have."""
        twins = self.runs.get(self.against, {})
        return [(record, twins[seed]) for seed, record in sorted(self.runs[variant].items()) if seed in twins]

    def differences(self, variant: str, value: Callable[[Record], float]) -> list[float]:
        return [value(record) - value(twin) for record, twin in self.pairs(variant)]


def half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    return (STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96) * stdev(values) / sqrt(len(values))


def signed(value: float | None) -> str:
    return '–' if value is None else f'{value:+.4f}'.replace('-', '−')


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def summary_table(runs: Runs) -> str:
    columns = ['variant', 'runs', 'valid', 'test', 'Δ valid', 'Δ test', 'sd', '95 % of Δ test', 'Δ test by seed']
    columns += ['parameters', 'sparse only', 'tokens/s', 'seconds']
    body = []
    for variant, records in runs.runs.items():
        rows = list(records.values())
        valid = runs.differences(variant, lambda r: r['final_valid'])
        test = runs.differences(variant, lambda r: r['final_test'])
        width = half_width(test)
        interval = '–' if width is None else f'{signed(mean(test) - width)} … {signed(mean(test) + width)}'
        is_twin = variant == runs.against
        by_seed = ', '.join(
            f'{record["seed"]}: {signed(delta)}' for (record, _), delta in zip(runs.pairs(variant), test, strict=True)
        )
        spread = f'{stdev(test):.4f}' if len(test) > 1 else '–'
        compared = [signed(_mean(valid)), signed(_mean(test)), spread, interval, by_seed]
        if is_twin:
            compared = ['–'] * len(compared)
        body.append(
            [
                variant,
                len(rows),
                f'{mean(r["final_valid"] for r in rows):.4f}',
                f'{mean(r["final_test"] for r in rows):.4f}',
                *compared,
                f'{rows[0]["parameters"]:,}',
                f'{rows[0]["parameters_sparse_only"]:,}',
                f'{mean(r["tokens_per_s"] for r in rows):,.0f}',
                f'{mean(r["seconds"] for r in rows):,.0f}',
            ]
        )
    return table(columns, body)


def position_table(runs: Runs) -> str:
    """Return the table of mean differences on the test text; the reference variant has its bits per byte."""
    buckets = list(runs.all()[0]['test_by_position'])
    body = []
    for variant, records in runs.runs.items():
        if variant == runs.against:
            values = [f'{mean(r["test_by_position"][b] for r in records.values()):.4f}' for b in buckets]
        else:
            values = [signed(_mean(_by_bucket(runs, variant, b))) for b in buckets]
        body.append([variant, *values])
    return table(['variant', *buckets], body)


def _by_bucket(runs: Runs, variant: str, bucket: str) -> list[float]:
    return runs.differences(variant, lambda r: r['test_by_position'][bucket])


def probe_table(runs: Runs) -> str:
    """Return means over seeds; a cell has one value per layer."""
    found = [(variant, list(records.values())) for variant, records in runs.runs.items()]
    found = [(variant, known) for variant, rs in found if (known := [r for r in rs if r['probes']])]
    names = list(dict.fromkeys(name for _, rs in found for r in rs for layer in r['probes'] for name in layer))
    body = []
    for variant, records in found:
        for name in names:
            depth = len(records[0]['probes'])
            layers = [[r['probes'][i][name] for r in records if name in r['probes'][i]] for i in range(depth)]
            if any(layers):
                body.append([variant, name, ' '.join(f'{mean(values):.3g}' if values else '–' for values in layers)])
        for name, branches in _final_gates(records).items():
            body.append([variant, f'gate {name}', ' '.join(branches)])
    return table(['variant', 'probe', 'by layer'], body)


def _final_gates(records: Sequence[Record]) -> dict[str, list[str]]:
    """Mean gates at the end, by kind of gate and branch: a text per layer."""
    found: dict[str, list[str]] = {}
    for kind, layers in records[0]['gates'][-1].items():
        if kind == 'step':
            continue
        width = max(len(layer) for layer in layers if layer is not None)
        for branch in range(width):
            means = [
                None if layer is None else mean(r['gates'][-1][kind][i][branch] for r in records)
                for i, layer in enumerate(layers)
            ]
            found[gate_name(kind, branch, width)] = ['–' if m is None else f'{m:.3f}' for m in means]
    return found


def gate_name(kind: str, branch: int, width: int) -> str:
    if kind != 'to_strategy_combine':
        return kind.removesuffix('_gate')
    return ('compressed', 'selected', 'window')[branch] if width == 3 else 'compressed'


def make_text(folder: Path, against: str, pictures: bool = True) -> str:
    runs = Runs(folder, against)
    if not runs.runs:
        return f'{folder}: no finished runs'
    records = runs.all()
    first = records[0]
    text, config = first['settings']['text'], first['settings']['config']
    sequences = config['batch'] * config['grad_accum']
    kinds = {name: sorted({str(r.get(name)) for r in records}) for name in ('commit', 'gpu', 'torch', 'backend')}
    parts = [
        '# Bits per byte of sparse variants and their dense twins',
        f'Text: {text["name"]}, {text["bytes"]:,} bytes, SHA-256 {text["sha256"]}. '
        f'{config["steps"]:,} steps of {sequences} sequences of {config["seq_len"]:,} bytes.',
        '. '.join(f'{name}: {", ".join(values)}' for name, values in kinds.items()) + '.',
        f'Δ is variant minus {against}, both from the same start on the same batches; negative is better. sd and the '
        '95 % interval (Student t) are over seeds. tokens/s are those of training steps.',
        summary_table(runs),
        *(path.read_text(encoding='utf-8').strip() for path in folder.glob('notes.md')),
        f'Test text by position in the sequence: bits per byte of {against}, mean Δ of the others.',
        position_table(runs),
    ]
    if pictures:
        parts += [
            '![bits per byte over steps and seconds](curves.png)',
            '![difference by position](positions.png)',
            *(f'![gates of {name}](gates-{name}.png)' for name in runs.runs if has_gates(runs, name)),
            'Layers at the end, means over seeds, of a few validation sequences.',
            probe_table(runs),
            f'Settings: {settings_of(records)}.',
            *sorted({f'`{r["command"]}`' for r in records if 'command' in r}),
        ]
    return '\n\n'.join(parts)


def settings_of(records: Sequence[Record]) -> str:
    """Return names and values of the settings. A setting that differs names the variants of each value."""
    found: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for name, value in (record['settings']['config'] | record['settings']['sparse']).items():
            variants = found.setdefault(name, {}).setdefault(str(value), [])
            if record['variant'] not in variants:
                variants.append(record['variant'])
    texts = []
    for name, values in found.items():
        given = [f'{value} ({", ".join(of)})' if len(values) > 1 else value for value, of in values.items()]
        texts.append(f'{name} {" or ".join(given)}')
    return ', '.join(texts)


def has_gates(runs: Runs, variant: str) -> bool:
    return any(len(row) > 1 for record in runs.runs[variant].values() for row in record['gates'])


def write(folder: Path, against: str) -> str:
    """Write report.md and the pictures to the folder; returns the text."""
    text, runs = make_text(folder, against), Runs(folder, against)
    if runs.runs:
        (folder / 'report.md').write_text(text + '\n', encoding='utf-8')
        plot_curves(folder / 'curves.png', runs)
        plot_positions(folder / 'positions.png', runs)
        for variant in runs.runs:
            if has_gates(runs, variant):
                plot_gates(folder / f'gates-{variant}.png', variant, list(runs.runs[variant].values()))
    return text


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a line style for each of up to 40 names; the first is black."""
    from matplotlib import colormaps

    colours, lines = colormaps['tab10'].colors, ('-', '--', ':', '-.')  # type: ignore[attr-defined]
    styles = {name: {'color': colours[i % 10], 'linestyle': lines[i // 10 % 4]} for i, name in enumerate(names[1:])}
    return {names[0]: {'color': 'black', 'linestyle': '-'}, **styles}


def _mean_at(steps: Sequence[int], runs: Sequence[Sequence[Record]], value: Callable[[Record], float]) -> np.ndarray:
    """Mean over runs of a value of their rows; between two rows of a run it is linear in the logarithm of the step."""
    curves = []
    for rows in runs:
        at = np.log1p([row['step'] for row in rows])
        curves.append(np.interp(np.log1p(steps), at, [value(row) for row in rows]))
    return np.mean(curves, axis=0)


def plot_curves(path: Path, runs: Runs) -> None:
    """Draw bits per byte of the validation text, means over seeds, and below them the paired differences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout='constrained')
    axes = figure.subplots(2, 2, sharex='col')
    styles = _styles(list(runs.runs))
    for column, (name, label) in enumerate((('step', 'step'), ('seconds', 'seconds of training'))):
        above, below = axes[0][column], axes[1][column]
        for variant, records in runs.runs.items():
            rows = [r['valid'] for r in records.values()]
            steps = [row['step'] for row in rows[0]]
            x, y = _mean_at(steps, rows, itemgetter(name)), _mean_at(steps, rows, itemgetter('bpb'))
            above.plot(x[1:], y[1:], label=f'{variant} ({len(rows)})', **styles[variant], marker='.')
            if (pairs := runs.pairs(variant)) and variant != runs.against:
                own, twins = (_mean_at(steps, [p[i]['valid'] for p in pairs], itemgetter('bpb')) for i in range(2))
                below.plot(x[1:], (own - twins)[1:], **styles[variant], marker='.')
        above.set(ylabel='bits per byte, validation', yscale='log', title=f'over {label}')
        above.yaxis.set_major_formatter('{x:.2f}')
        above.yaxis.set_minor_formatter('{x:.2f}')
        below.set(xlabel=label, ylabel=f'minus {runs.against} at the same step')
        below.axhline(0, color='black', linewidth=0.8)
        for each in (above, below):
            each.set_xscale('log')
            each.grid(alpha=0.3, which='both')
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc='outside right upper', title='variant (seeds)')
    figure.savefig(path, dpi=110)


def plot_positions(path: Path, runs: Runs) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout='constrained')
    title = f'Bits per byte of the test text minus {runs.against}, mean and 95 % interval over seeds'
    axes = figure.add_subplot(xlabel='position in the sequence', ylabel='Δ bits per byte', title=title)
    buckets, styles = list(runs.all()[0]['test_by_position']), _styles(list(runs.runs))
    shown = [variant for variant in runs.runs if variant != runs.against and runs.pairs(variant)]
    for index, variant in enumerate(shown):
        values = [_by_bucket(runs, variant, bucket) for bucket in buckets]
        x = [place + 0.4 * (index / max(1, len(shown) - 1) - 0.5) for place in range(len(buckets))]
        widths = [half_width(v) or 0.0 for v in values]
        axes.errorbar(x, [mean(v) for v in values], widths, label=variant, **styles[variant], marker='o', markersize=3)
    axes.set_xticks(range(len(buckets)), [bucket.replace('-', '–') for bucket in buckets])
    axes.axhline(0, color='black', linewidth=0.8)
    axes.grid(alpha=0.3)
    if shown:
        figure.legend(loc='outside right upper')
    figure.savefig(path, dpi=110)


def plot_gates(path: Path, variant: str, records: Sequence[Record]) -> None:
    """Draw a panel per kind of gate and branch, a line per layer: means over seeds, heads and tokens."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = records[0]['gates']
    kinds = {k: max(len(layer) for layer in layers if layer) for k, layers in rows[0].items() if k != 'step'}
    panels = [(kind, branch, width) for kind, width in kinds.items() for branch in range(width)]
    figure = Figure(figsize=(4 * len(panels) + 1.5, 4), layout='constrained')
    figure.suptitle(f'{variant}: mean gate by layer, {len(records)} seeds')
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    steps, depth = [row['step'] for row in rows], len(rows[0][panels[0][0]])
    for axes, (kind, branch, width) in zip(all_axes, panels, strict=True):
        for layer in range(depth):
            if rows[0][kind][layer] is not None:
                y = _mean_at(steps, [r['gates'] for r in records], lambda r: r[kind][layer][branch])  # noqa: B023
                colour = colormaps['viridis'](layer / max(1, depth - 1) * 0.9)
                axes.plot(steps, y, '.-', color=colour, label=f'layer {layer}')
        axes.set(title=gate_name(kind, branch, width), xlabel='step', ylim=(0, 1))
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel('sigmoid of the logits')
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc='outside right upper')
    figure.savefig(path, dpi=110)
