"""How fast is attention? The selected branch, the parts of `nsa` beside peers, head layouts, backends, features.

    python -m benchmarks.attention --list                                     suites, cases and shapes
    python -m benchmarks.attention --cases parts --missing                    one suite; again until all of it has run
    python -m benchmarks.attention --cases 'selected/64k*,features'           some cases, all cases of a suite
    python -m benchmarks.attention --cases layouts --jobs 16 --missing        `nsa` over dense attention by head layout
    python -m benchmarks.attention --cases 'parts/nsa*' --shapes paper-64k-h4 --backends triton,cudnn
    python -m benchmarks.attention --cases backends/nsa --name backends-nsa --jobs 15
    TRITON_INTERPRET=1 python -m benchmarks.attention --device cpu --cases parts --shapes tiny --out /tmp/results
                                                                              to try the script

`--list` says what the suites measure. Peers are the repositories of benchmarks/peers.py; those that are not on
PYTHONPATH are listed in the result. Each backend has a process of its own. With --jobs, processes compile side by side
before the first case. Suites `selected`, `parts` and `layouts` compare a few rows of each output with float32: an
implementation that is wrong counts for nothing.

Each suite writes <gpu>/<suite>.md and .json to --out after every case, and at the end its pictures. A run that is cut
short keeps what it has; --missing continues it on the same GPU, commit and versions.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.attention import backends, designs, features, layouts, parts, selected
from benchmarks.attention.suite import Suite
from benchmarks.peers import PEERS
from benchmarks.runner import Case, Method, make_parser, run, serve
from benchmarks.shapes import SHAPES, find_names

SUITES: dict[str, Suite] = {
    'selected': selected.SUITE,
    'parts': parts.SUITE,
    'layouts': layouts.SUITE,
    'backends': backends.SUITE,
    'features': features.SUITE,
    'designs': designs.SUITE,
}


def find_method(case: Case) -> Method:
    return SUITES[case['suite']].method


def find_cases(patterns: str) -> dict[str, list[str]]:
    """Return names of cases by suite. A pattern is SUITE or SUITE/CASE; SystemExit if it matches nothing."""
    found: dict[str, list[str]] = {}
    for pattern in patterns.split(','):
        suite, _, case = pattern.partition('/')
        for name in find_names(SUITES, suite):
            found.setdefault(name, []).append(case or '*')
    return {name: find_names(SUITES[name].cases, ','.join(cases)) for name, cases in found.items()}


def make_cases(name: str, options: argparse.Namespace, names: list[str]) -> tuple[list[Case], list[str]]:
    """Return the cases of a suite, and the repositories of peers that cannot be imported."""
    suite = SUITES[name]
    shapes = options.shapes or suite.shapes
    if options.shapes and suite.shapes is None:
        raise SystemExit(f'--shapes is {options.shapes}, but each case of {name} has a shape of its own')
    known = [*suite.backends, *suite.optional]
    wanted = find_names(known, options.backends) if options.backends else suite.backends
    missing = [backend for backend in wanted if backend in PEERS and not peers.find_folder(PEERS[backend].file)]
    cases = suite.make_cases(
        names,
        find_names(SHAPES, shapes) if shapes else [],
        [backend for backend in wanted if backend not in missing],
    )
    added = {'suite': name, 'device': options.device}
    return [{**case, **added} for case in cases], [PEERS[backend].repository for backend in missing]


def print_list() -> None:
    for name, suite in SUITES.items():
        print(f'{name}: {suite.title}. {suite.about}')
        print(f'  backends: {", ".join(suite.backends)}', *(f'(by name: {name})' for name in suite.optional))
        print('  shapes: ' + (suite.shapes or 'one per case'))
        for case, about in suite.cases.items():
            print(f'  {name + "/" + case:32}{about}')
        print()
    print('Shapes:')
    for shape in SHAPES.values():
        print(f'  {shape.name:32}{shape.described()}')


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, prog='benchmarks.attention')
    add = parser.add_argument
    add(
        '--cases',
        help='patterns SUITE or SUITE/CASE, separated by commas; tiny, short and long cases by name only',
    )
    add('--list', action='store_true', help='measure nothing: print suites, cases and shapes')
    add('--shapes', help='patterns, separated by commas (default of the suite)')
    add('--backends', help='patterns, separated by commas (default of the suite)')
    add('--package', type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        if options.package:
            use_package(options.package)
        return serve(find_method)
    if options.list:
        return print_list()
    if not options.cases:
        parser.error('--cases is missing; --list shows what there is')
    chosen = find_cases(options.cases)
    if options.name and len(chosen) > 1:
        parser.error(f'--name is {options.name}, but must not be given for several suites: {", ".join(chosen)}')
    deadline, case_seconds = time.monotonic() + options.budget, options.case_seconds
    for name, names in chosen.items():
        suite = SUITES[name]
        cases, missing = make_cases(name, options, names)
        options.budget = max(0.0, deadline - time.monotonic())
        options.case_seconds = suite.case_seconds if case_seconds is None else case_seconds
        run(cases, options, name, suite.title, suite.make_tables, suite.plots, missing)


def use_package(folder: Path) -> None:
    """Import native_sparse_attention from a folder, for `benchmarks.compare`."""
    sys.path.insert(0, str(folder))
    import native_sparse_attention

    if not Path(native_sparse_attention.__file__).resolve().is_relative_to(folder.resolve()):
        raise ImportError(f'native_sparse_attention is {native_sparse_attention.__file__}, but must be in {folder}')


if __name__ == '__main__':
    main()
