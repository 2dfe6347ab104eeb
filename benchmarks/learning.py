"""Does a sparse model learn as well as its dense twin? Trains variants on the same batches from the same start.

    python -m benchmarks.learning --variants dense,separate,merged --seeds 0,1,2 --out runs/learning
    python -m benchmarks.learning --report runs/learning        tables and pictures of what is there
    python -m benchmarks.learning --list                        the variants
    python -m benchmarks.learning --variants dense,separate --seeds 0 --seq-len 256 --steps 20 --tokens-per-step 1024 \\
        --dim 64 --depth 2 --heads 2 --kv-heads 1 --dim-head 32 --window 64 --out /tmp/learning     to try it on a CPU

One worker process per GPU takes runs (a variant with a seed) from the list, in order. A run writes
<out>/<variant>-seed<seed>.json at its end. At the time limit and at SIGTERM or Ctrl-C all runs are saved; the same
command goes on with them, and does not repeat what is finished. Bits per byte; differences are paired: variant minus
dense, of the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import learning_data, learning_report
from benchmarks.learning_train import Settings, job_name, run_job
from benchmarks.learning_variants import SPARSE, VARIANTS, not_supported
from benchmarks.report import ROOT, git_commit
from train_enwik8 import Config

PREFIX = '@learning '  # of the lines of a worker that are for the scheduler


class Stop:
    """Whether a run must save and end: at a point in time (seconds since the epoch) or after a signal."""

    def __init__(self, until: float | None) -> None:
        self.until, self.signalled = until, False

    def __call__(self) -> bool:
        return self.signalled or (self.until is not None and time.time() >= self.until)

    def note(self, *_: Any) -> None:
        self.signalled = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note Ctrl-C and SIGTERM inside the block."""
        before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def say(text: str) -> None:
    print(text, flush=True)


def attempt(job: dict[str, Any], settings: Settings, out: Path, stop: Callable[[], bool]) -> str:
    """'finished', 'stopped', or the error."""
    try:
        return run_job(job, settings, out, stop, say)
    except Exception as error:
        traceback.print_exc()
        return f'failed: {type(error).__name__}: {error}'.splitlines()[0]


def work() -> None:
    """A worker process: settings and then jobs, a JSON line each, from stdin; a line of the outcome for each."""
    first = json.loads(sys.stdin.readline())
    settings, out, stop = Settings(**first['settings']), Path(first['out']), Stop(first['until'])
    torch.set_num_threads(first['threads'])
    with stop.listening():
        for line in sys.stdin:
            say(PREFIX + json.dumps(attempt(json.loads(line), settings, out, stop)))


class Scheduler:
    """Hands jobs to one worker process per GPU; each is started anew after a run that failed."""

    def __init__(self, jobs: list[dict[str, Any]], settings: Settings, out: Path, stop: Stop) -> None:
        self.jobs, self.settings, self.out, self.stop = list(jobs), settings, out, stop
        self.lock, self.outcomes = threading.Lock(), {}
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def run(self, count: int) -> dict[str, str]:
        threads = [threading.Thread(target=self._serve, args=(index, count)) for index in range(count)]
        for thread in threads:
            thread.start()
        passed_on = False
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if self.stop.signalled and not passed_on:
                    passed_on = True
                    with self.lock:
                        processes = list(self.processes.values())
                    for process in processes:
                        process.terminate()
        return self.outcomes

    def _next(self) -> dict[str, Any] | None:
        with self.lock:
            return self.jobs.pop(0) if self.jobs and not self.stop() else None

    def _serve(self, index: int, count: int) -> None:
        process = None
        while (job := self._next()) is not None:
            process = process or self._start(index, count)
            outcome = self._ask(process, job)
            with self.lock:
                self.outcomes[job_name(job['variant'], job['seed'])] = outcome
            if outcome.startswith('failed'):
                process.kill()
                process = None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def _start(self, index: int, count: int) -> subprocess.Popen[str]:
        environment = dict(os.environ)
        if self.settings.device == 'cuda':
            visible = os.environ.get('CUDA_VISIBLE_DEVICES')
            environment['CUDA_VISIBLE_DEVICES'] = visible.split(',')[index] if visible else str(index)
        process = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.learning', '--worker'],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through this process alone, as SIGTERM
        )
        cores = os.cpu_count() or count
        first = {'settings': asdict(self.settings), 'out': str(self.out.resolve()), 'until': self.stop.until}
        self._send(process, {**first, 'threads': max(1, min(8, cores // count))})
        with self.lock:
            self.processes[index] = process
        return process

    def _ask(self, process: subprocess.Popen[str], job: dict[str, Any]) -> str:
        assert process.stdout is not None
        try:
            self._send(process, job)
        except BrokenPipeError:
            return 'failed: the worker ended'
        for line in process.stdout:
            if line.startswith(PREFIX):
                return json.loads(line.removeprefix(PREFIX))
            say(line.rstrip())
        return 'failed: the worker ended'

    @staticmethod
    def _send(process: subprocess.Popen[str], value: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value) + '\n')
        process.stdin.flush()


def run_here(jobs: list[dict[str, Any]], settings: Settings, out: Path, stop: Stop) -> dict[str, str]:
    outcomes = {}
    for job in jobs:
        if stop():
            break
        outcomes[job_name(job['variant'], job['seed'])] = attempt(job, settings, out, stop)
    return outcomes


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--variants', default='dense,separate', help='names, separated by commas (%(default)s)')
    add('--seeds', default='0', help='of start and data, separated by commas (%(default)s)')
    add('--data', default='python-sources', help='a file, a folder, or python-sources (%(default)s)')
    add('--out', type=Path, default=Path('runs/learning'), help='folder of the results (%(default)s)')
    add('--report', type=Path, metavar='DIR', help='train nothing: write tables and pictures of DIR')
    add('--against', default='dense', help='the variant that others are compared with (%(default)s)')
    add('--list', action='store_true', help='train nothing: print the variants')
    add('--gpus', type=int, metavar='N', help='worker processes (one per GPU; on a CPU 0: this process)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cuda or cpu (%(default)s)')
    add('--time-limit', type=float, metavar='SECONDS', help='then save all runs and end, which takes seconds more')
    add('--longest-first', action='store_true', help='start the longest jobs first, so that no GPU idles at the end')
    add('--commit', help='of the code, where there is no git to ask')
    add('--seq-len', type=int, default=2048)
    add('--steps', type=int, default=2000)
    add('--tokens-per-step', type=int, default=65_536)
    add('--tokens-per-forward', type=int, help='at most (--tokens-per-step); more forwards make a step')
    add('--eval-bytes', type=int, default=2_000_000, help='of valid and of test (%(default)s)')
    add('--evals', type=int, default=8, help='validations after step 0 (%(default)s)')
    add('--save-every', type=int, default=1000, help='steps between checkpoints, 0: only when stopped (%(default)s)')
    add('--probe-rows', type=int, default=4, help='sequences that layers are examined with (%(default)s)')
    add('--backend', default='auto', help='of sparse attention (%(default)s)')
    add('--graph', action=argparse.BooleanOptionalAction, default=True, help='steps as a CUDA graph')
    add('--worker', action='store_true', help=argparse.SUPPRESS)
    model = {'dim': 512, 'depth': 6, 'heads': 8, 'kv_heads': 4, 'dim_head': 64, 'ff_expansion_factor': 4.0}
    training = {'lr': 1e-3, 'min_lr': 1e-4, 'warmup': 100, 'weight_decay': 0.1, 'clip': 1.0}
    for name, default in (model | training).items():
        add('--' + name.replace('_', '-'), type=type(default), default=default, help='(%(default)s)')
    add('--amp', action=argparse.BooleanOptionalAction, default=True, help='bfloat16 autocast, on GPUs')
    for short, name in SHORT.items():
        add('--' + short, type=type(SPARSE[name]), default=SPARSE[name], help=f'{name} (%(default)s)')
    return parser.parse_args(argv)


SHORT = {
    'window': 'sliding_window_size',
    'selected': 'num_selected_blocks',
    'block': 'selection_block_size',
    'compress-block': 'compress_block_size',
    'compress-stride': 'compress_block_sliding_stride',
    'expand': 'compress_mlp_expand_factor',
}


def make_settings(options: argparse.Namespace) -> Settings:
    per_forward = min(options.tokens_per_forward or options.tokens_per_step, options.tokens_per_step)
    batch = max(1, per_forward // options.seq_len)
    accum = options.tokens_per_step // (batch * options.seq_len)
    if batch * accum * options.seq_len != options.tokens_per_step:
        raise SystemExit(f'--tokens-per-step {options.tokens_per_step}: must be forwards of {batch} × --seq-len')
    names = ('dim', 'depth', 'heads', 'kv_heads', 'dim_head', 'ff_expansion_factor', 'lr', 'min_lr', 'warmup')
    names += ('weight_decay', 'clip', 'amp', 'seq_len', 'steps')
    config = asdict(Config(**{name: getattr(options, name) for name in names}, batch=batch, grad_accum=accum))
    config = {name: config[name] for name in (*names, 'batch', 'grad_accum', 'beta1', 'beta2')}
    sparse = {**SPARSE, **{name: getattr(options, short.replace('-', '_')) for short, name in SHORT.items()}}
    return Settings(
        config=config,
        sparse=sparse,
        text=learning_data.prepare(options.data, options.out / 'data'),
        eval_bytes=options.eval_bytes,
        evals=options.evals,
        save_every=options.save_every,
        probe_rows=options.probe_rows,
        backend=options.backend,
        device=options.device,
        graph=options.graph,
    )


def make_jobs(options: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """What is not finished, in the order of the seeds and then of the variants."""
    names = options.variants.split(',')
    for name in names:
        if name not in VARIANTS:
            raise SystemExit(f'--variants: {name!r} is none of {", ".join(VARIANTS)}')
        if reason := not_supported(name):
            raise SystemExit(f'--variants: {name}: {reason}')
    facts = {
        'commit': options.commit or git_commit(),
        'command': ' '.join(['python -m benchmarks.learning', *options.argv]),
    }
    jobs = []
    for seed in map(int, options.seeds.split(',')):
        for name in names:
            result = options.out / f'{job_name(name, seed)}.json'
            if result.exists():
                if json.loads(result.read_text())['settings'] != settings.as_run():
                    raise SystemExit(f'{result}: of other settings (another --out keeps both)')
                continue
            jobs.append({'variant': name, 'seed': seed, **facts})
    if options.longest_first:
        jobs.sort(key=lambda job: -VARIANTS[job['variant']].cost)
    return jobs


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 where a run failed; 3 where runs are left, which the same command goes on with."""
    started = time.time()
    options = parse(argv)
    options.argv = sys.argv[1:] if argv is None else argv
    if options.worker:
        work()
        return 0
    if options.list:
        for name, variant in VARIANTS.items():
            say(f'{name:32}{variant.about}')
        return 0
    if options.report:
        say(learning_report.write(options.report, options.against))
        return 0
    stop = Stop(started + options.time_limit if options.time_limit else None)
    settings = make_settings(options)
    jobs = make_jobs(options, settings)
    gpus = torch.cuda.device_count() if options.device == 'cuda' else 0
    count = min(len(jobs), gpus if options.gpus is None else options.gpus)
    say(
        f'{len(jobs)} runs left, {count or 1} at a time, text {settings.text["name"]}, {settings.text["bytes"]:,} bytes'
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with stop.listening():
        if count:
            outcomes = Scheduler(jobs, settings, options.out, stop).run(count)
        else:
            outcomes = run_here(jobs, settings, options.out, stop)
    say(learning_report.make_text(options.out, options.against, pictures=False))
    for name, outcome in outcomes.items():
        if outcome != 'finished':
            say(f'{name}: {outcome}')
    finished = sum(outcome == 'finished' for outcome in outcomes.values())
    if any(outcome.startswith('failed') for outcome in outcomes.values()):
        return 1
    return 3 if finished < len(jobs) else 0


if __name__ == '__main__':
    sys.exit(main())
