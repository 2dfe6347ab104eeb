"""Kernels of selected attention in which neighbouring queries fill a tile together and share what they read.

A query with few heads leaves most rows of a tile empty, and neighbours with many heads may have chosen the same. So a
program has several neighbours and goes in order through the blocks that at least one of them chose (`Sharing`). Shapes
and names are those of the kernels per query.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import is_finite
from native_sparse_attention.ops._triton.placement import load_extent, locate_queries
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, split_finite, store_rows
from native_sparse_attention.ops.selected_attention.triton.choice import load_choices
from native_sparse_attention.ops.selected_attention.triton.sharing import load_flag


@triton.jit
def neighbours_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    indices_ptr,
    factors_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    indices_strides,
    factors_strides,
    out_strides,
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
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
    UNION: tl.constexpr,
):
    """One program per tile of BLOCK_M / BLOCK_G queries and per chooser; BLOCK_G holds the heads of a group.
    sharing: tiles without a flag are left to the kernel per query. k_tiles, v_tiles: as in that one.
    """
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    sequence, row, query_start, first_query, num_queries, num_keys, offset = locate_queries(
        sharing.first_tile + tl.program_id(0), place, BLOCK_T
    )
    if first_query >= num_queries:
        return
    is_shared = 1
    if sharing.flags is not None:
        is_shared = load_flag(sharing, tl.program_id(0), tl.program_id(1), tl.num_programs(1))
    if is_shared == 0:
        return
    _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    row, chooser = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    queries, heads, mask = _rows_of_tile(first_query, num_queries, chooser, GROUP, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr += row * k_strides[0] + chooser // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + chooser // REPEATS * v_strides[2]
    q_ptr += row * q_strides[0]
    q = load_rows(q_ptr, tokens * q_strides[1] + heads * q_strides[2], 1, mask, HEAD_DIM, BLOCK_D)
    indices_ptr += row * indices_strides[0] + chooser * indices_strides[2]
    members = first_query + tl.arange(0, BLOCK_T)
    member_mask = members < num_queries
    member_tokens = (query_start + members).to(tl.int64)
    choices = 0
    factors = 0
    if factors_ptr is not None:
        choices = load_choices(indices_ptr, member_tokens * indices_strides[1], member_mask, NUM_SELECTED, BLOCK_S)
        factors_ptr += row * factors_strides[0] + chooser * factors_strides[2]
        factors = _load_factors(factors_ptr, member_tokens * factors_strides[1], member_mask, NUM_SELECTED, BLOCK_S)

    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    in_unions = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser) * UNION
    blocks_ptr = sharing.blocks + in_unions
    members_ptr = sharing.members + in_unions + in_unions // UNION
    num_blocks = tl.load(sharing.counts + in_unions // UNION * 2)
    num_whole = tl.load(sharing.counts + in_unions // UNION * 2 + 1)
    pair = row * (tl.num_programs(1) // REPEATS) + chooser // REPEATS
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, chooser // REPEATS, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    if not UNMASKED or not is_finite(sharing.infinite, pair, sharing.num_chunks):
        num_whole = 0
    if UNMASKED:
        for step in tl.range(0, num_whole * SPLIT):
            row_max, total, out = _attend(
                q, source, blocks_ptr, members_ptr, choices, factors, row_max, total, out, step, num_keys, positions,
                scale, factors_ptr is not None, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S,
                BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
    for step in tl.range(num_whole * SPLIT, num_blocks * SPLIT):
        row_max, total, out = _attend(
            q, source, blocks_ptr, members_ptr, choices, factors, row_max, total, out, step, num_keys, positions, scale,
            factors_ptr is not None, True, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G,
            BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    out_ptr += row * out_strides[0]
    offsets = tokens * out_strides[1] + heads * out_strides[2]
    store_rows(out_ptr, offsets, 1, out / total[:, None], mask, VALUE_DIM, BLOCK_DV)
    num_heads = tl.num_programs(1) * GROUP
    tl.store(lse_ptr + (row * num_heads + heads) * place.seqlen_q + tokens, lse, mask=mask)


@triton.jit
def _attend(
    q,
    source,
    blocks_ptr,
    members_ptr,
    choices,
    factors,
    row_max,
    total,
    out,
    step,
    num_keys,
    positions,
    scale,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
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
    WIDE: tl.constexpr,
):
    """Adds a tile of keys to a running softmax: part step % SPLIT of block step // SPLIT of the union. Not MASKED: who
    chose the block reads all of the tile, and all of it is finite.
    """
    block, chosen, first, keys, key_mask = _open_step(
        blocks_ptr, members_ptr, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, BLOCK_G, BLOCK_N
    )
    k, v = _load_keys(source, first, key_mask, MASKED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE)
    scale_log2 = tl.full([BLOCK_T * BLOCK_G], scale * 1.4426950408889634, tl.float32)
    if SCALED:
        scale_log2 *= _for_heads(_pick(factors, _find_slot(choices, block, BLOCK_S), BLOCK_S), BLOCK_T, BLOCK_G)
    read = chosen[:, None] & key_mask[None, :]
    if MASKED and CAUSAL:
        read = read & (keys[None, :] <= positions[:, None])
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    logits = tl.where(read, products * scale_log2[:, None], float('-inf'))
    if MASKED:
        v, taint = split_finite(v)
        out += tl.sum(tl.where(read, taint[None, :], 0.0), 1)[:, None]
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    weights = tl.exp2(tl.fma(products, scale_log2[:, None], -reference[:, None]))
    weights = tl.where(read, weights, 0.0)
    rescale = tl.exp2(row_max - reference)
    total = total * rescale + tl.sum(weights, 1)
    out = add_product(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, total, out


@triton.jit
def _open_step(
    blocks_ptr,
    members_ptr,
    step,
    num_keys,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The block of a step, which rows of the tile chose it, its first key and all of them, and which of these there
    are.
    """
    place = step // SPLIT
    block = tl.load(blocks_ptr + place)
    members = tl.load(members_ptr + place + 1) - tl.load(members_ptr + place)
    chosen = (members >> (tl.arange(0, BLOCK_T * BLOCK_G) // BLOCK_G).to(tl.int64)) & 1
    first = block * BLOCK_SIZE + step % SPLIT * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    key_mask = tl.full([BLOCK_N], 1, tl.int1)
    if MASKED:
        key_mask = keys < tl.minimum((block + 1) * BLOCK_SIZE, num_keys)
    return block, chosen != 0, first, keys, key_mask


@triton.jit
def _load_keys(
    source,
    first,
    mask,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """k `[BLOCK_N, BLOCK_D]` and v `[BLOCK_N, BLOCK_DV]` of a step. source: where they are."""
    k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, k_stride, v_stride, key_start = source
    first += key_start
    if MASKED:
        rows = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, rows, k_stride, mask, HEAD_DIM, BLOCK_D, WIDE)
        v = load_rows(v_ptr, rows, v_stride, mask, VALUE_DIM, BLOCK_DV, WIDE)
    else:
        k = load_tile(k_tiles, k_ptr, row, first, kv_head, k_stride, True, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
        v = load_tile(v_tiles, v_ptr, row, first, kv_head, v_stride, True, VALUE_DIM, BLOCK_N, BLOCK_DV, WIDE)
    return k, v


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
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
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
    is_shared = 1
    if sharing.flags is not None:
        is_shared = load_flag(sharing, tl.program_id(0), tl.program_id(1), tl.num_programs(1))
    if is_shared == 0:
        return
    _, key_start, _ = load_extent(place.cu_seqlens_k, sequence, place.seqlen_k, place.num_sequences)
    row, chooser = row.to(tl.int64), tl.program_id(1).to(tl.int64)
    queries, heads, mask = _rows_of_tile(first_query, num_queries, chooser, GROUP, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr += row * k_strides[0] + chooser // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + chooser // REPEATS * v_strides[2]
    indices_ptr += row * indices_strides[0] + chooser * indices_strides[2]
    members = first_query + tl.arange(0, BLOCK_T)
    member_mask = members < num_queries
    member_tokens = (query_start + members).to(tl.int64)
    choices = 0
    factors = 0
    if factors_ptr is not None:
        choices = load_choices(indices_ptr, member_tokens * indices_strides[1], member_mask, NUM_SELECTED, BLOCK_S)
        factors_ptr += row * factors_strides[0] + chooser * factors_strides[2]
        factors = _load_factors(factors_ptr, member_tokens * factors_strides[1], member_mask, NUM_SELECTED, BLOCK_S)
    q_ptr += row * q_strides[0]
    out_ptr += row * out_strides[0]
    dout_ptr += row * dout_strides[0]
    q = load_rows(q_ptr, tokens * q_strides[1] + heads * q_strides[2], 1, mask, HEAD_DIM, BLOCK_D)
    dout = load_rows(dout_ptr, tokens * dout_strides[1] + heads * dout_strides[2], 1, mask, VALUE_DIM, BLOCK_DV)
    out = load_rows(out_ptr, tokens * out_strides[1] + heads * out_strides[2], 1, mask, VALUE_DIM, BLOCK_DV)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    places_of_lse = (row * tl.num_programs(1) * GROUP + heads) * place.seqlen_q + tokens
    lse = tl.load(lse_ptr + places_of_lse, mask=mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if dlse_ptr is not None:
        offsets = row * dlse_strides[0] + heads * dlse_strides[1] + tokens * dlse_strides[2]
        dlse = tl.load(dlse_ptr + offsets, mask=mask, other=0.0)
        # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
        dlse = tl.where(lse == float('-inf'), 0.0, dlse)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    mean_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    missing = tl.zeros([BLOCK_M], tl.float32)
    dfactors = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    mean_logits = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
    slots = tl.arange(0, BLOCK_S)
    in_unions = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser) * UNION
    blocks_ptr = sharing.blocks + in_unions
    members_ptr = sharing.members + in_unions + in_unions // UNION
    num_blocks = tl.load(sharing.counts + in_unions // UNION * 2)
    num_whole = tl.load(sharing.counts + in_unions // UNION * 2 + 1)
    pair = row * (tl.num_programs(1) // REPEATS) + chooser // REPEATS
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, chooser // REPEATS, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    if not UNMASKED or not is_finite(sharing.infinite, pair, sharing.num_chunks):
        num_whole = 0
    sums = (dq, mean_k, missing, dfactors, mean_logits)
    if UNMASKED:
        for step in tl.range(0, num_whole * SPLIT):
            sums = _differentiate(
                q, dout, source, blocks_ptr, members_ptr, choices, factors, lse_log2, delta, dlse, sums, step, num_keys,
                positions, scale, factors_ptr is not None, dfactors_ptr is not None, False, CAUSAL, BLOCK_SIZE, SPLIT,
                HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
    for step in tl.range(num_whole * SPLIT, num_blocks * SPLIT):
        sums = _differentiate(
            q, dout, source, blocks_ptr, members_ptr, choices, factors, lse_log2, delta, dlse, sums, step, num_keys,
            positions, scale, factors_ptr is not None, dfactors_ptr is not None, True, CAUSAL, BLOCK_SIZE, SPLIT,
            HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
    dq, mean_k, missing, dfactors, mean_logits = sums

    dq = (dq - missing[:, None] * mean_k) * scale
    dq_ptr += row * dq_strides[0]
    store_rows(dq_ptr, tokens * dq_strides[1] + heads * dq_strides[2], 1, dq, mask, HEAD_DIM, BLOCK_D)
    tl.store(delta_ptr + places_of_lse, delta + missing - dlse, mask=mask)
    if dfactors_ptr is not None:
        dfactors = tl.where(mask[:, None], dfactors - missing[:, None] * mean_logits, 0.0)
        dfactors = tl.sum(tl.reshape(dfactors, [BLOCK_T, BLOCK_G, BLOCK_S]), 1)  # [BLOCK_T, BLOCK_S]
        rows = (row * place.seqlen_q + member_tokens) * tl.num_programs(1) + chooser
        dfactors_mask = member_mask[:, None] & (slots < NUM_SELECTED)[None, :]
        tl.store(dfactors_ptr + (rows * NUM_SELECTED)[:, None] + slots[None, :], dfactors, mask=dfactors_mask)


@triton.jit
def _differentiate(
    q,
    dout,
    source,
    blocks_ptr,
    members_ptr,
    choices,
    factors,
    lse_log2,
    delta,
    dlse,
    sums,
    step,
    num_keys,
    positions,
    scale,
    SCALED: tl.constexpr,
    DIFFERENTIATES_FACTORS: tl.constexpr,
    MASKED: tl.constexpr,
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
    WIDE: tl.constexpr,
):
    """What a tile of keys adds to the sums; steps and MASKED as in `_attend`."""
    dq, mean_k, missing, dfactors, mean_logits = sums
    block, chosen, first, keys, key_mask = _open_step(
        blocks_ptr, members_ptr, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, BLOCK_G, BLOCK_N
    )
    k, v = _load_keys(source, first, key_mask, MASKED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE)
    factor = tl.full([BLOCK_T * BLOCK_G], 1.0, tl.float32)
    if SCALED:
        slot = _find_slot(choices, block, BLOCK_S)  # [BLOCK_T]
        # That of a block that a query does not read may be anything.
        factor = tl.where(chosen, _for_heads(_pick(factors, slot, BLOCK_S), BLOCK_T, BLOCK_G), 0.0)
    read = chosen[:, None] & key_mask[None, :]
    if MASKED and CAUSAL:
        read = read & (keys[None, :] <= positions[:, None])
    logits = tl.where(read, tl.dot(q, tl.trans(k), input_precision='ieee') * scale, 0.0)
    factor_log2 = factor * 1.4426950408889634
    weights = tl.exp2(tl.fma(logits, factor_log2[:, None], -lse_log2[:, None]))
    weights = tl.where(read, weights, 0.0)
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    dlogits = tl.where(read, weights * (dweights - delta[:, None]), 0.0)
    missing += tl.sum(dlogits, 1)
    dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if DIFFERENTIATES_FACTORS:
        slots = tl.arange(0, BLOCK_S)
        is_slot = (slots[None, :] == _for_heads(slot, BLOCK_T, BLOCK_G)[:, None]) & chosen[:, None]
        dfactors += tl.where(is_slot, tl.sum(dlogits * logits, 1)[:, None], 0.0)
        mean_logits += tl.where(is_slot, tl.sum(weights * logits, 1)[:, None], 0.0)
    if MASKED:
        k, _ = split_finite(k)
    dq = add_product((dlogits * factor[:, None]).to(k.dtype), k, dq)
    mean_k = add_product((weights * factor[:, None]).to(k.dtype), k, mean_k)
    return dq, mean_k, missing, dfactors, mean_logits


@triton.jit
def _rows_of_tile(first_query, num_queries, chooser, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Query in its sequence and head of every row, and whether there are such: every query with every head."""
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // BLOCK_G
    return queries, chooser * GROUP + rows % BLOCK_G, (queries < num_queries) & (rows % BLOCK_G < GROUP)


@triton.jit
def _load_factors(factors_ptr, rows, mask, NUM_SELECTED: tl.constexpr, BLOCK_S: tl.constexpr):
    slots = tl.arange(0, BLOCK_S)
    mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    return tl.load(factors_ptr + rows[:, None] + slots[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _for_heads(values, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """What a query has, [BLOCK_T], for each of its rows, [BLOCK_M]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [BLOCK_T, BLOCK_G]), [BLOCK_T * BLOCK_G])


@triton.jit
def _find_slot(choices, block, BLOCK_S: tl.constexpr):
    """Where a block first stands in each query's indices, BLOCK_S where it does not."""
    return tl.min(tl.where(choices == block, tl.arange(0, BLOCK_S)[None, :], BLOCK_S), 1)


@triton.jit
def _pick(factors, slot, BLOCK_S: tl.constexpr):
    """The factor at each query's slot, 0 where it has none."""
    slots = tl.arange(0, BLOCK_S)
    return tl.sum(tl.where(slots[None, :] == slot[:, None], factors, 0.0), 1)
