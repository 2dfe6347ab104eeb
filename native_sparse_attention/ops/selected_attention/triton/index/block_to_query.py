"""CSR index from selected KV blocks to the queries that selected them, used by the block-major kernels.

A pair is a batch row and a KV head; a block slot is a place for a block in a batch row; an entry is one index of one
row of `block_indices` (all three as in `ops/_triton/inverse_index.py`). The entries of a slot are its queries. A row of
a tile is an entry with one head of its group.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import InverseIndex, group_pairs, make_inverse_index
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    find_tile,
    load_extent,
    load_num_keys,
    load_position,
)


class BlockToQuery(NamedTuple):
    """CSR index of a group of pairs, as a kernel argument.

    entries, starts: tensors of the `InverseIndex`. num_entries, num_slots: per pair. num_programs: per pair, enough for
    the chunks of every slot and of the entries without a block. first_pair: first pair of the group. kv_heads: H.
    first_token: the token of entry 0. R and n are compile-time constants, since kernels divide by them.
    """

    entries: Any
    starts: Any
    num_entries: int
    num_slots: int
    num_programs: int
    first_pair: int
    kv_heads: int
    first_token: int

    def of(self, pairs: range) -> BlockToQuery:
        """Return the index of some pairs, counted from the first pair of this index."""
        entries, starts = (t[pairs.start : pairs.stop] for t in (self.entries, self.starts))
        return self._replace(entries=entries, starts=starts, first_pair=self.first_pair + pairs.start)


def make_index(
    block_indices: Tensor, layout: SequenceLayout, *, kv_heads: int, num_slots: int, block_size: int, causal: bool
) -> InverseIndex | None:
    """Return the inverse index of all pairs and tokens, or None where it is too large to be built at once."""
    groups = group_pairs(block_indices, kv_heads, num_slots)
    if len(groups) != 1:
        return None
    sizes = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal, 'unique': True}
    return make_inverse_index(block_indices, layout, groups[0], **sizes)


def make_block_to_query(
    block_indices: Tensor,
    layout: SequenceLayout,
    pairs: range,
    tokens: range,
    *,
    kv_heads: int,
    block_size: int,
    causal: bool,
    chunk: int,
    index: InverseIndex | None = None,
) -> BlockToQuery:
    """Build the CSR index of some pairs (from `group_pairs`) and tokens, for programs of `chunk` entries each.

    index: the inverse index of all pairs and tokens, if it is known and `tokens` are all tokens.
    """
    index_heads, num_selected = block_indices.shape[2:]
    if index is None:
        sizes = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal, 'unique': True, 'tokens': tokens}
        index = make_inverse_index(block_indices, layout, pairs, **sizes)
    else:
        index = index.of(pairs)
    repeats, num_slots = index_heads // kv_heads, index.starts.shape[1] - 1
    num_entries = len(tokens) * repeats * num_selected
    num_programs = count_programs(num_entries, num_slots, chunk)
    counts = (num_entries, num_slots, num_programs, pairs.start, kv_heads, tokens.start)
    return BlockToQuery(index.entries, index.starts, *counts)


def split_evenly(count: int, most: int) -> list[range]:
    """Split `count` items into the fewest ranges of at most `most`, all but the last of equal length."""
    step = -(-count // max(1, -(-count // most)))
    return [range(first, min(first + step, count)) for first in range(0, count, max(step, 1))]


def count_programs(num_entries: int, num_slots: int, chunk: int) -> int:
    """Return a bound on the chunks of one pair, those of the entries without a block included."""
    return num_entries // chunk + num_slots + 1


@triton.jit
def find_chunk(index, csr, CHUNK: tl.constexpr, SCAN: tl.constexpr):
    """Locate chunk `index` of the CSR index.

    Returns pair, block slot, the chunk's first entry within the slot, the slot's first entry within the pair, and the
    slot's number of entries. Slot num_slots holds the entries without a block. A slot may own more chunks than it
    fills: then the first entry is at or behind its end. SCAN: compare many slots at once instead of a binary search.
    """
    pair = index // csr.num_programs
    index = index % csr.num_programs
    starts_ptr = csr.starts + pair.to(tl.int64) * (csr.num_slots + 1)
    # Slots follow each other as packed sequences do.
    if SCAN:
        slot = _find_slot(starts_ptr, index, csr.num_slots, CHUNK)
        first_entry = (index - (tl.load(starts_ptr + slot) // CHUNK + slot)) * CHUNK
    else:
        slot, first_entry = find_tile(index, starts_ptr, csr.num_entries, csr.num_slots, CHUNK)
    begin = tl.load(starts_ptr + slot)
    end = tl.load(starts_ptr + slot + 1, mask=slot < csr.num_slots, other=csr.num_entries)
    return pair, slot, first_entry, begin, end - begin


@triton.jit
def _find_slot(starts_ptr, index, num_slots, CHUNK: tl.constexpr):
    """Return the slot that owns chunk `index`: a slot owns the chunks from its start // CHUNK + slot on.

    First every step-th slot is compared, then the slots up to the next of these.
    """
    WIDTH: tl.constexpr = 512
    lanes = tl.arange(0, WIDTH)
    step = tl.cdiv(num_slots, WIDTH)
    slots = (lanes + 1) * step
    starts = tl.load(starts_ptr + slots, mask=slots <= num_slots, other=0)
    slot = tl.sum(((slots <= num_slots) & (starts // CHUNK + slots <= index)).to(tl.int32), 0) * step
    before = slot
    for first in range(1, step, WIDTH):
        slots = before + first + lanes
        mask = (first + lanes < step) & (slots <= num_slots)
        starts = tl.load(starts_ptr + slots, mask=mask, other=0)
        slot += tl.sum((mask & (starts // CHUNK + slots <= index)).to(tl.int32), 0)
    return slot


@triton.jit
def load_sequence(sequence, layout):
    """Return a sequence's first key in storage, its stored keys, its keys, and the offset from token to position."""
    _, key_start, num_stored = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    _, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    num_keys = load_num_keys(layout, sequence)
    return key_start, num_stored, num_keys, load_position(layout, sequence, num_queries, num_keys) - query_start


@triton.jit
def count_masked_entries(
    entries_ptr, num_entries, keys, key_mask, offset, csr, CHUNK: tl.constexpr, sizes: tl.constexpr
):
    """Return how many of a chunk's first entries need masks; the others read every key of the tile.

    These are the queries before the last key where causal, or all of them where a key of the tile does not exist.
    """
    num_masked = num_entries * 0
    if sizes.causal:
        # The queries of a block stand inside or behind it, in ascending order.
        MOST: tl.constexpr = min(sizes.block_size * sizes.repeats, CHUNK)
        BLOCK: tl.constexpr = triton.next_power_of_2(MOST)
        lanes = tl.arange(0, BLOCK)
        entry = tl.load(entries_ptr + lanes, mask=lanes < num_entries, other=0)
        positions = offset + csr.first_token + entry // (sizes.repeats * sizes.num_selected)
        num_masked = tl.sum(((lanes < num_entries) & (positions < tl.max(keys, 0))).to(tl.int32), 0)
    return tl.where(tl.min(key_mask.to(tl.int32), 0) == 0, num_entries, num_masked)


@triton.jit
def locate_entries(entry, head_in_group, kv_head, csr, sizes: tl.constexpr):
    """Return token, index head and query head of each row, from its entry and its head in the group."""
    entry = entry.to(tl.uint32)  # unsigned division is cheaper
    token = csr.first_token + (entry // (sizes.repeats * sizes.num_selected)).to(tl.int32)
    index_head = kv_head.to(tl.int32) * sizes.repeats + (entry // sizes.num_selected % sizes.repeats).to(tl.int32)
    return token, index_head, index_head * sizes.group + head_in_group


@triton.jit
def load_factors(factors_ptr, factors_strides, row, token, index_head, entry, mask, NUM_SELECTED: tl.constexpr):
    """Load the `block_scale` of each row's entry, in float32."""
    offsets = row * factors_strides[0] + token * factors_strides[1] + index_head * factors_strides[2]
    return tl.load(factors_ptr + offsets + entry % NUM_SELECTED, mask=mask, other=0.0).to(tl.float32)
