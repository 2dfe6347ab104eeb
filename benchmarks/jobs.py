"""Run a list of commands on the GPUs of one machine: one process per GPU at a time, started from one queue.

The scheduler calls `run_jobs`. A job that can be interrupted polls `StopRequest`, saves a checkpoint and exits with
`StopRequest.exit_code`, so that the same job resumes when it is started again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from trainer.console import SIGNALS, note_signals

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """A command. `name` stands in progress lines and in the result of `run_jobs`, and must be unique there."""

    name: str
    command: Sequence[str]


@dataclass
class StopRequest:
    """Signals received so far. The second one ends the process at once."""

    received: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.received)

    @property
    def exit_code(self) -> int:
        """128 + n after signal n, the convention of shells; 0 without a signal."""
        return 128 + self.received[0] if self.received else 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of ending the process; the former handlers return on exit.

    Works in the main thread only, where Python handles signals.
    """
    request, former = StopRequest(), {each: signal.getsignal(each) for each in SIGNALS}
    note_signals(request.received)
    try:
        yield request
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def visible_gpus(count: int | None = None) -> list[str]:
    """Names of `count` GPUs as CUDA_VISIBLE_DEVICES lists them; None: all. Empty where there is no GPU.

    Raises:
        ValueError: if `count` is not positive or exceeds the number of GPUs.
    """
    available = torch.cuda.device_count()
    listed = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = listed.split(',')[:available] if listed else [str(index) for index in range(available)]
    if count is None:
        return names
    if not 1 <= count <= available:
        raise ValueError(f'gpus is {count}, but must be between 1 and {available}, the number of GPUs')
    return names[:count]


def run_jobs(
    jobs: Sequence[Job],
    gpus: Sequence[str],
    time_limit: float | None = None,
    grace_seconds: float = 60.0,
) -> dict[str, int | None]:
    """Run all jobs, each in a process of its own that sees one GPU.

    When the time limit ends or this process receives SIGINT or SIGTERM, no further job starts, running jobs receive
    SIGTERM, and those that still run after `grace_seconds` are killed.

    Args:
        gpus: values of CUDA_VISIBLE_DEVICES, one per process; empty: one process at a time with the environment as is.
        time_limit: seconds for all jobs together, or None.

    Returns:
        Exit code by name of the job: negative where a signal ended the process, None where it never started.

    Raises:
        ValueError: if two jobs have the same name.
    """
    codes: dict[str, int | None] = dict.fromkeys(job.name for job in jobs)
    if len(codes) != len(jobs):
        raise ValueError(f'jobs has {len(jobs)} jobs of {len(codes)} names, but names must be unique')
    deadline = None if time_limit is None else time.monotonic() + time_limit
    waiting, free = deque(jobs), deque([{'CUDA_VISIBLE_DEVICES': gpu} for gpu in gpus] or [{}])
    running: dict[str, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}
    kill_at: float | None = None
    with stop_request() as request:
        try:
            while running or (waiting and kill_at is None):
                while waiting and free and kill_at is None:
                    job, environment = waiting.popleft(), free.popleft()
                    running[job.name] = start(job, environment), environment
                for name, (process, environment) in list(running.items()):
                    if (code := process.poll()) is not None:
                        codes[name] = code
                        del running[name]
                        free.append(environment)
                        say(f'{name}: ' + (f'exit code {code}' if code else 'done'))
                now = time.monotonic()
                if kill_at is None and (request or (deadline is not None and now >= deadline)):
                    kill_at = now + grace_seconds
                    reason = f'signal {request.received[0]}' if request else f'time limit of {time_limit:.0f} s'
                    say(f'{reason}: stopping {", ".join(running) or "before the next job"}')
                    for process, _ in running.values():
                        process.terminate()
                if kill_at is not None and now >= kill_at:
                    for process, _ in running.values():
                        process.kill()
                time.sleep(POLL_SECONDS)
        finally:
            for process, _ in running.values():
                process.kill()
    return codes


def exit_code(codes: Mapping[str, int | None]) -> int:
    """Return 0 if all jobs are done, 1 if one failed, 3 if jobs are left that the same command continues."""
    stopped = {None, *(code for number in SIGNALS for code in (128 + number, -number))}
    if any(code != 0 and code not in stopped for code in codes.values()):
        return 1
    return 3 if any(code != 0 for code in codes.values()) else 0


def start(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the scheduler alone, which forwards it once.
    say(f'{job.name}: started' + ''.join(f' on GPU {gpu}' for gpu in environment.values()))
    return subprocess.Popen(job.command, env={**os.environ, **environment}, start_new_session=True)


def module_job(name: str, module: str, arguments: Sequence[str]) -> Job:
    """The job `python -m module arguments`, unbuffered, with this interpreter."""
    return Job(name, [sys.executable, '-u', '-m', module, *arguments])


def say(text: str) -> None:
    print(text, flush=True)
