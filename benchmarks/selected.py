"""How fast is the selected branch? Its targets, dense attention, every public implementation, and what bounds it.

    python -m benchmarks.selected                                  every case, every peer that is on PYTHONPATH
    python -m benchmarks.selected --cases '64k*' --peers mdy666    some of them
    python -m benchmarks.selected --long --add                     128k to 1M tokens, for the table of an earlier run
    python -m benchmarks.selected --cases '8k,packed,short*,32k*,64k*' --peers ''    where one design overtakes another
    TRITON_INTERPRET=1 python -m benchmarks.selected --device cpu --cases 'tiny*' --designs '' --out /tmp/results
                                                                   to try the script

Peers are the repositories of benchmarks/peers.py; those that are not on PYTHONPATH are listed. Each is measured in a
process of its own. Beside the design that the op chooses, each of its designs is forced. Every output but dense
attention's is held against float32 in a few rows; one that is wrong counts for nothing. Writes
<gpu>/selected.md, .json and, at the end, .png to --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain, product
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import peers, report
from benchmarks.judge import Call, selected_row
from benchmarks.judge import judge as judge_rows
from benchmarks.parts import make_dense, ours
from benchmarks.peers import PEERS, Problem, make_selected
from benchmarks.report import ratio
from benchmarks.runner import Case, add_run_arguments, run, serve
from benchmarks.shapes import SHAPES, Shape, find_names, make_blocks, make_tensors
from benchmarks.timing import KERNELS, measure_with_kernels, measure_workspace, pass_of

# Of a case and a pass.
Limit = Callable[[str, str], float | None]
OURS, DENSE, CEILINGS = 'triton', 'cudnn', ('copy', 'gather')
# Forced unless others are named; 'mixed', which large groups take most often, is measured as ours.
DESIGNS = ('query', 'neighbours', 'block')
PASSES = ('forward', 'backward')
# Dense attention of longer sequences takes minutes.
MAX_DENSE = 2**17
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """neighbours: so many share most of their choice. targets: ms of forward and backward. whole: the case of which
    this one takes at most `most` times the time.
    """

    shape: str
    neighbours: int = 1
    targets: tuple[float, float] | None = None
    whole: str | None = None
    most: float = 1.2


SETTINGS: dict[str, Setting] = {
    '8k': Setting('paper-8k-h4', targets=(1.3, 2.6)),
    'trainer': Setting('trainer', targets=(0.32, 0.85)),
    '64k': Setting('paper-64k-h4', targets=(13.4, 23)),
    '64k-share': Setting('paper-64k-h4', 16, targets=(6.5, 18)),
    '32k-g4': Setting('paper-32k-h16', targets=(9.5, 18)),
    '32k-g1': Setting('paper-32k-h64', targets=(11, 20)),
    'packed': Setting('many-64k-h4', whole='64k'),
    'long-128k': Setting('long-128k-h4'),
    'long-256k': Setting('long-256k-h4'),
    'long-512k': Setting('long-512k-h4'),
    'long-1m': Setting('long-1024k-h4'),
    '64k-g32': Setting('large-64k-h2'),
    '64k-g64': Setting('large-64k-h1'),
    'short-4k': Setting('short-4k-h4'),
    'short-16k': Setting('paper-16k-h4'),
    'short-32k': Setting('paper-32k-h4'),
    'short-8k-g32': Setting('large-8k-h2'),
    'short-4k-g1': Setting('short-4k-h64'),
    'short-4k-g4': Setting('short-4k-h16'),
    'short-4k-g8': Setting('short-4k-h8'),
    'short-8k-g1': Setting('short-8k-h64'),
    'short-8k-g4': Setting('short-8k-h16'),
    'short-8k-g8': Setting('short-8k-h8'),
    'tiny': Setting('tiny', targets=(1, 1)),
    'tiny-packed': Setting('tiny-packed', whole='tiny'),
}


def make_problem(setting: Setting, device: str) -> Problem:
    shape = SHAPES[setting.shape]
    tensors = make_tensors(shape, device, ('q', 'k', 'v'))
    blocks = make_blocks(shape, device, setting.neighbours)
    count = shape.batch * max(1, shape.num_sequences)
    q, k, v, blocks = (
        t.view(count, shape.tokens // count, *t.shape[2:]) for t in (tensors['q'], tensors['k'], tensors['v'], blocks)
    )
    return Problem(shape, {'q': q, 'k': k, 'v': v, 'blocks': blocks})


def make_call(case: Case) -> tuple[Call, list[Tensor]]:
    backend, problem = case['backend'], make_problem(SETTINGS[case['op']], case['device'])
    if backend in CEILINGS:
        from benchmarks import ceilings

        forward, size = (ceilings.make_copy if backend == 'copy' else ceilings.make_gather)(problem)
        return Call(forward, lambda: {'bytes': size}), []
    facts: Callable[[], Case] = dict
    if backend == DENSE:
        forward, leaves = make_dense(problem)
    elif backend in PEERS:
        forward, leaves = make_selected(peers.make_steps(backend, problem), problem)
        facts = partial(judge, problem, forward, leaves)
    else:
        used = force_design(None if backend == OURS else backend)
        forward, leaves = make_selected(ours(problem), problem)
        facts = partial(judge_ours, problem, forward, leaves, used)
    return Call(forward, facts), leaves


def make_facts(call: Any, leaves: list[Tensor], device: str) -> Case:
    return (measure_workspace(call, leaves, device) if leaves else {}) | call.facts()


def force_design(design: str | None) -> list[str]:
    """From here on the op uses this design wherever it would choose one; None: its own choice.

    The one place that knows how: `choose_design` of its plan.py names one of DESIGNS for a call. It is replaced by a
    function that writes what it gives, forced or not, into the list that this one returns.
    """
    from native_sparse_attention.ops.selected_attention.triton import plan

    if design is not None and design not in plan.DESIGNS:
        raise ValueError(f'the op has no design {design}')
    choose: Any = getattr(plan.choose_design, '__wrapped__', plan.choose_design)
    used: list[str] = []

    @wraps(choose)
    def choose_and_tell(*arguments: Any, **settings: Any) -> str:
        used.append(design or choose(*arguments, **settings))
        return used[-1]

    plan.choose_design = choose_and_tell
    return used


def judge(problem: Problem, forward: Callable[[], Tensor], leaves: list[Tensor]) -> Case:
    return judge_rows(problem, forward, leaves, selected_row)


def judge_ours(problem: Problem, forward: Callable[[], Tensor], leaves: list[Tensor], used: list[str]) -> Case:
    """With the designs that were used, that of the forward first."""
    return judge(problem, forward, leaves) | {'design': '/'.join(dict.fromkeys(used))}


class Found:
    """The rows by case and backend, and what is compared."""

    def __init__(self, rows: list[Case]) -> None:
        self.rows = {(row['op'], row['backend']): row for row in rows}
        self.cases = [name for name in SETTINGS if any(name == op for op, _ in self.rows)]

    def ms(self, case: str, backend: str, what: str) -> float | None:
        """None where it was not measured or is wrong."""
        row = self.rows.get((case, backend), {})
        return None if row.get('wrong') else row.get(f'{what}_ms')

    def best(self, case: str, what: str) -> tuple[float | None, str]:
        """The fastest public implementation of a pass."""
        times = {name: self.ms(case, name, what) for name in PEERS}
        found = {name: time for name, time in times.items() if time}
        name = min(found, key=found.__getitem__, default='')
        return found.get(name), name

    def target(self, case: str, what: str) -> float | None:
        setting = SETTINGS[case]
        if setting.whole:
            whole = self.ms(setting.whole, OURS, what)
            return setting.most * whole if whole else None
        return setting.targets[PASSES.index(what)] if setting.targets else None

    def rate(self, case: str, ceiling: str) -> float | None:
        """Bytes per ms."""
        row = self.rows.get((case, ceiling), {})
        return ratio(row.get('bytes'), row.get('forward_ms'))

    def copy_ms(self, case: str, what: str) -> float | None:
        """What reading the inputs of a pass and writing its outputs takes."""
        rate = self.rate(case, 'copy')
        return least_bytes(SHAPES[SETTINGS[case].shape], what) / rate if rate else None


def least_bytes(shape: Shape, what: str) -> int:
    """The forward reads q, k, v and writes the output; the backward reads all of it and writes as many gradients."""
    values = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim) * shape.tokens
    return values * shape.dtype.itemsize * (1 if what == 'forward' else 2)


def mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def make_tables(rows: list[Case], missing: list[str]) -> list[str]:
    found = Found(rows)
    return [
        'ms, medians, caches cold, runs queued. Backward: everything that a call needs. Workspace: MiB at the peak of '
        'a pass beyond inputs, outputs and what the forward saves for the backward.',
        target_table(found),
        verdict(found),
        *packed_lines(found),
        "Times of others over ours; ours over the time that gathering every query's own K/V tiles takes, and over that "
        'of copying as many bytes as go in and out:',
        ratio_table(found),
        *long_tables(found),
        'Everything measured; our designs by name. Error: of the worst of a few rows, relative to its norm. '
        f'{report.FASTEST}:',
        row_table(found),
        *chain(*report.kernel_tables(rows).items()),
        *([f'Not importable, and so not measured: {", ".join(missing)}.'] if missing else []),
        report.table(('case', ''), [[name, described(SETTINGS[name])] for name in found.cases]),
    ]


def described(setting: Setting) -> str:
    share = f', {setting.neighbours} neighbours share most of their choice' if setting.neighbours > 1 else ''
    return SHAPES[setting.shape].described() + share


def target_table(found: Found) -> str:
    body = []
    for case in found.cases:
        row, cells = found.rows.get((case, OURS), {}), []
        for what in PASSES:
            ours, target = found.ms(case, OURS, what), found.target(case, what)
            met = None if ours is None or target is None else 'yes' if ours <= target else 'no'
            cells += [ours, target, met, mib(row.get(f'{what}_workspace'))]
        body.append([case, row.get('design'), *cells, mib(row.get('saved'))])
    columns = [f'{name}{what}' for what in PASSES for name in ('', 'target ', 'met ', 'workspace ')]
    return report.table(('case', 'design', *columns, 'saved MiB'), body)


def verdict(found: Found) -> str:
    """How many targets are met, and of how many comparisons ours is the faster."""

    def public(case: str, what: str) -> float | None:
        return found.best(case, what)[0]

    parts = []
    compared: dict[str, tuple[Sequence[str], Limit]] = {
        'targets are met': (PASSES, found.target),
        'passes are no slower than the best public implementation': (PASSES, public),
        'passes are no slower than dense attention': (PASSES, lambda case, what: found.ms(case, DENSE, what)),
        'passes are no slower by their kernels alone': (KERNELS, public),
    }
    for text, (passes, limit) in compared.items():
        ratios = {
            f'{case} {pass_of(what)}': ratio(found.ms(case, OURS, what), limit(case, what))
            for case, what in product(found.cases, passes)
        }
        known = {name: number for name, number in ratios.items() if number}
        over = [f'{name} by {100 * (number - 1):.1f} %' for name, number in known.items() if number > 1]
        if known:
            parts.append(f'{len(known) - len(over)} of {len(known)} {text}' + f'; not {", ".join(over)}' * bool(over))
    return ' '.join(f'{part}.' for part in parts)


def packed_lines(found: Found) -> list[str]:
    lines = []
    for case in found.cases:
        setting = SETTINGS[case]
        ratios = [ratio(found.ms(case, OURS, what), found.ms(setting.whole or '', OURS, what)) for what in PASSES]
        if setting.whole and all(ratios):
            numbers = ' and '.join(f'{number:.2f}' for number in ratios)
            met = 'met' if all(number <= setting.most for number in ratios if number) else 'missed'
            lines.append(
                f'{case} over {setting.whole}, forward and backward: {numbers}; at most {setting.most}: {met}.'
            )
    return lines


def ratio_table(found: Found) -> str:
    body = []
    for case in found.cases:
        cells = []
        for what in PASSES:
            ours, (best, name) = found.ms(case, OURS, what), found.best(case, what)
            cells += [ratio(found.ms(case, DENSE, what), ours), ratio(best, ours), name or None]
            cells += [ratio(ours, found.ms(case, 'gather', 'forward')), ratio(ours, found.copy_ms(case, what))]
        rates = [found.rate(case, ceiling) for ceiling in CEILINGS]
        body.append([case, *cells, *(None if rate is None else rate / 1e6 for rate in rates)])
    names = ('dense / ours', 'best / ours', 'best is', 'ours / gather', 'ours / copy')
    columns = [f'{what}: {name}' for what in PASSES for name in names]
    return report.table(('case', *columns, 'copy GB/s', 'gather GB/s'), body)


def long_tables(found: Found) -> list[str]:
    cases = [case for case in found.cases if case.startswith('long')]

    def per_token(case: str, what: str) -> float | None:
        ours = found.ms(case, OURS, what)
        return 1e6 * ours / SHAPES[SETTINGS[case].shape].tokens if ours else None

    body = []
    for case in cases:
        times = [(per_token(case, what), per_token('long-128k', what)) for what in PASSES]
        body.append([case, *(cell for now, short in times for cell in (now, ratio(now, short)))])
    columns = [text for what in PASSES for text in (f'{what}: ns a token', f'{what}: over 128k')]
    return ['Long sequences:', report.table(('case', *columns), body)] if cases else []


def row_table(found: Found) -> str:
    body = []
    for (case, backend), row in found.rows.items():
        times = [*(row.get(f'{name}_ms') for name in (*PASSES, 'total')), *report.fastest(row)]
        sizes = [mib(row.get(name)) for name in ('forward_workspace', 'backward_workspace', 'saved')]
        body.append([case, backend, *times, *sizes, row.get('error'), row.get('note', '')])
    columns = (*PASSES, 'both', *(f'fastest {what}' for what in PASSES))
    sizes = ('workspace forward', 'workspace backward', 'saved MiB')
    return report.table(('case', 'backend', *columns, *sizes, 'error', ''), body)


def plot(path: Path, rows: list[Case], title: str) -> None:
    """For each case bars of ours, the best public one and dense attention, and a line at the target."""
    from matplotlib.figure import Figure

    found = Found(rows)
    figure = Figure(figsize=(11, 7), layout='constrained')
    for what, axes in zip(PASSES, figure.subplots(2, 1, sharex=True), strict=True):
        bars = {
            'ours': [found.ms(case, OURS, what) for case in found.cases],
            'best public': [found.best(case, what)[0] for case in found.cases],
            'dense': [found.ms(case, DENSE, what) for case in found.cases],
        }
        for i, (name, times) in enumerate(bars.items()):
            axes.bar([x + 0.27 * (i - 1) for x in range(len(times))], [t or 0 for t in times], 0.25, label=name)
        for x, case in enumerate(found.cases):
            target = found.target(case, what)
            if target:
                axes.hlines(target, x - 0.4, x - 0.14, color='black', label='' if x else 'target')
        axes.set_yscale('log')
        axes.set(ylabel=f'{what}, ms')
        axes.set_xticks(range(len(found.cases)), found.cases)
    figure.axes[0].set_title(title)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def make_cases(cases: list[str], designs: list[str], names: list[str], device: str) -> list[Case]:
    """Those of a setting stand together, so that a run that is cut short has whole comparisons."""
    backends = [OURS, *designs, DENSE, *CEILINGS, *names]
    return [
        {'op': case, 'shape': SETTINGS[case].shape, 'backend': backend, 'device': device}
        for case, backend in product(cases, backends)
        if backend != DENSE or SHAPES[SETTINGS[case].shape].seqlen <= MAX_DENSE
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser, case_seconds=90)
    add = parser.add_argument
    add(
        '--cases',
        default='*',
        help='patterns, separated by commas; tiny, short and long by name only (%(default)s)',
    )
    add('--long', action='store_true', help='the cases of 128k to 1M tokens instead')
    add('--peers', default=','.join(PEERS), help="of these those that can be imported; '' for none (%(default)s)")
    add('--designs', default=','.join(DESIGNS), help="that are forced; '' for none (%(default)s)")
    options = parser.parse_args()
    if options.worker:
        return serve(make_call, seconds=0.3, make_facts=make_facts, measure=measure_with_kernels)
    wanted, designs = ([name for name in names.split(',') if name] for names in (options.peers, options.designs))
    names = [name for name in wanted if peers.find_folder(PEERS[name].file)]
    missing = [PEERS[name].repository for name in wanted if name not in names]
    chosen = find_names(SETTINGS, 'long*' if options.long else options.cases)
    cases = make_cases(chosen, designs, names, options.device)
    title = 'The selected branch, forward and backward'
    tables = partial(make_tables, missing=missing)
    where, rows = run(cases, options, 'selected', title, tables)
    image = report.path(options.out, where, 'selected', '.png')
    plot(image, rows, title)
    report.write(options.out, where, 'selected', title, [*tables(rows), f'![times]({image.name})'], rows)


if __name__ == '__main__':
    main()
