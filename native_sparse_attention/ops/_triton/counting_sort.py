"""The lists of an inverse index from tiles of sorted keys, in two passes over the keys and one over counts.

A tile has a run of keys for every slot that its entries chose. The runs of a slot, one tile after the other, are its
list. So the lengths of the runs, `[pairs, slots + 1, tiles]`, added up in that order, say where each run goes.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch


def lists_of_sorted_tiles(keys: Tensor, num_slots: int, tile_size: int, tile_entries: int) -> tuple[Tensor, Tensor]:
    """entries `[pairs, E]` and starts `[pairs, slots + 1]` of an `InverseIndex`.

    keys: int32 `[pairs, E]`, ascending in every tile of tile_entries <= tile_size keys: slot * tile_size + place of the
    entry in the tile, where slot num_slots is that of the entries that chose nothing.
    """
    pairs, num_entries = keys.shape
    tiles = -(-num_entries // tile_entries)
    # With a 0 in front the sums are of what comes before.
    counts = torch.zeros(1 + pairs * (num_slots + 1) * tiles, dtype=torch.int32, device=keys.device)
    entries = torch.empty_like(keys)
    sizes = (num_entries, tiles, num_slots)
    meta = {'TILE_SIZE': tile_size, 'TILE_ENTRIES': tile_entries, 'num_warps': 4, 'device': keys.device}
    launch(run_kernel, (pairs * tiles,), keys, counts, None, *sizes, **meta)
    begins = counts.cumsum_(0)
    launch(run_kernel, (pairs * tiles,), keys, begins, entries, *sizes, **meta)
    first_entry = torch.arange(pairs, dtype=torch.int32, device=keys.device)[:, None] * num_entries
    return entries, begins[:-1].view(pairs, num_slots + 1, tiles)[:, :, 0] - first_entry


@triton.jit(do_not_specialize=['tiles_of_pair', 'num_slots'])
def run_kernel(
    keys_ptr,
    runs_ptr,
    entries_ptr,
    num_entries,
    tiles_of_pair,
    num_slots,
    TILE_SIZE: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """Without entries: the lengths of the runs of a tile into runs[1:]. With entries: these to their places, the runs
    beginning where runs[:-1] says, counted over all pairs. One program per pair and tile.
    """
    pair = (tl.program_id(0) // tiles_of_pair).to(tl.int64)
    tile = tl.program_id(0) % tiles_of_pair
    first = tile * TILE_ENTRIES
    keys_ptr += pair * num_entries + first
    places = tl.arange(0, TILE_SIZE)
    num_keys = tl.minimum(num_entries - first, TILE_ENTRIES)
    mask = places < num_keys
    keys = tl.load(keys_ptr + places, mask=mask, other=0)
    slots = keys // TILE_SIZE
    before = tl.load(keys_ptr + places - 1, mask=mask & (places > 0), other=-1)
    # [TILE_SIZE], where the run of a key begins in the tile
    starts = tl.where((places == 0) | (before // TILE_SIZE != slots), places, 0)
    starts = tl.associative_scan(starts, 0, _larger)
    runs_ptr += (pair * (num_slots + 1) + slots) * tiles_of_pair + tile
    if entries_ptr is None:
        behind = tl.load(keys_ptr + places + 1, mask=places + 1 < num_keys, other=-1)
        is_last = (places + 1 == num_keys) | (behind // TILE_SIZE != slots)
        tl.store(runs_ptr + 1, places - starts + 1, mask=mask & is_last)
    else:
        begins = tl.load(runs_ptr, mask=mask, other=0)
        tl.store(entries_ptr + begins + places - starts, first + keys % TILE_SIZE, mask=mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
