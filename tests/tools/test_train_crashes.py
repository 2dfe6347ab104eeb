"""Nothing is lost by SIGKILL, by two processes on one run, or by a full disk (slow: pytest -m slow -s).

The processes are real, and so is the full disk where the test may mount a tmpfs.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import train_enwik8
from tests.support.training_runs import assert_same_run, command, write_words
from train_enwik8 import load_checkpoint

pytestmark = pytest.mark.slow

SETTINGS = {'steps': 150, 'log_every': 2, 'eval_every': 40, 'save_every': 3, 'sample_every': 50}


@pytest.fixture(scope='module')
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp('text'))


@pytest.fixture(scope='module')
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run without interruption."""
    runs = tmp_path_factory.mktemp('runs')
    with start(command(text, runs, '--name', 'whole', **SETTINGS)) as process:
        assert process.wait() == 0
    return runs / 'whole'


def start(arguments: list[str]) -> subprocess.Popen:
    pipes: dict[str, Any] = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE, 'text': True}
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen([sys.executable, train_enwik8.__file__, *arguments], env=environment, **pipes)


def resume(folder: Path) -> list[str]:
    return ['--runs-dir', str(folder.parent), '--name', folder.name, '--device', 'cpu', '--resume']


def saved_step(folder: Path) -> int:
    """Return the step of the checkpoint, -1 before the first one; later it must be readable."""
    return load_checkpoint(folder)['step'] if (folder / 'checkpoint.pt').exists() else -1


def shown(steps: list[int]) -> str:
    """Return how often the last checkpoint had each step, -1 for none."""
    return ', '.join(f'{step} ({count}x)' if count > 1 else str(step) for step, count in sorted(Counter(steps).items()))


def table(title: str, rows: dict[str, Any]) -> None:
    print('', title, *(f'  {name:<26} {value}' for name, value in rows.items()), sep='\n')


def has_lock(folder: Path, process: subprocess.Popen) -> bool:
    try:
        return (folder / 'lock').read_text().startswith(f'process {process.pid} ')
    except FileNotFoundError:
        return False


def wait_for_lock(folder: Path, process: subprocess.Popen) -> None:
    """Wait until the run holds its lock: the imports before that take longer than the run."""
    while process.poll() is None and not has_lock(folder, process):
        time.sleep(0.002)


def test_sigkill_at_50_random_moments(text: Path, whole: Path, tmp_path: Path) -> None:
    generator, runs, steps = random.Random(1), 0, []
    new = command(text, tmp_path, **SETTINGS)
    with start([*new, '--name', 'trial']) as process:
        wait_for_lock(tmp_path / 'trial', process)
        started = time.monotonic()
        process.wait()
    seconds = time.monotonic() - started  # of a whole run
    folder = tmp_path / 'run-0'
    while len(steps) < 50:
        before = saved_step(folder)
        with start(resume(folder) if before >= 0 else [*new, '--name', folder.name]) as process:
            wait_for_lock(folder, process)
            try:
                process.wait(generator.uniform(0, seconds))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            code, error = process.wait(), process.stderr.read() if process.stderr else ''
        after = saved_step(folder)
        assert after >= before
        if code:
            assert code == -signal.SIGKILL, error
            steps.append(after)
        if after >= 0 and load_checkpoint(folder)['finished']:  # a signal may come after the last save, too
            assert_same_run(whole, folder)
            runs += 1
            folder = tmp_path / f'run-{runs}'
    with start(resume(folder) if saved_step(folder) >= 0 else [*new, '--name', folder.name]) as process:
        assert process.wait() == 0
    assert_same_run(whole, folder)
    assert not list(folder.glob('*.part'))
    assert not (folder / 'lock').exists()
    assert sum(step > 0 for step in steps) > 25, steps
    table('SIGKILL', {'times': 50, 'saved steps': shown(steps), 'runs with the same end': runs + 1})


def test_two_resumes_at_once_20_times(text: Path, whole: Path, tmp_path: Path) -> None:
    folder, steps, refused = tmp_path / 'run', [], 0
    with start(command(text, tmp_path, '--name', 'run', **SETTINGS)) as process:
        while saved_step(folder) < 3:
            time.sleep(0.02)
        process.kill()
    for attempt in range(20):
        with start(resume(folder)) as one, start(resume(folder)) as other:
            while one.poll() is None and other.poll() is None:
                for process in (one, other):
                    if has_lock(folder, process):
                        process.send_signal(signal.SIGSTOP)  # or it may end before the other process gets there
                time.sleep(0.005)
            loser, winner = (one, other) if one.poll() is not None else (other, one)
            winner.send_signal(signal.SIGCONT)
            while attempt % 4 == 3 and saved_step(folder) == steps[-1]:
                time.sleep(0.01)
            winner.send_signal(signal.SIGTERM)  # saved, or before its first step
            printed = loser.stderr.read() if loser.stderr else ''
            assert loser.returncode == 2, printed
            assert printed == (
                f'train_enwik8.py: {folder}: in use by process {winner.pid} on {os.uname().nodename} '
                '(--name starts another run)\n'
            )
            assert winner.wait() in (128 + signal.SIGTERM, -signal.SIGTERM)
            refused += 1
        steps.append(saved_step(folder))
    assert steps == sorted(steps)
    with start(resume(folder)) as process:
        assert process.wait() == 0
    assert_same_run(whole, folder)
    table('two --resume', {'times': 20, 'refused by name': refused, 'saved steps': shown(steps), 'same end': 'yes'})


def test_full_disk_at_10_sizes(text: Path, whole: Path, tmp_path: Path) -> None:
    disk = tmp_path / 'disk'
    disk.mkdir()
    largest = sum(p.stat().st_size for p in whole.glob('tensors-*/*'))
    needed = sum(p.stat().st_size for p in whole.rglob('*')) + largest
    found: dict[str, Any] = {}
    for tenth in range(10):
        size = 16 + (needed * (tenth + 1) // 12) // 1024  # KiB
        mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}k', 'tmpfs', str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip('a tmpfs cannot be mounted here')
        try:
            folder = disk / 'run'
            with start(command(text, disk, '--name', 'run', **SETTINGS)) as process:
                code, printed = process.wait(), process.stderr.read() if process.stderr else ''
            assert code == 2, printed
            assert printed.count('\n') == 1
            assert 'No space left on device' in printed
            assert not list(folder.glob('*.part'))
            step = saved_step(folder)
            assert len(list(folder.glob('tensors-*'))) == (step >= 0)
            found[f'saved step at {size} KiB'] = step
            subprocess.run(['mount', '-o', 'remount,size=64m', str(disk)], check=True)
            with start(resume(folder) if step >= 0 else command(text, disk, '--name', 'run', **SETTINGS)) as process:
                assert process.wait() == 0, process.stderr.read() if process.stderr else ''
            assert_same_run(whole, folder)
        finally:
            subprocess.run(['umount', str(disk)], check=True)
    table('full disk', {'sizes': 10, **found, 'same end after more room': 'yes'})
