"""Gradient of factors of 1 on the logits of selected blocks, beside a softmax that reads other keys too.

The gradient of a logit is p * (dp - delta), where p and delta are those of the whole softmax. The factor of a block
multiplies the logits of all of its keys, so its gradient is the sum of the gradients of these logits times the logits.
One program per query and tile of the heads that share its blocks.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch, row_block
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.index.block_union import NOTHING_SHARED, open_query
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import ANY, find_keys, load_step
from native_sparse_attention.ops.selected_attention.triton.plan import find_constants


def differentiate_scale(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    place: SequenceLayout,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the factors, float32 `[B, T, HI, n]`; 0 for an index that names no block or repeats one.

    Queries are causal. inputs: q, k, v, block_indices, with dout their last dimension contiguous. lse: `[B, HQ, T]`, of
    the whole softmax. delta: `[B, HQ, T]`, the sum of p * dp over all keys of a row, less the gradient of lse.
    """
    q, k, v, block_indices = inputs
    tables = settings.DQ, settings.DQ_32, settings.DQ_64
    tile = settings.settings_of_group(tables, q.shape[2] // block_indices.shape[2], q, v)
    meta = find_constants(tile, q, k, v, block_indices, block_size, True)
    meta['BLOCK_M'] = min(meta['BLOCK_M'], row_block(meta['GROUP']))
    del meta['CAUSAL']
    batch, seqlen, index_heads, num_selected = block_indices.shape
    parts = -(-meta['GROUP'] // meta['BLOCK_M'])
    dscale = q.new_zeros(parts, batch, seqlen, index_heads, num_selected, dtype=torch.float32)
    if dscale.numel() and k.shape[1]:
        launch(
            dscale_kernel,
            (batch * seqlen, index_heads * parts),
            *(q, k, v, block_indices, lse, delta.contiguous(), dout, dscale),
            *(q.stride(), k.stride(), v.stride(), block_indices.stride(), dout.stride()),
            *(place, NOTHING_SHARED, scale, softcap),
            **meta,
            device=q.device,
        )
    return dscale[0] if parts == 1 else dscale.sum(0)


@triton.jit
def dscale_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indices_ptr,
    lse_ptr,
    delta_ptr,
    dout_ptr,
    dscale_ptr,
    q_strides,
    k_strides,
    v_strides,
    indices_strides,
    dout_strides,
    place,
    sharing,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """dscale: `[parts, B, T, HI, n]`, contiguous, zeros; a part for each tile of the heads that share an index."""
    parts = tl.cdiv(GROUP, BLOCK_M)
    index_head = (tl.program_id(1) // parts).to(tl.int64)
    sequence, row, token, _ = open_query(index_head, place, sharing, parts)
    key_start, readable = find_keys(sequence, token, place, True)
    row, token = row.to(tl.int64), token.to(tl.int64)
    part = (tl.program_id(1) % parts).to(tl.int64)
    in_group = part * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    index_heads = tl.num_programs(1) // parts
    k_ptr += row * k_strides[0] + index_head // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + index_head // REPEATS * v_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + index_head * indices_strides[2]
    q_ptr += row * q_strides[0] + token * q_strides[1]
    dout_ptr += row * dout_strides[0] + token * dout_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], head_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(dout_ptr, heads, dout_strides[2], head_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    places = (row * index_heads * GROUP + heads) * place.seqlen_q + token
    lse = tl.load(lse_ptr + places, mask=head_mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    delta = tl.load(delta_ptr + places, mask=head_mask, other=0.0)
    query = row * place.seqlen_q + token
    dscale_ptr += ((part * tl.num_programs(0) + query) * index_heads + index_head) * NUM_SELECTED
    selected = tl.load(indices_ptr + tl.arange(0, BLOCK_S), mask=tl.arange(0, BLOCK_S) < NUM_SELECTED, other=-1)
    source = (k_ptr, v_ptr, None, None, row, index_head // REPEATS, k_strides[1], v_strides[1], key_start)
    chosen = (indices_ptr, selected, readable, 0, 0, 0)
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    dfactor = 0.0
    for step in tl.range(0, NUM_SELECTED * SPLIT):
        k, v, slot, is_read, read = load_step(
            source,
            chosen,
            step,
            ANY,
            BLOCK_SIZE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_S,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            INT64_OFFSETS,
        )
        logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale  # [BLOCK_M, BLOCK_N]
        logits = tl.where(read & head_mask[:, None], logits, 0.0)
        capped, slope = logits, 1.0
        if softcap is not None:
            capped, slope = cap_logits(logits, softcap), cap_slope(logits, softcap)
        weights = tl.exp2(tl.fma(capped, 1.4426950408889634, -lse_log2[:, None]))
        dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
        dlogits = weights * (dweights - delta[:, None]) * slope
        # Logits of keys that are not read are 0.
        terms = tl.where(logits == 0, 0.0, dlogits * logits)
        dfactor = tl.where(step % SPLIT == 0, 0.0, dfactor) + tl.sum(tl.sum(terms, 1), 0)
        if is_read:
            tl.store(dscale_ptr + slot, dfactor)
