"""Shared parts of the `chosen_scores` kernels: the compressed blocks that overlap a selected one, and products of
float32 with half types.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import count_readable_blocks
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.varlen import count_blocks, find_tile, floor_divide, load_extent, load_num_keys
from native_sparse_attention.ops._triton.varlen import load_position as load_first_position


class Sizes(NamedTuple):
    """block_size, stride: l, d. num_compressed: C. num_init, num_local, num_recent: of forced blocks, whose scores have
    no gradient.
    """

    block_size: int
    stride: int
    num_compressed: int
    num_init: int = 0
    num_local: int = 0
    num_recent: int = 0


class Meta(NamedTuple):
    """Sizes of the problem, a compile-time constant.

    The `group` heads of an index head share its row; a KV head has `repeats` index heads. A selection block overlaps
    the compressed blocks at the offsets first_offset ... per_selection - 1.
    """

    causal: bool
    group: int
    repeats: int
    num_selected: int
    selection_block: int
    per_selection: int
    first_offset: int
    head_dim: int


@triton.jit
def locate_query(index, layout, sizes):
    """Locate query `index`. Returns row, token, whether it exists, its position, the tokens of its sequence, and the
    sequence's first compressed block and number of compressed blocks, which stay within C.
    """
    sequence, first_query = find_tile(index, layout.cu_seqlens, layout.seqlen_q, layout.num_sequences, 1)
    row, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
    num_tokens = load_num_keys(layout, sequence)
    position = load_first_position(layout, sequence, num_queries, num_tokens) + first_query
    key_start, num_keys = locate_compressed(layout, sequence, num_tokens, sizes)
    is_query = (first_query >= 0) & (first_query < num_queries)
    return row, query_start + first_query, is_query, position, num_tokens, key_start, num_keys


@triton.jit
def locate_compressed(layout, sequence, num_tokens, sizes):
    """Return the first compressed block and the number of compressed blocks of a sequence of num_tokens tokens."""
    _, key_start, num_keys = load_extent(layout.cu_blocks, sequence, sizes.num_compressed, layout.num_sequences)
    return key_start, tl.minimum(num_keys, count_blocks(num_tokens, sizes.block_size, sizes.stride))


@triton.jit
def share_of(offsets, sizes, meta: tl.constexpr):
    """Return the part of compressed block j * l' / d + offset that lies in selection block j, for
    overlapping offsets.
    """
    start = offsets * sizes.stride
    shared = tl.minimum(start + sizes.block_size, meta.selection_block) - tl.maximum(start, 0)
    return shared.to(tl.float32) / sizes.block_size


@triton.jit
def is_forced(blocks, positions, sizes, meta: tl.constexpr):
    """Return whether blocks are forced for queries at positions (`geometry.forced_priority` above 0)."""
    own_block = floor_divide(positions - sizes.num_recent, meta.selection_block)
    is_local = blocks > own_block - sizes.num_local
    is_local = is_local & (blocks <= own_block if meta.causal else blocks < own_block + sizes.num_local)
    return (blocks < sizes.num_init) | is_local


@triton.jit
def overlapping_columns(indices_ptr, slots, offsets, position, num_tokens, num_keys, sizes, meta: tl.constexpr):
    """Return the selected blocks in `slots` of a query's index row, the compressed blocks at `offsets` of them (0 where
    not visible), and a mask of the visible ones.
    """
    blocks = tl.load(indices_ptr + slots, mask=slots < meta.num_selected, other=-1)
    exists = (blocks >= 0) & (blocks < count_readable_blocks(position, num_tokens, meta.selection_block, meta.causal))
    blocks = tl.where(exists, blocks, 0).to(tl.int32)
    keys = blocks * meta.per_selection + offsets
    seen = exists & (offsets < meta.per_selection) & (keys >= 0) & (keys < num_keys)
    if meta.causal:
        seen = seen & (keys * sizes.stride + sizes.block_size - 1 <= position)
    return blocks, tl.where(seen, keys, 0), seen


@triton.jit
def weigh(products, lse, scale, softcap):
    """Return the attention weights of products of queries and keys; softcap: a number or None."""
    minus_lse = lse * -1.4426950408889634
    if softcap is None:
        exponent = tl.fma(products, scale * 1.4426950408889634, minus_lse)
    else:
        exponent = tl.fma(cap_logits(products * scale, softcap), 1.4426950408889634, minus_lse)
    return tl.exp2(exponent)


@triton.jit
def before_cap(dlogits, products, seen, scale, softcap):
    """Return logit gradients before the soft cap from those after it, which are 0 where nothing is visible."""
    if softcap is not None:
        dlogits = tl.where(seen, dlogits * cap_slope(products * scale, softcap), 0.0)
    return dlogits
