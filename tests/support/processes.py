"""Run a function in several processes with a process group, as `torchrun` would."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

# Imported once by a server that the processes are forked from, where they are installed. It has run no autograd and
# has no threads.
PRELOADED = [
    *('torch._dynamo', 'torch.distributed.checkpoint', 'tests.support.sharded_models', 'tests.support.hf_models'),
    'train_enwik8',
]


def run_processes(
    function: Callable[..., None],
    world_size: int,
    folder: Path,
    *arguments: Any,
    time_limit: float = 120.0,
    joins: bool = True,
) -> None:
    """Call function(*arguments) in processes that have joined a gloo group of world_size ranks.

    folder: an empty one, for their files. The first error ends all processes and is raised with its traceback.
    joins: False leaves the group to the function, which finds the environment of torchrun.
    """
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    agent = None if joins else agent_store()
    multiprocessing.get_context('forkserver').set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        _run,
        (world_size, folder, function, arguments, None if agent is None else agent.port),
        world_size,
        join=False,
        start_method='forkserver',
    )
    assert context is not None
    end = time.monotonic() + time_limit
    try:
        while not context.join(timeout=0.2):
            if time.monotonic() > end:
                pytest.fail(f'{world_size} processes take longer than {time_limit} s')
    except Exception as error:
        # The others then miss a peer: the first error is the cause.
        failed = sorted(folder.glob('error-*'), key=lambda file: file.stat().st_mtime_ns)
        pytest.fail('\n'.join(file.read_text() for file in failed[:1]) or str(error), pytrace=False)
    finally:
        for process in context.processes:
            assert process is not None
            process.kill()


def agent_store() -> torch.distributed.TCPStore:
    """Return the store of a torchrun, which outlives the processes."""
    return torch.distributed.TCPStore('localhost', 0, is_master=True, wait_for_workers=False)


def _run(
    rank: int,
    world_size: int,
    folder: Path,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    port: int | None,
) -> None:
    gc.freeze()  # a search for cycles among the modules of the server would copy their pages
    gc.set_threshold(20_000, 20, 20)
    torch.set_num_threads(1)
    if port is None:
        store = f'file://{folder}/store'
        torch.distributed.init_process_group('gloo', init_method=store, rank=rank, world_size=world_size)
    else:
        ranks = {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': world_size, 'LOCAL_WORLD_SIZE': world_size}
        agent = {'MASTER_ADDR': 'localhost', 'MASTER_PORT': port, 'TORCHELASTIC_USE_AGENT_STORE': True}
        os.environ.update({name: str(value) for name, value in {**ranks, **agent}.items()})
    torch.manual_seed(0)
    try:
        function(*arguments)
    except BaseException:
        (folder / f'error-{rank}').write_text(f'rank {rank} of {world_size}: {traceback.format_exc()}')
        raise
    if port is None:
        torch.distributed.destroy_process_group()
