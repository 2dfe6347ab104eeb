"""Launch settings of decoding: what a program takes, and how many share the work of a row."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from native_sparse_attention.geometry import overlapping_blocks
from native_sparse_attention.ops._triton.launch import head_block, row_block

# Warps and pipeline stages of each kernel.
LAUNCHES = {'append': (4, 1), 'compressed': (4, 2), 'choose': (4, 1), 'attend': (4, 2), 'combine': (4, 1)}
# Programs of a multiprocessor at a time, and multiprocessors where there are none.
PROGRAMS = 3
MULTIPROCESSORS = 64
# Most parts that the compressed blocks of a row are split into, and most bytes of a tile of keys.
MAX_SPLITS = 64
TILE_BYTES = 16384
# Most compressed blocks that begin in a selection block or share tokens with it: a tile has them all.
MAX_STEPS = 256
# Selection blocks of a program that chooses, and most candidates that the programs of a row leave.
CHUNK = 64
MAX_CANDIDATES = 4096


class Plan(NamedTuple):
    """block_m: rows of a tile of compressed attention. block_j: selection blocks of its tile, steps: places for compressed
    blocks of each. num_splits: its parts of
    a row. num_blocks, num_tiles: selection blocks of a row, in whole tiles. chunk, num_chunks: of the choice. block_n:
    tokens of a tile of the other branches, num_chosen of which hold chosen blocks and num_reads those and the window;
    of_program: tiles of a program.
    """

    block_m: int
    block_j: int
    steps: int
    num_splits: int
    num_blocks: int
    num_tiles: int
    chunk: int
    num_chunks: int
    block_n: int
    num_chosen: int
    num_reads: int
    of_program: int

    @property
    def num_programs(self) -> int:
        return -(-self.num_reads // self.of_program)


@cache
def make_plan(
    device: torch.device,
    itemsize: int,
    batch: int,
    num_tokens: int,
    heads: int,
    kv_heads: int,
    choosers: int,
    head_dim: int,
    capacity: int,
    block_size: int,
    stride: int,
    selection_block_size: int,
    num_selected: int,
    window_size: int,
    num_splits: int,
    tiles_of_program: int,
) -> Plan:
    """num_splits, tiles_of_program: 0 for as many as the batch asks for."""
    slots = PROGRAMS * _multiprocessors(device)
    rows = num_tokens * heads // kv_heads
    block_m = min(64, row_block(rows))
    tile = max(16, min(64, _power_of_2_below(TILE_BYTES // (head_block(head_dim) * itemsize))))
    num_blocks = -(-capacity // selection_block_size)
    steps = num_steps(block_size, stride, selection_block_size)
    block_j = max(1, tile // steps)
    num_tiles = -(-num_blocks // block_j)
    units = batch * kv_heads * -(-rows // block_m)
    num_splits = min(num_splits or min(MAX_SPLITS, max(1, slots // units)), num_tiles)
    chunk = CHUNK
    while -(-num_blocks // chunk) * num_selected > MAX_CANDIDATES:
        chunk *= 2
    block_n = min(tile, max(16, 1 << (selection_block_size - 1).bit_length()))
    reach = (window_size + selection_block_size - 2) // selection_block_size + 1
    num_chosen = -(-num_selected * selection_block_size // block_n)
    num_reads = num_chosen + -(-reach * selection_block_size // block_n)
    queries = batch * num_tokens * choosers
    of_program = tiles_of_program or -(-num_reads // max(1, slots // queries))
    return Plan(
        *(block_m, block_j, steps, num_splits, num_tiles * block_j, num_tiles),
        *(min(chunk, max(16, 1 << (num_blocks - 1).bit_length())), -(-num_blocks // chunk)),
        *(block_n, num_chosen, num_reads, min(of_program, num_reads)),
    )


def num_steps(block_size: int, stride: int, selection_block_size: int) -> int:
    """Places of a tile for the compressed blocks of a selection block, a power of two: those that begin in it, which
    hand on what they share with the next one, or all that share tokens with it where some reach further than that.
    """
    overlapping = overlapping_blocks(block_size, stride, selection_block_size)
    handed_on = block_size - stride <= selection_block_size
    return 1 << ((overlapping.stop if handed_on else len(overlapping)) - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != 'cuda':
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_options(kernel: str, device: torch.device) -> dict[str, Any]:
    num_warps, num_stages = LAUNCHES[kernel]
    options = {'num_warps': num_warps, 'num_stages': num_stages, 'OVERLAPS': overlaps(device)}
    # What comes before the first launch does not know that it may be overlapped.
    return options | {'launch_pdl': True} if options['OVERLAPS'] and kernel != 'append' else options


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch may begin while the one before still runs: from Hopper on."""
    return device.type == 'cuda' and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _power_of_2_below(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1
