"""Table and picture of the runs of `benchmarks.retrieval`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from benchmarks.retrieval_run import VARIANTS

RUNS = '*-seed*.json'
TITLE = 'Far retrieval learnt from scratch'
Run = dict[str, Any]


def load(folder: Path) -> list[Run]:
    """Load the runs of a folder, by variant in the order of VARIANTS, then by seed.

    Raises:
        ValueError: if the folder has no run.
    """
    runs = [json.loads(path.read_text(encoding='utf-8')) for path in sorted(folder.glob(RUNS))]
    if not runs:
        raise ValueError(f'report is {folder}, but must be a folder with runs, {RUNS}')
    order = list(VARIANTS)
    return sorted(runs, key=lambda run: (order.index(run['config']['variant']), run['config']['seed']))


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run['config']['variant'], []).append(run)
    return found


def accuracies(run: Run, task: str, length: int) -> dict[float | None, float]:
    """Accuracy by depth (None for recall)."""
    rows = (row for row in run['evaluations'] if (row['task'], row['length']) == (task, length))
    return {row['depth']: row['accuracy'] for row in rows}


def steps_to_pass(run: Run) -> int | None:
    """Steps from the start until both accuracies passed the threshold at the trained length, or None."""
    last = run['stages'][-1]
    if last['length'] != run['config']['lengths'][-1] or last['passed_after'] is None:
        return None
    return last['start'] + last['passed_after']


def percent(value: float | None) -> str | None:
    return None if value is None else f'{100 * value:.1f}'


def tables(runs: Sequence[Run]) -> list[str]:
    config = runs[0]['config']
    lengths = sorted({stage['length'] for run in runs for stage in run['stages']} | {*config['lengths']})
    trained = config['lengths'][-1]
    far = [factor * trained for factor in config['factors']]
    passed_after = {(run['config']['variant'], run['config']['seed']): steps_to_pass(run) for run in runs}
    stage_rows, result_rows = [], []
    for run in runs:
        name = [run['config']['variant'], run['config']['seed']]
        stages = {stage['length']: stage for stage in run['stages']}
        passed = steps_to_pass(run)
        twin = VARIANTS[run['config']['variant']].twin
        ratio = report.ratio(passed, passed_after.get((twin, run['config']['seed'])))
        stage_rows.append([*name, *(stage_cell(stages.get(length)) for length in lengths), passed, ratio])
        cells = []
        for length in far:
            needles = accuracies(run, 'needle', length).values()
            cells += [percent(accuracies(run, 'recall', length).get(None)), percent(min(needles, default=None))]
        speed = run['step'] / run['seconds'] if run['seconds'] else None
        size = f'{run["parameters"]:,}'
        status = '' if run['finished'] else 'not finished'
        result_rows.append([*name, *cells, run['step'], speed, size, run['backend'] or 'dense', status])
    columns = [f'{task}, {length:,}' for length in far for task in ('recall', 'needle')]
    threshold = f'{100 * config["threshold"]:g} %'
    return [
        f'Accuracy in per cent after the last step, at {", ".join(f"{f}×" for f in config["factors"])} the trained '
        f'length of {trained:,} tokens. Recall: up to {config["queries"]} of up to {config["pairs"]} pairs are asked. '
        f'Needle: the lowest of {config["depths"]} depths.',
        report.table(('variant', 'seed', *columns, 'steps', 'steps/s', 'parameters', 'attention', ''), result_rows),
        f'Steps in each stage of the curriculum until recall and needles reached {threshold} over '
        f'{config["check_every"]} steps (–: the stage did not begin; >: it ended without). Total: steps to {threshold} '
        f'at the trained length, and over those of the dense twin.',
        report.table(('variant', 'seed', *(f'{length:,}' for length in lengths), 'total', '/ dense'), stage_rows),
        'Accuracy of needles in per cent by length and depth (0: start of the text), mean over seeds:',
        *(f'{variant}:\n\n{depth_table(group)}' for variant, group in by_variant(runs).items()),
        'Settings: ' + ', '.join(f'{k} {v}' for k, v in config.items() if k not in ('variant', 'seed')) + '.',
    ]


def stage_cell(stage: Run | None) -> str | None:
    if stage is None:
        return None
    passed = stage['passed_after']
    return f'> {stage["steps"]:,}' if passed is None else f'{passed:,}'


def needle_map(runs: Sequence[Run]) -> tuple[list[int], list[float], list[list[float | None]]]:
    """Lengths, depths, and the mean accuracy over runs at [length][depth]."""
    rows = [row for run in runs for row in run['evaluations'] if row['task'] == 'needle']
    lengths, depths = (sorted({row[name] for row in rows}) for name in ('length', 'depth'))
    found = []
    for length in lengths:
        cells = [[row['accuracy'] for row in rows if (row['length'], row['depth']) == (length, d)] for d in depths]
        found.append([mean(cell) if cell else None for cell in cells])
    return lengths, depths, found


def depth_table(runs: Sequence[Run]) -> str:
    lengths, depths, found = needle_map(runs)
    rows = [[f'{length:,}', *map(percent, row)] for length, row in zip(lengths, found, strict=True)]
    return report.table(('length', *(f'{depth:.2g}' for depth in depths)), rows)


def plot(path: Path, runs: Sequence[Run]) -> None:
    """A heat map of needles per variant; below them accuracy of recall and needles over steps."""
    from matplotlib.figure import Figure

    groups = by_variant(runs)
    figure = Figure(figsize=(max(9.0, 3.6 * len(groups)), 8), layout='constrained')
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    above.suptitle('needle: accuracy by length and depth, mean over seeds')
    image = None
    axes_of = above.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (variant, group) in zip(axes_of, groups.items(), strict=True):
        lengths, depths, found = needle_map(group)
        values = [[float('nan') if cell is None else cell for cell in row] for row in found]
        axes.set(title=variant, xlabel='length')
        if not values:
            continue
        image = axes.imshow(list(zip(*values, strict=True)), vmin=0, vmax=1, cmap='viridis', aspect='auto')
        axes.set_xticks(range(len(lengths)), [f'{n:,}' for n in lengths], rotation=60)
        axes.set_yticks(range(len(depths)), [f'{depth:.2g}' for depth in depths])
        trained = group[0]['config']['lengths'][-1]
        axes.axvline(lengths.index(trained) + 0.5, color='white', linestyle='--')  # longer texts were never seen
    axes_of[0].set_ylabel('depth')
    if image is not None:
        above.colorbar(image, ax=list(axes_of))
    below.suptitle('accuracy on fresh training data; a mark at the top: the next length of the curriculum begins')
    colors = {variant: f'C{index}' for index, variant in enumerate(groups)}
    for axes, task in zip(below.subplots(1, 2, sharey=True), ('recall', 'needle'), strict=True):
        axes.set(title=task, xlabel='step', ylabel='accuracy', ylim=(0, 1.02))
        for variant, group in groups.items():
            for index, run in enumerate(group):
                rows = [row for row in run['rows'] if row[task] is not None]
                steps, values = ([row[name] for row in rows] for name in ('step', task))
                label = variant if index == 0 else None
                axes.plot(steps, values, color=colors[variant], alpha=0.8, label=label)
                starts = [stage['start'] for stage in run['stages'][1:]]
                axes.plot(starts, [1.01] * len(starts), '|', color=colors[variant])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def write(folder: Path) -> str:
    """Write <gpu>/retrieval.md, .json and .png to the folder, and return the text of the tables."""
    runs = load(folder)
    where = {**runs[0]['machine'], 'commands': list(dict.fromkeys(c for r in runs for c in r['machine']['commands']))}
    found = tables(runs)
    image = report.path(folder, where, 'retrieval', '.png')
    plot(image, runs)
    report.write(folder, where, 'retrieval', TITLE, [*found, f'![accuracy]({image.name})'], runs)
    return '\n\n'.join(found)
