"""CSR index from selected KV blocks to the queries that selected them, so that key gradients are added without atomics.

A *block slot* is a slot for one KV block of a batch row. Sequence i of a packed row owns the slots from cu_seqlens_k[i]
// block_size + i on: these suffice for its blocks, and no two sequences overlap. A row that is not packed owns one slot
per block. Block j of a sequence has the sequence's first slot + j, so the entries of block j + 1 follow those of block
j (the slot behind the last block of a sequence may belong to another sequence: read j + 1 only where such a block
exists).

A *pair* is a batch row and a KV head, pair = row * H + KV head. The R index heads of a KV head (1, or G where every
query head selects alone) share its entries.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.counting_sort import count_runs, index_sorted_tiles, make_counts
from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.tiles import sort_tile
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    find_tile,
    load_num_keys,
    load_position,
    locate_tokens,
)

# Entries that PyTorch sorts at once. Each takes about 50 bytes, so the sort stays below half a gigabyte.
MAX_ENTRIES = 2**23
# Bytes of keys, entries and counts of a group of several pairs in the counting sort.
MAX_BYTES = 2**29
# Pairs of up to so many entries are sorted together, by PyTorch in a single kernel.
MAX_ROW = 2**12
# Run lengths of a pair, 4 bytes each.
MAX_COUNTS = 5 * 2**24
# The counting sort does not pay for fewer entries than these.
MIN_COUNTED = 2**13


class Tile(NamedTuple):
    """Number of index rows times indices of a program, as its binary logarithm, and how the program sorts them."""

    log_size: int
    num_warps: int
    rotation: int


# The smallest suitable tile is used. A thread loads 4 indices at once, and 4 more for every doubling.
TILES = (Tile(10, 4, 1), Tile(11, 4, 2), Tile(12, 8, 2))
# For so few entries and slots in total the time of one tile decides.
SHORT_TILE, MAX_SHORT_ENTRIES, MAX_SHORT_SLOTS = Tile(8, 1, 2), 2**20, 2**9


class InverseIndex(NamedTuple):
    """CSR index of a range of pairs, with one row per block slot.

    entries: int32 `[pairs, T * R * n]` for T tokens; an entry is (t * R + r) * n + i for index i in the row of the t-th
    token and the r-th index head of the KV head. starts: int32 `[pairs, slots + 1]`. The entries that selected slot s
    of pair p are entries[p, starts[p, s]:starts[p, s + 1]], ascending; the entries behind starts[p, slots] selected no
    block.
    """

    entries: Tensor
    starts: Tensor

    def of(self, pairs: range) -> InverseIndex:
        """Return the index of some of the pairs, counted from the first pair of this index."""
        return InverseIndex(self.entries[pairs.start : pairs.stop], self.starts[pairs.start : pairs.stop])


def num_block_slots(layout: SequenceLayout, block_size: int) -> int:
    """Return the number of block slots of a row: a bound that does not depend on values on the device.

    layout.seqlen_k is the number of tokens; a caller that knows a lower bound replaces it (`layout._replace`).
    """
    if layout.cu_seqlens_k is None:
        return -(-layout.seqlen_k // block_size)
    return layout.seqlen_k // block_size + layout.num_sequences + 1


def group_pairs(block_indices: Tensor, kv_heads: int, num_slots: int, most: int | None = None) -> list[range]:
    """Split the pairs into groups whose index is built at once.

    A group of more than one pair stays within half a gigabyte. Groups have at most `most` pairs and about equal sizes,
    since few pairs do not fill a GPU. The result of a pair must not depend on its group.
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
    """Build the CSR index from selected blocks to queries.

    block_indices: `[B, T, H or HQ, n]`, int32 or int64, last dimension contiguous. An index counts if it names a block
    with a key that the query may read: a block of its sequence (and within its seqlens_k), and not in the future if
    causal. unique: of repeated indices in a row only the first counts; otherwise all count. pairs: a group of
    `group_pairs`. tokens: build the index for the queries with these token numbers along T only, or None for all;
    entries count from the first of them. The result is the same bit for bit in every run, and for every way of sorting.
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
        return _sort_keys(keys, num_slots)
    return InverseIndex(*index_sorted_tiles(keys, counts, num_slots, 2**log_tile, block_rows * num_selected))


def _choose_tile(pairs: int, num_rows: int, num_selected: int, num_slots: int) -> Tile | None:
    """Return the tile of the counting sort, or None where PyTorch sorts the pairs as a whole: for few entries, or for
    so many that the counts would take too much memory.
    """
    if num_rows * num_selected < MIN_COUNTED:
        return None
    is_short = pairs * num_rows * num_selected <= MAX_SHORT_ENTRIES and num_slots <= MAX_SHORT_SLOTS
    if is_short and _index_block(num_selected) <= 2**SHORT_TILE.log_size:
        return SHORT_TILE
    for tile in TILES:
        # With more slots than entries in a tile, the counts take longer than a larger tile.
        suits = num_slots <= 2**tile.log_size or tile == TILES[-1]
        # `sort_tile` requires keys below 2 ** 30.
        fits = _index_block(num_selected) <= 2**tile.log_size and (num_slots + 2) << tile.log_size <= 2**30
        if suits and fits and _num_counts(tile, num_rows, num_selected, num_slots) <= MAX_COUNTS:
            return tile
    return None


def _num_counts(tile: Tile, num_rows: int, num_selected: int, num_slots: int) -> int:
    block_rows = 2**tile.log_size // _index_block(num_selected)
    return (num_slots + 1) * -(-num_rows // block_rows)


def _index_block(num_selected: int) -> int:
    return 1 << max(num_selected - 1, 0).bit_length()


def _sort_keys(keys: Tensor, num_slots: int) -> InverseIndex:
    """Sort keys `[pairs, entries]`, which count over all pairs with num_slots + 1 slots each.

    The keys are sorted in parts, which bounds the memory of the sort. The entries of a slot are those of the parts, one
    part after the other.
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
    # [parts, slots + 1]: start of each slot in each sorted part.
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
    """Return the number of blocks of a sequence with a key that the query at a position may read: the first ones."""
    readable = num_keys + positions * 0
    if CAUSAL:
        readable = tl.minimum(readable, tl.maximum(positions + 1, 0))
    return (readable + (BLOCK_SIZE - 1)) // BLOCK_SIZE


@triton.jit
def find_block(slot, row, layout, BLOCK_SIZE: tl.constexpr):
    """Return the sequence of a block slot of a row, and the first token of its block in that sequence. Packed: a slot
    without a block has a first token behind the sequence's keys.
    """
    index = slot
    if layout.cu_seqlens_k is None:
        index += row * tl.cdiv(layout.seqlen_k, BLOCK_SIZE)
    sequence, first_key = find_tile(index, layout.cu_seqlens_k, layout.seqlen_k, layout.num_sequences, BLOCK_SIZE)
    return sequence, first_key


@triton.jit
def split_rows(first_row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Split the rows of a tile, which are every entry of a block with every head of its group: entry index in the
    block, and head in the group. first_row is a multiple of BLOCK_M.
    """
    in_tile = tl.arange(0, BLOCK_M)
    if BLOCK_M % GROUP == 0:
        # The compiler knows that these are positive and the same in every step.
        return first_row // GROUP + in_tile // GROUP, in_tile % GROUP
    rows = (first_row + in_tile).to(tl.uint32)
    return (rows // GROUP).to(tl.int32), (rows % GROUP).to(tl.int32)


@triton.jit
def load_entries(entries_ptr, first_row, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load the entries of a tile of rows (`split_rows`).

    Load them one step ahead of the rows that they point to: asynchronous copies complete in order, so a pipeline that
    also prefetches the entries of a later step would have to wait for everything that it fetched before them.
    """
    indices, _ = split_rows(first_row, GROUP, BLOCK_M)
    mask = first_row + tl.arange(0, BLOCK_M) < num_rows
    return tl.load(entries_ptr + indices, mask=mask, other=0)


# No specialisation on arguments that differ between calls: a sort takes seconds to compile.
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
    """Compute the sort keys of all entries: int32 `[pairs, num_rows, n]`, for the index rows (t, r) from first_token
    on.

    One program per pair and tile of rows. Without counts a key is the slot counted over all pairs, num_slots + 1 each.
    With counts, which receive the tile's run lengths, a key is slot * 2 ** LOG_TILE + index in the tile, and every tile
    is stored in ascending order.
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
    indices = in_tile[:, None] * NUM_SELECTED + entry[None, :]
    if counts_ptr is not None:
        # Padding sorts behind all slots.
        keys = tl.where(mask, slots * TILE_SIZE + indices, (num_slots + 1) * TILE_SIZE)
        keys = sort_tile(tl.reshape(keys, [TILE_SIZE]), LOG_TILE, ROTATION)
        indices = tl.arange(0, TILE_SIZE)
        num_keys = tl.minimum(num_rows - first_row, BLOCK_ROWS) * NUM_SELECTED
        tl.store(keys_ptr + indices, keys, mask=indices < num_keys)
        tl.debug_barrier()  # other threads read the stored keys below
        tile = tl.program_id(0) % tiles_of_pair
        count_runs(keys_ptr, counts_ptr, pair, tile, num_keys, tiles_of_pair, num_slots, TILE_SIZE)
    else:
        tl.store(keys_ptr + indices, pair * (num_slots + 1) + slots, mask=mask)
