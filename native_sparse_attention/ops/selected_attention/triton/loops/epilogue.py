"""Epilogues of the kernels by query and by query tile: store outputs, load and store what gradients need.

`rows` is (batch row, tokens, heads, mask) of a tile of rows. The token is a scalar if the tile holds a single query.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows, store_rows
from native_sparse_attention.ops.selected_attention.triton.dlogits.delta import split_low_bits


@triton.jit
def store_output(tensors, strides, rows, num_heads, layout, sums, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Finish an online softmax: store the output, its low bits where requested, and the log-sum-exp.

    tensors, strides: `ForwardTensors`, `Strides`. sums: the reference of the weights in bits, their sum, the
    excess of the sum of rounded weights over it (or None), and the weighted sum of values.
    """
    row_max, total, surplus, out = sums
    row, tokens, heads, mask = rows
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    divisor = total if surplus is None else total + surplus
    out = out * (1.0 / divisor)[:, None]
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    if tensors.low_bits is not None:
        out, low = split_low_bits(out, tensors.out.dtype.element_ty)
        low_ptr = tensors.low_bits + row * layout.seqlen_q * (num_heads * VALUE_DIM)
        low_strides = (0, num_heads * VALUE_DIM, VALUE_DIM)
        _store_rows(_find_rows(low_ptr, low_strides, rows), low_strides, rows, low, VALUE_DIM, BLOCK_DV)
    out_ptr = _find_rows(tensors.out, strides.out, rows)
    _store_rows(out_ptr, strides.out, rows, out, VALUE_DIM, BLOCK_DV)
    tl.store(tensors.lse + (row * num_heads + heads) * layout.seqlen_q + tokens, lse, mask=mask)


@triton.jit
def load_for_gradients(tensors, strides, rows, index_heads, layout, sizes: tl.constexpr, tile: tl.constexpr):
    """Load what the rows of a tile need for dq.

    tensors, strides: `BackwardTensors`, `Strides`. Returns q, dout, delta from the rounded output, the rows'
    offsets in `[B, HQ, T]`, the log-sum-exp, the same in bits (0 for -inf), and its gradient (0 without one).
    """
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    row, tokens, heads, mask = rows
    q_ptr = _find_rows(tensors.q, strides.q, rows)
    out_ptr = _find_rows(tensors.out, strides.out, rows)
    dout_ptr = _find_rows(tensors.dout, strides.dout, rows)
    q = _load_rows(q_ptr, strides.q, rows, HEAD_DIM, tile.block_d)  # [BLOCK_M, BLOCK_D]
    dout = _load_rows(dout_ptr, strides.dout, rows, VALUE_DIM, tile.block_dv)  # [BLOCK_M, BLOCK_DV]
    out = _load_rows(out_ptr, strides.out, rows, VALUE_DIM, tile.block_dv)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    offsets = (row * index_heads * sizes.group + heads) * layout.seqlen_q + tokens
    lse = tl.load(tensors.lse + offsets, mask=mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    dlse = tl.zeros([heads.shape[0]], tl.float32)
    if tensors.dlse is not None:
        dlse_ptr = tensors.dlse
        if len(tokens.shape) == 0:
            dlse_ptr += row * strides.dlse[0] + tokens * strides.dlse[2]
            dlse_offsets = heads * strides.dlse[1]
        else:
            dlse_offsets = row * strides.dlse[0] + heads * strides.dlse[1] + tokens * strides.dlse[2]
        dlse = tl.load(dlse_ptr + dlse_offsets, mask=mask, other=0.0)
        # The log-sum-exp of an empty row has no gradient; logaddexp of two of them returns NaN.
        dlse = tl.where(lse == float('-inf'), 0.0, dlse)
    return q, dout, delta, offsets, lse, lse_log2, dlse


@triton.jit
def store_gradients(
    tensors, strides, rows, offsets, sums, delta, lse, dlse, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store dq, multiplied by the gate if there is one, and delta minus the gradient of the log-sum-exp.

    sums: dq, the weighted mean of the keys, and the error of the delta with which dq was summed. offsets: of the rows
    in `[B, HQ, T]`.
    """
    dq, mean_k, delta_error = sums
    row, tokens, heads, mask = rows
    dq = (dq - delta_error[:, None] * mean_k) * scale
    if tensors.gate is not None:
        gate_ptr = tensors.gate + (row * strides.gate[0] + tokens * strides.gate[1])
        gate = tl.load(gate_ptr + heads * strides.gate[2], mask=mask, other=0.0).to(tl.float32)
        dq *= tl.where(lse == float('-inf'), 0.0, gate)[:, None]  # the gate of an empty row may be anything
    dq_ptr = _find_rows(tensors.dq, strides.dq, rows)
    _store_rows(dq_ptr, strides.dq, rows, dq, HEAD_DIM, BLOCK_D)
    tl.store(tensors.delta + offsets, delta + delta_error - dlse, mask=mask)


@triton.jit
def _find_rows(ptr, strides, rows):
    """Return the pointer to the batch row of a `[B, T, HQ, D]`, or to the token of a tile with a single query."""
    row, tokens, _, _ = rows
    if len(tokens.shape) == 0:
        ptr += row * strides[0] + tokens * strides[1]
    else:
        ptr += row * strides[0]
    return ptr


@triton.jit
def _load_rows(ptr, strides, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows of a tile; ptr: from `_find_rows`."""
    _, tokens, heads, mask = rows
    if len(tokens.shape) == 0:
        loaded = load_rows(ptr, heads, strides[2], mask, SIZE, BLOCK)
    else:
        loaded = load_rows(ptr, tokens * strides[1] + heads * strides[2], 1, mask, SIZE, BLOCK)
    return loaded


@triton.jit
def _store_rows(ptr, strides, rows, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the rows of a tile; ptr: from `_find_rows`."""
    _, tokens, heads, mask = rows
    if len(tokens.shape) == 0:
        store_rows(ptr, heads, strides[2], values, mask, SIZE, BLOCK)
    else:
        store_rows(ptr, tokens * strides[1] + heads * strides[2], 1, values, mask, SIZE, BLOCK)
