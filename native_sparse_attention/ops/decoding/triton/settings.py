"""Launch settings of decoding: tile sizes, and the number of programs that share a row."""

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
    'linear': (4, 4),
    'compressed': (2, 3),
    'choose': (1, 1),
    'attend': (2, 3),
    'attend_few': (4, 2),
    'attend_many': (2, 2),
    'combine': (1, 1),
}
FEW_TILES, MANY_TILES = 2, 12
# Output elements that a warp holds in registers, and bytes of a row above which only two stages fit.
WARP_ELEMENTS = 2048
LONG_ROW = 256
# Bytes of a key tile, and its largest number of rows.
COMPRESSED_TILE, ATTEND_TILE = (8192, 32), (16384, 64)
# Programs per multiprocessor; for compressed attention if each still has MANY_TILES tiles; for the other branches if
# they have few tiles. MULTIPROCESSORS stands for devices without any.
PROGRAMS, MORE_PROGRAMS, FEW_TILES_PROGRAMS = 3, 4, 5
MULTIPROCESSORS = 64
# Parts that a row may always have, and tiles that justify one more part, since parts must be combined.
PARTS, TILES_OF_PART = 24, 8
# Tiles of a linear layer of φ: the largest number of output features, and of complete blocks in half types and in
# float32, whose products need additional registers; bytes of a row of weights for which tiles may have few features;
# bytes per pipeline stage, and of all stages.
LINEAR_FEATURES, LINEAR_ROWS, LINEAR_ROWS_FLOAT32 = 64, 128, 32
LEAST_ROW, STAGE_BYTES, LINEAR_BYTES = 128, 24576, 98304
# Selection blocks per program of the top-k, and candidates merged at a time.
CHUNK = 64
CANDIDATES = 512


class Plan(NamedTuple):
    """block_m: rows of a tile of compressed attention; block_j: its selection blocks, with `steps` columns for
    compressed blocks each. num_splits: parts of a row. num_blocks, num_tiles: selection blocks of a row, rounded up to
    whole tiles. chunk, num_chunks: selection blocks per program of the top-k, and programs per row. fan: partial lists
    merged at a time; num_lists: partial lists in total. block_n: tokens of a tile of the other branches; num_chosen
    tiles hold selected blocks, num_reads these and the window. of_program: tiles per program.
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
    """num_splits, tiles_of_program: 0 chooses by the batch size."""
    multiprocessors = _multiprocessors(device)
    row_bytes = head_block(head_dim) * itemsize
    rows = num_tokens * heads // kv_heads
    # float32 products need additional registers.
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
    # A program leaves n candidates and takes whole tiles.
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


class LinearTile(NamedTuple):
    """Tile of a linear layer of φ: output features, input features, and complete blocks (rows of the batch and heads
    that share the weights).
    """

    features: int
    inputs: int
    rows: int
    num_stages: int


@cache
def linear_tile(
    device: torch.device, itemsize: int, rows: int, features: int, units: int, row_major: bool
) -> LinearTile:
    """Return a tile with which more than half of the multiprocessors have a program, if there are enough blocks and
    features.

    rows: blocks that a step may complete. features: of the output. units: weights that differ, by head and for keys and
    values. row_major: whether input features of a weight are neighbours in memory, as in `nn.Linear`.
    """
    block_r = min(row_block(rows), LINEAR_ROWS if itemsize == 2 else LINEAR_ROWS_FLOAT32)
    block_f = 2 * LINEAR_FEATURES if block_r == LINEAR_ROWS else LINEAR_FEATURES
    least = 16 if row_major else LEAST_ROW // itemsize
    while 2 * units * -(-features // block_f) * -(-rows // block_r) <= _multiprocessors(device):
        if block_f > least and (block_f >= block_r or block_r == 16):
            block_f //= 2
        elif block_r > 16:
            block_r //= 2
        else:
            break
    row_bytes = (block_f + block_r) * itemsize
    # On Hopper, Triton 3.6 computes wrong products for operands with shorter rows in shared memory (`head_block`).
    block_i = max(LEAST_ROW // itemsize, 1 << (STAGE_BYTES // row_bytes).bit_length() - 1)
    return LinearTile(block_f, block_i, block_r, min(8, LINEAR_BYTES // (block_i * row_bytes)))


def attend_variant(of_program: int) -> str:
    if of_program <= FEW_TILES:
        return 'attend_few'
    return 'attend' if of_program <= MANY_TILES else 'attend_many'


def num_steps(block_size: int, stride: int, selection_block_size: int) -> int:
    """Return the columns of a tile per selection block, a power of two: the compressed blocks that begin in it, or all
    that overlap it.
    """
    overlapping = overlapping_blocks(block_size, stride, selection_block_size)
    begins_in_it = adds_to_next_block(block_size, stride, selection_block_size)
    return 1 << ((overlapping.stop if begins_in_it else len(overlapping)) - 1).bit_length()


def adds_to_next_block(block_size: int, stride: int, selection_block_size: int) -> bool:
    """Return whether a compressed block reaches at most into the next selection block, so that it can
    add to its score.
    """
    return block_size - stride <= selection_block_size


def launch_options(kernel: str, device: torch.device, num_elements: int = 0, row_bytes: int = 0) -> dict[str, Any]:
    """num_elements: elements of the outputs of a program. row_bytes: bytes of a key."""
    num_warps, num_stages = LAUNCHES[kernel]
    while num_warps < 8 and 2 * num_warps * WARP_ELEMENTS <= num_elements:
        num_warps *= 2
    num_stages = min(num_stages, 2) if row_bytes > LONG_ROW else num_stages
    overlaps = can_overlap(device)
    options = {'num_warps': num_warps, 'num_stages': num_stages, 'OVERLAPS': overlaps}
    # Work before the first launch may not have completed its writes.
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
