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
    lengths,
    batch,
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
    `[B, K, H, l, outputs]`, whose mean over l is added to the output, or None. Without compressed values, tensors of
    values are those of keys, and have no programs.
    """
    let_next_launch_begin(OVERLAPS)
    NUM_UNITS: tl.constexpr = step.kv_heads if OWN_WEIGHTS else 1
    HEADS: tl.constexpr = 1 if OWN_WEIGHTS else step.kv_heads
    row_tiles = tl.cdiv(batch * step.num_new * HEADS, BLOCK_R)
    complete = _count_complete(lengths, batch, step, sizes, BLOCK_B) * HEADS
    ranks = tl.program_id(0) % row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    features = tl.program_id(0) // row_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    wait_for_launch_before(OVERLAPS)
    if tl.program_id(0) % row_tiles * BLOCK_R < complete:
        row, index = _find_blocks(ranks // HEADS, lengths, batch, step, sizes, BLOCK_B)
        unit = (tl.program_id(1) % NUM_UNITS).to(tl.int64)
        columns = (row.to(tl.int64), index.to(tl.int64), unit + ranks % HEADS, ranks < complete)
        # Two branches would need twice the shared memory.
        is_v = tl.program_id(1) >= NUM_UNITS
        layer = (
            _pick(is_v, x_k, x_v),
            _pick(is_v, weight_k, weight_v),
            _pick(is_v, bias_k, bias_v),
            tl.where(is_v, sizes_v.inputs, sizes_k.inputs),
            tl.where(is_v, sizes_v.outputs, sizes_k.outputs),
        )
        total = _multiply(layer, unit, features, columns, RELU, BLOCK_I)
        mask = (features < layer[4])[:, None] & columns[3][None, :]
        if blocks_k.ptr is not None:
            total += _mean(_pick(is_v, blocks_k, blocks_v), features, columns, mask, layer[4], sizes.block_size)
        out = _pick(is_v, out_k, out_v)
        out_ptr = out[0] + _offsets(out, columns)[None, :] + features[:, None]
        tl.store(out_ptr, total.to(out_k.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pick(is_v, of_k, of_v):
    """Return address and three strides of one of two tensors."""
    return (
        tl.where(is_v, of_v.ptr, of_k.ptr),
        tl.where(is_v, of_v.strides[0], of_k.strides[0]),
        tl.where(is_v, of_v.strides[1], of_k.strides[1]),
        tl.where(is_v, of_v.strides[2], of_k.strides[2]),
    )


@triton.jit
def _multiply(layer, unit, features, columns, RELU: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return output features `[BLOCK_F, BLOCK_R]` of blocks. columns: rows, indices, heads, and whether they exist."""
    x, weight, bias, num_inputs, num_outputs = layer
    exists = columns[3]
    is_feature = features < num_outputs
    x_ptr = x[0] + _offsets(x, columns)[None, :]
    weight_ptr = weight[0] + unit * weight[1] + features.to(tl.int64)[:, None] * weight[2]
    total = tl.zeros([features.shape[0], exists.shape[0]], tl.float32)
    for first in tl.range(0, num_inputs, BLOCK_I):
        inputs = first + tl.arange(0, BLOCK_I)
        is_input = inputs < num_inputs
        weights = tl.load(
            weight_ptr + inputs.to(tl.int64)[None, :] * weight[3],
            mask=is_feature[:, None] & is_input[None, :],
            other=0.0,
        )
        tile = tl.load(x_ptr + inputs[:, None], mask=exists[None, :] & is_input[:, None], other=0.0)
        total = add_product(weights, tile, total)
    biases = tl.load(bias[0] + unit * bias[1] + features * bias[2], mask=is_feature, other=0.0)
    total += biases.to(tl.float32)[:, None]
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # keeps NaN, as a maximum may not
    return total


@triton.jit
def _mean(blocks, features, columns, mask, size, BLOCK_SIZE: tl.constexpr):
    """Return the mean over the tokens of each block."""
    total = tl.zeros(mask.shape, tl.float32)
    blocks_ptr = blocks[0] + _offsets(blocks, columns)[None, :] + features[:, None]
    for token in tl.range(BLOCK_SIZE):
        total += tl.load(blocks_ptr + token * size, mask=mask, other=0.0).to(tl.float32)
    return tl.div_rn(total, tl.full(mask.shape, BLOCK_SIZE, tl.float32))


@triton.jit
def _offsets(picked, columns):
    row, index, head, _ = columns
    return row * picked[1] + index * picked[2] + head * picked[3]


@triton.jit
def _count_new(lengths, first, batch, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return int32 `[BLOCK_B]`, the blocks that the step completes in the rows from `first` on."""
    rows = first + tl.arange(0, BLOCK_B)
    old, length = load_lengths(lengths, tl.minimum(rows, batch - 1), step)
    before = count_blocks(old, sizes.block_size, sizes.stride)
    return tl.where(rows < batch, count_blocks(length, sizes.block_size, sizes.stride) - before, 0)


@triton.jit
def _count_complete(lengths, batch, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the blocks that the step completes in all rows."""
    complete = tl.zeros([], tl.int32)
    for first in tl.range(0, batch, BLOCK_B):
        complete += tl.sum(_count_new(lengths, first, batch, step, sizes, BLOCK_B), 0)
    return complete


@triton.jit
def _find_blocks(ranks, lengths, batch, step: tl.constexpr, sizes: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the row and the index among its new blocks of complete blocks `[R]`, numbered in the order of rows."""
    row, before = tl.zeros(ranks.shape, tl.int32), tl.zeros(ranks.shape, tl.int32)
    complete = tl.zeros([], tl.int32)
    for first in tl.range(0, batch, BLOCK_B):
        new = _count_new(lengths, first, batch, step, sizes, BLOCK_B)
        ends = complete + tl.cumsum(new, 0)
        is_before = ends[None, :] <= ranks[:, None]  # [R, BLOCK_B], whole rows
        row += tl.sum(is_before.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        complete += tl.sum(new, 0)
    return row, ranks - before
