"""Gradients of q from stored gradients of logits (dlogits/storage.py): one product with k per block.

A query tile never reads more blocks than its queries read one by one. So a program always computes a query tile and
loops over its block union. The stored gradients are 0 for keys that a query may not read.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.finite import find_large, is_small
from native_sparse_attention.ops._triton.launch import describe_tiles, exceeds_int32, head_block, launch, settings_of
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, KeySource, Sizes, Tile
from native_sparse_attention.ops.selected_attention.triton.dkv.kernels import Gates
from native_sparse_attention.ops.selected_attention.triton.dkv.launch import Stored, differentiate_keys
from native_sparse_attention.ops.selected_attention.triton.dlogits.delta import find_delta
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import find_head, max_tokens
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import BlockToQuery
from native_sparse_attention.ops.selected_attention.triton.index.block_union import build_unions, union_size
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import load_rows_of_indices
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    find_slot,
    load_entry,
    open_step,
    repeat_for_heads,
)


class DlogitsQueryGradients:
    """Compute dq from stored gradients of logits (`QueryGradients` of dkv/launch.py)."""

    def __init__(self, arguments: Arguments) -> None:
        q, k, v, block_indices, _, _, block_size, _, _, _ = self.arguments = arguments
        self.group = q.shape[2] // k.shape[2]
        self.max_tokens = max_tokens(q, k, block_indices, block_size)
        self.max_pairs = max(1, self.max_tokens // max(1, q.shape[1]))
        self.settings = settings_of(settings.DLOGITS_DQ, q)
        self.large = find_large(k, v)
        self.dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.dlogits = q.new_empty(0)
        self.fused = False

    @property
    def stored(self) -> Stored:
        return self.dlogits, None, None, None

    def prepare(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Allocate room for the gradients of the logits of these pairs and tokens."""
        size = len(pairs) * csr.num_entries * self.group * self.arguments.block_size
        if self.dlogits.numel() < size:
            self.dlogits = self.dlogits.new_empty(size)

    def finish(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Compute dq of these pairs and tokens."""
        block_m, block_n, num_warps, num_stages = self.settings
        block_t = max(1, block_m // self.group)
        _, k, _, block_indices, _, layout, block_size, causal, scale, _ = self.arguments
        block_n = min(block_n, block_size)
        num_selected, kv_heads = block_indices.shape[3], k.shape[2]
        # The tiles of a row that may hold these tokens. Packed sequences share one row, and each starts a new tile.
        first, num_tiles = tokens.start // block_t, -(-tokens.stop // block_t) - tokens.start // block_t
        tiles_per_row = -(-layout.seqlen_q // block_t)
        if layout.cu_seqlens is not None:
            num_tiles += layout.num_sequences + 1
        first_row, last_row = pairs.start // kv_heads, (pairs.stop - 1) // kv_heads
        # With pairs of several rows, the unions of all heads are built.
        heads = range(block_indices.shape[2])
        if first_row == last_row:
            heads = range(pairs.start % kv_heads, pairs.start % kv_heads + len(pairs))
        tiles = range(first_row * tiles_per_row + first, last_row * tiles_per_row + first + num_tiles)
        union = build_unions(
            *(block_indices[:, :, heads.start : heads.stop], layout, block_size, causal, block_t),
            max_percent=None,
            large=self.large,
            tiles=tiles,
        )
        block_d = head_block(k.shape[3])
        block_s = 1 << (num_selected - 1).bit_length()
        launch(
            dq_from_dlogits_kernel,
            (len(pairs) * num_tiles,),
            *(k, describe_tiles(k, block_n, block_d), block_indices, self.dlogits, self.dq),
            *(k.stride(), block_indices.stride(), self.dq.stride(), layout, union, csr),
            *(tokens.stop, num_tiles, tiles_per_row, first, heads.start, len(heads), scale),
            sizes=Sizes(self.group, 1, num_selected, block_size, causal, k.shape[3], 0),
            tile=Tile(
                *(block_t * self.group, block_n, block_d, 0, exceeds_int32(k), block_s),
                block_g=self.group,
                union_size=union_size(num_selected, block_t),
            ),
            num_warps=num_warps,
            num_stages=num_stages,
            device=k.device,
        )


def differentiate_by_dlogits(
    arguments: Arguments,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    low_bits: Tensor,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and delta `[B, HQ, T]`. low_bits: of the output (`split_low_bits`)."""
    gates = None if gate is None else Gates(gate, lse)
    lse, delta = find_delta(out, low_bits, dout, lse, dlse, gate)
    queries = DlogitsQueryGradients(arguments)
    dk, dv = differentiate_keys(arguments, lse, delta, dout, queries=queries, gates=gates)
    return queries.dq, dk, dv, delta


_COUNTS = ['last_token', 'num_tiles', 'tiles_per_row', 'first_tile', 'first_head', 'num_heads']


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
    layout,
    union,
    csr,
    last_token,
    num_tiles,
    tiles_per_row,
    first_tile,
    first_head,
    num_heads,
    scale,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute dq of one pair and tile of BLOCK_T queries, for the tokens of `csr` before last_token.

    num_tiles: per pair. tiles_per_row: per batch row. first_tile: first tile of a pair within its batch row. union: the
    unions of num_heads KV heads from first_head on.
    """
    GROUP: tl.constexpr = sizes.group
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    HEAD_DIM: tl.constexpr = sizes.head_dim
    UNION_SIZE: tl.constexpr = tile.union_size
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_S: tl.constexpr = tile.block_s
    BLOCK_T: tl.constexpr = BLOCK_M // GROUP
    SPLIT: tl.constexpr = sizes.block_size // tile.block_n
    pair = tl.program_id(0) // num_tiles
    kv_head = (csr.first_pair + pair) % csr.kv_heads
    query_tile = first_tile + tl.program_id(0) % num_tiles
    if layout.cu_seqlens is None:
        query_tile += (csr.first_pair + pair) // csr.kv_heads * tiles_per_row
    sequence, row, query_start, first_query, num_queries, num_keys, _ = locate_queries(query_tile, layout, BLOCK_T)
    tile_queries = first_query + tl.arange(0, BLOCK_T)
    tokens = query_start + tile_queries
    mask = (tile_queries < num_queries) & (tokens >= csr.first_token) & (tokens < last_token)
    if tl.max(mask.to(tl.int32), 0) == 0:
        return
    _, key_start, _ = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    row = row.to(tl.int64)
    indices_ptr += row * indices_strides[0] + kv_head.to(tl.int64) * indices_strides[2]
    blocks = load_rows_of_indices(indices_ptr, tokens.to(tl.int64) * indices_strides[1], mask, NUM_SELECTED, BLOCK_S)
    # The entry of a query's first index; negative for queries outside the range.
    entries = (tokens - csr.first_token) * NUM_SELECTED + pair * csr.num_entries
    entries = tl.where(mask, entries, -BLOCK_S - 1)
    k_ptr += row * k_strides[0] + kv_head.to(tl.int64) * k_strides[2]
    source = KeySource(k_ptr, None, k_tiles, None, row, kv_head, k_strides[1], None, key_start)
    union_tile = (query_tile - union.first_tile).to(tl.int64) * num_heads + kv_head - first_head
    blocks_ptr = union.blocks + union_tile * UNION_SIZE
    bits_ptr = union.query_bits + union_tile * (UNION_SIZE + 1)
    num_blocks = tl.load(union.counts + union_tile * 3)
    num_full = tl.load(union.counts + union_tile * 3 + 1)
    # Of the factors here, k alone may be large or not finite where no query reads it.
    are_small = is_small(union.large, row * csr.kv_heads + kv_head, union.num_chunks)
    num_full = tl.where(are_small, num_full, 0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    inputs = (source, dlogits_ptr, blocks, entries, num_keys)
    entry = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, SPLIT)
    for step in tl.range(0, num_full * SPLIT):
        following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
        dq = _add_keys(dq, inputs, entry, step, MASKED=False, CONTAIN_NONFINITE=False, sizes=sizes, tile=tile)
        entry = following
    if are_small:
        # Usually the steps of one block.
        for step in tl.range(num_full * SPLIT, num_blocks * SPLIT, num_stages=2):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            dq = _add_keys(dq, inputs, entry, step, MASKED=True, CONTAIN_NONFINITE=False, sizes=sizes, tile=tile)
            entry = following
    else:
        for step in tl.range(0, num_blocks * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            dq = _add_keys(dq, inputs, entry, step, MASKED=True, CONTAIN_NONFINITE=True, sizes=sizes, tile=tile)
            entry = following

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    row_mask = (queries < num_queries) & (query_start + queries >= csr.first_token)
    row_mask &= query_start + queries < last_token
    heads = kv_head * GROUP + find_head(rows % GROUP)
    offsets = (query_start + queries).to(tl.int64) * dq_strides[1] + heads.to(tl.int64) * dq_strides[2]
    store_rows(dq_ptr + row * dq_strides[0], offsets, 1, dq * scale, row_mask, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_keys(
    dq,
    inputs,
    entry,
    step,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add a tile of keys to dq: part step % SPLIT of a block of the union.

    Not MASKED: all of its keys exist. Not CONTAIN_NONFINITE: they are finite.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    HEAD_DIM: tl.constexpr = sizes.head_dim
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_S: tl.constexpr = tile.block_s
    INT64_OFFSETS: tl.constexpr = tile.int64_offsets
    SPLIT: tl.constexpr = BLOCK_SIZE // BLOCK_N
    source, dlogits_ptr, blocks, entries, num_keys = inputs
    block, is_selected, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, BLOCK_M, GROUP, BLOCK_N
    )
    if MASKED:
        k = load_rows(source.k, source.key_start + keys, source.k_stride, key_mask, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
    else:
        k = load_tile(
            source.k_tiles, source.k, source.row, source.key_start + first, source.kv_head, source.k_stride,
            HEAD_DIM, BLOCK_N, BLOCK_D, INT64_OFFSETS,
        )  # fmt: skip
    if CONTAIN_NONFINITE:
        # Their gradients of logits are 0 if no query may read them.
        k, _ = split_finite(k)
    columns = tl.arange(0, BLOCK_M) % GROUP
    tiles = repeat_for_heads(entries + find_slot(blocks, block, BLOCK_S), BLOCK_M // GROUP, GROUP) * (GROUP // 16)
    tiles += columns // 16
    columns = tiles * (BLOCK_SIZE * 16) + columns % 16
    # The compiler does not see that the 16 heads of a key are contiguous and share their mask.
    columns = tl.max_contiguous(tl.multiple_of(columns, [16]), [16])
    is_selected = tl.max_constancy(is_selected & (tiles >= 0), [16])
    rows = (step % SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)) * 16
    dlogits = tl.load(dlogits_ptr + rows[:, None] + columns[None, :], mask=is_selected[None, :], other=0.0)
    return add_product(tl.trans(dlogits), k, dq)
