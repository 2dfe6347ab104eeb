"""How much faster are several GPUs than one, what does each need in memory, and what overlaps?

    python -m benchmarks.parallel                                                   about 3 minutes on 2 GPUs
    python -m benchmarks.parallel --device cpu --shape tiny --out /tmp/results       to try the script, over gloo

One process per GPU. Every case is measured on one GPU and on 2 and 4 of the same machine, as far as they are visible:
context parallelism (`context_parallel_nsa` beside `nsa`), sharded training of preset long of train_enwik8.py, tensor
parallelism of a layer of a model of 1B parameters, and a profile of each; on 4 GPUs also two kinds of parallelism
together. Kernels are compiled first, those of all cases side by side. Cases of one GPU run in a process of their own.
Writes <gpu>/parallel-<GPUs>.md and .json to --out after every case. A case that fails or takes longer than
--case-seconds ends its processes; the next case starts others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.report import ratio
from benchmarks.runner import NOT_RUN, Case, Worker, serve, show
from benchmarks.training_speed import make_config

TITLE = 'Several GPUs beside one'
SIZES = (2, 4)
PARTS = ('total', 'nccl', 'compute', 'both', 'exposed', 'idle')  # of the time of a profile
ENDED = 'the process ended'
PAPER = {
    'sliding_window_size': 512,
    'compress_block_size': 32,
    'compress_block_sliding_stride': 16,
    'selection_block_size': 64,
    'num_selected_blocks': 16,
    'use_diff_topk': True,
}
TINY = {
    'sliding_window_size': 16,
    'compress_block_size': 8,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 8,
    'num_selected_blocks': 4,
}
# By case and number of GPUs: the least speed-up, and the greatest share of the memory of one GPU, or None.
TARGETS: dict[tuple[str, int], tuple[float, float | None]] = {
    ('attention, 262,144 tokens', 2): (1.8, 0.6),
    ('attention, 262,144 tokens', 4): (3.2, None),
    ('attention, 524,288 tokens', 4): (3.2, None),
    ('trainer, rows of 16,384 tokens', 2): (1.85, None),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases.

    sequences: names of shapes of attention and their tokens; the third is for 4 GPUs. trainer: flags, length and
    tokens per GPU. layer: tokens of one layer, and of a model of four.
    """

    sequences: tuple[tuple[str, int], ...]
    trainer: tuple[list[str], int, int]
    layer: tuple[int, int]
    model: dict[str, Any]
    dtype: str


SHAPES = {
    'full': Sizes(
        (('long-256k-h4', 2**18), ('long-128k-h4', 2**17), ('long-512k-h4', 2**19)),
        ([], 2**14, 2**16),
        (2**15, 2**16),
        {'dim': 2048, 'dim_head': 64, 'heads': 32, 'kv_heads': 8, 'sparse_attn_kwargs': PAPER},
        'bfloat16',
    ),
    'tiny': Sizes(
        (('tiny', 96), ('tiny', 64), ('tiny', 128)),
        (['--preset', 'cpu', '--dim', '32'], 48, 96),
        (64, 96),
        {'dim': 32, 'dim_head': 8, 'heads': 8, 'kv_heads': 4, 'sparse_attn_kwargs': TINY},
        'float32',
    ),
}


def make_cases(sizes: Sizes, device: str, gpus: int, data: str) -> list[Case]:
    """Return the cases, of most worth first."""
    counts = [1, *(count for count in SIZES if count <= gpus)]
    common = {'device': device, 'backend': 'auto', 'graph': False, 'data': data, 'dtype': sizes.dtype}

    def case(step: str, name: str, layout: dict[str, int], tokens: int, **more: Any) -> Case:
        count = 1
        for ranks in layout.values():
            count *= ranks
        return {'op': name, 'gpus': count, 'layout': layout, 'step': step, 'tokens': tokens, **more, **common}

    def attention(index: int, layout: dict[str, int], **more: Any) -> Case:
        shape, tokens = sizes.sequences[index]
        return case('attention', f'attention, {tokens:,} tokens', layout, tokens, shape=shape, **more)

    def trainer(count: int, **more: Any) -> Case:
        flags, length, tokens = sizes.trainer
        config = asdict(make_config(flags, 'sparse', length, tokens * count))
        layout = {'dp': count} if count > 1 else {}
        return case('trainer', f'trainer, rows of {length:,} tokens', layout, tokens * count, config=config, **more)

    def layers(depth: int, tokens: int, layout: dict[str, int], **more: Any) -> Case:
        model = {**sizes.model, 'depth': depth}
        name = f'layers: {depth}, rows of {tokens:,} tokens'
        return case('layers', name, layout, tokens * layout.get('dp', 1), model=model, **more)

    one_layer, four_layers = sizes.layer
    cases = [
        *(attention(index, {'cp': count} if count > 1 else {}) for index in (0, 1) for count in counts),
        *(attention(2, layout) for layout in ({'cp': 4}, {}) if gpus >= 4),
        *(trainer(count) for count in counts),
        *({**trainer(count), 'graph': True} for count in counts if device == 'cuda'),
        *(layers(1, one_layer, {'tp': count} if count > 1 else {}) for count in counts),
        *(attention(0, layout, profile=True) for layout in ({}, {'cp': gpus})),
        trainer(gpus, profile=True),
        layers(1, one_layer, {'tp': gpus}, profile=True),
    ]
    if gpus >= 4:
        mixed = ({}, {'cp': 2}, {'dp': 2, 'cp': 2}, {'cp': 2, 'tp': 2})
        cases += [layers(4, four_layers, layout) for layout in mixed]
    return cases


def to_warm(cases: Sequence[Case]) -> list[Case]:
    """Return cases that compile the kernels of all, which depend on the length and on what is divided.

    Sequences longer than the first case are left out: they may need all memory.
    """
    found: dict[Any, Case] = {}
    for case in cases:
        divided = sorted(case['layout'].keys() - {'dp'})
        length = case['tokens'] if case['step'] == 'attention' and not divided else 0
        if length <= cases[0]['tokens'] and (divided or case['gpus'] == 1):
            found.setdefault((case['step'], length, *divided), {**case, 'warm': True, 'profile': False})
    return list(found.values())


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
        if case['gpus'] > 1 and case['gpus'] != self.joined:
            self.joined, self.groups = case['gpus'], self.groups + 1
        common = {**case, 'group': f'{self.folder}/{self.groups}'}
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
        row['loss'] = statistics.mean(r['loss'] for r in results)
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
                show({key: value for key, value in rows[-1].items() if key not in ('config', 'profiles')})
                done(rows)
        finally:
            for group in groups:
                group.stop()
    return rows


def warm_up(cases: Sequence[Case], gpus: int, folder: str, seconds: float) -> None:
    """Compile kernels into the caches on disk, all cases at the same time in processes of their own."""

    def warm(index: int, case: Case) -> Case:
        (own := Path(folder, f'warm-{index}')).mkdir()
        # The longest sequence, which is the first case, shares its GPU with no other case of one GPU.
        group = Group(range(case['gpus']) if case['gpus'] > 1 else [0 if index == 0 else gpus - 1], str(own))
        try:
            return group.run(case, seconds)
        finally:
            group.stop()

    began = time.monotonic()
    with ThreadPoolExecutor(len(cases)) as pool:
        for case, result in zip(cases, pool.map(warm, range(len(cases)), cases), strict=True):
            print(f'compiled: {case["op"]}, {name_of(case["layout"])} {result}', flush=True)
    print(f'compiled in {time.monotonic() - began:.0f} s', flush=True)


def name_of(layout: dict[str, int]) -> str:
    return ' x '.join(f'{name} {ranks}' for name, ranks in layout.items()) or 'one GPU'


def with_ratios(rows: Sequence[Case]) -> list[Case]:
    """Return the rows with `tokens_per_s`, and `speedup` and `memory` relative to the row of one GPU.

    `overhead` is the time beyond that of one GPU divided by the number of GPUs, relative to it.
    """
    one = {row['op']: row for row in rows if row['gpus'] == 1 and not row['graph'] and not row.get('profile')}
    found = []
    for row in rows:
        rate, base = tokens_per_s(row), one.get(row['op'], {})
        speedup = ratio(rate, tokens_per_s(base))
        ratios = {
            'speedup': speedup,
            'overhead': None if not speedup or row['gpus'] == 1 else row['gpus'] / speedup - 1,
            'memory': ratio(row.get('peak_bytes'), base.get('peak_bytes')),
        }
        found.append({**row, 'tokens_per_s': rate, **ratios})
    return found


def tokens_per_s(row: Case) -> float | None:
    return 1e3 * row['tokens'] / row['ms'] if row.get('ms') else None


def make_tables(rows: Sequence[Case]) -> list[str]:
    rows = with_ratios(rows)
    body, judged, tables = [], [], []
    for row in rows:
        if row.get('profile'):
            continue
        rate, name = row['tokens_per_s'], name_of(row['layout']) + ', CUDA graph' * row['graph']
        sizes = [report.gib(row.get('peak_bytes')), row['memory']]
        cells = [f'{row["tokens"]:,}', row.get('ms'), None if rate is None else f'{rate:,.0f}', row['speedup']]
        cells.append(None if row['overhead'] is None else f'{row["overhead"]:.1%}')
        body.append([row['op'], name, *cells, *sizes, row.get('note', '')])
        if row['speedup'] and (target := TARGETS.get((row['op'], row['gpus']))):
            met = row['speedup'] >= target[0] and (target[1] is None or (row['memory'] or 0) <= target[1])
            wanted = f'at least {target[0]} x' + f', memory at most {target[1]} x' * (target[1] is not None)
            judged.append(f'- {row["op"]}, {name}: {wanted}: {"met" if met else "missed"}')
    columns = ('', 'layout', 'tokens', 'ms', 'tokens/s', '/ one GPU', 'overhead', 'peak GiB per GPU', '/ one GPU', '')
    profiles = [
        [row['op'], name_of(row['layout']), rank, *(found[f'{part}_ms'] for part in PARTS)]
        for row in rows
        for rank, found in enumerate(row.get('profiles', []))
    ]
    if profiles:
        times = ('step', 'NCCL', 'other kernels', 'both at once', 'NCCL alone', 'idle')
        tables = [
            'A step by the profiler, ms. NCCL: its kernels, which wait for other ranks, too. NCCL alone: communication '
            'that no computation hides. Idle: no kernel runs.',
            report.table(('', 'layout', 'rank', *times), profiles),
            'Kernels of rank 0 that take longest, and all of NCCL:',
            report.table(
                ('', 'kernel', 'launches', 'ms'),
                [[row['op'], *of] for row in rows if row.get('profiles') for of in row['profiles'][0]['kernels']],
            ),
        ]
    return [
        'Forward and backward; the trainer: whole steps. Medians of queued runs, each as long as its slowest rank. '
        'Overhead: the time beyond that of one GPU without a CUDA graph divided by the number of GPUs. Peak: all '
        'tensors of a step, inputs and weights included.',
        report.table(columns, body),
        *(['\n'.join(judged)] if judged else []),
        *tables,
    ]


def main() -> None:
    parser = report.make_parser(__doc__)
    add = parser.add_argument
    add('--shape', default='full', choices=SHAPES, help='(%(default)s)')
    add('--processes', type=int, help='2 or 4 (the visible GPUs, or 2 on the CPU)')
    add('--case-seconds', type=float, default=50, help='limit of one case (%(default)s)')
    add('--budget', type=float, default=300, help='seconds for all cases, compilation included (%(default)s)')
    add('--data', default='stdlib', help='text, as train_enwik8.py takes it (%(default)s)')
    add('--worker', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from benchmarks.parallel_steps import Process

        process = Process()
        serve(process.method)
        return process.leave()
    where = report.machine(options.device, options.commit)
    present = torch.cuda.device_count() if options.device == 'cuda' else max(SIZES)
    gpus = options.processes or (present if options.device == 'cuda' else SIZES[0])
    gpus = max((size for size in SIZES if size <= gpus), default=1)
    if gpus > present or gpus == 1:
        raise SystemExit(f'--processes {options.processes}: must be 2 or 4, on as many GPUs; there are {present}')
    cases = make_cases(SHAPES[options.shape], options.device, gpus, options.data)

    def write(rows: list[Case]) -> None:
        report.write(options.out, where, f'parallel-{gpus}', TITLE, make_tables(rows), with_ratios(rows))

    rows = run_cases(cases, gpus, options.case_seconds, options.budget, write)
    print('\n\n'.join(make_tables(rows)))


if __name__ == '__main__':
    main()
