"""Arguments of the kernels of `block_divergence`, and what forward and backward kernels share."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.varlen import count_blocks

LOG2_E = tl.constexpr(1.4426950408889634)
# Larger than the index of any key.
NO_KEY = tl.constexpr(2**31 - 1)


class DrawnQueries(NamedTuple):
    """int64 `[B, R]`, contiguous. token: the query along T. position, key_len: as in `QueryLayout`. first_compressed,
    num_compressed: compressed blocks of its sequence, along C.
    """

    token: Tensor
    position: Tensor
    key_len: Tensor
    first_compressed: Tensor
    num_compressed: Tensor


class Sizes(NamedTuple):
    """num_queries, num_compressed, num_blocks: R, C and blocks of a row. first_query, stop_query: the queries of this
    launch. left, right: of the window, -1 for unbounded; None without a window.
    """

    num_queries: int
    num_compressed: int
    num_blocks: int
    first_query: int
    stop_query: int
    left: int | None
    right: int | None


class Meta(NamedTuple):
    """Sizes of the problem, a compile-time constant.

    size, stride: l and d of compressed blocks. selection_size: l'. per_selection: l' / d. first_offset: selection block
    j shares tokens with the compressed blocks j * per_selection + o for the offsets first_offset <= o < per_selection.
    reach: selection blocks before j in which such compressed blocks begin. group: query heads of a KV head, or in
    `divergence_kernel` of an index head. int64_offsets: offsets into compressed keys need them.
    """

    size: int
    stride: int
    selection_size: int
    per_selection: int
    first_offset: int
    reach: int
    causal: bool
    group: int
    head_dim: int
    int64_offsets: bool


@triton.jit
def load_extents(drawn, places, mask, sizes, meta: tl.constexpr):
    """Return int32 for the queries at `places` of `[B, R]`: the first compressed key of the sequence, the number of
    visible ones, and near, beyond, end: the candidates are the blocks [0, near) and [beyond, end).

    A query with fewer than two candidates has no effect on the loss: it sees no key and has no candidates.
    """
    position = tl.load(drawn.position + places, mask=mask, other=0)
    num_seen = tl.load(drawn.key_len + places, mask=mask, other=0)
    first = tl.load(drawn.first_compressed + places, mask=mask, other=0)
    first = tl.minimum(tl.maximum(first, 0), sizes.num_compressed)
    visible = tl.load(drawn.num_compressed + places, mask=mask, other=0)
    visible = tl.minimum(visible, sizes.num_compressed - first)
    num_seen = tl.where(position < num_seen, num_seen, 0)  # queries behind the keys are padding
    if meta.causal:
        num_seen = tl.minimum(num_seen, position + 1)
        visible = tl.minimum(visible, count_blocks(position + 1, meta.size, meta.stride))
    num_seen, visible = tl.maximum(num_seen, 0), tl.maximum(visible, 0)
    # Blocks below this one share tokens with a visible compressed block.
    limit = tl.where(visible > 0, (visible - 1 - meta.first_offset) // meta.per_selection + 1, 0)
    before = num_seen  # keys before the window, and the first one behind it
    behind = num_seen
    if sizes.left is not None:
        before = tl.where(sizes.left < 0, 0, tl.minimum(tl.maximum(position - sizes.left, 0), num_seen))
        behind = tl.where(sizes.right < 0, num_seen, tl.minimum(tl.maximum(position + sizes.right + 1, 0), num_seen))
    near = tl.minimum(tl.cdiv(before, meta.selection_size), limit)
    end = tl.where(behind < num_seen, tl.cdiv(num_seen, meta.selection_size), 0)
    end = tl.minimum(end, limit)
    beyond = tl.maximum(behind // meta.selection_size, near)
    counts = near + tl.maximum(end - beyond, 0) > 1
    near, end, visible = tl.where(counts, near, 0), tl.where(counts, end, 0), tl.where(counts, visible, 0)
    return first.to(tl.int32), visible.to(tl.int32), near.to(tl.int32), beyond.to(tl.int32), end.to(tl.int32)


@triton.jit
def locate_rows(tile, drawn, batch_row, kv_head, sizes, meta: tl.constexpr, BLOCK_M: tl.constexpr):
    """Locate a tile of BLOCK_M rows: queries with the heads of a KV head.

    Returns for each row its place in `[B, R]`, token, head, whether it is one of the launch, the first compressed key
    of its sequence, and the number of visible ones.
    """
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries, heads = sizes.first_query + index // meta.group, kv_head * meta.group + index % meta.group
    is_query = queries < sizes.stop_query
    places = batch_row * sizes.num_queries + queries
    first, visible, _, _, _ = load_extents(drawn, places, is_query, sizes, meta)
    tokens = tl.load(drawn.token + places, mask=is_query, other=0)
    return places, tokens, heads, is_query, first, visible


@triton.jit
def share_of(offset, meta: tl.constexpr):
    """Return the tokens, over d, that selection block j shares with compressed block j * l' / d + offset; not above 0
    where they share none.
    """
    start = offset * meta.stride
    shared = tl.minimum(start + meta.size, meta.selection_size) - tl.maximum(start, 0)
    return shared.to(tl.float32) / meta.stride
