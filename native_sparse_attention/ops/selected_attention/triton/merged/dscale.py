"""Gradient of factors of 1 on the logits of selected blocks, for the keys inside the window of merged attention.

The gradient of a logit is p * (dp - delta), with p and delta of the whole softmax. The factor of a block multiplies the
logits of all its keys, so its gradient is the sum of these gradients times the logits. The backward pass of the
selected part sums over the keys before the window. Here a program has a query tile and all heads of an index head, and
goes through the blocks of its window that at least one of its queries selected.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton import plan, settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, strides_of
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import load_rows_of_indices
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    find_slot,
    locate_tokens,
    repeat_for_heads,
)


class DscaleTensors(NamedTuple):
    """Tensors of `dscale_kernel`, shaped as in `BackwardTensors`. dscale: float32 `[B, T, HI, n]`, contiguous."""

    q: Any
    k: Any
    v: Any
    indices: Any
    lse: Any
    delta: Any
    dout: Any
    dscale: Any


def add_window_dscale(
    dscale: Tensor, arguments: Arguments, left: int, lse: Tensor, delta: Tensor, dout: Tensor
) -> None:
    """Add to the gradient of the factors, float32 `[B, T, HI, n]`, what the keys inside the window contribute.

    Queries are causal and read the keys from `left` before their own on. The last dimension of dout is contiguous. lse:
    `[B, HQ, T]`, of the whole softmax. delta: `[B, HQ, T]`, the sum of p * dp over all keys of a row minus the gradient
    of lse. An index that names no block or repeats an earlier one receives nothing.
    """
    q, k, v, block_indices, _, layout, _, _, scale, softcap = arguments
    if not dscale.numel() or not k.shape[1]:
        return
    grid, launch_settings = plan.plan_by_tile(settings.UNION_DQ, arguments)
    launch(
        dscale_kernel,
        grid,
        DscaleTensors(q, k, v, block_indices, lse, delta.contiguous(), dout, dscale),
        strides_of(q=q, k=k, v=v, indices=block_indices, dout=dout),
        *(layout, left, scale, softcap),
        **launch_settings._asdict(),
        device=q.device,
    )


@triton.jit
def dscale_kernel(tensors, strides, layout, left, scale, softcap, sizes: tl.constexpr, tile: tl.constexpr):
    """Add the gradient of the factors of a query tile, summed over the heads of an index head.

    tensors, strides: `DscaleTensors`, `Strides`. A program exits early where no query selected a block of its window.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    BLOCK_S: tl.constexpr = tile.block_s
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    SPLIT: tl.constexpr = (BLOCK_SIZE + tile.block_n - 1) // tile.block_n
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(
        tl.program_id(0), layout, BLOCK_T
    )
    if first_query >= num_queries:
        return
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    tile_tokens, token_mask = locate_tokens(query_start, first_query, num_queries, BLOCK_T)
    positions = offset + first_query + tl.arange(0, BLOCK_T)
    first_keys = tl.maximum(positions - left, 0)
    num_blocks = (tl.minimum(tl.maximum(positions + 1, 0), num_keys) + BLOCK_SIZE - 1) // BLOCK_SIZE
    indices_ptr = tensors.indices + (row * strides.indices[0] + index_head * strides.indices[2])
    blocks = load_rows_of_indices(indices_ptr, tile_tokens * strides.indices[1], token_mask, NUM_SELECTED, BLOCK_S)
    in_window = (blocks >= (first_keys // BLOCK_SIZE)[:, None]) & (blocks < num_blocks[:, None])
    last_block = tl.max(tl.max(tl.where(in_window, blocks, -1), 1), 0)
    if last_block < 0:
        return
    first_block = tl.min(tl.min(tl.where(in_window, blocks, last_block), 1), 0)
    blocks = tl.where(in_window, blocks, -1)
    _, key_start, _ = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    k_ptr = tensors.k + (row * strides.k[0] + index_head // sizes.repeats * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + index_head // sizes.repeats * strides.v[2])
    source = (k_ptr, v_ptr, key_start, num_keys)
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // BLOCK_G
    tokens = (query_start + queries).to(tl.int64)
    window = (blocks, offset + queries, left, tl.maximum(offset + first_query - left, 0))
    dscale = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    for first_head in tl.range(0, GROUP, BLOCK_G):
        in_group = first_head + rows % BLOCK_G
        heads = index_head * GROUP + in_group
        mask = (queries < num_queries) & (in_group < GROUP)
        q_offsets = row * strides.q[0] + tokens * strides.q[1] + heads * strides.q[2]
        dout_offsets = row * strides.dout[0] + tokens * strides.dout[1] + heads * strides.dout[2]
        q = load_rows(tensors.q, q_offsets, 1, mask, sizes.head_dim, tile.block_d)  # [BLOCK_M, BLOCK_D]
        dout = load_rows(tensors.dout, dout_offsets, 1, mask, sizes.value_dim, tile.block_dv)  # [BLOCK_M, BLOCK_DV]
        offsets = (row * tl.num_programs(1) * GROUP + heads) * layout.seqlen_q + tokens
        lse = tl.load(tensors.lse + offsets, mask=mask, other=0.0)
        delta = tl.load(tensors.delta + offsets, mask=mask, other=0.0)
        inputs = (q, dout, lse, delta, mask, scale, softcap)
        for step in tl.range(first_block * SPLIT, (last_block + 1) * SPLIT):
            dscale = _add_keys(dscale, inputs, source, strides, window, step, sizes, tile)
    index_rows = (row * layout.seqlen_q + tile_tokens) * tl.num_programs(1) + index_head
    dscale_ptr = tensors.dscale + (index_rows * NUM_SELECTED)[:, None] + tl.arange(0, BLOCK_S)[None, :]
    tl.store(dscale_ptr, tl.load(dscale_ptr, mask=in_window, other=0.0) + dscale, mask=in_window)


@triton.jit
def _add_keys(dscale, inputs, source, strides, window, step, sizes: tl.constexpr, tile: tl.constexpr):
    """Add a tile of keys to the gradient of the factors [BLOCK_T, BLOCK_S]: part step % SPLIT of block step // SPLIT.

    source: pointers to k and v, first key of the sequence and its number of keys. window: the selected blocks with a
    key in the window, -1 for others; position of every row; keys before the position; and first key of the tile.
    """
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_S: tl.constexpr = tile.block_s
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    q, dout, lse, delta, mask, scale, softcap = inputs
    k_ptr, v_ptr, key_start, num_keys = source
    blocks, positions, left, first_key = window
    block = step // SPLIT
    first = block * BLOCK_SIZE + step % SPLIT * BLOCK_N
    slot = find_slot(blocks, block, BLOCK_S)  # [BLOCK_T]
    if (first + BLOCK_N > first_key) & (tl.min(slot, 0) < BLOCK_S):
        keys = first + tl.arange(0, BLOCK_N)
        key_mask = (keys >= first_key) & (keys < tl.minimum((block + 1) * BLOCK_SIZE, num_keys))
        k = load_rows(
            k_ptr, key_start + keys, strides.k[1], key_mask, sizes.head_dim, tile.block_d, tile.int64_offsets
        )  # [BLOCK_N, BLOCK_D]
        v = load_rows(
            v_ptr, key_start + keys, strides.v[1], key_mask, sizes.value_dim, tile.block_dv, tile.int64_offsets
        )  # [BLOCK_N, BLOCK_DV]
        logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale  # [BLOCK_M, BLOCK_N]
        capped, slope = logits, 1.0
        if softcap is not None:
            capped, slope = cap_logits(logits, softcap), cap_slope(logits, softcap)
        lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
        weights = tl.exp2(tl.fma(capped, 1.4426950408889634, -lse_log2[:, None]))
        dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
        dlogits = weights * (dweights - delta[:, None]) * slope
        is_selected = repeat_for_heads(slot, BLOCK_T, BLOCK_G) < BLOCK_S
        read = (mask & is_selected)[:, None] & key_mask[None, :]
        read = read & (keys[None, :] >= (positions - left)[:, None]) & (keys[None, :] <= positions[:, None])
        # Logits and gradients of keys that are not read may be anything.
        terms = tl.sum(tl.where(read, dlogits * logits, 0.0), 1)
        terms = tl.sum(tl.reshape(terms, [BLOCK_T, BLOCK_G]), 1)
        dscale += tl.where(tl.arange(0, BLOCK_S)[None, :] == slot[:, None], terms[:, None], 0.0)
    return dscale
