"""The job scheduler: one process per GPU, stopped by a time limit or a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.jobs import Job, exit_code, run_jobs, stop_request, visible_gpus

STOPPABLE = """
import sys, time
from pathlib import Path
from benchmarks.jobs import stop_request
with stop_request() as request:
    Path(sys.argv[1]).write_text('started')
    while not request:
        time.sleep(0.01)
Path(sys.argv[1]).write_text('saved')
sys.exit(request.exit_code)
"""

# The same without torch, whose import takes seconds.
SAVES_ON_SIGTERM = """
import signal, sys, time
from pathlib import Path
def save(number, _):
    Path(sys.argv[1]).write_text('saved')
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""


def python(name: str, code: str, *arguments: str) -> Job:
    return Job(name, [sys.executable, '-c', code, *arguments])


def test_jobs_share_the_gpus(tmp_path: Path):
    write = (
        'import os, sys, time; time.sleep(0.3); print(os.environ["CUDA_VISIBLE_DEVICES"], file=open(sys.argv[1], "w"))'
    )
    jobs = [python(str(index), write, str(tmp_path / str(index))) for index in range(4)]
    assert run_jobs(jobs, ['5', '7']) == dict.fromkeys('0123', 0)
    used = [(tmp_path / str(index)).read_text().strip() for index in range(4)]
    assert set(used[:2]) == {'5', '7'}
    assert set(used[2:]) <= {'5', '7'}


def test_exit_codes():
    jobs = [python('bad', 'raise SystemExit(3)'), python('good', 'pass')]
    assert run_jobs(jobs, []) == {'bad': 3, 'good': 0}
    with pytest.raises(ValueError, match='names must be unique'):
        run_jobs([jobs[0], jobs[0]], [])


@pytest.mark.parametrize(
    ('codes', 'expected'),
    [
        ({}, 0),
        ({'a': 0, 'b': 0}, 0),
        ({'a': 0, 'b': None}, 3),
        ({'a': 128 + signal.SIGTERM, 'b': 0}, 3),
        ({'a': -signal.SIGINT}, 3),
        ({'a': 128 + signal.SIGTERM, 'b': 1}, 1),
        ({'a': -signal.SIGKILL}, 1),
    ],
)
def test_exit_code_of_all_jobs(codes: dict[str, int | None], expected: int):
    assert exit_code(codes) == expected


def test_time_limit_lets_jobs_save(tmp_path: Path):
    file = tmp_path / 'state'
    codes = run_jobs([python('first', SAVES_ON_SIGTERM, str(file)), python('second', 'pass')], [], time_limit=1.5)
    assert codes == {'first': 128 + signal.SIGTERM, 'second': None}
    assert file.read_text() == 'saved'


def test_jobs_that_ignore_the_signal_are_killed(tmp_path: Path):
    deaf = Job('deaf', ['sh', '-c', "trap '' TERM; exec sleep 60"])
    started = time.monotonic()
    assert run_jobs([deaf], [], time_limit=1, grace_seconds=0.3) == {'deaf': -signal.SIGKILL}
    assert time.monotonic() - started < 10


def test_signal_reaches_the_jobs(tmp_path: Path):
    file = tmp_path / 'state'
    code = f"""
import sys
from benchmarks.jobs import Job, run_jobs
codes = run_jobs([Job('only', [sys.executable, '-c', {STOPPABLE!r}, {str(file)!r}])], [])
sys.exit(codes['only'])
"""
    with subprocess.Popen([sys.executable, '-c', code]) as process:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert file.read_text() == 'saved'


def test_stop_request_restores_handlers():
    before = signal.getsignal(signal.SIGTERM)
    with stop_request() as request:
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        assert request
        assert request.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: 2)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    assert visible_gpus() == ['0', '1']
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,6')
    assert visible_gpus(1) == ['3']
    with pytest.raises(ValueError, match='gpus is 3, but must be between 1 and 2'):
        visible_gpus(3)
