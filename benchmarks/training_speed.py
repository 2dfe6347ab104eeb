"""How many tokens per second does train_enwik8.py train, sparse and dense, by length of the sequences?

    python -m benchmarks.training_speed                            1k to 64k tokens, about 2 minutes on a GPU
    python -m benchmarks.training_speed --models sparse-compiled,dense-compiled --add       through torch.compile, too
    python -m benchmarks.training_speed --device cpu --lengths 64,128 --tokens 256 --out /tmp/results -- --preset cpu
                                                                   to try the script

Model, optimizer and text (the sources of Python's library) are those of preset long; attention and length differ. The
length of 16,384 is that of the preset. A step of the trainer has --tokens tokens in one forward.

Flags after `--` are those of train_enwik8.py. Writes <gpu>/training.md and .json to --out after every case, and .png at
the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.report import ratio
from benchmarks.runner import Call, Case, Method, Plot, make_parser, run, serve
from train_enwik8 import (
    PRESETS,
    Config,
    Corpus,
    Run,
    UserError,
    build_model,
    build_optimizer,
    load_corpus,
    parse,
    spelled,
)
from trainer.ranks import ONE_PROCESS, Ranks

LENGTHS = tuple(2**power for power in range(10, 17))
MODELS = ('sparse', 'dense')
COMPILED = '-compiled'
TITLE = 'Training speed, sparse and dense'
# Length from which on sparse attention must train faster.
BREAK_EVEN = 2**13
# Settings of the trainer, and the option of this script that decides each.
DECIDED = {'attention': '--models', 'seq_len': '--lengths', 'batch': '--tokens', 'grad_accum': '--tokens'}


def refuse_decided(given: Mapping[str, Any], decided: Mapping[str, str]) -> None:
    """Raise UserError for settings given after `--` that the script decides."""
    for name in given.keys() & decided.keys():
        raise UserError(f'{spelled(name)} {given[name]}: must not be given after --; {decided[name]} decides it')


def make_config(flags: list[str], attention: str, length: int, tokens: int) -> Config:
    """Return preset long with the flags, and with the given attention, length and tokens per step."""
    options, given = parse(['--preset', 'long', *flags])
    sizes = {'seq_len': length, 'batch': max(1, tokens // length), 'grad_accum': 1}
    return Config(**{**PRESETS[options.preset], **given, 'attention': attention, **sizes})


@cache
def text(data: str) -> Corpus:
    return load_corpus(data)


def make_run(case: Case, ranks: Ranks = ONE_PROCESS, backend: str = 'auto') -> Run:
    """Return a run of the trainer that has no folder. backend: of the sparse attention."""
    config, device = Config(**case['config']), torch.device(case['device'])
    model = build_model(config, backend, device)
    ranks.divide(model, compiles=False)
    forward = torch.compile(model) if case['backend'].endswith(COMPILED) else model
    optimizer = build_optimizer(model, config)
    trainer = Run(config, 'long', Path(), text(case['data']), device, model, forward, optimizer, ranks)
    trainer.replays = case['graph'] and trainer.can_replay()
    return trainer


def make_call(case: Case, ranks: Ranks = ONE_PROCESS) -> tuple[Call, list[Tensor]]:
    """Return one step of the trainer."""
    trainer = make_run(case, ranks)

    def step() -> Tensor:
        trainer.train_step()
        return trainer.recent.pop()

    return Call(step, lambda: {'attention': trainer.backend(), 'loss': float(step())}), []


def tokens_per_s(row: Case | None) -> float | None:
    if row is None or not row.get('forward_ms'):
        return None
    config = row['config']
    return 1e3 * config['seq_len'] * config['batch'] / row['forward_ms']


class Found:
    """The rows by length and model."""

    def __init__(self, rows: list[Case]) -> None:
        self.rows = {(row['config']['seq_len'], row['backend']): row for row in rows}
        self.lengths = sorted({length for length, _ in self.rows})
        self.models = list(dict.fromkeys(row['backend'] for row in rows))

    def rate(self, length: int, model: str) -> float | None:
        return tokens_per_s(self.rows.get((length, model)))

    def gain(self, length: int) -> float | None:
        return ratio(self.rate(length, 'sparse'), self.rate(length, 'dense'))


def make_tables(rows: list[Case]) -> list[str]:
    found = Found(rows)
    body = []
    for length in found.lengths:
        config = next(row['config'] for (tokens, _), row in found.rows.items() if tokens == length)
        rates = [found.rate(length, model) for model in found.models]
        sizes = [report.gib(found.rows.get((length, model), {}).get('peak_bytes')) for model in found.models]
        shown = [None if rate is None else f'{rate:,.0f}' for rate in rates]
        body.append([f'{length:,}', str(config['batch']), *shown, found.gain(length), *sizes])
    columns = ['length', 'sequences of a step', *(f'{model}, tokens/s' for model in found.models), 'sparse / dense']
    notes = [[length, model, row.get('attention'), row.get('note', '')] for (length, model), row in found.rows.items()]
    known = {length: gain for length in found.lengths if (gain := found.gain(length))}
    slow = [f'{length:,} ({gain:.2f})' for length, gain in known.items() if length >= BREAK_EVEN and gain < 1]
    judged = f'missed at {", ".join(slow)}' if slow else 'met'
    varied = ('attention', 'seq_len', 'batch')
    settings = {name: value for name, value in rows[0]['config'].items() if name not in varied}
    return [
        'Tokens per second of whole steps of the trainer, medians. Peak: GiB of a step beyond the weights.',
        report.table((*columns, *(f'{model}, peak' for model in found.models)), body),
        *(
            [f'Sparse is faster from {BREAK_EVEN:,} tokens on: {judged}.']
            if any(n >= BREAK_EVEN for n in known)
            else []
        ),
        report.table(('length', 'model', 'attention', ''), notes),
        f'Settings: {", ".join(f"{name} {value}" for name, value in settings.items())}.',
    ]


def plot(path: Path, rows: list[Case], title: str) -> None:
    from matplotlib.figure import Figure

    found = Found(rows)
    figure = Figure(figsize=(8, 5), layout='constrained')
    axes = figure.add_subplot(xlabel='length of the sequences', ylabel='tokens/s', title=title)
    for model in found.models:
        known = [(length, rate) for length in found.lengths if (rate := found.rate(length, model))]
        axes.plot([length for length, _ in known], [rate for _, rate in known], 'o-', label=model)
    axes.set_xscale('log', base=2)
    names = [f'{length // 1024}k' if length % 1024 == 0 else str(length) for length in found.lengths]
    axes.set_xticks(found.lengths, names)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter('{x:,.0f}')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def make_cases(options: argparse.Namespace) -> list[Case]:
    chosen, given = parse(options.flags)
    refuse_decided(given, DECIDED)
    cases = []
    for length, model in product(options.lengths.split(','), options.models.split(',')):
        config = make_config(options.flags, model.removesuffix(COMPILED), int(length), options.tokens)
        named = {'op': 'step', 'shape': f'{length} tokens', 'backend': model, 'device': options.device}
        cases.append({**named, 'data': options.data, 'config': asdict(config), 'graph': chosen.graph})
    return cases


def main() -> None:
    parser = make_parser(__doc__, case_seconds=90)
    add = parser.add_argument
    add('--lengths', default=','.join(map(str, LENGTHS)), help='tokens (%(default)s)')
    add('--models', default=','.join(MODELS), help=f'each also with {COMPILED} (%(default)s)')
    add('--tokens', type=int, default=2**16, help='of a step (%(default)s)')
    add('--data', default='stdlib', help='text, as train_enwik8.py takes it (%(default)s)')
    add('flags', nargs='*', help='of train_enwik8.py')
    options = parser.parse_args()
    if options.worker:
        return serve(lambda case: Method(make_call, seconds=3))
    try:
        cases = make_cases(options)
    except UserError as error:
        raise SystemExit(f'training_speed: {error}') from None
    run(cases, options, 'training', TITLE, make_tables, [Plot('Tokens per second', plot)])


if __name__ == '__main__':
    main()
