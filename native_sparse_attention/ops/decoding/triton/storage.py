"""Where the kernels of decoding find tokens: rows of different lengths, in a tensor of their own or in pages."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Strided(NamedTuple):
    """A tensor, or none, and its strides; the last dimension is contiguous."""

    ptr: Tensor | None
    strides: tuple[int, ...]


class Ring(NamedTuple):
    """The last `size` tokens of every row `[B, size, H, D]`, position p in place p modulo size; or none."""

    ptr: Tensor | None
    strides: tuple[int, ...]
    size: int


class Pages(NamedTuple):
    """Token p of row b lies in page table[b, p // size] of num_pages; without a table in row b of its tensor. stride:
    from a row of the table to the next.
    """

    table: Tensor | None
    stride: int
    size: int
    num_pages: int


class Step(NamedTuple):
    """num_tokens: T, the new tokens of every row. num_new: K, the compressed blocks that they may complete. kv_heads:
    H. A constant of kernels.
    """

    num_tokens: int
    num_new: int
    kv_heads: int


class BlockSizes(NamedTuple):
    """l, d and l' in tokens. A constant of kernels."""

    block_size: int
    stride: int
    selection_block_size: int


def strided(tensor: Tensor | None) -> Strided:
    return Strided(None, (0,) * 4) if tensor is None else Strided(tensor, tensor.stride())


def ring_of(tensor: Tensor | None) -> Ring:
    return Ring(None, (0,) * 4, 1) if tensor is None else Ring(tensor, tensor.stride(), tensor.shape[1])


@triton.jit
def wait_for_launch_before(OVERLAPS: tl.constexpr):
    """With OVERLAPS programs start while the launch before still runs, and wait here until it has written everything.

    Every program of a launch must, or else the launch after it would not know that all before it are done. Ahead of it
    only what no launch of the step writes may be read: lengths, which the last one sets, and compressed blocks that
    are not new.
    """
    if OVERLAPS:
        gdc_wait()


@triton.jit
def let_next_launch_begin(OVERLAPS: tl.constexpr):
    """Programs of the next launch may start where there is room, once all of this one have come here."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def load_lengths(lengths_ptr, row, capacity, step: tl.constexpr):
    """Tokens of a row before the step and after it: what does not fit is dropped."""
    old = tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), capacity)
    return old, tl.minimum(old + step.num_tokens, capacity)


@triton.jit
def locate(tokens, exists, row, pages, strides):
    """Offsets of tokens of a row, int64, and whether they exist: not in a page that does not."""
    if pages.table is None:
        offsets = row.to(tl.int64) * strides[0] + tokens.to(tl.int64) * strides[1]
    else:
        entry = pages.table + row.to(tl.int64) * pages.stride + tokens // pages.size
        page = tl.load(entry, mask=exists, other=-1)
        exists = exists & (page >= 0) & (page < pages.num_pages)
        offsets = page.to(tl.int64) * strides[0] + (tokens % pages.size).to(tl.int64) * strides[1]
    return offsets, exists


@triton.jit
def load_at(ptr, offsets, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of SIZE elements at offsets, padded to BLOCK with zeros; 0 in rows that the mask leaves out."""
    columns = tl.arange(0, BLOCK)
    pointers = ptr + offsets[:, None] + columns[None, :]
    if SIZE == BLOCK:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    return tl.load(pointers, mask=mask[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def store_at(ptr, offsets, values, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    pointers = ptr + offsets[:, None] + columns[None, :]
    tl.store(pointers, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (columns < SIZE)[None, :])
