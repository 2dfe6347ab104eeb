"""Build the CSR index of an inverse index from tiles of sorted keys, in one pass over counts and one over the keys.

A tile has one run of keys for every slot that its entries selected. The entries of a slot are its runs, one tile after
the other. The prefix sums of the run lengths `[pairs, slots + 1, tiles]` therefore give the position of each run. The
kernel that sorts the tiles counts the runs too (`count_runs`).
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
    """Allocate the run lengths of `count_runs` for keys `[pairs, E]`, behind a leading 0 that makes the prefix sums
    exclusive.
    """
    return torch.zeros(1 + len(keys) * (num_slots + 1) * tiles, dtype=torch.int32, device=keys.device)


def index_sorted_tiles(
    keys: Tensor, counts: Tensor, num_slots: int, tile_size: int, tile_entries: int
) -> tuple[Tensor, Tensor]:
    """Return entries `[pairs, E]` and starts `[pairs, slots + 1]` of an `InverseIndex`.

    keys: int32 `[pairs, E]`, ascending within every tile of tile_entries <= tile_size keys: slot * tile_size + index of
    the entry in the tile; slot num_slots holds the entries without a block. counts: from `make_counts`, filled by
    `count_runs`; replaced by their prefix sums.
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
    """Load a tile of sorted keys. Returns `[TILE_SIZE]` each: keys, indices in the tile, a mask, and the start of each
    key's run.
    """
    indices = tl.arange(0, TILE_SIZE)
    mask = indices < num_keys
    keys = tl.load(keys_ptr + indices, mask=mask, other=0)
    before = tl.load(keys_ptr + indices - 1, mask=mask & (indices > 0), other=-1)
    begins = tl.where((indices == 0) | (before // TILE_SIZE != keys // TILE_SIZE), indices, 0)
    return keys, indices, mask, tl.associative_scan(begins, 0, _larger)


@triton.jit
def count_runs(keys_ptr, counts_ptr, pair, tile, num_keys, tiles_of_pair, num_slots, TILE_SIZE: tl.constexpr):
    """Store the run lengths of a tile, whose sorted keys begin at keys_ptr, into the counts."""
    keys, indices, mask, begins = find_runs(keys_ptr, num_keys, TILE_SIZE)
    slots = keys // TILE_SIZE
    behind = tl.load(keys_ptr + indices + 1, mask=indices + 1 < num_keys, other=-1)
    is_last = (indices + 1 == num_keys) | (behind // TILE_SIZE != slots)
    counts_ptr += 1 + (pair.to(tl.int64) * (num_slots + 1) + slots) * tiles_of_pair + tile
    tl.store(counts_ptr, indices - begins + 1, mask=mask & is_last)


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
    """Scatter the entries to their positions in the CSR index, and store the starts of the slots.

    One program per pair and tile. sums: prefix sums of the run lengths over all pairs.
    """
    pair = (tl.program_id(0) // tiles_of_pair).to(tl.int64)
    tile = tl.program_id(0) % tiles_of_pair
    first = tile * TILE_ENTRIES
    keys_ptr += pair * num_entries + first
    sums_ptr += pair * (num_slots + 1) * tiles_of_pair
    keys, indices, mask, begins = find_runs(keys_ptr, tl.minimum(num_entries - first, TILE_ENTRIES), TILE_SIZE)
    sums = tl.load(sums_ptr + (keys // TILE_SIZE).to(tl.int64) * tiles_of_pair + tile, mask=mask, other=0)
    tl.store(entries_ptr + sums + indices - begins, first + keys % TILE_SIZE, mask=mask)

    starts_ptr += pair * (num_slots + 1)
    for first_slot in tl.range(tile * TILE_SIZE, num_slots + 1, tiles_of_pair * TILE_SIZE):
        slots = first_slot + tl.arange(0, TILE_SIZE)
        mask = slots <= num_slots
        starts = tl.load(sums_ptr + slots.to(tl.int64) * tiles_of_pair, mask=mask, other=0)
        tl.store(starts_ptr + slots, (starts - pair * num_entries).to(tl.int32), mask=mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
