"""Backward kernel of interval attention for the gradients of k and v."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.interval.modifiers import find_exponents, is_kept, row_of_modifiers
from native_sparse_attention.ops._triton.interval.tiles import (
    find_start,
    is_read_by,
    query_limits,
    query_range,
    split_range,
)
from native_sparse_attention.ops._triton.tiles import (
    add_product,
    is_finite_tile,
    load_rows,
    load_tile,
    split_finite,
    store_rows,
)
from native_sparse_attention.ops._triton.varlen import (
    count_blocks,
    find_tile,
    load_extent,
    load_num_keys,
    load_position,
)


@triton.jit
def dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    stats_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    q_tiles,
    dout_tiles,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    layout,
    interval,
    scale,
    modifiers,
    kv_heads,
    parts,
    NUM_STATS: tl.constexpr,
    JOINED: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    tile: tl.constexpr,
):
    """dk, dv: `[parts, B, C, H, D and DV]`: part p sums over the p-th HEADS query heads of a group. One program per key
    tile, KV head and part. stats: NUM_STATS row statistics from `dq_kernel`.

    JOINED: memory precedes the keys of every row, `[parts, B, M + C, H, D and DV]`. SPLIT, unless 0: gradients of the
    memory keys alone, `[parts, B * splits, M, H, D and DV]`, one split per SPLIT queries.
    """
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_D: tl.constexpr = tile.block_d
    BLOCK_DV: tl.constexpr = tile.block_dv
    # Tiles of the first keys, which most queries read, run first, for all heads.
    index = tl.program_id(0) // (kv_heads * parts)
    kv_head = tl.program_id(0) // parts % kv_heads
    part = tl.program_id(0) % parts
    if SPLIT > 0:
        row, stored_row, key_rows, key_mask, first, last = _find_split(interval, layout, index, SPLIT, BLOCK_N)
        keys, stored_rows, stored = key_rows - interval.num_memory, key_rows, key_mask
        query_start, offset = row * 0, row * 0
        full_first, full_last = first, last
    else:
        num_rows = interval.num_keys
        if JOINED:
            num_rows += interval.num_memory
        if layout.cu_blocks is None and interval.left is None:  # and for all rows; tiles of a window cost the same
            index = index % layout.num_sequences * tl.cdiv(num_rows, BLOCK_N) + index // layout.num_sequences
        sequence, first_key = find_tile(index, layout.cu_blocks, num_rows, layout.num_sequences, BLOCK_N)
        if JOINED:
            first_key -= interval.num_memory
        if sequence >= layout.num_sequences:
            return
        row, key_start, key_stop = load_extent(layout.cu_blocks, sequence, interval.num_keys, layout.num_sequences)
        if first_key >= key_stop:
            return
        _, query_start, num_queries = load_extent(layout.cu_seqlens, sequence, layout.seqlen_q, layout.num_sequences)
        num_tokens = load_num_keys(layout, sequence)
        offset = load_position(layout, sequence, num_queries, num_tokens)
        num_keys = tl.minimum(count_blocks(num_tokens, interval.block_size, interval.stride), key_stop)
        keys = first_key + tl.arange(0, BLOCK_N)
        stored_row = row
        stored_rows = key_start + keys
        key_rows = stored_rows
        if interval.num_memory is not None:
            key_rows = stored_rows + interval.num_memory
        if JOINED:
            stored_rows = key_rows
        key_mask, stored = keys < num_keys, keys < key_stop
        first, last, full_first, full_last = _find_queries(interval, first_key, num_keys, num_queries, offset, BLOCK_N)
    row, kv_head = row.to(tl.int64), kv_head.to(tl.int64)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    k = load_rows(k_ptr, key_rows, k_strides[1], key_mask, tile.head_dim, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_rows, v_strides[1], key_mask, tile.value_dim, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    q_ptr += row * q_strides[0]
    dout_ptr += row * dout_strides[0]
    first_head = (kv_head * parts + part) * HEADS
    num_heads = kv_heads * parts * HEADS
    tiles = split_range(first, last, full_first, full_last, tile.block_m)
    end_tiles, num_tiles = tiles[4], tiles[5]
    limits = query_limits(interval, keys, last, offset)
    key_coordinates = (row_of_modifiers(modifiers, row), key_rows, key_mask)
    first_row = tl.zeros([], tl.int64) + query_start
    of_row = (row, query_start, row * num_heads)
    inputs = (
        q_ptr + first_row * q_strides[1], dout_ptr + first_row * dout_strides[1], stats_ptr + first_row,
        q_tiles, dout_tiles, q_strides, dout_strides, of_row, layout.seqlen_q,
    )  # fmt: skip
    empty_sums = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32))
    sums = empty_sums
    key_tile, bounds = (k, v, key_coordinates), (limits, tiles, last)
    # In float32 only the last loop exists, as in the kernel for dq.
    if k.dtype != tl.float32:
        sums = _add_heads(
            inputs, key_tile, sums, first_head, 0, end_tiles, bounds, scale, interval, modifiers, tile,
            NUM_STATS=NUM_STATS, HEADS=HEADS, MASKED=True, CONTAIN_NONFINITE=False,
        )  # fmt: skip
        sums = _add_heads(
            inputs, key_tile, sums, first_head, end_tiles, num_tiles, bounds, scale, interval, modifiers, tile,
            NUM_STATS=NUM_STATS, HEADS=HEADS, MASKED=False, CONTAIN_NONFINITE=False,
        )  # fmt: skip
    if k.dtype == tl.float32 or not is_finite_tile(sums[0]):
        # A query that does not read some keys may be non-finite, or a gate negative: recompute with CONTAIN_NONFINITE.
        sums = _add_heads(
            inputs, key_tile, empty_sums, first_head, 0, num_tiles, bounds, scale, interval, modifiers, tile,
            NUM_STATS=NUM_STATS, HEADS=HEADS, MASKED=True, CONTAIN_NONFINITE=True,
        )  # fmt: skip
    dk, dv = sums
    dk_ptr += part.to(tl.int64) * dk_strides[0] + stored_row.to(tl.int64) * dk_strides[1] + kv_head * dk_strides[3]
    dv_ptr += part.to(tl.int64) * dv_strides[0] + stored_row.to(tl.int64) * dv_strides[1] + kv_head * dv_strides[3]
    # Keys that no query may read are loaded as 0, and their gradient is 0.
    dk = tl.where(key_mask[:, None], dk * scale, 0.0)
    dv = tl.where(key_mask[:, None], dv, 0.0)
    store_rows(dk_ptr, stored_rows, dk_strides[2], dk, stored, tile.head_dim, BLOCK_D)
    store_rows(dv_ptr, stored_rows, dv_strides[2], dv, stored, tile.value_dim, BLOCK_DV)


@triton.jit
def _find_split(interval, layout, index, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Locate a tile of memory keys and a query split. Returns the batch row, the row of dk and dv, the keys and a mask,
    and the queries [first, last): every query of the row reads these keys, whatever its sequence.
    """
    memory_tiles = tl.cdiv(interval.num_memory, BLOCK_N)
    splits = tl.cdiv(layout.seqlen_q, SPLIT)
    stored_row = index // memory_tiles
    key_rows = index % memory_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    key_mask = key_rows < interval.num_memory
    first = (stored_row % splits) * SPLIT
    last = tl.minimum(first + SPLIT, layout.seqlen_q)
    if layout.cu_seqlens is not None:
        last = tl.minimum(last, tl.load(layout.cu_seqlens + layout.num_sequences).to(tl.int32))
    return stored_row // splits, stored_row, key_rows, key_mask, first, last


@triton.jit
def _find_queries(interval, first_key, num_keys, num_queries, offset, BLOCK_N: tl.constexpr):
    """Return the queries that read a key tile (`query_range`); no query reads keys from num_keys on."""
    last_key = tl.minimum(first_key + BLOCK_N, num_keys) - 1
    first, last, full_first, full_last = query_range(interval, first_key, last_key, num_queries, offset)
    if first_key >= num_keys:
        last = first
        full_last = first
    return first, last, full_first, full_last


@triton.jit
def _add_heads(
    inputs,
    key_tile,
    sums,
    first_head,
    first_tile,
    last_tile,
    bounds,
    scale,
    interval,
    modifiers,
    tile: tl.constexpr,
    NUM_STATS: tl.constexpr,
    HEADS: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
):
    """Add the query tiles first_tile ... last_tile - 1 of each of HEADS heads."""
    if interval.left is None or CONTAIN_NONFINITE:
        for in_group in range(HEADS):
            head = first_head + in_group
            for index in tl.range(first_tile, last_tile, num_stages=1 if CONTAIN_NONFINITE else None):
                sums = _add_queries(
                    inputs, key_tile, sums, head, index, bounds, scale, interval, modifiers, tile,
                    NUM_STATS=NUM_STATS, MASKED=MASKED, CONTAIN_NONFINITE=CONTAIN_NONFINITE,
                )  # fmt: skip
    else:
        # In a window a head has few tiles, so one loop over all heads makes one pipeline.
        head, index = first_head, first_tile
        for _ in range(HEADS * (last_tile - first_tile)):
            sums = _add_queries(
                inputs, key_tile, sums, head, index, bounds, scale, interval, modifiers, tile,
                NUM_STATS=NUM_STATS, MASKED=MASKED, CONTAIN_NONFINITE=CONTAIN_NONFINITE,
            )  # fmt: skip
            is_last = index == last_tile - 1
            head = tl.where(is_last, head + 1, head)
            index = tl.where(is_last, first_tile, index + 1)
    return sums


@triton.jit
def _load_stats(stats_ptr, queries, seqlen, COUNT: tl.constexpr):
    """Load two or three row statistics of each query, seqlen apart; with two, the third is 0.

    If a tile has fewer elements than the program has threads, every thread loads what it needs in sequence. Loading
    four columns at once avoids this.
    """
    columns = tl.arange(0, 4)[None, :]
    mask = tl.broadcast_to(columns < COUNT, [queries.shape[0], 4])
    numbers = tl.load(stats_ptr + columns * seqlen + queries[:, None], mask=mask, other=0.0)
    even, odd = tl.split(tl.reshape(numbers, [queries.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, _ = tl.split(odd)
    return first, second, third


@triton.jit
def _add_queries(
    inputs,
    key_tile,
    sums,
    head,
    index,
    bounds,
    scale,
    interval,
    modifiers,
    tile: tl.constexpr,
    NUM_STATS: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
):
    """Add a query tile of one head. Without MASKED all of its queries read every key.

    CONTAIN_NONFINITE: a non-finite query reaches only the keys that it reads, and gates may be negative; a non-finite
    output gradient reaches the values of the whole tile.
    """
    BLOCK_M: tl.constexpr = tile.block_m
    dk, dv = sums
    k, v, key_coordinates = key_tile
    row_of_tables, key_rows, key_mask = key_coordinates
    limits, tiles, last = bounds
    q_ptr, dout_ptr, stats_ptr, q_tiles, dout_tiles, q_strides, dout_strides, of_row, seqlen = inputs
    row, query_start, heads_before = of_row
    start = find_start(tiles, index, MASKED, CONTAIN_NONFINITE, BLOCK_M)
    queries = start + tl.arange(0, BLOCK_M)
    query_mask = tl.full([BLOCK_M], 1, tl.int1)
    if MASKED:
        query_mask = queries < last
    # [BLOCK_M, BLOCK_D] and [BLOCK_M, BLOCK_DV]
    if q_tiles is not None and dout_tiles is not None and not CONTAIN_NONFINITE:
        first = query_start + start
        q = load_tile(q_tiles, None, row, first, head, None, tile.head_dim, BLOCK_M, tile.block_d, tile.int64_offsets)
        dout = load_tile(
            dout_tiles, None, row, first, head, None, tile.value_dim, BLOCK_M, tile.block_dv, tile.int64_offsets
        )
    else:
        q_ptr += head * q_strides[2]
        dout_ptr += head * dout_strides[2]
        q = load_rows(q_ptr, queries, q_strides[1], query_mask, tile.head_dim, tile.block_d, tile.int64_offsets)
        dout = load_rows(
            dout_ptr, queries, dout_strides[1], query_mask, tile.value_dim, tile.block_dv, tile.int64_offsets
        )
    if MASKED:
        # Indices behind the last query repeat it, so that the load needs no mask.
        queries = tl.minimum(queries, last - 1)
    stats_ptr += (heads_before + head) * NUM_STATS * seqlen
    GATED: tl.constexpr = CONTAIN_NONFINITE and NUM_STATS == 3
    lse_log2, delta, of_negative = _load_stats(stats_ptr, queries, seqlen, 3 if GATED else 2)
    if GATED:
        is_negative = of_negative == of_negative  # NaN unless the gate is negative
        lse_log2 = tl.where(is_negative, of_negative, lse_log2)
    logits = tl.dot(k, tl.trans(q), input_precision='ieee')  # [BLOCK_N, BLOCK_M]
    coordinates = (
        row_of_tables,
        head,
        (query_start + queries)[None, :],
        key_rows[:, None],
        query_mask[None, :],
        key_mask[:, None],
    )
    exponents, slope, read = find_exponents(logits, lse_log2[None, :], scale, modifiers, coordinates)
    if MASKED:
        read = read & is_read_by(interval, limits, start, BLOCK_M)
    weights = tl.exp2(tl.where(read, exponents, float('-inf')))
    if GATED:
        weights = tl.where(is_negative[None, :], -weights, weights)
    dweights = tl.dot(v, tl.trans(dout), input_precision='ieee')
    kept = weights
    if modifiers.seed is not None:
        keep = is_kept(modifiers, coordinates)
        dweights = tl.where(keep, dweights * modifiers.keep_factor, 0.0)
        kept = tl.where(keep, weights * modifiers.keep_factor, 0.0)
    dlogits = weights * (dweights - delta[None, :])
    if CONTAIN_NONFINITE:
        dlogits = tl.where(read, dlogits, 0.0)
        q, _ = split_finite(q)
    if modifiers.softcap is not None:
        dlogits *= tl.where(read, slope, 0.0) if CONTAIN_NONFINITE else slope
    dv = add_product(kept.to(dout.dtype), dout, dv)
    dk = add_product(dlogits.to(q.dtype), q, dk)
    return dk, dv
