"""`run_processes`: the first error ends all ranks and is shown; so is a rank that hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes


def fail_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError('a fault of rank 1')
    dist.all_reduce(torch.zeros(1))


def hang_on_one_rank() -> None:
    time.sleep(60 * dist.get_rank())


@pytest.mark.full
def test_an_error_is_that_of_its_rank(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r'rank 1 of 2: [\s\S]*ValueError: a fault of rank 1'):
        run_processes(fail_on_one_rank, 2, tmp_path)


@pytest.mark.full
def test_time_limit(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match='2 processes take longer than 2 s'):
        run_processes(hang_on_one_rank, 2, tmp_path, time_limit=2)
    assert time.monotonic() - start < 40
