"""The lists of an inverse index from tiles of sorted keys, in a pass over counts and one over the keys.

A tile has a run of keys for every slot that its entries chose. The runs of a slot, one tile after the other, are its
list. So the lengths of the runs, `[pairs, slots + 1, tiles]`, added up in that order, say where each run goes. Whoever
sorts the tiles counts the runs as well (`count_runs`).
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch


def make_counts(keys: Tensor, num_slots: int, tiles: int) -> Tensor:
    """Room for what `count_runs` finds in the tiles of keys `[pairs, E]`. With a 0 in front the sums are of what comes
    before.
    """
    return torch.zeros(1 + len(keys) * (num_slots + 1) * tiles, dtype=torch.int32, device=keys.device)


def lists_of_sorted_tiles(
    keys: Tensor, counts: Tensor, num_slots: int, tile_size: int, tile_entries: int
) -> tuple[Tensor, Tensor]:
    """entries `[pairs, E]` and starts `[pairs, slots + 1]` of an `InverseIndex`.

    keys: int32 `[pairs, E]`, ascending in every tile of tile_entries <= tile_size keys: slot * tile_size + place of the
    entry in the tile, where slot num_slots is that of the entries that chose nothing. counts: from `make_counts`,
    filled by `count_runs`; they become sums.
    """
    pairs, num_entries = keys.shape
    tiles = -(-num_entries // tile_entries)
    entries = torch.empty_like(keys)
    starts = keys.new_empty(pairs, num_slots + 1)
    launch(
        place_kernel,
        (pairs * tiles,),
        *(keys, counts.cumsum_(0), entries, starts, num_entries, tiles, num_slots),
        TILE_SIZE=tile_size,
        TILE_ENTRIES=tile_entries,
        num_warps=4,
        device=keys.device,
    )
    return entries, starts


@triton.jit
def find_runs(keys_ptr, num_keys, TILE_SIZE: tl.constexpr):
    """Of a tile of sorted keys, [TILE_SIZE] each: the keys, their places in the tile and which there are, and where the
    run of each begins in the tile.
    """
    places = tl.arange(0, TILE_SIZE)
    mask = places < num_keys
    keys = tl.load(keys_ptr + places, mask=mask, other=0)
    before = tl.load(keys_ptr + places - 1, mask=mask & (places > 0), other=-1)
    begins = tl.where((places == 0) | (before // TILE_SIZE != keys // TILE_SIZE), places, 0)
    return keys, places, mask, tl.associative_scan(begins, 0, _larger)


@triton.jit
def count_runs(keys_ptr, counts_ptr, pair, tile, num_keys, tiles_of_pair, num_slots, TILE_SIZE: tl.constexpr):
    """The lengths of the runs of a tile, whose sorted keys begin at keys_ptr, into the counts."""
    keys, places, mask, begins = find_runs(keys_ptr, num_keys, TILE_SIZE)
    slots = keys // TILE_SIZE
    behind = tl.load(keys_ptr + places + 1, mask=places + 1 < num_keys, other=-1)
    is_last = (places + 1 == num_keys) | (behind // TILE_SIZE != slots)
    counts_ptr += 1 + (pair.to(tl.int64) * (num_slots + 1) + slots) * tiles_of_pair + tile
    tl.store(counts_ptr, places - begins + 1, mask=mask & is_last)


@triton.jit(do_not_specialize=['tiles_of_pair', 'num_slots'])
def place_kernel(
    keys_ptr,
    sums_ptr,
    entries_ptr,
    starts_ptr,
    num_entries,
    tiles_of_pair,
    num_slots,
    TILE_SIZE: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """Entries to their places: sums, counted over all pairs, say where a run of a tile begins, and with its first tile
    a list. One program per pair and tile.
    """
    pair = (tl.program_id(0) // tiles_of_pair).to(tl.int64)
    tile = tl.program_id(0) % tiles_of_pair
    first = tile * TILE_ENTRIES
    keys_ptr += pair * num_entries + first
    sums_ptr += pair * (num_slots + 1) * tiles_of_pair
    keys, places, mask, begins = find_runs(keys_ptr, tl.minimum(num_entries - first, TILE_ENTRIES), TILE_SIZE)
    sums = tl.load(sums_ptr + (keys // TILE_SIZE).to(tl.int64) * tiles_of_pair + tile, mask=mask, other=0)
    tl.store(entries_ptr + sums + places - begins, first + keys % TILE_SIZE, mask=mask)

    starts_ptr += pair * (num_slots + 1)
    for first_slot in tl.range(tile * TILE_SIZE, num_slots + 1, tiles_of_pair * TILE_SIZE):
        slots = first_slot + tl.arange(0, TILE_SIZE)
        mask = slots <= num_slots
        starts = tl.load(sums_ptr + slots.to(tl.int64) * tiles_of_pair, mask=mask, other=0)
        tl.store(starts_ptr + slots, (starts - pair * num_entries).to(tl.int32), mask=mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
