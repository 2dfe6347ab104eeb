"""Is this tree slower than another one? Cases of `benchmarks.attention` by both, in turn, on one GPU.

    git worktree add ../before main~20
    python -m benchmarks.compare ../before                                         parts of `nsa` at 64k tokens
    python -m benchmarks.compare ../before --cases parts/selected --shapes trainer

The benchmarks of this tree measure the package of both trees, each in a process; the trees take turns, --rounds times.
A ratio is that of the smallest medians. Writes <gpu>/compare.md and .json to --out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from benchmarks import report
from benchmarks.attention.__main__ import SUITES, find_cases, make_cases
from benchmarks.attention.suite import legend
from benchmarks.report import ratio
from benchmarks.runner import Case, Worker, show
from benchmarks.timing import PASSES

MODULE = 'benchmarks.attention'
DEFAULT_CASES = ','.join(f'parts/{part}' for part in ('compressed', 'compressed+selection', 'selected', 'window'))
SHAPE = 'paper-64k-h4'
# Factor by which the time of a pass may grow.
MOST = 1.02


def measure(workers: dict[str, Worker], cases: list[Case], rounds: int, seconds: float) -> list[Case]:
    """Return a row per tree and case with the smallest median of each pass. Both trees compile first."""
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
    found = {(row['suite'], row['op'], row['shape'], row['backend'], row['tree']): row for row in rows}
    body, over, unknown = [], [], []
    for suite, op, shape, backend in dict.fromkeys(key[:-1] for key in found):
        before, after = (found[suite, op, shape, backend, tree] for tree in ('before', 'after'))
        name = f'{suite}/{op}'
        cells = []
        for what in PASSES:
            times = before[f'{what}_ms'], after[f'{what}_ms']
            grown = ratio(times[1], times[0])
            cells += [*times, grown]
            if grown is not None and grown > MOST:
                over.append(f'{name} {what} of {shape}')
        if before['forward_ms'] is None or after['forward_ms'] is None:
            unknown.append(f'{name} of {shape}')
        body.append([name, shape, backend, *cells, before['note'] or after['note']])
    columns = [f'{what} {name}' for what in PASSES for name in ('before ms', 'after ms', 'after / before')]
    verdict = f'No pass takes more than {MOST} times as long.' if not over else f'Slower: {", ".join(over)}.'
    return [
        'Smallest median of all rounds; cold caches.',
        report.table(('case', 'shape', 'backend', *columns, ''), body),
        verdict + (f' Not measured: {", ".join(unknown)}.' if unknown else ''),
        legend([*dict.fromkeys(row['shape'] for row in rows)]),
    ]


def main() -> None:
    parser = report.make_parser(__doc__)
    add = parser.add_argument
    add('before', type=Path, help='the other tree')
    add('--cases', default=DEFAULT_CASES, help='patterns SUITE or SUITE/CASE, separated by commas (%(default)s)')
    add('--shapes', help=f'patterns, separated by commas ({SHAPE}, if the suite has shapes)')
    add('--backends', default='triton', help='patterns, separated by commas (%(default)s)')
    add('--rounds', type=int, default=2, help='(%(default)s)')
    add('--case-seconds', type=float, default=60, help='limit of one case (%(default)s)')
    options = parser.parse_args()
    if not (options.before / 'native_sparse_attention' / '__init__.py').is_file():
        raise SystemExit(f'before is {options.before}, but must be a folder with native_sparse_attention')
    cases, shapes = [], options.shapes
    for name, names in find_cases(options.cases).items():
        options.shapes = shapes or (SHAPE if SUITES[name].shapes else None)
        cases += make_cases(name, options, names)[0]
    where = report.machine(options.device, options.commit)
    workers = {
        tree: Worker({}, MODULE, ['--package', str(root)])
        for tree, root in (('before', options.before.resolve()), ('after', report.ROOT))
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
