"""GPU time of a training step of train_enwik8.py by part of the model, sparse and dense.

    python -m benchmarks.step_parts                              16k and 32k tokens, about 3 minutes on a GPU
    python -m benchmarks.step_parts --variants long,dense --kv-heads 4,2,1 -- --block-loss 0
    python -m benchmarks.step_parts --device cpu --lengths 64 --tokens 128 --variants cpu,cpu-dense --out /tmp/results
                                                                 to try the script: CPU times of ops

A variant is a preset of the trainer with sparse attention, `<preset>-dense`, its dense twin, `dense`, that of preset
long, or `separate`, preset long with the three branches of the paper. The model trains from its start, so the selected
blocks are not those of a trained model.

The whole step is measured as the trainer runs it, as a CUDA graph. For the parts the steps are launched one by one, and
every kernel is assigned by the profiler (`benchmarks.kernel_parts`). What the sum of the parts lacks of the whole step
is gaps between kernels.

Flags after `--` are those of train_enwik8.py that describe the model and its training, and --no-graph. Writes
<gpu>/step-parts.md and .json to --out after every case, and .png at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks import report, training_speed
from benchmarks.kernel_parts import NOT_ASSIGNED, OPTIMIZER, PARTS, Kernel, Steps, marked, sum_kernels
from benchmarks.runner import Case, Method, Plot, make_parser, measure_itself, run, serve
from benchmarks.timing import measure, synchronize
from benchmarks.training_speed import make_config, make_run, refuse_decided
from train_enwik8 import PRESETS, Run, UserError, parse, spelled
from trainer.config import SPARSE_ONLY

# Attention and flags of the variants.
VARIANTS: dict[str, tuple[str, list[str]]] = {
    **{preset: ('sparse', ['--preset', preset]) for preset in PRESETS},
    **{f'{preset}-dense': ('dense', ['--preset', preset]) for preset in PRESETS},
    'dense': ('dense', ['--preset', 'long']),
    'separate': (
        'sparse',
        ['--preset', 'long', '--no-merge-window', '--no-select-before-window', '--no-output-gate'],
    ),
}
TITLE = 'A training step by part'
# Fields of `Config` that options of this script decide.
DECIDED = {**training_speed.DECIDED, 'attention': '--variants', 'kv_heads': '--kv-heads'}
# Kernels in a table, and in a row of the JSON file beside those that are not assigned.
SHOWN_KERNELS, KEPT_KERNELS = 12, 40
WHOLE_SECONDS = 2.0
ROWS = ('sum of the parts', 'whole step', 'whole step, launched one by one')


def check_flags(flags: Sequence[str], variants: Sequence[str]) -> bool:
    """Return whether the trainer's steps are replayed as a CUDA graph.

    Raises UserError for flags that contradict an option of this script or a variant, and for those that do not act.
    """
    options, given = parse([*flags])
    unchanged = vars(parse([])[0])
    for name, value in vars(options).items():
        if name != 'graph' and value != unchanged[name]:
            raise UserError(f'{spelled(name)} {value}: must not be given after --, where it does not act here')
    refuse_decided(given, DECIDED)
    for variant in variants:
        if same := given.keys() & parse(VARIANTS[variant][1])[1].keys():
            raise UserError(f'{spelled(min(same))}: must not be given after --; variant {variant} decides it')
    if all(VARIANTS[variant][0] == 'dense' for variant in variants):
        parse(['--attention', 'dense', *flags])  # refuses what a dense model does not have
    return options.graph


def read_list(option: str, text: str, known: Sequence[str] | None = None) -> list[str]:
    """Return the entries of a list. Raises UserError for repeated ones, and for others than known ones or numbers."""
    entries = text.split(',')
    for entry in entries:
        if known is None and not (entry.isdecimal() and int(entry)):
            raise UserError(f'{option} {text}: {entry!r} must be a positive number')
        if known is not None and entry not in known:
            raise UserError(f'{option} {text}: {entry!r} must be one of {", ".join(known)}')
    if len({*entries}) < len(entries):
        raise UserError(f'{option} {text}: every entry must stand once')
    return entries


def make_cases(options: argparse.Namespace) -> list[Case]:
    variants = read_list('--variants', options.variants, [*VARIANTS])
    lengths = [int(length) for length in read_list('--lengths', options.lengths)]
    kv_heads = [None] if options.kv_heads is None else read_list('--kv-heads', options.kv_heads)
    for name in ('steps', 'tokens'):
        if getattr(options, name) < 1:
            raise UserError(f'--{name} {getattr(options, name)}: must be at least 1')
    if too_long := [length for length in lengths if options.tokens % length]:
        raise UserError(f'--tokens {options.tokens}: must be a multiple of every length, but is none of {too_long[0]}')
    graph, cases = check_flags(options.flags, variants), []
    for length, heads, variant in product(lengths, kv_heads, variants):
        attention, flags = VARIANTS[variant]
        of_heads = [] if heads is None else ['--kv-heads', heads]
        config = make_config([*flags, *options.flags, *of_heads], attention, length, options.tokens)
        if config.heads % config.kv_heads:
            raise UserError(f'--kv-heads {options.kv_heads}: must be divisors of {config.heads}, the query heads')
        shape = f'{config.batch} x {length:,} tokens, {config.heads}/{config.kv_heads} heads of {config.dim_head}'
        named = {'op': 'step', 'shape': shape, 'backend': variant, 'device': options.device, 'data': options.data}
        cases.append({**named, 'config': asdict(config), 'graph': graph, 'steps': options.steps})
    return cases


@dataclass
class Profiled:
    """A run of the trainer whose steps are profiled."""

    trainer: Run
    steps: int

    def __call__(self) -> None:
        self.trainer.train_step()
        self.trainer.recent.clear()

    def measure(self, device: str, seconds: float) -> Case:
        """Return milliseconds of the whole step, as the trainer runs it and launched one by one, and the kernels."""
        trainer, found = self.trainer, {'attention': self.trainer.backend(), 'replayed': self.trainer.replays}
        found['forward_ms'] = measure(self, device, seconds).median
        if trainer.replays:
            trainer.graph, trainer.replays = None, False
            trainer.optimizer.zero_grad()
            found['launched_ms'] = measure(self, device, seconds).median
        kernels = self.profile(device)
        found['parts'] = {part: sum_part(kernels, part) for part in PARTS}
        kept = kernels[:KEPT_KERNELS] + [k for k in kernels[KEPT_KERNELS:] if k.part == NOT_ASSIGNED]
        return {**found, 'kernels': [[*kernel] for kernel in kept]}

    def profile(self, device: str) -> list[Kernel]:
        """Return the kernels of a step, or on a CPU the ops, the longest first."""
        on_cpu = device == 'cpu'
        activities = [ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with marked(self.trainer.model):
            self()
            synchronize(device)
            with profile(activities=activities, acc_events=True) as profiler:
                for _ in range(self.steps):
                    self()
                synchronize(device)
        steps = Steps(profiler.events() or ())
        return sum_kernels(steps.host_times() if on_cpu else steps.device_times(), self.steps)


def sum_part(kernels: Sequence[Kernel], part: str) -> list[float]:
    """Return milliseconds of the forward and of the backward pass."""
    own = [kernel for kernel in kernels if kernel.part == part]
    return [sum(kernel.ms for kernel in own if kernel.is_backward == passed) for passed in (False, True)]


def make_call(case: Case) -> tuple[Any, list[Any]]:
    return Profiled(make_run(case), case['steps']), []


class Variant:
    """The row of a variant at one shape."""

    def __init__(self, row: Case) -> None:
        self.row, self.name = row, row['backend']
        self.parts: dict[str, list[float]] = row.get('parts', {})
        self.kernels = [Kernel(*values) for values in row.get('kernels', ())]
        self.sum = sum(map(sum, self.parts.values())) if self.parts else None

    def total(self, part: str) -> float | None:
        """Return milliseconds of a part; 0 where the model has none, None where nothing was measured."""
        return sum(self.parts.get(part, ())) if self.parts else None

    def cells(self, part: str) -> list[Any]:
        """Return forward, backward, both, and the share of the sum in percent."""
        total = self.total(part)
        if not total or not self.sum:
            return [None] * 4
        passes = [None, None] if part == OPTIMIZER else [ms or None for ms in self.parts[part]]
        return [*passes, total, 100 * total / self.sum]

    def whole(self) -> list[float | None]:
        """Return the milliseconds of ROWS."""
        return [self.sum, self.row.get('forward_ms'), self.row.get('launched_ms')]


def by_shape(rows: Sequence[Case]) -> dict[str, list[Variant]]:
    shapes: dict[str, list[Variant]] = {}
    for row in rows:
        shapes.setdefault(row['shape'], []).append(Variant(row))
    return shapes


def make_tables(rows: list[Case]) -> list[str]:
    on_cpu, steps = rows[0]['device'] == 'cpu', rows[0]['steps']
    what = 'CPU times of ops' if on_cpu else 'Times of kernels and copies'
    notes = [
        f'{what}, milliseconds per step, means of {steps} steps launched one by one, forward and backward. Shares '
        'are of the sum of the parts. The whole step is a median, as the trainer runs it; what it takes beyond the sum '
        'is gaps. The difference is the first variant less the first dense one. Weights are those at the start.',
    ]
    for shape, variants in by_shape(rows).items():
        notes += [f'## {shape}', parts_table(variants), *notes_of(variants), kernels_table(variants)]
    return [*notes, *settings_of(rows)]


def parts_table(variants: Sequence[Variant]) -> str:
    first, twin = variants[0], next((v for v in variants[1:] if v.row['config']['attention'] == 'dense'), None)

    def difference(a: float | None, b: float | None) -> list[float | None]:
        return [] if twin is None else [None if a is None or b is None or not (a or b) else a - b]

    columns = [f'{v.name}, {what}' for v in variants for what in ('forward', 'backward', 'ms', '%')]
    body = []
    for part in PARTS:
        if part == NOT_ASSIGNED or any(v.total(part) for v in variants):
            cells = [cell for v in variants for cell in v.cells(part)]
            body.append([part, *cells, *difference(first.total(part), twin and twin.total(part))])
    for index, name in enumerate(ROWS):
        wholes = [v.whole()[index] for v in variants]
        if any(wholes):
            cells = [c for v, ms in zip(variants, wholes, strict=True) for c in (None, None, ms, percent(ms, v.sum))]
            body.append([f'**{name}**', *cells, *difference(wholes[0], twin and twin.whole()[index])])
    return report.table(('part', *columns, *([f'{first.name} − {twin.name}'] if twin else [])), body)


def percent(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def notes_of(variants: Sequence[Variant]) -> list[str]:
    """Return why a variant has no times, how its steps run, and the kernels that are not assigned."""
    notes = []
    for v in variants:
        if 'note' in v.row:
            notes.append(f'{v.name}: {v.row["note"]}.')
        if v.parts:
            runs = 'a CUDA graph' if v.row['replayed'] else 'launched one by one'
            notes.append(f'{v.name}: the whole step is {runs}; sparse attention: {v.row["attention"] or "none"}.')
        unknown = [k for k in v.kernels if k.part == NOT_ASSIGNED][:SHOWN_KERNELS]
        if unknown:
            notes.append(f'{v.name}, not assigned: ' + ', '.join(f'`{short(k.name)}` {k.ms:.3g} ms' for k in unknown))
    return notes


def kernels_table(variants: Sequence[Variant]) -> str:
    body = []
    for v in variants:
        for k in v.kernels[:SHOWN_KERNELS]:
            passed = 'backward' if k.is_backward else 'forward'
            body.append([v.name, f'`{short(k.name)}`', k.part, passed, k.ms, k.launches])
    return report.table(('variant', 'kernel', 'part', 'pass', 'ms', 'launches of a step'), body)


def short(name: str) -> str:
    """Return the name of a kernel without what a table cannot hold."""
    name = name.replace('|', '/').replace('`', "'")
    return name if len(name) <= 80 else f'{name[:77]}...'


def settings_of(rows: Sequence[Case]) -> list[str]:
    """Return a line for every variant."""
    lines: dict[str, str] = {}
    for row in rows:
        absent = SPARSE_ONLY if row['config']['attention'] == 'dense' else set()
        absent = {'seq_len', 'batch', 'kv_heads', *absent}
        settings = {name: value for name, value in row['config'].items() if name not in absent}
        lines[row['backend']] = ', '.join(f'{name} {value}' for name, value in settings.items())
    return [f'Settings of {name}: {line}.' for name, line in lines.items()]


def plot(path: Path, rows: list[Case], title: str) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    variants = [v for v in map(Variant, rows) if v.parts]
    sizes = [v.row['config'] for v in variants]
    of_sizes = [f'{c["batch"]} x {c["seq_len"]:,}\n{c["kv_heads"]} KV heads' for c in sizes]
    names = [f'{v.name}\n{text}' for v, text in zip(variants, of_sizes, strict=True)]
    shown = [part for part in PARTS if any(v.total(part) for v in variants)]
    figure = Figure(figsize=(4 + 1.1 * len(variants), 6), layout='constrained')
    axes = figure.add_subplot(ylabel='ms per step', title=title)
    bottom = [0.0] * len(variants)
    for part in shown:
        heights = [v.total(part) or 0.0 for v in variants]
        axes.bar(names, heights, 0.7, bottom, color=colormaps['tab20'](PARTS.index(part)), label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.plot(names, [v.row['forward_ms'] for v in variants], 'k_', markersize=20, label='whole step')
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc='upper left', bbox_to_anchor=(1, 1), fontsize='small')
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__, case_seconds=150)
    add = parser.add_argument
    add('--lengths', default='16384,32768', help='tokens of a sequence (%(default)s)')
    add('--variants', default='long,dense', help=f'of {", ".join(VARIANTS)} (%(default)s)')
    add('--kv-heads', help='KV heads, each a case of its own (those of the preset)')
    add('--steps', type=int, default=3, help='that are profiled (%(default)s)')
    add('--tokens', type=int, default=2**16, help='of a step (%(default)s)')
    add('--data', default='stdlib', help='text, as train_enwik8.py takes it (%(default)s)')
    add('flags', nargs='*', help='of train_enwik8.py')
    options = parser.parse_args()
    if options.worker:
        return serve(lambda case: Method(make_call, WHOLE_SECONDS, measure_itself))
    try:
        cases = make_cases(options)
    except UserError as error:
        raise SystemExit(f'step_parts: {error}') from None
    run(cases, options, 'step-parts', TITLE, make_tables, [Plot('Milliseconds of a training step', plot)])


if __name__ == '__main__':
    main()
