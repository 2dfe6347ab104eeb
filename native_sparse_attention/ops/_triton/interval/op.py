"""Interval attention as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.geometry import Sequences
from native_sparse_attention.ops._triton.interval import settings
from native_sparse_attention.ops._triton.interval.backward import dkv_kernel, dq_kernel
from native_sparse_attention.ops._triton.interval.forward import forward_kernel
from native_sparse_attention.ops._triton.interval.tiles import Interval
from native_sparse_attention.ops._triton.launch import (
    Settings,
    describe_tiles,
    head_block,
    is_wide,
    launch,
    settings_of,
)
from native_sparse_attention.ops._triton.placement import (
    Placement,
    flatten,
    last_dim_contiguous,
    make_placement,
    num_tiles,
    unflatten,
)
from native_sparse_attention.ops._triton.registered import (
    OptionalInt,
    OptionalTensor,
    refuse_double_backward,
    register_derivative,
    save_inputs,
    saved_inputs,
)

# Programs of the kernel for k and v that fill a GPU; where there are fewer, the heads of a group are added in parts.
FULL_GRID = 1024
# Bytes that those parts may take.
WORKSPACE = 2**29
# Queries whose part of the gradients of memory is added by one program.
SPLIT = 1024


def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sequences: Sequences,
    left: int | None,
    reach: int | None,
    scale: float,
    block_size: int = 1,
    stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attention of the query at position t over the keys from t - left on with key * stride + reach <= t.

    q: `[B, T, HQ, D]`; k, v: `[B, C, H, D and DV]`, the compressed blocks of block_size and stride (1 and 1: the
    tokens); mem_kv: pairs that every query reads, `[H, M, D and DV]`. left, reach: None is unbounded. Returns the
    output `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`.
    """
    mem_k, mem_v = (None, None) if mem_kv is None else mem_kv
    return _forward(q, k, v, mem_k, mem_v, *flatten(sequences), left, reach, block_size, stride, scale)


@torch.library.custom_op('native_sparse_attention::interval_attention', mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: OptionalTensor,
    mem_v: OptionalTensor,
    seqlen_k: int,
    q_offset: OptionalInt,
    q_offsets: OptionalTensor,
    seqlens_k: OptionalTensor,
    cu_seqlens: OptionalTensor,
    cu_seqlens_k: OptionalTensor,
    left: OptionalInt,
    reach: OptionalInt,
    block_size: int,
    stride: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    q, k, v, interval, place = _prepare(
        q, k, v, mem_k, mem_v, (seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k),
        left, reach, block_size, stride,
    )  # fmt: skip
    batch, seqlen, heads, head_dim = q.shape
    value_dim = v.shape[3]
    out = q.new_empty(batch, seqlen, heads, value_dim)
    lse = q.new_empty(batch, heads, seqlen, dtype=torch.float32)
    block_m, block_n, num_warps, num_stages = settings_of(settings.FORWARD, q, v)
    packed = _count_packed(heads // k.shape[2], block_m)
    launch(
        forward_kernel,
        (num_tiles(place, seqlen, block_m // packed), heads // packed),
        *(q, k, v, out, lse, *_describe_keys(k, v, place, interval, block_n)),
        *(q.stride(), k.stride(), v.stride(), out.stride()),
        *(place, interval, scale),
        NEGATIVE=scale < 0,
        GROUP=heads // k.shape[2],
        HEADS=packed,
        **_tile(head_dim, value_dim, block_m, block_n),
        WIDE=is_wide(k, v),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    return out, lse


@torch.library.custom_op('native_sparse_attention::interval_attention_backward', mutates_args=())
def _backward(
    dout: Tensor,
    dlse: OptionalTensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: OptionalTensor,
    mem_v: OptionalTensor,
    seqlen_k: int,
    q_offset: OptionalInt,
    q_offsets: OptionalTensor,
    seqlens_k: OptionalTensor,
    cu_seqlens: OptionalTensor,
    cu_seqlens_k: OptionalTensor,
    left: OptionalInt,
    reach: OptionalInt,
    block_size: int,
    stride: int,
    scale: float,
    needs_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, mem_k and mem_v; where needs_dkv is not set, all but the first are empty."""
    q, k, v, interval, place = _prepare(
        q, k, v, mem_k, mem_v, (seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k),
        left, reach, block_size, stride,
    )  # fmt: skip
    dout, out = last_dim_contiguous(dout, out)
    seqlen, heads, head_dim = q.shape[1:]
    kv_heads, value_dim = v.shape[2:]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    delta = torch.empty_like(lse)
    block_m, block_n, num_warps, num_stages = settings_of(settings.DQ, q, v)
    packed = _count_packed(heads // kv_heads, block_m)
    launch(
        dq_kernel,
        (num_tiles(place, seqlen, block_m // packed), heads // packed),
        *(q, k, v, out, lse, dout, dlse, dq, delta, *_describe_keys(k, v, place, interval, block_n)),
        *(q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()),
        *(None if dlse is None else dlse.stride(), dq.stride()),
        *(place, interval, scale),
        GROUP=heads // kv_heads,
        HEADS=packed,
        **_tile(head_dim, value_dim, block_m, block_n),
        WIDE=is_wide(k, v),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    if not needs_dkv:
        return dq, q.new_empty(0), q.new_empty(0), q.new_empty(0), q.new_empty(0)

    tensors = (q, k, v, lse, delta, dout)
    dk, dv = _differentiate_keys(tensors, place, interval, scale)
    dmem_k, dmem_v = _differentiate_memory(tensors, place, interval, scale)
    return dq, dk, dv, dmem_k, dmem_v


# q, k, v, lse, delta, dout
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _differentiate_keys(tensors: Tensors, place: Placement, interval: Interval, scale: float) -> tuple[Tensor, Tensor]:
    """dk and dv `[B, C, H, D and DV]`, where there are parts for some rows of the batch after the others: how many rows
    fit into the workspace must not change how a row is added.
    """
    q, k, v, *_ = tensors
    batch, _, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    block_n = _settings_of_keys(interval, q, v).block_n
    tiles_of_row = num_tiles(place, interval.num_keys, block_n) // max(batch, 1)
    bytes_of_row = interval.num_keys * kv_heads * 4 * (head_dim + value_dim)
    parts = _count_parts(heads // kv_heads, tiles_of_row * kv_heads, bytes_of_row)
    # The kernel does not visit what no sequence covers.
    allocate = torch.empty if place.cu_seqlens is None else torch.zeros

    def add_queries(rows: range, dtype: torch.dtype) -> list[Tensor]:
        grads = [
            allocate((parts, len(rows), interval.num_keys, *t.shape[2:]), dtype=dtype, device=t.device) for t in (k, v)
        ]
        grid = (tiles_of_row * len(rows), kv_heads, parts)
        _launch_dkv(grid, grads, _rows_of(tensors, rows), _place_of(place, rows), interval, scale)
        return grads

    if parts == 1:
        dk, dv = (grad[0] for grad in add_queries(range(batch), k.dtype))
        return dk, dv
    dk, dv = (t.new_empty(batch, interval.num_keys, *t.shape[2:]) for t in (k, v))
    for rows in _split_rows(batch, parts * bytes_of_row):
        for grad, sums in zip((dk, dv), add_queries(rows, torch.float32), strict=True):
            _add_parts(sums, grad[rows.start : rows.stop])
    return dk, dv


def _differentiate_memory(
    tensors: Tensors, place: Placement, interval: Interval, scale: float
) -> tuple[Tensor, Tensor]:
    """dmem_k and dmem_v `[H, M, D and DV]`, the sums over splits of the queries of every row."""
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
        grid = (tiles_of_row * len(rows), kv_heads, parts)
        _launch_dkv(grid, grads, _rows_of(tensors, rows), _place_of(place, rows), interval, scale, split)
        sums.append([grad.sum((0, 1)) for grad in grads])
    totals = (reduce(torch.add, grads) for grads in zip(*sums, strict=True))
    dmem_k, dmem_v = (total.transpose(0, 1).to(k.dtype).contiguous() for total in totals)
    return dmem_k, dmem_v


def _add_parts(parts: Tensor, out: Tensor) -> None:
    """The sum of float32 parts `[P, ...]`, rounded once into out."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # writes what a sum would leave for a copy to round
    else:
        out.copy_(parts.sum(0))


def _launch_dkv(
    grid: tuple[int, int, int],
    grads: list[Tensor],
    tensors: Tensors,
    place: Placement,
    interval: Interval,
    scale: float,
    split: int | None = None,
) -> None:
    """split: of the queries, where the gradients are those of memory."""
    q, k, v, lse, delta, dout = tensors
    block_m, block_n, num_warps, num_stages = _settings_of_keys(interval, q, v)
    launch(
        dkv_kernel,
        grid,
        *(q, k, v, lse, delta, dout, *grads),
        *(q.stride(), k.stride(), v.stride(), dout.stride(), *(t.stride() for t in grads)),
        *(place, interval, scale),
        MEMORY=split is not None,
        SPLIT=SPLIT if split is None else split,
        HEADS=q.shape[2] // k.shape[2] // grid[2],
        **_tile(q.shape[3], v.shape[3], block_m, block_n),
        WIDE=is_wide(q, dout),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )


def _settings_of_keys(interval: Interval, q: Tensor, v: Tensor) -> Settings:
    return settings_of(settings.DKV if interval.left is None else settings.DKV_WINDOW, q, v)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    return out, q.new_empty(batch, heads, seqlen, dtype=torch.float32)


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    dq = q.new_empty(q.shape)
    if not rest[-1]:
        return dq, *(q.new_empty(0) for _ in range(4))
    heads, dims = k.shape[2], (k.shape[3], v.shape[3])
    num_memory = 0 if mem_k is None else mem_k.shape[1]
    return dq, k.new_empty(k.shape), v.new_empty(v.shape), *(k.new_empty(heads, num_memory, d) for d in dims)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    (out, lse), inputs = saved_inputs(ctx)
    if dout is None:
        dout = torch.zeros_like(out)
    needed = ctx.needs_input_grad[:5]
    grads = _backward(dout, dlse, out, lse, *inputs, any(needed[1:]))
    grads = [grad if needs else None for grad, needs in zip(grads, needed, strict=True)]
    return *grads, *(None,) * (len(inputs) - 5)


register_derivative(_forward, _differentiate, save_inputs)
refuse_double_backward(_backward)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    flat: Any,
    left: int | None,
    reach: int | None,
    block_size: int,
    stride: int,
) -> Any:
    """Inputs as the kernels take them: memory stands before the other keys of every row."""
    num_memory, num_keys = None, k.shape[1]
    if mem_k is not None and mem_v is not None and mem_k.shape[1]:
        num_memory = mem_k.shape[1]
        k, v = (
            torch.cat((memory.transpose(0, 1).expand(t.shape[0], -1, -1, -1), t), 1)
            for memory, t in ((mem_k, k), (mem_v, v))
        )
    place = make_placement(unflatten(q, flat), block_size, stride)
    return *last_dim_contiguous(q, k, v), Interval(left, reach, block_size, stride, num_memory, num_keys), place


def _tile(head_dim: int, value_dim: int, block_m: int, block_n: int) -> dict[str, int]:
    return {
        'HEAD_DIM': head_dim,
        'VALUE_DIM': value_dim,
        'BLOCK_M': block_m,
        'BLOCK_N': block_n,
        'BLOCK_D': head_block(head_dim),
        'BLOCK_DV': head_block(value_dim),
    }


def _describe_keys(k: Tensor, v: Tensor, place: Placement, interval: Interval, block_n: int) -> Any:
    """Descriptors for tiles that are read as a whole. In float32 there would be none to gain, and between memory and
    the keys of a packed sequence lie others.
    """
    if k.element_size() == 4 or (interval.num_memory is not None and place.cu_blocks is not None):
        return None, None
    return (describe_tiles(t, block_n, head_block(t.shape[3])) for t in (k, v))


def _count_packed(group: int, block_m: int) -> int:
    """Heads of a group in one tile, a power of two: the more, the fewer keys its queries have between them."""
    return min(group & -group, block_m)


def _split_rows(batch: int, bytes_of_row: int) -> list[range]:
    """The rows of the batch in groups whose partial sums fit into the workspace, or have one row."""
    size = max(1, WORKSPACE // max(1, bytes_of_row))
    return [range(first, min(first + size, batch)) for first in range(0, batch, size)]


def _rows_of(tensors: Tensors, rows: range) -> Tensors:
    if len(rows) == len(tensors[0]):
        return tensors
    q, k, v, lse, delta, dout = (t[rows.start : rows.stop] for t in tensors)
    return q, k, v, lse, delta, dout


def _place_of(place: Placement, rows: range) -> Placement:
    """The placement of some rows of the batch; packed sequences are in one row."""
    if place.cu_seqlens is not None or len(rows) == place.num_sequences:
        return place
    q_offsets, seqlens_k = (t if t is None else t[rows.start : rows.stop] for t in (place.q_offsets, place.seqlens_k))
    return place._replace(num_sequences=len(rows), q_offsets=q_offsets, seqlens_k=seqlens_k)


def _count_parts(group: int, programs: int, bytes_of_part: int) -> int:
    """In how many parts the heads of a group are added: a divisor of `group`, the larger the fewer programs there are.

    programs, bytes_of_part: of one row of the batch, so that a row's gradient does not depend on its neighbours.
    """
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    within = [parts for parts in divisors if parts == 1 or parts * bytes_of_part <= WORKSPACE]
    return next((parts for parts in within if parts * programs >= FULL_GRID), within[-1])
