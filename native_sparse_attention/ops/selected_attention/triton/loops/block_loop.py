"""Load the KV blocks named by one row of `block_indices`."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import count_readable_blocks
from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops._triton.varlen import load_extent, load_num_keys, load_position
from native_sparse_attention.ops.selected_attention.triton.arguments import Selection

# Kinds of loops over keys. FULL: blocks of which the query may read all keys. TAIL: the block of which it may read only
# the first keys. ANY: all blocks.
FULL, TAIL, ANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# About this many programs of consecutive queries run concurrently, each slightly ahead of the next. Each starts its
# loop at a block that is further on by the same fraction, and wraps around. So with ascending indices all of them read
# blocks that are close together at any time, and L2 serves most of them.
CONCURRENT_QUERIES = tl.constexpr(768)


@triton.jit
def find_keys(sequence, token, layout, CAUSAL: tl.constexpr):
    """Return a sequence's first key in storage and how many of its first keys a token may read."""
    _, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    readable = load_num_keys(layout, sequence)
    key_start = 0
    if layout.cu_seqlens_k is not None:
        _, key_start, _ = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    if CAUSAL:
        position = load_position(layout, sequence, num_queries, readable) + token - query_start
        readable = tl.minimum(readable, tl.maximum(position + 1, 0))
    return key_start, readable


@triton.jit
def _load_block(selection, slot, readable, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the keys [first, last) of the index in a slot of the row.

    The range is empty if the index names no readable block or repeats an earlier index of the row.
    """
    block = tl.load(selection.indices + slot)
    # Not CAUSAL: `readable` accounts for the position already.
    num_blocks = count_readable_blocks(0, readable, BLOCK_SIZE, CAUSAL=False)
    repeats = (selection.blocks == block) & (tl.arange(0, BLOCK_S) < slot)
    counts = (block >= 0) & (block < num_blocks) & (tl.sum(repeats.to(tl.int32), 0) == 0)
    first = tl.where(counts, block, 0).to(tl.int32) * BLOCK_SIZE
    last = tl.where(counts, tl.minimum(first + BLOCK_SIZE, readable), first)
    return first, last


@triton.jit
def find_full_blocks(blocks, readable, NUM_SELECTED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Plan the loops over a row of indices, `blocks [BLOCK_S]`.

    Returns the number of slots up to the last that names a full block; the slot at which the loop starts
    (`CONCURRENT_QUERIES`); the first slot of the block of which only the first keys are readable; and the number of
    these keys, 0 if the block is not selected. All four depend on what the query reads alone, not on its place in the
    launch, so its result does not either, bit for bit.
    """
    slots = tl.arange(0, BLOCK_S)
    num_full = readable // BLOCK_SIZE
    is_full = (blocks >= 0) & (blocks < num_full)
    num_slots = tl.max(tl.where(is_full, slots + 1, 0), 0)
    turn = readable % CONCURRENT_QUERIES
    # num_full * turn // CONCURRENT_QUERIES, without overflow of int32.
    first_block = num_full // CONCURRENT_QUERIES * turn + num_full % CONCURRENT_QUERIES * turn // CONCURRENT_QUERIES
    first_slot = tl.min(tl.where(is_full & (blocks >= first_block), slots, num_slots), 0)
    tail_slot = tl.min(tl.where(blocks == num_full, slots, NUM_SELECTED), 0)
    return num_slots, first_slot, tail_slot, tl.where(tail_slot < NUM_SELECTED, readable % BLOCK_SIZE, 0)


@triton.jit
def select_row(indices_ptr, blocks, readable):
    """Return the `Selection` of a loop over ANY blocks of a row."""
    return Selection(indices_ptr, blocks, readable, 0, 0, 0)


@triton.jit
def load_step(
    source, selection, step, KIND: tl.constexpr, BLOCK_N: tl.constexpr, sizes: tl.constexpr, tile: tl.constexpr
):
    """Load the keys and values of one step of a loop.

    Returns k [BLOCK_N, BLOCK_D], v [BLOCK_N, BLOCK_DV], the slot of the step, whether its index counts, and the mask of
    the keys: a scalar if KIND is FULL, else [1, BLOCK_N]. Keys outside the mask are loaded as 0. source: `KeySource`.
    """
    SPLIT: tl.constexpr = (sizes.block_size + BLOCK_N - 1) // BLOCK_N
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    INT64_OFFSETS: tl.constexpr = tile.int64_offsets
    if KIND == FULL:
        slot = selection.first_slot + step // SPLIT
        slot = tl.where(slot < selection.num_slots, slot, slot - selection.num_slots)
        readable = selection.readable // BLOCK_SIZE * BLOCK_SIZE
        first, last = _load_block(selection, slot, readable, BLOCK_SIZE, tile.block_s)
        is_read = first < last
        first += source.key_start + step % SPLIT * BLOCK_N
        k = load_tile(
            source.k_tiles, source.k, source.row, first, source.kv_head, source.k_stride, HEAD_DIM, BLOCK_N,
            tile.block_d, INT64_OFFSETS, is_read,
        )  # fmt: skip
        v = load_tile(
            source.v_tiles, source.v, source.row, first, source.kv_head, source.v_stride, VALUE_DIM, BLOCK_N,
            tile.block_dv, INT64_OFFSETS, is_read,
        )  # fmt: skip
        read = is_read
    else:
        if KIND == TAIL:
            slot = selection.tail_slot
            first = selection.readable // BLOCK_SIZE * BLOCK_SIZE + step * BLOCK_N
            last = selection.readable
        else:
            slot = step // SPLIT
            first, last = _load_block(selection, slot, selection.readable, BLOCK_SIZE, tile.block_s)
            first += step % SPLIT * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        k = load_rows(
            source.k, source.key_start + keys, source.k_stride, keys < last, HEAD_DIM, tile.block_d, INT64_OFFSETS
        )
        v = load_rows(
            source.v, source.key_start + keys, source.v_stride, keys < last, VALUE_DIM, tile.block_dv, INT64_OFFSETS
        )
        is_read = first < last
        read = (keys < last)[None, :]
    return k, v, slot, is_read, read


@triton.jit
def load_rows_of_indices(indices_ptr, offsets, mask, NUM_SELECTED: tl.constexpr, BLOCK_S: tl.constexpr):
    """Load rows of `block_indices` [BLOCK_T, BLOCK_S], -1 for an index that can name no block. offsets: of the rows."""
    slots = tl.arange(0, BLOCK_S)
    mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    blocks = tl.load(indices_ptr + offsets[:, None] + slots[None, :], mask=mask, other=-1)
    return tl.where((blocks >= 0) & (blocks < 2**30), blocks, -1).to(tl.int32)


@triton.jit
def load_factor(factors_ptr, slot, is_read):
    """Load the factor of the logits of an index, 1 without factors. The factor of an unread index may be anything."""
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.where(is_read, tl.load(factors_ptr + slot).to(tl.float32), 0.0)
    return factor
