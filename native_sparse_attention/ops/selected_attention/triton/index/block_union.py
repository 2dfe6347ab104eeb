"""What tiles of neighbouring queries read together: the blocks that at least one of them chose, and which of them did.

For a large group both designs fill their tiles, and the better one reads fewer blocks: a program per query reads each
of its own, a program per tile the union of what its queries chose, and masks it for every one of them. What a tile does
follows from the choices of the tile before it in the sequence, which overlap as much as its own do: so a result has the
same bits whatever comes later, and whatever else is in the batch. The first tile of a sequence goes one by one.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import count_readable_blocks
from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.tiles import sort_tile
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    find_query,
    load_extent,
    locate_queries,
    num_tiles,
)
from native_sparse_attention.ops.selected_attention.triton.fp16_values import FITS, HalfValues, find_flags

# A tile reads its blocks together where these are at most so many of 100 that its queries would read one by one. A
# block of a union is dearer than one of a query, which is masked for none of its rows. On an H200, at G = 16, head size
# 128 and four queries a tile, more of them made short sequences faster forward, and long ones slower.
MAX_UNION_PERCENT = {'forward': 64, 'backward': 48}
# Indices whose unions are made at once, 12 bytes each.
MAX_INDICES = 2**25
# A tile's members are bits of an integer.
MAX_MEMBERS = 64


class Sharing(NamedTuple):
    """One argument of the kernels, for tiles of block_t queries as in `locate_queries`, from first_tile on.

    blocks: int32 `[tiles, HI, P]`, the union of the blocks that the queries of a tile selected, ascending; P is
    `union_size`. members: int64 `[tiles, HI, P + 1]`: bit t of members[i + 1] - members[i] is set where query t of the
    tile selected block i.
    counts: int32 `[tiles, HI, 3]`, of the blocks; of the first ones, which every query may read as a whole; and, with
    converted values, whether all of the blocks are small. With these the first ones are those that fit, too, and the
    others stand behind them, ascending again. flags: int8 `[all tiles + 1, HI]`, 1 where a tile reads its union, 0
    where its queries go one by one; None where all are alike. large: from `find_large`, or None where nobody asks.
    """

    flags: Any
    block_t: int
    blocks: Any
    members: Any
    counts: Any
    first_tile: int
    large: Any
    num_chunks: int


NOTHING_SHARED = Sharing(None, 1, None, None, None, 0, None, 0)


def find_sharing(
    block_indices: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    block_t: int,
    max_percent: int | None,
    large: Tensor | None,
    tiles: range | None = None,
    halves: HalfValues | None = None,
    flags: Tensor | None = None,
) -> Sharing:
    """The unions of these tiles, or of all; with flags unless max_percent is None. halves: converted values, each of
    whose heads has one index head. flags: those of the tiles before these, in a tensor for all.
    """
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    all_tiles = num_tiles(place, seqlen, block_t)
    tiles = range(all_tiles) if tiles is None else tiles
    size = union_size(num_selected, block_t)
    block_s, log_size = size // block_t, size.bit_length() - 1
    shape, device = (len(tiles), index_heads), block_indices.device
    if flags is None and max_percent is not None:
        flags = torch.empty(all_tiles + 1, index_heads, dtype=torch.int8, device=device)
    sharing = Sharing(
        flags,
        block_t,
        torch.empty(*shape, size, dtype=torch.int32, device=device),
        torch.empty(*shape, size + 1, dtype=torch.int64, device=device),
        torch.empty(*shape, 3, dtype=torch.int32, device=device),
        tiles.start,
        large,
        0 if large is None else large.shape[2],
    )
    launch(
        union_kernel,
        shape,
        *(sharing, halves, block_indices, block_indices.stride(), place, max_percent),
        NUM_SELECTED=num_selected,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        BLOCK_S=block_s,
        LOG_SIZE=log_size,
        num_warps=min(max(size // 128, 1), 8),
        device=device,
    )
    return sharing


def union_size(num_selected: int, block_t: int) -> int:
    """P of `Sharing`: at least 2, which can be sorted."""
    return block_t * (1 << max(num_selected - 1, 1).bit_length())


def union_tiles(block_indices: Tensor, place: SequenceLayout, block_t: int) -> list[range]:
    """All tiles, in ranges whose unions are made at once."""
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    tiles = num_tiles(place, seqlen, block_t)
    step = max(1, MAX_INDICES // max(1, index_heads * union_size(num_selected, block_t)))
    return [range(first, min(first + step, tiles)) for first in range(0, tiles, step)]


@triton.jit(do_not_specialize=['max_percent'])
def union_kernel(
    sharing,
    halves,
    indices_ptr,
    indices_strides,
    place,
    max_percent,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG_SIZE: tl.constexpr,
):
    """One program per tile of queries and index head. Only blocks with a key that a query may read count, and an index
    that stands several times in a row counts once. A tile leaves the flag of the next one of its sequence.
    """
    SIZE: tl.constexpr = 2**LOG_SIZE
    BLOCK_T: tl.constexpr = SIZE // BLOCK_S
    NO_BLOCK: tl.constexpr = 2**30 // SIZE - 1
    # Keys of values in float16 are few (`passes_dlogits`), so all block numbers are below this bit.
    LATE: tl.constexpr = 2**29 // SIZE
    index = tl.program_id(0) + sharing.first_tile
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(index, place, BLOCK_T)
    if first_query >= num_queries:
        return
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    place_of_tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + index_head
    places = tl.arange(0, SIZE)
    queries, slots = first_query + places // BLOCK_S, places % BLOCK_S
    mask = (queries < num_queries) & (slots < NUM_SELECTED)
    indices_ptr += row * indices_strides[0] + index_head * indices_strides[2]
    blocks = tl.load(
        indices_ptr + (query_start + queries).to(tl.int64) * indices_strides[1] + slots, mask=mask, other=-1
    )
    num_blocks = count_readable_blocks(offset + queries, num_keys, BLOCK_SIZE, CAUSAL)
    counts = (blocks >= 0) & (blocks < num_blocks) & (blocks < (NO_BLOCK if halves is None else LATE))
    num_whole = num_keys // BLOCK_SIZE
    if CAUSAL:
        num_whole = tl.minimum(num_whole, tl.maximum(offset + first_query + 1, 0) // BLOCK_SIZE)
    counts_ptr = sharing.counts + place_of_tile * 3
    blocks = tl.where(counts, blocks, 0).to(tl.int32)
    if halves is not None:
        _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
        flags_ptr = find_flags(halves, row * tl.num_programs(1) + index_head, sequence, key_start, place, BLOCK_SIZE)
        flags = tl.load(flags_ptr + blocks, mask=counts, other=FITS).to(tl.int32)
        blocks += tl.where((blocks < num_whole) & (flags == FITS), 0, LATE)
        tl.store(counts_ptr + 2, (tl.min(flags, 0) != 0).to(tl.int32))
    keys = sort_tile(tl.where(counts, blocks, NO_BLOCK) * SIZE + places, LOG_SIZE, LOG_SIZE // 5)

    # What stands before and behind each of them is read back, from where the union comes to stand.
    blocks_ptr = sharing.blocks + place_of_tile * SIZE
    tl.store(blocks_ptr + places, keys)
    tl.debug_barrier()
    before = tl.load(blocks_ptr + places - 1, mask=places > 0, other=2**30)
    behind = tl.load(blocks_ptr + places + 1, mask=places < SIZE - 1, other=2**30)
    tl.debug_barrier()
    blocks = keys // SIZE
    is_block = blocks < NO_BLOCK
    starts = is_block & (before // SIZE != blocks)
    is_pair = is_block & (before // BLOCK_S != keys // BLOCK_S)
    is_last = is_block & (behind // SIZE != blocks)
    ranks = tl.cumsum(starts.to(tl.int32), 0)
    bits = tl.where(is_pair, 1, 0).to(tl.int64) << (keys % SIZE // BLOCK_S).to(tl.int64)
    members_ptr = sharing.members + place_of_tile * (SIZE + 1)
    tl.store(blocks_ptr + ranks - 1, blocks if halves is None else blocks % LATE, mask=is_last)
    tl.store(members_ptr + ranks, tl.cumsum(bits, 0), mask=is_last)
    tl.store(members_ptr, 0)

    num_union = tl.sum(starts.to(tl.int32), 0)
    tl.store(counts_ptr, num_union)
    tl.store(counts_ptr + 1, tl.sum((starts & (blocks < num_whole)).to(tl.int32), 0))
    if sharing.flags is not None:
        flags_ptr = sharing.flags + index.to(tl.int64) * tl.num_programs(1) + index_head
        if first_query == 0:
            tl.store(flags_ptr, 0)
        if first_query + BLOCK_T < num_queries:
            flag = 100 * num_union <= max_percent * tl.sum(is_pair.to(tl.int32), 0)
            tl.store(flags_ptr + tl.num_programs(1), flag.to(tl.int8))


@triton.jit
def load_flag(sharing, tile, index_head, index_heads):
    return tl.load(sharing.flags + tile.to(tl.int64) * index_heads + index_head)


@triton.jit
def load_flag_of_query(sharing, sequence, token, index_head, index_heads, place):
    """The flag of the tile that a query belongs to."""
    _, start, _ = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    if place.cu_seqlens is None:
        tile = sequence * tl.cdiv(place.seqlen_q, sharing.block_t)
    else:
        tile = start // sharing.block_t + sequence
    return load_flag(sharing, tile + (token - start) // sharing.block_t, index_head, index_heads)


@triton.jit
def open_query(index_head, place, sharing, parts):
    """Sequence, row and token of a program's query, and whether a tile of neighbours has it. parts: tiles of the heads
    of an index head.
    """
    sequence, row, token = find_query(tl.program_id(0), place)
    is_shared = 0
    if sharing.flags is not None:
        is_shared = load_flag_of_query(sharing, sequence, token, index_head, tl.num_programs(1) // parts, place)
    return sequence, row, token, is_shared != 0
