"""The trainer in several processes: the run of one process, checkpoints for any number of ranks, and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import train_enwik8
from tests.support.processes import agent_store, run_processes
from tests.support.training_runs import assert_same_run, command, rows, write_words
from train_enwik8 import Graph, Run, load_checkpoint, main

full = pytest.mark.full
SETTINGS = {'heads': 4, 'kv_heads': 2, 'batch': 4, 'steps': 6, 'log_every': 1, 'eval_every': 3, 'save_every': 2}
LAYOUTS = [
    (2, 1, 1),
    (1, 2, 1),
    (2, 1, 2),
    *(pytest.param(*ranks, marks=full) for ranks in ((1, 1, 2), (2, 2, 1), (1, 2, 2))),
]  # data, context, tensor


@pytest.fixture(scope='module')
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp('text'))


@pytest.fixture(scope='module')
def one(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one process."""
    runs = tmp_path_factory.mktemp('runs')
    threads = torch.get_num_threads()
    assert main(command(text, runs, '--name', 'one', **SETTINGS)) == 0
    torch.set_num_threads(threads)
    return runs / 'one'


def call(folder: Path, arguments: list[str], code: int, prepare: Callable[[int], None]) -> None:
    """Call the trainer in each process; what it prints goes to files. Figures are not rendered."""
    rank = int(os.environ['RANK'])
    prepare(rank)
    folder.mkdir(exist_ok=True)
    from matplotlib.figure import Figure

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Figure, 'savefig', lambda _, file, **__: file.write(b'no picture')))
        files = [stack.enter_context((folder / f'{name}-{rank}').open('w')) for name in ('out', 'err')]
        stack.enter_context(contextlib.redirect_stdout(files[0]))
        stack.enter_context(contextlib.redirect_stderr(files[1]))
        assert main(arguments) == code


def nothing(rank: int) -> None:
    pass


def launch(
    ranks: int, folder: Path, arguments: list[str], code: int = 0, prepare: Callable[[int], None] = nothing
) -> list[str]:
    """Run the trainer and return what each process printed. Where the code is 0, only the first prints."""
    folder.mkdir()
    run_processes(call, ranks, folder, folder, arguments, code, prepare, joins=False)
    out, err = ([(folder / f'{name}-{rank}').read_text() for rank in range(ranks)] for name in ('out', 'err'))
    assert out[0]
    assert not any(out[1:])
    assert code == 2 or not any(err)
    return err if code == 2 else out


def layout(dp: int, cp: int, tp: int) -> list[str]:
    return ['--dp', str(dp), '--cp', str(cp), '--tp', str(tp)]


def resume(run: Path) -> list[str]:
    return ['--runs-dir', str(run.parent), '--name', run.name, '--device', 'cpu', '--resume']


def assert_near(found: Path, expected: Path, losses: int = 11) -> None:
    """Assert equal lines of the log, with losses to 1e-5, and equal samples."""
    pairs = list(zip(rows(found), rows(expected), strict=True))
    assert sum('split' in row for row, _ in pairs) == losses
    for row, wanted in pairs:
        assert row.pop('bpb', 0) == pytest.approx(wanted.pop('bpb', 0), rel=1e-5)
        assert row == wanted
    samples = [[p.read_text().split('\n', 1)[1] for p in run.glob('sample-*')] for run in (found, expected)]
    assert len(samples[0]) == 1
    assert samples[0] == samples[1]


def check_parts(rank: int) -> None:
    """Every process reads its part of a batch alone."""
    loss = Run.loss

    def checked(self: Run, ids: torch.Tensor) -> torch.Tensor:
        rows_of_rank = 4 // self.ranks.dp
        assert len(ids) == rows_of_rank if torch.is_grad_enabled() else len(ids) <= rows_of_rank
        return loss(self, ids)

    Run.loss = checked


@pytest.mark.parametrize(('dp', 'cp', 'tp'), LAYOUTS)
def test_equals_one_process(dp: int, cp: int, tp: int, one: Path, text: Path, tmp_path: Path) -> None:
    arguments = command(text, tmp_path, '--name', 'run', *layout(dp, cp, tp), **SETTINGS)
    out = launch(dp * cp * tp, tmp_path / 'ranks', arguments, prepare=check_parts)
    assert f'cpu, {dp} x {cp} x {tp} processes (data x context x tensor), from step 0 to 6' in out[0]
    assert_near(tmp_path / 'run', one)


@full
def test_other_settings(text: Path, tmp_path: Path) -> None:
    """More data ranks than windows of the evaluation, tied embeddings, dense attention."""
    settings = {**SETTINGS, 'attention': 'dense', 'eval_bytes': 17, 'steps': 3, 'log_every': 3}
    more = ['--tie-embeddings', '--qk-norm']
    assert main(command(text, tmp_path, '--name', 'one', *more, **settings)) == 0
    launch(4, tmp_path / 'ranks', command(text, tmp_path, '--name', 'run', *more, '--dp', '4', **settings))
    assert_near(tmp_path / 'run', tmp_path / 'one', 5)


def interrupt(rank: int, step: int) -> None:
    """One process alone receives a signal."""
    train_step = Run.train_step

    def step_and_signal(self: Run) -> None:
        train_step(self)
        if rank == 1 and self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.train_step = step_and_signal


def test_checkpoints_resume_in_another_layout(one: Path, text: Path, tmp_path: Path) -> None:
    """Checkpoints of whole projections load into divided ones and back."""
    run = tmp_path / 'run'
    arguments = command(text, tmp_path, '--name', 'run', *layout(2, 1, 1), **SETTINGS)
    out = launch(2, tmp_path / 'first', arguments, 128 + signal.SIGTERM, partial(interrupt, step=3))
    assert 'interrupted and saved at step 3' in out[0]
    assert [p.name for p in run.glob('tensors-*')] == ['tensors-000003']
    launch(2, tmp_path / 'second', [*resume(run), *layout(1, 1, 2)], 128 + signal.SIGTERM, partial(interrupt, step=5))
    assert load_checkpoint(run)['step'] == 5
    assert main(resume(run)) == 0
    assert_near(run, one)


@full
def test_context_ranks_resume(one: Path, text: Path, tmp_path: Path) -> None:
    """Runs resume with the same ranks bit for bit, and with other ranks up to rounding."""
    whole, by_context, by_data, alone = (tmp_path / name for name in ('whole', 'context', 'data', 'alone'))
    context = layout(1, 2, 1)
    launch(2, tmp_path / 'first', command(text, tmp_path, '--name', 'whole', *context, **SETTINGS))
    arguments = command(text, tmp_path, '--name', 'context', *context, **SETTINGS)
    out = launch(2, tmp_path / 'second', arguments, 128 + signal.SIGTERM, partial(interrupt, step=3))
    assert 'interrupted and saved at step 3' in out[0]
    for copied in (by_data, alone):
        shutil.copytree(by_context, copied)
    launch(2, tmp_path / 'third', [*resume(by_context), *context])
    launch(2, tmp_path / 'fourth', [*resume(by_data), *layout(2, 1, 1)])
    assert main(resume(alone)) == 0
    assert_same_run(by_context, whole)
    for run in (by_context, by_data, alone):
        assert_near(run, one)


def call_each(folder: Path, cases: list[tuple[list[str], str]], ports: list[int]) -> None:
    for number, ((arguments, _), port) in enumerate(zip(cases, ports, strict=True)):
        os.environ['MASTER_PORT'] = str(port)
        call(folder / str(number), arguments, 2, nothing)


def test_errors_are_one_line_of_one_process(one: Path, text: Path, tmp_path: Path) -> None:
    new = command(text, tmp_path / 'runs', **SETTINGS)
    dense = command(text, tmp_path / 'runs', '--attention', 'dense', **SETTINGS)
    cases = [
        (
            [*new, '--dp', '3'],
            '--dp 3 --cp 1 --tp 1: the number of processes is 2, but must be 3 (torchrun --nproc-per-node)',
        ),
        ([*new, '--tp', '3'], '--cp 1 --tp 3: the number of processes is 2, but must be a multiple of 3'),
        ([*new, '--dp', '0'], '--dp 0: must be at least 1'),
        ([*new, '--tp', '2', '--kv-heads', '1'], '--tp 2: mesh has 2 ranks, but their number must divide'),
        ([*dense, '--cp', '2'], '--cp 2: use_sparse_attn of the model is False, but must be'),
        ([*new, '--batch', '3'], '--dp 2: must divide --batch 3'),
        ([*new, '--device', 'cuda:1'], '--device cuda:1: must be cuda or cpu for several processes'),
        ([*new, '--data', '/no/such/file'], '/no/such/file: No such file'),
        ([*new, '--top-p', '1.5'], 'top_p'),
        ([*new, '--no-such-flag'], '--no-such-flag'),
        ([*resume(one)[:-1], '--check-decode'], '--check-decode: runs in one process'),
        (['--sample', str(one)], '--sample: runs in one process, without torchrun'),
        (command(text, one.parent, '--name', 'one', **SETTINGS), 'one: exists already'),
        (resume(one), 'one: finished after 6 steps'),
        (resume(tmp_path / 'none'), 'none/checkpoint.pt: no such checkpoint'),
    ]
    (tmp_path / 'ranks').mkdir()
    stores = [agent_store() for _ in cases]
    ports = [store.port for store in stores]
    run_processes(call_each, 2, tmp_path / 'ranks', tmp_path / 'ranks', cases, ports, joins=False)
    for number, (_, message) in enumerate(cases):
        printed = ''.join((tmp_path / 'ranks' / str(number) / f'err-{rank}').read_text() for rank in range(2))
        assert message in printed
        assert printed.count('\n') == 1
    assert not (tmp_path / 'runs').exists()


def fill_the_disk(rank: int, of: int, path: str) -> None:
    """Make one process fail to write a file of a kind after step 3."""
    open_file = Path.open

    def fail(self: Path, mode: str = 'r', *args: Any, **settings: Any) -> Any:
        if path in str(self) and mode != 'r':
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return open_file(self, mode, *args, **settings)

    if rank == of:
        Path.open = fail


@full
@pytest.mark.parametrize(('rank', 'path'), [(0, 'sample-'), (1, 'tensors-000004')])
def test_a_full_disk_of_one_process_ends_all(rank: int, path: str, text: Path, tmp_path: Path) -> None:
    arguments = command(text, tmp_path, '--name', 'run', **SETTINGS)
    err = launch(2, tmp_path / 'ranks', arguments, 2, partial(fill_the_disk, of=rank, path=path))
    (line,) = ''.join(err).splitlines()
    assert line.startswith(f'train_enwik8.py: {tmp_path}/run/{path}')
    assert line.endswith(': No space left on device')
    assert load_checkpoint(tmp_path / 'run')['step'] == {0: 6, 1: 2}[rank]
    assert main(resume(tmp_path / 'run')) == 0


@full
@pytest.mark.parametrize('parallelism', ['--dp', '--cp'])
def test_sigkill_of_one_process_ends_all_and_loses_nothing(parallelism: str, text: Path, tmp_path: Path) -> None:
    """The processes run under torchrun."""
    run, settings = tmp_path / 'run', {**SETTINGS, 'steps': 1000, 'log_every': 10, 'eval_every': 1000, 'save_every': 2}
    arguments = command(text, tmp_path, '--name', 'run', parallelism, '2', **settings)
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', train_enwik8.__file__]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    pipes: dict[str, Any] = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE, 'text': True}
    with subprocess.Popen(launcher + arguments, env=environment, **pipes) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        while process.poll() is None and not ((run / 'checkpoint.pt').exists() and load_checkpoint(run)['step'] >= 4):
            time.sleep(0.1)
        children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        printed = process.stderr.read() if process.stderr else ''
        watchdog.cancel()
    lines = [line for line in printed.splitlines() if line.startswith('train_enwik8.py: ')]
    assert lines == ['train_enwik8.py: another process of this run ended (the same command with --resume goes on)']
    step = load_checkpoint(run)['step']
    assert 4 <= step < 1000
    flags = train_enwik8.parse([*resume(run)])
    with contextlib.ExitStack() as locks:
        again = train_enwik8.open_run(*flags, locks)
        assert again.step == step
        again.train_step()


def test_a_failed_capture_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with exchanges would block the process as it leaves the group, while the traceback holds the object."""
    graph, kept = mock.Mock(), contextlib.nullcontext()
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', lambda: graph)
    monkeypatch.setattr(torch.cuda, 'graph', lambda *_, **__: kept)
    monkeypatch.setattr(torch.cuda, 'device', lambda _: kept)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError('memory of the GPU is full')

    with pytest.raises(torch.OutOfMemoryError, match='memory of the GPU is full'):
        Graph(fail, torch.zeros(1))
    graph.reset.assert_called_once_with()
