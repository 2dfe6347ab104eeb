"""What `Modifiers` do to a tile of logits and weights, in every kernel of interval attention."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._modifiers import Modifiers
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope


class Marks(NamedTuple):
    """Modifiers as one argument of a kernel: what is None is not compiled.

    sinks: `[HQ]`. bias_strides, mask_strides: of `[B, HQ, T, S]`, 0 where it is broadcast. segment_strides: of
    `[B, T]`, then of `[B, S]`. A weight is dropped where its random number is below `threshold`, and those that are
    kept are multiplied by `keep_factor`. first_row: which row of these tensors the first row of the others stands for.
    """

    softcap: float | None
    sinks: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    segment_strides: tuple[int, ...] | None
    bias: Tensor | None
    bias_strides: tuple[int, ...] | None
    attn_mask: Tensor | None
    mask_strides: tuple[int, ...] | None
    seed: Tensor | None
    threshold: int | None
    keep_factor: float | None
    first_row: int | None

    @property
    def change_logits(self) -> bool:
        """Whether kernels have logits in their own units, and not as products that lack a factor."""
        return self.softcap is not None or self.bias is not None


def make_marks(modifiers: Modifiers, batch: int, heads: int) -> Marks:
    softcap, sinks, query_segments, key_segments, bias, attn_mask, dropout_p, seed = modifiers
    drops = dropout_p > 0
    has_rows = drops or any(t is not None for t in (query_segments, bias, attn_mask))
    segment_strides = None
    if query_segments is not None and key_segments is not None:
        segment_strides = (*query_segments.stride(), *key_segments.stride())
    return Marks(
        softcap,
        None if sinks is None else sinks.contiguous(),
        query_segments,
        key_segments,
        segment_strides,
        bias,
        _strides(bias, batch, heads),
        attn_mask,
        _strides(attn_mask, batch, heads),
        seed if drops else None,
        round(dropout_p * 2**32) if drops else None,
        1 / (1 - dropout_p) if drops else None,
        0 if has_rows else None,
    )


def _strides(tensor: Tensor | None, batch: int, heads: int) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.expand(batch, heads, -1, -1).stride()


@triton.jit
def first_sums(marks, heads, BLOCK_M: tl.constexpr):
    """The running maximum, in bits, and the sum of a softmax of `[BLOCK_M]` heads that has met its sink alone."""
    if marks.sinks is None:
        row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max = tl.load(marks.sinks + heads) * 1.4426950408889634
        total = tl.where(row_max == float('-inf'), 0.0, 1.0)
    return row_max, total


@triton.jit
def row_of_marks(marks, row):
    return row if marks.first_row is None else row + marks.first_row


@triton.jit
def place_tile(rows, key_start, start, last, BLOCK: tl.constexpr):
    """Where the elements of a tile `[rows, BLOCK]` of keys from `start` on stand, as `mark_logits` and `is_kept` take
    it. rows: the row of the batch, and of each row of the tile head, query and whether there is one.
    """
    row, heads, queries, mask = rows
    keys = start + tl.arange(0, BLOCK)
    return row, heads[:, None], queries[:, None], (key_start + keys)[None, :], mask[:, None], (keys < last)[None, :]


@triton.jit
def mark_logits(products, scale, marks, place):
    """Products of queries and keys as logits: in bits, where soft caps or a bias change them, else as they are.

    place: row of the batch, heads, queries and keys as indices of the tensors, which of the queries and which of the
    keys exist; two-dimensional, to be broadcast, but for numbers. Returns the logits, the derivative of the soft cap,
    and what segments, masks and a bias above -inf allow to be read.
    """
    row, _, queries, keys, has_query, has_key = place
    slope = 1.0
    allowed = tl.full([1, 1], 1, tl.int1)
    if marks.softcap is not None:
        products = cap_logits(products * scale, marks.softcap)
        slope = cap_slope(products, marks.softcap)
    if marks.bias is not None:
        bias = tl.load(_point(marks.bias, marks.bias_strides, place), mask=has_query & has_key, other=0.0).to(
            tl.float32
        )
        products = (products if marks.softcap is not None else products * scale) + bias
        allowed = allowed & (bias != float('-inf'))
    if marks.softcap is not None or marks.bias is not None:
        products = products * 1.4426950408889634
    if marks.attn_mask is not None:
        allowed = allowed & tl.load(
            _point(marks.attn_mask, marks.mask_strides, place), mask=has_query & has_key, other=0
        )
    if marks.query_segments is not None:
        strides = marks.segment_strides
        query_ptr = marks.query_segments + row * strides[0] + queries.to(tl.int64) * strides[1]
        key_ptr = marks.key_segments + row * strides[2] + keys.to(tl.int64) * strides[3]
        segments = tl.load(query_ptr, mask=has_query, other=-1)
        allowed = allowed & (segments >= 0) & (segments == tl.load(key_ptr, mask=has_key, other=-1))
    return products, slope, allowed


@triton.jit
def find_exponents(products, lse_log2, scale, marks, place):
    """Of the weights, before any is dropped: exp2 of these. With what `mark_logits` returns besides the logits."""
    if marks.softcap is not None or marks.bias is not None:
        logits, slope, allowed = mark_logits(products, scale, marks, place)
        exponents = logits - lse_log2
    else:
        exponents = tl.fma(products, scale * 1.4426950408889634, -lse_log2)
        _, slope, allowed = mark_logits(products, scale, marks, place)
    return exponents, slope, allowed


@triton.jit
def is_kept(marks, place):
    """Which weights of a tile are not dropped: those of a random number of their own, whatever the tile."""
    row, heads, queries, keys, _, _ = place
    numbers, _, _, _ = tl.philox(tl.load(marks.seed), keys, queries, heads.to(tl.int32), row.to(tl.int32))
    return numbers >= marks.threshold


@triton.jit
def _point(ptr, strides, place):
    row, heads, queries, keys, _, _ = place
    rows = ptr + row * strides[0] + heads * strides[1] + queries.to(tl.int64) * strides[2]
    return rows + keys.to(tl.int64) * strides[3]
