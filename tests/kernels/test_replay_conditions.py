"""Conditions of a call and of its backward pass that a recorded program does not contain, on CPUs as `test_replay`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from native_sparse_attention.ops._triton import launch as launches
from native_sparse_attention.ops._triton.support import is_interpreted
from tests.support.replay_kernels import play
from tests.support.replay_problems import SIZES, Problem, without_replay

pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels'),
    pytest.mark.plain_memory(watched=False),
]

CPU = torch.device('cpu')
SMALL = Problem(seqlen=16, sizes={**SIZES, 'num_selected': 0})


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from play(monkeypatch)


def test_another_thread_may_end_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recorder goes while this thread reports a launch; the recorders after it are called."""
    seen: list[Any] = []

    def ends(*_: Any) -> None:
        launches.recorders.remove(ends)

    recorders = [ends, lambda known, grid, args: seen.append(known)]
    monkeypatch.setattr(launches, 'recorders', [recorders[1]])
    with without_replay():
        SMALL.results(SMALL.make(CPU))
        expected = len(seen)
        launches.recorders[:] = recorders
        SMALL.results(SMALL.make(CPU))
    assert len(seen) == 2 * expected
