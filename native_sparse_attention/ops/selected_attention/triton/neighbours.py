"""Kernels of selected attention in which neighbouring queries fill a tile together and share what they read.

A query with few heads leaves most rows of a tile empty, and neighbours with many heads may have chosen the same. So a
program has several neighbours and goes in order through the blocks that at least one of them chose (`Sharing`). Shapes
and names are those of the kernels per query. This is the forward; neighbours_backward.py has the gradients of q.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import LARGE, is_small, is_small_tile
from native_sparse_attention.ops._triton.placement import load_extent, locate_queries
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, split_finite, store_rows
from native_sparse_attention.ops.selected_attention.triton.choice import load_choices
from native_sparse_attention.ops.selected_attention.triton.delta import split_low_bits
from native_sparse_attention.ops.selected_attention.triton.half_values import HEADROOM, add_exact_product
from native_sparse_attention.ops.selected_attention.triton.sharing import load_flag


@triton.jit
def neighbours_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_tiles,
    v_tiles,
    half_tiles,
    indices_ptr,
    factors_ptr,
    out_ptr,
    lse_ptr,
    low_ptr,
    q_strides,
    k_strides,
    v_strides,
    half_strides,
    indices_strides,
    factors_strides,
    out_strides,
    halves,
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
    WIDE: tl.constexpr,
    UNION: tl.constexpr,
    ONES: tl.constexpr,
):
    """One program per tile of BLOCK_M / BLOCK_G queries and per chooser; BLOCK_G holds the heads of a group.
    sharing: tiles without a flag are left to the kernel per query. Others are as in that one.
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
    queries, heads, mask = rows_of_tile(first_query, num_queries, chooser, GROUP, BLOCK_G, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr += row * k_strides[0] + chooser // REPEATS * k_strides[2]
    v_ptr += row * v_strides[0] + chooser // REPEATS * v_strides[2]
    q_ptr += row * q_strides[0]
    q = load_rows(q_ptr, tokens * q_strides[1] + heads * q_strides[2], 1, mask, HEAD_DIM, BLOCK_D)
    if scale < 0:
        # So that the largest product of a row makes its largest logit.
        q, scale = -q, -scale
    indices_ptr += row * indices_strides[0] + chooser * indices_strides[2]
    members = first_query + tl.arange(0, BLOCK_T)
    member_mask = members < num_queries
    member_tokens = (query_start + members).to(tl.int64)
    choices = 0
    factors = 0
    if factors_ptr is not None:
        choices = load_choices(indices_ptr, member_tokens * indices_strides[1], member_mask, NUM_SELECTED, BLOCK_S)
        factors_ptr += row * factors_strides[0] + chooser * factors_strides[2]
        factors = load_factors_of_tile(
            factors_ptr, member_tokens * factors_strides[1], member_mask, NUM_SELECTED, BLOCK_S
        )

    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    in_unions = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chooser) * UNION
    blocks_ptr = sharing.blocks + in_unions
    members_ptr = sharing.members + in_unions + in_unions // UNION
    pair = row * (tl.num_programs(1) // REPEATS) + chooser // REPEATS
    source = (k_ptr, v_ptr, k_tiles, v_tiles, row, chooser // REPEATS, k_strides[1], v_strides[1], key_start)
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    EXACT: tl.constexpr = low_ptr is not None
    surplus = tl.zeros([BLOCK_M], tl.float32)
    if halves is not None:
        row_max, total, surplus, out = _attend_in_halves(
            q, source, blocks_ptr, members_ptr, sharing.counts + in_unions // UNION * 3, halves, half_tiles,
            half_strides, row_max, total, out, num_keys, positions, scale, softcap, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM,
            VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE, ONES,
        )  # fmt: skip
    else:
        num_blocks, num_clean, num_whole = count_in_union(sharing, in_unions // UNION, pair, is_small_tile(q), UNMASKED)
        entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
        if UNMASKED:
            for step in tl.range(0, num_whole * SPLIT):
                following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
                row_max, total, surplus, out = _attend(
                    q, source, entry, None, choices, factors, row_max, total, surplus, out, step, num_keys,
                    positions, scale, softcap, factors_ptr is not None, False, False, EXACT, False, False, CAUSAL,
                    BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
                )  # fmt: skip
                entry = following
            for step in tl.range(num_whole * SPLIT, num_clean * SPLIT):
                following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
                row_max, total, surplus, out = _attend(
                    q, source, entry, None, choices, factors, row_max, total, surplus, out, step, num_keys,
                    positions, scale, softcap, factors_ptr is not None, True, False, EXACT, False, False, CAUSAL,
                    BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
                )  # fmt: skip
                entry = following
        if num_clean < num_blocks:
            for step in tl.range(num_clean * SPLIT, num_blocks * SPLIT):
                following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
                row_max, total, surplus, out = _attend(
                    q, source, entry, None, choices, factors, row_max, total, surplus, out, step, num_keys, positions,
                    scale, softcap, factors_ptr is not None, True, True, EXACT, False, False, CAUSAL, BLOCK_SIZE, SPLIT,
                    HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
                )  # fmt: skip
                entry = following

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    out_ptr += row * out_strides[0]
    offsets = tokens * out_strides[1] + heads * out_strides[2]
    divisor = total if halves is None else total + surplus
    out = out * (1.0 / divisor)[:, None]
    num_heads = tl.num_programs(1) * GROUP
    if EXACT:
        out, low = split_low_bits(out, out_ptr.dtype.element_ty)
        rows = (row * place.seqlen_q + tokens) * num_heads + heads
        store_rows(low_ptr, rows, VALUE_DIM, low, mask, VALUE_DIM, BLOCK_DV)
    store_rows(out_ptr, offsets, 1, out, mask, VALUE_DIM, BLOCK_DV)
    tl.store(lse_ptr + (row * num_heads + heads) * place.seqlen_q + tokens, lse, mask=mask)


@triton.jit
def _attend_in_halves(
    q,
    source,
    blocks_ptr,
    members_ptr,
    counts_ptr,
    halves,
    half_tiles,
    half_strides,
    row_max,
    total,
    out,
    num_keys,
    positions,
    scale,
    softcap,
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
    ONES: tl.constexpr,
):
    """A tile's running softmax over its union: first over whole blocks that fit float16, then over the others, with
    care where they are not small. So a row has its bits whatever neighbours chose, and whatever comes later.
    """
    k_ptr, _, k_tiles, _, row, kv_head, k_stride, _, key_start = source
    half_ptr = halves.half + row * half_strides[0] + kv_head * half_strides[2]
    half = (k_ptr, half_ptr, k_tiles, half_tiles, row, kv_head, k_stride, half_strides[1], key_start)
    num_blocks, num_fitting = tl.load(counts_ptr), tl.load(counts_ptr + 1)
    are_small = tl.load(counts_ptr + 2) != 0
    is_small_query = is_small_tile(q)
    BLOCK_M: tl.constexpr = BLOCK_T * BLOCK_G
    SUMS: tl.constexpr = [BLOCK_M, 8] if ONES else [BLOCK_M]
    sums = tl.zeros(SUMS, tl.float32)
    entry = load_entry(blocks_ptr, members_ptr, 0, num_blocks, SPLIT)
    for step in tl.range(0, num_fitting * SPLIT):
        following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
        row_max, total, sums, out = _attend(
            q, half, entry, None, 0, 0, row_max, total, sums, out, step, num_keys, positions, scale, softcap, False,
            False, False, True, True, ONES, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G,
            BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip
        entry = following
    surplus = tl.max(sums, 1) - total if ONES else sums
    # What weights were in units of.
    row_max -= HEADROOM

    first = num_fitting * SPLIT
    is_small_row = tl.full([BLOCK_M], 1, tl.int1)
    if not is_small_query:
        # Products of other rows may be no numbers, for blocks that they did not choose, too: anew, with care.
        is_small_row = tl.min((tl.abs(q.to(tl.float32)) < LARGE).to(tl.int32), 1) != 0
        first, are_small = 0, False
        row_max = tl.where(is_small_row, row_max, float('-inf'))
        total, surplus = tl.where(is_small_row, total, 0.0), tl.where(is_small_row, surplus, 0.0)
        out = tl.where(is_small_row[:, None], out, 0.0)
    if are_small:
        # Of one block most often.
        entry = load_entry(blocks_ptr, members_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT, num_stages=2):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                q, source, entry, None, 0, 0, row_max, total, surplus, out, step, num_keys, positions, scale, softcap,
                False, True, False, True, False, False, CAUSAL, BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S,
                BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
            entry = following
    else:
        entry = load_entry(blocks_ptr, members_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT):
            following = load_entry(blocks_ptr, members_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                q, source, entry, (is_small_row & (step < num_fitting * SPLIT)) == 0, 0, 0, row_max, total, surplus,
                out, step, num_keys, positions, scale, softcap, False, True, True, True, False, False, CAUSAL,
                BLOCK_SIZE, SPLIT, HEAD_DIM, VALUE_DIM, BLOCK_S, BLOCK_T, BLOCK_G, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
            )  # fmt: skip
            entry = following
    return row_max, total, surplus, out


@triton.jit
def _attend(
    q,
    source,
    entry,
    takes,
    choices,
    factors,
    row_max,
    total,
    sums,
    out,
    step,
    num_keys,
    positions,
    scale,
    softcap,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    ONES: tl.constexpr,
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
    """Adds a tile of keys to a running softmax: part step % SPLIT of block step // SPLIT of the union, for those rows
    that `takes` names, or None for all. Not MASKED: who chose the block reads all of the tile. Not CAREFUL: all
    products are finite. EXACT, HALF: as in the kernel per query. sums: by how much the sum of the weights that meet v
    is above total; with ONES, that sum. scale is not negative.
    """
    block, chosen, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, SPLIT, BLOCK_T, BLOCK_G, BLOCK_N
    )
    if takes is not None:
        chosen = chosen & takes
    k, v = load_keys(source, first, key_mask, MASKED, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE)
    scale_log2 = tl.full([BLOCK_T * BLOCK_G], scale * 1.4426950408889634, tl.float32)
    if SCALED:
        scale_log2 *= for_heads(pick_factor(factors, find_slot(choices, block, BLOCK_S), BLOCK_S), BLOCK_T, BLOCK_G)
    read = chosen[:, None] & key_mask[None, :]
    if MASKED and CAUSAL:
        read = read & (keys[None, :] <= positions[:, None])
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        products = cap_logits(products * scale_log2[:, None], softcap * 1.4426950408889634)
        scale_log2 = tl.full([BLOCK_T * BLOCK_G], 1.0, tl.float32)
    # What decides for a whole row need not be asked of every product; factors may be negative, or anything.
    BY_ROW: tl.constexpr = not MASKED and not SCALED
    if BY_ROW:
        largest = tl.where(chosen, tl.max(products, 1) * scale_log2, float('-inf'))
    else:
        largest = tl.max(tl.where(read, products * scale_log2[:, None], float('-inf')), 1)
    if CAREFUL:
        v, taint = split_finite(v)
        out += tl.sum(tl.where(read, taint[None, :], 0.0), 1)[:, None]
    new_max = tl.maximum(row_max, largest)
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    rescale = tl.exp2(row_max - reference)
    if HALF:
        reference -= HEADROOM
    shift = tl.where(chosen, -reference, float('-inf')) if BY_ROW else -reference
    weights = tl.exp2(tl.fma(products, scale_log2[:, None], shift[:, None]))
    if not BY_ROW:
        weights = tl.where(read, weights, 0.0)
    total = total * rescale + tl.sum(weights, 1)
    out *= rescale[:, None]
    if HALF:
        rounded = weights.to(v.dtype)
        if ONES:
            sums = add_product(rounded, tl.full([BLOCK_N, 8], 1.0, v.dtype), sums * rescale[:, None])
        else:
            sums = sums * rescale + tl.sum(rounded.to(tl.float32) - weights, 1)
        out = add_product(rounded, v, out)
    elif EXACT:
        sums = sums * rescale
        out = add_exact_product(weights, v, out)
    else:
        out = add_product(weights.to(v.dtype), v, out)
    return new_max, total, sums, out


@triton.jit
def count_in_union(sharing, place, pair, is_small_query, UNMASKED: tl.constexpr):
    """Blocks of a union; the first of them that are read without care, all or none; the first of these that are read
    without masks. is_small_query: whether what is multiplied beside k and v is small.
    """
    num_blocks = tl.load(sharing.counts + place * 3)
    num_whole = tl.load(sharing.counts + place * 3 + 1)
    num_clean = 0
    if UNMASKED:
        if is_small(sharing.large, pair, sharing.num_chunks) and is_small_query:
            num_clean = num_blocks
        num_whole = tl.minimum(num_whole, num_clean)
    return num_blocks, num_clean, num_whole


@triton.jit
def load_entry(blocks_ptr, members_ptr, step, num_blocks, SPLIT: tl.constexpr):
    """The block that a step is of, and who chose it, a bit for every query. To be loaded a step ahead, as
    `load_entries`.
    """
    place = step // SPLIT
    exists = place < num_blocks
    block = tl.load(blocks_ptr + place, mask=exists, other=0)
    before = tl.load(members_ptr + place, mask=exists, other=0)
    return block, tl.load(members_ptr + place + 1, mask=exists, other=0) - before


@triton.jit
def open_step(
    entry,
    step,
    num_keys,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The block of a step (`load_entry`), which rows of the tile chose it, its first key and all of them, and which of
    these there are.
    """
    block, members = entry
    chosen = (members >> (tl.arange(0, BLOCK_T * BLOCK_G) // BLOCK_G).to(tl.int64)) & 1
    first = block * BLOCK_SIZE + step % SPLIT * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    key_mask = tl.full([BLOCK_N], 1, tl.int1)
    if MASKED:
        key_mask = keys < tl.minimum((block + 1) * BLOCK_SIZE, num_keys)
    return block, chosen != 0, first, keys, key_mask


@triton.jit
def load_keys(
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
    """k `[BLOCK_N, BLOCK_D]` and v `[BLOCK_N, BLOCK_DV]` of a step. source: where they are. MASKED: the mask
    says which are there.
    """
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
def rows_of_tile(first_query, num_queries, chooser, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Query in its sequence and head of every row, and whether there are such: every query with every head."""
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // BLOCK_G
    return queries, chooser * GROUP + rows % BLOCK_G, (queries < num_queries) & (rows % BLOCK_G < GROUP)


@triton.jit
def load_factors_of_tile(factors_ptr, rows, mask, NUM_SELECTED: tl.constexpr, BLOCK_S: tl.constexpr):
    slots = tl.arange(0, BLOCK_S)
    mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
    return tl.load(factors_ptr + rows[:, None] + slots[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def for_heads(values, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """What a query has, [BLOCK_T], for each of its rows, [BLOCK_M]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [BLOCK_T, BLOCK_G]), [BLOCK_T * BLOCK_G])


@triton.jit
def find_slot(choices, block, BLOCK_S: tl.constexpr):
    """Where a block first stands in each query's indices, BLOCK_S where it does not."""
    return tl.min(tl.where(choices == block, tl.arange(0, BLOCK_S)[None, :], BLOCK_S), 1)


@triton.jit
def pick_factor(factors, slot, BLOCK_S: tl.constexpr):
    """The factor at each query's slot, 0 where it has none."""
    slots = tl.arange(0, BLOCK_S)
    return tl.sum(tl.where(slots[None, :] == slot[:, None], factors, 0.0), 1)
