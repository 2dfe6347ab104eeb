"""The choice of blocks: one program per tile of queries and chooser, a running top-n over tiles of selection blocks."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.geometry import Sequences, max_length_of_compressed
from native_sparse_attention.ops._triton.launch import head_block, is_wide, launch, settings_of
from native_sparse_attention.ops._triton.placement import (
    count_blocks,
    flatten,
    floor_divide,
    last_dim_contiguous,
    load_extent,
    locate_queries,
    make_placement,
    num_tiles,
    unflatten,
)
from native_sparse_attention.ops._triton.registered import OptionalFloat, OptionalInt, OptionalTensor
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.support import MAX_TOKENS
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops.block_selection.triton import settings

# Blocks that a tile of queries keeps at a time; more would not stay in registers.
MAX_KEPT = 4096
# Forced blocks beyond these do not exist, and their priorities fit between the bits of infinity and the largest int32.
MAX_FORCED = 2**21


class Blocks(NamedTuple):
    """block_size, stride, selection_block_size: l, d, l'. num_compressed: the compressed blocks that there are, which
    complete no sequence of more than max_tokens.
    """

    block_size: int
    stride: int
    selection_block_size: int
    num_compressed: int
    max_tokens: int


class Choice(NamedTuple):
    num_selected: int
    num_init: int
    num_local: int


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    sequences: Sequences,
    sizes: tuple[int, int, int],
    num_selected: int,
    num_init: int,
    num_local: int,
    share_group: bool,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    block_counts: Tensor | None = None,
) -> Tensor:
    # Whole numbers have no gradient, and nothing is to be kept for one.
    q, k_cmp, lse = q.detach(), k_cmp.detach(), lse.detach()
    choice = (num_selected, num_init, num_local, share_group)
    return _select(q, k_cmp, lse, *flatten(sequences), *sizes, *choice, causal, scale, softcap, block_counts)


@torch.library.custom_op('native_sparse_attention::select_blocks', mutates_args=())
def _select(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    seqlen_k: int,
    q_offset: OptionalInt,
    q_offsets: OptionalTensor,
    seqlens_k: OptionalTensor,
    cu_seqlens: OptionalTensor,
    cu_seqlens_k: OptionalTensor,
    block_size: int,
    stride: int,
    selection_block_size: int,
    num_selected: int,
    num_init: int,
    num_local: int,
    share_group: bool,
    causal: bool,
    scale: float,
    softcap: OptionalFloat,
    block_counts: OptionalTensor,
) -> Tensor:
    q, k_cmp = last_dim_contiguous(q, k_cmp)
    sequences = unflatten(q, (seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k))
    place = make_placement(sequences, block_size, stride)
    batch, seqlen, heads, head_dim = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    choosers = kv_heads if share_group else heads
    group = heads // choosers
    out = q.new_empty(batch, seqlen, choosers, num_selected, dtype=torch.int32)
    if out.numel() == 0:
        return out
    max_tokens = min(max_length_of_compressed(num_compressed, block_size, stride), MAX_TOKENS)
    block_m, block_j, num_warps, num_stages = settings_of(settings.SELECT, q)
    block_g = 1 << (group - 1).bit_length()
    block_n = max(block_j, 1 << (num_selected - 1).bit_length())
    block_t = max(1, 16 // block_g, min(block_m // block_g, MAX_KEPT // block_n))
    launch(
        select_kernel,
        (num_tiles(place, seqlen, block_t), choosers),
        *(q, k_cmp, lse, None if block_counts is None else block_counts.contiguous(), out),
        *(q.stride(), k_cmp.stride(), lse.stride(), place),
        Blocks(block_size, stride, selection_block_size, num_compressed, max_tokens),
        Choice(num_selected, min(num_init, MAX_FORCED), min(num_local, MAX_FORCED)),
        scale,
        softcap,
        CAUSAL=causal,
        GROUP=group,
        CHOOSERS=choosers // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        BLOCK_J=block_j,
        BLOCK_N=block_n,
        BLOCK_D=head_block(head_dim),
        HANDED_ON=block_size - stride <= selection_block_size,
        WIDE=is_wide(k_cmp),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    return out


@_select.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    seqlen_k: int,
    q_offset: int | None,
    q_offsets: Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_size: int,
    stride: int,
    selection_block_size: int,
    num_selected: int,
    num_init: int,
    num_local: int,
    share_group: bool,
    causal: bool,
    scale: float,
    softcap: float | None,
    block_counts: Tensor | None,
) -> Tensor:
    choosers = k_cmp.shape[2] if share_group else q.shape[2]
    return q.new_empty(*q.shape[:2], choosers, num_selected, dtype=torch.int32)


@triton.jit
def select_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    counts_ptr,
    out_ptr,
    q_strides,
    k_strides,
    lse_strides,
    place,
    blocks,
    choice,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    CHOOSERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HANDED_ON: tl.constexpr,
    WIDE: tl.constexpr,
):
    """q: `[B, T, HQ, D]`; k: `[B, C, H, D]`; lse: `[B, HQ, T]`; counts, or None: `[B, T, HI]`, out: `[B, T, HI, n]`,
    contiguous. The GROUP heads of a chooser choose together; every key head has CHOOSERS of them.
    """
    sequence, row, query_start, first_query, num_queries, num_tokens, offset = locate_queries(
        tl.program_id(0), place, BLOCK_T
    )
    if first_query >= num_queries:
        return
    chooser = tl.program_id(1)
    # A tile's first block is the last one of the tile before, to hand on what it shares with the next one.
    OVERLAP: tl.constexpr = 1 if HANDED_ON else 0
    num_tokens = tl.minimum(num_tokens, blocks.max_tokens)
    _, key_start, num_keys = load_extent(place.cu_blocks, sequence, blocks.num_compressed, place.num_sequences)
    num_keys = tl.minimum(count_blocks(num_tokens, blocks.block_size, blocks.stride), num_keys)

    members = tl.arange(0, BLOCK_T * BLOCK_G)  # every query with every head of the group
    queries = first_query + members // BLOCK_G
    member_mask = (queries < num_queries) & (members % BLOCK_G < GROUP)
    heads = (chooser * GROUP + members % BLOCK_G).to(tl.int64)
    q_ptr += row.to(tl.int64) * q_strides[0]
    k_ptr += row.to(tl.int64) * k_strides[0] + (chooser // CHOOSERS).to(tl.int64) * k_strides[2]
    lse_ptr += row.to(tl.int64) * lse_strides[0] + (query_start + queries).to(tl.int64) * lse_strides[2]
    q_pointers = q_ptr + heads[:, None] * q_strides[2]
    q = load_rows(q_pointers, query_start + queries, q_strides[1], member_mask, HEAD_DIM, BLOCK_D)
    # What pads the group has weights of 0.
    lse = tl.load(lse_ptr + heads * lse_strides[1], mask=member_mask, other=float('inf')).to(tl.float32)

    chooser_queries = first_query + tl.arange(0, BLOCK_T)
    own_block = floor_divide(offset + chooser_queries, blocks.selection_block_size)
    num_blocks = tl.cdiv(num_tokens, blocks.selection_block_size)
    last = num_blocks
    if CAUSAL:
        last_position = offset + tl.minimum(first_query + BLOCK_T, num_queries) - 1
        last = tl.minimum(last, floor_divide(last_position, blocks.selection_block_size) + 1)
    slots = tl.arange(0, BLOCK_N)
    # Empty slots rank below all blocks, and hold none that there is. Slots behind a row are never the smallest.
    empty = tl.where(slots < choice.num_selected, -1, 2**31 - 1)[None, :]
    if counts_ptr is not None:
        rows = row.to(tl.int64) * place.seqlen_q + query_start + chooser_queries
        counts_ptr += rows * tl.num_programs(1) + chooser
        counts = tl.load(counts_ptr, mask=chooser_queries < num_queries, other=0)[:, None]
        empty = tl.where(slots[None, :] < counts, empty, 2**31 - 1)
    kept = (tl.broadcast_to(empty, [BLOCK_T, BLOCK_N]), tl.broadcast_to(-1 - slots[None, :], [BLOCK_T, BLOCK_N]))

    per_selection = blocks.selection_block_size // blocks.stride
    skipped = 0 if HANDED_ON else (blocks.block_size - 1) // blocks.stride
    num_steps = per_selection + skipped
    seen = num_keys  # by all queries
    if CAUSAL:
        first_position = tl.maximum(offset + first_query + 1, 0)
        seen = tl.minimum(seen, count_blocks(first_position, blocks.block_size, blocks.stride))
    scale_log2 = (scale if softcap is None else 1.0) * 1.4426950408889634
    lse_log2 = lse * 1.4426950408889634
    # One loop over tiles and their steps, so that all of them are one pipeline.
    first_block, step = -OVERLAP, 0
    scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
    onward = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
    for _ in tl.range(0, tl.cdiv(last, BLOCK_J - OVERLAP) * num_steps):
        compressed = (first_block + tl.arange(0, BLOCK_J)) * per_selection + step - skipped
        exists = (compressed >= 0) & (compressed < num_keys)
        k = load_rows(k_ptr, key_start + compressed, k_strides[1], exists, HEAD_DIM, BLOCK_D, WIDE)
        products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_J, BLOCK_T * BLOCK_G]
        if softcap is not None:
            products = cap_logits(products * scale, softcap)
        weights = tl.exp2(tl.fma(products, scale_log2, -lse_log2[None, :]))
        if GROUP < BLOCK_G:
            # Of keys that are infinite, too.
            weights = tl.where(member_mask[None, :], weights, 0.0)
        if (first_block * per_selection < skipped) | ((first_block + BLOCK_J) * per_selection > seen):
            visible = exists[:, None]
            if CAUSAL:
                end = compressed * blocks.stride + blocks.block_size - 1
                visible = visible & (end[:, None] <= (offset + queries)[None, :])
            weights = tl.where(visible, weights, 0.0)
        weights = tl.sum(tl.reshape(weights, [BLOCK_J, BLOCK_T, BLOCK_G]), 2)
        start = (step - skipped) * blocks.stride
        end = start + blocks.block_size
        shared = tl.minimum(end, blocks.selection_block_size) - tl.maximum(start, 0)
        scores = tl.fma(weights, shared.to(tl.float32), scores)
        if HANDED_ON:
            onward = tl.fma(weights, tl.maximum(end - blocks.selection_block_size, 0).to(tl.float32), onward)
        step += 1
        if step == num_steps:
            ranks = _rank(scores, onward, first_block, own_block, num_blocks, choice, CAUSAL, HANDED_ON)
            kept = _keep_largest(kept, ranks, first_block + tl.arange(0, BLOCK_J)[None, :], choice.num_selected)
            scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
            onward = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
            first_block, step = first_block + BLOCK_J - OVERLAP, 0

    taken = (kept[0] >= 0) & (slots < choice.num_selected)[None, :]
    if counts_ptr is not None:
        taken = taken & (kept[1] >= 0)
    indices = _put_in_order(tl.where(taken, kept[1], 2**30), slots, choice.num_selected)
    rows = row.to(tl.int64) * place.seqlen_q + query_start + chooser_queries
    out_ptr += (rows * tl.num_programs(1) + chooser)[:, None] * choice.num_selected
    mask = (chooser_queries < num_queries)[:, None] & (slots < choice.num_selected)[None, :]
    tl.store(out_ptr + slots[None, :], indices, mask=mask)


@triton.jit
def _rank(scores, onward, first_block, own_block, num_blocks, choice, CAUSAL: tl.constexpr, HANDED_ON: tl.constexpr):
    """Of a tile's blocks, `[T, J]`: the larger the earlier a block is taken, of equal ones the lower block; -1 where it
    is not to be taken. Forced blocks have the ranks of geometry.forced_priority, above all scores, `[J, T]`.
    """
    places = tl.arange(0, scores.shape[0])
    score = _pick(scores, places)
    if HANDED_ON:
        score += _pick(onward, tl.maximum(places - 1, 0))
    block = (first_block + places)[None, :]
    distance = own_block[:, None] - block
    reach = tl.abs(distance)
    is_local = reach < choice.num_local
    choosable = (block < num_blocks) & ((places > 0)[None, :] | (not HANDED_ON))
    if CAUSAL:
        is_local = is_local & (distance >= 0)
        choosable = choosable & (distance >= 0)
    priority = tl.where(is_local, 2 * (choice.num_local - reach) + (distance > 0).to(tl.int32), 0)
    initial = choice.num_init - block + 2 * choice.num_local
    priority = tl.where(block < choice.num_init, tl.maximum(priority, initial), priority)
    priority = tl.where(is_local & (distance == 0), 2 * choice.num_local + choice.num_init + 1, priority)
    # Bits of floats that are not negative are in the order of the floats.
    bits = tl.where(score == score, score, float('inf')).to(tl.int32, bitcast=True)
    return tl.where(choosable, tl.where(priority > 0, 0x7F800000 + priority, bits), -1)


@triton.jit
def _pick(values, rows):
    """Some rows of [J, T], as columns."""
    values = tl.trans(values)
    return tl.gather(values, tl.broadcast_to(rows[None, :], [values.shape[0], rows.shape[0]]), 1)


@triton.jit
def _keep_largest(kept, ranks, block, num_selected):
    """Per row the largest of both, as many as are kept: the smallest that is kept, of equal ones that of the highest
    block, makes room for the largest rank as long as that is larger. kept: ranks and their blocks, lower ones than
    `block`.
    """
    kept, kept_block = kept
    smallest = tl.min(kept, 1)[:, None]
    num_larger = tl.sum((ranks > smallest).to(tl.int32), 1)
    for _ in tl.range(0, tl.minimum(tl.max(num_larger, 0), num_selected)):
        largest = tl.max(ranks, 1)[:, None]
        best = tl.min(tl.where(ranks == largest, block, 2**30), 1)[:, None]
        worst = tl.max(tl.where(kept == smallest, kept_block, -(2**30)), 1)[:, None]
        replaced = (kept_block == worst) & (largest > smallest)
        kept = tl.where(replaced, largest, kept)
        kept_block = tl.where(replaced, best, kept_block)
        ranks = tl.where(block == best, -1, ranks)
        smallest = tl.min(kept, 1)[:, None]
    return kept, kept_block


@triton.jit
def _put_in_order(blocks, slots, num_selected):
    """Rows of blocks ascending, 2**30 for none there and -1 for none here."""
    indices = tl.full(blocks.shape, -1, tl.int32)
    # One after the other: tl.sort takes a minute to compile for long rows.
    for slot in tl.range(0, num_selected):
        lowest = tl.min(blocks, 1)[:, None]
        indices = tl.where((slots == slot)[None, :] & (lowest < 2**30), lowest, indices)
        blocks = tl.where(blocks == lowest, 2**30, blocks)
    return indices
