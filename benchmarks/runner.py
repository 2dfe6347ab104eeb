"""Run benchmark cases in worker processes, so that a case that hangs or crashes costs its own row only.

A case is a dict that names what is measured: `op`, `shape`, `backend`, `device` and what else the benchmark needs. Its
row in the results is the case with the measured values, or with a note that says why there are none.
"""

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
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.shapes import SHAPES
from benchmarks.timing import measure_both, reset_peak, run_once

Case = dict[str, Any]
# Prefix of a result line, to tell it from what libraries print.
MARK = 'RESULT '
# Time for a new process to import torch and to initialise the GPU.
START_SECONDS = 60
# Backends and designs that compile, slowest compilation first.
COMPILED = ('flex', 'triton', 'candidate', 'query', 'union', 'mixed', 'block', 'fused')
# Largest case, in elements of q, that is compiled beside others: they share the memory of the GPU. The second limit is
# for cases with `compiles`, of which the longest come last.
WARM_ELEMENTS = 2**28
WARM_ELEMENTS_NAMED = 2**29
# Each compiling process has one core; inductor would start more processes in each.
WARM_ENVIRONMENT = {'TORCHINDUCTOR_COMPILE_THREADS': '1'}
NOT_RUN = 'not run'


@dataclass
class Call:
    """The forward pass of a case. `facts`, called after the measurement, returns further values of its row."""

    forward: Callable[[], Tensor]
    facts: Callable[[], Case] = dict

    def __call__(self) -> Tensor:
        return self.forward()


@dataclass(frozen=True)
class Method:
    """How cases are measured.

    make_call: returns the forward pass of a case and the tensors to differentiate.
    seconds: time to spend on each pass.
    measure: called with forward, tensors, device, seconds, and whether the first run compiles.
    """

    make_call: Callable[[Case], tuple[Any, list[Tensor]]]
    seconds: float
    measure: Callable[[Any, list[Tensor], str, float, bool], Case] = measure_both


def measure_itself(call: Any, leaves: list[Tensor], device: str, seconds: float, compiles: bool) -> Case:
    """Measure a call that has a method for it."""
    return call.measure(device, seconds)


@dataclass(frozen=True)
class Plot:
    """A picture beside the tables: `draw(path, rows, title)` writes `<benchmark><suffix>.png`.

    op: the picture needs a row of this op.
    """

    text: str
    draw: Callable[[Path, list[Case], str], None]
    suffix: str = ''
    op: str | None = None


def make_parser(
    description: str | None, case_seconds: float | None = None, prog: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that say how cases are run."""
    parser = report.make_parser(description, prog)
    add = parser.add_argument
    add('--name', help='of the result files; a run of few cases would replace the full one (name of the benchmark)')
    add('--case-seconds', type=float, default=case_seconds, help='limit of one case (%(default)s)')
    add('--budget', type=float, default=540, help='seconds for all cases, compilation included (%(default)s)')
    add('--jobs', type=int, default=1, help='processes that compile side by side before the first case (%(default)s)')
    add('--add', action='store_true', help='keep the other rows of the result in --out')
    add('--missing', action='store_true', help='--add, and run only the cases that the result in --out lacks')
    add('--worker', action='store_true', help=argparse.SUPPRESS)
    return parser


def run(
    cases: Sequence[Case],
    options: argparse.Namespace,
    benchmark: str,
    title: str,
    make_tables: Callable[[list[Case]], list[str]],
    plots: Sequence[Plot] = (),
    missing: Sequence[str] = (),
) -> None:
    """Run the cases as the options say. Results are written after each case, pictures at the end.

    missing: repositories of peers that cannot be imported.
    """
    name = options.name or benchmark
    where, earlier = report.machine(options.device, options.commit), []
    if options.add or options.missing:
        where, earlier = report.find_earlier(options.out, where, name)
    if options.missing:
        known = {name_of(row) for row in earlier if was_run(row)}
        cases = [case for case in cases if name_of(case) not in known]

    notes = [f'Not importable, and so not measured: {", ".join(missing)}.'] if missing else []

    def write(rows: list[Case], *pictures: str) -> None:
        rows = join(earlier, rows)
        report.write(options.out, where, name, title, [*make_tables(rows), *notes, *pictures], rows)

    rows = join(earlier, run_cases(cases, options.case_seconds, options.budget, write, options.jobs))
    pictures = []
    for plot in plots:
        if plot.op is None or any(row['op'] == plot.op for row in rows):
            image = report.path(options.out, where, f'{name}{plot.suffix}', '.png')
            plot.draw(image, rows, f'{plot.text}, {where["gpu"]}')
            pictures.append(f'![{plot.text}]({image.name})')
    write(rows, *pictures)
    print('\n\n'.join([*make_tables(rows), *notes]))


def join(earlier: list[Case], rows: list[Case]) -> list[Case]:
    """Return the rows of both. Of two rows of one case the later one counts, unless that case was not run."""
    found: dict[Hashable, Case] = {}
    for row in [*earlier, *rows]:
        if name_of(row) not in found or was_run(row):
            found[name_of(row)] = row
    return [*found.values()]


def name_of(case: Case) -> Hashable:
    return tuple(case.get(name) for name in ('op', 'shape', 'backend'))


def was_run(row: Case) -> bool:
    return not row.get('note', '').startswith(NOT_RUN)


def serve(find_method: Callable[[Case], Method]) -> None:
    """Run in a worker: read a case per line from stdin, write a result per line to stdout."""
    for line in sys.stdin:
        case = json.loads(line)
        try:
            result = _answer(case, find_method(case))
        except Exception as error:  # of whatever type a backend raises if it does not support the case
            first = next(iter(str(error).splitlines()), '')
            result = {'note': f'{type(error).__name__}: {first[:200]}'}
            traceback.print_exc()
        try:
            # The next case may run in another process beside this one. A process that lost the GPU ends here.
            gc.collect()
            reset_peak(case['device'])
        finally:
            print(MARK + json.dumps(result), flush=True)


def _answer(case: Case, method: Method) -> Case:
    compiles = case['backend'] != 'eager'
    if not compiles:
        # The first run counts if it is long, but not what the first run of a process loads.
        run_once(*method.make_call({**case, 'shape': 'tiny'}))
    torch.manual_seed(0)
    forward, leaves = method.make_call(case)
    if case.get('warm'):
        run_once(forward, leaves)
        return {}
    result = method.measure(forward, leaves, case['device'], method.seconds, compiles)
    return result | (forward.facts() if isinstance(forward, Call) else {})


class Worker:
    """A process that runs `serve` in a module of this tree: by default in the one that this process runs."""

    def __init__(
        self, environment: Mapping[str, str], module: str | None = None, arguments: Sequence[str] = ()
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, '-m', module or report.module_command()[0], '--worker', *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=report.ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.ready_by = time.monotonic() + START_SECONDS
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.lines.put(line.removeprefix(MARK))
        self.lines.put(None)

    def measure(self, case: Case, seconds: float) -> Case:
        """Return the result, or a note that says why there is none; then the worker is gone."""
        assert self.process.stdin is not None
        seconds += max(0.0, self.ready_by - time.monotonic())
        self.ready_by = 0.0
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
        """End the process and its children."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Workers:
    """Workers by name. Each starts when it is first needed, and again after it ended."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment or {}
        self.workers: dict[Hashable, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers.values():
            worker.stop()

    def run(self, name: Hashable, case: Case, case_seconds: float, deadline: float) -> Case:
        """Return the case with its result and the time that it took."""
        began = time.monotonic()
        used_up = {'note': f'{NOT_RUN}: the time was used up'}
        if began >= deadline:
            result = used_up
        else:
            if name not in self.workers or not self.workers[name].alive:
                self.workers[name] = Worker(self.environment)
            result = self.workers[name].measure(case, min(case_seconds, deadline - began))
            if time.monotonic() >= deadline and 'note' in result:
                # With more time it might have succeeded.
                result = used_up
        return {**case, **result, 'took_s': round(time.monotonic() - began, 1)}


def run_cases(
    cases: Sequence[Case],
    case_seconds: float,
    budget_seconds: float,
    done: Callable[[list[Case]], None],
    jobs: int = 1,
) -> list[Case]:
    """Run the cases in order, one at a time, and return their rows; `done` receives all rows after each case.

    Cases of one `backend` share a process. With several jobs, kernels are compiled first. When the budget is used up,
    the remaining cases get a note.
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
    """Compile the kernels of the cases into the caches on disk, in `jobs` processes.

    A case that fails here is tried again when it is measured.
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
    """Return the cases that compile kernels of their own: of cases that differ only in length, the shortest.

    A case may name its kernels by `compiles` instead of its op. Where the design of a kernel depends on the length,
    this name contains the length. The shortest cases of all head layouts come first: the others find most kernels in
    the cache.
    """
    found: dict[Hashable, tuple[tuple[int, int], Case]] = {}
    of_layout: Counter[Hashable] = Counter()
    compiled = [case for case in cases if case['backend'] in COMPILED]
    for case in sorted(compiled, key=lambda case: SHAPES[case['shape']].tokens):
        shape, backend = SHAPES[case['shape']], case['backend']
        kernels = (backend, case.get('compiles', case.get('op')), replace(shape, name='', seqlen=0))
        limit = WARM_ELEMENTS_NAMED if 'compiles' in case else WARM_ELEMENTS
        if kernels not in found and shape.tokens * shape.heads * shape.head_dim <= limit:
            layout = (backend, replace(shape, name='', seqlen=0, batch=0))
            found[kernels] = (COMPILED.index(backend), of_layout[layout]), case
            of_layout[layout] += 1
    return [case for _, case in sorted(found.values(), key=lambda entry: entry[0])]


def show(row: Case) -> None:
    print(json.dumps({key: value for key, value in row.items() if key != 'spreads'}), flush=True)


def estimated_seconds(case: Case, rows: list[Case]) -> float:
    """Estimate an eager case from the last one of the same op and from their work; 0 if there is none."""
    if case['backend'] != 'eager' or 'work' not in case:
        return 0
    like = [row for row in rows if (row['backend'], row.get('op')) == ('eager', case.get('op')) and row.get('total_ms')]
    if not like:
        return 0
    # Forward and backward run once each.
    return like[-1]['total_ms'] / 1e3 * case['work'] / like[-1]['work']
