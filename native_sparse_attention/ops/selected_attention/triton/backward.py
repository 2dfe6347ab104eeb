"""Backward kernels of selected attention: one for the gradients of q and of the factors, one for those of k and v.

The gradient of a logit is p * (dp - delta), where delta is the sum of p * dp over the keys of a row. It is commonly
taken as the product of the output and its gradient, but the output is rounded, and in rows of few keys that shows. So
the first kernel starts from that product, adds up by how much it is off, and corrects both its result and delta.

The second kernel has a program per block of keys and per chunk of the list of those who chose it. A block with one
chunk is finished there; the chunks of the others leave partial sums, which a third kernel adds in the list's order. The
second kernel may also leave what a block adds to the gradients of q and of the factors of those who chose it.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.inverse_index import find_block
from native_sparse_attention.ops._triton.placement import find_query, load_extent
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, split_finite, store_rows
from native_sparse_attention.ops.selected_attention.triton.choice import (
    find_keys,
    find_whole_blocks,
    load_block,
    load_factor,
    load_whole,
)
from native_sparse_attention.ops.selected_attention.triton.lists import (
    count_near,
    find_chunk,
    find_members,
    find_unit,
    invert_power,
    load_entries,
    load_factors,
    load_sequence,
    store_part,
)
from native_sparse_attention.ops.selected_attention.triton.sharing import load_flag_of_query


class Partials(NamedTuple):
    """Sums over a chunk of a list: float32 tensors `[pairs * num_partials, block size, D and DV]`, num_partials of them
    for a pair.
    """

    k: Any
    v: Any
    num_partials: int


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    indices_ptr,
    factors_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    dq_ptr,
    delta_ptr,
    dfactors_ptr,
    q_strides,
    k_strides,
    v_strides,
    indices_strides,
    factors_strides,
    out_strides,
    dout_strides,
    dlse_strides,
    dq_strides,
    place,
    sharing,
    scale,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Shapes as in the forward kernel; dlse may be None, and is `[B, HQ, T]` like lse and delta, where the gradient of
    a logit is p * (dp - delta). dfactors: float32 `[parts, B, T, HI, n]`, for the tiles of the heads of a choice, or
    None.
    """
    parts = tl.cdiv(GROUP, BLOCK_M)
    chooser = (tl.program_id(1) // parts).to(tl.int64)
    sequence, row, token = find_query(tl.program_id(0), place)
    is_shared = 0
    if sharing.flags is not None:
        is_shared = load_flag_of_query(sharing, sequence, token, chooser, tl.num_programs(1) // parts, place)
    if is_shared != 0:
        return
    key_start, readable = find_keys(sequence, token, place, CAUSAL)
    row, token = row.to(tl.int64), token.to(tl.int64)
    part = (tl.program_id(1) % parts).to(tl.int64)
    in_group = part * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = chooser * GROUP + in_group
    head_mask = in_group < GROUP
    num_choosers = tl.num_programs(1) // parts
    k_ptr += row * k_strides[0] + chooser // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + chooser // REPEATS * v_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + chooser * indices_strides[2]
    if factors_ptr is not None:
        factors_ptr += row * factors_strides[0] + token * factors_strides[1] + chooser * factors_strides[2]
    q_ptr += row * q_strides[0] + token * q_strides[1]
    out_ptr += row * out_strides[0] + token * out_strides[1]
    dout_ptr += row * dout_strides[0] + token * dout_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], head_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(dout_ptr, heads, dout_strides[2], head_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    out = load_rows(out_ptr, heads, out_strides[2], head_mask, VALUE_DIM, BLOCK_DV)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    places_of_lse = (row * num_choosers * GROUP + heads) * place.seqlen_q + token
    lse = tl.load(lse_ptr + places_of_lse, mask=head_mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        dlse_ptr += row * dlse_strides[0] + token * dlse_strides[2]
        dlse = tl.load(dlse_ptr + heads * dlse_strides[1], mask=head_mask, other=0.0)
        # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
        dlse = tl.where(lse == float('-inf'), 0.0, dlse)
    slots = tl.arange(0, BLOCK_S)
    choice = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)  # [BLOCK_S]

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    num_slots, spare, first_step, last_step = 0, 0, 0, NUM_SELECTED * SPLIT
    if UNMASKED:
        # What is left is the block of which only the first keys may be read.
        num_slots, spare, first_step = find_whole_blocks(choice, readable, NUM_SELECTED, BLOCK_SIZE, BLOCK_S)
        first_step *= SPLIT
        last_step = tl.minimum(first_step + SPLIT, last_step)
    inputs = (q, dout, k_ptr, v_ptr, k_tiles, v_tiles, row, chooser // REPEATS, k_strides[1], v_strides[1], key_start)
    row_of_choice = (indices_ptr, factors_ptr, choice, readable, spare)
    if dfactors_ptr is not None:
        missing = tl.zeros([BLOCK_M], tl.float32)
        # The gradient of a factor is a sum over heads, each with a delta of its own: it cannot be corrected at last.
        if UNMASKED:
            for step in tl.range(0, num_slots * SPLIT):
                _, _, _, dlogits, _ = _differentiate(
                    inputs, row_of_choice, lse_log2, delta, step, scale, False, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM,
                    BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
                )  # fmt: skip
                missing += tl.sum(dlogits, 1)
        for step in tl.range(first_step, last_step, num_stages=1 if UNMASKED else None):
            _, _, _, dlogits, _ = _differentiate(
                inputs, row_of_choice, lse_log2, delta, step, scale, True, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM,
                BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
            missing += tl.sum(dlogits, 1)
        delta += missing
        query = row * place.seqlen_q + token
        dfactors_ptr += ((part * tl.num_programs(0) + query) * num_choosers + chooser) * NUM_SELECTED
        tl.store(dfactors_ptr + slots, tl.zeros([BLOCK_S], tl.float32), mask=slots < NUM_SELECTED)
    errors = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up over the keys of a tile at the end
    sums = (dq, mean_k, errors, tl.zeros([BLOCK_M], tl.float32))
    if UNMASKED:
        # One loop, whose next step is fetched in time, be a block one tile or several.
        for step in tl.range(0, num_slots * SPLIT):
            sums = _add_keys(
                inputs, row_of_choice, sums, lse_log2, delta, dlse, dfactors_ptr, step, scale, False, BLOCK_SIZE, SPLIT,
                HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
    for step in tl.range(first_step, last_step, num_stages=1 if UNMASKED else None):
        sums = _add_keys(
            inputs, row_of_choice, sums, lse_log2, delta, dlse, dfactors_ptr, step, scale, True, BLOCK_SIZE, SPLIT,
            HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
    dq, mean_k, errors, _ = sums
    missing = tl.sum(errors, 1)
    dq = (dq - missing[:, None] * mean_k) * scale
    dq_ptr += row * dq_strides[0] + token * dq_strides[1]
    store_rows(dq_ptr, heads, dq_strides[2], dq, head_mask, HEAD_DIM, BLOCK_D)
    tl.store(delta_ptr + places_of_lse, delta + missing - dlse, mask=head_mask)


@triton.jit
def _add_keys(
    inputs,
    row_of_choice,
    sums,
    lse_log2,
    delta,
    dlse,
    dfactors_ptr,
    step,
    scale,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds a tile of keys to dq, to the mean of the keys, to what dq is off by, and to the gradient of a factor."""
    dq, mean_k, errors, dfactor = sums
    k, logits, weights, dlogits, factor = _differentiate(
        inputs, row_of_choice, lse_log2, delta, step, scale, MASKED, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S,
        BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
    )  # fmt: skip
    errors += dlogits
    dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if dfactors_ptr is not None:
        # Logits of keys that are not read may be anything.
        terms = tl.where(dlogits == 0, 0.0, dlogits * logits)
        dfactor = tl.where(step % SPLIT == 0, 0.0, dfactor) + tl.sum(terms, 1)
        tl.store(dfactors_ptr + step // SPLIT, tl.sum(dfactor, 0))
    dq = add_product((dlogits * factor).to(k.dtype), k, dq)
    mean_k = add_product((weights * factor).to(k.dtype), k, mean_k)
    return dq, mean_k, errors, dfactor


@triton.jit
def _differentiate(
    inputs,
    row_of_choice,
    lse_log2,
    delta,
    step,
    scale,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of keys, part step % SPLIT of the block of an index, and [BLOCK_M, BLOCK_N]: their logits without the
    factor, their weights, and the gradients of the logits, 0 for keys that are not read; and the factor. Not MASKED:
    of blocks of which all keys may be read.
    """
    q, dout, k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, k_stride, v_stride, key_start = inputs
    indices_ptr, factors_ptr, choice, readable, spare = row_of_choice
    slot = step // SPLIT
    if MASKED:
        first, last = load_block(indices_ptr, choice, slot, readable, BLOCK_SIZE, BLOCK_S)
        is_read = first < last
        keys = first + step % SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = keys < last
        k = load_rows(k_ptr, key_start + keys, k_stride, mask, HEAD_DIM, BLOCK_D, WIDE)  # [BLOCK_N, BLOCK_D]
        v = load_rows(v_ptr, key_start + keys, v_stride, mask, VALUE_DIM, BLOCK_DV, WIDE)  # [BLOCK_N, BLOCK_DV]
        read = mask[None, :]
    else:
        first, is_read = load_whole(indices_ptr, choice, slot, readable, spare, BLOCK_SIZE, BLOCK_S)
        first += key_start + step % SPLIT * BLOCK_N
        k = load_tile(k_tiles, k_ptr, row, first, kv_head, k_stride, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
        v = load_tile(v_tiles, v_ptr, row, first, kv_head, v_stride, VALUE_DIM, BLOCK_N, BLOCK_DV, WIDE)
        read = is_read
    factor = load_factor(factors_ptr, slot, is_read)
    logits = tl.dot(q, tl.trans(k), input_precision='ieee') * scale
    if MASKED:
        # Of a query that is not finite, and reads nothing.
        logits = tl.where(read, logits, 0.0)
    bias = tl.where(read, 0.0, float('-inf')) - lse_log2[:, None]
    weights = tl.exp2(tl.fma(logits, factor * 1.4426950408889634, bias))
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    dlogits = tl.where(read, weights * (dweights - delta[:, None]), 0.0)
    return k, logits, weights, dlogits, factor


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    factors_ptr,
    lse_ptr,
    delta_ptr,
    inverses_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    partials,
    parts,
    q_strides,
    k_strides,
    v_strides,
    factors_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    place,
    lists,
    scale,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    ADDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Adds up to CHUNK entries of a list, to dk and dv where these are all, or else to a partial sum. One program per
    pair, chunk and tile of the block's keys. dk, dv: `[B, S, H, D and DV]`; ADDS: they have gradients already. parts:
    of gradients of q, and in `second` of the factors, or NO_PARTS. Where there are some, BLOCK_N holds a whole block.
    inverses: of units of the gradients of the logits, where parts are float16, or None.
    """
    tiles = tl.cdiv(BLOCK_SIZE, BLOCK_N)
    pair, slot, first_entry, begin, length = find_chunk(tl.program_id(0) // tiles, lists, CHUNK)
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
    num_heads = lists.kv_heads * REPEATS * GROUP
    q_ptr += row * q_strides[0]
    dout_ptr += row * dout_strides[0]
    lse_ptr += row * num_heads * place.seqlen_q
    delta_ptr += row * num_heads * place.seqlen_q
    if inverses_ptr is not None:
        inverses_ptr += row * num_heads * place.seqlen_q
    inputs = (q_ptr, factors_ptr, lse_ptr, delta_ptr, inverses_ptr, dout_ptr, q_strides, factors_strides, dout_strides)
    finite_k, _ = split_finite(k)
    largest = tl.max(tl.abs(finite_k.to(tl.float32)), 1)  # [BLOCK_N]
    scaled_k, unit = k, 1.0
    if inverses_ptr is not None:
        # The inverse is a power of two, so no bit of a key is lost.
        unit, inverse = find_unit(tl.max(largest, 0) * 4096)
        scaled_k = (k.to(tl.float32) * inverse).to(k.dtype)
    entry = load_entries(entries_ptr, 0, num_rows, GROUP, BLOCK_M)
    for first_row in tl.range(0, tl.minimum(first_far, num_rows), BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_members(
            inputs, k, v, finite_k, largest, dk, dv, entry, first_row, num_rows, pair, row, kv_head,
            keys, key_mask, offset, parts, place, lists, scale, GROUP, REPEATS, NUM_SELECTED, CAUSAL,
            WIDE, True, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following
    for first_row in tl.range(first_far, num_rows, BLOCK_M):
        following = load_entries(entries_ptr, first_row + BLOCK_M, num_rows, GROUP, BLOCK_M)
        dk, dv = _add_members(
            inputs, k, v, scaled_k, unit, dk, dv, entry, first_row, num_rows, pair, row, kv_head, keys,
            key_mask, offset, parts, place, lists, scale, GROUP, REPEATS, NUM_SELECTED, CAUSAL, WIDE,
            False, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        entry = following
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
    k,
    v,
    scaled_k,
    unit,
    dk,
    dv,
    entry,
    first_row,
    num_rows,
    pair,
    row,
    kv_head,
    keys,
    key_mask,
    offset,
    parts,
    place,
    lists,
    scale,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """dk and dv with what a tile of members adds. Not MASKED: all of them read all of the keys. scaled_k: k as
    multiples of unit, for parts; or MASKED as it is, and unit the largest element of every key, so that each member has
    a unit by what it reads.
    """
    q_ptr, factors_ptr, lse_ptr, delta_ptr, inverses_ptr, dout_ptr, q_strides, factors_strides, dout_strides = inputs
    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    token, chooser, head = find_members(entry, rows, kv_head, lists, GROUP, REPEATS, NUM_SELECTED)
    positions = offset + token
    if WIDE:
        token, head = token.to(tl.int64), head.to(tl.int64)
    offsets = token * q_strides[1] + head * q_strides[2]
    q = load_rows(q_ptr, offsets, 1, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    offsets = token * dout_strides[1] + head * dout_strides[2]
    dout = load_rows(dout_ptr, offsets, 1, row_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    places_of_lse = head * place.seqlen_q + token
    # Rows that are none add nothing: their q and dout are 0.
    lse = tl.load(lse_ptr + places_of_lse, mask=row_mask, other=0.0)
    delta = tl.load(delta_ptr + places_of_lse, mask=row_mask, other=0.0)
    # Where lse is -inf, all logits are: a number makes their weights 0. Its product with log2(e) is one too.
    shift = tl.maximum(lse, -2.0e38, propagate_nan=tl.PropagateNan.ALL) * -1.4426950408889634
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if factors_ptr is not None:
        factor = load_factors(factors_ptr, factors_strides, row, token, chooser, entry, row_mask, NUM_SELECTED)
    scale_log2 = scale * 1.4426950408889634 * factor

    products = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
    weights = tl.exp2(tl.fma(products, scale_log2[None, :], shift[None, :]))
    dweights = tl.dot(v, tl.trans(dout), input_precision='ieee')
    dlogits = weights * (dweights - delta[None, :])
    logits = products * scale
    if MASKED:
        read = key_mask[:, None] & row_mask[None, :]
        if CAUSAL:
            read = read & (keys[:, None] <= positions[None, :])
        weights = tl.where(read, weights, 0.0)
        dlogits = tl.where(read, dlogits, 0.0)
        logits = tl.where(read, logits, 0.0)
        # A query that is not finite must not reach the keys that it does not read.
        q, _ = split_finite(q)
    if parts.out is not None:
        places = (pair * lists.num_entries + entry) * GROUP + rows % GROUP
        if parts.second is not None:
            tl.store(parts.second + places, tl.sum(dlogits * logits, 0), mask=row_mask)
    if factors_ptr is not None:
        dlogits *= factor[None, :]
    dv = add_product(weights.to(dout.dtype), dout, dv)
    dk = add_product(dlogits.to(q.dtype), q, dk)
    if parts.out is not None:
        units = tl.full([BLOCK_M], 1.0, tl.float32)
        if inverses_ptr is not None:
            inverse = tl.load(inverses_ptr + places_of_lse, mask=row_mask, other=0.0)
            if factors_ptr is not None:
                # Not without limits: the inverse has to remain a number.
                inverse *= find_unit(tl.maximum(tl.abs(factor), 5.9604644775390625e-08) * 4096)[1]
                inverse = tl.maximum(inverse, 1.1754943508222875e-38)
            if MASKED:
                unit, inverse_of_k = find_unit(tl.max(tl.where(read, unit[:, None], 0.0), 0) * 4096)
                dlogits *= inverse_of_k[None, :]
            # Neither 0, which says that there is no part, nor more than invert_power takes.
            units = tl.maximum(unit * invert_power(inverse), 1.1754943508222875e-38)
            units = tl.minimum(units, 8.507059173023462e37)
            dlogits *= inverse[None, :]
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        dq = add_product(tl.trans(dlogits.to(scaled_k.dtype)), scaled_k, dq)
        store_part(parts, places, dq, units, row_mask, HEAD_DIM, BLOCK_D, True)
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
    for chunk in tl.range(0, tl.cdiv(length, CHUNK)):
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
