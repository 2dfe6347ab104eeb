"""Cases in a process of their own, so that one that hangs or breaks costs its own row and nothing else."""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.shapes import SHAPES
from benchmarks.timing import measure_both, reset_peak, run_once

Case = dict[str, Any]
# The forward of a case, and what is differentiated.
MakeCall = Callable[[Case], tuple[Callable[[], Tensor], list[Tensor]]]
# What a row tells beyond the times, from the forward and what is differentiated, on a device.
MakeFacts = Callable[[Callable[[], Tensor], list[Tensor], str], Case]
# What is measured, from a forward, what is differentiated, the device, seconds, and whether the first run compiles.
Measure = Callable[[Any, list[Tensor], str, float, bool], Case]
# Marks a result among what libraries print.
MARK = 'RESULT '
# What a new process needs to import torch and to reach the GPU.
START_SECONDS = 60
# Backends and designs that compile, those that take longest first.
COMPILED = ('flex', 'triton', 'query', 'neighbours', 'mixed', 'block')
# Tokens of a case that is compiled beside others, which share the memory of the GPU.
WARM_TOKENS = 2**15
# Processes that compile side by side have a core each; inductor would start more of them in every one.
WARM_ENVIRONMENT = {'TORCHINDUCTOR_COMPILE_THREADS': '1'}
NOT_RUN = 'not run'


def add_arguments(parser: argparse.ArgumentParser, shapes: str, backends: Sequence[str], case_seconds: float) -> None:
    """With these defaults."""
    parser.add_argument('--shapes', default=shapes, help='patterns, separated by commas (%(default)s)')
    parser.add_argument('--backends', default=','.join(backends), help='(%(default)s)')
    add_run_arguments(parser, case_seconds)


def add_run_arguments(parser: argparse.ArgumentParser, case_seconds: float) -> None:
    """Those that say how cases are run, whatever they are."""
    report.add_arguments(parser)
    add = parser.add_argument
    add('--case-seconds', type=float, default=case_seconds, help='at most for one case (%(default)s)')
    add('--budget', type=float, default=540, help='seconds for all of them, compilation included (%(default)s)')
    add('--jobs', type=int, default=1, help='above 1: so many processes compile first, side by side (%(default)s)')
    add('--add', action='store_true', help='to what an earlier run left in --out, whose other rows stay')
    add('--missing', action='store_true', help='--add, and only what the earlier run did not come to')
    add('--worker', action='store_true', help=argparse.SUPPRESS)


def run(
    cases: Sequence[Case],
    options: argparse.Namespace,
    what: str,
    title: str,
    make_tables: Callable[[list[Case]], list[str]],
) -> tuple[dict[str, Any], list[Case]]:
    """Runs the cases as the options say, and writes the results so far after every one.

    Gives the machine and all rows.
    """
    where, earlier = report.machine(options.device, options.commit), []
    if options.add or options.missing:
        where, earlier = report.find_earlier(options.out, where, what)
    if options.missing:
        known = {name_of(row) for row in earlier if was_run(row)}
        cases = [case for case in cases if name_of(case) not in known]

    def write(rows: list[Case]) -> None:
        rows = join(earlier, rows)
        report.write(options.out, where, what, title, make_tables(rows), rows)

    rows = join(earlier, run_cases(cases, options.case_seconds, options.budget, write, options.jobs))
    print('\n\n'.join(make_tables(rows)))
    return where, rows


def join(earlier: list[Case], rows: list[Case]) -> list[Case]:
    """The rows of both; of two about the same case the later one, unless it was not run."""
    found: dict[Hashable, Case] = {}
    for row in [*earlier, *rows]:
        if name_of(row) not in found or was_run(row):
            found[name_of(row)] = row
    return [*found.values()]


def name_of(case: Case) -> Hashable:
    return tuple(case.get(name) for name in ('op', 'shape', 'backend'))


def was_run(row: Case) -> bool:
    return not row.get('note', '').startswith(NOT_RUN)


def serve(
    make_call: MakeCall, seconds: float, make_facts: MakeFacts | None = None, measure: Measure = measure_both
) -> None:
    """What a worker does: a case per line of the input, a result per line of the output.

    seconds: for which each pass is measured.
    """
    for line in sys.stdin:
        case = json.loads(line)
        try:
            result = _answer(case, make_call, seconds, make_facts, measure)
        except Exception as error:  # of whatever kind a backend has for what it cannot do
            first = next(iter(str(error).splitlines()), '')
            result = {'note': f'{type(error).__name__}: {first[:200]}'}
            traceback.print_exc()
        try:
            # The next case may be for a process beside this one. One that lost the GPU ends here.
            gc.collect()
            reset_peak(case['device'])
        finally:
            print(MARK + json.dumps(result), flush=True)


def _answer(case: Case, make_call: MakeCall, seconds: float, make_facts: MakeFacts | None, measure: Measure) -> Case:
    compiles = case['backend'] != 'eager'
    if not compiles:
        # The first run counts where it is a long one, but not what the first of a process loads.
        run_once(*make_call({**case, 'shape': 'tiny'}))
    torch.manual_seed(0)
    forward, leaves = make_call(case)
    if case.get('warm'):
        run_once(forward, leaves)
        return {}
    result = measure(forward, leaves, case['device'], seconds, compiles)
    return result | (make_facts(forward, leaves, case['device']) if make_facts else {})


class Worker:
    """A process that runs `serve` in the script of this one, or in a module of another tree."""

    def __init__(self, environment: Mapping[str, str], module: str | None = None, root: Path = report.ROOT) -> None:
        self.process = subprocess.Popen(
            [sys.executable, '-m', module or report.module_command()[0], '--worker'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, **environment},
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


class Workers:
    """Workers by name. They start when they are first needed, and anew where one is gone."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment or {}
        self.workers: dict[Hashable, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers.values():
            worker.stop()

    def run(self, name: Hashable, case: Case, case_seconds: float, deadline: float) -> Case:
        """The case with its result, and how long that took."""
        began = time.monotonic()
        used_up = {'note': f'{NOT_RUN}: the time was used up'}
        if began >= deadline:
            result = used_up
        else:
            if name not in self.workers or not self.workers[name].alive:
                self.workers[name] = Worker(self.environment)
            result = self.workers[name].measure(case, min(case_seconds, deadline - began))
            if time.monotonic() >= deadline and 'note' in result:
                # It might have ended in its own time.
                result = used_up
        return {**case, **result, 'took_s': round(time.monotonic() - began, 1)}


def run_cases(
    cases: Sequence[Case],
    case_seconds: float,
    budget_seconds: float,
    done: Callable[[list[Case]], None],
    jobs: int = 1,
) -> list[Case]:
    """The cases with their results, in order, one at a time; `done` is told after every one.

    Cases of one `backend` share a process. With several jobs, what they need is compiled first. When the budget is used
    up, the rest is not run.
    """
    deadline = time.monotonic() + budget_seconds
    if jobs > 1:
        warm_up(cases, jobs, case_seconds, deadline)
    rows: list[Case] = []
    with Workers() as workers:
        for case in cases:
            estimate = estimated_seconds(case, rows)
            if estimate > case_seconds:
                row = {**case, 'note': f'{NOT_RUN}: about {estimate:.0f} s by the shorter ones'}
            else:
                row = workers.run(case['backend'], case, case_seconds, deadline)
            rows.append(row)
            show(row)
            done(rows)
    return rows


def warm_up(cases: Iterable[Case], jobs: int, case_seconds: float, deadline: float) -> None:
    """Compiles in so many processes, side by side, what the cases need, into the caches on disk.

    What fails here is tried again where it is measured.
    """

    def warm(case: Case) -> Case:
        return workers.run(threading.get_ident(), {**case, 'warm': True}, case_seconds, deadline)

    with ThreadPoolExecutor(jobs) as pool, Workers(WARM_ENVIRONMENT) as workers:
        rows = [pool.submit(warm, case) for case in cases_to_warm(cases)]
        try:
            for row in as_completed(rows):
                show(row.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def cases_to_warm(cases: Iterable[Case]) -> list[Case]:
    """The shortest of those that differ in nothing but the length: no kernel is compiled for a length."""
    shortest: dict[Hashable, Case] = {}
    compiled = [case for case in cases if case['backend'] in COMPILED]
    for case in sorted(compiled, key=lambda case: SHAPES[case['shape']].tokens):
        shape = SHAPES[case['shape']]
        if shape.tokens <= WARM_TOKENS:
            kernels = (case['backend'], case.get('op'), replace(shape, name='', seqlen=0))
            shortest.setdefault(kernels, case)
    return sorted(shortest.values(), key=lambda case: COMPILED.index(case['backend']))


def show(row: Case) -> None:
    print(json.dumps({key: value for key, value in row.items() if key != 'spreads'}), flush=True)


def estimated_seconds(case: Case, rows: list[Case]) -> float:
    """What an eager case takes, from the last one like it and the work that both do; 0 where there is none."""
    if case['backend'] != 'eager' or 'work' not in case:
        return 0
    like = [row for row in rows if (row['backend'], row.get('op')) == ('eager', case.get('op')) and row.get('total_ms')]
    if not like:
        return 0
    # Forward and backward, each measured once.
    return like[-1]['total_ms'] / 1e3 * case['work'] / like[-1]['work']
