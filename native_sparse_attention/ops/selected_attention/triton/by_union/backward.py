"""Gradients of q and of the factors where neighbouring queries fill a tile together: see neighbours.py."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import is_small_tile
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, split_finite
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import load_for_gradients, store_gradients
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    count_in_union,
    find_slot,
    find_union,
    for_heads,
    is_left_out,
    load_choices_and_factors,
    load_counts,
    load_entry,
    load_keys,
    members_of_tile,
    open_step,
    pick_factor,
    rows_of_tile,
)


@triton.jit
def neighbours_dq_kernel(
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
    gate_ptr,
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
    gate_strides,
    dq_strides,
    place,
    sharing,
    scale,
    softcap,
    GROUP: tl.constexpr,
    REPEATS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    UNION: tl.constexpr,
):
    """dfactors: float32 `[1, B, T, HI, n]`, or None. The gradients of factors of several heads are added at the end,
    when each head knows by how much its delta was off.
    """
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(
        sharing.first_tile + tl.program_id(0), place, BLOCK_T
    )
    if first_query >= num_queries:
        return
    # Before the flag, so that nothing waits for it.
    counts = load_counts(sharing)
    if is_left_out(sharing):
        return
    _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    queries, heads, mask = rows_of_tile(first_query, num_queries, index_head, GROUP, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr += row * k_strides[0] + index_head // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + index_head // REPEATS * v_strides[2]
    member_tokens, member_mask = members_of_tile(query_start, first_query, num_queries, BLOCK_T)
    choices, factors = load_choices_and_factors(
        indices_ptr, factors_ptr, indices_strides, factors_strides, row, index_head, member_tokens, member_mask,
        NUM_SELECTED, BLOCK_S,
    )  # fmt: skip
    rows = (row, tokens, heads, mask)
    pointers = (q_ptr, out_ptr, dout_ptr, dlse_ptr, lse_ptr)
    strides = (q_strides, out_strides, dout_strides, dlse_strides)
    q, dout, delta, places, lse, lse_log2, dlse = load_for_gradients(
        pointers, strides, rows, tl.num_programs(1), place, GROUP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV
    )
    HAS_DLSE: tl.constexpr = dlse_ptr is not None

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    missing = tl.zeros([BLOCK_M], tl.float32)
    dfactors = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    mean_logits = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    slots = tl.arange(0, BLOCK_S)
    blocks_ptr, members_ptr = find_union(sharing, index_head, UNION)
    pair = row * (tl.num_programs(1) // REPEATS) + index_head // REPEATS
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, index_head // REPEATS, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    are_small = is_small_tile(q) and is_small_tile(dout)
    in_union = count_in_union(counts, sharing, pair, are_small, UNMASKED)
    sums = (dq, mean_k, missing, dfactors, mean_logits)
    sums = _go_through_union(
        (q, dout, source, choices, factors, lse_log2, delta, dlse), (blocks_ptr, members_ptr, in_union), sums, num_keys,
        positions, scale, softcap, factors_ptr is not None, dfactors_ptr is not None, HAS_DLSE, UNMASKED, CAUSAL,
        BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
    )  # fmt: skip
    dq, mean_k, missing, dfactors, mean_logits = sums
    store_gradients(
        dq_ptr, delta_ptr, gate_ptr, dq_strides, gate_strides, rows, places, (dq, mean_k, missing), delta, lse, dlse,
        scale, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if dfactors_ptr is not None:
        dfactors = tl.where(mask[:, None], dfactors - missing[:, None] * mean_logits, 0.0)
        dfactors = tl.sum(tl.reshape(dfactors, [BLOCK_T, BLOCK_G, BLOCK_S]), 1)  # [BLOCK_T, BLOCK_S]
        rows_of_factors = (row * place.seqlen_q + member_tokens) * tl.num_programs(1) + index_head
        dfactors_mask = member_mask[:, None] & (slots < NUM_SELECTED)[None, :]
        tl.store(
            dfactors_ptr + (rows_of_factors * NUM_SELECTED)[:, None] + slots[None, :], dfactors, mask=dfactors_mask
        )


@triton.jit
def _go_through_union(
    inputs,
    union,
    sums,
    num_keys,
    positions,
    scale,
    softcap,
    SCALED: tl.constexpr,
    DIFFERENTIATES_FACTORS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    UNMASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """The sums over a tile's union: first its whole blocks, without masks, then others, and with care those that may
    not be finite. inputs: what `_differentiate` takes of the tile. union: pointers from `find_union`, and counts from
    `count_in_union`. SCALED: there are factors; DIFFERENTIATES_FACTORS: their gradients are wanted.
    """
    blocks_ptr, members_ptr, counts = union
    num_blocks, num_clean, num_whole = counts
    entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
    if UNMASKED:
        for step in tl.range(0, num_whole * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            sums = _differentiate(
                inputs, entry, sums, step, num_keys, positions, scale, softcap, SCALED, DIFFERENTIATES_FACTORS,
                HAS_DLSE, False, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G,
                BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
        for step in tl.range(num_whole * SPLIT, num_clean * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            sums = _differentiate(
                inputs, entry, sums, step, num_keys, positions, scale, softcap, SCALED, DIFFERENTIATES_FACTORS,
                HAS_DLSE, True, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G,
                BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS,
            )  # fmt: skip
            entry = following
    for step in tl.range(num_clean * SPLIT, num_blocks * SPLIT):
        following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
        sums = _differentiate(
            inputs, entry, sums, step, num_keys, positions, scale, softcap, SCALED, DIFFERENTIATES_FACTORS, HAS_DLSE,
            True, True, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D,
            BLOCK_DV, INT64_OFFSETS,
        )  # fmt: skip
        entry = following
    return sums


@triton.jit
def _differentiate(
    inputs,
    entry,
    sums,
    step,
    num_keys,
    positions,
    scale,
    softcap,
    SCALED: tl.constexpr,
    DIFFERENTIATES_FACTORS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """What a tile of keys adds to the sums; steps, MASKED and CONTAIN_NONFINITE as in `_attend`."""
    q, dout, source, choices, factors, lse_log2, delta, dlse = inputs
    dq, mean_k, missing, dfactors, mean_logits = sums
    block, chosen, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, BLOCK_G, BLOCK_N
    )
    k, v = load_keys(source, first, key_mask, MASKED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, INT64_OFFSETS)
    factor = tl.full([BLOCK_T * BLOCK_G], 1.0, tl.float32)
    if SCALED:
        slot = find_slot(choices, block, BLOCK_S)  # [BLOCK_T]
        # That of a block that a query does not read may be anything.
        factor = tl.where(chosen, for_heads(pick_factor(factors, slot, BLOCK_S), BLOCK_T, BLOCK_G), 0.0)
    read = chosen[:, None] & key_mask[None, :]
    if MASKED and CAUSAL:
        read = read & (keys[None, :] <= positions[:, None])
    # What decides for a whole row need not be asked of every product, all of which are finite then.
    BY_ROW: tl.constexpr = not MASKED and not SCALED
    shift = tl.where(chosen, -lse_log2, float('-inf')) if BY_ROW else -lse_log2
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')
    if not SCALED and softcap is None:
        weights = tl.exp2(tl.fma(logits, scale * 1.4426950408889634, shift[:, None]))
    else:
        logits = tl.where(read, logits * scale, 0.0)
        if softcap is None:
            weights = tl.exp2(tl.fma(logits, (factor * 1.4426950408889634)[:, None], shift[:, None]))
        else:
            scaled = logits * factor[:, None]
            capped = cap_logits(scaled, softcap)
            weights = tl.exp2(tl.fma(capped, 1.4426950408889634, shift[:, None]))
    if not BY_ROW:
        weights = tl.where(read, weights, 0.0)
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    dlogits = weights * (dweights - delta[:, None])
    if not BY_ROW:
        dlogits = tl.where(read, dlogits, 0.0)
    missing += tl.sum(dlogits, 1)
    if HAS_DLSE:
        dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if softcap is not None:
        slope = cap_slope(scaled, softcap)
        dlogits *= slope
        weights *= slope
    if DIFFERENTIATES_FACTORS:
        slots = tl.arange(0, BLOCK_S)
        is_slot = (slots[None, :] == for_heads(slot, BLOCK_T, BLOCK_G)[:, None]) & chosen[:, None]
        dfactors += tl.where(is_slot, tl.sum(dlogits * logits, 1)[:, None], 0.0)
        mean_logits += tl.where(is_slot, tl.sum(weights * logits, 1)[:, None], 0.0)
    if CONTAIN_NONFINITE:
        k, _ = split_finite(k)
    dq = add_product((dlogits * factor[:, None]).to(k.dtype), k, dq)
    mean_k = add_product((weights * factor[:, None]).to(k.dtype), k, mean_k)
    return dq, mean_k, missing, dfactors, mean_logits
