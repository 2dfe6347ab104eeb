"""Suite `selected`: the selected branch beside its targets, dense attention, public implementations and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

from torch import Tensor

from benchmarks import peers, report
from benchmarks.attention.parts import make_dense, ours
from benchmarks.attention.suite import Suite, verdict
from benchmarks.judge import judge as judge_rows
from benchmarks.judge import selected_row
from benchmarks.peers import PEERS, Problem, make_selected, rows
from benchmarks.report import best_of, ratio
from benchmarks.runner import Call, Case, Method, Plot
from benchmarks.shapes import SHAPES, Shape, make_blocks, make_tensors
from benchmarks.timing import KERNELS, PASSES, measure_with_kernels, measure_workspace, pass_of

# Limit in ms, from case and pass.
Limit = Callable[[str, str], float | None]
OURS, DENSE, CEILINGS = 'triton', 'cudnn', ('copy', 'gather')
# Designs of the op that are forced, each as a backend; the op itself chooses `mixed` for most large groups.
DESIGNS, MIXED = ('query', 'union', 'block'), 'mixed'
# Tokens; longer, dense attention takes minutes.
MAX_DENSE = 2**17
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """A case.

    neighbours: number of consecutive queries that share most of their selected blocks.
    targets: ms of forward and backward.
    whole: another case; this one may take `most` times as long.
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
    return Problem.of(shape, {**tensors, 'blocks': make_blocks(shape, device, setting.neighbours)})


def make_call(case: Case) -> tuple[Call, list[Tensor]]:
    """Return the forward pass of a backend, a design or a ceiling, and the tensors to differentiate."""
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
        design = None if backend == OURS else backend
        forward, leaves = make_selected(ours(problem, design), problem)
        facts = partial(judge_ours, problem, forward, leaves, find_designs(problem, design))
    return Call(forward, lambda: measure_workspace(forward, leaves, case['device']) | facts()), leaves


def find_designs(problem: Problem, design: str | None) -> list[str]:
    """Return the designs of the forward and the backward pass; design: the one that is forced, or None."""
    from native_sparse_attention.ops.selected_attention.triton import plan

    if design is not None:
        return [design] * 2
    packed = problem.size[0] if problem.packed else 0
    tensors = (rows(t)[None] if packed else t for t in (problem.q, problem.k, problem.v, problem.blocks))
    choose = partial(plan.choose_design, *tensors, problem.block_size, num_packed=packed)
    return [choose(backward=backward) for backward in (False, True)]


def judge(problem: Problem, forward: Callable[[], Tensor], leaves: list[Tensor]) -> Case:
    return judge_rows(problem, forward, leaves, selected_row)


def judge_ours(problem: Problem, forward: Callable[[], Tensor], leaves: list[Tensor], designs: list[str]) -> Case:
    """Judge the output, and name the designs that were used, that of the forward first."""
    return judge(problem, forward, leaves) | {'design': '/'.join(dict.fromkeys(designs))}


class Found:
    """The rows by case and backend."""

    def __init__(self, rows: list[Case]) -> None:
        self.rows = {(row['op'], row['backend']): row for row in rows}
        self.cases = [name for name in SETTINGS if any(name == op for op, _ in self.rows)]

    def ms(self, case: str, backend: str, what: str) -> float | None:
        """Return ms of a pass, or None if it was not measured or the output is wrong."""
        row = self.rows.get((case, backend), {})
        return None if row.get('wrong') else row.get(f'{what}_ms')

    def best(self, case: str, what: str) -> tuple[float | None, str | None]:
        """Return ms and name of the fastest public implementation of a pass."""
        return best_of({name: self.ms(case, name, what) for name in PEERS})

    def target(self, case: str, what: str) -> float | None:
        setting = SETTINGS[case]
        if setting.whole:
            whole = self.ms(setting.whole, OURS, what)
            return setting.most * whole if whole else None
        return setting.targets[PASSES.index(what)] if setting.targets else None

    def rate(self, case: str, ceiling: str) -> float | None:
        """Return bytes per ms."""
        row = self.rows.get((case, ceiling), {})
        return ratio(row.get('bytes'), row.get('forward_ms'))

    def copy_ms(self, case: str, what: str) -> float | None:
        """Return the time to read the inputs of a pass and to write its outputs."""
        rate = self.rate(case, 'copy')
        return least_bytes(SHAPES[SETTINGS[case].shape], what) / rate if rate else None


def least_bytes(shape: Shape, what: str) -> int:
    """Count q, k, v and the output of a forward; a backward reads all of them and writes as many gradients."""
    values = (shape.heads + shape.kv_heads) * (shape.head_dim + shape.value_dim) * shape.tokens
    return values * shape.dtype.itemsize * (1 if what == 'forward' else 2)


def mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def make_tables(rows: list[Case]) -> list[str]:
    found = Found(rows)
    return [
        'ms, medians, cold caches, queued runs. Backward: everything that a call needs. Workspace: MiB at the peak of '
        'a pass beyond inputs, outputs and the tensors that the forward saves.',
        target_table(found),
        compare(found),
        *packed_lines(found),
        "Times of others over ours; ours over the time to gather every query's own K/V tiles, and over the time to "
        'copy as many bytes as inputs and outputs have:',
        ratio_table(found),
        *long_tables(found),
        f'All rows; our designs by name. Error: the largest of a few rows, relative to its norm. {report.FASTEST}:',
        row_table(found),
        *chain(*report.kernel_tables(rows).items()),
        report.table(('case', ''), [[name, described(SETTINGS[name])] for name in found.cases]),
    ]


def described(setting: Setting) -> str:
    share = f', {setting.neighbours} consecutive queries share most blocks' if setting.neighbours > 1 else ''
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


def compare(found: Found) -> str:
    """Count targets that are met, and comparisons in which ours is not the slower."""

    def public(case: str, what: str) -> float | None:
        return found.best(case, what)[0]

    compared: dict[str, tuple[Sequence[str], Limit]] = {
        'targets are met': (PASSES, found.target),
        'passes are no slower than the best public implementation': (PASSES, public),
        'passes are no slower than dense attention': (PASSES, lambda case, what: found.ms(case, DENSE, what)),
        'passes are no slower by their kernels alone': (KERNELS, public),
    }
    ratios = {
        text: {
            f'{case} {pass_of(what)}': ratio(found.ms(case, OURS, what), limit(case, what))
            for case, what in product(found.cases, passes)
        }
        for text, (passes, limit) in compared.items()
    }
    return verdict(ratios)


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
            cells += [ratio(found.ms(case, DENSE, what), ours), ratio(best, ours), name]
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
    """Draw for each case bars of ours, the best public implementation and dense attention, and a line at the target."""
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


def make_cases(names: list[str], shapes: list[str], backends: list[str]) -> list[Case]:
    """Keep the cases of a setting together, so that a run that is cut short has whole comparisons."""
    return [
        {'op': name, 'shape': SETTINGS[name].shape, 'backend': backend}
        for name, backend in product(names, backends)
        if backend != DENSE or SHAPES[SETTINGS[name].shape].seqlen <= MAX_DENSE
    ]


SUITE = Suite(
    title='The selected branch, forward and backward',
    about=(
        'Backend triton is the op, and cudnn dense attention of PyTorch; query, union, block and mixed force a '
        'design of the op; copy and gather are bounds by memory.'
    ),
    cases={name: described(setting) for name, setting in SETTINGS.items()},
    backends=(OURS, *DESIGNS, DENSE, *CEILINGS, *PEERS),
    optional=(MIXED,),
    make_cases=make_cases,
    make_tables=make_tables,
    method=Method(make_call, seconds=0.3, measure=measure_with_kernels),
    plots=(Plot('The selected branch, forward and backward', plot),),
)
