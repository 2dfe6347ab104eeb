"""φ of new compressed blocks where it is an MLP: one launch per linear layer, between the first launch of a step and
compressed attention.

Most steps complete no block in any row. The kernel finds that out on the device, and then reads no weights. Otherwise
the complete blocks of all rows are the columns of one matrix product, so that every weight is read once for BLOCK_R
of them: the weights are nearly all of the traffic.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import add_product
from native_sparse_attention.ops._triton.varlen import count_blocks
from native_sparse_attention.ops.decoding.triton.storage import (
    let_next_launch_begin,
    load_lengths,
    wait_for_launch_before,
)


class LinearSizes(NamedTuple):
    """Input and output features of a linear layer. A compile-time constant."""

    inputs: int
    outputs: int


@triton.jit
def linear_kernel(
    x_k,
    weight_k,
    bias_k,
    out_k,
    blocks_k,
    x_v,
    weight_v,
    bias_v,
    out_v,
    blocks_v,
    lengths_ptr,
    batch,
    capacity,
    step: tl.constexpr,
    sizes: tl.constexpr,
    sizes_k: tl.constexpr,
    sizes_v: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program per tile of output features and tile of complete blocks; with OWN_WEIGHTS per KV head too; for keys
    and for values.

    x, out: `[B, K, H, inputs]` and `[B, K, H, outputs]`, last dimension contiguous; entries of blocks that are not
    complete are neither read nor written. weight: strides by head, output and input; bias: by head and output. blocks:
    `[B, K, H, l, outputs]`, whose mean over l is added to the output, or None. Tensors of values: None without
    compressed values.
    """
    let_next_launch_begin(OVERLAPS)
    NUM_UNITS: tl.constexpr = step.kv_heads if OWN_WEIGHTS else 1
    HEADS: tl.constexpr = 1 if OWN_WEIGHTS else step.kv_heads
    row_tiles = tl.cdiv(batch * step.num_new * HEADS, BLOCK_R)
    complete = _count_complete(lengths_ptr, batch, capacity, step, sizes, BLOCK_B)
    first_rank = tl.program_id(0) % row_tiles * BLOCK_R
    wait_for_launch_before(OVERLAPS)
    if first_rank < complete * HEADS:
        ranks = first_rank + tl.arange(0, BLOCK_R)
        exists = ranks < complete * HEADS
        row, index = _find_blocks(ranks // HEADS, lengths_ptr, batch, capacity, step, sizes, BLOCK_B)
        unit = (tl.program_id(1) % NUM_UNITS).to(tl.int64)
        columns = (row.to(tl.int64), index.to(tl.int64), unit + ranks % HEADS, exists)
        features = tl.program_id(0) // row_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
        if tl.program_id(1) < NUM_UNITS:
            layer_k = (x_k, weight_k, bias_k, out_k, blocks_k)
            _apply(layer_k, unit, features, columns, sizes_k, sizes.block_size, RELU, BLOCK_I)
        elif x_v.ptr is not None:
            layer_v = (x_v, weight_v, bias_v, out_v, blocks_v)
            _apply(layer_v, unit, features, columns, sizes_v, sizes.block_size, RELU, BLOCK_I)


@triton.jit
def _apply(
    layer,
    unit,
    features,
    columns,
    layer_sizes: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Compute a tile of output features of the blocks `columns`, (row, index, head, whether it exists)."""
    x, weight, bias, out, blocks = layer
    exists = columns[3]
    is_feature = features < layer_sizes.outputs
    x_ptr = x.ptr + _offsets(x.strides, columns)[None, :]
    weight_ptr = weight.ptr + unit * weight.strides[0] + features.to(tl.int64)[:, None] * weight.strides[1]
    total = tl.zeros([features.shape[0], exists.shape[0]], tl.float32)
    for first in tl.range(0, layer_sizes.inputs, BLOCK_I):
        inputs = first + tl.arange(0, BLOCK_I)
        is_input = inputs < layer_sizes.inputs
        weights = tl.load(
            weight_ptr + inputs.to(tl.int64)[None, :] * weight.strides[2],
            mask=is_feature[:, None] & is_input[None, :],
            other=0.0,
        )
        tile = tl.load(x_ptr + inputs[:, None], mask=exists[None, :] & is_input[:, None], other=0.0)
        total = add_product(weights, tile, total)  # [BLOCK_F, BLOCK_R]
    biases = tl.load(bias.ptr + unit * bias.strides[0] + features * bias.strides[1], mask=is_feature, other=0.0)
    total += biases.to(tl.float32)[:, None]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # keeps NaN, as a maximum may not
    mask = is_feature[:, None] & exists[None, :]
    if blocks.ptr is not None:
        total += _mean(blocks, features, columns, mask, layer_sizes.outputs, BLOCK_SIZE)
    out_ptr = out.ptr + _offsets(out.strides, columns)[None, :] + features[:, None]
    tl.store(out_ptr, total.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mean(blocks, features, columns, mask, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    total = tl.zeros(mask.shape, tl.float32)
    blocks_ptr = blocks.ptr + _offsets(blocks.strides, columns)[None, :] + features[:, None]
    for token in tl.range(BLOCK_SIZE):
        total += tl.load(blocks_ptr + token * SIZE, mask=mask, other=0.0).to(tl.float32)
    return tl.div_rn(total, tl.full(mask.shape, BLOCK_SIZE, tl.float32))


@triton.jit
def _offsets(strides, columns):
    row, index, head, _ = columns
    return row * strides[0] + index * strides[1] + head * strides[2]


@triton.jit
def _count_new(lengths_ptr, first, batch, capacity, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return int32 `[BLOCK_B]`, the blocks that the step completes in the rows from `first` on."""
    rows = first + tl.arange(0, BLOCK_B)
    old, length = load_lengths(lengths_ptr, tl.minimum(rows, batch - 1), capacity, step)
    before = count_blocks(old, sizes.block_size, sizes.stride)
    return tl.where(rows < batch, count_blocks(length, sizes.block_size, sizes.stride) - before, 0)


@triton.jit
def _count_complete(lengths_ptr, batch, capacity, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the blocks that the step completes in all rows."""
    complete = tl.zeros([], tl.int32)
    for first in tl.range(0, batch, BLOCK_B):
        complete += tl.sum(_count_new(lengths_ptr, first, batch, capacity, step, sizes, BLOCK_B), 0)
    return complete


@triton.jit
def _find_blocks(ranks, lengths_ptr, batch, capacity, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the row and the index among its new blocks of complete blocks `[R]`, numbered in the order of rows."""
    row, before = tl.zeros(ranks.shape, tl.int32), tl.zeros(ranks.shape, tl.int32)
    complete = tl.zeros([], tl.int32)
    for first in tl.range(0, batch, BLOCK_B):
        new = _count_new(lengths_ptr, first, batch, capacity, step, sizes, BLOCK_B)
        ends = complete + tl.cumsum(new, 0)
        is_before = ends[None, :] <= ranks[:, None]  # [R, BLOCK_B], whole rows
        row += tl.sum(is_before.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        complete += tl.sum(new, 0)
    return row, ranks - before
