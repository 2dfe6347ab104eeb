"""Choice of the design of selected attention, with its launches, grids and compile-time constants."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.ops._triton.finite import find_large
from native_sparse_attention.ops._triton.launch import (
    Settings,
    Table,
    describe_tiles,
    exceeds_int32,
    head_block,
    row_block,
    settings_of,
)
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, Sizes, Tile
from native_sparse_attention.ops.selected_attention.triton.dkv import launch as dkv
from native_sparse_attention.ops.selected_attention.triton.fp16_values import Fp16Values
from native_sparse_attention.ops.selected_attention.triton.index.block_union import (
    MAX_QUERIES,
    MAX_UNION_PERCENT,
    NO_UNION,
    BlockUnion,
    build_unions,
    split_tiles,
    union_size,
)

DESIGNS = ('query', 'union', 'block', 'mixed', 'fused')
# Largest groups for which 'fused' replaces 'block' in the backward pass, and the gradients of the factors of merged
# attention are computed by block. Measured on an H200; groups of four lose by 'fused'.
MAX_GROUP_FUSED = 2
MAX_GROUP_FACTORS = 2
# Groups of at most this size leave most rows of a single query's tile empty.
SMALL_GROUP = 8
# Most indices per row for block unions.
MAX_UNION_SELECTED = 64
# Minimum number of queries for which flags of query tiles pay off.
MIN_SEQLEN_MIXED = 256
# Small groups take unions if there are at most this many times as many blocks as each query selects.
MAX_BLOCK_RATIO = 4
# Forward, in half types, large groups always take unions if their tiles hold two queries and heads have up to
# LARGE_HEAD elements, or if heads have LARGE_HEAD elements and there are at most MAX_BLOCK_RATIO_LARGE times as many
# blocks as each query selects. Smaller heads do not gain. Measured on an H200.
MAX_BLOCK_RATIO_LARGE, LARGE_HEAD = 8, 128
# Minimum number of queries for which a CSR index from blocks to queries pays off.
MIN_SEQLEN_BY_BLOCK = 1024


class LaunchSettings(NamedTuple):
    """Compile-time constants and launch options of a kernel by query or by query tile."""

    sizes: Sizes
    tile: Tile
    num_warps: int
    num_stages: int


def choose_design(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    *,
    backward: bool = False,
    num_packed: int = 0,
) -> str:
    """Return the design, one of DESIGNS, from shapes alone: how much selections overlap is known on the device only.

    'query': one program per query, for groups that fill a tile. 'union': one program per query tile, which reads the
    union of the selected blocks; for few blocks, or forward in half types for large groups of which two queries fill a
    tile. 'block': one program per KV block, for small groups and many blocks. 'mixed': large groups; flags on the
    device choose between 'union' and 'query' for every query tile. 'fused': 'block', with dq, dk and dv by one kernel
    in the backward pass. num_packed: number of sequences in `cu_seqlens`.
    """
    index_heads, num_selected = block_indices.shape[2:]
    group = q.shape[2] // index_heads
    if num_selected == 0 or k.shape[1] == 0:
        return 'query'
    if group > SMALL_GROUP:
        return _choose_for_large_group(q, k, v, block_indices, block_size, backward, num_packed)
    num_blocks = -(-k.shape[1] // block_size)
    if num_selected <= MAX_UNION_SELECTED and num_blocks <= MAX_BLOCK_RATIO * num_selected:
        return 'union'
    if q.shape[1] < MIN_SEQLEN_BY_BLOCK:
        return 'query'
    # Float32 sums of the gradients of one KV head must fit into the workspace.
    if backward and 4 * k.shape[1] * (k.shape[3] + v.shape[3]) > dkv.WORKSPACE:
        return 'query'
    if backward and group <= MAX_GROUP_FUSED and fits_block(settings.FUSED, q, k, v, block_size):
        return 'fused'
    return 'block' if fits_block(settings.BLOCK_DQ if backward else settings.BLOCK, q, k, v, block_size) else 'query'


def fits_block(table: Table, q: Tensor, k: Tensor, v: Tensor, block_size: int) -> bool:
    """Return whether the tiles of a block-major kernel hold a whole block."""
    return row_block(min(block_size, k.shape[1])) <= settings_of(table, q, v).block_n


def takes_factors_by_block(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int) -> bool:
    """Return whether the gradients of the factors of merged attention are computed by block instead of by query."""
    group = q.shape[2] // max(1, block_indices.shape[2])
    is_small = group <= MAX_GROUP_FACTORS and q.shape[1] >= MIN_SEQLEN_BY_BLOCK and block_indices.numel() > 0
    return is_small and k.shape[1] > 0 and fits_block(settings.BLOCK, q, k, v, block_size)


def _choose_for_large_group(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, backward: bool, num_packed: int
) -> str:
    group, num_selected = q.shape[2] // block_indices.shape[2], block_indices.shape[3]
    tile = settings_of(settings.UNION_DQ if backward else settings.UNION_FORWARD, q, v).block_m
    # If all queries of a tile select the same blocks, the union is 1 / block_t of what they read one by one.
    block_t = tile // rows_per_query(group)
    may_share = MAX_UNION_PERCENT['backward' if backward else 'forward'] * block_t >= 100
    may_share = may_share and num_selected <= MAX_UNION_SELECTED
    # A block number and a position in the union share one integer.
    may_share = may_share and (k.shape[1] // block_size + 2) * union_size(num_selected, block_t) <= 2**30
    if not may_share or q.shape[1] < MIN_SEQLEN_MIXED:
        return 'query'
    if backward or q.element_size() != 2:
        return 'mixed'
    head = head_block(max(q.shape[3], v.shape[3]))
    has_few_blocks = -(-k.shape[1] // block_size) <= MAX_BLOCK_RATIO_LARGE * num_selected * max(1, num_packed)
    is_faster = (block_t == 2 and head <= LARGE_HEAD) or (has_few_blocks and head == LARGE_HEAD)
    return 'union' if is_faster else 'mixed'


def count_packed(cu_seqlens: Tensor | None) -> int:
    """Return the number of packed sequences, 0 if the batch is not packed."""
    return 0 if cu_seqlens is None else len(cu_seqlens) - 1


def rows_per_query(group: int) -> int:
    """Return the rows that a tile of several queries has for each of them."""
    return 1 << (group - 1).bit_length()


def plan_launches(
    design: str,
    by_union: tuple[Any, Table],
    by_query: tuple[Any, settings.GroupTables],
    arguments: Arguments,
    *,
    max_percent: int,
    fp16_values: Fp16Values | None = None,
) -> Iterator[tuple[Any, tuple[int, int], BlockUnion, LaunchSettings]]:
    """Yield kernel, grid, block union and settings of each launch; a union is freed before the next one is built.

    by_union, by_query: kernel and table (or tables). fp16_values: converted values, whose flags say which blocks are
    small.
    """
    q, k, v, block_indices, _, layout, _, causal, _, _ = arguments
    union = NO_UNION
    if design != 'query':
        chosen = _make_settings(settings_of(by_union[1], q, v), arguments)
        block_g = rows_per_query(chosen.sizes.group)
        block_m = min(chosen.tile.block_m, MAX_QUERIES * block_g)
        block_t = block_m // block_g
        size = union_size(block_indices.shape[3], block_t)
        chosen = chosen._replace(tile=chosen.tile._replace(block_m=block_m, block_g=block_g, union_size=size))
        large = None if fp16_values is not None else find_large(k, v)
        percent = max_percent if design == 'mixed' else None
        for tiles in split_tiles(block_indices, layout, block_t):
            flags, union = union.flags, NO_UNION  # frees the earlier unions
            union = build_unions(
                *(block_indices, layout, chosen.sizes.block_size, causal, block_t),
                max_percent=percent,
                large=large,
                tiles=tiles,
                fp16_values=fp16_values,
                flags=flags,
            )
            yield by_union[0], union.counts.shape[:2], union, chosen
    if design != 'union':
        grid, chosen = plan_by_query(by_query[1], arguments)
        yield by_query[0], grid, union, chosen


def plan_by_query(tables: settings.GroupTables, arguments: Arguments) -> tuple[tuple[int, int], LaunchSettings]:
    """Return grid and settings of a kernel with one program per query and tile of the heads that share its blocks."""
    q, _, v, block_indices = arguments[:4]
    tile = settings.settings_of_group(tables, q.shape[2] // block_indices.shape[2], q, v)
    chosen = _make_settings(tile, arguments)
    block_m = min(chosen.tile.block_m, row_block(chosen.sizes.group))
    batch, seqlen = q.shape[:2]
    grid = (batch * seqlen, block_indices.shape[2] * -(-chosen.sizes.group // block_m))
    return grid, chosen._replace(tile=chosen.tile._replace(block_m=block_m))


def _make_settings(tile: Settings, arguments: Arguments) -> LaunchSettings:
    shapes = (t.shape for t in arguments[:4])
    int64_offsets = exceeds_int32(arguments.k, arguments.v)
    return _settings_of_shapes(tile, *shapes, arguments.block_size, arguments.causal, int64_offsets)


@lru_cache(maxsize=1024)
def _settings_of_shapes(
    tile: Settings,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    indices_shape: tuple[int, ...],
    block_size: int,
    causal: bool,
    int64_offsets: bool,
) -> LaunchSettings:
    index_heads, num_selected = indices_shape[2:]
    # A block has at most all keys.
    block_size = max(1, min(block_size, k_shape[1]))
    group, repeats = q_shape[2] // index_heads, index_heads // k_shape[2]
    block_n = min(tile.block_n, row_block(block_size))
    block_s = 1 << max(num_selected - 1, 0).bit_length()
    sizes = Sizes(group, repeats, num_selected, block_size, causal, q_shape[3], v_shape[3])
    tiles = Tile(tile.block_m, block_n, head_block(q_shape[3]), head_block(v_shape[3]), int64_offsets, block_s)
    return LaunchSettings(sizes, tiles, tile.num_warps, tile.num_stages)


def describe_key_tiles(
    k: Tensor, v: Tensor, chosen: LaunchSettings
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return tensor descriptors of k and v, or None where a block is not a whole number of tiles."""
    tile = chosen.tile
    if chosen.sizes.block_size % tile.block_n or k.element_size() == 4:
        return None, None
    return describe_tiles(k, tile.block_n, tile.block_d), describe_tiles(v, tile.block_n, tile.block_dv)
