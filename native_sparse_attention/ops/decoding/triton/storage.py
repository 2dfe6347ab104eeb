"""Token storage of the decoding kernels: rows of different lengths, in one tensor or in pages."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from native_sparse_attention.ops._triton.rotation import NEIGHBOURS, pair_columns


class Strided(NamedTuple):
    """A tensor, or None, and its strides; the last dimension is contiguous."""

    ptr: Tensor | None
    strides: tuple[int, ...]


class Ring(NamedTuple):
    """Ring buffer of the last `size` tokens of every row `[B, size, H, D]`, position p at index p
    modulo size; or None.
    """

    ptr: Tensor | None
    strides: tuple[int, ...]
    size: int


class Pages(NamedTuple):
    """Block table: token p of row b lies in page table[b, p // size] of num_pages; without a table (None) in row b of
    its tensor. stride: of the table's rows.
    """

    table: Tensor | None
    stride: int
    size: int
    num_pages: int


class Lengths(NamedTuple):
    """ptr: int32 `[B]`, tokens in the cache by row. capacity: the most tokens that a row holds."""

    ptr: Tensor
    capacity: int


class Step(NamedTuple):
    """num_tokens: T, new tokens per row. num_new: K, compressed blocks that they may complete. kv_heads: H. A
    compile-time constant.
    """

    num_tokens: int
    num_new: int
    kv_heads: int


class BlockSizes(NamedTuple):
    """l, d and l' in tokens. A compile-time constant."""

    block_size: int
    stride: int
    selection_block_size: int


class HeadSizes(NamedTuple):
    """group: query heads of a KV head. head_dim, value_dim: D and DV. block_d, block_dv: both rounded up to tiles. A
    compile-time constant.
    """

    group: int
    head_dim: int
    value_dim: int
    block_d: int
    block_dv: int


def strided(tensor: Tensor | None) -> Strided:
    return Strided(None, (0,) * 4) if tensor is None else Strided(tensor, tensor.stride())


def ring_of(tensor: Tensor | None) -> Ring:
    return Ring(None, (0,) * 4, 1) if tensor is None else Ring(tensor, tensor.stride(), tensor.shape[1])


@triton.jit
def wait_for_launch_before(OVERLAPS: tl.constexpr):
    """Wait until the launch before has written everything. With OVERLAPS programs start while it still runs.

    Every program of a launch must wait, so that the launch after it knows that all launches before are done. Before the
    wait a program may only read data that no launch of the step writes: lengths, which the last launch updates, and
    compressed blocks that are not new.
    """
    if OVERLAPS:
        gdc_wait()


@triton.jit
def let_next_launch_begin(OVERLAPS: tl.constexpr):
    """Allow programs of the next launch to start once all programs of this one have reached this call."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def load_lengths(lengths, row, step: tl.constexpr):
    """Return the tokens of a row before and after the step; tokens beyond the capacity are dropped."""
    old = tl.minimum(tl.maximum(tl.load(lengths.ptr + row), 0), lengths.capacity)
    return old, tl.minimum(old + step.num_tokens, lengths.capacity)


@triton.jit
def locate(tokens, exists, row, pages, strides):
    """Return int64 offsets of tokens of a row, and whether they exist; tokens of missing pages do not."""
    if pages.table is None:
        offsets = row.to(tl.int64) * strides[0] + tokens.to(tl.int64) * strides[1]
    else:
        entry = pages.table + row.to(tl.int64) * pages.stride + tokens // pages.size
        page = tl.load(entry, mask=exists, other=-1)
        exists = exists & (page >= 0) & (page < pages.num_pages)
        offsets = page.to(tl.int64) * strides[0] + (tokens % pages.size).to(tl.int64) * strides[1]
    return offsets, exists


@triton.jit
def load_at(ptr, offsets, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr = NEIGHBOURS):
    """Load rows of SIZE elements at offsets, padded to BLOCK with zeros; masked rows are 0. HALF: as in
    `pair_columns`.
    """
    columns = pair_columns(tl.arange(0, BLOCK), HALF)
    pointers = ptr + offsets[:, None] + columns[None, :]
    if SIZE == BLOCK:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    return tl.load(pointers, mask=mask[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def store_at(ptr, offsets, values, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr = NEIGHBOURS):
    """Store rows of SIZE elements, as `load_at` loads them."""
    columns = pair_columns(tl.arange(0, BLOCK), HALF)
    pointers = ptr + offsets[:, None] + columns[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (columns < SIZE)[None, :])
