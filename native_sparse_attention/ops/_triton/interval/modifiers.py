"""`Modifiers` applied to a tile of logits and weights, in every kernel of interval attention."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.core.random import threshold
from native_sparse_attention.ops._triton.interval import settings
from native_sparse_attention.ops._triton.launch import Settings, settings_of
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.varlen import last_dim_contiguous


class KernelModifiers(NamedTuple):
    """Modifiers as one kernel argument; code for a None is not compiled.

    sinks: `[HQ]`. query_segments, key_segments: `[B, T]` and `[B, S]`, contiguous, of num_queries and num_keys. bias,
    attn_mask: `[B or 1, HQ or 1, T, S]`, last dimension contiguous; bias_row, bias_head, bias_query and so on are their
    strides, 0 where broadcast. A weight is dropped if its random number is below `threshold`; kept weights are
    multiplied by keep_factor. first_row: the first batch row of a launch for some rows.
    """

    softcap: float | None
    sinks: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    num_queries: int | None
    num_keys: int | None
    bias: Tensor | None
    bias_row: int | None
    bias_head: int | None
    bias_query: int | None
    attn_mask: Tensor | None
    mask_row: int | None
    mask_head: int | None
    mask_query: int | None
    seed: Tensor | None
    threshold: int | None
    keep_factor: float | None
    first_row: int | None

    @property
    def change_logits(self) -> bool:
        """Whether kernels hold logits in their own units, instead of products without the scale."""
        return self.softcap is not None or self.bias is not None


def make_kernel_modifiers(modifiers: Modifiers, batch: int, heads: int) -> KernelModifiers:
    softcap, sinks, query_segments, key_segments, bias, attn_mask, dropout_p, seed = modifiers
    sinks, query_segments, key_segments = (
        t if t is None else t.contiguous() for t in (sinks, query_segments, key_segments)
    )
    bias, attn_mask = last_dim_contiguous(bias, attn_mask)
    drops = dropout_p > 0
    has_rows = drops or any(t is not None for t in (query_segments, bias, attn_mask))
    bias_strides, mask_strides = (_broadcast_strides(t, batch, heads) for t in (bias, attn_mask))
    return KernelModifiers(
        None if softcap is None else float(softcap),
        sinks,
        query_segments,
        key_segments,
        None if query_segments is None else query_segments.shape[1],
        None if key_segments is None else key_segments.shape[1],
        bias,
        *bias_strides,
        attn_mask,
        *mask_strides,
        seed if drops else None,
        threshold(dropout_p) if drops else None,
        1 / (1 - dropout_p) if drops else None,
        0 if has_rows else None,
    )


def settings_of_forward(q: Tensor, v: Tensor, modifiers: KernelModifiers) -> Settings:
    """Return the launch settings: from FORWARD_MODIFIED with a soft cap, segments, tables or dropout (`first_row` is
    set for the last three), with smaller tiles where a table entry or random number per weight takes registers.
    """
    if modifiers.softcap is None and modifiers.first_row is None:
        return settings_of(settings.FORWARD, q, v)
    tile = settings_of(settings.FORWARD_MODIFIED, q, v)
    if modifiers.bias is None and modifiers.attn_mask is None and modifiers.seed is None:
        return tile
    return tile._replace(block_m=min(tile.block_m, 64), block_n=min(tile.block_n, 32))


def _broadcast_strides(table: Tensor | None, batch: int, heads: int) -> tuple[int | None, int | None, int | None]:
    if table is None:
        return None, None, None
    row, head, query, _ = table.expand(batch, heads, -1, -1).stride()
    return row, head, query


@triton.jit
def first_sums(modifiers, heads, BLOCK_M: tl.constexpr):
    """Return the running maximum (base 2) and the sum of a softmax over the sink alone, for `[BLOCK_M]` heads."""
    if modifiers.sinks is None:
        row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max = tl.load(modifiers.sinks + heads) * 1.4426950408889634
        total = tl.where(row_max == float('-inf'), 0.0, 1.0)
    return row_max, total


@triton.jit
def row_of_modifiers(modifiers, row):
    return row if modifiers.first_row is None else row + modifiers.first_row


@triton.jit
def tile_coordinates(rows, key_start, start, last, BLOCK: tl.constexpr):
    """Return the coordinates of a tile `[rows, BLOCK]` of keys from `start` on, for `modify_logits` and `is_kept`.

    rows: the batch row and, per row of the tile, head, query and a mask.
    """
    row, heads, queries, mask = rows
    keys = start + tl.arange(0, BLOCK)
    return row, heads[:, None], queries[:, None], (key_start + keys)[None, :], mask[:, None], (keys < last)[None, :]


@triton.jit
def modify_logits(products, scale, modifiers, coordinates):
    """Return logits from products of queries and keys: in base 2 if a soft cap or bias changes them, else the products
    as they are.

    coordinates: batch row, heads, queries and keys as indices of the tensors, and masks of queries and keys; scalars or
    two-dimensional and broadcastable. Also returns the derivative of the soft cap, and where segments, masks and a bias
    above -inf allow a read.
    """
    row, _, queries, keys, has_query, has_key = coordinates
    slope = 1.0
    allowed = tl.full([1, 1], 1, tl.int1)
    if modifiers.softcap is not None:
        logits = products * scale
        slope = cap_slope(logits, modifiers.softcap)
        products = cap_logits(logits, modifiers.softcap)
    if modifiers.bias is not None:
        bias_ptr = _point(modifiers.bias, modifiers.bias_row, modifiers.bias_head, modifiers.bias_query, coordinates)
        bias = tl.load(bias_ptr, mask=has_query & has_key, other=0.0).to(tl.float32)
        allowed = allowed & (bias != float('-inf'))
        # The lowest float32, which is read, must not become -inf in base 2.
        bias = tl.maximum(bias, -2e38, propagate_nan=tl.PropagateNan.ALL)
        products = (products if modifiers.softcap is not None else products * scale) + bias
    if modifiers.softcap is not None or modifiers.bias is not None:
        products = products * 1.4426950408889634
    if modifiers.attn_mask is not None:
        mask_ptr = _point(
            modifiers.attn_mask, modifiers.mask_row, modifiers.mask_head, modifiers.mask_query, coordinates
        )
        allowed = allowed & tl.load(mask_ptr, mask=has_query & has_key, other=0)
    if modifiers.query_segments is not None:
        segments = tl.load(modifiers.query_segments + row * modifiers.num_queries + queries, mask=has_query, other=-1)
        of_keys = tl.load(modifiers.key_segments + row * modifiers.num_keys + keys, mask=has_key, other=-1)
        allowed = allowed & (segments >= 0) & (segments == of_keys)
    return products, slope, allowed


@triton.jit
def find_exponents(products, lse_log2, scale, modifiers, coordinates):
    """Return the base-2 exponents of the weights before dropout, and the other results of `modify_logits`."""
    if modifiers.softcap is not None or modifiers.bias is not None:
        logits, slope, allowed = modify_logits(products, scale, modifiers, coordinates)
        # If a bias makes all logits of a row large, so is a unit in their last place: clamp the exponents at 0.
        exponents = tl.minimum(logits - lse_log2, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        exponents = tl.fma(products, scale * 1.4426950408889634, -lse_log2)
        _, slope, allowed = modify_logits(products, scale, modifiers, coordinates)
    return exponents, slope, allowed


@triton.jit
def is_kept(modifiers, coordinates):
    """Return which weights of a tile dropout keeps; the random numbers do not depend on the tile."""
    row, heads, queries, keys, _, _ = coordinates
    numbers, _, _, _ = tl.philox(tl.load(modifiers.seed), keys, queries, heads.to(tl.int32), row.to(tl.int32))
    return numbers >= modifiers.threshold


@triton.jit
def _point(ptr, row_stride, head_stride, query_stride, coordinates):
    row, heads, queries, keys, _, _ = coordinates
    return ptr + row * row_stride + heads * head_stride + queries.to(tl.int64) * query_stride + keys
