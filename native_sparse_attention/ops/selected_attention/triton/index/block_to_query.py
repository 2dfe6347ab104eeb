"""The lists of those who chose a block, as the kernels that have a program per block of keys go through them."""

# To pyright a jit function that another calls never returns, and a number is no constant.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import InverseIndex, find_block, group_pairs, make_inverse_index
from native_sparse_attention.ops._triton.tiles import store_rows
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    find_tile,
    load_extent,
    load_num_keys,
    load_position,
)


class Lists(NamedTuple):
    """The lists of a group of pairs, as kernels take them.

    entries, starts: of the inverse index, tensors. num_entries, num_slots: of a pair. num_programs: of a pair, enough
    for the chunks of its lists and of what chose nothing. first_pair: of the group. kv_heads: H. first_token: the token
    that entry 0 is of. R and n are constants of the kernels, which divide by them.
    """

    entries: Any
    starts: Any
    num_entries: int
    num_slots: int
    num_programs: int
    first_pair: int
    kv_heads: int
    first_token: int

    def of(self, pairs: range) -> Lists:
        """The lists of some of the pairs, which count from the first that this has."""
        entries, starts = (t[pairs.start : pairs.stop] for t in (self.entries, self.starts))
        return self._replace(entries=entries, starts=starts, first_pair=self.first_pair + pairs.start)


def make_index(
    block_indices: Tensor, place: SequenceLayout, *, kv_heads: int, num_slots: int, block_size: int, causal: bool
) -> InverseIndex | None:
    """What the lists of all pairs and tokens are made of, or None where that is too much to be made at once."""
    groups = group_pairs(block_indices, kv_heads, num_slots)
    if len(groups) != 1:
        return None
    sizes = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal, 'unique': True}
    return make_inverse_index(block_indices, place, groups[0], **sizes)


def make_lists(
    block_indices: Tensor,
    place: SequenceLayout,
    pairs: range,
    tokens: range,
    *,
    kv_heads: int,
    block_size: int,
    causal: bool,
    chunk: int,
    index: InverseIndex | None = None,
) -> Lists:
    """The lists of pairs from `group_pairs` and of these tokens, gone through in chunks of so many entries. index: that
    of all pairs and tokens, where it is there, and these are all tokens.
    """
    index_heads, num_selected = block_indices.shape[2:]
    if index is None:
        sizes = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal, 'unique': True, 'tokens': tokens}
        index = make_inverse_index(block_indices, place, pairs, **sizes)
    else:
        index = index.of(pairs)
    repeats, num_slots = index_heads // kv_heads, index.starts.shape[1] - 1
    num_entries = len(tokens) * repeats * num_selected
    num_programs = count_programs(num_entries, num_slots, chunk)
    counts = (num_entries, num_slots, num_programs, pairs.start, kv_heads, tokens.start)
    return Lists(index.entries, index.starts, *counts)


def split_evenly(count: int, most: int) -> list[range]:
    """So many in as few ranges of at most `most` as there can be, the first ones as long as each other."""
    step = -(-count // max(1, -(-count // most)))
    return [range(first, min(first + step, count)) for first in range(0, count, max(step, 1))]


def count_programs(num_entries: int, num_slots: int, chunk: int) -> int:
    """Enough for the chunks of so many entries of the lists of a pair and of what chose nothing."""
    return num_entries // chunk + num_slots + 1


class Parts(NamedTuple):
    """What blocks add to results of their members: a row for every entry of a pair and head of its index head, `[pairs,
    T * R * n, G]`.

    out: `[rows, D or DV]`, of delta `[rows, 0]`, float16 or float32, in units of unit, float32 `[rows]` (`find_unit`).
    first, second: float32 `[rows]`, more of what a part has, or None. Where there is no part, unit and second are 0
    (`open_chunk`), the others anything.
    """

    out: Any
    unit: Any
    first: Any
    second: Any


def dtype_of_parts(dtype: torch.dtype) -> torch.dtype:
    """Of inputs of a dtype: one that is more exact, so that parts do not show in the results."""
    return torch.float16 if dtype == torch.bfloat16 else torch.float32


def make_parts(like: Tensor, rows: int, size: int, has_second: bool = True) -> Parts:
    """Room for so many parts of the size."""
    return Parts(
        like.new_empty(rows, size, dtype=dtype_of_parts(like.dtype)),
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty(rows, dtype=torch.float32) if has_second else None,
    )


def make_inverses(lse: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room for a number for each query and head, where parts of inputs of a dtype have units."""
    return torch.empty_like(lse) if dtype_of_parts(dtype) == torch.float16 else None


def bytes_of_part(like: Tensor, size: int) -> int:
    return dtype_of_parts(like.dtype).itemsize * size + 12


@triton.jit
def find_chunk(index, lists, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Chunk `index` of the lists: its pair, block slot and first entry in the list, where the list begins, and its
    length. Slot num_slots has the list of what chose nothing. The first entry is behind the end of a list where it has
    fewer chunks than there is room for. AT_ONCE: by looking at many slots together, not one after the other.
    """
    pair = index // lists.num_programs
    index = index % lists.num_programs
    starts_ptr = lists.starts + pair.to(tl.int64) * (lists.num_slots + 1)
    # Lists follow each other as packed sequences do.
    if AT_ONCE:
        slot = _find_slot(starts_ptr, index, lists.num_slots, CHUNK)
        first_entry = (index - (tl.load(starts_ptr + slot) // CHUNK + slot)) * CHUNK
    else:
        slot, first_entry = find_tile(index, starts_ptr, lists.num_entries, lists.num_slots, CHUNK)
    begin = tl.load(starts_ptr + slot)
    end = tl.load(starts_ptr + slot + 1, mask=slot < lists.num_slots, other=lists.num_entries)
    return pair, slot, first_entry, begin, end - begin


@triton.jit
def _find_slot(starts_ptr, index, num_slots, CHUNK: tl.constexpr):
    """The slot whose list has chunk `index`: it owns the chunks from its start // CHUNK + slot on. Of every step-th
    slot those that begin at or before it are counted, and then of the slots up to the next of these.
    """
    WIDTH: tl.constexpr = 512
    places = tl.arange(0, WIDTH)
    step = tl.cdiv(num_slots, WIDTH)
    slots = (places + 1) * step
    starts = tl.load(starts_ptr + slots, mask=slots <= num_slots, other=0)
    slot = tl.sum(((slots <= num_slots) & (starts // CHUNK + slots <= index)).to(tl.int32), 0) * step
    before = slot
    for first in range(1, step, WIDTH):
        slots = before + first + places
        mask = (first + places < step) & (slots <= num_slots)
        starts = tl.load(starts_ptr + slots, mask=mask, other=0)
        slot += tl.sum((mask & (starts // CHUNK + slots <= index)).to(tl.int32), 0)
    return slot


@triton.jit
def load_sequence(sequence, place):
    """First key and number of keys of a sequence as they are stored, the keys that it has, and what to add to a token
    to have its position.
    """
    _, key_start, num_stored = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    _, query_start, num_queries = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    num_keys = load_num_keys(place, sequence)
    return key_start, num_stored, num_keys, load_position(place, sequence, num_queries, num_keys) - query_start


@triton.jit
def open_chunk(
    index,
    place,
    lists,
    parts,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Chunk `index` of the lists, with the whole block in BLOCK_N: how many entries it has and where they are, pair,
    row and kv head, where the sequence's keys begin, the block's keys and which of them there are, and what to add to a
    token to have its position. Entries without a block, of which a chunk has none then, are said to have no parts.
    """
    pair, slot, first_entry, begin, length = find_chunk(index, lists, CHUNK, True)
    row = (lists.first_pair + pair) // lists.kv_heads
    sequence, first_key = find_block(slot, row, place, BLOCK_SIZE)
    key_start, _, num_keys, offset = load_sequence(sequence, place)
    keys = first_key + tl.arange(0, BLOCK_N)
    key_mask = (keys >= 0) & (keys < tl.minimum(num_keys, first_key + BLOCK_SIZE))
    num_entries = tl.minimum(length - first_entry, CHUNK)
    entries_ptr = lists.entries + pair.to(tl.int64) * lists.num_entries + begin + first_entry
    if (slot >= lists.num_slots) | (sequence >= place.num_sequences):
        for first_member in tl.range(0, num_entries * GROUP, 1024):
            members = first_member + tl.arange(0, 1024)
            mask = members < num_entries * GROUP
            entry = tl.load(entries_ptr + members // GROUP, mask=mask, other=0)
            places = (pair * lists.num_entries + entry) * GROUP + members % GROUP
            tl.store(parts.unit + places, tl.zeros([1024], tl.float32), mask=mask)
            if parts.second is not None:
                tl.store(parts.second + places, tl.zeros([1024], tl.float32), mask=mask)
        num_entries = 0
    kv_head = (lists.first_pair + pair) % lists.kv_heads
    return num_entries, entries_ptr, pair, row.to(tl.int64), kv_head, key_start, keys, key_mask, offset


@triton.jit
def count_near(
    entries_ptr,
    num_entries,
    keys,
    key_mask,
    offset,
    lists,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
):
    """How many of the first entries must be masked: those before the last of the keys where CAUSAL, or all where a key
    is missing. The others read every one of the keys.
    """
    num_near = num_entries * 0
    if CAUSAL:
        # Those who chose a block stand in it or behind it, in order.
        NEAR: tl.constexpr = min(BLOCK_SIZE * REPEATS, CHUNK)
        BLOCK: tl.constexpr = triton.next_power_of_2(NEAR)
        places = tl.arange(0, BLOCK)
        entry = tl.load(entries_ptr + places, mask=places < num_entries, other=0)
        positions = offset + lists.first_token + entry // (REPEATS * NUM_SELECTED)
        num_near = tl.sum(((places < num_entries) & (positions < tl.max(keys, 0))).to(tl.int32), 0)
    return tl.where(tl.min(key_mask.to(tl.int32), 0) == 0, num_entries, num_near)


@triton.jit
def find_members(
    entry, in_group, kv_head, lists, GROUP: tl.constexpr, REPEATS: tl.constexpr, NUM_SELECTED: tl.constexpr
):
    """Token, index head and head of each member, by its entry and its head in the group."""
    entry = entry.to(tl.uint32)  # to divide by
    token = lists.first_token + (entry // (REPEATS * NUM_SELECTED)).to(tl.int32)
    index_head = kv_head.to(tl.int32) * REPEATS + (entry // NUM_SELECTED % REPEATS).to(tl.int32)
    return token, index_head, index_head * GROUP + in_group


@triton.jit
def load_factors(factors_ptr, factors_strides, row, token, index_head, entry, mask, NUM_SELECTED: tl.constexpr):
    """Factors of the logits of members of a list."""
    offsets = row * factors_strides[0] + token * factors_strides[1] + index_head * factors_strides[2]
    return tl.load(factors_ptr + offsets + entry % NUM_SELECTED, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def find_owners(
    index,
    lists,
    num_tokens,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Tile `index` of those that parts belong to, the heads of num_tokens tokens of every pair: which exist, row, token
    and head of each, and the place of its first part; the next ones are GROUP behind each other.
    """
    readers = num_tokens * REPEATS
    tiles = tl.cdiv(readers * GROUP, BLOCK_M)
    pair = (index // tiles).to(tl.int64)
    owners = (index % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    reader = owners // GROUP
    places = (pair * lists.num_entries + reader * NUM_SELECTED) * GROUP + owners % GROUP
    kv_head = (lists.first_pair + pair) % lists.kv_heads
    head = (kv_head * REPEATS + reader % REPEATS) * GROUP + owners % GROUP
    token = (lists.first_token + reader // REPEATS).to(tl.int64)
    return owners < readers * GROUP, (lists.first_pair + pair) // lists.kv_heads, token, head, places


@triton.jit
def find_unit(bound):
    """The unit of float16 parts whose values are at most `bound`, or a few times that, and its inverse: powers of two,
    2 ** -100 to 2 ** 125. The largest multiples are 2 ** 12 to 2 ** 13, so those from bound * 2 ** -26 on have all
    bits of a float16, and the bound may be far off.
    """
    unit = tl.minimum(tl.maximum(bound * 0.000244140625, 7.888609052210118e-31), 4.253529586511731e37)
    unit = (unit.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return unit, invert_power(unit)


@triton.jit
def invert_power(power):
    """1 / power, of powers of two from 2 ** -126 to 2 ** 126."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def store_part(parts, places, values, unit, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """values `[places, SIZE]`, multiples of unit, which is not 0: that says that there is no part. In float16 they are
    stored in another order, which `sort_columns` undoes.

    Products leave a thread of a quad two neighbouring elements of every 8 of a row. What a thread has is stored side by
    side and does not go through shared memory.
    """
    tl.store(parts.unit + places, unit, mask=mask)
    if (parts.out.dtype.element_ty == tl.float16) & (SIZE == BLOCK):
        ROWS: tl.constexpr = values.shape[0]
        NUM_PIECES: tl.constexpr = SIZE // 32
        values = tl.reshape(values.to(tl.float16), [ROWS // 16, 2, 8, NUM_PIECES, 4, 4, 2])
        values = tl.reshape(tl.permute(values, [3, 1, 0, 2, 5, 4, 6]), [NUM_PIECES * ROWS, 32])
        places = tl.permute(tl.reshape(tl.where(mask, places, -1), [1, ROWS // 16, 2, 8]), [0, 2, 1, 3])
        places = tl.broadcast_to(places, [NUM_PIECES, 2, ROWS // 16, 8])
        pieces = places * NUM_PIECES + tl.arange(0, NUM_PIECES)[:, None, None, None]
        pieces = tl.reshape(pieces, [NUM_PIECES * ROWS])
        store_rows(parts.out, pieces, 32, values, pieces >= 0, 32, 32, False)
    else:
        store_rows(parts.out, places, SIZE, values, mask, SIZE, BLOCK, False)


@triton.jit
def sort_columns(parts, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of what `store_part` stored, with their columns in order."""
    if (parts.out.dtype.element_ty == tl.float16) & (SIZE == BLOCK):
        ROWS: tl.constexpr = values.shape[0]
        values = tl.permute(tl.reshape(values, [ROWS, SIZE // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
        values = tl.reshape(values, [ROWS, SIZE])
    return values
