"""Gradient of factors of 1 on the logits of selected blocks, in a softmax that reads other keys too.

The gradient of a logit is p * (dp - delta), with p and delta of the whole softmax. The factor of a block multiplies the
logits of all its keys, so its gradient is the sum of these gradients times the logits. By query, there is one program
per query and tile of the heads that share its blocks; by block, the kernel of by_block/backward.py computes them.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops.selected_attention.triton import plan, settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, KeySource, strides_of
from native_sparse_attention.ops.selected_attention.triton.by_block.backward import differentiate_factors
from native_sparse_attention.ops.selected_attention.triton.index.block_union import NO_UNION, open_query
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import ANY, find_keys, load_step, select_row


class DscaleTensors(NamedTuple):
    """Tensors of `dscale_kernel`, shaped as in `BackwardTensors`. dscale: float32 zeros `[head tiles, B, T, HI, n]`."""

    q: Any
    k: Any
    v: Any
    indices: Any
    lse: Any
    delta: Any
    dout: Any
    dscale: Any


def differentiate_scale(arguments: Arguments, lse: Tensor, delta: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of the factors, float32 `[B, T, HI, n]`; 0 for an index that names no block or repeats one.

    Queries are causal. The last dimension of dout is contiguous. lse: `[B, HQ, T]`, of the whole softmax. delta: `[B,
    HQ, T]`, the sum of p * dp over all keys of a row minus the gradient of lse.
    """
    q, k, v, block_indices, _, layout, block_size, _, scale, softcap = arguments
    delta = delta.contiguous()
    if plan.takes_factors_by_block(q, k, v, block_indices, block_size):
        return differentiate_factors(arguments, lse, delta, dout)
    grid, launch_settings = plan.plan_by_query((settings.DQ, settings.DQ_32, settings.DQ_64), arguments)
    batch, seqlen, index_heads, num_selected = block_indices.shape
    head_tiles = grid[1] // max(index_heads, 1)
    dscale = q.new_zeros(head_tiles, batch, seqlen, index_heads, num_selected, dtype=torch.float32)
    if dscale.numel() and k.shape[1]:
        launch(
            dscale_kernel,
            grid,
            DscaleTensors(q, k, v, block_indices, lse, delta, dout, dscale),
            strides_of(q=q, k=k, v=v, indices=block_indices, dout=dout),
            *(layout, NO_UNION, scale, softcap),
            **launch_settings._asdict(),
            device=q.device,
        )
    return dscale[0] if head_tiles == 1 else dscale.sum(0)


@triton.jit
def dscale_kernel(tensors, strides, layout, union, scale, softcap, sizes: tl.constexpr, tile: tl.constexpr):
    """Store the gradient of the factors, summed over a tile of the heads that share an index.

    tensors, strides: `DscaleTensors`, `Strides`. union: `NO_UNION`.
    """
    GROUP: tl.constexpr = sizes.group
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    SPLIT: tl.constexpr = (sizes.block_size + BLOCK_N - 1) // BLOCK_N
    head_tiles = tl.cdiv(GROUP, BLOCK_M)
    index_head = (tl.program_id(1) // head_tiles).to(tl.int64)
    sequence, row, token, _ = open_query(index_head, layout, union, head_tiles)
    key_start, readable = find_keys(sequence, token, layout, CAUSAL=True)
    row, token = row.to(tl.int64), token.to(tl.int64)
    head_tile = (tl.program_id(1) % head_tiles).to(tl.int64)
    in_group = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    index_heads = tl.num_programs(1) // head_tiles
    kv_head = index_head // sizes.repeats
    k_ptr = tensors.k + (row * strides.k[0] + kv_head * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + kv_head * strides.v[2])
    indices_ptr = tensors.indices
    indices_ptr += row * strides.indices[0] + token * strides.indices[1] + index_head * strides.indices[2]
    q_ptr = tensors.q + (row * strides.q[0] + token * strides.q[1])
    dout_ptr = tensors.dout + (row * strides.dout[0] + token * strides.dout[1])
    q = load_rows(q_ptr, heads, strides.q[2], head_mask, HEAD_DIM, tile.block_d)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(dout_ptr, heads, strides.dout[2], head_mask, VALUE_DIM, tile.block_dv)  # [BLOCK_M, BLOCK_DV]
    offsets = (row * index_heads * GROUP + heads) * layout.seqlen_q + token
    lse = tl.load(tensors.lse + offsets, mask=head_mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    delta = tl.load(tensors.delta + offsets, mask=head_mask, other=0.0)
    query = row * layout.seqlen_q + token
    dscale_ptr = tensors.dscale
    dscale_ptr += ((head_tile * tl.num_programs(0) + query) * index_heads + index_head) * NUM_SELECTED
    slots = tl.arange(0, tile.block_s)
    blocks = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)
    source = KeySource(k_ptr, v_ptr, None, None, row, kv_head, strides.k[1], strides.v[1], key_start)
    selection = select_row(indices_ptr, blocks, readable)
    dfactor = 0.0
    for step in tl.range(0, NUM_SELECTED * SPLIT):
        k, v, slot, is_read, read = load_step(source, selection, step, ANY, BLOCK_N, sizes, tile)
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
