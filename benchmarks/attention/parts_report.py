"""Tables and pictures of suite `parts`: targets, comparisons, memory, shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.attention.suite import cross_one, verdict
from benchmarks.peers import PEERS
from benchmarks.report import best_of, judged, ratio, reached
from benchmarks.runner import Case
from benchmarks.shapes import PAPER, RHO, SHAPES, Shape
from benchmarks.timing import KERNELS, PASSES, pass_of

OURS, CUDNN, FLASH, FLEX = 'triton', 'cudnn', 'flash', 'flex'
PARTS = {
    'compressed': 'compressed attention',
    'compressed+selection': 'compressed attention and block selection together',
    'selection': 'block selection',
    'selected': 'selected attention of the blocks that the implementation selected itself',
    'window': 'window attention',
    'sum': 'gated sum of the branches',
    'nsa': 'the whole',
    'nsa-unrelated': 'the whole, with unrelated tokens',
    'layer': '`SparseAttention`, or the layer of a peer',
    'layer-inside': '`SparseAttention` without its two projections',
}
TARGET_SHAPE = 'paper-64k-h4'
# ms of forward and backward there.
TARGETS: dict[str, tuple[float, float | None]] = {
    'compressed': (8.5, 31),
    'compressed+selection': (12.5, None),
    'window': (3.0, 10),
    'sum': (1.15, 2.0),
    'nsa': (24.5, 64),
    'nsa-unrelated': (31.5, 69),
}
# Least time of dense attention of cuDNN, and most time of the layer without its projections, relative to `nsa`.
LEAST_GAIN = (4.9, 5.2)
MOST_INSIDE = 1.15
# Tokens from which on `nsa` is the faster, forward and backward together.
BREAK_EVEN = 2**13
# Tokens from which on it is enough to run, with memory linear in the length.
LONG = 2**18
# Where no part may be slower than the best public one.
COMPARED = (TARGET_SHAPE, 'paper-8k-h4', 'paper-32k-h16', 'paper-32k-h64', 'head-64', 'trainer')
# The whole of a million tokens, which does not fit with more.
FEWER_HEADS = 'long-1024k-q32'
# Where memory is linear, bytes a token are as many as in shorter sequences, up to what is padded.
MAX_GROWTH = 1.05
# Parts of a forward and of a backward pass.
SHARES = {
    'forward': ('compressed', 'selection', 'selected', 'window', 'sum'),
    'backward': ('compressed', 'selected', 'window', 'sum'),
}
PUBLIC_STEPS = {
    'forward': ('compressed+selection', 'selected', 'window', 'sum'),
    'backward': ('compressed', 'selected', 'window', 'sum'),
}
NAMES = {OURS: 'ours', CUDNN: 'dense, cuDNN', FLASH: 'dense, FlashAttention-2', FLEX: 'FlexAttention'}


def shape_of(name: str) -> Shape:
    """Return a shape without use_diff_topk, which no public implementation has."""
    return replace(SHAPES[name], use_diff_topk=False)


@dataclass
class Found:
    """The rows by part, shape and backend."""

    rows: list[Case]

    def __post_init__(self) -> None:
        self.named = {(row['op'], row['shape'], row['backend']): row for row in self.rows}
        present = {row['shape'] for row in self.rows}
        self.shapes = sorted((name for name in SHAPES if name in present), key=lambda name: SHAPES[name].tokens)

    def ms(self, part: str, shape: str, backend: str, what: str) -> float | None:
        """Return ms, or None if it was not measured or the output is wrong. what: a pass, total, or one of KERNELS."""
        row = self.named.get((part, shape, backend), {})
        return None if row.get('wrong') else row.get(f'{what}_ms')

    def ours(self, part: str, shape: str, what: str) -> float | None:
        return self.ms(part, shape, OURS, what)

    def best(self, part: str, shape: str, what: str) -> tuple[float | None, str | None]:
        """Return ms and name of the fastest public implementation of the same work.

        For `nsa` the sum of the fastest of each step is one of them.
        """
        names = [name for name, peer in PEERS.items() if not peer.less]
        names += [FLASH, FLEX] if part == 'window' else []
        times = {name: self.ms(part, shape, name, what) for name in names}
        if part == 'nsa':
            steps = [self.best(step, shape, what)[0] for step in PUBLIC_STEPS[pass_of(what)]]
            times['fastest steps'] = sum(filter(None, steps)) if all(steps) else None
        return best_of(times)

    @property
    def lengths(self) -> list[str]:
        """Shapes that differ from TARGET_SHAPE in length only."""
        like = SHAPES[TARGET_SHAPE]
        return [
            name
            for name in self.shapes
            if SHAPES[name].described().split('tokens')[1] == like.described().split('tokens')[1]
            and SHAPES[name].batch == 1
        ]


def make_tables(rows: list[Case]) -> list[str]:
    found = Found(rows)
    less = '; '.join(f'{name}: {peer.less}' for name, peer in PEERS.items() if peer.less)
    tables = {
        f'Targets, {shape_of(TARGET_SHAPE).described()}:': target_table(found),
        'Beside the fastest public implementation of a pass (fastest steps: the sum of the fastest of each step), and '
        f'dense attention of cuDNN. Not among them, since they do less: {less}.': comparison_table(found),
        'Share of each part, ms and percent of their sum; whole: `nsa` in one call:': share_table(found),
        'Memory of a forward and a backward: GiB at the peak beyond the inputs, gradients included:': memory_table(
            found
        ),
        'Bytes a token and query head of ours at the peak, from 64k tokens on:': growth_table(found),
        'All rows. Error: the largest of a few rows (the median for nsa), relative to its norm. Agreement: share of '
        'the selected blocks that float32 selects. Union: blocks that 4 and 16 consecutive queries read together. '
        f'{report.FASTEST}.': row_table(found),
        **report.kernel_tables(rows),
        'Shapes:': report.table(('shape', ''), [[name, shape_of(name).described()] for name in found.shapes]),
    }
    filled = [part for text, table in tables.items() if table.count('\n') > 1 for part in (text, table)]
    notes = [*ratio_lines(found), compare(found), long_line(found)]
    return [
        'ms, medians, cold caches, queued runs; a pass of more than a second is one run. Consecutive tokens correlate '
        f'by {RHO}, except in nsa-unrelated. Backward: everything that a call needs.',
        *filled[:2],
        *(note for note in notes if note),
        *filled[2:],
    ]


def target_table(found: Found) -> str:
    body = []
    for part, targets in TARGETS.items():
        cells = []
        for what, target in zip(PASSES, targets, strict=True):
            time, (best, name) = found.ours(part, TARGET_SHAPE, what), found.best(part, TARGET_SHAPE, what)
            cells += [time, target, judged(time, target), best if target else None, name if target else None]
        body.append([part, *cells])
    columns = [f'{name}{what}' for what in PASSES for name in ('', 'target ', 'verdict ', 'best public ', 'which ')]
    return report.table(('part', *columns), body)


def ratio_lines(found: Found) -> list[str]:
    lines = []
    for what, least in zip(PASSES, LEAST_GAIN, strict=True):
        gain = ratio(found.ms('nsa', TARGET_SHAPE, CUDNN, what), found.ours('nsa', TARGET_SHAPE, what))
        if gain:
            lines.append(
                f'{what} of dense attention by cuDNN over `nsa`, 64k tokens: {gain:.2f}; at least {least}: '
                f'{reached(gain, least)}.'
            )
    tokens = break_even(found)
    if tokens:
        lines.append(
            f'`nsa`, forward and backward together, is the faster from {tokens:,.0f} tokens on; at most '
            f'{BREAK_EVEN:,}: {judged(tokens, BREAK_EVEN)}.'
        )
    for what in PASSES:
        inside = ratio(found.ours('layer-inside', TARGET_SHAPE, what), found.ours('nsa', TARGET_SHAPE, what))
        if inside:
            verdict = judged(inside, MOST_INSIDE)
            lines.append(
                f'{what} of the layer without projections over `nsa`, 64k tokens: {inside:.2f}; at most {MOST_INSIDE}: '
                f'{verdict}.'
            )
    return [' '.join(lines)] if lines else []


def break_even(found: Found) -> float | None:
    """Return the number of tokens from which on `nsa` is faster than dense attention of cuDNN, by `cross_one`."""
    pairs = [
        (SHAPES[name].seqlen, gain)
        for name in found.lengths
        if (gain := ratio(found.ms('nsa', name, CUDNN, 'total'), found.ours('nsa', name, 'total')))
    ]
    return cross_one(pairs, BREAK_EVEN)


def compare(found: Found) -> str:
    """Count targets that are met, and passes in which no public implementation is the faster."""
    return verdict(
        {
            'targets are met': {
                f'{part} {what}': ratio(found.ours(part, TARGET_SHAPE, what), target)
                for part, targets in TARGETS.items()
                for what, target in zip(PASSES, targets, strict=True)
            },
            'passes are no slower than the best public one': beside_public(found, PASSES),
            'passes are no slower by their kernels alone': beside_public(found, KERNELS),
        }
    )


def beside_public(found: Found, passes: Sequence[str]) -> dict[str, float | None]:
    """Return our times over the best public ones, for the shapes in which no part may be slower."""
    return {
        f'{part} {pass_of(what)} of {shape}': ratio(found.ours(part, shape, what), found.best(part, shape, what)[0])
        for shape, part, what in product(COMPARED, PARTS, passes)
        if not part.startswith('layer')
    }


def long_line(found: Found) -> str:
    """Say which passes of ours with LONG tokens or more did not run."""
    ran = {
        f'{part} {what} of {shape}': bool(found.ours(part, shape, what))
        for part, shape, backend in found.named
        for what in PASSES
        if backend == OURS and SHAPES[shape].tokens >= LONG and part in (*SHARES[what], 'nsa')
    }
    failed = [name for name, there in ran.items() if not there]
    text = f'From {LONG:,} tokens on {len(ran) - len(failed)} of {len(ran)} passes ran'
    return (f'{text}; not {", ".join(failed)}.' if failed else f'{text}.') if ran else ''


def comparison_table(found: Found) -> str:
    body = []
    for shape, part in product(found.shapes, PARTS):
        cells = []
        for what in PASSES:
            time, (best, name) = found.ours(part, shape, what), found.best(part, shape, what)
            dense = found.ms('nsa', shape, CUDNN, what) if part.startswith('nsa') else None
            cells += [time, best, name, ratio(best, time), ratio(dense, time)]
        if cells[0] is not None or cells[1] is not None:
            body.append([shape, part, *cells])
    names = ('ours', 'best public', 'which', 'best / ours', 'dense / ours')
    return report.table(('shape', 'part', *(f'{what}: {name}' for what in PASSES for name in names)), body)


def share_table(found: Found) -> str:
    body = []
    for shape, what in product(found.lengths, PASSES):
        times = {part: found.ours(part, shape, what) for part in SHARES[what]}
        known = {part: time for part, time in times.items() if time}
        if len(known) == len(times):
            total = sum(known.values())
            cells = [
                f'{report.cell(known[part])} ({100 * known[part] / total:.0f} %)' if part in known else None
                for part in SHARES['forward']
            ]
            body.append([shape, what, *cells, total, found.ours('nsa', shape, what)])
    return report.table(('shape', 'pass', *SHARES['forward'], 'sum', 'whole'), body)


def memory_table(found: Found) -> str:
    backends = [name for name in (OURS, CUDNN, FLASH, *PEERS) if any(key[2] == name for key in found.named)]
    body = []
    for shape in found.shapes:
        sizes = [report.gib(found.named.get(('nsa', shape, name), {}).get('peak_bytes')) for name in backends]
        if any(sizes):
            body.append([shape, *sizes])
    return report.table(('`nsa`', *(NAMES.get(name, name) for name in backends)), body)


def growth_table(found: Found) -> str:
    """Say 'linear' if no length takes more than MAX_GROWTH times the bytes per token of the next shorter one."""
    body = []
    for part in PARTS:
        sizes: dict[int, float] = {}
        for name in [*found.lengths, FEWER_HEADS]:
            shape, size = SHAPES[name], found.named.get((part, name, OURS), {}).get('peak_bytes')
            if size and shape.tokens >= SHAPES[TARGET_SHAPE].tokens:
                sizes.setdefault(shape.tokens, size / shape.tokens / shape.heads)
        if len(sizes) > 1:
            steps = [b / a for a, b in pairwise(sizes.values())]
            first, *_, last = sizes.values()
            linear = 'linear' if max(steps) <= MAX_GROWTH else f'up to {max(steps):.2f} times that of the length before'
            growth = ', '.join(map(report.cell, steps))
            body.append([part, f'{max(sizes):,}', last, growth, ratio(last, first), linear])
    return report.table(('part', 'up to', 'bytes', 'over the length before', 'over the shortest', ''), body)


def row_table(found: Found) -> str:
    body = []
    for (part, shape, backend), row in found.named.items():
        times = [*(row.get(f'{name}_ms') for name in (*PASSES, 'total')), *report.fastest(row)]
        read = [f'{row[name]:.1f}' for name in ('union_4', 'union_16') if name in row]
        facts = [row.get('error'), row.get('agreement'), ' / '.join(read) or None]
        body.append([part, shape, backend, *times, report.gib(row.get('peak_bytes')), *facts, row.get('note', '')])
    columns = (*PASSES, 'both', *(f'fastest {what}' for what in PASSES), 'peak GiB', 'error', 'agreement', 'union', '')
    return report.table(('part', 'shape', 'backend', *columns), body)


def plot_times(path: Path, rows: list[Case], title: str) -> None:
    """Draw the times of `nsa` of all implementations over the length."""
    from matplotlib.figure import Figure

    found = Found(rows)
    figure = Figure(figsize=(12, 5), layout='constrained')
    backends = [name for name in (OURS, CUDNN, FLASH, *PEERS) if any(key[2] == name for key in found.named)]
    for what, axes in zip(PASSES, figure.subplots(1, 2), strict=True):
        for backend in backends:
            points = [(SHAPES[name].seqlen, found.ms('nsa', name, backend, what)) for name in found.lengths]
            known = [(tokens, time) for tokens, time in points if time]
            if known:
                style = {'marker': 'o', 'linewidth': 2.5 if backend == OURS else 1.2}
                style['linestyle'] = '--' if backend in (CUDNN, FLASH) else '-'
                less = ' (does less)' if backend in PEERS and PEERS[backend].less else ''
                axes.plot(*zip(*known, strict=True), label=NAMES.get(backend, backend) + less, **style)
        axes.set_xscale('log', base=2)
        axes.set_yscale('log')
        tokens = [SHAPES[name].seqlen for name in found.lengths]
        axes.set_xticks(tokens, [short(count) for count in tokens])
        fewer = found.ours('nsa', FEWER_HEADS, what)
        if fewer:
            shape = SHAPES[FEWER_HEADS]
            axes.plot([shape.seqlen], [fewer], 'C0s', fillstyle='none', label=f'ours, {shape.heads} query heads')
        axes.set(xlabel='tokens', ylabel='ms', title=what)
        axes.grid(alpha=0.3)
    save(figure, path, title)


def plot_shares(path: Path, rows: list[Case], title: str) -> None:
    """Draw the share of each part over the length."""
    from matplotlib.figure import Figure

    found = Found(rows)
    figure = Figure(figsize=(12, 5), layout='constrained')
    for what, axes in zip(PASSES, figure.subplots(1, 2), strict=True):
        times = {
            name: [found.ours(part, name, what) for part in SHARES[what]]
            for name in found.lengths
            if all(found.ours(part, name, what) for part in SHARES[what])
        }
        below = [0.0] * len(times)
        for i, part in enumerate(SHARES[what]):
            heights = [100 * (parts[i] or 0) / sum(filter(None, parts)) for parts in times.values()]
            color = f'C{SHARES["forward"].index(part)}'
            axes.bar(range(len(times)), heights, 0.8, below, label=part, color=color)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.set_xticks(range(len(times)), [short(SHAPES[name].seqlen) for name in times])
        axes.set(xlabel='tokens', ylabel='percent', title=what)
    save(figure, path, title)


def save(figure: Any, path: Path, title: str) -> None:
    """Add one legend for all axes, and write the file."""
    figure.suptitle(f'{title}, {PAPER.described().split("tokens, ")[1]}')
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[-1].legend(handles, labels, loc='center left', bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def short(tokens: int) -> str:
    return f'{tokens // 2**20}M' if tokens >= 2**20 else f'{tokens // 1024}k' if tokens >= 1024 else str(tokens)
