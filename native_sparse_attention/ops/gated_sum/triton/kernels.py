"""Kernels of the gated sum. A row is the vector of one head of one token; a program has BLOCK_M rows.

The kernels are bound by memory bandwidth, so every tensor is accessed with its own strides.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    gates_ptr,
    compressed_ptr,
    selected_ptr,
    window_ptr,
    out_ptr,
    gates_strides,
    compressed_strides,
    selected_strides,
    window_strides,
    out_strides,
    num_rows,
    seqlen,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """gates: `[B, T, HQ, 3]`; branches and out: `[B, T, HQ, DV]`."""
    # Counted in the type of num_rows: division is much faster in int32, where that is enough.
    rows = (num_rows * 0 + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows >= 0) & (rows < num_rows)
    columns = tl.arange(0, BLOCK_DV)
    mask = row_mask[:, None] & (columns < VALUE_DIM)[None, :]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    gates_ptr += _row_offsets(gates_strides, rows, seqlen, heads)
    branch = tl.load(_tile(compressed_ptr, compressed_strides, rows, seqlen, heads, columns), mask=mask, other=0.0)
    out += _load_gate(gates_ptr, row_mask)[:, None] * branch.to(tl.float32)
    branch = tl.load(_tile(selected_ptr, selected_strides, rows, seqlen, heads, columns), mask=mask, other=0.0)
    out += _load_gate(gates_ptr + gates_strides[3], row_mask)[:, None] * branch.to(tl.float32)
    branch = tl.load(_tile(window_ptr, window_strides, rows, seqlen, heads, columns), mask=mask, other=0.0)
    out += _load_gate(gates_ptr + 2 * gates_strides[3], row_mask)[:, None] * branch.to(tl.float32)
    pointers = _tile(out_ptr, out_strides, rows, seqlen, heads, columns)
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dout_ptr,
    gates_ptr,
    compressed_ptr,
    selected_ptr,
    window_ptr,
    dgates_ptr,
    dcompressed_ptr,
    dselected_ptr,
    dwindow_ptr,
    dout_strides,
    gates_strides,
    compressed_strides,
    selected_strides,
    window_strides,
    dgates_strides,
    dbranch_strides,
    num_rows,
    seqlen,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Shapes as in the forward kernel. A gradient that is not needed is None; gradients of branches share their
    strides.
    """
    # Counted in the type of num_rows: division is much faster in int32, where that is enough.
    rows = (num_rows * 0 + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows >= 0) & (rows < num_rows)
    columns = tl.arange(0, BLOCK_DV)
    mask = row_mask[:, None] & (columns < VALUE_DIM)[None, :]
    dout = tl.load(_tile(dout_ptr, dout_strides, rows, seqlen, heads, columns), mask=mask, other=0.0).to(tl.float32)
    gates_ptr += _row_offsets(gates_strides, rows, seqlen, heads)
    if dgates_ptr is not None:
        dgates_ptr += _row_offsets(dgates_strides, rows, seqlen, heads)
        _store_dgate(dgates_ptr, compressed_ptr, compressed_strides, dout, rows, seqlen, heads, columns, row_mask, mask)
        dgates_ptr += dgates_strides[3]
        _store_dgate(dgates_ptr, selected_ptr, selected_strides, dout, rows, seqlen, heads, columns, row_mask, mask)
        dgates_ptr += dgates_strides[3]
        _store_dgate(dgates_ptr, window_ptr, window_strides, dout, rows, seqlen, heads, columns, row_mask, mask)
    if dcompressed_ptr is not None:
        dbranch = _load_gate(gates_ptr, row_mask)[:, None] * dout
        pointers = _tile(dcompressed_ptr, dbranch_strides, rows, seqlen, heads, columns)
        tl.store(pointers, dbranch.to(dcompressed_ptr.dtype.element_ty), mask=mask)
    if dselected_ptr is not None:
        dbranch = _load_gate(gates_ptr + gates_strides[3], row_mask)[:, None] * dout
        pointers = _tile(dselected_ptr, dbranch_strides, rows, seqlen, heads, columns)
        tl.store(pointers, dbranch.to(dselected_ptr.dtype.element_ty), mask=mask)
    if dwindow_ptr is not None:
        dbranch = _load_gate(gates_ptr + 2 * gates_strides[3], row_mask)[:, None] * dout
        pointers = _tile(dwindow_ptr, dbranch_strides, rows, seqlen, heads, columns)
        tl.store(pointers, dbranch.to(dwindow_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_dgate(dgate_ptr, branch_ptr, branch_strides, dout, rows, seqlen, heads, columns, row_mask, mask):
    """Store the sum of dout * branch over the head's vector, one value per row."""
    branch = tl.load(_tile(branch_ptr, branch_strides, rows, seqlen, heads, columns), mask=mask, other=0.0)
    dgate = tl.sum(dout * branch.to(tl.float32), 1)  # [BLOCK_M]
    tl.store(dgate_ptr, dgate.to(dgate_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _row_offsets(strides, rows, seqlen, heads):
    """Return the offsets of rows, counted through `[B, T, HQ]`."""
    tokens = rows // heads
    offsets = (tokens // seqlen).to(tl.int64) * strides[0] + (tokens % seqlen).to(tl.int64) * strides[1]
    return offsets + (rows % heads).to(tl.int64) * strides[2]


@triton.jit
def _tile(ptr, strides, rows, seqlen, heads, columns):
    """Return pointers `[BLOCK_M, BLOCK_DV]`."""
    return (ptr + _row_offsets(strides, rows, seqlen, heads))[:, None] + columns.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _load_gate(gate_ptr, row_mask):
    return tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)
