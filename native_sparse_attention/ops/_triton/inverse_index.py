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

from native_sparse_attention.ops._triton.counting_sort import count_runs, lists_of_sorted_tiles, make_counts
from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.tiles import sort_tile
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    find_tile,
    load_num_keys,
    load_position,
    locate_tokens,
)

# Entries that PyTorch sorts at once: some 50 bytes each, so less than half a gigabyte.
MAX_ENTRIES = 2**23
# Bytes of keys, entries and counts of several pairs whose lists a counting sort makes at once.
MAX_BYTES = 2**29
# Lists of a pair of up to so many entries are sorted beside those of the others, by PyTorch in a single kernel.
MAX_ROW = 2**12
# Counts of the entries of tiles of a pair in slots, 4 bytes each.
MAX_COUNTS = 5 * 2**24
# Lists of fewer entries than this are not worth the counting sort.
MIN_COUNTED = 2**13


class Tile(NamedTuple):
    """Index rows times indices that a program has, by the binary logarithm of their number, and how it sorts them."""

    log_size: int
    num_warps: int
    rotation: int


# The smallest that suits is taken. A thread loads 4 indices at once, and as many again for every doubling.
TILES = (Tile(10, 4, 1), Tile(11, 4, 2), Tile(12, 8, 2))
# So few entries in all, of so few slots, take as long as a tile of them does.
SHORT_TILE, MAX_SHORT_ENTRIES, MAX_SHORT_SLOTS = Tile(8, 1, 2), 2**20, 2**9


class InverseIndex(NamedTuple):
    """The lists of a range of pairs, one per block slot.

    entries: int32 `[pairs, T * R * n]`, T the tokens that the lists are made for; an entry is (t * R + r) * n + i for
    index i of the row of the t-th of these tokens and of the r-th index head of the kv head. starts: int32
    `[pairs, slots + 1]`. The entries that chose slot s of pair p are entries[p, starts[p, s]:starts[p, s + 1]], in
    ascending order; those behind starts[p, slots] chose nothing.
    """

    entries: Tensor
    starts: Tensor

    def of(self, pairs: range) -> InverseIndex:
        """The lists of some of the pairs, which count from the first that this has."""
        return InverseIndex(self.entries[pairs.start : pairs.stop], self.starts[pairs.start : pairs.stop])


def num_block_slots(layout: SequenceLayout, block_size: int) -> int:
    """Block slots of a row: a bound that does not depend on values on the device. layout.seqlen_k counts the tokens; a
    caller that knows a lower bound of them puts it there (`layout._replace`).
    """
    if layout.cu_seqlens_k is None:
        return -(-layout.seqlen_k // block_size)
    return layout.seqlen_k // block_size + layout.num_sequences + 1


def group_pairs(block_indices: Tensor, kv_heads: int, num_slots: int, most: int | None = None) -> list[range]:
    """The pairs in groups whose lists are made at once, within half a gigabyte where a group has more than one; at most
    `most` in one, and about as many in each, since few do not fill a GPU. What is computed for a pair must not depend
    on the group that it is in.
    """
    batch, seqlen, index_heads, num_selected = block_indices.shape
    pairs = batch * kv_heads
    num_rows = seqlen * (index_heads // kv_heads)
    num_entries = num_rows * num_selected
    tile = _choose_tile(pairs, num_rows, num_selected, num_slots)
    if tile is None:
        size = MAX_ENTRIES // max(num_entries, num_slots + 1)
    else:
        counts = _num_counts(tile, num_rows, num_selected, num_slots)
        size = MAX_BYTES // (4 * (2 * num_entries + num_slots + 1 + counts))
    size = min(size, pairs, pairs if most is None else most)
    num_groups = -(-pairs // max(1, size))
    size = max(1, -(-pairs // max(1, num_groups)))
    return [range(first, min(first + size, pairs)) for first in range(0, pairs, size)]


def make_inverse_index(
    block_indices: Tensor,
    layout: SequenceLayout,
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
    count along T), or None for all; entries count from the first of them. The same bits in every run, and whichever way
    the lists are sorted.
    """
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    tokens = range(seqlen) if tokens is None else tokens
    repeats = index_heads // kv_heads
    num_rows = len(tokens) * repeats
    num_slots = num_block_slots(layout, block_size)
    counted = _choose_tile(len(pairs), num_rows, num_selected, num_slots)
    tile = counted or TILES[0]
    block_s = _index_block(num_selected)
    log_tile = max(tile.log_size, block_s.bit_length() - 1)
    block_rows = 2**log_tile // block_s
    num_tiles = -(-num_rows // block_rows)
    device = block_indices.device
    keys = torch.empty(len(pairs), num_rows * num_selected, dtype=torch.int32, device=device)
    counts = None if counted is None else make_counts(keys, num_slots, num_tiles)
    launch(
        slot_kernel,
        (len(pairs) * num_tiles if num_selected else 0,),
        *(block_indices, keys, counts, block_indices.stride(), layout),
        *(pairs.start, kv_heads, repeats, num_tiles, num_slots, tokens.start, num_rows),
        NUM_SELECTED=num_selected,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        UNIQUE=unique,
        BLOCK_S=block_s,
        LOG_TILE=log_tile,
        ROTATION=tile.rotation,
        num_warps=tile.num_warps,
        device=device,
    )
    if counts is None:
        return _sort_lists(keys, num_slots)
    return InverseIndex(*lists_of_sorted_tiles(keys, counts, num_slots, 2**log_tile, block_rows * num_selected))


def _choose_tile(pairs: int, num_rows: int, num_selected: int, num_slots: int) -> Tile | None:
    """The tiles of a counting sort of the lists of pairs, or None where the lists are sorted as a whole: where they
    are short, or so long and so many that the counts would take too much memory.
    """
    if num_rows * num_selected < MIN_COUNTED:
        return None
    is_short = pairs * num_rows * num_selected <= MAX_SHORT_ENTRIES and num_slots <= MAX_SHORT_SLOTS
    if is_short and _index_block(num_selected) <= 2**SHORT_TILE.log_size:
        return SHORT_TILE
    for tile in TILES:
        # Counts of more slots than a tile has entries take longer than a larger tile.
        suits = num_slots <= 2**tile.log_size or tile == TILES[-1]
        # The keys of a tile are below 2 ** 30, as `sort_tile` wants them.
        fits = _index_block(num_selected) <= 2**tile.log_size and (num_slots + 2) << tile.log_size <= 2**30
        if suits and fits and _num_counts(tile, num_rows, num_selected, num_slots) <= MAX_COUNTS:
            return tile
    return None


def _num_counts(tile: Tile, num_rows: int, num_selected: int, num_slots: int) -> int:
    block_rows = 2**tile.log_size // _index_block(num_selected)
    return (num_slots + 1) * -(-num_rows // block_rows)


def _index_block(num_selected: int) -> int:
    return 1 << max(num_selected - 1, 0).bit_length()


def _sort_lists(keys: Tensor, num_slots: int) -> InverseIndex:
    """The lists of keys `[pairs, entries]`, which count on over all pairs and their slots, num_slots + 1 each.

    The keys are sorted in parts, so that what sorting takes has a bound. The list of a slot is then what the parts have
    of it, one part after the other.
    """
    pairs, num_entries = keys.shape
    if 0 < num_entries <= MAX_ROW and keys.numel() <= MAX_ENTRIES:
        slots = torch.arange(pairs * (num_slots + 1), dtype=torch.int32, device=keys.device).view(pairs, num_slots + 1)
        slot, order = keys.sort(stable=True)
        return InverseIndex(order.int(), torch.searchsorted(slot, slots, out_int32=True))
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
        targets = torch.arange(len(part), device=keys.device) + moves[index][slot]
        entries[targets] = (order + index * MAX_ENTRIES).remainder_(max(1, num_entries)).int()
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
def find_block(slot, row, layout, BLOCK_SIZE: tl.constexpr):
    """Sequence of a block slot of a row, and the first token of its block in that sequence. Packed: a slot may be one
    that no block has, with a first token behind the sequence's keys.
    """
    index = slot
    if layout.cu_seqlens_k is None:
        index += row * tl.cdiv(layout.seqlen_k, BLOCK_SIZE)
    sequence, first_key = find_tile(index, layout.cu_seqlens_k, layout.seqlen_k, layout.num_sequences, BLOCK_SIZE)
    return sequence, first_key


@triton.jit
def split_members(first_member, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a tile of members of a list, which are every entry with every head of its index head: places in the list, and
    heads in the group. first_member is a multiple of BLOCK_M.
    """
    in_tile = tl.arange(0, BLOCK_M)
    if BLOCK_M % GROUP == 0:
        # Numbers that are known to be positive, and the same in every step.
        return first_member // GROUP + in_tile // GROUP, in_tile % GROUP
    members = (first_member + in_tile).to(tl.uint32)
    return (members // GROUP).to(tl.int32), (members % GROUP).to(tl.int32)


@triton.jit
def load_entries(entries_ptr, first_member, num_members, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Entries of a tile of members of a list. To be loaded a step ahead of what they say where to find: copies end in
    order, so a pipeline that fetches the entries of a later step itself has to wait for all that it has fetched before
    them.
    """
    places, _ = split_members(first_member, GROUP, BLOCK_M)
    mask = first_member + tl.arange(0, BLOCK_M) < num_members
    return tl.load(entries_ptr + places, mask=mask, other=0)


# What differs from call to call is not compiled for, as a sort takes seconds to compile.
@triton.jit(do_not_specialize=['first_pair', 'tiles_of_pair', 'num_slots', 'first_token', 'num_rows'])
def slot_kernel(
    indices_ptr,
    keys_ptr,
    counts_ptr,
    indices_strides,
    layout,
    first_pair,
    kv_heads,
    repeats,
    tiles_of_pair,
    num_slots,
    first_token,
    num_rows,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNIQUE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG_TILE: tl.constexpr,
    ROTATION: tl.constexpr,
):
    """keys: int32 `[pairs, num_rows, n]`, for the index rows (t, r) of the tokens from first_token on. One program per
    pair and tile of rows.

    Without counts: the place that an index chose among all pairs and slots, num_slots + 1 each. With counts, of which
    each tile leaves its own: the slot that an index chose and its place in the tile, slot * 2 ** LOG_TILE + place, in
    ascending order in each tile.
    """
    TILE_SIZE: tl.constexpr = 2**LOG_TILE
    BLOCK_ROWS: tl.constexpr = TILE_SIZE // BLOCK_S
    pair = tl.program_id(0) // tiles_of_pair
    first_row = tl.program_id(0) % tiles_of_pair * BLOCK_ROWS
    batch_row = (first_pair + pair) // kv_heads
    in_tile = tl.arange(0, BLOCK_ROWS)
    entry = tl.arange(0, BLOCK_S)
    row_mask = in_tile < num_rows - first_row
    tokens = first_token + (first_row + in_tile) // repeats
    heads = (first_pair + pair) % kv_heads * repeats + (first_row + in_tile) % repeats
    if layout.cu_seqlens is None:
        num_keys = load_num_keys(layout, batch_row)
        positions = load_position(layout, batch_row, layout.seqlen_q, num_keys) + tokens
        first_slots = tokens * 0
    else:
        sequences, positions, key_starts, num_keys = locate_tokens(tokens, row_mask, layout)
        first_slots = key_starts // BLOCK_SIZE + sequences

    mask = row_mask[:, None] & (entry < NUM_SELECTED)[None, :]
    rows = indices_ptr + batch_row.to(tl.int64) * indices_strides[0]
    rows += tokens.to(tl.int64) * indices_strides[1] + heads.to(tl.int64) * indices_strides[2]
    blocks = tl.load(rows[:, None] + entry[None, :], mask=mask, other=-1)  # [BLOCK_ROWS, BLOCK_S]
    num_blocks = count_readable_blocks(positions, num_keys, BLOCK_SIZE, CAUSAL)
    counts = mask & (blocks >= 0) & (blocks < num_blocks[:, None])
    if UNIQUE:
        for earlier in range(NUM_SELECTED - 1):
            same = blocks == tl.load(rows + earlier, mask=row_mask, other=-1)[:, None]
            counts = counts & ~(same & (entry > earlier)[None, :])
    slots = tl.where(counts, first_slots[:, None] + tl.where(counts, blocks, 0).to(tl.int32), num_slots)

    keys_ptr += (pair.to(tl.int64) * num_rows + first_row) * NUM_SELECTED
    places = in_tile[:, None] * NUM_SELECTED + entry[None, :]
    if counts_ptr is not None:
        # What is no index comes behind all slots.
        keys = tl.where(mask, slots * TILE_SIZE + places, (num_slots + 1) * TILE_SIZE)
        keys = sort_tile(tl.reshape(keys, [TILE_SIZE]), LOG_TILE, ROTATION)
        places = tl.arange(0, TILE_SIZE)
        num_keys = tl.minimum(num_rows - first_row, BLOCK_ROWS) * NUM_SELECTED
        tl.store(keys_ptr + places, keys, mask=places < num_keys)
        tl.debug_barrier()  # the keys that its threads stored are read by others now
        tile = tl.program_id(0) % tiles_of_pair
        count_runs(keys_ptr, counts_ptr, pair, tile, num_keys, tiles_of_pair, num_slots, TILE_SIZE)
    else:
        tl.store(keys_ptr + places, pair * (num_slots + 1) + slots, mask=mask)
