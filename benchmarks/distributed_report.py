"""Tables of `benchmarks.distributed`: speed and memory beside one GPU, targets, equal losses, profiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import report
from benchmarks.distributed_cases import REFERENCE, TARGETS, Target, name_of
from benchmarks.report import ratio
from benchmarks.runner import Case
from native_sparse_attention.testing import NORM_LIMITS

TITLE = 'Several GPUs beside one'
PARTS = ('total', 'nccl', 'compute', 'both', 'exposed', 'idle')  # of the time of a profile


def with_ratios(rows: Sequence[Case]) -> list[Case]:
    """Return the rows with further values.

    tokens_per_s. speedup, over_two: relative to the row of one GPU, and to the first one of two. memory: relative to
    one GPU. overhead: the time beyond that of one GPU divided by the number of GPUs, relative to it. exposed_ms: of the
    profile of the same case, the longest of its ranks. difference: of the losses, see `loss_differences`.
    """
    bases: dict[tuple[str, int], Case] = {}
    for row in rows:
        if not row['graph'] and not row.get('profile'):
            bases.setdefault((row['op'], row['gpus']), row)
    profiles = {(row['op'], name_of(row['layout'])): row['profiles'] for row in rows if row.get('profiles')}
    found = []
    for row in rows:
        rate, (one, two) = tokens_per_s(row), (bases.get((row['op'], gpus), {}) for gpus in (1, 2))
        speedup, ranks = ratio(rate, tokens_per_s(one)), profiles.get((row['op'], name_of(row['layout'])))
        is_divided = row['gpus'] > 1 and not row['graph']
        ratios = {
            'speedup': speedup,
            'over_two': ratio(rate, tokens_per_s(two)),
            'overhead': None if not speedup or row['gpus'] == 1 else row['gpus'] / speedup - 1,
            'memory': ratio(row.get('peak_bytes'), one.get('peak_bytes')),
            'exposed_ms': max(rank['exposed_ms'] for rank in ranks) if ranks and is_divided else None,
            'difference': loss_differences(row, two) if two.get('layout') == REFERENCE else None,
        }
        found.append({**row, 'tokens_per_s': rate, **ratios})
    return found


def tokens_per_s(row: Case) -> float | None:
    return 1e3 * row['tokens'] / row['ms'] if row.get('ms') else None


def loss_differences(row: Case, reference: Case) -> list[float] | None:
    """Return the norms of the differences of two lists of losses, relative to those of the reference.

    They are the mean losses of the first steps, and the losses of single tokens after the first step.
    """
    if not row.get('token_losses') or not reference.get('token_losses'):
        return None
    tokens = sorted(reference['token_losses'])
    if sorted(row['token_losses']) != tokens:
        raise ValueError(f'{name_of(row["layout"])} has losses of other tokens than {name_of(reference["layout"])}')
    pairs = [(r['losses'], [r['token_losses'][token] for token in tokens]) for r in (row, reference)]
    vectors = [[torch.tensor(losses, dtype=torch.float64) for losses in pair] for pair in pairs]
    return [float((mine - gold).norm() / gold.norm()) for mine, gold in zip(*vectors, strict=True)]


def is_equal(row: Case) -> bool | None:
    """Return whether the losses equal those of two GPUs by rule 5 of `native_sparse_attention.testing`."""
    limit = NORM_LIMITS[getattr(torch, row['dtype'])]
    return None if row['difference'] is None else all(value <= limit for value in row['difference'])


def make_tables(rows: Sequence[Case]) -> list[str]:
    rows = with_ratios(rows)
    judged = [line for row in rows if (line := judge(row))]
    return [
        'Forward and backward; the trainer and the model: whole steps. Medians of queued runs, each as long as its '
        'slowest rank. Overhead: the time beyond that of one GPU without a CUDA graph divided by the number of GPUs. '
        'NCCL alone: communication that no computation hides, in a profiled step, of the rank that has most. Peak: all '
        'tensors of a step, inputs and weights included.',
        speeds(rows),
        *(['\n'.join(judged)] if judged else []),
        *losses(rows),
        *profile_tables(rows),
    ]


def speeds(rows: Sequence[Case]) -> str:
    body = []
    for row in rows:
        if row.get('profile'):
            continue
        rate, name = row['tokens_per_s'], name_of(row['layout']) + ', CUDA graph' * row['graph']
        cells = [f'{row["tokens"]:,}', row.get('ms'), None if rate is None else f'{rate:,.0f}', row['speedup']]
        cells += [row['over_two'], None if row['overhead'] is None else f'{row["overhead"]:.1%}', row['exposed_ms']]
        sizes = [report.gib(row.get('peak_bytes')), row['memory']]
        body.append([row['op'], name, *cells, *sizes, row.get('note', '')])
    times = ('tokens', 'ms', 'tokens/s', '/ one GPU', '/ two GPUs', 'overhead', 'NCCL alone, ms')
    return report.table(('', 'layout', *times, 'peak GiB per GPU', '/ one GPU', ''), body)


def judge(row: Case) -> str | None:
    """Return a line that says whether a case meets its target, or None if it has none or was not measured."""
    target = TARGETS.get((row['op'], row['gpus']))
    if target is None or row.get('profile') or not row.get('ms'):
        return None
    base, speed, least = 'one GPU', row['speedup'], target.speedup
    if speed is None and target.over_two is not None:
        base, speed, least = 'two GPUs', row['over_two'], target.over_two
    wanted, met = limits(row, target)
    if least is not None:
        if speed is None:
            return None
        wanted, met = [f'at least {least} x {base}', *wanted], met and speed >= least
    name = name_of(row['layout']) + ', CUDA graph' * row['graph']
    return f'- {row["op"]}, {name}: {", ".join(wanted)}: {"met" if met else "missed"}'


def limits(row: Case, target: Target) -> tuple[list[str], bool]:
    """Return the limits of memory in words, and whether a row keeps all."""
    wanted, met = list[str](), True
    if target.memory is not None:
        wanted.append(f'memory at most {target.memory} x')
        met &= bool(row['memory']) and row['memory'] <= target.memory
    if target.gigabytes is not None:
        wanted.append(f'at most {target.gigabytes:.0f} GB per GPU')
        met &= bool(row['peak_bytes']) and row['peak_bytes'] <= 1e9 * target.gigabytes
    return wanted, met


def losses(rows: Sequence[Case]) -> list[str]:
    """Return the table of the losses of the model, if it was measured."""
    rows = [row for row in rows if row.get('token_losses')]
    if not rows:
        return []
    body = []
    for row in rows:
        cells = [None, None] if row['difference'] is None else [f'{value:.1e}' for value in row['difference']]
        verdict = None if (equal := is_equal(row)) is None else 'equal' if equal else 'not equal'
        is_reference = row['layout'] == REFERENCE
        found = [f'{loss:.5f}' for loss in row['losses']]
        body.append([name_of(row['layout']), *found, *cells, 'reference' if is_reference else verdict])
    limit = NORM_LIMITS[getattr(torch, rows[0]['dtype'])]
    columns = ('layout', 'loss of step 1', 'of step 2', 'difference', 'difference of tokens', '')
    return [
        f'Model of {rows[0]["parameters"]:,} parameters: activation checkpointing of every block, weights, gradients '
        f'and optimizer state (AdamW) in float32, matrices in {rows[0]["dtype"]}. Every layout trains on the same two '
        f'rows; with more data ranks they repeat. Difference: from {name_of(REFERENCE)}, relative, of both losses, and '
        f'of the losses of {len(rows[0]["token_losses"])} tokens after step 1. Equal: both at most {limit:.1e} (error '
        'rule 5).',
        report.table(columns, body),
    ]


def profile_tables(rows: Sequence[Case]) -> list[str]:
    profiled = [row for row in rows if row.get('profiles')]
    if not profiled:
        return []
    body = []
    for row in profiled:
        times = [[float(rank[f'{part}_ms']) for rank in row['profiles']] for part in PARTS]
        spans = [dict.fromkeys(map(report.cell, (min(ranks), max(ranks)))) for ranks in times]
        body.append([row['op'], name_of(row['layout']), *map(' to '.join, spans)])
    most = {row['op']: row for row in sorted(profiled, key=lambda row: row['gpus'])}
    kernels = [row for row in profiled if row is most[row['op']] or row['gpus'] == 1]
    columns = ('step', 'NCCL', 'other kernels', 'both at once', 'NCCL alone', 'idle')
    return [
        'A step by the profiler, ms, of the ranks with least and most. NCCL: its kernels, which wait for other ranks, '
        'too. NCCL alone: communication that no computation hides. Idle: no kernel runs.',
        report.table(('', 'layout', *columns), body),
        'Kernels of rank 0 that take longest, and all of NCCL:',
        report.table(
            ('', 'layout', 'kernel', 'launches', 'ms'),
            [[row['op'], name_of(row['layout']), *of] for row in kernels for of in row['profiles'][0]['kernels']],
        ),
    ]
