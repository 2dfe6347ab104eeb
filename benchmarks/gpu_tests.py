"""Are the kernels right on this GPU? Runs the tests marked `gpu` and writes their counts.

    python -m benchmarks.gpu_tests                                       all, about 15 minutes on an H200 with 16 cores
    python -m benchmarks.gpu_tests --name rules -- tests/gpu/test_rules.py -k rules
    python -m benchmarks.gpu_tests --device cpu --out /tmp/results -- tests/ops/test_geometry.py      to try the script

Arguments after `--` go to pytest. Needs pytest-xdist for --jobs above 1. Writes <gpu>/tests-<name>.md and .json
to --out, with the names of failed cases, and returns the exit code of pytest. An interrupted run keeps the counts so
far.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import report

OUTCOMES = ('passed', 'failed', 'skipped')


def run_tests(arguments: list[str], jobs: int, folder: Path, device: str) -> tuple[int, Path]:
    junit = folder / 'tests.xml'
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--junitxml={junit}']
    command += ['--full', '-m', 'gpu'] if device != 'cpu' else []
    command += ['-n', str(jobs)] if jobs > 1 else []
    with subprocess.Popen([*command, *arguments], cwd=report.ROOT) as process:
        while True:
            try:
                return process.wait(), junit
            except KeyboardInterrupt:
                print('interrupted: waiting for what pytest has', flush=True)  # pytest received the interrupt too


def outcome_of(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return 'failed' if tags & {'failure', 'error'} else 'skipped' if 'skipped' in tags else 'passed'


def count(junit: Path) -> tuple[dict[str, Counter[str]], dict[str, float], list[str]]:
    """Return outcomes and seconds of each test function, and the names of failed cases."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    failed = []
    for case in ElementTree.parse(junit).iter('testcase'):
        if not case.get('name'):
            continue  # an interrupted test
        name = f'{case.get("classname")}.{case.get("name", "").split("[")[0]}'
        outcome = outcome_of(case)
        counts[name][outcome] += 1
        seconds[name] += float(case.get('time', 0))
        if outcome == 'failed':
            failed.append(f'{case.get("classname")}.{case.get("name")}')
    return counts, seconds, failed


def main() -> int:
    parser = report.make_parser(__doc__)
    parser.add_argument('--name', default='gpu', help='of the results (%(default)s)')
    parser.add_argument('--jobs', type=int, default=1, help='processes that test side by side (%(default)s)')
    parser.add_argument('arguments', nargs='*', help='of pytest')
    options = parser.parse_args()
    where = report.machine(options.device, options.commit)
    with tempfile.TemporaryDirectory() as folder:
        code, junit = run_tests(options.arguments, options.jobs, Path(folder), options.device)
        if not junit.exists():
            return code
        counts, seconds, failed = count(junit)
    total: Counter[str] = sum(counts.values(), Counter())
    rows = [[name, *(counts[name][outcome] for outcome in OUTCOMES), seconds[name]] for name in sorted(counts)]
    rows.append(['all', *(total[outcome] for outcome in OUTCOMES), sum(seconds.values())])
    tables = [report.table(('test', *OUTCOMES, 'seconds'), rows)]
    tables += ['Failed:\n\n' + '\n'.join(f'- {name}' for name in failed)] * bool(failed)
    title = f'Tests on a GPU: {total["passed"]} passed, {total["failed"]} failed, {total["skipped"]} skipped'
    title += ', interrupted' * (code == pytest.ExitCode.INTERRUPTED)
    report.write(options.out, where, f'tests-{options.name}', title, tables, {'counts': counts, 'failed': failed})
    print(title)
    return code


if __name__ == '__main__':
    sys.exit(main())
