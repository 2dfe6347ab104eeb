"""Which tiles of neighbouring queries read their blocks together, decided on the device for each tile by itself.

For a large group both designs fill their tiles, and the better one reads fewer blocks: a program per query reads each
of its own, a program per tile the union of what its queries chose, and masks it for every one of them. What a tile does
follows from the choices of the tile before it in the sequence, which overlap as much as its own do: so a result has the
same bits whatever comes later, and whatever else is in the batch. The first tile of a sequence goes one by one.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import count_readable_blocks
from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.placement import Placement, load_extent, locate_queries, num_tiles

# A tile reads its blocks together where these are at most so many of 100 that its queries would read one by one. A
# block of a union is dearer than one of a query, which is masked for none of its rows. On an H200, at G = 16, both take
# as long at about 20 forward (8 queries a tile) and 45 backward (4); tiles that are no faster should not share.
MAX_UNION_PERCENT = {'forward': 18, 'backward': 40}
# Comparisons of indices that a program makes at once.
COMPARISONS = 4096


class Sharing(NamedTuple):
    """One argument of a kernel. flags: int8 `[tiles, HI]`, 1 where a tile of block_t queries reads together what a
    chooser chose; or None, and all programs of the launch have work.
    """

    flags: Tensor | None
    block_t: int


ALL = Sharing(None, 1)


def find_sharing(
    block_indices: Tensor, place: Placement, block_size: int, causal: bool, block_t: int, max_percent: int
) -> Sharing:
    """Tiles as in `locate_queries`."""
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    tiles = num_tiles(place, seqlen, block_t)
    flags = torch.empty(tiles, index_heads, dtype=torch.int8, device=block_indices.device)
    block_s = 1 << max(num_selected - 1, 0).bit_length()
    launch(
        sharing_kernel,
        (tiles, index_heads),
        *(flags, block_indices, block_indices.stride(), place, max_percent),
        NUM_SELECTED=num_selected,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        BLOCK_S=block_s,
        BLOCK_T=block_t,
        BLOCK_N=min(block_t * block_s, COMPARISONS // (block_t * block_s)),
        num_warps=4,
        device=block_indices.device,
    )
    return Sharing(flags, block_t)


@triton.jit
def sharing_kernel(
    flags_ptr,
    indices_ptr,
    indices_strides,
    place,
    max_percent,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile of queries and chooser, which counts the blocks of the tile before with a key that a query
    may read: those of every query, and those that are different ones. Where there are none, there is nothing to do, and
    the tile is shared, too.
    """
    _, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(tl.program_id(0), place, BLOCK_T)
    if first_query >= num_queries:
        return
    row, chooser = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    first_query -= BLOCK_T
    # A tile before another one is full.
    num_members = tl.where(first_query >= 0, BLOCK_T, 0)
    offset += first_query
    indices_ptr += row * indices_strides[0] + chooser * indices_strides[2]
    stride = indices_strides[1]
    indices_ptr += (query_start + first_query).to(tl.int64) * stride
    places = tl.arange(0, BLOCK_T * BLOCK_S)
    blocks = _load_readable(
        indices_ptr, stride, places, num_members, num_keys, offset, NUM_SELECTED, BLOCK_SIZE, CAUSAL, BLOCK_S
    )
    repeated = tl.zeros([BLOCK_T * BLOCK_S], tl.int32)
    shared = tl.zeros([BLOCK_T * BLOCK_S], tl.int32)
    for first in tl.range(0, BLOCK_T * BLOCK_S, BLOCK_N):
        earlier = first + tl.arange(0, BLOCK_N)
        others = _load_readable(
            indices_ptr, stride, earlier, num_members, num_keys, offset, NUM_SELECTED, BLOCK_SIZE, CAUSAL, BLOCK_S
        )
        same = (blocks[:, None] == others[None, :]) & (places[:, None] > earlier[None, :])
        own = same & ((places // BLOCK_S)[:, None] == (earlier // BLOCK_S)[None, :])
        repeated |= tl.max(own.to(tl.int32), 1)
        shared |= tl.max(same.to(tl.int32), 1)
    pairs = (blocks >= 0) & (repeated == 0)
    union = pairs & (shared == 0)
    num_pairs = tl.sum(pairs.to(tl.int32), 0)
    num_union = tl.sum(union.to(tl.int32), 0)
    flag = ((num_members > 0) & (100 * num_union <= max_percent * num_pairs)).to(tl.int8)
    tl.store(flags_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser, flag)


@triton.jit
def _load_readable(
    indices_ptr,
    stride,
    places,
    num_members,
    num_keys,
    offset,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The indices at places of a tile, `[queries, BLOCK_S]`, and -1 for those that name nothing that their query may
    read. num_members: queries that there are. offset: the position of its first query.
    """
    members, slots = places // BLOCK_S, places % BLOCK_S
    mask = (members < num_members) & (slots < NUM_SELECTED)
    blocks = tl.load(indices_ptr + members.to(tl.int64) * stride + slots, mask=mask, other=-1)
    num_blocks = count_readable_blocks(offset + members, num_keys, BLOCK_SIZE, CAUSAL)
    return tl.where((blocks >= 0) & (blocks < num_blocks), blocks, -1).to(tl.int32)


@triton.jit
def load_flag(sharing, tile, chooser, num_choosers):
    return tl.load(sharing.flags + tile.to(tl.int64) * num_choosers + chooser)


@triton.jit
def load_flag_of_query(sharing, sequence, token, chooser, num_choosers, place):
    """The flag of the tile that a query belongs to."""
    _, start, _ = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    if place.cu_seqlens is None:
        tile = sequence * tl.cdiv(place.seqlen_q, sharing.block_t)
    else:
        tile = start // sharing.block_t + sequence
    return load_flag(sharing, tile + (token - start) // sharing.block_t, chooser, num_choosers)
