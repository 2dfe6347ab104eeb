"""What a query chose: the keys of each index of its row."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import count_readable_blocks
from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops._triton.varlen import load_extent, load_num_keys, load_position

# Of what the tiles of keys of a loop are.
WHOLE, PART, ANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# About so many programs of consecutive queries run together, each a little further along than the next. Each begins at
# a block as much further on and goes around from there. So at any time all of them read blocks that are close together,
# where they are in ascending order, and L2 has what others have read.
QUERIES_TOGETHER = tl.constexpr(768)


@triton.jit
def find_keys(sequence, token, place, CAUSAL: tl.constexpr):
    """The first key of a sequence, and how many of its keys a token of it may read: the first ones."""
    _, query_start, num_queries = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    readable = load_num_keys(place, sequence)
    key_start = 0
    if place.cu_seqlens_k is not None:
        _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    if CAUSAL:
        position = load_position(place, sequence, num_queries, readable) + token - query_start
        readable = tl.minimum(readable, tl.maximum(position + 1, 0))
    return key_start, readable


@triton.jit
def load_block(indices_ptr, choice, place_in_row, readable, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Keys [first, last) of an index of a row. There are none where it names no block that can be read, or one that
    stood earlier in the row. choice: the whole row, [BLOCK_S].
    """
    block = tl.load(indices_ptr + place_in_row)
    # The number of blocks does not depend on the position: what is readable has been counted.
    num_blocks = count_readable_blocks(0, readable, BLOCK_SIZE, False)
    repeats = (choice == block) & (tl.arange(0, BLOCK_S) < place_in_row)
    counts = (block >= 0) & (block < num_blocks) & (tl.sum(repeats.to(tl.int32), 0) == 0)
    first = tl.where(counts, block, 0).to(tl.int32) * BLOCK_SIZE
    last = tl.where(counts, tl.minimum(first + BLOCK_SIZE, readable), first)
    return first, last


@triton.jit
def find_whole_blocks(choice, readable, NUM_SELECTED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    """Of a row of indices, [BLOCK_S]: how many of them there are up to the last that names a block of which all keys
    may be read, with which of them a query begins (`QUERIES_TOGETHER`), where the block first stands of which only the
    first keys may be read, and how many these are, 0 if it does not. All by what it reads, so that its bits are the
    same wherever it is.
    """
    slots = tl.arange(0, BLOCK_S)
    num_whole = readable // BLOCK_SIZE
    is_whole = (choice >= 0) & (choice < num_whole)
    num_slots = tl.max(tl.where(is_whole, slots + 1, 0), 0)
    turn = readable % QUERIES_TOGETHER
    # As num_whole * turn // QUERIES_TOGETHER, which would not fit int32.
    first_block = num_whole // QUERIES_TOGETHER * turn + num_whole % QUERIES_TOGETHER * turn // QUERIES_TOGETHER
    first_slot = tl.min(tl.where(is_whole & (choice >= first_block), slots, num_slots), 0)
    last_slot = tl.min(tl.where(choice == num_whole, slots, NUM_SELECTED), 0)
    return num_slots, first_slot, last_slot, tl.where(last_slot < NUM_SELECTED, readable % BLOCK_SIZE, 0)


@triton.jit
def load_step(
    source,
    chosen,
    step,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """k `[BLOCK_N, BLOCK_D]` and v `[BLOCK_N, BLOCK_DV]` of a step, the index that it belongs to, whether the index
    counts, and which of the keys are read: all or none where KIND is WHOLE, otherwise `[1, BLOCK_N]`; the others are 0.

    source: where k and v are. chosen: the row of indices (`find_whole_blocks`). KIND: tiles of blocks of which all keys
    may be read, of the block of which only the first keys may, or of any blocks.
    """
    k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, k_stride, v_stride, key_start = source
    indices_ptr, choice, readable, num_slots, first_slot, last_slot = chosen
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    if KIND == WHOLE:
        slot = first_slot + step // SPLIT
        slot = tl.where(slot < num_slots, slot, slot - num_slots)
        first, last = load_block(indices_ptr, choice, slot, readable // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE, BLOCK_S)
        is_read = first < last
        first += key_start + step % SPLIT * BLOCK_N
        k = load_tile(k_tiles, k_ptr, row, first, kv_head, k_stride, is_read, HEAD_DIM, BLOCK_N, BLOCK_D, INT64_OFFSETS)
        v = load_tile(
            v_tiles, v_ptr, row, first, kv_head, v_stride, is_read, VALUE_DIM, BLOCK_N, BLOCK_DV, INT64_OFFSETS
        )
        read = is_read
    else:
        if KIND == PART:
            slot = last_slot
            first = readable // BLOCK_SIZE * BLOCK_SIZE + step * BLOCK_N
            last = readable
        else:
            slot = step // SPLIT
            first, last = load_block(indices_ptr, choice, slot, readable, BLOCK_SIZE, BLOCK_S)
            first += step % SPLIT * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key_start + keys, k_stride, keys < last, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
        v = load_rows(v_ptr, key_start + keys, v_stride, keys < last, VALUE_DIM, BLOCK_DV, INT64_OFFSETS)
        is_read = first < last
        read = (keys < last)[None, :]
    return k, v, slot, is_read, read


@triton.jit
def load_choices(indices_ptr, rows, mask, NUM_SELECTED: tl.constexpr, BLOCK_S: tl.constexpr):
    """The indices of every row, -1 for what names no block. rows: where they begin."""
    slots = tl.arange(0, BLOCK_S)
    mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    choices = tl.load(indices_ptr + rows[:, None] + slots[None, :], mask=mask, other=-1)
    return tl.where((choices >= 0) & (choices < 2**30), choices, -1).to(tl.int32)


@triton.jit
def load_factor(factors_ptr, place_in_row, is_read):
    """Factor of the logits of an index; 1 where there are none. That of an index that is not read may be anything."""
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.where(is_read, tl.load(factors_ptr + place_in_row).to(tl.float32), 0.0)
    return factor
