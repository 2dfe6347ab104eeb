"""Block selection inside the regions of compressed blocks that each query reads: one program per query and index head.

The program multiplies the heads of the group with the keys of one region after the other, so its time does not depend
on the length of the sequence. A selection block that overlaps visible compressed blocks, but none in these regions, is
a candidate only where it is forced. Scores of the others sum over the read regions alone.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.call import Call, Regions, SelectionRules
from native_sparse_attention.core.geometry import max_length_of_compressed, overlapping_blocks
from native_sparse_attention.ops._triton.launch import head_block, is_wide, launch, row_block, settings_of
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_op
from native_sparse_attention.ops._triton.support import MAX_TOKENS
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops._triton.varlen import (
    count_blocks,
    flatten,
    floor_divide,
    last_dim_contiguous,
    make_layout,
    num_tiles,
    unflatten,
)
from native_sparse_attention.ops.block_selection.triton import settings
from native_sparse_attention.ops.block_selection.triton.scores_tiles import locate_query, weigh
from native_sparse_attention.ops.block_selection.triton.select import (
    MAX_CANDIDATES,
    MAX_FORCED,
    BlockSizes,
    Selection,
)
from native_sparse_attention.ops.block_selection.triton.topk import (
    force_blocks,
    select_largest,
    sort_blocks,
    start_selection,
    start_topk,
    update_topk,
)

# Selection blocks that one tile of keys may overlap: a table of keys by blocks stays in registers.
MAX_BLOCKS = 128
# The smallest key tile.
MIN_KEYS = 16
# Heads of a group per warp.
ROWS_PER_WARP = 16


class KeyTiles(NamedTuple):
    """Tiles of a region's keys, a compile-time constant.

    region_size: m. chunk: keys of a tile, a multiple of per_selection or less than it; parts: tiles of a region.
    per_selection: l' / d. reach: number of compressed blocks before a selection block that overlap it.
    """

    region_size: int
    chunk: int
    parts: int
    per_selection: int
    reach: int


def unsupported_sizes(sizes: tuple[int, int, int]) -> str | None:
    """Return the reason why the kernel does not support these block sizes (l, d, l'), or None."""
    block_size, _, selection_block_size = sizes
    if _blocks_beyond(*sizes) < MAX_BLOCKS:
        return None
    return (
        f'compress_block_size is {block_size}, but its kernel fits compressed blocks that reach less than {MAX_BLOCKS} '
        f'selection blocks of {selection_block_size} tokens'
    )


def select_in_regions(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    regions: Regions,
    sizes: tuple[int, int, int],
    call: Call,
    rules: SelectionRules,
) -> Tensor:
    """Select blocks as `select_blocks` does, from the regions that each query reads; lse is that of its compressed
    attention over these regions.
    """
    sequences, causal, scale, softcap = call
    # The indices have no gradient, so nothing is saved for a backward pass.
    q, k_cmp, lse = q.detach(), k_cmp.detach(), lse.detach()
    *selection, share_group, block_counts = rules
    tensors = (q, k_cmp, lse, *regions)
    return _select(*tensors, *flatten(sequences), *sizes, *selection, share_group, causal, scale, softcap, block_counts)


@register_op(
    'select_in_regions',
    f'Tensor q, Tensor k_cmp, Tensor lse, Tensor regions, SymInt region_size, {SEQUENCES}, SymInt block_size, '
    'SymInt stride, SymInt selection_block_size, SymInt num_selected, SymInt num_init, SymInt num_local, '
    'SymInt num_recent, bool share_group, bool causal, float scale, float? softcap, Tensor? block_counts',
)
def _select(q: Tensor, k_cmp: Tensor, lse: Tensor, regions: Tensor, region_size: int, *rest: Any) -> Tensor:
    flat, (block_size, stride, selection_block_size) = rest[:6], rest[6:9]
    num_selected, num_init, num_local, num_recent = rest[9:13]
    sizes = (block_size, stride, selection_block_size)
    share_group, causal, scale, softcap, block_counts = rest[13:]
    q, k_cmp = last_dim_contiguous(q, k_cmp)
    layout = make_layout(unflatten(q, flat), block_size, stride)
    batch, seqlen, heads, head_dim = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    index_heads = kv_heads if share_group else heads
    group, num_regions = heads // index_heads, regions.shape[3]
    out = q.new_empty(batch, seqlen, index_heads, num_selected, dtype=torch.int32)
    if out.numel() == 0:
        return out
    max_tokens = min(max_length_of_compressed(num_compressed, block_size, stride), MAX_TOKENS)
    rows, block_c, num_warps, num_stages = settings_of(settings.IN_REGIONS, q)
    tiles = _split_region(region_size, sizes, block_c)
    # A tile of less than a selection block may lie in two.
    block_j = _power_of_two((tiles.chunk // tiles.per_selection or 2) + _blocks_beyond(*sizes))
    rows = min(rows, max(1, MAX_CANDIDATES // block_j), _power_of_two(num_regions * tiles.parts))
    launch(
        region_kernel,
        (num_tiles(layout, seqlen, 1), index_heads),
        *(q, k_cmp, lse, regions.contiguous()),
        *(None if block_counts is None else block_counts.contiguous(), out),
        *(q.stride(), k_cmp.stride(), lse.stride(), num_regions, layout),
        BlockSizes(*sizes, num_compressed, max_tokens),
        Selection(num_selected, min(num_init, MAX_FORCED), min(num_local, MAX_FORCED), min(num_recent, MAX_TOKENS)),
        scale,
        softcap,
        key_tiles=tiles,
        CAUSAL=causal,
        GROUP=group,
        REPEATS=index_heads // kv_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_G=row_block(group),
        BLOCK_C=max(MIN_KEYS, _power_of_two(tiles.chunk)),
        BLOCK_J=block_j,
        BLOCK_N=_power_of_two(num_selected),
        BLOCK_R=_power_of_two(num_regions),
        BLOCK_D=head_block(head_dim),
        INT64_OFFSETS=is_wide(k_cmp),
        num_warps=max(num_warps, row_block(group) // ROWS_PER_WARP),
        num_stages=num_stages,
        device=q.device,
    )
    return out


def _split_region(region_size: int, sizes: tuple[int, int, int], block_c: int) -> KeyTiles:
    """Split the keys of a region into tiles of at most block_c keys and MAX_BLOCKS blocks."""
    block_size, stride, selection_block_size = sizes
    per_selection = selection_block_size // stride
    whole = min(block_c // per_selection, region_size // per_selection, MAX_BLOCKS - _blocks_beyond(*sizes))
    chunk = whole * per_selection or block_c
    return KeyTiles(region_size, chunk, -(-region_size // chunk), per_selection, (block_size - 1) // stride)


def _blocks_beyond(block_size: int, stride: int, selection_block_size: int) -> int:
    """Return the number of selection blocks behind its first one that a compressed block may overlap."""
    reach = -overlapping_blocks(block_size, stride, selection_block_size).start
    return -(-reach // (selection_block_size // stride))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


@_select.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, regions: Tensor, region_size: int, *rest: Any) -> Tensor:
    num_selected, share_group = rest[9], rest[13]
    index_heads = k_cmp.shape[2] if share_group else q.shape[2]
    return q.new_empty(*q.shape[:2], index_heads, num_selected, dtype=torch.int32)


@triton.jit
def region_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    regions_ptr,
    counts_ptr,
    out_ptr,
    q_strides,
    k_strides,
    lse_strides,
    num_regions,
    layout,
    sizes,
    selection,
    scale,
    softcap,
    key_tiles: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """q: `[B, T, HQ, D]`. k: `[B, C, H, D]`. lse: `[B, HQ, T]`. regions: `[B, T, HI, R]`, contiguous. counts:
    `[B, T, HI]` or None. out: `[B, T, HI, n]`, contiguous.

    The GROUP heads of an index head select together; a KV head has REPEATS index heads. ROWS: key tiles whose
    candidates are ranked at once.
    """
    # The last queries first, since they read the most regions.
    row, token, is_query, position, num_tokens, key_start, num_keys = locate_query(
        tl.num_programs(0) - 1 - tl.program_id(0), layout, sizes
    )
    if not is_query:
        return
    row, token, head = row.to(tl.int64), token.to(tl.int64), tl.program_id(1).to(tl.int64)
    num_tokens = tl.minimum(num_tokens, sizes.max_tokens)
    num_blocks = tl.cdiv(num_tokens, sizes.selection_block_size)
    own_block = floor_divide(position - selection.num_recent, sizes.selection_block_size)
    num_seen = num_keys
    if CAUSAL:
        num_seen = tl.minimum(num_keys, count_blocks(tl.maximum(position + 1, 0), sizes.block_size, sizes.stride))

    k_ptr += row * k_strides[0] + (head // REPEATS) * k_strides[2] + key_start.to(tl.int64) * k_strides[1]
    group_rows = tl.arange(0, BLOCK_G)
    row_mask = group_rows < GROUP
    heads = head * GROUP + group_rows
    q_ptr += row * q_strides[0] + token * q_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_G, BLOCK_D]
    lse_ptr += row * lse_strides[0] + token * lse_strides[2]
    lse = tl.load(lse_ptr + heads * lse_strides[1], mask=row_mask, other=0.0).to(tl.float32)

    index_row = (row * layout.seqlen_q + token) * tl.num_programs(1) + head
    regions_ptr += index_row * num_regions
    last_region = tl.cdiv(num_seen, key_tiles.region_size) - 1
    num_read = _count_regions(regions_ptr, num_regions, last_region, BLOCK_R)

    limit = tl.full([1], selection.num_selected, tl.int32)
    if counts_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(counts_ptr + index_row), 0), limit).to(tl.int32)
    selected = start_selection(limit, BLOCK_N)
    topk = start_topk(limit, BLOCK_J, BLOCK_N, 0)
    forced_keys, forced = _list_forced_blocks(own_block, num_blocks, selection, CAUSAL, BLOCK_N)
    topk = update_topk(topk, forced_keys, forced, selected, selection.num_selected, 0)

    IS_ALIGNED: tl.constexpr = key_tiles.chunk % key_tiles.per_selection == 0
    shared = _count_shared_tokens(0, sizes, BLOCK_J, BLOCK_C)
    carried = tl.full([BLOCK_J], -1.0, tl.float32)
    region = _load_region(regions_ptr, 0, num_read, last_region)
    num_key_tiles = num_read * key_tiles.parts
    for first_tile in tl.range(0, num_key_tiles, ROWS):
        found = tl.full([ROWS, BLOCK_J], -1.0, tl.float32)  # scores, -1 for no candidate
        blocks = tl.full([ROWS, BLOCK_J], 0, tl.int32)
        for i in tl.range(0, tl.minimum(ROWS, num_key_tiles - first_tile)):
            tile = first_tile + i
            following = _load_region(regions_ptr, tile // key_tiles.parts + 1, num_read, last_region)
            first = tile % key_tiles.parts * key_tiles.chunk
            last = tl.minimum(first + key_tiles.chunk, key_tiles.region_size)
            is_last = last == key_tiles.region_size
            first += region * key_tiles.region_size
            last += region * key_tiles.region_size
            keys = first + tl.arange(0, BLOCK_C)
            is_seen = keys < tl.minimum(last, num_seen)
            k = load_rows(k_ptr, keys, k_strides[1], is_seen, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
            weights = weigh(tl.dot(q, tl.trans(k), input_precision='ieee'), lse[:, None], scale, softcap)
            weights = tl.where(row_mask[:, None] & is_seen[None, :], weights, 0.0)  # [BLOCK_G, BLOCK_C]
            first_block = first // key_tiles.per_selection
            if not IS_ALIGNED:
                shared = _count_shared_tokens(first % key_tiles.per_selection, sizes, BLOCK_J, BLOCK_C)
            block = first_block + tl.arange(0, BLOCK_J)
            stop = tl.minimum(last, num_seen)
            scores = _add_keys(carried, weights, shared, block, first, stop, key_tiles)
            # The next tile may add to the blocks from its first one on.
            num_done = tl.where(is_last, following * key_tiles.region_size, last) // key_tiles.per_selection
            num_done = tl.where(is_last & (following < 0), BLOCK_J, tl.maximum(num_done - first_block, 0))
            done, carried = _split_scores(scores, num_done)
            is_row = (tl.arange(0, ROWS) == i)[:, None]
            found = tl.where(is_row, done[None, :], found)
            blocks = tl.where(is_row, block[None, :], blocks)
            region = tl.where(is_last, following, region)
        found, blocks = tl.reshape(found, [1, ROWS * BLOCK_J]), tl.reshape(blocks, [1, ROWS * BLOCK_J])
        sort_keys = _sort_unforced(found, blocks, own_block, num_blocks, selection, CAUSAL)
        topk = update_topk(topk, sort_keys, blocks, selected, selection.num_selected, 0)

    # Blocks of which no compressed block is visible score 0.
    unseen = tl.where(num_seen > 0, tl.cdiv(num_seen + key_tiles.reach, key_tiles.per_selection), 0)
    unseen = (unseen + tl.arange(0, BLOCK_J))[None, :]
    unseen_keys = _sort_unforced(tl.zeros([1, BLOCK_J], tl.float32), unseen, own_block, num_blocks, selection, CAUSAL)
    topk = update_topk(topk, unseen_keys, unseen, selected, selection.num_selected, 0)
    selected, _ = select_largest(topk, selected, selection.num_selected, 0)
    slots = tl.arange(0, BLOCK_N)[None, :]
    indices = sort_blocks(selected[0], selection.num_selected)
    tl.store(out_ptr + index_row * selection.num_selected + slots, indices, mask=slots < selection.num_selected)


@triton.jit
def _count_regions(regions_ptr, num_regions, last_region, BLOCK_R: tl.constexpr):
    """Return the number of regions of a row that have visible keys."""
    slots = tl.arange(0, BLOCK_R)
    regions = tl.load(regions_ptr + slots, mask=slots < num_regions, other=-1)
    return tl.sum(((regions >= 0) & (regions <= last_region)).to(tl.int32), 0)


@triton.jit
def _load_region(regions_ptr, slot, num_read, last_region):
    """Return the region in a slot, which has visible keys; -1 behind the list."""
    region = tl.load(regions_ptr + slot, mask=slot < num_read, other=-1).to(tl.int32)
    return tl.minimum(tl.where(slot < num_read, tl.maximum(region, 0), -1), last_region)


@triton.jit
def _count_shared_tokens(skipped, sizes, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return float32 `[J, C]`: the number of tokens that a selection block and a compressed block share, for
    consecutive ones. skipped: compressed blocks that begin in the first selection block, before the first of these.
    """
    start = (skipped + tl.arange(0, BLOCK_C))[None, :] * sizes.stride
    start = start - tl.arange(0, BLOCK_J)[:, None] * sizes.selection_block_size
    shared = tl.minimum(start + sizes.block_size, sizes.selection_block_size) - tl.maximum(start, 0)
    return tl.maximum(shared, 0).to(tl.float32)


@triton.jit
def _add_keys(scores, weights, shared, block, first, stop, key_tiles: tl.constexpr):
    """Return the scores `[J]` of blocks with the weights `[G, C]` of the keys [first, stop) added, -1 for a block that
    overlaps none of them and had no score.
    """
    weights = tl.sum(weights, 0)[None, :]
    # An infinite weight that does not reach a block must add 0, not NaN.
    added = tl.sum(tl.where(shared > 0, weights * shared, 0.0), 1)
    keys = block * key_tiles.per_selection
    overlaps = (keys + key_tiles.per_selection > first) & (keys - key_tiles.reach < stop) & (first < stop)
    return tl.where(overlaps, tl.where(scores < 0, 0.0, scores) + added, scores)


@triton.jit
def _split_scores(scores, num_done):
    """Return the scores `[J]` of the first blocks, and those of the others moved to the front; other places are -1."""
    BLOCK_J: tl.constexpr = scores.shape[0]
    columns = tl.arange(0, BLOCK_J)
    later = columns + num_done
    moved = tl.gather(scores, tl.minimum(later, BLOCK_J - 1), 0)
    return tl.where(columns < num_done, scores, -1.0), tl.where(later < BLOCK_J, moved, -1.0)


@triton.jit
def _sort_unforced(scores, block, own_block, num_blocks, selection, CAUSAL: tl.constexpr):
    """Return int32 sort keys of scores: larger ones are selected first; -1 for blocks that are forced or must not be
    selected, and for negative scores.
    """
    # The bits of non-negative floats are ordered like the floats.
    sort_keys = tl.where(scores == scores, scores, float('inf')).to(tl.int32, bitcast=True)
    sort_keys = tl.where(scores < 0, -1, sort_keys)
    sort_keys = force_blocks(sort_keys, block, own_block, num_blocks, selection, CAUSAL)
    return tl.where(sort_keys > 0x7F800000, -1, sort_keys)


@triton.jit
def _list_forced_blocks(own_block, num_blocks, selection, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return sort keys and blocks `[1, M]`: every forced block that may be among the first BLOCK_N, once; other keys
    are -1.
    """
    PARTS: tl.constexpr = 2 if CAUSAL else 4
    slots = tl.arange(0, PARTS * BLOCK_N)[None, :]
    part, step = slots // BLOCK_N, slots % BLOCK_N
    block = tl.where(part == 0, step, tl.minimum(own_block, num_blocks - 1) - step)
    if not CAUSAL:
        block = tl.where(part == 2, tl.maximum(own_block, -1) + 1 + step, block)
    is_own = (block == own_block) & (selection.num_local > 0)
    # The own block is listed with the local ones, and other initial blocks with the initial ones.
    is_listed = (part < 3) & (block >= 0)
    is_listed = is_listed & tl.where(
        part == 0, (block < selection.num_init) & ~is_own, (block >= selection.num_init) | is_own
    )
    block = tl.maximum(block, 0)
    sort_keys = tl.where(is_listed, 0, -1)
    sort_keys = force_blocks(sort_keys, block, own_block, num_blocks, selection, CAUSAL)
    return tl.where(sort_keys > 0x7F800000, sort_keys, -1), block
