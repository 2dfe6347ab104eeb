"""First launch of a step: store new tokens in the cache, and gather the compressed blocks that they complete for φ."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.rotation import NEIGHBOURS, cos_and_sin, rotate
from native_sparse_attention.ops._triton.varlen import count_blocks
from native_sparse_attention.ops.decoding.triton.storage import (
    BlockSizes,
    let_next_launch_begin,
    load_at,
    load_lengths,
    locate,
    store_at,
)

# Roles of programs: queries and new keys; blocks of keys; new values and their blocks.
NUM_ROLES = 3


class Angles(NamedTuple):
    """freqs: float32 `[F]`, None without rotation. The angles are position / factor * freqs."""

    freqs: Tensor | None
    factor: float


class Variant(NamedTuple):
    """A compile-time constant. num_angles: F, 0 without rotation. half: as in `pair_columns`. is_mean: blocks become
    their means. fills_blocks: blocks that are not complete become 0; otherwise they are not written. block_g, block_l:
    group size and l, rounded up to tiles.
    """

    sizes: BlockSizes
    num_angles: int
    half: int
    is_mean: bool
    fills_blocks: bool
    block_g: int
    block_l: int


@triton.jit
def append_kernel(
    q,
    k,
    v,
    k_window,
    v_window,
    raw_k,
    raw_v,
    rotated_q,
    cached_k,
    cached_v,
    cached_k_window,
    cached_v_window,
    ring_k,
    ring_v,
    blocks_k,
    blocks_v,
    positions_k_ptr,
    positions_v_ptr,
    angles,
    lengths,
    pages,
    step: tl.constexpr,
    dims: tl.constexpr,
    variant: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per row, KV head and role. New tokens: `[B, T, heads, D]`. Cache: `[B, S, H, D]` or pages. Rings:
    `[B, R, H, D]`. blocks_k, blocks_v: `[B, K, H, l, D]`; their means: `[B, K, H, D]`.

    k_window, v_window: None if the window reads k and v. A ring is None if the cache holds the inputs of the
    compression. blocks_k, blocks_v: None without compressed keys or values.
    """
    if not variant.fills_blocks:
        # Otherwise the next launch belongs to a network, which may begin early but does not wait.
        let_next_launch_begin(OVERLAPS)
    row = (tl.program_id(0) // step.kv_heads).to(tl.int64)
    head = (tl.program_id(0) % step.kv_heads).to(tl.int64)
    old, length = load_lengths(lengths, row, step)
    of_row = (row, head, old, length)
    if tl.program_id(1) == 0:
        pairs = tl.arange(0, dims.block_d // 2)
        is_rotated = (pairs < variant.num_angles)[None, :]
        for token in range(step.num_tokens):
            cos = tl.full([1, dims.block_d // 2], 1.0, tl.float32)
            sin = tl.zeros([1, dims.block_d // 2], tl.float32)
            if angles.freqs is not None:
                freqs = tl.load(angles.freqs + pairs, mask=pairs < variant.num_angles, other=0.0)
                cos, sin = cos_and_sin((tl.div_rn((old + token).to(tl.float32), angles.factor) * freqs)[None, :])
                heads = tl.arange(0, variant.block_g)
                offsets = (head * dims.group + heads) * q.strides[2] + (row * q.strides[0] + token * q.strides[1])
                x = load_at(q.ptr, offsets, heads < dims.group, dims.head_dim, dims.block_d, variant.half)
                x = rotate(x, cos, sin, is_rotated)
                to = rotated_q.strides
                offsets = (head * dims.group + heads) * to[2] + (row * to[0] + token * to[1])
                store_at(rotated_q.ptr, offsets, x, heads < dims.group, dims.head_dim, dims.block_d, variant.half)
            rotation = (cos, sin, is_rotated)
            _copy(k, cached_k, token, of_row, pages, rotation, dims.head_dim, dims.block_d, variant.half)
            if k_window.ptr is not None:
                _copy(
                    k_window, cached_k_window, token, of_row, pages, rotation, dims.head_dim, dims.block_d, variant.half
                )
    elif tl.program_id(1) == 1:
        if blocks_k.ptr is not None:
            _gather_blocks(
                (raw_k, ring_k, cached_k),
                (blocks_k, positions_k_ptr),
                of_row,
                pages,
                step,
                variant,
                dims.head_dim,
                dims.block_d,
            )
    else:
        for token in range(step.num_tokens):
            _copy(v, cached_v, token, of_row, pages, None, dims.value_dim, dims.block_dv, NEIGHBOURS)
            if v_window.ptr is not None:
                _copy(v_window, cached_v_window, token, of_row, pages, None, dims.value_dim, dims.block_dv, NEIGHBOURS)
        if blocks_v.ptr is not None:
            _gather_blocks(
                (raw_v, ring_v, cached_v),
                (blocks_v, positions_v_ptr),
                of_row,
                pages,
                step,
                variant,
                dims.value_dim,
                dims.block_dv,
            )


@triton.jit
def _copy(
    new, cached, token, tokens_of_row, pages, angles, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr
):
    """Store one new token of a head in the cache, rotated if angles are given, the arguments of `rotate`."""
    row, head, old, length = tokens_of_row
    positions = tl.zeros([1], tl.int32) + (old + token)
    offset = row * new.strides[0] + token * new.strides[1] + head * new.strides[2]
    x = load_at(new.ptr, tl.zeros([1], tl.int64) + offset, positions < length, SIZE, BLOCK, HALF)
    if angles is not None:
        cos, sin, is_rotated = angles
        x = rotate(x, cos, sin, is_rotated)
    offsets, fits = locate(positions, positions < length, row, pages, cached.strides)
    store_at(cached.ptr, offsets + head * cached.strides[2], x, fits, SIZE, BLOCK, HALF)


@triton.jit
def _gather_blocks(
    sources,
    blocks,
    tokens_of_row,
    pages,
    step: tl.constexpr,
    variant: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the blocks that the new tokens complete, then the new tokens in the ring. With fills_blocks all blocks that
    they may complete are stored, incomplete ones as zeros.

    sources: new tokens, the ring, and the cache. blocks: indexed by row, block, head and token; and positions.
    """
    sizes: tl.constexpr = variant.sizes
    new, ring, cached = sources
    blocks, positions_ptr = blocks
    row, head, old, length = tokens_of_row
    first = count_blocks(old, sizes.block_size, sizes.stride)
    num_complete = count_blocks(length, sizes.block_size, sizes.stride)
    num_stored = step.num_new if variant.fills_blocks else num_complete - first
    for index in tl.range(num_stored):
        total = tl.zeros([BLOCK_D], tl.float32)
        base = row * blocks.strides[0] + index * blocks.strides[1] + head * blocks.strides[2]
        for start in range(0, sizes.block_size, variant.block_l):
            in_block = start + tl.arange(0, variant.block_l)
            tokens = (first + index) * sizes.stride + in_block
            inside = in_block < sizes.block_size
            exists = inside & (first + index < num_complete)
            if ring.ptr is None:
                offsets, found = locate(tokens, exists & (tokens < old), row, pages, cached.strides)
                x = load_at(cached.ptr, offsets + head * cached.strides[2], found, SIZE, BLOCK_D)
            else:
                offsets = row * ring.strides[0] + (tokens % ring.size).to(tl.int64) * ring.strides[1]
                found = exists & (tokens < old)
                x = load_at(ring.ptr, offsets + head * ring.strides[2], found, SIZE, BLOCK_D)
            offsets = row * new.strides[0] + (tokens - old).to(tl.int64) * new.strides[1] + head * new.strides[2]
            x_new = load_at(new.ptr, offsets, exists & (tokens >= old), SIZE, BLOCK_D)
            x = tl.where((tokens >= old)[:, None], x_new.to(x.dtype), x)
            offsets = (head * sizes.block_size + in_block) * SIZE
            added = load_at(positions_ptr, offsets, exists, SIZE, BLOCK_D).to(x.dtype)
            x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)  # [block_l, BLOCK_D]
            if variant.is_mean:
                total += tl.sum(x.to(tl.float32), 0)
            else:
                store_at(blocks.ptr, base + in_block.to(tl.int64) * blocks.strides[3], x, inside, SIZE, BLOCK_D)
        if variant.is_mean:
            columns = tl.arange(0, BLOCK_D)
            mean = tl.div_rn(total, tl.full([BLOCK_D], sizes.block_size, tl.float32))
            tl.store(blocks.ptr + base + columns, mean.to(blocks.ptr.dtype.element_ty), mask=columns < SIZE)
    if ring.ptr is not None:
        # A new token overwrites an old one, which a block above may still have to read.
        tl.debug_barrier()
        for token in range(step.num_tokens):
            fits = tl.full([1], 1, tl.int1) & (old + token < length)
            offset = row * new.strides[0] + token * new.strides[1] + head * new.strides[2]
            x = load_at(new.ptr, tl.zeros([1], tl.int64) + offset, fits, SIZE, BLOCK_D)
            slot = ((old + token) % ring.size).to(tl.int64)
            offset = row * ring.strides[0] + slot * ring.strides[1] + head * ring.strides[2]
            store_at(ring.ptr, tl.zeros([1], tl.int64) + offset, x, fits, SIZE, BLOCK_D)
