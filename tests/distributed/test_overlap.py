"""Exchanges of context parallelism run while attention of another KV head is computed, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.processes import run_processes

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from native_sparse_attention.distributed import context_attention, context_parallel_nsa, sequence
from tests.distributed.test_context_parallel import mean_of_block

HEADS = 3


class Recorder:
    """Record when exchanges begin and end, and when attention runs forward and backward, in the order of a rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.counts: dict[str, int] = {}
        for module, function, name in (
            (sequence, '_all_gather', 'gather'),
            (sequence, '_reduce_scatter', 'scatter'),
            (dist, 'all_to_all_single', 'exchange'),
        ):
            patch.setattr(module, function, self.exchange(name, getattr(module, function)))
        patch.setattr(context_attention, 'nsa', self.attention(context_attention.nsa))

    def exchange(self, name: str, function: Any) -> Any:
        def begin(*args: Any, **settings: Any) -> Any:
            number = self.counts[name] = self.counts.get(name, -1) + 1
            self.events.append(f'begin {name} {number}')
            return Work(function(*args, **settings), self.events, f'end {name} {number}')

        return begin

    def attention(self, nsa: Any) -> Any:
        def attend(q: Tensor, *args: Any, **settings: Any) -> Tensor:
            out = nsa(q, *args, **settings)
            if q.shape[1] == 0:  # the check of the arguments
                return out
            self.events.append('attend')
            out.register_hook(lambda _: self.events.append('attend backward'))
            return out

        return attend


class Work:
    def __init__(self, work: Any, events: list[str], name: str) -> None:
        self.work, self.events, self.name = work, events, name

    def wait(self) -> None:
        self.events.append(self.name)
        self.work.wait()


def record() -> None:
    settings: dict[str, Any] = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
    settings |= {'num_selected': 3, 'window_size': (7, 0), 'backend': 'eager', 'group': dist.group.WORLD}
    q = torch.randn(1, 16, 2 * HEADS, 8, requires_grad=True)
    k, v = (torch.randn(1, 16, HEADS, 8, requires_grad=True) for _ in range(2))
    gates = torch.rand(1, 16, 2 * HEADS, 3)
    with pytest.MonkeyPatch.context() as patch:
        events = (recorder := Recorder(patch)).events
        out = context_parallel_nsa(q, k, v, gates, compress_k=mean_of_block, compress_v=mean_of_block, **settings)
        forward = [event for event in events if 'exchange' not in event]
        moved = [event for event in events if 'exchange' in event]
        events.clear()
        recorder.counts.clear()
        out.sum().backward()
    # Gather 0 is that of compressed keys and values, gather h + 1 that of KV head h. A rank has two ranges of tokens.
    assert forward == [
        *('begin gather 0', 'end gather 0', 'begin gather 1', 'end gather 1', 'begin gather 2', 'attend', 'attend'),
        *('end gather 2', 'begin gather 3', 'attend', 'attend', 'end gather 3', 'attend', 'attend'),
    ]
    # Exchanges 0 to 3 are those of keys and values, then two for queries and gates of each head.
    per_head = [event.split()[0] for event in moved if 4 <= int(event.split()[-1]) < 4 + 2 * HEADS]
    assert per_head == (['begin'] * 2 + ['end'] * 2) * HEADS
    backward = [event for event in events if 'exchange' not in event]
    assert backward == [
        *('attend backward', 'attend backward', 'begin scatter 0', 'attend backward', 'attend backward'),
        *('end scatter 0', 'begin scatter 1', 'attend backward', 'attend backward'),
        *('end scatter 1', 'begin scatter 2', 'end scatter 2', 'begin scatter 3', 'end scatter 3'),
    ]


def test_overlap(tmp_path: Path) -> None:
    run_processes(record, 2, tmp_path)
