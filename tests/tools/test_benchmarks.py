"""The benchmarks run every case in a process, in an order that allows comparison, and keep earlier results."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import report, runner, timing
from benchmarks.attention import __main__ as attention
from benchmarks.attention import backends


def make_cases(shapes: str, names: str = 'triton,flex,eager') -> list[runner.Case]:
    options = argparse.Namespace(shapes=shapes, backends=names, device='cpu')
    return attention.make_cases('backends', options, ['nsa'])[0]


TINY = make_cases('tiny*')


@dataclass
class Fakes:
    """Answers of the fake workers, the cases that end them, and the workers that were started."""

    forward_ms: float = 1.0
    breaks: tuple[str, ...] = ()
    started: list[FakeWorker] = field(default_factory=list)


class FakeWorker:
    def __init__(self, fakes: Fakes) -> None:
        self.fakes, self.alive, self.cases = fakes, True, []
        fakes.started.append(self)

    def measure(self, case: runner.Case, seconds: float) -> runner.Case:
        assert self.alive
        self.cases.append(case)
        if 'warm' in case or case['backend'] in self.fakes.breaks:
            self.alive = False
            return {'note': 'gone'}
        return {'forward_ms': self.fakes.forward_ms}

    def stop(self) -> None:
        self.alive = False


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    monkeypatch.setattr(runner, 'Worker', lambda environment: FakeWorker(fakes))
    return fakes


def run_cases(cases: list[runner.Case], jobs: int = 1, budget: float = 60) -> list[runner.Case]:
    rows = runner.run_cases(cases, 10, budget, lambda rows: None, jobs)
    return [{key: value for key, value in row.items() if key != 'took_s'} for row in rows]


def test_cases_of_a_shape_stand_together():
    shapes = ('tiny', 'tiny-packed')
    names = ('triton', 'flex', 'eager')
    assert [(case['shape'], case['backend']) for case in TINY] == [(s, b) for s in shapes for b in names]


def test_order_of_compilation():
    def names(shapes: str) -> list[tuple[str, str]]:
        return [(case['backend'], case['shape']) for case in runner.cases_to_warm(reversed(make_cases(shapes)))]

    # Every kernel once, those that take longest first.
    assert names('paper-*-h4,paper-*-h16') == [
        (backend, f'paper-8k-h{heads}') for backend in ('flex', 'triton') for heads in (16, 4)
    ]
    assert names('paper-64k-h4') == []


def test_failed_warm_up_costs_nothing(fakes: Fakes):
    plain = run_cases(TINY)
    fakes.started.clear()
    assert run_cases(TINY, jobs=3) == plain
    served = [case for worker in fakes.started for case in worker.cases]
    assert ['warm' in case for case in served] == [True] * 4 + [False] * len(TINY)
    assert not any(worker.alive for worker in fakes.started)


def test_worker_that_is_gone_is_replaced(fakes: Fakes):
    fakes.breaks = ('flex',)
    rows = run_cases(TINY)
    assert [row.get('note') for row in rows] == [None, 'gone', None] * 2
    assert sorted(len(worker.cases) for worker in fakes.started) == [1, 1, 2, 2]


def test_used_up_budget_is_noted(fakes: Fakes):
    assert {row['note'] for row in run_cases(TINY, jobs=2, budget=0)} == {'not run: the time was used up'}
    assert not fakes.started


def run_into(out: Path, *flags: str) -> dict[str, Any]:
    parser = runner.make_parser(None, case_seconds=10)
    parser.add_argument('--backends')
    options = parser.parse_args(['--device', 'cpu', '--commit', 'abc', '--out', str(out), *flags])
    cases = make_cases('tiny', options.backends)
    runner.run(cases, options, 'backends', 'A title', backends.make_tables)
    (file,) = out.glob('cpu/*.json')
    assert file.with_suffix('.md').exists()
    return json.loads(file.read_text())


def times(result: dict[str, Any]) -> dict[str, float | None]:
    return {row['backend']: row.get('forward_ms') for row in result['rows']}


def test_add_keeps_other_rows(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_into(tmp_path, '--backends', 'flex,eager')
    # Midnight passes.
    monkeypatch.setattr(report, 'datetime', Mock(**{'now.return_value': datetime(2100, 1, 1)}))
    monkeypatch.setattr(sys, 'argv', [*sys.argv, '--add'])
    fakes.forward_ms = 2.0
    added = run_into(tmp_path, '--backends', 'triton,eager', '--add')
    assert times(added) == {'triton': 2.0, 'flex': 1.0, 'eager': 2.0}
    assert len(added['machine']['commands']) == 2
    # Cases that a run did not reach replace nothing.
    assert times(run_into(tmp_path, '--backends', 'triton,eager', '--add', '--budget', '0')) == times(added)
    with pytest.raises(SystemExit, match='has commit abc, this run def'):
        run_into(tmp_path, '--backends', 'eager', '--add', '--commit', 'def')


def test_without_add_the_file_is_written_anew(fakes: Fakes, tmp_path: Path):
    run_into(tmp_path, '--backends', 'flex,eager')
    anew = run_into(tmp_path, '--backends', 'triton')
    assert times(anew) == {'triton': 1.0}
    assert len(anew['machine']['commands']) == 1


def test_missing_runs_the_remaining_cases(fakes: Fakes, tmp_path: Path):
    run_into(tmp_path, '--backends', 'flex')
    run_into(tmp_path, '--backends', 'eager', '--add', '--budget', '0')
    fakes.forward_ms = 2.0
    found = [run_into(tmp_path, '--backends', 'flex,eager', '--missing') for _ in range(2)]
    assert [times(result) for result in found] == [{'flex': 1.0, 'eager': 2.0}] * 2
    assert [case['backend'] for worker in fakes.started for case in worker.cases] == ['flex', 'eager']
    # A repeated command is listed once.
    assert len(found[1]['machine']['commands']) == 1


def test_a_name_keeps_the_full_result(fakes: Fakes, tmp_path: Path):
    run_into(tmp_path / 'full', '--backends', 'flex,eager', '--name', 'other')
    assert [path.stem for path in (tmp_path / 'full' / 'cpu').glob('*.json')] == ['other']


def test_the_budget_is_for_all_suites(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(time, 'monotonic', lambda: float(next(clock)))
    flags = ['--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path), '--shapes', 'tiny', '--backends', 'triton']
    attention.main([*flags, '--cases', 'backends/nsa,features/dense', '--budget', '50'])
    notes = {
        path.stem: [row.get('note') for row in json.loads(path.read_text())['rows']]
        for path in (tmp_path / 'cpu').glob('*.json')
    }
    assert notes == {'backends': [None], 'features': ['not run: the time was used up']}


def test_cases_of_suites(capsys: pytest.CaptureFixture[str]):
    assert attention.find_cases('selected/64k,selected/8k,features') == {
        'selected': ['8k', '64k'],
        'features': [*attention.SUITES['features'].cases],
    }
    attention.main(['--list'])
    printed = capsys.readouterr().out
    assert all(f'{name}/{case} ' in printed for name, suite in attention.SUITES.items() for case in suite.cases)
    for wrong, message in (
        (['--cases', 'none'], 'nothing is named none; there are selected, parts'),
        (['--cases', 'parts/none'], 'nothing is named none; there are compressed'),
        (['--cases', 'selected/8k', '--shapes', 'tiny'], 'each case of selected has a shape of its own'),
        (['--cases', 'parts', '--backends', 'none'], 'nothing is named none; there are triton'),
    ):
        with pytest.raises(SystemExit, match=message):
            attention.main(['--device', 'cpu', *wrong])
    for wrong, message in (([], '--cases is missing'), (['--cases', 'parts,features', '--name', 'x'], '--name is x')):
        with pytest.raises(SystemExit):
            attention.main(wrong)
        assert message in capsys.readouterr().err


def test_cases_stopped_by_the_budget_count_as_not_run(fakes: Fakes, monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 0.0, 70.0, 70.0])
    monkeypatch.setattr(runner.time, 'monotonic', lambda: next(clock))
    fakes.breaks = ('flex',)
    (row,) = run_cases(TINY[1:2])
    assert row['note'] == 'not run: the time was used up'


def test_add_without_earlier_rows(fakes: Fakes, tmp_path: Path):
    assert times(run_into(tmp_path, '--backends', 'eager', '--add')) == {'eager': 1.0}


@pytest.mark.full
def test_attention_in_processes(tmp_path: Path):
    flags = ['--cases', 'backends/nsa', '--shapes', 'tiny', '--backends', 'flex,eager', '--jobs', '2']
    flags += ['--device', 'cpu', '--out', str(tmp_path)]
    done = subprocess.run(
        [sys.executable, '-m', 'benchmarks.attention', *flags],
        cwd=report.ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]
    assert [(row['backend'], row.get('warm')) for row in rows] == [('flex', True), ('flex', None), ('eager', None)]
    # FlexAttention has no backward pass on CPUs.
    assert all('cannot serve this call' in row['note'] for row in rows[:2])
    assert rows[2]['forward_ms'] > 0
    assert rows[2]['backward_ms'] > 0


@pytest.mark.parametrize('script', ['memory', 'attention.__main__', 'gpu_tests'])
def test_without_a_gpu_nothing_begins(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    cases = ['--cases', 'backends/nsa'] if 'attention' in script else []
    monkeypatch.setattr(sys, 'argv', [script, '--commit', 'abc', '--out', str(tmp_path), *cases])
    module = importlib.import_module(f'benchmarks.{script}')
    monkeypatch.setattr(module, 'make_call', Mock(side_effect=AssertionError), raising=False)
    monkeypatch.setattr(subprocess, 'Popen', Mock(side_effect=AssertionError))
    with pytest.raises(SystemExit, match='--device cuda: there is no GPU'):
        module.main()


@pytest.mark.full
def test_interrupted_tests_are_kept(tmp_path: Path):
    """Ctrl-C reaches pytest too: tests that ran are counted."""
    (tmp_path / 'slow.py').write_text(
        'import time\ndef test_first(): pass\ndef test_second():\n    print("READY", flush=True)\n    time.sleep(60)\n'
    )
    script = ['-m', 'benchmarks.gpu_tests', '--device', 'cpu', '--commit', 'abc', '--out', str(tmp_path), '--']
    command = [sys.executable, *script, '-s', str(tmp_path / 'slow.py')]
    own = {name: value for name, value in os.environ.items() if not name.startswith('PYTEST')}
    options: dict[str, Any] = {'cwd': report.ROOT, 'env': own, 'stdout': subprocess.PIPE, 'text': True}
    options['start_new_session'] = True
    # In the background of a shell the signal is ignored.
    options['preexec_fn'] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        assert any('READY' in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    (written,) = tmp_path.glob('cpu/tests-gpu.md')
    assert '# Tests on a GPU: 1 passed, 0 failed, 0 skipped, interrupted' in written.read_text()


def test_kernels_of_short_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, '_kernels_ms', lambda function: [function(), 0.25][1])
    x = torch.ones(2, 2, requires_grad=True)
    calls = (lambda: x @ x, [x], 'cuda')
    both = {'forward_kernels_ms': 0.25, 'backward_kernels_ms': 0.25}
    assert timing.measure_kernels(*calls, {'forward_ms': 1.0, 'backward_ms': 1.0}) == both
    assert timing.measure_kernels(*calls, {'forward_ms': 1.0, 'backward_ms': 1e3}) == {'forward_kernels_ms': 0.25}
    without = timing.measure_kernels(lambda: x, [], 'cuda', {'forward_ms': 1.0, 'backward_ms': None})
    assert without == {'forward_kernels_ms': 0.25}
    assert timing.measure_kernels(*calls, {'forward_ms': 1e3, 'backward_ms': 1e3}) == {}
    assert timing.measure_kernels(lambda: x, [], 'cpu', {'forward_ms': 1.0}) == {}
    # A profiler without access to the GPU.
    monkeypatch.setattr(timing, '_kernels_ms', lambda _: 0.0)
    assert timing.measure_kernels(*calls, {'forward_ms': 1.0, 'backward_ms': 1.0}) == {}


@pytest.mark.gpu
@pytest.mark.skipif(
    int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', '1')) > 1, reason='other processes use the GPU meanwhile'
)
def test_kernels_take_no_longer_than_the_pass(device: torch.device):
    """In one of five measurements: the clock of the GPU may fall during one."""
    x = torch.randn(4096, 4096, device=device, requires_grad=True)
    shares = []
    for _ in range(5):
        found = timing.measure_with_kernels(lambda: x @ x, [x], 'cuda', seconds=0.2)
        shares.append([found[f'{what}_kernels_ms'] / found[f'{what}_ms'] for what in ('forward', 'backward')])
        if all(0.5 < share < 1.1 for share in shares[-1]):
            return
    pytest.fail(f'kernels over pass, forward and backward: {shares}')
