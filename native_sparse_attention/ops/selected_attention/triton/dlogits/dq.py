"""Gradients of q from gradients of logits that dkv has left (dlogits.py): one product with k for each block.

What neighbours read together is never more than what they read one by one, so a program has a tile of them, whatever
they chose, and goes through the union of their blocks. Who may read what is in the gradients of the logits.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.finite import find_large, is_small
from native_sparse_attention.ops._triton.launch import describe_tiles, head_block, is_wide, launch, settings_of
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import SequenceLayout, load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.dkv.kernels import Gates
from native_sparse_attention.ops.selected_attention.triton.dkv.launch import differentiate_keys
from native_sparse_attention.ops.selected_attention.triton.dlogits.delta import find_delta
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import find_head, most_tokens
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import Lists
from native_sparse_attention.ops.selected_attention.triton.index.block_union import find_sharing, union_size
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import load_choices
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    find_slot,
    for_heads,
    load_entry,
    open_step,
)


class QueryGradients:
    """dq, which is filled while lists are gone through: `Members` of keys.py."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_indices: Tensor,
        place: SequenceLayout,
        block_size: int,
        causal: bool,
        scale: float,
    ) -> None:
        self.k, self.block_indices, self.place = k, block_indices, place
        self.block_size, self.causal, self.scale = block_size, causal, scale
        self.group = q.shape[2] // k.shape[2]
        self.most_tokens = most_tokens(q, k, block_indices, block_size)
        self.most_pairs = max(1, self.most_tokens // max(1, q.shape[1]))
        self.settings = settings_of(settings.DLOGITS_DQ, q)
        self.large = find_large(k, v)
        self.dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.dlogits = q.new_empty(0)

    def prepare(self, lists: Lists, pairs: range, tokens: range) -> None:
        """Room for the gradients of the logits of these pairs and tokens."""
        size = len(pairs) * lists.num_entries * self.group * self.block_size
        if self.dlogits.numel() < size:
            self.dlogits = self.dlogits.new_empty(size)

    def finish(self, lists: Lists, pairs: range, tokens: range) -> None:
        """dq of these pairs and tokens."""
        block_m, block_n, num_warps, num_stages = self.settings
        block_t = max(1, block_m // self.group)
        block_n = min(block_n, self.block_size)
        kv_heads, place, num_selected = self.k.shape[2], self.place, self.block_indices.shape[3]
        # The tiles of a row that may hold these tokens. Packed sequences are one row; each may begin a tile anew.
        first, num_tiles = tokens.start // block_t, -(-tokens.stop // block_t) - tokens.start // block_t
        tiles_of_row = -(-place.seqlen_q // block_t)
        if place.cu_seqlens is not None:
            num_tiles += place.num_sequences + 1
        first_row, last_row = pairs.start // kv_heads, (pairs.stop - 1) // kv_heads
        # Of rows that have several pairs here, unions of all heads are made.
        heads = range(self.block_indices.shape[2])
        if first_row == last_row:
            heads = range(pairs.start % kv_heads, pairs.start % kv_heads + len(pairs))
        tiles = range(first_row * tiles_of_row + first, last_row * tiles_of_row + first + num_tiles)
        sharing = find_sharing(
            *(self.block_indices[:, :, heads.start : heads.stop], place, self.block_size, self.causal, block_t, None),
            *(self.large, tiles),
        )
        k = self.k
        launch(
            dq_from_dlogits_kernel,
            (len(pairs) * num_tiles,),
            *(k, describe_tiles(k, block_n, head_block(k.shape[3])), self.block_indices, self.dlogits, self.dq),
            *(k.stride(), self.block_indices.stride(), self.dq.stride(), place, sharing, lists),
            *(tokens.stop, num_tiles, tiles_of_row, first, heads.start, len(heads), self.scale),
            GROUP=self.group,
            NUM_SELECTED=num_selected,
            BLOCK_SIZE=self.block_size,
            HEAD_DIM=k.shape[3],
            BLOCK_S=1 << (num_selected - 1).bit_length(),
            BLOCK_T=block_t,
            BLOCK_N=block_n,
            BLOCK_D=head_block(k.shape[3]),
            INT64_OFFSETS=is_wide(k),
            UNION=union_size(num_selected, block_t),
            num_warps=num_warps,
            num_stages=num_stages,
            device=k.device,
        )


def differentiate_by_dlogits(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and delta `[B, HQ, T]`. low: of the output, `split_low_bits`."""
    gates = None if gate is None else Gates(gate, lse)
    lse, delta = find_delta(out, low, dout, lse, dlse, gate)
    settled = (place, block_size, causal, scale)
    queries = QueryGradients(q, k, v, block_indices, *settled)
    settled = (*settled, softcap)
    dk, dv = differentiate_keys(q, k, v, block_indices, None, lse, delta, dout, *settled, queries, gates=gates)
    return queries.dq, dk, dv, delta


_COUNTS = ['last_token', 'num_tiles', 'tiles_of_row', 'first_tile', 'first_head', 'num_heads']


@triton.jit(do_not_specialize=_COUNTS)
def dq_from_dlogits_kernel(
    k_ptr,
    k_tiles,
    indices_ptr,
    dlogits_ptr,
    dq_ptr,
    k_strides,
    indices_strides,
    dq_strides,
    place,
    sharing,
    lists,
    last_token,
    num_tiles,
    tiles_of_row,
    first_tile,
    first_head,
    num_heads,
    scale,
    GROUP: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    UNION: tl.constexpr,
):
    """One program per pair and tile of BLOCK_T queries, of which those of other tokens than lists has
    are left out. num_tiles: of a row, from first_tile on. sharing: of kv heads from first_head on.
    """
    BLOCK_M: tl.constexpr = BLOCK_T * GROUP
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    pair = tl.program_id(0) // num_tiles
    kv_head = (lists.first_pair + pair) % lists.kv_heads
    tile = first_tile + tl.program_id(0) % num_tiles
    if place.cu_seqlens is None:
        tile += (lists.first_pair + pair) // lists.kv_heads * tiles_of_row
    sequence, row, query_start, first_query, num_queries, num_keys, _ = locate_queries(tile, place, BLOCK_T)
    members = first_query + tl.arange(0, BLOCK_T)
    tokens = query_start + members
    mask = (members < num_queries) & (tokens >= lists.first_token) & (tokens < last_token)
    if tl.max(mask.to(tl.int32), 0) == 0:
        return
    _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    row = row.to(tl.int64)
    indices_ptr += row * indices_strides[0] + kv_head.to(tl.int64) * indices_strides[2]
    choices = load_choices(indices_ptr, tokens.to(tl.int64) * indices_strides[1], mask, NUM_SELECTED, BLOCK_S)
    # The entry of a query's first index; of queries that are left out, none.
    entries = (tokens - lists.first_token) * NUM_SELECTED + pair * lists.num_entries
    entries = tl.where(mask, entries, -BLOCK_S - 1)
    k_ptr += row * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    source = (k_ptr, k_tiles, row, kv_head, k_strides[1], key_start)
    place_of_tile = (tile - sharing.first_tile).to(tl.int64) * num_heads + kv_head - first_head
    blocks_ptr = sharing.blocks + place_of_tile * UNION
    members_ptr = sharing.members + place_of_tile * (UNION + 1)
    num_blocks = tl.load(sharing.counts + place_of_tile * 3)
    num_whole = tl.load(sharing.counts + place_of_tile * 3 + 1)
    # Of what is multiplied here k alone may be large or not finite where nobody reads it.
    are_small = is_small(sharing.large, row * lists.kv_heads + kv_head, sharing.num_chunks)
    num_whole = tl.where(are_small, num_whole, 0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
    for step in tl.range(0, num_whole * SPLIT):
        following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
        dq = _add_keys(
            dq, source, dlogits_ptr, choices, entries, entry, step, num_keys, False, False, GROUP, BLOCK_SIZE, SPLIT,
            HEAD_DIM, BLOCK_S, BLOCK_T, BLOCK_N, BLOCK_D, INT64_OFFSETS,
        )  # fmt: skip
        entry = following
    if are_small:
        # Of one block most often.
        for step in tl.range(num_whole * SPLIT, num_blocks * SPLIT, num_stages=2):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            dq = _add_keys(
                dq, source, dlogits_ptr, choices, entries, entry, step, num_keys, True, False, GROUP, BLOCK_SIZE, SPLIT,
                HEAD_DIM, BLOCK_S, BLOCK_T, BLOCK_N, BLOCK_D, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
    else:
        for step in tl.range(0, num_blocks * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            dq = _add_keys(
                dq, source, dlogits_ptr, choices, entries, entry, step, num_keys, True, True, GROUP, BLOCK_SIZE, SPLIT,
                HEAD_DIM, BLOCK_S, BLOCK_T, BLOCK_N, BLOCK_D, INT64_OFFSETS,
            )  # fmt: skip
            entry = following

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    row_mask = (queries < num_queries) & (query_start + queries >= lists.first_token)
    row_mask &= query_start + queries < last_token
    heads = kv_head * GROUP + find_head(rows % GROUP)
    offsets = (query_start + queries).to(tl.int64) * dq_strides[1] + heads.to(tl.int64) * dq_strides[2]
    store_rows(dq_ptr + row * dq_strides[0], offsets, 1, dq * scale, row_mask, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_keys(
    dq,
    source,
    dlogits_ptr,
    choices,
    entries,
    entry,
    step,
    num_keys,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """dq with what a tile of keys adds: part step % SPLIT of a block of the union. Not MASKED: all of its keys are
    there. Not CONTAIN_NONFINITE: they are finite.
    """
    k_ptr, k_tiles, row, kv_head, k_stride, key_start = source
    block, chosen, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, GROUP, BLOCK_N
    )
    if MASKED:
        k = load_rows(k_ptr, key_start + keys, k_stride, key_mask, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
    else:
        k = load_tile(
            k_tiles, k_ptr, row, key_start + first, kv_head, k_stride, True, HEAD_DIM, BLOCK_N, BLOCK_D, INT64_OFFSETS
        )
    if CONTAIN_NONFINITE:
        # Of what no query may read, the gradients are 0.
        k, _ = split_finite(k)
    places = tl.arange(0, BLOCK_T * GROUP) % GROUP
    tiles = for_heads(entries + find_slot(choices, block, BLOCK_S), BLOCK_T, GROUP) * (GROUP // 16) + places // 16
    columns = tiles * (BLOCK_SIZE * 16) + places % 16
    # The compiler does not see that 16 heads of a key lie side by side, and that they are all there or none.
    columns = tl.max_contiguous(tl.multiple_of(columns, [16]), [16])
    chosen = tl.max_constancy(chosen & (tiles >= 0), [16])
    rows = (step % SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)) * 16
    dlogits = tl.load(dlogits_ptr + rows[:, None] + columns[None, :], mask=chosen[None, :], other=0.0)
    return add_product(tl.trans(dlogits), k, dq)
