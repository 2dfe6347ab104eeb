"""Suite `layouts`: `nsa` over dense attention by head layout and length, with separate and with merged branches."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from benchmarks import judge, report
from benchmarks.attention.parts import dense, make_judged, make_problem, needed, ours
from benchmarks.attention.parts_report import CUDNN, FLASH, NAMES, OURS, Found, shape_of, short
from benchmarks.attention.suite import Suite, cross_one
from benchmarks.report import best_of, ratio, reached
from benchmarks.runner import Call, Case, Method, Plot
from benchmarks.shapes import RHO, SHAPES, Shape
from benchmarks.timing import PASSES, measure_with_kernels

EAGER = 'eager'
SEPARATE, MERGED, DENSE, UNRELATED = 'separate', 'merged', 'dense', '-unrelated'
MODES = (SEPARATE, MERGED)
CASES = {
    DENSE: 'dense attention of PyTorch',
    SEPARATE: '`nsa` with three branches, as in the paper',
    MERGED: '`nsa` with `merge_window`, `use_diff_topk`, an output gate and blocks selected before the window',
    SEPARATE + UNRELATED: 'separate, with unrelated tokens',
    MERGED + UNRELATED: 'merged, with unrelated tokens',
}
# Least speed over the faster dense attention: forward and backward by shape and mode.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    'paper-8k-h4': dict.fromkeys(MODES, (1.2, 1.6)),
    'short-4k-h4': {MERGED: (0.9, 1.05), SEPARATE: (0.55, 0.9)},
    'llama-32k': dict.fromkeys(MODES, (3.0, 3.5)),
    'heads-8-4x64-4x8k': dict.fromkeys(MODES, (1.0, 1.2)),
    'llama-16k': dict.fromkeys(MODES, (1.8, 2.0)),
    'heads-24-4x96-48k': dict.fromkeys(MODES, (3.0, 3.5)),
    'heads-24-4x80-48k': dict.fromkeys(MODES, (3.0, 3.5)),
    'heads-16-16x128-32k': dict.fromkeys(MODES, (1.5, 1.8)),
}
# Most tokens from which on forward and backward together are faster than dense attention, in the layout of a shape.
BREAK_EVEN_SHAPE = 'paper-8k-h4'
BREAK_EVEN = {MERGED: 4096, SEPARATE: 6144}
# In order of worth: shapes with targets, the other lengths of the break-even, the rest of the curves.
DEFAULT_SHAPES = (
    *TARGETS, 'paper-16k-h4', 'paper-32k-h4', 'paper-64k-h4', 'heads-32-8x128-8k', 'heads-32-8x128-64k',
    'budget-8k', 'budget-16k', 'budget-32k', 'heads-8-4x64-64k', 'heads-16-16x128-8k', 'heads-16-16x128-16k',
    'heads-24-4x96-16k', 'heads-24-4x80-16k',
)  # fmt: skip
# Default shapes that are measured with unrelated tokens, too.
UNRELATED_SHAPES = ('paper-8k-h4', 'llama-32k', 'heads-8-4x64-4x8k', 'paper-64k-h4')
SPEED_TICKS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)
STYLES: dict[str, Literal['-', '--']] = {SEPARATE: '-', MERGED: '--'}
# HQ, H and D.
Layout = tuple[int, int, int]


def make_call(case: Case) -> tuple[Call, list[Tensor]]:
    op, backend, shape = case['op'], case['backend'], shape_of(case['shape'])
    mode = op.removesuffix(UNRELATED)
    problem = make_problem('nsa' + UNRELATED * (op != mode), shape, case['device'])
    if mode == DENSE:
        steps, gold = dense(backend, problem), judge.dense_row
    elif mode == MERGED:
        problem.tensors['gates'] = problem.tensors['gates'][..., :2]
        options: dict[str, Any] = {'merge_window': True, 'num_recent': shape.window, 'use_diff_topk': True}
        steps, gold = ours(problem, backend=backend, **options), judge.merged_row
    else:
        steps, gold = ours(problem, backend=backend), judge.nsa_row
    return make_judged(needed(steps.whole), steps, problem, steps.reads, gold, typical=True)


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    """Keep the cases of a shape together, in order of worth; those with unrelated tokens come last."""
    known = {name: place for place, name in enumerate(DEFAULT_SHAPES)}
    cases = [
        {'op': op, 'shape': shape, 'backend': backend}
        for shape, op, backend in product(sorted(shapes, key=lambda name: known.get(name, -1)), names, backends)
        if (op == DENSE) == (backend in (CUDNN, FLASH))
        and (not op.endswith(UNRELATED) or shape in UNRELATED_SHAPES or shape not in known)
    ]
    for case in cases:
        if case['op'] != DENSE:
            # The designs of selected attention and the tiles of block selection depend on the length.
            case['compiles'] = f'{case["op"].removesuffix(UNRELATED)} {SHAPES[case["shape"]].seqlen}'
    return sorted(cases, key=lambda case: case['op'].endswith(UNRELATED))


def find_gain(found: Found, op: str, shape: str, what: str) -> tuple[float | None, str | None]:
    """Return the time of the faster dense attention over that of `nsa`, and who that is. what: a pass, or total."""
    time, name = best_of({backend: found.ms(DENSE, shape, backend, what) for backend in (CUDNN, FLASH)})
    return ratio(time, found.ours(op, shape, what)), name


def layout_of(shape: Shape) -> Layout:
    return shape.heads, shape.kv_heads, shape.head_dim


def find_curve(found: Found, layout: Layout, mode: str) -> dict[int, float]:
    """Return the gain of forward and backward together by length; of two batches of a length, that of the larger."""
    gains = {
        SHAPES[name].seqlen: find_gain(found, mode, name, 'total')[0]
        for name in found.shapes
        if layout_of(SHAPES[name]) == layout
    }
    return {length: gain for length, gain in sorted(gains.items()) if gain}


def target_rows(found: Found) -> list[list[Any]]:
    """Return cells: shape, mode, figure, value, target, verdict, and the name of the faster dense attention."""
    body: list[list[Any]] = []
    for shape, by_mode in TARGETS.items():
        for (mode, targets), (index, what) in product(by_mode.items(), enumerate(PASSES)):
            gain, name = find_gain(found, mode, shape, what)
            cells = [None, None] if gain is None else [reached(gain, targets[index]), NAMES.get(name or '')]
            body.append([describe(shape_of(shape)), mode, f'{what}, at least', gain, targets[index], *cells])
    layout = layout_of(SHAPES[BREAK_EVEN_SHAPE])
    for mode, most in BREAK_EVEN.items():
        gains = find_curve(found, layout, mode)
        tokens = cross_one([*gains.items()], most)
        if tokens is None:
            # Dense attention is the faster one at the longest measured length.
            is_slower = bool(gains) and max(gains) >= most and gains[max(gains)] < 1
            reached_at, verdict = None, 'missed' if is_slower else None
        else:
            reached_at, verdict = f'{tokens:,.0f}', report.judged(tokens, most)
        figure = 'break-even in tokens, at most'
        body.append([name_of_layout(layout), mode, figure, reached_at, f'{most:,}', verdict, None])
    return body


def describe(shape: Shape) -> str:
    batch = f'{shape.batch} × ' if shape.batch > 1 else ''
    return f'{batch}{short(shape.seqlen)} tokens, {name_of_layout(layout_of(shape))}'


def name_of_layout(layout: Layout) -> str:
    heads, kv_heads, dim = layout
    return f'{heads}/{kv_heads} heads of {dim}'


def count_targets(body: list[list[Any]]) -> str:
    verdicts = [cells[5] for cells in body if cells[5]]
    return f'{verdicts.count("met")} of {len(verdicts)} measured figures are met; the table has {len(body)}.'


def row_table(found: Found) -> str:
    body = []
    for (op, shape, backend), row in found.named.items():
        times = [*(row.get(f'{what}_ms') for what in (*PASSES, 'total')), *report.fastest(row)]
        is_ours = backend == OURS
        gains = [find_gain(found, op, shape, what)[0] if is_ours else None for what in (*PASSES, 'total')]
        facts = [report.gib(row.get('peak_bytes')), row.get('error'), row.get('note', '')]
        body.append([shape, op, backend, *times, *gains, *facts])
    columns = (*PASSES, 'both', *(f'fastest {what}' for what in PASSES))
    gains = tuple(f'dense / this, {what}' for what in (*PASSES, 'both'))
    return report.table(('shape', 'case', 'backend', *columns, *gains, 'peak GiB', 'error', ''), body)


def make_tables(rows: list[Case]) -> list[str]:
    found = Found(rows)
    targets = target_rows(found)
    tables = {
        'Speed of `nsa` over dense attention, the faster one of cuDNN and FlashAttention-2 in each pass:': report.table(
            ('case', 'mode', 'figure', 'value', 'target', 'verdict', 'faster dense'), targets
        ),
        f'All rows. Error: the median of a few rows, relative to its norm. {report.FASTEST}.': row_table(found),
        **report.kernel_tables(rows),
        'Shapes:': report.table(('shape', ''), [[name, shape_of(name).described()] for name in found.shapes]),
    }
    return [
        'ms, medians, cold caches, queued runs, host included; a pass of more than a second is one run. Consecutive '
        f'tokens correlate by {RHO}, except in cases `{UNRELATED}`. Forward: as in a training step, with saved '
        'tensors. Backward: everything that a call needs. '
        + ' '.join(f'Case {name}: {about}.' for name, about in CASES.items()),
        count_targets(targets),
        *(part for text, table in tables.items() for part in (text, table)),
    ]


def plot_speeds(path: Path, rows: list[Case], title: str) -> None:
    """Draw the speed over dense attention by length: a colour for each head layout, dashes for merged branches."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    found = Found(rows)
    figure = Figure(figsize=(11, 6), layout='constrained')
    axes = figure.subplots()
    handles, lengths, speeds = [], set[int](), [1.0]
    for index, layout in enumerate(dict.fromkeys(layout_of(SHAPES[name]) for name in SHAPES if name in found.shapes)):
        color = f'C{index}'
        for mode, style in STYLES.items():
            gains = find_curve(found, layout, mode)
            if gains:
                axes.plot([*gains], [*gains.values()], linestyle=style, color=color, marker='o', linewidth=2)
                lengths |= gains.keys()
                speeds += gains.values()
        handles.append(Line2D([], [], color=color, linewidth=2, marker='o', label=curve_label(found, layout)))
    handles += [
        Line2D([], [], color='black', linestyle=style, label=f'{mode} branches') for mode, style in STYLES.items()
    ]
    axes.axhline(1, color='black', linewidth=1)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.set_xticks(sorted(lengths), [short(length) for length in sorted(lengths)])
    low, high = min(speeds) / 1.15, max(speeds) * 1.15
    ticks = [tick for tick in SPEED_TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f'{tick:g}' for tick in ticks])
    axes.set_ylim(low, high)
    axes.minorticks_off()
    axes.tick_params(labelsize=12)
    axes.set_xlabel('tokens', fontsize=13)
    axes.set_ylabel('speed over dense attention', fontsize=13)
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=14)
    axes.legend(handles=handles, loc='center left', bbox_to_anchor=(1, 0.5), fontsize=12)
    figure.savefig(path, dpi=120)


def curve_label(found: Found, layout: Layout) -> str:
    """Name a head layout, and the tokens of a step where longer sequences mean smaller batches."""
    shapes = {SHAPES[name].seqlen: SHAPES[name] for name in found.shapes if layout_of(SHAPES[name]) == layout}
    tokens = {shape.tokens for shape in shapes.values()}
    same = f',\n{tokens.pop():,} tokens a step' if len(tokens) == 1 and len(shapes) > 1 else ''
    return name_of_layout(layout) + same


SUITE = Suite(
    title='`nsa` over dense attention by head layout',
    about=(
        'Backend triton is ours; cudnn and flash are dense attention of PyTorch by cuDNN and FlashAttention-2. '
        f'Consecutive tokens correlate by {RHO}.'
    ),
    cases=CASES,
    backends=(OURS, CUDNN, FLASH),
    optional=(EAGER,),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(make_call, seconds=0.3, measure=measure_with_kernels),
    shapes=','.join(DEFAULT_SHAPES),
    # Warm-up compiles all kernels of a mode one after the other.
    case_seconds=150,
    plots=(Plot('Speed of `nsa`, forward and backward, over dense attention', plot_speeds),),
)
