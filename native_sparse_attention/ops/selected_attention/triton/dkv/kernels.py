"""Backward kernels of selected attention for the gradients of k and v.

The first has a program per block of keys and per chunk of the list of those who chose it. A block with one chunk is
finished there; the chunks of the others leave partial sums, which the second adds in the list's order.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import find_block, load_entries, split_members
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, is_finite_tile, load_rows, split_finite, store_rows
from native_sparse_attention.ops._triton.varlen import load_extent
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import store_dlogits
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    count_near,
    find_chunk,
    find_members,
    load_factors,
    load_sequence,
)


class Partials(NamedTuple):
    """Sums over a chunk of a list: float32 tensors `[pairs * num_partials, block size, D and DV]`, num_partials of them
    for a pair.
    """

    k: Any
    v: Any
    num_partials: int


class Gates(NamedTuple):
    """What dout is still to be multiplied by, `[B, T, HQ]`, and the log-sum-exp `[B, HQ, T]`, contiguous. An lse beside
    these is less by the logarithm of the gate, which leads to gate * p, and to NaN where the gate is below 0.
    """

    gate: Any
    lse: Any


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    factors_ptr,
    lse_ptr,
    delta_ptr,
    dout_ptr,
    gates,
    dk_ptr,
    dv_ptr,
    dlogits_ptr,
    partials,
    q_strides,
    k_strides,
    v_strides,
    factors_strides,
    lse_strides,
    dout_strides,
    gate_strides,
    dk_strides,
    dv_strides,
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
    ADDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds up to CHUNK entries of a list, to dk and dv where these are all, or else to a partial sum. One program per
    pair, chunk and tile of the block's keys. lse, delta: `[B, HQ, T]`, of the same strides. gates: `Gates`, or None.
    dk, dv: `[B, S, H, D and DV]`; ADDS: they have gradients already. dlogits: room for the gradients of the logits,
    where these are left in memory (`store_dlogits`), or None.
    """
    tiles = tl.cdiv(BLOCK_SIZE, BLOCK_N)
    # Where gradients of logits are stored, a search of many slots at once makes the whole kernel a little slower.
    pair, slot, first_entry, begin, length = find_chunk(
        tl.program_id(0) // tiles, lists, CHUNK, AT_ONCE=dlogits_ptr is None
    )
    if slot >= lists.num_slots:
        return
    # A list without entries has a chunk too: its keys have gradients of 0, or those that they have.
    if (ADDS | (first_entry > 0)) & (first_entry >= length):
        return
    row = (lists.first_pair + pair) // lists.kv_heads
    sequence, first_key = find_block(slot, row, place, BLOCK_SIZE)
    if sequence >= place.num_sequences:
        return
    key_start, num_stored, num_keys, offset = load_sequence(sequence, place)
    in_block = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = first_key + in_block
    stored = (keys >= 0) & (keys < num_stored) & (in_block < BLOCK_SIZE)
    key_mask = stored & (keys < num_keys)
    kv_head = ((lists.first_pair + pair) % lists.kv_heads).to(tl.int64)
    row = row.to(tl.int64)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    k = load_rows(k_ptr, key_start + keys, k_strides[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, v_strides[1], key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    entries_ptr = lists.entries + pair.to(tl.int64) * lists.num_entries + begin + first_entry
    num_entries = tl.minimum(length - first_entry, CHUNK)
    num_near = count_near(
        entries_ptr, num_entries, keys, key_mask, offset, lists, BLOCK_SIZE, CAUSAL, CHUNK, REPEATS, NUM_SELECTED
    )
    num_rows = num_entries * GROUP
    first_far = tl.cdiv(num_near * GROUP, BLOCK_M) * BLOCK_M
    q_ptr += row * q_strides[0]
    dout_ptr += row * dout_strides[0]
    lse_ptr += row * lse_strides[0]
    delta_ptr += row * lse_strides[0]
    inputs = (
        q_ptr, factors_ptr, lse_ptr, delta_ptr, dout_ptr, q_strides, factors_strides, lse_strides, dout_strides,
        (gates, gate_strides),
    )  # fmt: skip
    passed = (dlogits_ptr, pair, entries_ptr, tl.program_id(0) % tiles * BLOCK_N)
    entry = load_entries(entries_ptr, 0, num_rows, GROUP, BLOCK_M)
    for first_row in tl.range(0, tl.minimum(first_far, num_rows), BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_members(
            inputs, passed, k, v, dk, dv, entry, first_row, num_rows, row, kv_head, keys, key_mask, offset, place,
            lists, scale, softcap, GROUP, REPEATS, NUM_SELECTED, BLOCK_SIZE, CAUSAL, INT64_OFFSETS, True, False,
            HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following
    for first_row in tl.range(first_far, num_rows, BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_members(
            inputs, passed, k, v, dk, dv, entry, first_row, num_rows, row, kv_head, keys, key_mask, offset, place,
            lists, scale, softcap, GROUP, REPEATS, NUM_SELECTED, BLOCK_SIZE, CAUSAL, INT64_OFFSETS, False, False,
            HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following
    if gates is not None and not is_finite_tile(dk):
        # Perhaps for gates below 0: once more, with their signs.
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for first_row in tl.range(0, num_rows, BLOCK_M, num_stages=1):
            entry = load_entries(entries_ptr, first_row, num_rows, GROUP, BLOCK_M)
            dk, dv = _add_members(
                inputs, passed, k, v, dk, dv, entry, first_row, num_rows, row, kv_head, keys, key_mask, offset, place,
                lists, scale, softcap, GROUP, REPEATS, NUM_SELECTED, BLOCK_SIZE, CAUSAL, INT64_OFFSETS, True, True,
                HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    # What no query may read is loaded as 0, and its gradient is 0.
    dk = tl.where(key_mask[:, None], dk * scale, 0.0)
    dv = tl.where(key_mask[:, None], dv, 0.0)
    if length <= CHUNK:
        dk_ptr += row * dk_strides[0] + kv_head * dk_strides[2]
        dv_ptr += row * dv_strides[0] + kv_head * dv_strides[2]
        if ADDS:
            dk += load_rows(dk_ptr, key_start + keys, dk_strides[1], stored, HEAD_DIM, BLOCK_D)
            dv += load_rows(dv_ptr, key_start + keys, dv_strides[1], stored, VALUE_DIM, BLOCK_DV)
        store_rows(dk_ptr, key_start + keys, dk_strides[1], dk, stored, HEAD_DIM, BLOCK_D)
        store_rows(dv_ptr, key_start + keys, dv_strides[1], dv, stored, VALUE_DIM, BLOCK_DV)
    else:
        rows_of_partial = _find_partial(pair, begin, partials, CHUNK) + first_entry // CHUNK
        rows_of_partial = rows_of_partial * BLOCK_SIZE + in_block
        store_rows(partials.k, rows_of_partial, HEAD_DIM, dk, in_block < BLOCK_SIZE, HEAD_DIM, BLOCK_D)
        store_rows(partials.v, rows_of_partial, VALUE_DIM, dv, in_block < BLOCK_SIZE, VALUE_DIM, BLOCK_DV)


@triton.jit
def _add_members(
    inputs,
    passed,
    k,
    v,
    dk,
    dv,
    entry,
    first_row,
    num_rows,
    row,
    kv_head,
    keys,
    key_mask,
    offset,
    place,
    lists,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    MASKED: tl.constexpr,
    GATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """dk and dv with what a tile of members adds, whose gradients of logits are left in memory where there is room for
    them. Not MASKED: all of them read all of the keys. GATED: gates may be below 0.
    """
    q_ptr, factors_ptr, lse_ptr, delta_ptr, dout_ptr = inputs[:5]
    q_strides, factors_strides, lse_strides, dout_strides, gated = inputs[5:]
    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    _, in_group = split_members(first_row, GROUP, BLOCK_M)
    token, index_head, head = find_members(entry, in_group, kv_head, lists, GROUP, REPEATS, NUM_SELECTED)
    positions = offset + token
    if INT64_OFFSETS:
        token, head = token.to(tl.int64), head.to(tl.int64)
    offsets = token * q_strides[1] + head * q_strides[2]
    q = load_rows(q_ptr, offsets, 1, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    offsets = token * dout_strides[1] + head * dout_strides[2]
    dout = load_rows(dout_ptr, offsets, 1, row_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    places_of_lse = head * lse_strides[1] + token * lse_strides[2]
    # Rows that are none add nothing: their q and dout are 0.
    lse = tl.load(lse_ptr + places_of_lse, mask=row_mask, other=0.0)
    delta = tl.load(delta_ptr + places_of_lse, mask=row_mask, other=0.0)
    if GATED:
        gates, gate_strides = gated
        places = (row * lists.kv_heads * REPEATS * GROUP + head) * place.seqlen_q + token
        offsets = row * gate_strides[0] + token * gate_strides[1] + head * gate_strides[2]
        gate = tl.load(gates.gate + offsets, mask=row_mask, other=0.0).to(tl.float32)
        ungated = tl.load(gates.lse + places, mask=row_mask, other=0.0)
        lse = tl.where(gate < 0, ungated - tl.log(-gate), lse)
    # Where lse is -inf, all logits are: a number makes their weights 0. Its product with log2(e) is one too.
    shift = tl.maximum(lse, -2.0e38, propagate_nan=tl.PropagateNan.ALL) * -1.4426950408889634
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if factors_ptr is not None:
        factor = load_factors(factors_ptr, factors_strides, row, token, index_head, entry, row_mask, NUM_SELECTED)
    scale_log2 = scale * 1.4426950408889634 * factor

    products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
    if softcap is None:
        weights = tl.exp2(tl.fma(products, scale_log2[None, :], shift[None, :]))
    else:
        logits_log2 = products * scale_log2[None, :]
        capped_log2 = cap_logits(logits_log2, softcap * 1.4426950408889634)
        weights = tl.exp2(capped_log2 + shift[None, :])
    if GATED:
        weights = tl.where(gate[None, :] < 0, -weights, weights)
    dweights = tl.dot(v, tl.trans(dout), input_precision='ieee')
    dlogits = weights * (dweights - delta[None, :])
    if softcap is not None:
        dlogits *= cap_slope(logits_log2, softcap * 1.4426950408889634)
    if MASKED:
        read = key_mask[:, None] & row_mask[None, :]
        if CAUSAL:
            read = read & (keys[:, None] <= positions[None, :])
        weights = tl.where(read, weights, 0.0)
        dlogits = tl.where(read, dlogits, 0.0)
        # A query that is not finite must not reach the keys that it does not read.
        q, _ = split_finite(q)
    dlogits_ptr, pair, entries_ptr, first_in_block = passed
    if dlogits_ptr is not None:
        chunk = first_row // 16
        entry = load_entries(entries_ptr, chunk, num_rows // 16, GROUP // 16, BLOCK_M // 16)
        exists = chunk + tl.arange(0, BLOCK_M // 16) < num_rows // 16
        store_dlogits(dlogits_ptr, dlogits, pair, entry, exists, chunk, first_in_block, lists, GROUP, BLOCK_SIZE)
    if factors_ptr is not None:
        dlogits *= factor[None, :]
    dv = add_product(weights.to(dout.dtype), dout, dv)
    dk = add_product(dlogits.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def combine_kernel(
    dk_ptr,
    dv_ptr,
    partials,
    dk_strides,
    dv_strides,
    place,
    lists,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ADDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds the partial sums of the lists that have several. One program per pair, block slot and tile of its keys."""
    tiles = tl.cdiv(BLOCK_SIZE, BLOCK_N)
    slot = tl.program_id(0) // tiles % lists.num_slots
    pair = tl.program_id(0) // tiles // lists.num_slots
    starts_ptr = lists.starts + pair.to(tl.int64) * (lists.num_slots + 1) + slot
    begin = tl.load(starts_ptr)
    length = tl.load(starts_ptr + 1) - begin
    if length <= CHUNK:
        return
    row = (lists.first_pair + pair) // lists.kv_heads
    sequence, first_key = find_block(slot, row, place, BLOCK_SIZE)
    if sequence >= place.num_sequences:
        return
    _, key_start, num_stored = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    in_block = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = first_key + in_block
    in_partial = in_block < BLOCK_SIZE
    stored = (keys >= 0) & (keys < num_stored) & in_partial
    row = row.to(tl.int64)
    kv_head = ((lists.first_pair + pair) % lists.kv_heads).to(tl.int64)
    dk_ptr += row * dk_strides[0] + kv_head * dk_strides[2]
    dv_ptr += row * dv_strides[0] + kv_head * dv_strides[2]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if ADDS:
        dk += load_rows(dk_ptr, key_start + keys, dk_strides[1], stored, HEAD_DIM, BLOCK_D)
        dv += load_rows(dv_ptr, key_start + keys, dv_strides[1], stored, VALUE_DIM, BLOCK_DV)
    first_partial = _find_partial(pair, begin, partials, CHUNK)
    # Several chunks are fetched at once, and added one after the other.
    for chunk in tl.range(0, tl.cdiv(length, CHUNK), loop_unroll_factor=8):
        rows = (first_partial + chunk) * BLOCK_SIZE + in_block
        dk += load_rows(partials.k, rows, HEAD_DIM, in_partial, HEAD_DIM, BLOCK_D)
        dv += load_rows(partials.v, rows, VALUE_DIM, in_partial, VALUE_DIM, BLOCK_DV)
    store_rows(dk_ptr, key_start + keys, dk_strides[1], dk, stored, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, key_start + keys, dv_strides[1], dv, stored, VALUE_DIM, BLOCK_DV)


@triton.jit
def _find_partial(pair, begin, partials, CHUNK: tl.constexpr):
    """The first partial sum of a list that begins at entry `begin` and has more than CHUNK entries. Such a list of x *
    CHUNK entries has at most floor(2 * x) chunks, so no two lists meet.
    """
    return pair.to(tl.int64) * partials.num_partials + 2 * begin.to(tl.int64) // CHUNK
