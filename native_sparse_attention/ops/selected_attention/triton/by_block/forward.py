"""Forward kernels of selected attention for small groups and many blocks: one program per KV block and chunk of the
queries that selected it.

The queries of a block fill a tile however few heads a group has, and the block is read once for all of them. Each entry
of the CSR index gets a partial result, its attention to this block alone, and a second kernel merges the partial
results of a query. In a partial result `data` is the weighted sum of values, `first` the largest logit times log2(e),
which the weights are relative to, and `second` the sum of the weights.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import (
    InverseIndex,
    group_pairs,
    load_entries,
    num_block_slots,
    split_rows,
)
from native_sparse_attention.ops._triton.launch import exceeds_int32, head_block, launch, row_block
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite, store_rows
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, Tile, sizes_of, strides_of
from native_sparse_attention.ops.selected_attention.triton.by_block.partials import (
    allocate_partials,
    bytes_per_row,
    find_unit,
    locate_partials,
    open_chunk,
    sort_columns,
    store_partials,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    count_masked_entries,
    load_factors,
    locate_entries,
    make_block_to_query,
    make_index,
    split_evenly,
)

# Rows (entries times heads) per program, and rows per program of the merge.
CHUNK_ROWS, MERGE_ROWS = 2048, 16
# Bytes of the partial results; in the backward pass with delta and the inverse units of one batch row.
WORKSPACE = 2**29 + 2**26 + 2**24


class Inputs(NamedTuple):
    """Tensors that the kernel reads (`ForwardTensors`)."""

    q: Any
    k: Any
    v: Any
    factors: Any


def attend_by_block(arguments: Arguments, out: Tensor, lse: Tensor) -> InverseIndex | None:
    """Fill out `[B, T, HQ, DV]` and lse `[B, HQ, T]`, for one group of pairs and one range of tokens after the other.

    Returns the inverse index of all pairs and tokens for the backward pass, or None where it is not built at once.
    """
    q, k, v, block_indices, block_scale, layout, _, _, scale, softcap = arguments
    seqlen, kv_heads, sizes = q.shape[1], k.shape[2], sizes_of(arguments)
    group, repeats, num_selected, block_size, causal, head_dim, value_dim = sizes
    num_slots = num_block_slots(layout, block_size)
    chunk = max(1, CHUNK_ROWS // group)
    max_tokens = max(1, WORKSPACE // (repeats * num_selected * group * bytes_per_row(q, value_dim)))
    tables = (settings.BLOCK, settings.BLOCK_SHORT)
    block_m, _, num_warps, num_stages = settings.settings_of_blocks(*tables, block_size, q, v)
    shape = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal}
    index = make_index(block_indices, layout, num_slots=num_slots, **shape) if seqlen <= max_tokens else None
    groups = group_pairs(block_indices, kv_heads, num_slots, max(1, max_tokens // max(seqlen, 1)))
    head_blocks = (head_block(head_dim), head_block(value_dim))
    tile = Tile(block_m, row_block(block_size), *head_blocks, exceeds_int32(q, block_scale), chunk=chunk)
    block_s = 1 << max(num_selected - 1, 0).bit_length()
    for pairs, tokens in product(groups, split_evenly(seqlen, max_tokens)):
        csr = make_block_to_query(block_indices, layout, pairs, tokens, **shape, chunk=chunk, index=index)
        partials = allocate_partials(q, len(pairs) * csr.num_entries * group, value_dim)
        launch(
            block_kernel,
            (len(pairs) * csr.num_programs,),
            Inputs(q, k, v, block_scale),
            partials,
            strides_of(q=q, k=k, v=v, factors=block_scale),
            *(layout, csr, scale, softcap),
            sizes=sizes,
            tile=tile,
            num_warps=num_warps,
            num_stages=num_stages,
            device=q.device,
        )
        launch(
            merge_kernel,
            (len(pairs) * -(-len(tokens) * repeats * group // MERGE_ROWS),),
            *(partials, out, lse, out.stride(), layout, csr, len(tokens)),
            sizes=sizes,
            UNROLLED=min(num_selected, 4),
            BLOCK_S=block_s,
            BLOCK_M=MERGE_ROWS,
            BLOCK_DV=head_block(value_dim),
            num_warps=4,
            device=q.device,
        )
        del csr, partials  # before the next ones are allocated
    return index


@triton.jit
def block_kernel(tensors, partials, strides, layout, csr, scale, softcap, sizes: tl.constexpr, tile: tl.constexpr):
    """Compute the partial results of one block for up to `tile.chunk` of its entries. BLOCK_N holds the whole block.

    tensors, strides: `Inputs`, `Strides`. One program per pair and chunk.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    num_entries, entries_ptr, pair, row, kv_head, key_start, keys, key_mask, offset = open_chunk(
        tl.program_id(0), layout, csr, partials, sizes, tile
    )
    if num_entries <= 0:
        return
    k_ptr = tensors.k + (row * strides.k[0] + kv_head * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + kv_head * strides.v[2])
    k = load_rows(k_ptr, key_start + keys, strides.k[1], key_mask, sizes.head_dim, tile.block_d)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, strides.v[1], key_mask, sizes.value_dim, tile.block_dv)
    finite_v, nonfinite_rows = split_finite(v)
    largest = tl.max(tl.abs(finite_v.to(tl.float32)), 1)  # [BLOCK_N]
    unit = 1.0
    if partials.data.dtype.element_ty == tl.float16:
        # Weights are at most 1. The inverse is a power of two, so scaling loses no bits of a value.
        unit, inverse = find_unit(tl.max(largest, 0) * BLOCK_N)
        v = (v.to(tl.float32) * inverse).to(v.dtype)
    num_masked = count_masked_entries(entries_ptr, num_entries, keys, key_mask, offset, csr, tile.chunk, sizes)
    num_rows = num_entries * GROUP
    first_unmasked = tl.cdiv(num_masked * GROUP, BLOCK_M) * BLOCK_M
    q_ptr = tensors.q + row * strides.q[0]
    inputs = (q_ptr, tensors.factors, strides, num_rows, pair, row, kv_head, keys, key_mask, offset, scale, softcap)
    entry = load_entries(entries_ptr, 0, num_rows, GROUP, BLOCK_M)
    for first_row in tl.range(0, tl.minimum(first_unmasked, num_rows), BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        _attend(
            inputs, k, finite_v, nonfinite_rows, largest, entry, first_row, partials, csr, MASKED=True, sizes=sizes,
            tile=tile,
        )  # fmt: skip
        entry = following
    for first_row in tl.range(first_unmasked, num_rows, BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        _attend(
            inputs, k, v, nonfinite_rows, unit, entry, first_row, partials, csr, MASKED=False, sizes=sizes, tile=tile
        )
        entry = following


@triton.jit
def _attend(
    inputs,
    k,
    v,
    nonfinite_rows,
    unit,
    entry,
    first_row,
    partials,
    csr,
    MASKED: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Store the partial results of a tile of rows.

    Not MASKED: all rows read all keys, and v is in multiples of `unit`. MASKED: v is finite, unit is the largest
    element of every key [BLOCK_N], and each row gets a unit from the keys that it reads.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_DV: tl.constexpr = tile.block_dv
    q_ptr, factors_ptr, strides, num_rows, pair, row, kv_head, keys, key_mask, offset, scale, softcap = inputs
    rows = first_row + tl.arange(0, BLOCK_M)
    mask = rows < num_rows
    _, in_group = split_rows(first_row, GROUP, BLOCK_M)
    token, index_head, head = locate_entries(entry, in_group, kv_head, csr, sizes)
    positions = offset + token
    if tile.int64_offsets:
        token, head = token.to(tl.int64), head.to(tl.int64)
    q_offsets = token * strides.q[1] + head * strides.q[2]
    q = load_rows(q_ptr, q_offsets, 1, mask, sizes.head_dim, tile.block_d)
    scale_log2 = tl.full([BLOCK_M], scale * 1.4426950408889634, tl.float32)
    if factors_ptr is not None:
        scale_log2 *= load_factors(
            factors_ptr, strides.factors, row, token, index_head, entry, mask, sizes.num_selected
        )
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        products = cap_logits(products * scale_log2[:, None], softcap * 1.4426950408889634)
        scale_log2 = tl.full([BLOCK_M], 1.0, tl.float32)
    logits = products * scale_log2[:, None]
    read = key_mask[None, :] & mask[:, None]
    if MASKED:
        if sizes.causal:
            read = read & (keys[None, :] <= positions[:, None])
        logits = tl.where(read, logits, float('-inf'))
    row_max = tl.max(logits, 1)
    reference = tl.where(row_max == float('-inf'), 0.0, row_max)
    weights = tl.exp2(tl.fma(products, scale_log2[:, None], -reference[:, None]))
    if MASKED:
        weights = tl.where(read, weights, 0.0)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    out = add_product(weights.to(v.dtype), v, out)
    if MASKED:
        if partials.data.dtype.element_ty == tl.float16:
            unit, inverse = find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * keys.shape[0])
            out *= inverse[:, None]
        else:
            unit = 1.0
        out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]
    offsets = (pair * csr.num_entries + entry) * GROUP + in_group
    tl.store(partials.first + offsets, row_max, mask=mask)
    tl.store(partials.second + offsets, tl.sum(weights, 1), mask=mask)
    store_partials(partials, offsets, out, tl.zeros([BLOCK_M], tl.float32) + unit, mask, sizes.value_dim, BLOCK_DV)


@triton.jit
def merge_kernel(
    partials,
    out_ptr,
    lse_ptr,
    out_strides,
    layout,
    csr,
    num_tokens,
    sizes: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Merge partial results into out `[B, T, HQ, DV]` and lse `[B, HQ, T]`, for num_tokens tokens.

    One program per pair and tile of the heads of these tokens.
    """
    GROUP: tl.constexpr = sizes.group
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    VALUE_DIM: tl.constexpr = sizes.value_dim
    mask, row, token, head, offsets = locate_partials(tl.program_id(0), csr, num_tokens, sizes, BLOCK_M)
    slots = tl.arange(0, BLOCK_S)
    slot_offsets = offsets[:, None] + (slots * GROUP)[None, :]
    slot_mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    exists = tl.load(partials.unit + slot_offsets, mask=slot_mask, other=0.0) != 0  # [BLOCK_M, BLOCK_S]
    references = tl.load(partials.first + slot_offsets, mask=exists, other=float('-inf'))
    totals = tl.load(partials.second + slot_offsets, mask=exists, other=0.0)
    row_max = tl.max(references, 1)
    reference = tl.where(row_max == float('-inf'), 0.0, row_max)
    total = tl.sum(tl.exp2(references - reference[:, None]) * totals, 1)
    empty = total == 0
    total = tl.where(empty, 1.0, total)

    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first_slot in tl.range(0, NUM_SELECTED, UNROLLED):
        for in_step in tl.static_range(UNROLLED):
            slot = first_slot + in_step
            is_slot = mask & (slot < NUM_SELECTED)
            partial_offsets = offsets + slot * GROUP
            unit = tl.load(partials.unit + partial_offsets, mask=is_slot, other=0.0)
            is_partial = unit != 0
            weight = tl.load(partials.first + partial_offsets, mask=is_slot, other=float('-inf'))
            weight = tl.exp2(tl.where(is_partial, weight, float('-inf')) - reference) * unit
            # The mask does not include the unit, so that this load need not wait for it.
            values = load_rows(partials.data, partial_offsets, VALUE_DIM, is_slot, VALUE_DIM, BLOCK_DV).to(tl.float32)
            out = tl.fma(tl.where(is_partial[:, None], values, 0.0), weight[:, None], out)
    out = sort_columns(partials, out / total[:, None], VALUE_DIM, BLOCK_DV)

    out_ptr += row * out_strides[0]
    store_rows(out_ptr, token * out_strides[1] + head * out_strides[2], 1, out, mask, VALUE_DIM, BLOCK_DV)
    lse = tl.where(empty, float('-inf'), tl.fma(reference, 0.6931471805599453, tl.log(total)))
    num_heads = csr.kv_heads * sizes.repeats * GROUP
    tl.store(lse_ptr + (row * num_heads + head) * layout.seqlen_q + token, lse, mask=mask)
