"""Does a sparse model learn as well as its dense twin? Trains variants on the same batches from the same start.

    python -m benchmarks.learning --variants dense,separate,merged --seeds 0,1,2 --out runs/learning
    python -m benchmarks.learning --report runs/learning        tables and pictures of what is there
    python -m benchmarks.learning --list                        the variants
    python -m benchmarks.learning --variants dense,separate --seeds 0 --seq-len 256 --steps 20 --tokens-per-step 1024 \\
        --dim 64 --depth 2 --heads 2 --kv-heads 1 --dim-head 32 --window 64 --out /tmp/learning     to try it on a CPU

Each run (a variant with a seed) is a process of its own; each GPU takes one at a time, in order. A run writes
<out>/<variant>-seed<seed>.json at its end. At the time limit and at SIGTERM or Ctrl-C all runs are saved; the same
command continues them, starts failed ones again and does not repeat finished ones. Figures are bits per byte;
differences are paired: variant minus dense, of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import learning_data, learning_report
from benchmarks.jobs import exit_code, module_job, run_jobs, say, stop_request, visible_gpus
from benchmarks.learning_train import Settings, job_name, run_job
from benchmarks.learning_variants import SPARSE, VARIANTS, not_supported
from benchmarks.report import git_commit
from train_enwik8 import Config

GRACE_SECONDS = 300.0  # from the signal to the end of a run, which may be in an evaluation


def work(options: argparse.Namespace) -> int:
    """Carry out one run in this process; returns the exit code."""
    torch.set_num_threads(options.threads)
    settings = make_settings(options)
    with stop_request() as stop:
        for job in make_jobs(options, settings):
            try:
                run_job(job, settings, options.out, lambda: bool(stop), say)
            except Exception as error:
                traceback.print_exc()
                name = job_name(job['variant'], job['seed'])
                say(f'{name}: failed: {type(error).__name__}: {next(iter(str(error).splitlines()), "")}')
                return 1
        return stop.exit_code


def worker_arguments(job: dict[str, Any], threads: int) -> list[str]:
    """Arguments that turn the command of all runs into the command of one worker."""
    return ['--variants', job['variant'], '--seeds', str(job['seed']), '--threads', str(threads), '--worker']


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--variants', default='dense,separate', help='names, separated by commas (%(default)s)')
    add('--seeds', default='0', help='of start and data, separated by commas (%(default)s)')
    add('--data', default='python-sources', help='a file, a folder, or python-sources (%(default)s)')
    add('--out', type=Path, default=Path('runs/learning'), help='folder of the results (%(default)s)')
    add('--report', type=Path, metavar='DIR', help='train nothing: write tables and pictures of DIR')
    add('--against', default='dense', help='the variant that others are compared with (%(default)s)')
    add('--list', action='store_true', help='train nothing: print the variants')
    add('--gpus', type=int, metavar='N', help='processes, each with a GPU of its own (all GPUs)')
    add('--threads', type=int, metavar='N', help='CPU threads of a run (at most 8, shared among the GPUs)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cuda or cpu (%(default)s)')
    add('--time-limit', type=float, metavar='SECONDS', help='then save all runs and end, which may take minutes')
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
    return parser


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
        raise SystemExit(
            f'--tokens-per-step is {options.tokens_per_step}, but must be a multiple of {batch} × --seq-len, a forward'
        )
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
    """Return the runs that are not finished, by seed, then by variant."""
    names = options.variants.split(',')
    for name in names:
        if name not in VARIANTS:
            raise SystemExit(f'--variants is {name!r}, but must be one of {", ".join(VARIANTS)}')
        if reason := not_supported(name):
            raise SystemExit(f'--variants: {name}: {reason}')
    command = ' '.join(['python -m benchmarks.learning', *options.argv])
    facts = {'commit': options.commit or git_commit(), 'command': command}
    jobs = []
    for seed in map(int, options.seeds.split(',')):
        for name in names:
            result = options.out / f'{job_name(name, seed)}.json'
            if result.exists():
                if json.loads(result.read_text())['settings'] != settings.as_run():
                    raise SystemExit(f'--out has {result} of other settings; another --out keeps both')
                continue
            jobs.append({'variant': name, 'seed': seed, **facts})
    if options.longest_first:
        jobs.sort(key=lambda job: -VARIANTS[job['variant']].cost)
    return jobs


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 if a run failed; 3 if runs are left, which the same command continues."""
    started, arguments = time.monotonic(), sys.argv[1:] if argv is None else argv
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        for name, variant in VARIANTS.items():
            say(f'{name:38}{variant.about}')
        return 0
    if options.report:
        say(learning_report.write(options.report, options.against))
        return 0
    if options.worker:
        appended = worker_arguments({'variant': options.variants, 'seed': options.seeds}, options.threads)
        options.argv = arguments[: -len(appended)]
        return work(options)
    options.argv = arguments
    try:
        gpus = visible_gpus(options.gpus) if options.device == 'cuda' else []
    except ValueError as error:
        parser.error(str(error))
    settings = make_settings(options)
    jobs = make_jobs(options, settings)
    say(f'{len(jobs)} runs left, text {settings.text["name"]}, {settings.text["bytes"]:,} bytes')
    options.out.mkdir(parents=True, exist_ok=True)
    at_once = max(1, min(len(jobs), len(gpus)))
    threads = options.threads or max(1, min(8, (os.cpu_count() or 1) // at_once))
    commands = [
        module_job(
            job_name(job['variant'], job['seed']),
            'benchmarks.learning',
            [*arguments, *worker_arguments(job, threads)],
        )
        for job in jobs
    ]
    limit = options.time_limit and max(0.0, options.time_limit - (time.monotonic() - started))
    codes = run_jobs(commands, gpus, limit, GRACE_SECONDS)
    say(learning_report.make_text(options.out, options.against, pictures=False))
    return exit_code(codes)


if __name__ == '__main__':
    sys.exit(main())
