"""Train small models from scratch on far retrieval, sparse beside dense: associative recall and needles.

    python -m benchmarks.retrieval --out runs/retrieval                           all variants, 1 seed, every GPU
    python -m benchmarks.retrieval --out runs/retrieval --variants dense,separate --seeds 0,1,2 --gpus 4
    python -m benchmarks.retrieval --report runs/retrieval                        write table and picture again
    python -m benchmarks.retrieval --device cpu --preset tiny --out /tmp/tiny --variants dense,separate
                                                                                  minutes on a CPU

A run trains one model on sequences of the first length until recall and needles pass --threshold, then on the next
length, and so on; the last length lasts until --steps, so that all runs take the same number of steps. Short first
lengths with few pairs are needed: with many pairs a model copies an arbitrary value and rarely learns to compare keys.
Needles join at the first of --lengths. Data depend on seed, step and length alone.

Each run keeps <variant>-seed<seed>.json and .pt in --out; the same command continues interrupted runs and adds missing
ones. At the end <gpu>/retrieval.md, .json and .png are written there. `benchmarks/retrieval_tasks.py` describes
the problems.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, retrieval_report
from benchmarks.jobs import exit_code, module_job, run_jobs, say, stop_request, visible_gpus
from benchmarks.retrieval_run import VARIANTS, Config, Run, refuse_changes

PRESETS: dict[str, dict[str, Any]] = {
    'default': {},
    # Minutes on one core of a CPU.
    'tiny': {
        'lengths': (64, 128, 256), 'dim': 64, 'depth': 2, 'heads': 2, 'kv_heads': 1, 'dim_head': 32, 'window': 16,
        'compress_block': 8, 'compress_stride': 4, 'selection_block': 8, 'num_selected': 6, 'num_tokens': 64,
        'pairs': 16, 'queries': 16, 'tokens_per_step': 2048, 'steps': 1500, 'stage_steps': 1000, 'threshold': 0.98,
        'warmup': 50, 'lr': 2e-3, 'depths': 5, 'eval_samples': 32,
    },
}  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(','))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='benchmarks.retrieval', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group('this call').add_argument
    add('--out', type=Path, help='folder of the runs and the report')
    add('--report', type=Path, metavar='DIR', help='train nothing: write and print the report of a folder')
    add('--variants', default=','.join(VARIANTS), help='(%(default)s)')
    add('--seeds', default='0', help='(%(default)s)')
    add('--gpus', type=int, help='processes, each with a GPU of its own (all GPUs)')
    add('--time-limit', type=float, metavar='S', help='stop and save after so many seconds')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='cuda or cpu (%(default)s)')
    add('--commit', help='of the code, where there is no git to ask')
    add('--save-seconds', type=float, default=60.0, help='between checkpoints (%(default)s)')
    add('--preset', choices=PRESETS, default='default', help='values that the flags below change (%(default)s)')
    add('--worker', action='store_true', help=argparse.SUPPRESS)
    add = parser.add_argument_group('a run').add_argument
    for each in fields(Config):
        if each.default is MISSING:
            continue
        kind: dict[str, Any] = {'type': numbers if isinstance(each.default, tuple) else type(each.default)}
        if isinstance(each.default, bool):
            kind = {'action': argparse.BooleanOptionalAction}
        values = [str(PRESETS[preset].get(each.name, each.default)) for preset in PRESETS]
        shown = ', '.join(dict.fromkeys(values)).replace('%', '%%')
        add(
            f'--{each.name.replace("_", "-")}',
            default=argparse.SUPPRESS,
            help=f'{each.metadata["help"]} ({shown})',
            **kind,
        )
    return parser


def make_configs(options: argparse.Namespace) -> list[Config]:
    given = {each.name: getattr(options, each.name) for each in fields(Config) if each.name in options}
    settings = {**PRESETS[options.preset], **given}
    variants = options.variants.split(',')
    return [Config(variant, seed, **settings) for seed in numbers(options.seeds) for variant in variants]


def is_finished(config: Config, folder: Path) -> bool:
    path = folder / f'{config.name}.json'
    if not path.exists():
        return False
    held = json.loads(path.read_text(encoding='utf-8'))
    refuse_changes(path, held['config'], config)
    return held['finished']


def worker_arguments(config: Config) -> list[str]:
    """Arguments that turn the command of all runs into the command of one worker."""
    return ['--variants', config.variant, '--seeds', str(config.seed), '--worker']


def work(config: Config, options: argparse.Namespace) -> int:
    """Carry out one run in this process; returns the exit code."""
    if options.device == 'cpu':
        torch.set_num_threads(1)
    with stop_request() as stop:
        where = report.machine(options.device, options.commit)
        appended = ' ' + ' '.join(worker_arguments(config))
        where['commands'] = [command.removesuffix(appended) for command in where['commands']]
        run = Run(config, options.out, torch.device(options.device), where, stop, options.save_seconds)
        run.restore()
        run.carry_out()
        return stop.exit_code


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 if a run failed; 3 if runs are left, which the same command continues."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.report is not None:
        say(retrieval_report.write(options.report))
        return 0
    if options.out is None:
        parser.error('--out is missing: the folder of the runs')
    try:
        configs = make_configs(options)
        if options.worker:
            return work(configs[0], options)
        options.out.mkdir(parents=True, exist_ok=True)
        waiting = [config for config in configs if not is_finished(config, options.out)]
        gpus = visible_gpus(options.gpus) if options.device == 'cuda' else []
    except ValueError as error:
        parser.error(str(error))
    jobs = [
        module_job(config.name, 'benchmarks.retrieval', [*arguments, *worker_arguments(config)]) for config in waiting
    ]
    codes = run_jobs(jobs, gpus, options.time_limit)
    if any(options.out.glob(retrieval_report.RUNS)):
        say(retrieval_report.write(options.out))
    return exit_code(codes)


if __name__ == '__main__':
    sys.exit(main())
