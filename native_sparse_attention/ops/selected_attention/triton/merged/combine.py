"""Kernels that combine the outputs of disjoint sets of keys into one softmax, and take its gradient apart again.

A row is one head of one token; a program has BLOCK_M of them. Outputs `[B, T, HQ, DV]` and log-sum-exps `[B, HQ, T]`
are contiguous.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    out_window_ptr,
    out_selected_ptr,
    lse_window_ptr,
    lse_selected_ptr,
    out_ptr,
    lse_ptr,
    difference_ptr,
    unit_ptr,
    num_rows,
    seqlen,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Combine the float32 outputs of window and selected part. difference: their difference in units of the largest
    element of a row, or None; unit: `[B, HQ, T]`.
    """
    _, _, lse_rows, tile, row_mask, mask = _locate_rows(num_rows, seqlen, heads, VALUE_DIM, BLOCK_M, BLOCK_DV)
    lse_window = tl.load(lse_window_ptr + lse_rows, mask=row_mask, other=float('-inf'))
    lse_selected = tl.load(lse_selected_ptr + lse_rows, mask=row_mask, other=float('-inf'))
    largest = tl.maximum(lse_window, lse_selected, propagate_nan=tl.PropagateNan.ALL)
    reference = tl.where(largest == float('-inf'), 0.0, largest)
    window, selected = tl.exp(lse_window - reference), tl.exp(lse_selected - reference)
    total = tl.where(largest == float('-inf'), 1.0, window + selected)
    out_window = tl.load(out_window_ptr + tile, mask=mask, other=0.0)
    out_selected = tl.load(out_selected_ptr + tile, mask=mask, other=0.0)
    out = (window[:, None] * out_window + selected[:, None] * out_selected) / total[:, None]
    tl.store(out_ptr + tile, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(largest == float('-inf'), float('-inf'), reference + tl.log(total))
    tl.store(lse_ptr + lse_rows, lse, mask=row_mask)
    if difference_ptr is not None:
        difference = out_window - out_selected
        unit = tl.maximum(tl.max(tl.abs(difference), 1), 1e-30)
        tl.store(difference_ptr + tile, (difference / unit[:, None]).to(difference_ptr.dtype.element_ty), mask=mask)
        tl.store(unit_ptr + lse_rows, unit, mask=row_mask)


@triton.jit
def split_kernel(
    out_ptr,
    difference_ptr,
    unit_ptr,
    dout_ptr,
    lse_window_ptr,
    lse_selected_ptr,
    lse_ptr,
    dlse_ptr,
    out_window_ptr,
    out_selected_ptr,
    weight_window_ptr,
    weight_selected_ptr,
    dlse_window_ptr,
    dlse_selected_ptr,
    dout_strides,
    dlse_strides,
    num_rows,
    seqlen,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Compute the outputs of both parts, their weights `[B, T, HQ]` in the combination, and the gradients of their
    log-sum-exps before these weights.

    The gradient of a logit is p * (dp - delta) with p and delta of the combination; a part computes w * p' * (dp -
    delta' + dlse') with its own p' and delta', where w * p' = p. So dlse' is delta' - delta. dout: `[B, T, HQ, DV]`,
    dlse: `[B, HQ, T]` or None, of any strides.
    """
    tokens, head, lse_rows, tile, row_mask, mask = _locate_rows(num_rows, seqlen, heads, VALUE_DIM, BLOCK_M, BLOCK_DV)
    row, query = tokens // seqlen, tokens % seqlen
    lse = tl.load(lse_ptr + lse_rows, mask=row_mask, other=0.0)
    lse_window = tl.load(lse_window_ptr + lse_rows, mask=row_mask, other=0.0)
    lse_selected = tl.load(lse_selected_ptr + lse_rows, mask=row_mask, other=0.0)
    # The weight of a part that reads nothing is 0; its kernels may receive any weight.
    window = tl.where(lse_window == float('-inf'), 0.0, tl.exp(lse_window - lse))
    selected = tl.where(lse_selected == float('-inf'), 0.0, tl.exp(lse_selected - lse))
    columns = tl.arange(0, BLOCK_DV)
    out = tl.load(out_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    unit = tl.load(unit_ptr + lse_rows, mask=row_mask, other=0.0)
    difference = tl.load(difference_ptr + tile, mask=mask, other=0.0).to(tl.float32) * unit[:, None]
    dout_rows = row * dout_strides[0] + query * dout_strides[1] + head * dout_strides[2]
    dout = tl.load(dout_ptr + dout_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    # A part that reads nothing has the output 0, so the difference is no gradient of the other one.
    both = (window != 0) & (selected != 0)
    change = tl.where(both, tl.sum(dout * difference, 1), 0.0)
    out_window = tl.where(both[:, None], out + selected[:, None] * difference, out)
    out_selected = tl.where(both[:, None], out - window[:, None] * difference, out)
    tl.store(out_window_ptr + tile, out_window.to(out_window_ptr.dtype.element_ty), mask=mask)
    tl.store(out_selected_ptr + tile, out_selected.to(out_selected_ptr.dtype.element_ty), mask=mask)
    rows = tokens * heads + head
    tl.store(weight_window_ptr + rows, tl.where(lse_window == float('-inf'), 1.0, window), mask=row_mask)
    tl.store(weight_selected_ptr + rows, tl.where(lse_selected == float('-inf'), 1.0, selected), mask=row_mask)
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        places = row * dlse_strides[0] + head * dlse_strides[1] + query * dlse_strides[2]
        dlse = tl.load(dlse_ptr + places, mask=row_mask, other=0.0)
    tl.store(dlse_window_ptr + lse_rows, dlse + selected * change, mask=row_mask)
    tl.store(dlse_selected_ptr + lse_rows, dlse - window * change, mask=row_mask)


@triton.jit
def _locate_rows(num_rows, seqlen, heads, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return token and head of the rows of this program, their offsets in a `[B, HQ, T]` and in a `[B, T, HQ, DV]`, and
    the masks of both, all int64.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    tokens, head = rows // heads, rows % heads
    lse_rows = (tokens // seqlen * heads + head) * seqlen + tokens % seqlen
    columns = tl.arange(0, BLOCK_DV)
    tile = rows[:, None] * VALUE_DIM + columns[None, :]
    return tokens, head, lse_rows, tile, row_mask, row_mask[:, None] & (columns < VALUE_DIM)[None, :]
