"""Backward kernel for q and block_scale with one program per query tile and index head (see by_union/forward.py)."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import is_small_tile
from native_sparse_attention.ops._triton.softcap import cap_logits, cap_slope
from native_sparse_attention.ops._triton.tiles import add_product, split_finite
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton.arguments import KeySource
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import load_for_gradients, store_gradients
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    count_steps,
    find_slot,
    find_union,
    is_skipped,
    load_counts,
    load_entry,
    load_indices_and_factors,
    load_keys,
    locate_rows,
    locate_tokens,
    open_step,
    pick_factor,
    repeat_for_heads,
)


@triton.jit
def union_dq_kernel(
    tensors, strides, k_tiles, v_tiles, layout, union, scale, softcap, sizes: tl.constexpr, tile: tl.constexpr
):
    """Compute dq and delta of BLOCK_M / BLOCK_G queries with all heads of an index head.

    tensors, strides: `BackwardTensors`, `Strides`; dfactors: `[1, B, T, HI, n]`. The gradients of factors are
    summed over heads at the end, when the error of each head's delta is known.
    """
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_S: tl.constexpr = tile.block_s
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(
        union.first_tile + tl.program_id(0), layout, BLOCK_T
    )
    if first_query >= num_queries:
        return
    # Loaded before the flag, so that no load waits for it.
    counts = load_counts(union)
    if is_skipped(union):
        return
    _, key_start, _ = load_extent(layout.cu_seqlens_k, sequence, layout.seqlen_k, layout.num_sequences)
    row, index_head = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    queries, heads, mask = locate_rows(first_query, num_queries, index_head, sizes.group, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr = tensors.k + (row * strides.k[0] + index_head // sizes.repeats * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + index_head // sizes.repeats * strides.v[2])
    tile_tokens, token_mask = locate_tokens(query_start, first_query, num_queries, BLOCK_T)
    blocks, factors = load_indices_and_factors(
        tensors, strides, row, index_head, tile_tokens, token_mask, NUM_SELECTED, BLOCK_S
    )
    rows = (row, tokens, heads, mask)
    q, dout, delta, offsets, lse, lse_log2, dlse = load_for_gradients(
        tensors, strides, rows, tl.num_programs(1), layout, sizes, tile
    )

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    delta_error = tl.zeros([BLOCK_M], tl.float32)
    dfactors = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    mean_logits = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    slots = tl.arange(0, BLOCK_S)
    blocks_ptr, bits_ptr = find_union(union, index_head, tile.union_size)
    pair = row * (tl.num_programs(1) // sizes.repeats) + index_head // sizes.repeats
    source = KeySource(
        k_ptr, v_ptr, k_tiles, v_tiles, row, index_head // sizes.repeats, strides.k[1], strides.v[1], key_start
    )
    # In float32 the products dominate, so masks cost nothing and one loop saves seconds of compilation.
    UNMASKED: tl.constexpr = BLOCK_SIZE % tile.block_n == 0 and q.dtype != tl.float32
    are_small = is_small_tile(q) and is_small_tile(dout)
    steps = count_steps(counts, union, pair, are_small, UNMASKED)
    inputs = (q, dout, source, blocks, factors, lse_log2, delta, dlse, num_keys, positions, scale, softcap)
    sums = _add_union(
        inputs, (blocks_ptr, bits_ptr, steps), (dq, mean_k, delta_error, dfactors, mean_logits),
        HAS_FACTORS=tensors.factors is not None, HAS_DFACTORS=tensors.dfactors is not None,
        HAS_DLSE=tensors.dlse is not None, UNMASKED=UNMASKED, sizes=sizes, tile=tile,
    )  # fmt: skip
    dq, mean_k, delta_error, dfactors, mean_logits = sums
    store_gradients(
        tensors, strides, rows, offsets, (dq, mean_k, delta_error), delta, lse, dlse, scale, sizes.head_dim, BLOCK_D
    )
    if tensors.dfactors is not None:
        dfactors = tl.where(mask[:, None], dfactors - delta_error[:, None] * mean_logits, 0.0)
        dfactors = tl.sum(tl.reshape(dfactors, [BLOCK_T, BLOCK_G, BLOCK_S]), 1)  # [BLOCK_T, BLOCK_S]
        index_rows = (row * layout.seqlen_q + tile_tokens) * tl.num_programs(1) + index_head
        dfactors_mask = token_mask[:, None] & (slots < NUM_SELECTED)[None, :]
        dfactors_ptr = tensors.dfactors + (index_rows * NUM_SELECTED)[:, None] + slots[None, :]
        tl.store(dfactors_ptr, dfactors, mask=dfactors_mask)


@triton.jit
def _add_union(
    inputs,
    union,
    sums,
    HAS_FACTORS: tl.constexpr,
    HAS_DFACTORS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    UNMASKED: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Sum over a tile's union: full blocks without masks, other blocks, and blocks that may not be finite.

    inputs: what `_differentiate` takes of the tile. union: pointers from `find_union` and counts from `count_steps`.
    HAS_DFACTORS: gradients of the factors are requested.
    """
    SPLIT: tl.constexpr = (sizes.block_size + tile.block_n - 1) // tile.block_n
    blocks_ptr, bits_ptr, counts = union
    num_blocks, num_clean, num_full = counts
    entry = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, SPLIT)
    if UNMASKED:
        for step in tl.range(0, num_full * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            sums = _differentiate(
                inputs, entry, sums, step, HAS_FACTORS, HAS_DFACTORS, HAS_DLSE, MASKED=False, CONTAIN_NONFINITE=False,
                sizes=sizes, tile=tile,
            )  # fmt: skip
            entry = following
        for step in tl.range(num_full * SPLIT, num_clean * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            sums = _differentiate(
                inputs, entry, sums, step, HAS_FACTORS, HAS_DFACTORS, HAS_DLSE, MASKED=True, CONTAIN_NONFINITE=False,
                sizes=sizes, tile=tile,
            )  # fmt: skip
            entry = following
    for step in tl.range(num_clean * SPLIT, num_blocks * SPLIT):
        following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
        sums = _differentiate(
            inputs, entry, sums, step, HAS_FACTORS, HAS_DFACTORS, HAS_DLSE, MASKED=True, CONTAIN_NONFINITE=True,
            sizes=sizes, tile=tile,
        )  # fmt: skip
        entry = following
    return sums


@triton.jit
def _differentiate(
    inputs,
    entry,
    sums,
    step,
    HAS_FACTORS: tl.constexpr,
    HAS_DFACTORS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add a tile of keys to the sums; steps, MASKED and CONTAIN_NONFINITE are as in the forward kernel."""
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_S: tl.constexpr = tile.block_s
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    q, dout, source, blocks, factors, lse_log2, delta, dlse, num_keys, positions, scale, softcap = inputs
    dq, mean_k, delta_error, dfactors, mean_logits = sums
    block, is_selected, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, BLOCK_M, BLOCK_G, tile.block_n
    )
    k, v = load_keys(source, first, key_mask, MASKED, sizes, tile)
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_FACTORS:
        slot = find_slot(blocks, block, BLOCK_S)  # [BLOCK_T]
        # The factor of a block that a query does not read may be anything.
        picked = repeat_for_heads(pick_factor(factors, slot, BLOCK_S), BLOCK_T, BLOCK_G)
        factor = tl.where(is_selected, picked, 0.0)
    read = is_selected[:, None] & key_mask[None, :]
    if MASKED and sizes.causal:
        read = read & (keys[None, :] <= positions[:, None])
    # A mask per row instead of per product, since all products are finite then.
    BY_ROW: tl.constexpr = not MASKED and not HAS_FACTORS
    shift = tl.where(is_selected, -lse_log2, float('-inf')) if BY_ROW else -lse_log2
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')
    if not HAS_FACTORS and softcap is None:
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
    delta_error += tl.sum(dlogits, 1)
    if HAS_DLSE:
        dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if softcap is not None:
        slope = cap_slope(scaled, softcap)
        dlogits *= slope
        weights *= slope
    if HAS_DFACTORS:
        slots = tl.arange(0, BLOCK_S)
        is_slot = (slots[None, :] == repeat_for_heads(slot, BLOCK_T, BLOCK_G)[:, None]) & is_selected[:, None]
        dfactors += tl.where(is_slot, tl.sum(dlogits * logits, 1)[:, None], 0.0)
        mean_logits += tl.where(is_slot, tl.sum(weights * logits, 1)[:, None], 0.0)
    if CONTAIN_NONFINITE:
        k, _ = split_finite(k)
    dq = add_product((dlogits * factor[:, None]).to(k.dtype), k, dq)
    mean_k = add_product((weights * factor[:, None]).to(k.dtype), k, mean_k)
    return dq, mean_k, delta_error, dfactors, mean_logits
