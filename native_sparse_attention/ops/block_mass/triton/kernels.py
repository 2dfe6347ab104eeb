"""Kernels of `block_mass`: the log-sum-exp of every block, and the mass of the blocks.

The keys are split over programs, since few queries are given: no sum goes beyond a block, and the log-sum-exp over all
keys is that of the parts.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import load_rows

LOG2_E = tl.constexpr(1.4426950408889634)
# Larger than the index of any key.
NO_KEY = tl.constexpr(2**31 - 1)


class Sizes(NamedTuple):
    """num_queries, seqlen_k, num_blocks: R, S and blocks of a row. num_chunks: parts of the keys, one per program.
    left, right: of the window, -1 for unbounded; None without a window.
    """

    num_queries: int
    seqlen_k: int
    num_blocks: int
    num_chunks: int
    left: int | None
    right: int | None


class Blocks(NamedTuple):
    """Blocks in key tiles, a compile-time constant.

    size: keys of a block. block_l: columns of a tile that a block has, at most a power of two above `size`. per_tile:
    blocks of a tile. parts: tiles of a block, 1 unless a tile holds less than a block. per_chunk: blocks of a program.
    """

    size: int
    block_l: int
    per_tile: int
    parts: int
    per_chunk: int


@triton.jit
def block_lse_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    key_start_ptr,
    key_len_ptr,
    block_lse_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    sizes,
    scale,
    softcap,
    blocks: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """q: `[B, R, HQ, D]`. k: `[B, S, H, D]`. position, key_start, key_len: `[B, R]`. block_lse: `[B, HQ, blocks, R]`,
    of the keys outside the window, base 2, written where a query sees a key. lse: `[B, HQ, chunks, R]`, of all keys.

    One program per chunk of blocks and tile of BLOCK_M queries, each with the GROUP heads of a KV head.
    """
    P: tl.constexpr = blocks.per_tile
    L: tl.constexpr = blocks.block_l
    tiles = tl.cdiv(sizes.num_queries * GROUP, BLOCK_M)
    index = tl.program_id(0) // tiles
    row, chunk = (index // sizes.num_chunks).to(tl.int64), index % sizes.num_chunks
    kv_head = tl.program_id(1).to(tl.int64)
    tile_rows = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    queries, heads = tile_rows // GROUP, kv_head * GROUP + tile_rows % GROUP
    is_query = queries < sizes.num_queries
    places = row * sizes.num_queries + queries
    key_starts, num_seen, near, beyond = _load_extents(
        position_ptr, key_start_ptr, key_len_ptr, places, is_query, sizes, CAUSAL
    )
    q_ptr += row * q_strides[0] + heads[:, None] * q_strides[2]
    q = load_rows(q_ptr, queries, q_strides[1], is_query, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    out_rows = row * tl.num_programs(1) * GROUP + heads
    block_lse_ptr += out_rows * sizes.num_blocks * sizes.num_queries + queries
    scale_log2 = (scale if softcap is None else 1.0) * LOG2_E

    first_block = chunk * blocks.per_chunk
    columns = tl.arange(0, P * L)
    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    start = tl.min(tl.where(num_seen > 0, key_starts, NO_KEY), 0)
    while start < NO_KEY:  # for each sequence of the queries
        is_member = key_starts == start
        members_see = tl.where(is_member, num_seen, 0)
        last_key = tl.max(members_see, 0)
        num_blocks = tl.minimum(tl.cdiv(last_key, blocks.size) - first_block, blocks.per_chunk)
        far_total = tl.zeros([BLOCK_M, P], tl.float32)
        for step in tl.range(0, tl.cdiv(tl.maximum(num_blocks, 0), P) * blocks.parts):
            part = step % blocks.parts
            tile_block = first_block + step // blocks.parts * P
            offsets = part * L + columns % L
            keys = (tile_block + columns // L) * blocks.size + offsets
            exists = keys < last_key
            if L * blocks.parts != blocks.size:
                exists = exists & (offsets < blocks.size)
            k = load_rows(k_ptr, start + keys, k_strides[1], exists, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
            logits = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, P * L]
            if softcap is not None:
                logits = cap_logits(logits * scale, softcap)
            seen = exists[None, :] & (keys[None, :] < members_see[:, None])
            logits = tl.where(seen, logits * scale_log2, float('-inf'))
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            reference = tl.where(new_max == float('-inf'), 0.0, new_max)
            weights = tl.exp2(logits - reference[:, None])
            rescale = tl.exp2(row_max - reference)
            row_max = new_max
            total = total * rescale + tl.sum(weights, 1)
            is_far = (keys[None, :] < near[:, None]) | (keys[None, :] >= beyond[:, None])
            far = tl.reshape(tl.where(is_far, weights, 0.0), [BLOCK_M, P, L])
            far_total = far_total * rescale[:, None] + tl.sum(far, 2)
            if part == blocks.parts - 1:
                tile_blocks = tile_block + tl.arange(0, P)
                out = block_lse_ptr[:, None] + tile_blocks[None, :].to(tl.int64) * sizes.num_queries
                mask = (is_query & is_member)[:, None] & (tile_blocks < sizes.num_blocks)[None, :]
                tl.store(out, tl.log2(far_total) + reference[:, None], mask=mask)
                far_total = tl.zeros([BLOCK_M, P], tl.float32)
        start = tl.min(tl.where((num_seen > 0) & (key_starts > start), key_starts, NO_KEY), 0)
    lse_ptr += (out_rows * sizes.num_chunks + chunk) * sizes.num_queries + queries
    tl.store(lse_ptr, row_max + tl.log2(total), mask=is_query)


@triton.jit
def mass_kernel(
    block_lse_ptr,
    lse_ptr,
    position_ptr,
    key_start_ptr,
    key_len_ptr,
    out_ptr,
    out_strides,
    sizes,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Inputs as `block_lse_kernel` writes them. out: `[B, R, HI, blocks]`, the mean over GROUP heads.

    One program per BLOCK_J blocks and BLOCK_T queries of an index head.
    """
    block_tiles, query_tiles = tl.cdiv(sizes.num_blocks, BLOCK_J), tl.cdiv(sizes.num_queries, BLOCK_T)
    index = tl.program_id(0) // block_tiles
    row, index_head = (index // query_tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    blocks = (tl.program_id(0) % block_tiles) * BLOCK_J + tl.arange(0, BLOCK_J)
    queries = (index % query_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_query = queries < sizes.num_queries
    _, num_seen, near, beyond = _load_extents(
        position_ptr, key_start_ptr, key_len_ptr, row * sizes.num_queries + queries, is_query, sizes, CAUSAL
    )
    # Blocks with a key before the window, or behind it. Blocks without any may hold anything.
    is_far = blocks[:, None] < tl.cdiv(near, BLOCK_SIZE)[None, :]
    ends = tl.where(beyond < num_seen, tl.cdiv(num_seen, BLOCK_SIZE), 0)
    is_far = is_far | ((blocks[:, None] >= (beyond // BLOCK_SIZE)[None, :]) & (blocks[:, None] < ends[None, :]))
    mass = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
    for member in tl.range(GROUP):
        head = (row * tl.num_programs(1) + index_head) * GROUP + member
        row_max = tl.full([BLOCK_T], float('-inf'), tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
        for first_chunk in tl.range(0, sizes.num_chunks, BLOCK_C):
            chunks = first_chunk + tl.arange(0, BLOCK_C)
            places = (head * sizes.num_chunks + chunks)[:, None] * sizes.num_queries + queries[None, :]
            mask = (chunks < sizes.num_chunks)[:, None] & is_query[None, :]
            lse = tl.load(lse_ptr + places, mask=mask, other=float('-inf'))  # [BLOCK_C, BLOCK_T]
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            reference = tl.where(new_max == float('-inf'), 0.0, new_max)
            total = total * tl.exp2(row_max - reference) + tl.sum(tl.exp2(lse - reference[None, :]), 0)
            row_max = new_max
        # A row whose weights are all 0 has no mass.
        lse_of_row = tl.where(total == 0, 0.0, row_max + tl.log2(total))
        places = (head * sizes.num_blocks + blocks)[:, None] * sizes.num_queries + queries[None, :]
        block_lse = tl.load(block_lse_ptr + places, mask=is_far, other=float('-inf'))
        mass += tl.where(is_far, tl.exp2(block_lse - lse_of_row[None, :]), 0.0)
    out_ptr += row * out_strides[0] + index_head * out_strides[2]
    out = out_ptr + queries.to(tl.int64)[None, :] * out_strides[1] + blocks[:, None] * out_strides[3]
    tl.store(out, mass / GROUP, mask=(blocks < sizes.num_blocks)[:, None] & is_query[None, :])


@triton.jit
def _load_extents(position_ptr, key_start_ptr, key_len_ptr, places, mask, sizes, CAUSAL: tl.constexpr):
    """Return int32 for each query: the first key of its sequence along S, the number of keys that it sees, and the keys
    [near, beyond) of its window, which are positions in the sequence. Without a window both are that number.
    """
    position = tl.load(position_ptr + places, mask=mask, other=0)
    key_start = tl.load(key_start_ptr + places, mask=mask, other=0)
    key_start = tl.minimum(tl.maximum(key_start, 0), sizes.seqlen_k)
    num_seen = tl.minimum(tl.load(key_len_ptr + places, mask=mask, other=0), sizes.seqlen_k - key_start)
    if CAUSAL:
        num_seen = tl.minimum(num_seen, position + 1)
    num_seen = tl.maximum(num_seen, 0)
    near = num_seen
    beyond = num_seen
    if sizes.left is not None:
        near = tl.where(sizes.left < 0, 0, tl.minimum(tl.maximum(position - sizes.left, 0), num_seen))
        beyond = tl.where(sizes.right < 0, num_seen, tl.minimum(tl.maximum(position + sizes.right + 1, 0), num_seen))
    return key_start.to(tl.int32), num_seen.to(tl.int32), near.to(tl.int32), beyond.to(tl.int32)
