"""Which queries chose a block: block indices turned round, so that gradients of keys are added without atomics.

A *block slot* is a place for a block of keys of one row of the batch. Sequence i of a packed row owns the slots from
cu_seqlens_k[i] // block_size + i on: enough for its blocks, and no two sequences overlap. A row that is not packed owns
one slot per block. Block j of a sequence has the sequence's first slot + j, so the list of the next block stands next
to a block's own (the slot behind the last block of a sequence may belong to another sequence: ask for j + 1 only where
such a block exists).

A *pair* is a row of the batch and a kv head, pair = row * H + kv head. The index heads that share a kv head (R of them:
1, or G where heads choose alone) share its lists.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.placement import (
    Placement,
    find_tile,
    load_extent,
    load_num_keys,
    load_position,
    num_tiles,
)

# Entries that are sorted at once: some 50 bytes each, so less than half a gigabyte.
MAX_ENTRIES = 2**23
# Elements of a tile of the kernel, tokens times indices.
TILE_SIZE = 1024


class InverseIndex(NamedTuple):
    """The lists of a range of pairs, one per block slot.

    entries: int32 `[pairs, T * R * n]`, T the tokens that the lists are made for; an entry is (t * R + r) * n + i for
    index i of the row of the t-th of these tokens and of the r-th index head of the kv head. starts: int32
    `[pairs, slots + 1]`. The entries that chose slot s of pair p are entries[p, starts[p, s]:starts[p, s + 1]], in
    ascending order; those behind starts[p, slots] chose nothing.
    """

    entries: Tensor
    starts: Tensor


def num_block_slots(place: Placement, block_size: int) -> int:
    """Block slots of a row: a bound that does not depend on values on the device. place.seqlen_k counts the tokens; a
    caller that knows a lower bound of them puts it there (`place._replace`).
    """
    if place.cu_seqlens_k is None:
        return -(-place.seqlen_k // block_size)
    return place.seqlen_k // block_size + place.num_sequences + 1


def group_pairs(block_indices: Tensor, kv_heads: int, num_slots: int, most: int | None = None) -> list[range]:
    """The pairs in groups whose lists are made at once, within half a gigabyte where a group has more than one; at most
    `most` in one. What is computed for a pair must not depend on the group that it is in.
    """
    batch, seqlen, index_heads, num_selected = block_indices.shape
    pairs = batch * kv_heads
    cost = max(seqlen * (index_heads // kv_heads) * num_selected, num_slots + 1)
    size = max(1, min(pairs, MAX_ENTRIES // max(cost, 1), pairs if most is None else most))
    return [range(first, min(first + size, pairs)) for first in range(0, pairs, size)]


def make_inverse_index(
    block_indices: Tensor,
    place: Placement,
    pairs: range,
    *,
    kv_heads: int,
    block_size: int,
    causal: bool,
    unique: bool,
    tokens: range | None = None,
) -> InverseIndex:
    """The lists of the blocks that queries chose.

    block_indices: `[B, T, H or HQ, n]`, int32 or int64, last dimension contiguous. An index counts where it names a
    block with a key that the query may read: one of its sequence (and of its seqlens_k), and not of the future where
    causal. unique: of an index that stands several times in a row the first counts alone; otherwise all do.
    pairs: which pairs, from `group_pairs`. tokens: of the queries with these token numbers alone (packed or not, they
    count along T), or None for all; entries count from the first of them. The same bits in every run: a stable
    sort makes the order.
    """
    batch, seqlen, index_heads, num_selected = block_indices.shape
    repeats = index_heads // kv_heads
    num_slots = num_block_slots(place, block_size)
    tokens = range(seqlen) if tokens is None else tokens
    num_entries = len(tokens) * repeats * num_selected
    device = block_indices.device
    # What chose nothing has the slot behind the last one, so a pair has num_entries places in the sorted keys.
    offsets = torch.arange(len(pairs), dtype=torch.int32, device=device) * (num_slots + 1)
    keys = (offsets + num_slots)[:, None].repeat(1, num_entries)
    block_s = 1 << max(num_selected - 1, 0).bit_length()
    block_t = max(1, min(128, TILE_SIZE // block_s))
    tiles = num_tiles(place, seqlen, block_t)
    if place.cu_seqlens is None:
        tiles = tiles // max(batch, 1)
    launch(
        slot_kernel,
        (len(pairs) * tiles if num_entries else 0, repeats),
        *(block_indices, keys, block_indices.stride(), place, pairs.start, kv_heads, tiles, num_slots),
        *(tokens.start, len(tokens)),
        NUM_SELECTED=num_selected,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        UNIQUE=unique,
        BLOCK_T=block_t,
        BLOCK_S=block_s,
        num_warps=4,
        device=device,
    )
    return _sort_lists(keys, num_slots)


def _sort_lists(keys: Tensor, num_slots: int) -> InverseIndex:
    """The lists of keys `[pairs, entries]`, which count on over all pairs and their slots, num_slots + 1 each.

    The keys are sorted in parts, so that what sorting takes has a bound. The list of a slot is then what the parts have
    of it, one part after the other.
    """
    pairs, num_entries = keys.shape
    slots = torch.arange(pairs * (num_slots + 1) + 1, dtype=torch.int32, device=keys.device)
    parts = keys.flatten().split(MAX_ENTRIES)
    if len(parts) == 1:
        slot, order = parts[0].sort(stable=True)
        first_entry = torch.arange(pairs, dtype=torch.int32, device=keys.device)[:, None] * num_entries
        starts = torch.searchsorted(slot, slots[:-1], out_int32=True).view(pairs, num_slots + 1)
        return InverseIndex(order.int().view(pairs, num_entries) - first_entry, starts - first_entry)
    # [parts, slots + 1]: where the list of a slot begins in each sorted part.
    starts_in_part = torch.stack([torch.searchsorted(part.sort().values, slots, out_int32=True) for part in parts])
    counts = starts_in_part.diff(dim=1)
    starts = torch.nn.functional.pad(counts.sum(0).cumsum(0), (1, 0))
    moves = starts[:-1] + counts.cumsum(0) - counts - starts_in_part[:, :-1]
    entries = torch.empty(keys.numel(), dtype=torch.int32, device=keys.device)
    for index, part in enumerate(parts):
        slot, order = part.sort(stable=True)
        place = torch.arange(len(part), device=keys.device) + moves[index][slot]
        entries[place] = (order + index * MAX_ENTRIES).remainder_(max(1, num_entries)).int()
    first_entry = torch.arange(pairs, device=keys.device)[:, None] * num_entries
    starts = starts[:-1].view(pairs, num_slots + 1) - first_entry
    return InverseIndex(entries.view(pairs, num_entries), starts.int())


@triton.jit
def count_readable_blocks(positions, num_keys, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    """How many blocks of a sequence have a key that the query at a position may read; they are the first ones."""
    readable = num_keys + positions * 0
    if CAUSAL:
        readable = tl.minimum(readable, tl.maximum(positions + 1, 0))
    return (readable + (BLOCK_SIZE - 1)) // BLOCK_SIZE


@triton.jit
def find_block(slot, row, place, BLOCK_SIZE: tl.constexpr):
    """Sequence of a block slot of a row, and the first token of its block in that sequence. Packed: a slot may be one
    that no block has, with a first token behind the sequence's keys.
    """
    index = slot
    if place.cu_seqlens_k is None:
        index += row * tl.cdiv(place.seqlen_k, BLOCK_SIZE)
    sequence, first_key = find_tile(index, place.cu_seqlens_k, place.seqlen_k, place.num_sequences, BLOCK_SIZE)
    return sequence, first_key


@triton.jit
def slot_kernel(
    indices_ptr,
    keys_ptr,
    indices_strides,
    place,
    first_pair,
    kv_heads,
    tiles_of_pair,
    num_slots,
    first_token,
    num_tokens,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNIQUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """keys: int32 `[pairs, num_tokens, R, n]` of the tokens from first_token on, the place of pair and slot that each
    index chose among all pairs and slots. One program per pair and tile of tokens, and per index head of the pair.
    """
    pair = tl.program_id(0) // tiles_of_pair
    tile = tl.program_id(0) % tiles_of_pair
    row = (first_pair + pair) // kv_heads
    head = (first_pair + pair) % kv_heads * tl.num_programs(1) + tl.program_id(1)
    if place.cu_seqlens is None:
        tile += row * tiles_of_pair
    sequence, first_query = find_tile(tile, place.cu_seqlens, place.seqlen_q, place.num_sequences, BLOCK_T)
    _, query_start, num_queries = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    # The tile's queries whose tokens are asked for.
    first_asked = tl.maximum(first_query, first_token - query_start)
    stop_asked = tl.minimum(tl.minimum(num_queries, first_query + BLOCK_T), first_token + num_tokens - query_start)
    if first_asked >= stop_asked:
        return
    num_keys = load_num_keys(place, sequence)
    offset = load_position(place, sequence, num_queries, num_keys)
    first_slot = 0
    if place.cu_seqlens_k is not None:
        _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
        first_slot = key_start // BLOCK_SIZE + sequence

    queries = first_query + tl.arange(0, BLOCK_T)
    query_mask = (queries >= first_asked) & (queries < stop_asked)
    tokens = (query_start + queries).to(tl.int64)
    entry = tl.arange(0, BLOCK_S)
    mask = query_mask[:, None] & (entry < NUM_SELECTED)[None, :]
    rows = indices_ptr + row.to(tl.int64) * indices_strides[0] + head.to(tl.int64) * indices_strides[2]
    rows += tokens * indices_strides[1]
    blocks = tl.load(rows[:, None] + entry[None, :], mask=mask, other=-1)  # [BLOCK_T, BLOCK_S]
    num_blocks = count_readable_blocks(offset + queries, num_keys, BLOCK_SIZE, CAUSAL)
    counts = mask & (blocks >= 0) & (blocks < num_blocks[:, None])
    if UNIQUE:
        for earlier in range(NUM_SELECTED - 1):
            same = blocks == tl.load(rows + earlier, mask=query_mask, other=-1)[:, None]
            counts = counts & ~(same & (entry > earlier)[None, :])
    slots = tl.where(counts, first_slot + tl.where(counts, blocks, 0).to(tl.int32), num_slots)
    keys_ptr += pair.to(tl.int64) * num_tokens * tl.num_programs(1) * NUM_SELECTED
    places = ((tokens - first_token) * tl.num_programs(1) + tl.program_id(1)) * NUM_SELECTED
    tl.store(keys_ptr + places[:, None] + entry[None, :], pair * (num_slots + 1) + slots, mask=mask)
