"""Which launch settings are the fastest on this GPU? Searches them and rewrites its rows of the committed tables.

    python -m benchmarks.tune                                            every table, head sizes 64, 128, 256
    python -m benchmarks.tune --table interval.FORWARD --head-dim 128    one of them, within a minute
    python -m benchmarks.tune --list                                     what there is
    TRITON_INTERPRET=1 python -m benchmarks.tune --device cpu --table interval.FORWARD --head-dim 64 --limit 2 --dry
                                                                         to try the script

Candidates are compiled by --workers processes at once, then timed one by one, alone on the GPU. Those that do not
compile, need too much shared memory, take too long to compile or do not give the results of the settings in force are
left out. A row changes where the best candidate is at least 3 % faster than the settings in force. Rows of other
architectures stay as they are. --out DIR writes the changed files there instead of into the package. --budget bounds
the whole; what was found until then is written. On an H100: 20 to 60 seconds per table and head size.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import time
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.backends import first, make_call
from benchmarks.report import ROOT
from benchmarks.shapes import PAPER, SHAPES, Shape
from benchmarks.timing import FLUSH_BYTES
from native_sparse_attention import ops
from native_sparse_attention.ops._triton import launch
from native_sparse_attention.ops._triton.launch import Settings
from native_sparse_attention.ops.selected_attention.triton.plan import MAX_UNION_SELECTED
from native_sparse_attention.ops.selected_attention.triton.settings import SHORT

HEAD_DIMS = launch.HEAD_SIZES
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BLOCKS = (16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
STAGES = {2: (1, 2, 3, 4, 5, 6), 4: (1, 2)}
# Cases of suite `backends` whose kernels take their settings from the tables of a folder.
OPS: dict[str, tuple[str, ...]] = {
    'interval': ('window', 'compressed'),
    'selected_attention': ('selected', 'selected-overlapping'),
    'block_selection': ('selection', 'scores'),
    'block_mass': ('loss',),
    'block_divergence': ('loss',),
}
# Least gain that changes a row.
GAIN = 0.97
FINALISTS = 6
# Largest error relative to the norm of the results.
TOLERANCE = {2: 2e-2, 4: 1e-4}


def find_tables() -> dict[str, tuple[types.ModuleType, str]]:
    """Return module and name of every table of settings by a name like 'interval.FORWARD'."""
    tables = {}
    for found in pkgutil.walk_packages([str(Path(ops.__file__).parent)], f'{ops.__name__}.'):
        if not found.name.endswith('settings'):
            continue
        module = importlib.import_module(found.name)
        *folders, file = found.name.split('.')[2:]
        parts = [part for part in folders if part not in ('_triton', 'triton')]
        parts += [file.removesuffix('_settings')] * (file != 'settings')
        for name, table in vars(module).items():
            if isinstance(table, dict) and any(isinstance(value, Settings) for value in table.values()):
                tables[f'{".".join(parts)}.{name}'] = (module, name)
    return tables


@contextmanager
def forced(table: Any, settings: Settings | None) -> Iterator[list[Any]]:
    """Make kernels that look up `table` use these settings. Yields the list of the tables that were looked up."""
    find_settings, asked = launch.find_settings, []

    def find(wanted: Any, *rest: Any) -> Settings:
        asked.append(wanted)
        return settings if wanted is table and settings is not None else find_settings(wanted, *rest)

    launch.find_settings = find
    try:
        yield asked
    finally:
        launch.find_settings = find_settings


def make_shape(itemsize: int, head_dim: int, device: str) -> Shape:
    if device == 'cpu':
        return replace(SHAPES['tiny'], head_dim=head_dim, value_dim=head_dim, dtype=torch.float32)
    sizes = {'heads': 32, 'kv_heads': 2, 'head_dim': head_dim, 'value_dim': head_dim}
    return replace(PAPER, seqlen=8192, dtype=DTYPES[itemsize], **sizes)


@functools.lru_cache(maxsize=1)
def make_phases(table: str, itemsize: int, head_dim: int, device: str) -> list[Any]:
    """Return the forwards and backwards whose kernels look up the table, as functions that return tensors."""
    torch.manual_seed(0)
    module, name = find_tables()[table]
    shape = make_shape(itemsize, head_dim, device)
    shapes = [shape]
    if table.startswith('selected'):
        # Groups of 16 and of 2, the latter with few blocks, with many, and with many short ones: each has kernels or
        # tables of its own.
        small = replace(shape, kv_heads=shape.heads // 2)
        few_blocks = 2 * shape.num_selected * shape.selection_block_size
        short = replace(small, selection_block_size=max(shape.compress_stride, SHORT // 2))
        shapes += [replace(small, seqlen=few_blocks), *(replace(s, seqlen=4 * s.seqlen) for s in (small, short))]
        # Groups of 32 and 64, with so many selected blocks that both passes run query by query.
        if name.endswith(('_32', '_64')):
            heads = int(name[-2:])
            shapes = [replace(shape, heads=heads, kv_heads=1, num_selected=MAX_UNION_SELECTED + 1)]
    if table.startswith(('block_mass', 'block_divergence')):
        shapes += [replace(shape, kv_heads=shape.heads // 2)]
    if name.endswith('_SMALL'):
        shapes = [replace(shape, kv_heads=shape.heads // group, seqlen=2 * shape.seqlen) for group in (2, 4)]
    phases = []
    for op, shape in itertools.product(OPS[table.split('.')[0]], shapes):
        forward, leaves = make_call(op, shape, 'triton', device)
        phases.append(functools.partial(_forward, forward))
        if leaves:
            # With gradients some forwards compute more, with the same tables.
            phases += [functools.partial(_forward, forward, True), _Backward(forward, leaves)]
    asking = []
    for phase in phases:
        if isinstance(phase, _Backward):
            phase.prepare()
        with forced(getattr(module, name), None) as asked:
            phase()
        if any(wanted is getattr(module, name) for wanted in asked):
            asking.append(phase)
    return asking


def _forward(forward: Any, with_gradients: bool = False) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(with_gradients):
        outputs = forward()
    return tuple(t.detach() for t in ((outputs,) if isinstance(outputs, Tensor) else outputs))


class _Backward:
    """The backward of one forward, repeatable."""

    def __init__(self, forward: Any, leaves: list[Tensor]) -> None:
        self.forward, self.leaves = forward, leaves

    def prepare(self) -> None:
        self.out = first(self.forward)
        self.dout = torch.randn_like(self.out)

    def __call__(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def try_candidate(table: str, itemsize: int, head_dim: int, device: str, settings: Settings) -> str | None:
    """Compile and run once; return the reason of a failure, or None. Runs in the pool, which fills the kernel cache."""
    module, name = find_tables()[table]
    try:
        with forced(getattr(module, name), Settings(*settings)):
            for phase in make_phases(table, itemsize, head_dim, device):
                phase()
        if device != 'cpu':
            torch.cuda.synchronize()
    except Exception as error:  # of whatever type the compiler raises
        return f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")[:100]}'
    return None


def candidates_for(itemsize: int, head_dim: int, device: str) -> list[Settings]:
    """Return settings whose tiles may fit into registers and shared memory."""
    architecture = launch.architecture_of(torch.device(device))
    blocks = [size for size in BLOCKS if itemsize == 2 or size <= 64]
    found = []
    for block_m, block_n, num_warps, num_stages in itertools.product(blocks, blocks, WARPS, STAGES[itemsize]):
        if num_warps == 2 and block_m * block_n > 32 * 64:
            continue
        registers = (block_m * block_n + max(block_m, block_n) * head_dim) / (32 * num_warps)
        shared = (2 * min(block_m, block_n) * max(1, num_stages - 1)) * head_dim * itemsize
        if registers <= 320 and shared <= launch.SHARED_MEMORY[architecture] and block_m * block_n <= 128 * 128:
            found.append(Settings(block_m, block_n, num_warps, num_stages))
    return found


class Pool:
    """Processes that compile; all are ended and started again if one hangs."""

    def __init__(self, workers: int) -> None:
        self.workers, self.executor = workers, None

    def usable(self, jobs: list[tuple[Any, ...]], seconds: float) -> list[Settings]:
        """Return the settings of the jobs that compile and run within `seconds` altogether."""
        if self.workers == 0:
            reasons = [try_candidate(*job) for job in jobs]
        else:
            if self.executor is None:
                context = multiprocessing.get_context('spawn')
                self.executor = ProcessPoolExecutor(self.workers, mp_context=context)
            futures = [self.executor.submit(try_candidate, *job) for job in jobs]
            done, late = wait(futures, timeout=seconds)
            reasons = []
            for future in futures:
                failed = future.exception() if future in done else None
                reason = repr(failed) if failed else future.result() if future in done else 'too slow to compile'
                reasons.append(reason)
            if late or any(future.exception() for future in done):
                self.close()
        refused: dict[str, int] = {}
        for reason in filter(None, reasons):
            refused[reason.split(':')[0]] = refused.get(reason.split(':')[0], 0) + 1
        if refused:
            print('  left out: ' + ', '.join(f'{count} × {reason}' for reason, count in refused.items()), flush=True)
        return [job[-1] for job, reason in zip(jobs, reasons, strict=True) if reason is None]

    def close(self) -> None:
        if self.executor is not None:
            for process in list(self.executor._processes.values()):
                process.kill()
            self.executor.shutdown(wait=False, cancel_futures=True)
            self.executor = None


def time_of(table: Any, settings: Settings, phases: list[Any], runs: int, device: str) -> list[float]:
    """Return ms of every phase."""
    runs = 1 if device == 'cpu' else runs
    flush = torch.empty(FLUSH_BYTES // 4 if device != 'cpu' else 1, dtype=torch.int8, device=device)
    times = []
    with forced(table, settings):
        for phase in phases:
            phase()
            found = []
            for _ in range(runs):
                flush.zero_()
                if device == 'cpu':
                    started = time.perf_counter()
                    phase()
                    found.append(1e3 * (time.perf_counter() - started))
                    continue
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                phase()
                stop.record()
                torch.cuda.synchronize()
                found.append(start.elapsed_time(stop))
            times.append(median(found))
    return times


def agrees(results: list[tuple[Tensor, ...]], expected: list[tuple[Tensor, ...]], itemsize: int) -> bool:
    for tensors, others in zip(results, expected, strict=True):
        for tensor, other in zip(tensors, others, strict=True):
            if not tensor.is_floating_point():
                if (tensor != other).float().mean() > 1e-2:
                    return False
                continue
            finite = other.isfinite()
            difference = (tensor.float() - other.float()).where(finite, 0).norm()
            if not difference <= TOLERANCE[itemsize] * other.float().where(finite, 0).norm():
                return False
            if not torch.equal(finite, tensor.isfinite()):
                return False
    return True


def tune(table: str, itemsize: int, head_dim: int, options: argparse.Namespace, pool: Pool) -> Settings | None:
    """Return the best settings, or None if those in force are as good."""
    started, device = time.monotonic(), options.device
    module, name = find_tables()[table]
    rows = getattr(module, name)
    architecture = launch.architecture_of(torch.device(device))
    try:
        in_force = launch.find_settings(rows, architecture, itemsize, head_dim)
    except KeyError as error:
        # Where another table serves, as for blocks that are not short.
        print(f'{table}: {error.args[0]}')
        return None
    # The compiling processes need the memory.
    make_phases.cache_clear()
    candidates = [c for c in candidates_for(itemsize, head_dim, device) if c != in_force]
    if table.startswith('selected') and name.startswith('BLOCK'):
        # The largest block that these tables serve: not a matter of speed.
        candidates = [c for c in candidates if c.block_n == in_force.block_n]
    candidates = candidates[: options.limit]
    jobs = [(table, itemsize, head_dim, device, candidate) for candidate in candidates]
    usable = pool.usable(jobs, options.compile_seconds)
    phases = make_phases(table, itemsize, head_dim, device)
    if not phases:
        print(f'{table}: no workload of {OPS[table.split(".")[0]]} asks for it')
        return None

    def results(settings: Settings) -> list[tuple[Tensor, ...]]:
        with forced(rows, settings):
            return [phase() for phase in phases]

    expected = results(in_force)
    base = time_of(rows, in_force, phases, 5, device)

    def relative(settings: Settings, runs: int) -> float:
        """Return the mean ratio of its times to those in force."""
        times = time_of(rows, settings, phases, runs, device)
        return sum(own / old for own, old in zip(times, base, strict=True)) / len(base)

    scores = {}
    for candidate in usable:
        try:
            if agrees(results(candidate), expected, itemsize):
                scores[candidate] = relative(candidate, 3)
            else:
                print(f'  {candidate} gives OTHER RESULTS', flush=True)
        except Exception as error:  # a candidate that ran in the pool may fail here
            print(f'  {candidate}: {type(error).__name__}', flush=True)
    finalists = sorted(scores, key=scores.__getitem__)[:FINALISTS]
    base = time_of(rows, in_force, phases, 15, device)
    scores = {candidate: relative(candidate, 15) for candidate in finalists}
    best = min(scores, key=scores.__getitem__, default=in_force)
    shown = ', '.join(f'{tuple(c)} {scores[c]:.3f}' for c in sorted(scores, key=scores.__getitem__)[:3])
    changes = best != in_force and scores[best] < GAIN
    print(
        f'{table} {architecture} {itemsize} bytes, head size {head_dim}: in force {tuple(in_force)} '
        f'{", ".join(f"{t:.3f}" for t in base)} ms; of {len(usable)} the best, over that: {shown}; '
        f'{"CHANGES" if changes else "stays"} ({time.monotonic() - started:.0f} s)',
        flush=True,
    )
    return best if changes else None


def rewrite(text: str, table: str, architecture: str, found: dict[tuple[int, int], Settings]) -> str:
    """Return the source of a settings.py with the given rows of one architecture; the rest stays as it is."""
    lines = text.splitlines()
    assigned = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table
    ]
    (node,) = assigned
    assert node.end_lineno is not None
    head, body, tail = lines[: node.lineno], lines[node.lineno : node.end_lineno - 1], lines[node.end_lineno - 1 :]
    rows = launch.read_table('\n'.join(body)) | {(architecture, *key): settings for key, settings in found.items()}
    return '\n'.join([*head, *write_rows(rows), *tail]) + '\n'


def write_rows(table: launch.Table) -> list[str]:
    """Return the lines that `read_table` reads."""
    lines = []
    for architecture, itemsize in sorted({key[:2] for key in table}, key=lambda key: (int(key[0][2:]), key[1])):
        found = [table.get((architecture, itemsize, head_size)) for head_size in launch.HEAD_SIZES]
        cells = ' | '.join(' '.join(map(str, settings)) if settings else '-' for settings in found)
        lines.append(f'    {architecture} {itemsize}: {cells}')
    return lines


def write_tables(found: dict[str, dict[tuple[int, int], Settings]], options: argparse.Namespace) -> None:
    """Write the changed files into the package or to --out."""
    architecture = launch.architecture_of(torch.device(options.device))
    texts: dict[Path, str] = {}
    for table, rows in found.items():
        module, name = find_tables()[table]
        path = Path(str(module.__file__))
        texts[path] = rewrite(texts.get(path) or path.read_text(), name, architecture, rows)
    for path, text in texts.items():
        target = path
        if options.out:
            target = options.out / '-'.join(path.relative_to(ROOT).parts)
            options.out.mkdir(parents=True, exist_ok=True)
        if options.dry:
            print(text)
        else:
            target.write_text(text)
            print(f'wrote {target}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--table', action='append', help='(every one)')
    add('--head-dim', type=int, action='append', choices=HEAD_DIMS, help='(64, 128 and 256)')
    add('--bytes', type=int, action='append', choices=DTYPES, help='of an element (2 and 4)')
    add('--list', action='store_true', help='the tables, and nothing else')
    add('--out', type=Path, help='folder for the changed files (the package)')
    add('--dry', action='store_true', help='print the changed files, write none')
    add('--workers', type=int, default=min(12, (os.cpu_count() or 2) - 1), help='processes that compile (%(default)s)')
    add('--compile-seconds', type=float, default=60, help='for the candidates of one row (%(default)s)')
    add('--budget', type=float, default=540, help='seconds for all (%(default)s)')
    add('--limit', type=int, default=None, help='so many candidates at most')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    options = parser.parse_args()
    tables = find_tables()
    if options.list:
        return print('\n'.join(tables))
    asked = options.table or list(tables)
    if unknown := set(asked) - set(tables):
        parser.error(f'no table is named {", ".join(unknown)}; there are {", ".join(tables)}')
    started, found = time.monotonic(), {}
    pool = Pool(0 if options.device == 'cpu' else options.workers)
    try:
        for table, itemsize, head_dim in itertools.product(
            asked, options.bytes or list(DTYPES), options.head_dim or HEAD_DIMS
        ):
            if time.monotonic() - started > options.budget - options.compile_seconds:
                print(f'{table}, {itemsize} bytes, head size {head_dim}: not tried, the time is used up')
                continue
            best = tune(table, itemsize, head_dim, options, pool)
            if best is not None:
                found.setdefault(table, {})[itemsize, head_dim] = best
                write_tables(found, options)
    finally:
        pool.close()
    if not found:
        print('nothing changes')


if __name__ == '__main__':
    main()
