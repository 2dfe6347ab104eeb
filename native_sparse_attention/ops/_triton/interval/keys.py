"""Launches for the gradients of keys, values and memory pairs of interval attention."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.interval import settings
from native_sparse_attention.ops._triton.interval.key_gradients import dkv_kernel
from native_sparse_attention.ops._triton.interval.modifiers import KernelModifiers
from native_sparse_attention.ops._triton.interval.tiles import Interval, Tile
from native_sparse_attention.ops._triton.launch import (
    Settings,
    describe_tiles,
    exceeds_int32,
    head_block,
    launch,
    settings_of,
)
from native_sparse_attention.ops._triton.varlen import SequenceLayout, num_tiles

# Programs that fill a GPU; with fewer, the heads of a group are summed in several parts.
FULL_GRID = 256
# Bytes of the partial sums.
WORKSPACE = 2**29
# Queries per program in the gradient of the memory pairs.
SPLIT = 1024
# q, k, v, dout, and the row statistics of `dq_kernel`
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def differentiate_keys(
    tensors: Tensors,
    layout: SequenceLayout,
    interval: Interval,
    scale: float,
    kernel_modifiers: KernelModifiers,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dk and dv `[B, C, H, D and DV]` in grad_dtype, dmem_k and dmem_v `[H, M, D and DV]`.

    Partial sums are computed for some batch rows at a time, so that they fit the workspace. The number of rows at a
    time does not change how a row is summed.
    """
    q, k, v, *_ = tensors
    batch, _, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    num_memory = interval.num_memory or 0
    # Memory precedes the keys of every row, except in packed sequences. Its partial sums are float32, so all are.
    bytes_of_key = kv_heads * 4 * (head_dim + value_dim)
    fits = (num_memory + interval.num_keys) * bytes_of_key <= WORKSPACE
    joined = num_memory if fits and layout.cu_seqlens is None else 0
    num_keys = joined + interval.num_keys
    block_n = _settings_of_keys(interval, q, v).block_n
    tiles_of_row = num_tiles(layout, num_keys, block_n) // max(batch, 1)
    bytes_of_row = num_keys * bytes_of_key
    parts = _count_parts(heads // kv_heads, tiles_of_row * kv_heads, bytes_of_row)
    # The kernel does not write keys that no sequence covers.
    allocate = torch.empty if layout.cu_seqlens is None else torch.zeros

    def add_queries(rows: range, dtype: torch.dtype) -> list[Tensor]:
        grads = [allocate((parts, len(rows), num_keys, *t.shape[2:]), dtype=dtype, device=t.device) for t in (k, v)]
        some = _rows_of(rows, tensors, layout, kernel_modifiers)
        _launch_dkv(tiles_of_row * len(rows), grads, *some, interval, scale, is_joined=joined > 0)
        return grads

    if parts == 1 and not joined:
        dk, dv = (grad[0] for grad in add_queries(range(batch), grad_dtype))
        return dk, dv, *_differentiate_memory(tensors, layout, interval, scale, kernel_modifiers)
    dk, dv = (t.new_empty(batch, interval.num_keys, *t.shape[2:], dtype=grad_dtype) for t in (k, v))
    of_memory = []
    for rows in _split_rows(batch, parts * bytes_of_row):
        sums = add_queries(rows, torch.float32)
        for grad, parts_of_grad in zip((dk, dv), sums, strict=True):
            _add_parts(parts_of_grad[:, :, joined:], grad[rows.start : rows.stop])
        if joined:
            of_memory.append([parts_of_grad[:, :, :joined].sum((0, 1)) for parts_of_grad in sums])
    if of_memory:
        return dk, dv, *_add_memory(of_memory, k.dtype)
    return dk, dv, *_differentiate_memory(tensors, layout, interval, scale, kernel_modifiers)


def _differentiate_memory(
    tensors: Tensors, layout: SequenceLayout, interval: Interval, scale: float, kernel_modifiers: KernelModifiers
) -> tuple[Tensor, Tensor]:
    """Return dmem_k and dmem_v where memory is computed apart from the other keys, as sums over query splits of every
    row.
    """
    q, k, v, *_ = tensors
    batch, seqlen, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    num_memory = interval.num_memory or 0
    if num_memory == 0:
        return k.new_empty(kv_heads, 0, head_dim), k.new_empty(kv_heads, 0, value_dim)
    block_n = _settings_of_keys(interval, q, v).block_n
    bytes_of_split = num_memory * heads * 4 * (head_dim + value_dim)
    split = SPLIT
    while split < seqlen and -(-seqlen // split) * bytes_of_split > WORKSPACE:
        split *= 2
    splits = -(-seqlen // split)
    tiles_of_row = -(-num_memory // block_n) * splits
    parts = heads // kv_heads
    if batch == 0:
        return k.new_zeros(kv_heads, num_memory, head_dim), k.new_zeros(kv_heads, num_memory, value_dim)
    sums = []
    for rows in _split_rows(batch, splits * bytes_of_split):
        shape = (parts, len(rows) * splits, num_memory)
        grads = [torch.empty((*shape, *t.shape[2:]), dtype=torch.float32, device=t.device) for t in (k, v)]
        some = _rows_of(rows, tensors, layout, kernel_modifiers)
        _launch_dkv(tiles_of_row * len(rows), grads, *some, interval, scale, split=split)
        sums.append([grad.sum((0, 1)) for grad in grads])
    return _add_memory(sums, k.dtype)


def _add_memory(sums: list[list[Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sums of float32 partial sums `[M, H, D and DV]`, as `[H, M, D and DV]`."""
    totals = (reduce(torch.add, grads) for grads in zip(*sums, strict=True))
    dmem_k, dmem_v = (total.transpose(0, 1).to(dtype).contiguous() for total in totals)
    return dmem_k, dmem_v


def _add_parts(parts: Tensor, out: Tensor) -> None:
    """Store the sum of float32 partial sums `[P, ...]` into out, rounded once."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # rounds into out without a temporary
    else:
        out.copy_(parts.sum(0))


def _launch_dkv(
    tiles: int,
    grads: list[Tensor],
    tensors: Tensors,
    layout: SequenceLayout,
    kernel_modifiers: KernelModifiers,
    interval: Interval,
    scale: float,
    *,
    is_joined: bool = False,
    split: int = 0,
) -> None:
    """grads: `[parts, ...]`, with those of memory if is_joined; of memory alone if `split` is not 0, which is the
    number of queries per part.
    """
    q, k, v, dout, row_stats = tensors
    kv_heads, parts = k.shape[2], len(grads[0])
    block_m, block_n, num_warps, num_stages = _settings_of_keys(interval, q, v)
    launch(
        dkv_kernel,
        (tiles * kv_heads * parts,),
        *(q, k, v, row_stats, dout, *grads, *_describe_queries(q, dout, interval, kernel_modifiers, block_m)),
        *(q.stride(), k.stride(), v.stride(), dout.stride(), *(t.stride() for t in grads)),
        *(layout, interval, scale, kernel_modifiers, kv_heads, parts),
        NUM_STATS=row_stats.shape[2],
        JOINED=is_joined,
        SPLIT=split,
        HEADS=q.shape[2] // kv_heads // parts,
        tile=make_tile(q, v, block_m, block_n, q, dout),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )


def _describe_queries(
    q: Tensor, dout: Tensor, interval: Interval, kernel_modifiers: KernelModifiers, block_m: int
) -> tuple[Any, Any]:
    """Return tensor descriptors of query tiles for the windows of half types, where few tiles are read and they come
    from L2.
    """
    # A non-finite element outside the mask shows in dk, except where dropout drops all of its weights.
    if interval.left is None or q.element_size() == 4 or kernel_modifiers.seed is not None:
        return None, None
    return describe_tiles(q, block_m, head_block(q.shape[3])), describe_tiles(dout, block_m, head_block(dout.shape[3]))


def _settings_of_keys(interval: Interval, q: Tensor, v: Tensor) -> Settings:
    return settings_of(settings.DKV if interval.left is None else settings.DKV_WINDOW, q, v)


def _split_rows(batch: int, bytes_of_row: int) -> list[range]:
    """Split the batch rows into groups whose partial sums fit the workspace, or which are one row."""
    size = max(1, WORKSPACE // max(1, bytes_of_row))
    return [range(first, min(first + size, batch)) for first in range(0, batch, size)]


def _rows_of(
    rows: range, tensors: Tensors, layout: SequenceLayout, kernel_modifiers: KernelModifiers
) -> tuple[Tensors, SequenceLayout, KernelModifiers]:
    """Return the inputs of some batch rows."""
    if len(rows) == len(tensors[0]):
        return tensors, layout, kernel_modifiers
    q, k, v, dout, row_stats = (t[rows.start : rows.stop] for t in tensors)
    kernel_modifiers = (
        kernel_modifiers if kernel_modifiers.first_row is None else kernel_modifiers._replace(first_row=rows.start)
    )
    return (q, k, v, dout, row_stats), _layout_of(layout, rows), kernel_modifiers


def _layout_of(layout: SequenceLayout, rows: range) -> SequenceLayout:
    """Return the layout of some batch rows; packed sequences are one row."""
    if layout.cu_seqlens is not None or len(rows) == layout.num_sequences:
        return layout
    q_offsets, seqlens_k = (t if t is None else t[rows.start : rows.stop] for t in (layout.q_offsets, layout.seqlens_k))
    return layout._replace(num_sequences=len(rows), q_offsets=q_offsets, seqlens_k=seqlens_k)


def _count_parts(group: int, programs: int, bytes_of_part: int) -> int:
    """Return the number of partial sums over the heads of a group: a divisor of `group`, larger if there are few
    programs.

    programs, bytes_of_part: of one batch row, so that a row's gradient does not depend on the rest of the batch.
    """
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    within = [parts for parts in divisors if parts == 1 or parts * bytes_of_part <= WORKSPACE]
    return next((parts for parts in within if parts * programs >= FULL_GRID), within[-1])


def make_tile(q: Tensor, v: Tensor, block_m: int, block_n: int, *loaded: Tensor) -> Tile:
    """Return the tile of a launch. loaded: the tensors whose rows are loaded by offsets."""
    head_dim, value_dim = q.shape[3], v.shape[3]
    blocks = (block_m, block_n, head_block(head_dim), head_block(value_dim))
    return Tile(head_dim, value_dim, *blocks, exceeds_int32(*loaded))
