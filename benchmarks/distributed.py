"""How much faster are several GPUs than one, what does each need in memory, and what overlaps?

    python -m benchmarks.distributed                   on all GPUs of a machine with 2, 4 or 8: 5 to 9 minutes
    python -m benchmarks.distributed --device cpu --shape tiny --budget 900 --out /tmp/results
                                                       to try the script, over gloo

One process per GPU. Every case is measured on one GPU and on 2, 4 and 8 of the same machine, as far as they are
visible: context parallelism (`context_parallel_nsa` beside `nsa`), training steps of a model of 1.1B parameters under
one and two kinds of parallelism, whose losses must equal those of two GPUs, and profiles. On 2 and 4 GPUs also sharded
training of preset long of train_enwik8.py, and tensor parallelism of one layer.

Kernels are compiled first, those of all cases side by side. Cases of one GPU run in a process of their own. Writes
<gpu>/parallel-<GPUs>.md and .json to --out after every case. A case that fails or takes longer than --case-seconds ends
its processes; the next case starts others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.distributed_cases import SHAPES, SIZES, make_cases, name_of, to_warm
from benchmarks.distributed_report import TITLE, make_tables, with_ratios
from benchmarks.runner import NOT_RUN, Case, Worker, serve, show

ENDED = 'the process ended'
LONG_FIELDS = ('config', 'model', 'profiles', 'token_losses')  # which progress lines leave out


@dataclass
class Group:
    """Worker processes, one for each of the GPUs. They join a process group when its size changes."""

    gpus: Sequence[int]
    folder: str
    workers: list[Worker] = field(default_factory=list)
    joined: int = 0  # size of the group that the processes have joined last
    groups: int = 0  # so far

    def run(self, case: Case, seconds: float) -> Case:
        """Return the result of a case. An error of one of several processes ends all."""
        if not self.workers or not all(worker.alive for worker in self.workers):
            self.start()
        if case['gpus'] != self.joined:
            self.joined, self.groups = case['gpus'], self.groups + 1
        common = {**case, 'group': f'{self.folder}/{len(self.gpus)}-{self.groups}'}
        own = [{**common, 'rank': rank, 'gpu': gpu} for rank, gpu in enumerate(self.gpus)]
        with ThreadPoolExecutor(len(own)) as pool:
            futures = [pool.submit(self.workers[rank].measure, each, seconds) for rank, each in enumerate(own)]
            for future in as_completed(futures):
                if 'note' in future.result() and case['gpus'] > 1:
                    self.stop()
        return join([future.result() for future in futures[: case['gpus']]])

    def start(self) -> None:
        self.stop()
        self.joined, self.workers = 0, [Worker({}) for _ in self.gpus]

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


def join(results: Sequence[Case]) -> Case:
    """Return the values of all ranks in one row: each run takes as long as its slowest rank."""
    notes = sorted((r['note'] for r in results if 'note' in r), key=lambda note: note.startswith(ENDED))
    if notes:
        return {'note': notes[0]}
    row: Case = {}
    if 'times' in results[0]:
        row['times'] = [max(times) for times in zip(*(r['times'] for r in results), strict=True)]
        row['ms'] = statistics.median(row['times'])
        row['ms_of_ranks'] = [statistics.median(r['times']) for r in results]
        peaks = [r['peak_bytes'] for r in results]
        row['peak_bytes'] = None if None in peaks else max(peaks)
    if 'losses' in results[0]:
        row['losses'] = [statistics.mean(losses) for losses in zip(*(r['losses'] for r in results), strict=True)]
    if 'token_losses' in results[0]:
        row['parameters'], row['token_losses'] = results[0]['parameters'], {}
        for result in results:  # of tokens that ranks have in common, the first rank counts
            row['token_losses'] = result['token_losses'] | row['token_losses']
    if 'total_ms' in results[0]:
        row['profiles'] = list(results)
    return row


def run_cases(
    cases: Sequence[Case], gpus: int, case_seconds: float, budget: float, done: Callable[[list[Case]], None]
) -> list[Case]:
    """Run the cases in order and return their rows; `done` receives all rows after each case.

    When the budget is used up, the remaining cases get a note.
    """
    deadline, rows = time.monotonic() + budget, list[Case]()
    with tempfile.TemporaryDirectory() as folder:
        one, several = groups = Group([0], folder), Group(range(gpus), folder)
        try:
            for group in groups:
                group.start()
            if cases[0]['device'] == 'cuda':
                warm_up(to_warm(cases), gpus, folder, budget / 5)
            for case in cases:
                began = time.monotonic()
                result: Case = {'note': f'{NOT_RUN}: the time was used up'}
                if began < deadline:
                    group = several if case['gpus'] > 1 else one
                    result = group.run(case, min(case_seconds, deadline - began))
                rows.append({**case, **result, 'took_s': round(time.monotonic() - began, 1)})
                show({key: value for key, value in rows[-1].items() if key not in LONG_FIELDS})
                done(rows)
        finally:
            for group in groups:
                group.stop()
    return rows


def warm_up(cases: Sequence[Case], gpus: int, folder: str, seconds: float) -> None:
    """Compile kernels into the caches on disk, all cases at the same time in processes of their own."""

    def warm(index: int, case: Case) -> Case:
        (own := Path(folder, f'warm-{index}')).mkdir()
        # One case after the other takes the next GPUs, so that the longest sequences share none.
        first = sum(earlier['gpus'] for earlier in cases[:index])
        group = Group([(first + rank) % gpus for rank in range(case['gpus'])], str(own))
        try:
            return group.run(case, seconds)
        finally:
            group.stop()

    began = time.monotonic()
    with ThreadPoolExecutor(len(cases)) as pool:
        for case, result in zip(cases, pool.map(warm, range(len(cases)), cases), strict=True):
            print(f'compiled: {case["op"]}, {name_of(case["layout"])} {result}', flush=True)
    print(f'compiled in {time.monotonic() - began:.0f} s', flush=True)


def main() -> None:
    parser = report.make_parser(__doc__)
    add = parser.add_argument
    add('--shape', default='full', choices=SHAPES, help='(%(default)s)')
    add('--processes', type=int, help='2, 4 or 8 (the visible GPUs, or 2 on the CPU)')
    add('--case-seconds', type=float, default=80, help='limit of one case (%(default)s)')
    add('--budget', type=float, default=540, help='seconds for all cases, compilation included (%(default)s)')
    add('--data', default='stdlib', help='text, as train_enwik8.py takes it (%(default)s)')
    add('--worker', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from benchmarks.distributed_steps import Process

        process = Process()
        serve(process.method)
        return process.leave()
    where = report.machine(options.device, options.commit)
    present = torch.cuda.device_count() if options.device == 'cuda' else max(SIZES)
    gpus = options.processes or (present if options.device == 'cuda' else SIZES[0])
    gpus = max((size for size in SIZES if size <= gpus), default=1)
    if gpus > present or gpus == 1:
        raise SystemExit(f'--processes {options.processes}: must be 2, 4 or 8, on as many GPUs; there are {present}')
    cases = make_cases(SHAPES[options.shape], options.device, gpus, options.data)

    def write(rows: list[Case]) -> None:
        report.write(options.out, where, f'parallel-{gpus}', TITLE, make_tables(rows), with_ratios(rows))

    rows = run_cases(cases, gpus, options.case_seconds, options.budget, write)
    print('\n\n'.join(make_tables(rows)))


if __name__ == '__main__':
    main()
