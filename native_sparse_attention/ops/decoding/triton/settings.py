"""Launch settings of decoding: what a program takes, and how many share the work of a row."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from native_sparse_attention.core.geometry import overlapping_blocks
from native_sparse_attention.ops._triton.launch import head_block, row_block
from native_sparse_attention.ops.decoding.step import MAX_SPLITS

# Warps and pipeline stages of each kernel; attend_few: where programs have at most FEW_TILES tiles, attend_many: more
# than MANY_TILES.
LAUNCHES = {
    'append': (1, 1),
    'compressed': (2, 3),
    'choose': (1, 1),
    'attend': (2, 3),
    'attend_few': (4, 2),
    'attend_many': (2, 2),
    'combine': (1, 1),
}
FEW_TILES, MANY_TILES = 2, 12
# Elements of outputs that a warp has in registers, and bytes of a row beyond which two stages are all that fits.
WARP_ELEMENTS = 2048
LONG_ROW = 256
# Bytes of a tile of keys, and the rows that it has at most.
COMPRESSED_TILE, ATTEND_TILE = (8192, 32), (16384, 64)
# Programs of a multiprocessor at a time; of compressed attention where each has MANY_TILES tiles all the same; of the
# other branches where they have few tiles. Multiprocessors where there are none.
PROGRAMS, MORE_PROGRAMS, FEW_TILES_PROGRAMS = 3, 4, 5
MULTIPROCESSORS = 64
# Parts that a row always may have, and tiles that are worth one more: parts must be put together.
PARTS, TILES_OF_PART = 24, 8
# Selection blocks of a program that chooses, and candidates that are merged at a time.
CHUNK = 64
CANDIDATES = 512


class Plan(NamedTuple):
    """block_m: rows of a tile of compressed attention; block_j: its selection blocks, with steps places for compressed
    blocks each. num_splits: parts of a row. num_blocks, num_tiles: selection blocks of a row, in whole tiles. chunk,
    num_chunks: selection blocks of a program that chooses, and such programs of a row. fan: of what these and those who
    merge leave, so many are merged; num_lists: how often something is left. block_n: tokens of a tile of the other
    branches; num_chosen tiles hold chosen blocks, num_reads these and the window. of_program: tiles of a program.
    """

    block_m: int
    block_j: int
    steps: int
    num_splits: int
    num_blocks: int
    num_tiles: int
    chunk: int
    num_chunks: int
    fan: int
    num_lists: int
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
    index_heads: int,
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
    multiprocessors = _multiprocessors(device)
    row_bytes = head_block(head_dim) * itemsize
    rows = num_tokens * heads // kv_heads
    # In float32 products take registers of their own.
    block_m = min(64 if itemsize == 2 else 32 if row_bytes <= 512 else 16, row_block(rows))
    num_blocks = -(-capacity // selection_block_size)
    steps = num_steps(block_size, stride, selection_block_size)
    block_j = max(1, _tile_rows(COMPRESSED_TILE, row_bytes) // steps)
    num_tiles = -(-num_blocks // block_j)
    units = batch * kv_heads * -(-rows // block_m)
    if not num_splits:
        num_splits = max(1, PROGRAMS * multiprocessors // units)
        more = min(MORE_PROGRAMS * multiprocessors // units, num_tiles // MANY_TILES)
        num_splits = min(max(num_splits, more), max(PARTS, num_tiles // TILES_OF_PART))
    # A program leaves as many candidates as there are places to fill, and takes whole tiles.
    chunk = max(CHUNK, block_j, row_block(num_selected))
    chunk = min(chunk, max(block_j, row_block(max(num_blocks, num_selected))))
    num_chunks = -(-num_blocks // chunk)
    fan = max(2, CANDIDATES // max(num_selected, 1))
    num_lists = left = num_chunks
    while left > 1:
        left = -(-left // fan)
        num_lists += left
    block_n = min(_tile_rows(ATTEND_TILE, row_bytes), row_block(selection_block_size))
    reach = (window_size + selection_block_size - 2) // selection_block_size + 1
    reach = min(reach, num_blocks)
    num_chosen = -(-num_selected * selection_block_size // block_n)
    num_reads = num_chosen + -(-reach * selection_block_size // block_n)
    queries = batch * num_tokens * index_heads
    of_program = tiles_of_program or _tiles_of_program(num_reads, multiprocessors, queries)
    of_program = min(max(of_program, -(-num_reads // MAX_SPLITS)), num_reads)
    return Plan(
        *(block_m, block_j, steps, min(num_splits, num_tiles, MAX_SPLITS), num_tiles * block_j, num_tiles),
        *(chunk, num_chunks, fan, num_lists),
        *(block_n, num_chosen, num_reads, of_program),
    )


def _tiles_of_program(num_tiles: int, multiprocessors: int, queries: int) -> int:
    few, several = (
        -(-num_tiles // max(1, programs * multiprocessors // queries)) for programs in (FEW_TILES_PROGRAMS, PROGRAMS)
    )
    return few if few <= FEW_TILES else several


def attend_variant(of_program: int) -> str:
    if of_program <= FEW_TILES:
        return 'attend_few'
    return 'attend' if of_program <= MANY_TILES else 'attend_many'


def num_steps(block_size: int, stride: int, selection_block_size: int) -> int:
    """Places of a tile for the compressed blocks of a selection block, a power of two: those that begin in it, or all
    that share tokens with it.
    """
    overlapping = overlapping_blocks(block_size, stride, selection_block_size)
    begins_in_it = adds_to_next_block(block_size, stride, selection_block_size)
    return 1 << ((overlapping.stop if begins_in_it else len(overlapping)) - 1).bit_length()


def adds_to_next_block(block_size: int, stride: int, selection_block_size: int) -> bool:
    """Whether compressed blocks hand on to the next selection block what they share with it: none reaches further."""
    return block_size - stride <= selection_block_size


def launch_options(kernel: str, device: torch.device, num_elements: int = 0, row_bytes: int = 0) -> dict[str, Any]:
    """num_elements: of the outputs that a program has at a time; row_bytes: of a key."""
    num_warps, num_stages = LAUNCHES[kernel]
    while num_warps < 8 and 2 * num_warps * WARP_ELEMENTS <= num_elements:
        num_warps *= 2
    num_stages = min(num_stages, 2) if row_bytes > LONG_ROW else num_stages
    overlaps = can_overlap(device)
    options = {'num_warps': num_warps, 'num_stages': num_stages, 'OVERLAPS': overlaps}
    # What comes before the first launch is not known to have written everything.
    return options | {'launch_pdl': True} if overlaps and kernel != 'append' else options


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == 'cuda' and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != 'cuda':
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile_rows(tile: tuple[int, int], row_bytes: int) -> int:
    num_bytes, most = tile
    return max(16, min(most, 1 << (num_bytes // row_bytes).bit_length() - 1))
