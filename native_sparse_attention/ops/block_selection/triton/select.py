"""Block selection: one program per query tile and index head loops over tiles of selection blocks."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.call import Call, SelectionRules
from native_sparse_attention.core.geometry import max_length_of_compressed
from native_sparse_attention.ops._triton.launch import describe_rows, head_block, launch
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_op
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.support import MAX_TOKENS
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops._triton.varlen import (
    count_blocks,
    flatten,
    floor_divide,
    last_dim_contiguous,
    load_extent,
    locate_queries,
    make_layout,
    num_tiles,
    unflatten,
)
from native_sparse_attention.ops.block_selection.triton import settings
from native_sparse_attention.ops.block_selection.triton.group_columns import load_group_queries, sum_group_heads
from native_sparse_attention.ops.block_selection.triton.topk import (
    count_levels,
    make_sort_keys,
    select_largest,
    sort_blocks,
    start_selection,
    start_topk,
    update_topk,
)

# Candidates of all queries of a tile, per row and in columns (`topk.py`): more would not stay in registers.
MAX_CANDIDATES = 1024
MAX_COLUMNS = 512
# There are never more forced blocks than these, and their priorities fit between the bits of inf and the largest int32.
MAX_FORCED = 2**21


class BlockSizes(NamedTuple):
    """block_size, stride, selection_block_size: l, d, l'. num_compressed: C; no sequence of more than max_tokens tokens
    has all its compressed blocks among them.
    """

    block_size: int
    stride: int
    selection_block_size: int
    num_compressed: int
    max_tokens: int


class Selection(NamedTuple):
    """num_selected: n, blocks per query. num_init, num_local: forced blocks, which count towards n. num_recent: as in
    the public function.
    """

    num_selected: int
    num_init: int
    num_local: int
    num_recent: int


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, sizes: tuple[int, int, int], call: Call, rules: SelectionRules
) -> Tensor:
    sequences, causal, scale, softcap = call
    # The indices have no gradient, so nothing is saved for a backward pass.
    q, k_cmp, lse = q.detach(), k_cmp.detach(), lse.detach()
    *selection, block_counts = rules
    return _select(q, k_cmp, lse, *flatten(sequences), *sizes, *selection, causal, scale, softcap, block_counts)


@register_op(
    'select_blocks',
    f'Tensor q, Tensor k_cmp, Tensor lse, {SEQUENCES}, SymInt block_size, SymInt stride, SymInt selection_block_size, '
    'SymInt num_selected, SymInt num_init, SymInt num_local, SymInt num_recent, bool share_group, bool causal, '
    'float scale, float? softcap, Tensor? block_counts',
)
def _select(q: Tensor, k_cmp: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    block_size, stride, selection_block_size, num_selected, num_init, num_local, num_recent = rest[6:13]
    share_group, causal, scale, softcap, block_counts = rest[13:]
    q = last_dim_contiguous(q)[0]
    sequences = unflatten(q, rest[:6])
    layout = make_layout(sequences, block_size, stride)
    batch, seqlen, heads, head_dim = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    index_heads = kv_heads if share_group else heads
    group = heads // index_heads
    out = q.new_empty(batch, seqlen, index_heads, num_selected, dtype=torch.int32)
    if out.numel() == 0:
        return out
    per_selection = selection_block_size // stride
    keys = spread_keys(k_cmp, per_selection)
    max_tokens = min(max_length_of_compressed(num_compressed, block_size, stride), MAX_TOKENS)
    of_group = settings.settings_of_group(settings.SELECT_SMALL, settings.SELECT, group, q)
    block_m, block_j, num_warps, num_stages = of_group
    block_g = 1 << (group - 1).bit_length()
    block_n = max(block_j, 1 << (num_selected - 1).bit_length())
    levels = count_levels(num_selected, block_j)
    block_t = MAX_COLUMNS // block_j if levels > 0 else MAX_CANDIDATES // block_n
    block_t = max(1, 16 // block_g, min(block_m // block_g, block_t))
    # float32 products take their operands from registers.
    tiles = describe_rows(keys, block_j, head_block(head_dim)) if keys.element_size() == 2 else None
    adds_to_next = block_size - stride <= selection_block_size
    launch(
        select_kernel,
        (num_tiles(layout, seqlen, block_t), index_heads),
        *(q, keys, tiles, lse),
        *(None if block_counts is None else block_counts.contiguous(), out),
        *(q.stride(), lse.stride(), keys.shape[3], kv_heads, layout),
        BlockSizes(block_size, stride, selection_block_size, num_compressed, max_tokens),
        Selection(num_selected, min(num_init, MAX_FORCED), min(num_local, MAX_FORCED), min(num_recent, MAX_TOKENS)),
        scale,
        softcap,
        CAUSAL=causal,
        GROUP=group,
        REPEATS=index_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_G=block_g,
        BLOCK_J=block_j,
        BLOCK_N=block_n,
        BLOCK_D=head_block(head_dim),
        SPREAD=per_selection,
        SKIPPED=0 if adds_to_next else (block_size - 1) // stride,
        LEVELS=levels,
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
        **settings.limit_registers(q, levels),
    )
    return out


def spread_keys(k_cmp: Tensor, per_selection: int) -> Tensor:
    """Rearrange `[B, C, H, D]` to `[B, H, per_selection, C', D]`: key c at (c % per_selection, c // per_selection).

    The keys of one loop step, one per selection block, are contiguous then, wherever a sequence begins. Columns without
    a key are not initialised.
    """
    batch, num_compressed, kv_heads, head_dim = k_cmp.shape
    whole, rest = divmod(num_compressed, per_selection)
    keys = k_cmp.new_empty(batch, kv_heads, per_selection, whole + (rest > 0), head_dim)
    in_order = keys.permute(0, 3, 2, 1, 4)
    in_order[:, :whole].copy_(k_cmp[:, : whole * per_selection].unflatten(1, (whole, per_selection)))
    if rest > 0:
        in_order[:, whole, :rest].copy_(k_cmp[:, whole * per_selection :])
    return keys


@_select.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    num_selected, share_group = rest[9], rest[13]
    index_heads = k_cmp.shape[2] if share_group else q.shape[2]
    return q.new_empty(*q.shape[:2], index_heads, num_selected, dtype=torch.int32)


@triton.jit
def select_kernel(
    q_ptr,
    keys_ptr,
    tiles,
    lse_ptr,
    counts_ptr,
    out_ptr,
    q_strides,
    lse_strides,
    num_columns,
    kv_heads,
    layout,
    sizes,
    selection,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPREAD: tl.constexpr,
    SKIPPED: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """q: `[B, T, HQ, D]`. keys: `[B, H, SPREAD, num_columns, D]` (`spread_keys`), contiguous; tiles: their descriptor.
    lse: `[B, HQ, T]`. counts: `[B, T, HI]` or None. out: `[B, T, HI, n]`, contiguous.

    The GROUP heads of an index head select together; a KV head has REPEATS index heads. SKIPPED: the number of
    compressed blocks before a selection block that reach into it, if their scores are not carried over from the block
    before.
    """
    # The last queries first, since they read the most keys: the short programs fill up the end of the launch.
    sequence, row, query_start, first_query, num_queries, num_tokens, offset = locate_queries(
        tl.num_programs(0) - 1 - tl.program_id(0), layout, BLOCK_T
    )
    if first_query >= num_queries:
        return
    index_head = tl.program_id(1)
    # A tile begins with the last block of the tile before, to carry over that block's part of the next block's score.
    ADDS_TO_NEXT: tl.constexpr = SKIPPED == 0
    OVERLAP: tl.constexpr = 1 if ADDS_TO_NEXT else 0
    NUM_STEPS: tl.constexpr = SPREAD + SKIPPED
    num_tokens = tl.minimum(num_tokens, sizes.max_tokens)
    _, key_start, num_keys = load_extent(layout.cu_blocks, sequence, sizes.num_compressed, layout.num_sequences)
    num_keys = tl.minimum(count_blocks(num_tokens, sizes.block_size, sizes.stride), num_keys)

    q_ptr += row.to(tl.int64) * q_strides[0]
    lse_ptr += row.to(tl.int64) * lse_strides[0]
    q, lse_log2, column_mask = load_group_queries(
        (q_ptr, q_strides[1], q_strides[2]), (lse_ptr, lse_strides[2], lse_strides[1]), query_start, first_query,
        num_queries, index_head, GROUP, HEAD_DIM, BLOCK_T, BLOCK_G, BLOCK_D,
    )  # fmt: skip
    scale_log2 = (scale if softcap is None else 1.0) * 1.4426950408889634

    queries = first_query + tl.arange(0, BLOCK_T)
    rows = (row.to(tl.int64) * layout.seqlen_q + query_start + queries) * tl.num_programs(1) + index_head
    limit = tl.where(queries < num_queries, selection.num_selected, 0)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + rows, mask=queries < num_queries, other=0)
        limit = tl.minimum(tl.maximum(counts, 0), limit).to(tl.int32)
    own_block = floor_divide(offset + queries - selection.num_recent, sizes.selection_block_size)
    num_blocks = tl.cdiv(num_tokens, sizes.selection_block_size)
    last, seen = num_blocks, num_keys  # blocks that any query may select, compressed blocks that every query sees
    if CAUSAL:
        last_position = offset + tl.minimum(first_query + BLOCK_T, num_queries) - 1
        last = tl.minimum(last, floor_divide(last_position - selection.num_recent, sizes.selection_block_size) + 1)
        first_position = tl.maximum(offset + first_query + 1, 0)
        seen = tl.minimum(seen, count_blocks(first_position, sizes.block_size, sizes.stride))

    plane = (row.to(tl.int64) * kv_heads + index_head // REPEATS) * SPREAD
    selected = start_selection(limit, BLOCK_N)
    is_incomplete = num_queries > 0
    while is_incomplete:
        topk = start_topk(limit, BLOCK_J, BLOCK_N, LEVELS)
        scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        next_scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        # One loop over tiles and steps makes one pipeline.
        for i in tl.range(0, tl.cdiv(last, BLOCK_J - OVERLAP) * NUM_STEPS):
            step = i % NUM_STEPS - SKIPPED
            first_block = i // NUM_STEPS * (BLOCK_J - OVERLAP) - OVERLAP
            compressed = (first_block + tl.arange(0, BLOCK_J)) * SPREAD + step
            exists = (compressed >= 0) & (compressed < num_keys)
            k = _load_step(
                keys_ptr, tiles, plane, key_start + step, first_block, exists, num_columns, HEAD_DIM, BLOCK_D, SPREAD
            )
            products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_J, BLOCK_T * BLOCK_G]
            if softcap is not None:
                products = cap_logits(products * scale, softcap)
            weights = tl.exp2(tl.fma(products, scale_log2, -lse_log2[None, :]))
            if GROUP < BLOCK_G:
                # Padding of the group may meet infinite keys.
                weights = tl.where(column_mask[None, :], weights, 0.0)
            weights = sum_group_heads(weights, BLOCK_T, BLOCK_G)
            if (first_block * SPREAD < SKIPPED) | ((first_block + BLOCK_J) * SPREAD > seen):
                visible = exists[:, None]
                if CAUSAL:
                    end = compressed * sizes.stride + sizes.block_size - 1
                    visible = visible & (end[:, None] <= (offset + queries)[None, :])
                weights = tl.where(visible, weights, 0.0)
            scores, next_scores = _add_step(scores, next_scores, weights, step, sizes, ADDS_TO_NEXT)
            if step == SPREAD - 1:
                sort_keys = make_sort_keys(
                    scores, next_scores, first_block, own_block, num_blocks, selection, CAUSAL, ADDS_TO_NEXT
                )
                block = (first_block + tl.arange(0, BLOCK_J))[None, :]
                topk = update_topk(topk, sort_keys, block, selected, selection.num_selected, LEVELS)
                scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
                next_scores = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        selected, is_incomplete = select_largest(topk, selected, selection.num_selected, LEVELS)

    slots = tl.arange(0, BLOCK_N)
    out_ptr += rows[:, None] * selection.num_selected
    mask = (queries < num_queries)[:, None] & (slots < selection.num_selected)[None, :]
    tl.store(out_ptr + slots[None, :], sort_blocks(selected[0], selection.num_selected), mask=mask)


@triton.jit
def _load_step(
    keys_ptr,
    tiles,
    plane,
    first_key,
    first_block,
    exists,
    num_columns,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Load the keys `[J, D]` of one step: one key of the tile's first block and every SPREAD-th key from there.

    plane: the head's first plane in `spread_keys`. first_key: the key of the sequence's block 0. Rows that do not exist
    hold anything if loaded by the descriptor.
    """
    column = floor_divide(first_key, SPREAD)
    first = (plane + first_key - column * SPREAD) * num_columns + column + first_block
    if tiles is not None:
        k = tiles.load([first.to(tl.int32), 0])
    else:
        keys_ptr += first * HEAD_DIM
        k = load_rows(keys_ptr, tl.arange(0, exists.shape[0]), HEAD_DIM, exists, HEAD_DIM, BLOCK_D, INT64_OFFSETS=False)
    return k


@triton.jit
def _add_step(scores, next_scores, weights, step, sizes, ADDS_TO_NEXT: tl.constexpr):
    """Add the weights `[J, T]` of one step to the scores of the tile's blocks, and to those of the next blocks, each
    times the number of tokens that the compressed block shares with them.
    """
    start = step * sizes.stride
    end = start + sizes.block_size
    shared = tl.minimum(end, sizes.selection_block_size) - tl.maximum(start, 0)
    scores = tl.fma(weights, shared.to(tl.float32), scores)
    if ADDS_TO_NEXT:
        beyond = tl.maximum(end - sizes.selection_block_size, 0)
        # An infinite weight that does not reach the next block must add 0, not NaN.
        next_scores = tl.fma(tl.where(beyond > 0, weights, 0.0), beyond.to(tl.float32), next_scores)
    return scores, next_scores
