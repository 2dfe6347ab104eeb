"""Problems for the ops, drawn by hypothesis, and the comparison of an op with its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.definition.definition import count_compressed_blocks


@dataclass(frozen=True)
class Extents:
    """Queries and keys of a call, `[B, T]` and `[B, S]`, and the arguments that place the queries among the keys."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    where: dict[str, Any]
    key_counts: list[int] = field(repr=False)

    @property
    def packed(self) -> bool:
        return 'cu_seqlens' in self.where

    def num_compressed(self, block_size: int, stride: int) -> int:
        counts = [count_compressed_blocks(count, block_size, stride) for count in self.key_counts]
        return sum(counts) if self.packed else max(counts, default=0)

    def poison_keys(self, *tensors: Tensor) -> None:
        """Set every key `[B, S, ...]` that belongs to no sequence to NaN."""
        for tensor in tensors:
            self._poison(tensor, self.key_counts)

    def poison_blocks(self, block_size: int, stride: int, *tensors: Tensor) -> None:
        """Set every compressed block `[B, C, ...]` that belongs to no sequence to NaN."""
        for tensor in tensors:
            self._poison(tensor, [count_compressed_blocks(count, block_size, stride) for count in self.key_counts])

    def _poison(self, tensor: Tensor, counts: list[int]) -> None:
        if self.packed:
            tensor[:, sum(counts) :] = torch.nan
        else:
            for row, count in enumerate(counts):
                tensor[row, count:] = torch.nan


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def whole(seqlen: int, batch: int = 1) -> Extents:
    """Return extents with as many queries as keys."""
    return Extents(batch, seqlen, seqlen, {}, [seqlen] * batch)


def packed(lengths: list[int], uncovered: int = 0) -> Extents:
    total = sum(lengths) + uncovered
    return Extents(1, total, total, {'cu_seqlens': cumulative(lengths)}, lengths)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def row_integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


KINDS = (
    'whole',
    'keys end',
    'offset',
    'row offsets',
    'lengths',
    'lengths, offset',
    'lengths, row offsets',
    'packed',
    'packed, other keys',
)


@st.composite
def drawn_extents(draw: st.DrawFn, max_seqlen: int = 24) -> Extents:
    """Draw extents of every kind: offsets, lengths per row, packed sequences with empty ones among them."""
    kind = draw(st.sampled_from(KINDS))
    if kind.startswith('packed'):
        return draw(_drawn_packed(max_seqlen, kind))
    batch, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, max_seqlen))
    if kind == 'whole':
        return whole(seqlen_q, batch)
    seqlen_k = draw(st.integers(0, max_seqlen))
    offset = drawn_offset(max_seqlen)
    where: dict[str, Any] = {}
    key_counts = [seqlen_k] * batch
    if kind.startswith('lengths'):
        key_counts = draw(st.lists(st.integers(0, seqlen_k), min_size=batch, max_size=batch))
        where['seqlens_k'] = row_integers(key_counts)
    if kind.endswith('row offsets'):
        where['q_offset'] = row_integers(draw(st.lists(offset, min_size=batch, max_size=batch)))
    elif kind.endswith('offset'):
        where['q_offset'] = draw(offset)
    return Extents(batch, seqlen_q, seqlen_k, where, key_counts)


@st.composite
def _drawn_packed(draw: st.DrawFn, max_seqlen: int, kind: str) -> Extents:
    lengths = st.lists(st.integers(0, max_seqlen // 2), min_size=1, max_size=4)
    key_counts = draw(lengths)
    uncovered = st.integers(0, 2)
    if kind == 'packed':
        extents = packed(key_counts, draw(uncovered))
    else:
        size = len(key_counts)
        query_counts = draw(st.lists(st.integers(0, max_seqlen // 2), min_size=size, max_size=size))
        where = {'cu_seqlens': cumulative(query_counts), 'cu_seqlens_k': cumulative(key_counts)}
        seqlen_q, seqlen_k = sum(query_counts) + draw(uncovered), sum(key_counts) + draw(uncovered)
        extents = Extents(1, seqlen_q, seqlen_k, where, key_counts)
    offsets = draw(st.sampled_from(['default', 'one', 'per sequence']))
    if offsets == 'one':
        extents.where['q_offset'] = draw(drawn_offset(max_seqlen))
    elif offsets == 'per sequence':
        size = len(key_counts)
        drawn = draw(st.lists(drawn_offset(max_seqlen), min_size=size, max_size=size))
        extents.where['q_offset'] = row_integers(drawn)
    return extents


def drawn_offset(max_seqlen: int) -> st.SearchStrategy[int]:
    """Draw queries before, among and behind the keys."""
    return st.integers(-max_seqlen, 2 * max_seqlen)


@st.composite
def drawn_heads(draw: st.DrawFn) -> Heads:
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    return Heads(heads, kv_heads, draw(st.integers(1, 5)), draw(st.integers(1, 5)))


@st.composite
def drawn_block_sizes(draw: st.DrawFn, largest: int = 8) -> tuple[int, int, int]:
    """Draw (l, d, l') with 1 <= d <= l and l' a multiple of d."""
    block_size = draw(st.integers(1, largest))
    stride = draw(st.integers(1, block_size))
    return block_size, stride, stride * draw(st.integers(1, max(1, largest // stride)))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make_qkv(extents: Extents, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q = normal(extents.batch, extents.seqlen_q, heads.heads, heads.head_dim)
    k = normal(extents.batch, extents.seqlen_k, heads.kv_heads, heads.head_dim)
    v = normal(extents.batch, extents.seqlen_k, heads.kv_heads, heads.value_dim)
    extents.poison_keys(k, v)
    return q, k, v


def make_compressed(
    extents: Extents, heads: Heads, block_size: int, stride: int, more: int = 0
) -> tuple[Tensor, Tensor]:
    num_compressed = extents.num_compressed(block_size, stride) + more
    k_cmp = normal(extents.batch, num_compressed, heads.kv_heads, heads.head_dim)
    v_cmp = normal(extents.batch, num_compressed, heads.kv_heads, heads.value_dim)
    extents.poison_blocks(block_size, stride, k_cmp, v_cmp)
    return k_cmp, v_cmp


def make_mem_kv(heads: Heads, pairs: int) -> tuple[Tensor, Tensor]:
    return normal(heads.kv_heads, pairs, heads.head_dim), normal(heads.kv_heads, pairs, heads.value_dim)


Op = Callable[..., Tensor | tuple[Tensor, ...]]


def assert_agree(op: Op, definition: Op, *inputs: Tensor, atol: float = 1e-9) -> None:
    """Assert that outputs and gradients of every floating input of two functions agree to `atol` in float64."""
    results = [_outputs_and_gradients(function, inputs) for function in (op, definition)]
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=atol, atol=atol, check_dtype=True)


def _outputs_and_gradients(function: Op, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(0)
    differentiable = [t for t in outputs if t.requires_grad]
    grads = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in differentiable]
    if differentiable:
        torch.autograd.backward(differentiable, grads)
    return outputs + [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves if t.is_floating_point()]
