"""Kernels of selected attention for small groups and many blocks: a program has a block of keys and those who chose it.

The queries of a list fill a tile however few heads a group has, and a block is read once for all of them. Each member
of a list leaves a part, its attention to that block alone, and a second kernel merges those of a query. A part is the
sum of weights times values; `first` is the largest logit times log2(e), which the weights are relative to, and `second`
the sum of the weights.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import (
    InverseIndex,
    group_pairs,
    load_entries,
    num_block_slots,
    split_members,
)
from native_sparse_attention.ops._triton.launch import head_block, is_wide, launch, row_block
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    bytes_of_part,
    count_near,
    find_members,
    find_owners,
    find_unit,
    load_factors,
    make_index,
    make_lists,
    make_parts,
    open_chunk,
    sort_columns,
    split_evenly,
    store_part,
)

# Members of a list that a program has at most, and rows of a program that merges.
CHUNK_ROWS, MERGE_ROWS = 2048, 16
# Bytes that partial results may take, and in the backward delta and inverses of a row of the batch with them.
WORKSPACE = 2**29 + 2**26 + 2**24


def attend_by_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> InverseIndex | None:
    """out and lse, for one group of pairs and one range of tokens after the other. Returns the lists of all pairs and
    tokens, for the backward, where they are made at once.
    """
    seqlen, heads, head_dim = q.shape[1:]
    seqlen_k, kv_heads, value_dim = v.shape[1:]
    index_heads, num_selected = block_indices.shape[2:]
    block_size = min(block_size, seqlen_k)
    repeats, group = index_heads // kv_heads, heads // index_heads
    num_slots = num_block_slots(place, block_size)
    chunk = max(1, CHUNK_ROWS // group)
    most = max(1, WORKSPACE // (repeats * num_selected * group * bytes_of_part(q, value_dim)))
    tables = (settings.BLOCK, settings.BLOCK_SHORT)
    block_m, _, num_warps, num_stages = settings.settings_of_blocks(*tables, block_size, q, v)
    shape = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal}
    index = make_index(block_indices, place, num_slots=num_slots, **shape) if seqlen <= most else None
    groups = group_pairs(block_indices, kv_heads, num_slots, max(1, most // max(seqlen, 1)))
    for pairs, tokens in product(groups, split_evenly(seqlen, most)):
        lists = make_lists(block_indices, place, pairs, tokens, **shape, chunk=chunk, index=index)
        parts = make_parts(q, len(pairs) * lists.num_entries * group, value_dim)
        launch(
            block_kernel,
            (len(pairs) * lists.num_programs,),
            *(q, k, v, block_scale, parts),
            *(q.stride(), k.stride(), v.stride(), None if block_scale is None else block_scale.stride()),
            *(place, lists, scale, softcap),
            GROUP=group,
            REPEATS=repeats,
            NUM_SELECTED=num_selected,
            BLOCK_SIZE=block_size,
            CAUSAL=causal,
            CHUNK=chunk,
            INT64_OFFSETS=is_wide(q, block_scale),
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_M=block_m,
            BLOCK_N=row_block(block_size),
            BLOCK_D=head_block(head_dim),
            BLOCK_DV=head_block(value_dim),
            num_warps=num_warps,
            num_stages=num_stages,
            device=q.device,
        )
        tiles = -(-len(tokens) * repeats * group // MERGE_ROWS)
        launch(
            merge_kernel,
            (len(pairs) * tiles,),
            *(parts, out, lse, out.stride(), place, lists, len(tokens)),
            GROUP=group,
            REPEATS=repeats,
            NUM_SELECTED=num_selected,
            VALUE_DIM=value_dim,
            BLOCK_S=1 << max(num_selected - 1, 0).bit_length(),
            UNROLLED=min(num_selected, 4),
            BLOCK_M=MERGE_ROWS,
            BLOCK_DV=head_block(value_dim),
            num_warps=4,
            device=q.device,
        )
        del lists, parts  # before those of the next turn are made
    return index


@triton.jit
def block_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    factors_ptr,
    parts,
    q_strides,
    k_strides,
    v_strides,
    factors_strides,
    place,
    lists,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Partial results of up to CHUNK entries of a list; one program per pair and chunk. BLOCK_N holds a whole block."""
    num_entries, entries_ptr, pair, row, kv_head, key_start, keys, key_mask, offset = open_chunk(
        tl.program_id(0), place, lists, parts, GROUP, BLOCK_SIZE, CHUNK, BLOCK_N
    )
    if num_entries <= 0:
        return
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    k = load_rows(k_ptr, key_start + keys, k_strides[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, v_strides[1], key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    finite_v, nonfinite_rows = split_finite(v)
    largest = tl.max(tl.abs(finite_v.to(tl.float32)), 1)  # [BLOCK_N]
    unit = 1.0
    if parts.out.dtype.element_ty == tl.float16:
        # A weight is at most 1. The inverse is a power of two, so no bit of a value is lost.
        unit, inverse = find_unit(tl.max(largest, 0) * BLOCK_N)
        v = (v.to(tl.float32) * inverse).to(v.dtype)
    num_near = count_near(
        entries_ptr, num_entries, keys, key_mask, offset, lists, BLOCK_SIZE, CAUSAL, CHUNK, REPEATS, NUM_SELECTED
    )
    num_members = num_entries * GROUP
    first_far = tl.cdiv(num_near * GROUP, BLOCK_M) * BLOCK_M
    q_ptr += row * q_strides[0]
    inputs = (q_ptr, factors_ptr, q_strides, factors_strides)
    entry = load_entries(entries_ptr, 0, num_members, GROUP, BLOCK_M)
    for first_member in tl.range(0, tl.minimum(first_far, num_members), BLOCK_M):
        following = load_entries(entries_ptr, first_member + BLOCK_M, num_members, GROUP, BLOCK_M)
        _attend(
            inputs, k, finite_v, nonfinite_rows, largest, entry, first_member, num_members, pair, row,
            kv_head, keys, key_mask, offset, parts, lists, scale, softcap, GROUP, REPEATS, NUM_SELECTED, CAUSAL,
            INT64_OFFSETS, True, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following
    for first_member in tl.range(first_far, num_members, BLOCK_M):
        following = load_entries(entries_ptr, first_member + BLOCK_M, num_members, GROUP, BLOCK_M)
        _attend(
            inputs, k, v, nonfinite_rows, unit, entry, first_member, num_members, pair, row, kv_head,
            keys, key_mask, offset, parts, lists, scale, softcap, GROUP, REPEATS, NUM_SELECTED, CAUSAL, INT64_OFFSETS,
            False, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following


@triton.jit
def _attend(
    inputs,
    k,
    v,
    nonfinite_rows,
    unit,
    entry,
    first_member,
    num_members,
    pair,
    row,
    kv_head,
    keys,
    key_mask,
    offset,
    parts,
    lists,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The parts of a tile of members. Not MASKED: all of them read all of the keys, and v is in units of the parts.
    MASKED: unit is the largest value of every key, and each member has a unit by what it reads.
    """
    q_ptr, factors_ptr, q_strides, factors_strides = inputs
    members = first_member + tl.arange(0, BLOCK_M)
    mask = members < num_members
    _, in_group = split_members(first_member, GROUP, BLOCK_M)
    token, index_head, head = find_members(entry, in_group, kv_head, lists, GROUP, REPEATS, NUM_SELECTED)
    positions = offset + token
    if INT64_OFFSETS:
        token, head = token.to(tl.int64), head.to(tl.int64)
    offsets = token * q_strides[1] + head * q_strides[2]
    q = load_rows(q_ptr, offsets, 1, mask, HEAD_DIM, BLOCK_D)
    scale_log2 = tl.full([BLOCK_M], scale * 1.4426950408889634, tl.float32)
    if factors_ptr is not None:
        scale_log2 *= load_factors(factors_ptr, factors_strides, row, token, index_head, entry, mask, NUM_SELECTED)
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        products = cap_logits(products * scale_log2[:, None], softcap * 1.4426950408889634)
        scale_log2 = tl.full([BLOCK_M], 1.0, tl.float32)
    logits = products * scale_log2[:, None]
    read = key_mask[None, :] & mask[:, None]
    if MASKED:
        if CAUSAL:
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
        if parts.out.dtype.element_ty == tl.float16:
            unit, inverse = find_unit(tl.max(tl.where(read, unit[None, :], 0.0), 1) * keys.shape[0])
            out *= inverse[:, None]
        else:
            unit = 1.0
        out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]
    places = (pair * lists.num_entries + entry) * GROUP + in_group
    tl.store(parts.first + places, row_max, mask=mask)
    tl.store(parts.second + places, tl.sum(weights, 1), mask=mask)
    store_part(parts, places, out, tl.zeros([BLOCK_M], tl.float32) + unit, mask, VALUE_DIM, BLOCK_DV)


@triton.jit
def merge_kernel(
    parts,
    out_ptr,
    lse_ptr,
    out_strides,
    place,
    lists,
    num_tokens,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """out: `[B, T, HQ, DV]`, lse: `[B, HQ, T]`, of num_tokens tokens. One program per pair and tile of rows, which are
    the heads of the tokens.
    """
    mask, row, token, head, places = find_owners(
        tl.program_id(0), lists, num_tokens, GROUP, REPEATS, NUM_SELECTED, BLOCK_M
    )
    slots = tl.arange(0, BLOCK_S)
    offsets = places[:, None] + (slots * GROUP)[None, :]
    slot_mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    are_parts = tl.load(parts.unit + offsets, mask=slot_mask, other=0.0) != 0  # [BLOCK_M, BLOCK_S]
    references = tl.load(parts.first + offsets, mask=are_parts, other=float('-inf'))
    totals = tl.load(parts.second + offsets, mask=are_parts, other=0.0)
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
            places_of_part = places + slot * GROUP
            unit = tl.load(parts.unit + places_of_part, mask=is_slot, other=0.0)
            is_part = unit != 0
            weight = tl.load(parts.first + places_of_part, mask=is_slot, other=float('-inf'))
            weight = tl.exp2(tl.where(is_part, weight, float('-inf')) - reference) * unit
            # Not masked by the unit, which it need not wait for then.
            part = load_rows(parts.out, places_of_part, VALUE_DIM, is_slot, VALUE_DIM, BLOCK_DV).to(tl.float32)
            out = tl.fma(tl.where(is_part[:, None], part, 0.0), weight[:, None], out)
    out = sort_columns(parts, out / total[:, None], VALUE_DIM, BLOCK_DV)

    out_ptr += row * out_strides[0]
    store_rows(out_ptr, token * out_strides[1] + head * out_strides[2], 1, out, mask, VALUE_DIM, BLOCK_DV)
    lse = tl.where(empty, float('-inf'), tl.fma(reference, 0.6931471805599453, tl.log(total)))
    num_heads = lists.kv_heads * REPEATS * GROUP
    tl.store(lse_ptr + (row * num_heads + head) * place.seqlen_q + token, lse, mask=mask)
