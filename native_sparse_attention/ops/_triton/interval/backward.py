"""Backward kernels of interval attention: one for the gradient of q, one for those of k and v.

The gradient of a logit is p * (dp - delta), where delta is the sum of p * dp over the keys of a row. It is commonly
taken as the product of the output and its gradient, but the output is rounded, and in rows of few keys that shows. So
the first kernel starts from that product, adds up by how much it is off, and corrects both its result and delta.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.interval.modifiers import find_exponents, is_kept, place_tile, row_of_marks
from native_sparse_attention.ops._triton.interval.tiles import (
    find_start,
    is_read_by,
    key_limits,
    key_range,
    load_keys,
    query_limits,
    query_range,
    reads_keys,
    split_range,
)
from native_sparse_attention.ops._triton.placement import (
    count_blocks,
    find_tile,
    load_extent,
    load_num_keys,
    load_position,
    locate_queries,
)
from native_sparse_attention.ops._triton.tiles import add_product, is_finite_tile, load_rows, split_finite, store_rows


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    dq_ptr,
    pairs_ptr,
    k_tiles,
    v_tiles,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dlse_strides,
    dq_strides,
    place,
    interval,
    scale,
    marks,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Shapes as in the forward kernel; dlse may be None, and is `[B, HQ, T]` like lse. pairs: float32 `[B, HQ, 2, T]`,
    what the other kernels take of a row: its log-sum-exp in bits, 0 where it reads nothing, and delta, where the
    gradient of a logit is p * (dp - delta).
    """
    sequence, row, query_start, first_query, num_queries, num_tokens, offset = locate_queries(
        tl.program_id(0), place, BLOCK_M // HEADS
    )
    if first_query >= num_queries:
        return
    _, key_start, num_keys = load_extent(place.cu_blocks, sequence, interval.num_keys, place.num_sequences)
    num_keys = tl.minimum(count_blocks(num_tokens, interval.block_size, interval.stride), num_keys)

    members = tl.arange(0, BLOCK_M)  # every query with every one of the heads
    queries = first_query + members // HEADS
    query_mask = queries < num_queries
    query_rows = query_start + queries
    positions = offset + queries
    row, first_head = row.to(tl.int64), tl.program_id(1).to(tl.int64) * HEADS
    heads = first_head + members % HEADS
    kv_head = first_head // GROUP
    keys = (k_tiles, row, kv_head, k_ptr + row * k_strides[0] + kv_head * k_strides[2], k_strides[1])
    values = (v_tiles, row, kv_head, v_ptr + row * v_strides[0] + kv_head * v_strides[2], v_strides[1])
    q_ptr += row * q_strides[0] + heads[:, None] * q_strides[2]
    out_ptr += row * out_strides[0] + heads[:, None] * out_strides[2]
    dout_ptr += row * dout_strides[0] + heads[:, None] * dout_strides[2]
    dq_ptr += row * dq_strides[0] + heads[:, None] * dq_strides[2]
    q = load_rows(q_ptr, query_rows, q_strides[1], query_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(dout_ptr, query_rows, dout_strides[1], query_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    out = load_rows(out_ptr, query_rows, out_strides[1], query_mask, VALUE_DIM, BLOCK_DV)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row_of_lse = (row * tl.num_programs(1) * HEADS + heads) * place.seqlen_q
    lse = tl.load(lse_ptr + row_of_lse + query_rows, mask=query_mask, other=0.0)
    lse_log2 = tl.where(lse == float('-inf'), 0.0, lse) * 1.4426950408889634
    pairs_ptr += 2 * row_of_lse
    tl.store(pairs_ptr + query_rows, lse_log2, mask=query_mask)
    dlse = tl.zeros([BLOCK_M], tl.float32)
    HAS_DLSE: tl.constexpr = dlse_ptr is not None
    if HAS_DLSE:
        dlse_ptr += row * dlse_strides[0] + heads * dlse_strides[1]
        dlse = tl.load(dlse_ptr + query_rows.to(tl.int64) * dlse_strides[2], mask=query_mask, other=0.0)
        # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
        dlse = tl.where(lse == float('-inf'), 0.0, dlse)

    last_position = offset + tl.minimum(first_query + BLOCK_M // HEADS, num_queries) - 1
    # As if the tile were full: queries that follow must not change in what order keys are gone through.
    end_position = offset + first_query + BLOCK_M // HEADS - 1
    first, last, full_first, full_last = key_range(
        interval, offset + first_query, last_position, end_position, num_keys
    )
    if interval.num_memory is not None and sequence < place.num_sequences:
        first = -interval.num_memory
        full_first = first
    tiles = split_range(first, last, full_first, full_last, BLOCK_N)
    end_tiles, num_tiles = tiles[4], tiles[5]
    limits = key_limits(interval, positions, last)
    rows = (row_of_marks(marks, row), heads, query_rows, query_mask)

    missing = tl.zeros([BLOCK_M], tl.float32)
    if marks.sinks is not None:
        # A sink is a key with a value of 0.
        missing = -delta * tl.exp2(tl.load(marks.sinks + heads) * 1.4426950408889634 - lse_log2)
    empty_sums = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32), missing)
    sums = empty_sums
    # In float32 care costs nothing beside the products, and a loop takes seconds to compile: there is only the last.
    if q.dtype != tl.float32:
        for tile in range(end_tiles):
            sums = _add_keys(
                q, dout, keys, values, sums, rows, lse_log2, delta, dlse, limits, tiles, tile,
                last, key_start, interval, scale, marks, HAS_DLSE, True, False, HEAD_DIM, VALUE_DIM, BLOCK_N,
                BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
        for tile in range(end_tiles, num_tiles):
            sums = _add_keys(
                q, dout, keys, values, sums, rows, lse_log2, delta, dlse, limits, tiles, tile,
                last, key_start, interval, scale, marks, HAS_DLSE, False, False, HEAD_DIM, VALUE_DIM, BLOCK_N,
                BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
    if q.dtype == tl.float32 or not is_finite_tile(sums[0] + sums[1]):
        # Perhaps for keys that some rows of the tile do not read: once more, with care.
        sums = empty_sums
        for tile in tl.range(num_tiles, num_stages=1):
            sums = _add_keys(
                q, dout, keys, values, sums, rows, lse_log2, delta, dlse, limits, tiles, tile,
                last, key_start, interval, scale, marks, HAS_DLSE, True, True, HEAD_DIM, VALUE_DIM, BLOCK_N,
                BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
    dq, mean_k, missing = sums
    dq = (dq - missing[:, None] * mean_k) * scale
    store_rows(dq_ptr, query_rows, dq_strides[1], dq, query_mask, HEAD_DIM, BLOCK_D)
    tl.store(pairs_ptr + place.seqlen_q + query_rows, delta + missing - dlse, mask=query_mask)


@triton.jit
def _add_keys(
    q,
    dout,
    keys,
    values,
    sums,
    rows,
    lse_log2,
    delta,
    dlse,
    limits,
    tiles,
    tile,
    last,
    key_start,
    interval,
    scale,
    marks,
    HAS_DLSE: tl.constexpr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds a tile of keys: to dq, with the delta that is off by `missing`, and to the mean of the keys, times which dq
    changes with delta. Not MASKED: every row reads all of it. CAREFUL: what is not finite reaches those rows alone that
    read it.
    """
    dq, mean_k, missing = sums
    start = find_start(tiles, tile, MASKED, CAREFUL, BLOCK_N)
    k = load_keys(keys, start, last, key_start, interval, MASKED, CAREFUL, HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
    v = load_keys(values, start, last, key_start, interval, MASKED, CAREFUL, VALUE_DIM, BLOCK_N, BLOCK_DV, WIDE)
    logits = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    place = place_tile(rows, key_start, start, last, BLOCK_N)
    exponents, slope, read = find_exponents(logits, lse_log2[:, None], scale, marks, place)
    if MASKED:
        read = read & reads_keys(interval, limits, start, BLOCK_N)
    weights = tl.exp2(tl.where(read, exponents, float('-inf')))
    dweights = tl.dot(dout, tl.trans(v), input_precision='ieee')
    if marks.seed is not None:
        dweights = tl.where(is_kept(marks, place), dweights * marks.keep_factor, 0.0)
    dlogits = weights * (dweights - delta[:, None])
    if CAREFUL:
        dlogits = tl.where(read, dlogits, 0.0)
        k, _ = split_finite(k)
    missing += tl.sum(dlogits, 1)
    if HAS_DLSE:
        dlogits = tl.fma(weights, dlse[:, None], dlogits)
    if marks.softcap is not None:
        slope = tl.where(read, slope, 0.0) if CAREFUL else slope
        dlogits *= slope
        weights *= slope
    dq = add_product(dlogits.to(k.dtype), k, dq)
    mean_k = add_product(weights.to(k.dtype), k, mean_k)
    return dq, mean_k, missing


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    pairs_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    place,
    interval,
    scale,
    marks,
    kv_heads,
    parts,
    JOINED: tl.constexpr,
    MEMORY: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dk, dv: `[parts, B, C, H, D and DV]`: the sum over the first HEADS query heads of a group, the next, and so on.
    One program per tile of keys, kv head and part. JOINED: with memory before the keys of every row, `[parts, B, M + C,
    H, D and DV]`. MEMORY: of the memory keys alone, with dk and dv `[parts, B * splits, M, H, D and DV]`, a split for
    every SPLIT queries.
    """
    # The first tiles of keys, which most queries read, go first, and heads that share queries together.
    tile = tl.program_id(0) // (kv_heads * parts)
    kv_head = tl.program_id(0) // parts % kv_heads
    part = tl.program_id(0) % parts
    if MEMORY:
        # Every query of the row reads these keys, wherever it stands. A program adds SPLIT queries.
        memory_tiles = tl.cdiv(interval.num_memory, BLOCK_N)
        splits = tl.cdiv(place.seqlen_q, SPLIT)
        stored_row = tile // memory_tiles
        row = stored_row // splits
        key_rows = tile % memory_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        stored_rows = key_rows
        key_mask = key_rows < interval.num_memory
        stored = key_mask
        keys = key_rows - interval.num_memory
        query_start = row * 0
        offset = row * 0
        first = (stored_row % splits) * SPLIT
        full_first = first
        last = tl.minimum(first + SPLIT, place.seqlen_q)
        if place.cu_seqlens is not None:
            last = tl.minimum(last, tl.load(place.cu_seqlens + place.num_sequences).to(tl.int32))
        full_last = last
    else:
        num_rows = interval.num_keys
        if JOINED:
            num_rows += interval.num_memory
        sequence, first_key = find_tile(tile, place.cu_blocks, num_rows, place.num_sequences, BLOCK_N)
        if JOINED:
            first_key -= interval.num_memory
        if sequence >= place.num_sequences:
            return
        row, key_start, key_stop = load_extent(place.cu_blocks, sequence, interval.num_keys, place.num_sequences)
        if first_key >= key_stop:
            return
        _, query_start, num_queries = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
        num_tokens = load_num_keys(place, sequence)
        offset = load_position(place, sequence, num_queries, num_tokens)
        num_keys = tl.minimum(count_blocks(num_tokens, interval.block_size, interval.stride), key_stop)
        keys = first_key + tl.arange(0, BLOCK_N)
        stored_row = row
        stored_rows = key_start + keys
        key_rows = stored_rows
        if interval.num_memory is not None:
            key_rows = stored_rows + interval.num_memory
        if JOINED:
            stored_rows = key_rows
        key_mask = keys < num_keys
        stored = keys < key_stop
        last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
        first, last, full_first, full_last = query_range(interval, first_key, last_key, num_queries, offset)
        if first_key >= num_keys:
            last = first
            full_last = first
    row, kv_head = row.to(tl.int64), kv_head.to(tl.int64)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    k = load_rows(k_ptr, key_rows, k_strides[1], key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_rows, v_strides[1], key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    q_ptr += row * q_strides[0]
    dout_ptr += row * dout_strides[0]
    first_head = (kv_head * parts + part) * HEADS
    num_heads = kv_heads * parts * HEADS
    tiles = split_range(first, last, full_first, full_last, BLOCK_M)
    end_tiles, num_tiles = tiles[4], tiles[5]
    limits = query_limits(interval, keys, last, offset)
    places = (row_of_marks(marks, row), query_start, key_rows, key_mask)
    first_row = tl.zeros([], tl.int64) + query_start
    inputs = (
        q_ptr + first_row * q_strides[1], dout_ptr + first_row * dout_strides[1], pairs_ptr + first_row,
        q_strides, dout_strides, row * num_heads, place.seqlen_q,
    )  # fmt: skip
    empty_sums = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32))
    sums = empty_sums
    # In float32 there is only the last loop, as in the other kernel.
    if k.dtype != tl.float32:
        sums = _add_heads(
            inputs, k, v, sums, first_head, places, limits, tiles, 0, end_tiles, last, interval, scale, marks, HEADS,
            True, False, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
        sums = _add_heads(
            inputs, k, v, sums, first_head, places, limits, tiles, end_tiles, num_tiles, last, interval, scale, marks,
            HEADS, False, False, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
    if k.dtype == tl.float32 or not is_finite_tile(sums[0]):
        # Perhaps for queries that do not read some keys of the tile: once more, with care.
        sums = _add_heads(
            inputs, k, v, empty_sums, first_head, places, limits, tiles, 0, num_tiles, last, interval, scale, marks,
            HEADS, True, True, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
    dk, dv = sums
    dk_ptr += part.to(tl.int64) * dk_strides[0] + stored_row.to(tl.int64) * dk_strides[1] + kv_head * dk_strides[3]
    dv_ptr += part.to(tl.int64) * dv_strides[0] + stored_row.to(tl.int64) * dv_strides[1] + kv_head * dv_strides[3]
    # What no query may read is loaded as 0, and its gradient is 0.
    dk = tl.where(key_mask[:, None], dk * scale, 0.0)
    dv = tl.where(key_mask[:, None], dv, 0.0)
    store_rows(dk_ptr, stored_rows, dk_strides[2], dk, stored, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, stored_rows, dv_strides[2], dv, stored, VALUE_DIM, BLOCK_DV)


@triton.jit
def _add_heads(
    inputs,
    k,
    v,
    sums,
    first_head,
    places,
    limits,
    tiles,
    first_tile,
    last_tile,
    last,
    interval,
    scale,
    marks,
    HEADS: tl.constexpr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds tiles first_tile ... last_tile - 1 of each of HEADS heads."""
    if interval.left is None or CAREFUL:
        for member in range(HEADS):
            head = first_head + member
            for tile in tl.range(first_tile, last_tile, num_stages=1 if CAREFUL else None):
                sums = _add_queries(
                    inputs, k, v, sums, head, places, limits, tiles, tile, last, interval, scale, marks, MASKED,
                    CAREFUL, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, WIDE,
                )  # fmt: skip
    else:
        # A head has few tiles in a window: all of them are one loop, and so one pipeline.
        head, tile = first_head, first_tile
        for _ in range(HEADS * (last_tile - first_tile)):
            sums = _add_queries(
                inputs, k, v, sums, head, places, limits, tiles, tile, last, interval, scale, marks, MASKED, CAREFUL,
                HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
            is_last = tile == last_tile - 1
            head = tl.where(is_last, head + 1, head)
            tile = tl.where(is_last, first_tile, tile + 1)
    return sums


@triton.jit
def _load_pairs(pairs_ptr, queries, seqlen):
    """Two numbers of each query, seqlen apart. Where a tile has fewer elements than a program threads, every thread
    would fetch what it needs, one after the other: so there are four columns of them, of which two are read.
    """
    columns = tl.arange(0, 4)[None, :]
    mask = tl.broadcast_to(columns < 2, [queries.shape[0], 4])
    numbers = tl.load(pairs_ptr + columns * seqlen + queries[:, None], mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(numbers, [queries.shape[0], 2, 2]))
    first, _ = tl.split(even)
    second, _ = tl.split(odd)
    return first, second


@triton.jit
def _add_queries(
    inputs,
    k,
    v,
    sums,
    head,
    places,
    limits,
    tiles,
    tile,
    last,
    interval,
    scale,
    marks,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds a tile of queries of one head. Not MASKED: all of them read every key. CAREFUL: a query that is not finite
    reaches those keys alone that it reads; a gradient that is not reaches the values of the whole tile.
    """
    dk, dv = sums
    q_ptr, dout_ptr, pairs_ptr, q_strides, dout_strides, first_head, seqlen = inputs
    start = find_start(tiles, tile, MASKED, CAREFUL, BLOCK_M)
    queries = start + tl.arange(0, BLOCK_M)
    query_mask = tl.full([BLOCK_M], 1, tl.int1)
    if MASKED:
        query_mask = queries < last
    # [BLOCK_M, BLOCK_D] and [BLOCK_M, BLOCK_DV]
    q = load_rows(q_ptr + head * q_strides[2], queries, q_strides[1], query_mask, HEAD_DIM, BLOCK_D, WIDE)
    dout = load_rows(dout_ptr + head * dout_strides[2], queries, dout_strides[1], query_mask, VALUE_DIM, BLOCK_DV, WIDE)
    if MASKED:
        # Those behind the last query are the last one once more, which takes no mask.
        queries = tl.minimum(queries, last - 1)
    lse_log2, delta = _load_pairs(pairs_ptr + (first_head + head) * 2 * seqlen, queries, seqlen)
    logits = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
    row, query_start, key_rows, key_mask = places
    place = (row, head, (query_start + queries)[None, :], key_rows[:, None], query_mask[None, :], key_mask[:, None])
    exponents, slope, read = find_exponents(logits, lse_log2[None, :], scale, marks, place)
    if MASKED:
        read = read & is_read_by(interval, limits, start, BLOCK_M)
    weights = tl.exp2(tl.where(read, exponents, float('-inf')))
    dweights = tl.dot(v, tl.trans(dout), input_precision='ieee')
    kept = weights
    if marks.seed is not None:
        keep = is_kept(marks, place)
        dweights = tl.where(keep, dweights * marks.keep_factor, 0.0)
        kept = tl.where(keep, weights * marks.keep_factor, 0.0)
    dlogits = weights * (dweights - delta[None, :])
    if CAREFUL:
        dlogits = tl.where(read, dlogits, 0.0)
        q, _ = split_finite(q)
    if marks.softcap is not None:
        dlogits *= tl.where(read, slope, 0.0) if CAREFUL else slope
    dv = add_product(kept.to(dout.dtype), dout, dv)
    dk = add_product(dlogits.to(q.dtype), q, dk)
    return dk, dv
