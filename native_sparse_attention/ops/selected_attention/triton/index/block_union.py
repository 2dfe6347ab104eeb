"""Block unions: the blocks that at least one query of a query tile selected, and which of its queries selected each.

For a large group both designs fill their tiles, and the better one reads fewer blocks. A program per query reads the
blocks of one query; a program per query tile reads the union of its queries' blocks and masks it for each of them. A
tile takes the union where the union of the tile before it in the sequence was small, since neighbouring tiles overlap
about equally. So a result does not depend on later queries or on the rest of the batch, bit for bit. The first tile of
a sequence is computed query by query.
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
from native_sparse_attention.ops.selected_attention.triton.fp16_values import FITS, Fp16Values, find_flags

# A tile takes its union where that is at most this percentage of the blocks that its queries select in total. A block
# of a union costs more than a block of a single query, because the queries that did not select it are masked. Measured
# on an H200 at G = 16, head size 128 and 4 queries per tile: larger values make the forward pass faster for short
# sequences and slower for long ones.
MAX_UNION_PERCENT = {'forward': 64, 'backward': 48}
# Indices whose unions are built by one launch, 12 bytes each.
MAX_INDICES = 2**25
# The queries of a tile are bits of an int64.
MAX_QUERIES = 64


class BlockUnion(NamedTuple):
    """The unions of some query tiles, as a kernel argument. Tiles have block_t queries and are numbered as in
    `locate_queries`; the first one here is first_tile.

    blocks: int32 `[tiles, HI, P]`, selected blocks in ascending order; P is `union_size`. query_bits: int64 `[tiles,
    HI, P + 1]`; bit t of query_bits[i + 1] - query_bits[i] is set if query t of the tile selected block i. counts:
    int32 `[tiles, HI, 3]`: the blocks, the leading blocks that every query may read completely, and with float16 values
    whether all blocks are small. With float16 values the leading blocks also fit float16, and the remaining blocks
    follow in ascending order. flags: int8 `[all tiles + 1, HI]`, 1 where a tile takes its union, 0 where its queries
    are computed one by one; None where all tiles take their unions. large: from `find_large`, or None.
    """

    flags: Any
    block_t: int
    blocks: Any
    query_bits: Any
    counts: Any
    first_tile: int
    large: Any
    num_chunks: int


NO_UNION = BlockUnion(None, 1, None, None, None, 0, None, 0)


def build_unions(
    block_indices: Tensor,
    layout: SequenceLayout,
    block_size: int,
    causal: bool,
    block_t: int,
    max_percent: int | None,
    large: Tensor | None,
    tiles: range | None = None,
    fp16_values: Fp16Values | None = None,
    flags: Tensor | None = None,
) -> BlockUnion:
    """Build the unions of these query tiles, or of all.

    max_percent: bound of the flags; None builds no flags. fp16_values: converted values, which need one index head per
    KV head. flags: the flags of earlier tiles, in a tensor for all tiles.
    """
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    all_tiles = num_tiles(layout, seqlen, block_t)
    tiles = range(all_tiles) if tiles is None else tiles
    size = union_size(num_selected, block_t)
    block_s, log_size = size // block_t, size.bit_length() - 1
    shape, device = (len(tiles), index_heads), block_indices.device
    if flags is None and max_percent is not None:
        flags = torch.empty(all_tiles + 1, index_heads, dtype=torch.int8, device=device)
    union = BlockUnion(
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
        *(union, fp16_values, block_indices, block_indices.stride(), layout, max_percent),
        NUM_SELECTED=num_selected,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        BLOCK_S=block_s,
        LOG_SIZE=log_size,
        num_warps=min(max(size // 128, 1), 8),
        device=device,
    )
    return union


def union_size(num_selected: int, block_t: int) -> int:
    """Return P of `BlockUnion`, a power of two of at least 2, as sorting requires."""
    return block_t * (1 << max(num_selected - 1, 1).bit_length())


def split_tiles(block_indices: Tensor, layout: SequenceLayout, block_t: int) -> list[range]:
    """Split all query tiles into ranges whose unions are built by one launch."""
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    tiles = num_tiles(layout, seqlen, block_t)
    step = max(1, MAX_INDICES // max(1, index_heads * union_size(num_selected, block_t)))
    return [range(first, min(first + step, tiles)) for first in range(0, tiles, step)]


@triton.jit(do_not_specialize=['max_percent'])
def union_kernel(
    union,
    fp16_values,
    indices_ptr,
    indices_strides,
    layout,
    max_percent,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG_SIZE: tl.constexpr,
):
    """Build the union of one query tile and index head, and the flag of the next tile of the sequence.

    A block counts if a query that selected it may read one of its keys. A repeated index counts once.
    """
    SIZE: tl.constexpr = 2**LOG_SIZE
    BLOCK_T: tl.constexpr = SIZE // BLOCK_S
    NO_BLOCK: tl.constexpr = 2**30 // SIZE - 1
    # With float16 values sequences are short enough (`stores_dlogits`) that all block numbers are below this bit.
    LATE: tl.constexpr = 2**29 // SIZE
    index = tl.program_id(0) + union.first_tile
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(index, layout, BLOCK_T)
    if first_query >= num_queries:
        return
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + index_head
    lanes = tl.arange(0, SIZE)
    queries, slots = first_query + lanes // BLOCK_S, lanes % BLOCK_S
    mask = (queries < num_queries) & (slots < NUM_SELECTED)
    indices_ptr += row * indices_strides[0] + index_head * indices_strides[2]
    blocks = tl.load(
        indices_ptr + (query_start + queries).to(tl.int64) * indices_strides[1] + slots, mask=mask, other=-1
    )
    num_blocks = count_readable_blocks(offset + queries, num_keys, BLOCK_SIZE, CAUSAL)
    counts = (blocks >= 0) & (blocks < num_blocks) & (blocks < (NO_BLOCK if fp16_values is None else LATE))
    num_full = num_keys // BLOCK_SIZE
    if CAUSAL:
        num_full = tl.minimum(num_full, tl.maximum(offset + first_query + 1, 0) // BLOCK_SIZE)
    counts_ptr = union.counts + tile * 3
    blocks = tl.where(counts, blocks, 0).to(tl.int32)
    if fp16_values is not None:
        _, key_start, _ = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
        pair = row * tl.num_programs(1) + index_head
        flags_ptr = find_flags(fp16_values, pair, sequence, key_start, layout, BLOCK_SIZE)
        flags = tl.load(flags_ptr + blocks, mask=counts, other=FITS).to(tl.int32)
        blocks += tl.where((blocks < num_full) & (flags == FITS), 0, LATE)
        tl.store(counts_ptr + 2, (tl.min(flags, 0) != 0).to(tl.int32))
    keys = sort_tile(tl.where(counts, blocks, NO_BLOCK) * SIZE + lanes, LOG_SIZE, LOG_SIZE // 5)

    # The neighbours of each key are read back through the memory where the union will stand.
    blocks_ptr = union.blocks + tile * SIZE
    tl.store(blocks_ptr + lanes, keys)
    tl.debug_barrier()
    before = tl.load(blocks_ptr + lanes - 1, mask=lanes > 0, other=2**30)
    behind = tl.load(blocks_ptr + lanes + 1, mask=lanes < SIZE - 1, other=2**30)
    tl.debug_barrier()
    blocks = keys // SIZE
    is_block = blocks < NO_BLOCK
    starts = is_block & (before // SIZE != blocks)
    is_first_of_query = is_block & (before // BLOCK_S != keys // BLOCK_S)
    is_last = is_block & (behind // SIZE != blocks)
    ends = tl.cumsum(starts.to(tl.int32), 0)
    bits = tl.where(is_first_of_query, 1, 0).to(tl.int64) << (keys % SIZE // BLOCK_S).to(tl.int64)
    bits_ptr = union.query_bits + tile * (SIZE + 1)
    tl.store(blocks_ptr + ends - 1, blocks if fp16_values is None else blocks % LATE, mask=is_last)
    tl.store(bits_ptr + ends, tl.cumsum(bits, 0), mask=is_last)
    tl.store(bits_ptr, 0)

    num_union = tl.sum(starts.to(tl.int32), 0)
    tl.store(counts_ptr, num_union)
    tl.store(counts_ptr + 1, tl.sum((starts & (blocks < num_full)).to(tl.int32), 0))
    if union.flags is not None:
        flags_ptr = union.flags + index.to(tl.int64) * tl.num_programs(1) + index_head
        if first_query == 0:
            tl.store(flags_ptr, 0)
        if first_query + BLOCK_T < num_queries:
            flag = 100 * num_union <= max_percent * tl.sum(is_first_of_query.to(tl.int32), 0)
            tl.store(flags_ptr + tl.num_programs(1), flag.to(tl.int8))


@triton.jit
def load_flag(union, tile, index_head, index_heads):
    """Return 1 where a query tile takes its union."""
    return tl.load(union.flags + tile.to(tl.int64) * index_heads + index_head)


@triton.jit
def _load_flag_of_query(union, sequence, token, index_head, index_heads, layout):
    """Return the flag of the query tile that holds a token."""
    _, start, _ = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    if layout.cu_seqlens is None:
        tile = sequence * tl.cdiv(layout.seqlen_q, union.block_t)
    else:
        tile = start // union.block_t + sequence
    return load_flag(union, tile + (token - start) // union.block_t, index_head, index_heads)


@triton.jit
def open_query(index_head, layout, union, head_tiles):
    """Return sequence, batch row and token of a program's query, and whether a query tile computes it instead.

    head_tiles: tiles that the heads of an index head take, along grid axis 1.
    """
    sequence, row, token = find_query(tl.program_id(0), layout)
    in_union = 0
    if union.flags is not None:
        in_union = _load_flag_of_query(union, sequence, token, index_head, tl.num_programs(1) // head_tiles, layout)
    return sequence, row, token, in_union != 0
