"""Kernels of the gradient of compressed keys in `chosen_scores`, driven by the CSR index from blocks to queries.

A block that every query reads has many entries, most blocks have few. A program takes up to CHUNK entries of one block
and sums their gradients for all compressed blocks that overlap it. A second kernel adds the partial sums of each
compressed block, in the order of blocks and chunks.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import find_block, load_entries
from native_sparse_attention.ops._triton.tiles import dot_exact, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import find_tile, load_extent, load_num_keys, load_position
from native_sparse_attention.ops.block_selection.triton.scores_tiles import (
    before_cap,
    is_forced,
    locate_compressed,
    share_of,
    weigh,
)


class IndexRange(NamedTuple):
    """Part of a CSR index that a launch covers.

    first_pair: first pair of the group. num_entries, num_slots: entries and block slots per pair. The launch covers the
    slots first_slot ... last_slot - 1, in at most num_chunks chunks. num_combined: selection blocks from first_slot on
    whose gradients are summed.
    """

    first_pair: int
    kv_heads: int
    num_entries: int
    num_slots: int
    first_slot: int
    last_slot: int
    num_chunks: int
    num_combined: int


@triton.jit
def partial_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    dout_ptr,
    entries_ptr,
    starts_ptr,
    partial_ptr,
    q_strides,
    k_strides,
    lse_strides,
    dout_strides,
    partial_strides,
    layout,
    sizes,
    index_range,
    scale,
    softcap,
    meta: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """partial: float32 `[pairs, chunks, offsets, D]`; other shapes as in the forward kernel. One program per chunk of
    entries and BLOCK_O offsets.
    """
    HEAD_DIM: tl.constexpr = meta.head_dim
    pair = (tl.program_id(0) // index_range.num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % index_range.num_chunks
    starts_ptr += pair * (index_range.num_slots + 1)
    entries_ptr += pair * index_range.num_entries
    index = _first_chunk(starts_ptr, index_range, CHUNK) + chunk
    slot, first = find_tile(index, starts_ptr, index_range.num_entries, index_range.num_slots, CHUNK)
    if slot >= index_range.last_slot:
        return
    first += tl.load(starts_ptr + slot)
    num_entries = tl.minimum(tl.load(starts_ptr + slot + 1) - first, CHUNK)
    if num_entries <= 0:
        return
    row = (index_range.first_pair + pair) // index_range.kv_heads
    kv_head = (index_range.first_pair + pair) % index_range.kv_heads
    sequence, first_token = find_block(slot, row.to(tl.int32), layout, meta.selection_block)
    _, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    num_tokens = load_num_keys(layout, sequence)
    first_position = load_position(layout, sequence, num_queries, num_tokens) - query_start
    key_start, num_keys = locate_compressed(layout, sequence, num_tokens, sizes)
    offsets = meta.first_offset + tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    block = first_token // meta.selection_block
    keys = block * meta.per_selection + offsets
    key_mask = (offsets < meta.per_selection) & (keys >= 0) & (keys < num_keys)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2] + key_start.to(tl.int64) * k_strides[1]
    k = load_rows(k_ptr, keys, k_strides[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_O, BLOCK_D]
    share = share_of(offsets, sizes, meta) / meta.group
    q_ptr += row * q_strides[0]
    lse_ptr += row * lse_strides[0]
    dout_ptr += row * dout_strides[0]
    dk = tl.zeros([BLOCK_O, BLOCK_D], tl.float32)
    entries_ptr += first
    num_rows = num_entries * meta.group
    entry = load_entries(entries_ptr, 0, num_rows, meta.group, BLOCK_M)
    for first_row in tl.range(0, num_rows, BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, meta.group, BLOCK_M)
        tile_rows = first_row + tl.arange(0, BLOCK_M)  # every entry with every head of its group
        row_mask = tile_rows < num_rows
        index_head = kv_head * meta.repeats + entry // meta.num_selected % meta.repeats
        heads = index_head * meta.group + tile_rows % meta.group
        tokens = entry // meta.num_selected // meta.repeats
        position = first_position + tokens
        tokens = tokens.to(tl.int64)
        columns = (entry % meta.num_selected).to(tl.int64)
        dscores = tl.load(
            dout_ptr + tokens * dout_strides[1] + index_head * dout_strides[2] + columns * dout_strides[3],
            mask=row_mask, other=0.0,
        )  # fmt: skip
        dscores = tl.where(is_forced(block, position, sizes, meta), 0.0, dscores)
        lse = tl.load(lse_ptr + heads * lse_strides[1] + tokens * lse_strides[2], mask=row_mask, other=0.0)
        rows_of_q = tokens * q_strides[1] + heads * q_strides[2]
        q = load_rows(q_ptr, rows_of_q, 1, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_O, BLOCK_M]
        weights = weigh(products, lse.to(tl.float32)[None, :], scale, softcap)
        dlogits = weights * share[:, None] * dscores[None, :]
        seen = key_mask[:, None] & row_mask[None, :]
        if meta.causal:
            seen = seen & (keys[:, None] * sizes.stride + sizes.block_size - 1 <= position[None, :])
        dlogits = before_cap(tl.where(seen, dlogits, 0.0), products, seen, scale, softcap)
        dk = dot_exact(dlogits, split_finite(q)[0], dk)
        entry = following
    partial_ptr += pair * partial_strides[0] + chunk.to(tl.int64) * partial_strides[1]
    rows, is_stored = offsets - meta.first_offset, offsets < meta.per_selection
    store_rows(partial_ptr, rows, partial_strides[2], dk, is_stored, HEAD_DIM, BLOCK_D)


@triton.jit
def combine_kernel(
    starts_ptr,
    partial_ptr,
    dk_ptr,
    partial_strides,
    dk_strides,
    layout,
    sizes,
    index_range,
    scale,
    meta: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dk: `[B, C, H, D]`. One program per selection block from index_range.first_slot on and BLOCK_C of the compressed
    blocks that begin in it, which overlap this block and some that follow.
    """
    pair = (tl.program_id(0) // index_range.num_combined).to(tl.int64)
    slot = index_range.first_slot + tl.program_id(0) % index_range.num_combined
    starts_ptr += pair * (index_range.num_slots + 1)
    row = (index_range.first_pair + pair) // index_range.kv_heads
    kv_head = (index_range.first_pair + pair) % index_range.kv_heads
    sequence, first_token = find_block(slot, row.to(tl.int32), layout, meta.selection_block)
    num_tokens = load_num_keys(layout, sequence)
    if first_token >= num_tokens:
        return
    key_start, num_keys = locate_compressed(layout, sequence, num_tokens, sizes)
    offsets = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    keys = first_token // meta.selection_block * meta.per_selection + offsets
    key_mask = (offsets < meta.per_selection) & (keys < num_keys)
    first_chunk = _first_chunk(starts_ptr, index_range, CHUNK)
    partial_ptr += pair * partial_strides[0]
    dk = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for following in range((meta.per_selection - 1 - meta.first_offset) // meta.per_selection + 1):
        if first_token + following * meta.selection_block < num_tokens:
            start = tl.load(starts_ptr + slot + following)
            num_chunks = tl.cdiv(tl.load(starts_ptr + slot + following + 1) - start, CHUNK)
            chunk = (start // CHUNK + slot + following - first_chunk).to(tl.int64)
            rows = offsets - following * meta.per_selection - meta.first_offset
            for _ in range(num_chunks):
                partial = partial_ptr + chunk * partial_strides[1]
                dk += load_rows(partial, rows, partial_strides[2], key_mask & (rows >= 0), meta.head_dim, BLOCK_D)
                chunk += 1
    dk_ptr += row * dk_strides[0] + kv_head * dk_strides[2]
    store_rows(dk_ptr, key_start + keys, dk_strides[1], dk * scale, key_mask, meta.head_dim, BLOCK_D)


@triton.jit
def _first_chunk(starts_ptr, index_range, CHUNK: tl.constexpr):
    """Chunks are numbered like tiles of packed sequences; the first that list first_slot may have."""
    return tl.load(starts_ptr + index_range.first_slot) // CHUNK + index_range.first_slot
