"""Cases in a process of their own, so that one that hangs or breaks costs its own row and nothing else."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.report import ROOT, module_command

Case = dict[str, Any]
# Marks a result among what libraries print.
MARK = 'RESULT '
# What a new process needs to import torch and to reach the GPU.
START_SECONDS = 60


def serve(measure: Callable[[Case], Case]) -> None:
    """What a worker does: a case per line of the input, a result per line of the output."""
    for line in sys.stdin:
        try:
            result = measure(json.loads(line))
        except Exception as error:  # of whatever kind a backend has for what it cannot do
            first = next(iter(str(error).splitlines()), '')
            result = {'note': f'{type(error).__name__}: {first[:200]}'}
            traceback.print_exc()
        print(MARK + json.dumps(result), flush=True)


class Worker:
    """A process that runs `serve` in the script of this one."""

    def __init__(self) -> None:
        module = module_command()[0]
        self.process = subprocess.Popen(
            [sys.executable, '-m', module, '--worker'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.cases = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.lines.put(line.removeprefix(MARK))
        self.lines.put(None)

    def measure(self, case: Case, seconds: float) -> Case:
        """The result, or a note that says why there is none, after which the worker is gone."""
        assert self.process.stdin is not None
        seconds += START_SECONDS * (self.cases == 0)
        self.cases += 1
        try:
            self.process.stdin.write(json.dumps(case) + '\n')
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            return {'note': f'stopped after {seconds:.0f} s'}
        except BrokenPipeError:
            line = None
        if line is None:
            self.stop()
            return {'note': f'the process ended with code {self.process.wait()}'}
        return json.loads(line)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends the process and those that it started."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_cases(
    cases: Iterable[Case], case_seconds: float, budget_seconds: float, done: Callable[[list[Case]], None]
) -> list[Case]:
    """The cases with their results, in order; `done` is told after every one.

    Cases of one `backend` share a process. When the budget is used up, the rest is not run.
    """
    started, rows, workers = time.monotonic(), [], {}
    try:
        for case in cases:
            left = budget_seconds - (time.monotonic() - started)
            name = case['backend']
            estimate = estimated_seconds(case, rows)
            began = time.monotonic()
            if left <= 0:
                result = {'note': 'not run: the time was used up'}
            elif estimate > case_seconds:
                result = {'note': f'not run: about {estimate:.0f} s by the shorter ones'}
            else:
                if name not in workers or not workers[name].alive:
                    for worker in workers.values():  # one at a time has the GPU
                        worker.stop()
                    workers = {name: Worker()}
                result = workers[name].measure(case, min(case_seconds, left))
            rows.append({**case, **result, 'took_s': round(time.monotonic() - began, 1)})
            print(json.dumps({key: value for key, value in rows[-1].items() if key != 'spreads'}), flush=True)
            done(rows)
    finally:
        for worker in workers.values():
            worker.stop()
    return rows


def estimated_seconds(case: Case, rows: list[Case]) -> float:
    """What an eager case takes, from the last one like it and the work that both do; 0 where there is none."""
    if case['backend'] != 'eager' or 'work' not in case:
        return 0
    like = [row for row in rows if (row['backend'], row.get('op')) == ('eager', case.get('op')) and row.get('total_ms')]
    if not like:
        return 0
    # Forward and backward, each measured once.
    return like[-1]['total_ms'] / 1e3 * case['work'] / like[-1]['work']
