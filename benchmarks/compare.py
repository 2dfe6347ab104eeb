"""Is this tree slower than another one? Parts of `nsa` by both, in turn, on one GPU.

    git worktree add /tmp/before main~20
    python -m benchmarks.compare /tmp/before                                       the parts at 64k tokens
    python -m benchmarks.compare /tmp/before --shapes trainer --parts 'selected'   some of it

Both trees run their own benchmarks/layer.py, each in a process; the trees take turns, --rounds times. A ratio is that
of the smallest medians. Writes <gpu>/compare.md and .json to --out.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from benchmarks import report
from benchmarks.layer import PARTS
from benchmarks.report import ratio
from benchmarks.runner import Case, Worker, show
from benchmarks.shapes import SHAPES, find_names, find_shapes

MODULE, BACKEND = 'benchmarks.layer', 'triton'
DEFAULT_PARTS = ('compressed', 'compressed+choice', 'selected', 'window')
PASSES = ('forward', 'backward')
# That the time of a pass may grow by.
MOST = 1.02


def measure(workers: dict[str, Worker], cases: list[Case], rounds: int, seconds: float) -> list[Case]:
    """The rows of every tree and case with the smallest median of each pass. Both trees compile first."""
    with ThreadPoolExecutor(len(workers)) as pool:
        warm = [
            pool.submit(lambda worker=worker: [worker.measure({**case, 'warm': True}, seconds) for case in cases])
            for worker in workers.values()
        ]
        for done in warm:
            done.result()
    rows = []
    for case in cases:
        found: dict[str, list[Case]] = {tree: [] for tree in workers}
        for _, (tree, worker) in product(range(rounds), workers.items()):
            found[tree].append(worker.measure(case, seconds))
        for tree, results in found.items():
            times = {
                f'{what}_ms': min((r[f'{what}_ms'] for r in results if r.get(f'{what}_ms')), default=None)
                for what in PASSES
            }
            note = next((r['note'] for r in results if r.get('note')), '')
            rows.append({**case, 'tree': tree, **times, 'note': note, 'rounds': results})
            show({key: value for key, value in rows[-1].items() if key != 'rounds'})
    return rows


def make_tables(rows: list[Case]) -> list[str]:
    found = {(row['op'], row['shape'], row['tree']): row for row in rows}
    body, over = [], []
    for op, shape in dict.fromkeys((row['op'], row['shape']) for row in rows):
        before, after = (found[op, shape, tree] for tree in ('before', 'after'))
        cells = []
        for what in PASSES:
            times = before[f'{what}_ms'], after[f'{what}_ms']
            grown = ratio(times[1], times[0])
            cells += [*times, grown]
            if grown is not None and grown > MOST:
                over.append(f'{op} {what} of {shape}')
        body.append([op, shape, *cells, before['note'] or after['note']])
    columns = [f'{what} {name}' for what in PASSES for name in ('before ms', 'after ms', 'after / before')]
    verdict = f'No pass takes more than {MOST} times as long.' if not over else f'Slower: {", ".join(over)}.'
    return [
        'The smallest of the medians of every round; caches cold.',
        report.table(('part', 'shape', *columns, ''), body),
        verdict,
        report.table(('shape', ''), [[name, SHAPES[name].described()] for name in {row['shape']: 0 for row in rows}]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser)
    add = parser.add_argument
    add('before', type=Path, help='the other tree')
    add('--shapes', default='paper-64k-h4', help='patterns, separated by commas (%(default)s)')
    add('--parts', default=','.join(DEFAULT_PARTS), help='patterns, separated by commas (%(default)s)')
    add('--rounds', type=int, default=2, help='(%(default)s)')
    add('--case-seconds', type=float, default=60, help='at most for one case (%(default)s)')
    options = parser.parse_args()
    if not (options.before / 'benchmarks' / 'layer.py').is_file():
        raise SystemExit(f'before is {options.before}, but must be a folder with benchmarks/layer.py')
    cases = [
        {'op': part, 'shape': shape.name, 'backend': BACKEND, 'device': options.device}
        for shape, part in product(find_shapes(options.shapes), find_names(PARTS, options.parts))
    ]
    where = report.machine(options.device, options.commit)
    workers = {
        tree: Worker({}, MODULE, root) for tree, root in (('before', options.before.resolve()), ('after', report.ROOT))
    }
    try:
        rows = measure(workers, cases, options.rounds, options.case_seconds)
    finally:
        for worker in workers.values():
            worker.stop()
    tables = make_tables(rows)
    report.write(options.out, where, 'compare', 'Before and after', tables, rows)
    print('\n\n'.join(tables))


if __name__ == '__main__':
    main()
