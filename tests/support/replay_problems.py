"""Calls of `nsa`, and their results with and without replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.autograd import replay
from native_sparse_attention.core.geometry import num_compressed_blocks
from tests.support.gate_problems import NUM_GATES

SIZES: dict[str, Any] = {
    'compress_block_size': 8,
    'compress_stride': 4,
    'selection_block_size': 16,
    'num_selected': 3,
    'window_size': (9, 0),
}


class Problem(NamedTuple):
    """A call of `nsa`. lengths: of packed sequences. merged: None, 'gate', 'output gate' or 'scores'."""

    merged: str | None = None
    batch: int = 1
    seqlen: int = 28
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    padded: bool = False
    memory: bool = False
    features: bool = False
    sizes: dict[str, Any] = SIZES
    settings: dict[str, Any] = {}  # noqa: RUF012
    needs: tuple[str, ...] = ('q', 'k', 'v', 'k_cmp', 'v_cmp', 'gates', 'mem_k', 'mem_v', 'sinks', 'sinks_cmp')

    def make(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Return tensors by name, with gradients required of `needs`."""
        generator = torch.Generator().manual_seed(seed)
        block, stride = self.sizes['compress_block_size'], self.sizes['compress_stride']
        lengths = self.lengths or (self.seqlen,)
        num_blocks = sum(num_compressed_blocks(length, block, stride) for length in lengths)
        seqlen = sum(lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, self.dtype)

        tensors = {'q': draw(self.batch, seqlen, self.heads, self.head_dim)}
        tensors |= {name: draw(self.batch, seqlen, self.kv_heads, self.head_dim) for name in ('k', 'v')}
        tensors['k_cmp'] = draw(self.batch, num_blocks, self.kv_heads, self.head_dim)
        if self.merged != 'scores':
            tensors['v_cmp'] = draw(self.batch, num_blocks, self.kv_heads, self.head_dim)
            tensors['gates'] = draw(self.batch, seqlen, self.heads, NUM_GATES[self.merged or '']).sigmoid()
        if self.memory:
            tensors['mem_k'] = draw(self.kv_heads, 2, self.head_dim)
            if self.merged != 'scores':
                tensors['mem_v'] = draw(self.kv_heads, 2, self.head_dim)
        if self.features:
            tensors['sinks'] = draw(self.heads)
            if self.merged != 'scores':
                tensors['sinks_cmp'] = draw(self.heads)
        tensors = {name: t.requires_grad_(name in self.needs) for name, t in tensors.items()}
        if self.lengths:
            tensors['cu_seqlens'] = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        if self.padded:
            tensors['seqlens_k'] = torch.tensor([seqlen - 5 * row for row in range(self.batch)], device=device).int()
        return tensors

    def call(self, tensors: dict[str, Tensor]) -> Tensor:
        given: dict[str, Any] = {name: tensors.get(name) for name in ('q', 'k', 'v', 'k_cmp', 'v_cmp', 'gates')}
        others = {name: t for name, t in tensors.items() if name not in given and not name.startswith('mem')}
        if self.memory:
            others['mem_kv'] = (tensors['mem_k'], tensors.get('mem_v'))  # type: ignore[assignment]
        settings = {**self.sizes, 'merge_window': self.merged is not None, 'backend': 'triton', **self.settings}
        if self.features:
            settings['softcap'] = 5.0
        if self.padded:
            settings['q_offset'] = 0
        return nsa(**given, **others, **settings)

    def results(self, tensors: dict[str, Tensor], dout: Tensor | None = None) -> list[Tensor | None]:
        """Return the output and the gradients of all tensors."""
        out = self.call(tensors)
        if not out.requires_grad:
            return [out]
        if dout is None:
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
        leaves = [t for t in tensors.values() if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout, allow_unused=True)]


# Few launches, where it does not matter which.
SMALL = Problem(seqlen=16, sizes={**SIZES, 'num_selected': 0})


@contextmanager
def without_replay() -> Iterator[None]:
    with mock.patch.object(replay, 'DEVICE_TYPES', ()):
        yield


def programs() -> list[Any]:
    """Return the programs recorded so far."""
    return [program for program in replay._calls.values() if program is not None and type(program) is not int]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [t is None for t in found] == [t is None for t in expected]
    for index, (t, other) in enumerate(zip(found, expected, strict=True)):
        if t is not None and other is not None:
            assert (t.shape, t.stride(), t.dtype) == (other.shape, other.stride(), other.dtype), index
            assert torch.equal(t.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), index
