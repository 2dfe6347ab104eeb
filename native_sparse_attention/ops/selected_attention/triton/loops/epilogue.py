"""Rows of a tile, of one query or of neighbours: their output, what they have for their gradients, and where these are
stored.

rows: the row of the batch; the token, which is one number where the tile is of one query; the heads; and which of these
there are.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.tiles import load_rows, store_rows
from native_sparse_attention.ops.selected_attention.triton.dlogits.delta import split_low_bits


@triton.jit
def store_output(
    out_ptr,
    lse_ptr,
    low_ptr,
    out_strides,
    rows,
    num_heads,
    place,
    sums,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The end of a running softmax: stores the output, its low bits where they are asked for, and the log-sum-exp.
    sums: what weights are relative to, in bits, their sum, by how much that of the weights that met v is above it, or
    None, and the sum of the values.
    """
    row_max, total, surplus, out = sums
    row, tokens, heads, mask = rows
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    divisor = total if surplus is None else total + surplus
    out = out * (1.0 / divisor)[:, None]
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    if low_ptr is not None:
        out, low = split_low_bits(out, out_ptr.dtype.element_ty)
        low_ptr += row * place.seqlen_q * (num_heads * VALUE_DIM)
        low_strides = (0, num_heads * VALUE_DIM, VALUE_DIM)
        _store_of_rows(_open_rows(low_ptr, low_strides, rows), low_strides, rows, low, VALUE_DIM, BLOCK_DV)
    _store_of_rows(_open_rows(out_ptr, out_strides, rows), out_strides, rows, out, VALUE_DIM, BLOCK_DV)
    tl.store(lse_ptr + (row * num_heads + heads) * place.seqlen_q + tokens, lse, mask=mask)


@triton.jit
def load_for_gradients(
    pointers,
    strides,
    rows,
    index_heads,
    place,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """What rows have for the gradient of q: q, dout, delta by the rounded output; their places in a `[B, HQ, T]`, the
    log-sum-exp, the same in bits, 0 for that of nothing, and its gradient, 0 where there is none.

    pointers, strides: of q, out, dout and dlse, which may be None; the last pointer is that of lse.
    """
    q_ptr, out_ptr, dout_ptr, dlse_ptr, lse_ptr = pointers
    q_strides, out_strides, dout_strides, dlse_strides = strides
    row, tokens, heads, mask = rows
    q_ptr = _open_rows(q_ptr, q_strides, rows)
    out_ptr = _open_rows(out_ptr, out_strides, rows)
    dout_ptr = _open_rows(dout_ptr, dout_strides, rows)
    q = _load_of_rows(q_ptr, q_strides, rows, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = _load_of_rows(dout_ptr, dout_strides, rows, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    out = _load_of_rows(out_ptr, out_strides, rows, VALUE_DIM, BLOCK_DV)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    places = (row * index_heads * GROUP + heads) * place.seqlen_q + tokens
    lse = tl.load(lse_ptr + places, mask=mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    dlse = tl.zeros([heads.shape[0]], tl.float32)
    if dlse_ptr is not None:
        if len(tokens.shape) == 0:
            dlse_ptr += row * dlse_strides[0] + tokens * dlse_strides[2]
            offsets = heads * dlse_strides[1]
        else:
            offsets = row * dlse_strides[0] + heads * dlse_strides[1] + tokens * dlse_strides[2]
        dlse = tl.load(dlse_ptr + offsets, mask=mask, other=0.0)
        # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
        dlse = tl.where(lse == float('-inf'), 0.0, dlse)
    return q, dout, delta, places, lse, lse_log2, dlse


@triton.jit
def store_gradients(
    dq_ptr,
    delta_ptr,
    gate_ptr,
    dq_strides,
    gate_strides,
    rows,
    places,
    sums,
    delta,
    lse,
    dlse,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Stores the gradient of q, times the gate if there is one, and delta less the gradient of the log-sum-exp. sums:
    dq and the mean of the keys, and by how much delta, with which dq was added up, is off.
    """
    dq, mean_k, missing = sums
    row, tokens, heads, mask = rows
    dq = (dq - missing[:, None] * mean_k) * scale
    if gate_ptr is not None:
        gate_ptr += row * gate_strides[0] + tokens * gate_strides[1]
        gate = tl.load(gate_ptr + heads * gate_strides[2], mask=mask, other=0.0).to(tl.float32)
        dq *= tl.where(lse == float('-inf'), 0.0, gate)[:, None]  # of a row that reads nothing it may be anything
    dq_ptr = _open_rows(dq_ptr, dq_strides, rows)
    _store_of_rows(dq_ptr, dq_strides, rows, dq, HEAD_DIM, BLOCK_D)
    tl.store(delta_ptr + places, delta + missing - dlse, mask=mask)


@triton.jit
def _open_rows(ptr, strides, rows):
    """Where the row of the batch begins in a `[B, T, HQ, D]`; with one token, where that begins."""
    row, tokens, _, _ = rows
    if len(tokens.shape) == 0:
        ptr += row * strides[0] + tokens * strides[1]
    else:
        ptr += row * strides[0]
    return ptr


@triton.jit
def _load_of_rows(ptr, strides, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As `load_rows`; ptr: from `_open_rows`."""
    _, tokens, heads, mask = rows
    if len(tokens.shape) == 0:
        tile = load_rows(ptr, heads, strides[2], mask, SIZE, BLOCK)
    else:
        tile = load_rows(ptr, tokens * strides[1] + heads * strides[2], 1, mask, SIZE, BLOCK)
    return tile


@triton.jit
def _store_of_rows(ptr, strides, rows, values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As `store_rows`; ptr: from `_open_rows`."""
    _, tokens, heads, mask = rows
    if len(tokens.shape) == 0:
        store_rows(ptr, heads, strides[2], values, mask, SIZE, BLOCK)
    else:
        store_rows(ptr, tokens * strides[1] + heads * strides[2], 1, values, mask, SIZE, BLOCK)
