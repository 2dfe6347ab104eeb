"""Design, launches, compile-time constants and tensor descriptors of selected attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.ops._triton.finite import find_large
from native_sparse_attention.ops._triton.launch import (
    Settings,
    Table,
    describe_tiles,
    head_block,
    is_wide,
    row_block,
    settings_of,
)
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.dkv import launch as dkv
from native_sparse_attention.ops.selected_attention.triton.fp16_values import HalfValues
from native_sparse_attention.ops.selected_attention.triton.index.block_union import (
    MAX_MEMBERS,
    MAX_UNION_PERCENT,
    NOTHING_SHARED,
    Sharing,
    find_sharing,
    union_size,
    union_tiles,
)

DESIGNS = ('query', 'neighbours', 'block', 'mixed')
# The largest group that leaves a tile of one query empty, and the most indices of a row that neighbours share.
SMALL_GROUP, MAX_SHARED_CHOICE = 8, 64
# Fewer queries than this do not pay for finding out which of them share.
MIN_SEQLEN_MIXED = 256
# Neighbours share where there are at most so many times as many blocks as each of them chooses.
MEETING = 4
# Forward, in half types, tiles of a large group share whatever was chosen where they have two queries of up to
# LARGE_HEAD elements a head, and those of more queries at LARGE_HEAD alone (smaller heads do not gain), where blocks
# are at most so many times as many as each query chooses. Measured on an H200.
MEETING_LARGE, LARGE_HEAD = 8, 128
# Fewer queries than this do not pay for the lists of those who chose a block.
MIN_SEQLEN_BY_BLOCK = 1024


def find_constants(
    tile: Settings, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, causal: bool
) -> dict[str, Any]:
    shapes = (q.shape, k.shape, v.shape, block_indices.shape)
    return _find_constants(tile, *shapes, block_size, causal, is_wide(k, v)).copy()


@lru_cache(maxsize=1024)
def _find_constants(
    tile: Settings,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    indices_shape: tuple[int, ...],
    block_size: int,
    causal: bool,
    wide: bool,
) -> dict[str, Any]:
    index_heads, num_selected = indices_shape[2:]
    # No block is longer than all keys.
    block_size = max(1, min(block_size, k_shape[1]))
    block_m, block_n, num_warps, num_stages = tile
    return {
        'GROUP': q_shape[2] // index_heads,
        'REPEATS': index_heads // k_shape[2],
        'NUM_SELECTED': num_selected,
        'BLOCK_SIZE': block_size,
        'CAUSAL': causal,
        'HEAD_DIM': q_shape[3],
        'VALUE_DIM': v_shape[3],
        'BLOCK_S': 1 << max(num_selected - 1, 0).bit_length(),
        'BLOCK_M': block_m,
        'BLOCK_N': min(block_n, row_block(block_size)),
        'BLOCK_D': head_block(q_shape[3]),
        'BLOCK_DV': head_block(v_shape[3]),
        'INT64_OFFSETS': wide,
        'num_warps': num_warps,
        'num_stages': num_stages,
    }


def describe_key_tiles(
    k: Tensor, v: Tensor, meta: dict[str, Any]
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return the descriptors of k and v, or None where a block is not a whole number of tiles."""
    block_n = meta['BLOCK_N']
    if meta['BLOCK_SIZE'] % block_n or k.element_size() == 4:
        return None, None
    return describe_tiles(k, block_n, meta['BLOCK_D']), describe_tiles(v, block_n, meta['BLOCK_DV'])


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
    """What a program has, one of DESIGNS, by shape alone: what choices overlap by lies on the device. num_packed: the
    sequences that `cu_seqlens` names.

    'query': a query with the heads of its group, which fill a tile where the group is large. 'neighbours': queries that
    go through their blocks together, where there are so few blocks that the choices of many must meet, whatever they
    are, or, forward in half types, a large group leaves room for but two of them in a tile. 'block': a block and those
    who chose it, whatever there are of both. 'mixed': large groups, whose neighbours go together where they share
    enough, which the device says of every tile.
    """
    index_heads, num_selected = block_indices.shape[2:]
    group = q.shape[2] // index_heads
    if num_selected == 0 or k.shape[1] == 0:
        return 'query'
    if group > SMALL_GROUP:
        return _choose_for_large_group(q, k, v, block_indices, block_size, backward, num_packed)
    num_blocks = -(-k.shape[1] // block_size)
    if num_selected <= MAX_SHARED_CHOICE and num_blocks <= MEETING * num_selected:
        return 'neighbours'
    if q.shape[1] < MIN_SEQLEN_BY_BLOCK:
        return 'query'
    # Float32 sums of the gradients of one kv head must fit into the workspace.
    if backward and 4 * k.shape[1] * (k.shape[3] + v.shape[3]) > dkv.WORKSPACE:
        return 'query'
    table = settings.BLOCK_DQ if backward else settings.BLOCK
    largest = settings_of(table, q, v).block_n
    return 'block' if row_block(min(block_size, k.shape[1])) <= largest else 'query'


def _choose_for_large_group(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, backward: bool, num_packed: int
) -> str:
    group, num_selected = q.shape[2] // block_indices.shape[2], block_indices.shape[3]
    tile = settings_of(settings.NEIGHBOURS_DQ if backward else settings.NEIGHBOURS_FORWARD, q, v).block_m
    # Queries that all chose the same still read one block together for each that one of them would read.
    block_t = tile // group_block(group)
    shares = MAX_UNION_PERCENT['backward' if backward else 'forward'] * block_t >= 100
    shares = shares and num_selected <= MAX_SHARED_CHOICE
    # Block numbers and places in a union stand in one integer.
    shares = shares and (k.shape[1] // block_size + 2) * union_size(num_selected, block_t) <= 2**30
    if not shares or q.shape[1] < MIN_SEQLEN_MIXED:
        return 'query'
    if backward or q.element_size() != 2:
        return 'mixed'
    head = head_block(max(q.shape[3], v.shape[3]))
    is_few = -(-k.shape[1] // block_size) <= MEETING_LARGE * num_selected * max(1, num_packed)
    is_better = (block_t == 2 and head <= LARGE_HEAD) or (is_few and head == LARGE_HEAD)
    return 'neighbours' if is_better else 'mixed'


def count_packed(cu_seqlens: Tensor | None) -> int:
    return 0 if cu_seqlens is None else len(cu_seqlens) - 1


def group_block(group: int) -> int:
    """Rows that a tile of neighbours has for each of its queries."""
    return 1 << (group - 1).bit_length()


def plan_launches(
    design: str,
    per_tile: tuple[Any, Table],
    per_query: tuple[Any, settings.GroupTables],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    *,
    max_percent: int,
    halves: HalfValues | None = None,
) -> Iterator[tuple[Any, tuple[int, int], Sharing, dict[str, Any]]]:
    """Kernels with their grids, what they share or leave to each other, and constants, one after the other, so that
    what a launch needs is there for no longer. per_tile, per_query: kernel and table, or tables. halves: converted
    values, where what is large is known of every block.
    """
    sharing, rest = NOTHING_SHARED, (q, k, v, block_indices, block_size, causal)
    if design != 'query':
        meta = find_constants(settings_of(per_tile[1], q, v), *rest)
        meta['BLOCK_G'] = group_block(meta['GROUP'])
        meta['BLOCK_M'] = min(meta['BLOCK_M'], MAX_MEMBERS * meta['BLOCK_G'])
        block_t = meta['BLOCK_M'] // meta['BLOCK_G']
        meta['UNION'] = union_size(block_indices.shape[3], block_t)
        large = None if halves is not None else find_large(k, v)
        unions = (block_indices, place, meta['BLOCK_SIZE'], causal, block_t)
        percent = max_percent if design == 'mixed' else None
        for tiles in union_tiles(block_indices, place, block_t):
            flags, sharing = sharing.flags, NOTHING_SHARED  # the unions before these need not be there any more
            sharing = find_sharing(*unions, percent, large, tiles, halves, flags)
            yield per_tile[0], sharing.counts.shape[:2], sharing, meta
    if design != 'neighbours':
        grid, meta = _launch_per_query(per_query[1], *rest)
        yield per_query[0], grid, sharing, meta


def _launch_per_query(
    tables: settings.GroupTables,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    causal: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants of the kernels that have a program per query and tile of the heads that share its choice."""
    tile = settings.settings_of_group(tables, q.shape[2] // block_indices.shape[2], q, v)
    meta = find_constants(tile, q, k, v, block_indices, block_size, causal)
    meta['BLOCK_M'] = min(meta['BLOCK_M'], row_block(meta['GROUP']))
    batch, seqlen = q.shape[:2]
    return (batch * seqlen, block_indices.shape[2] * -(-meta['GROUP'] // meta['BLOCK_M'])), meta
