"""Forward kernel of selected attention: one program per query and tile of the heads that share its choice."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.placement import find_query
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, load_tile, store_rows
from native_sparse_attention.ops.selected_attention.triton.choice import (
    find_keys,
    find_whole_blocks,
    load_block,
    load_factor,
    load_whole,
)
from native_sparse_attention.ops.selected_attention.triton.sharing import load_flag_of_query


@triton.jit
def forward_kernel(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """q, out: `[B, T, HQ, D and DV]`; k, v: `[B, S, H, D and DV]`; indices, factors (or None): `[B, T, HI, n]`; lse:
    `[B, HQ, T]`. GROUP: HQ / HI, heads that share a choice. REPEATS: HI / H, choices of a kv head.
    sharing: what the kernel of neighbours does is left to it. k_tiles, v_tiles: tensor descriptors of k and v, tiles of
    `[1, BLOCK_N, 1, BLOCK_D and BLOCK_DV]`, or None.
    """
    parts = tl.cdiv(GROUP, BLOCK_M)
    chooser = tl.program_id(1) // parts
    sequence, row, token = find_query(tl.program_id(0), place)
    is_shared = 0
    if sharing.flags is not None:
        is_shared = load_flag_of_query(sharing, sequence, token, chooser, tl.num_programs(1) // parts, place)
    if is_shared != 0:
        return
    key_start, readable = find_keys(sequence, token, place, CAUSAL)
    row, token = row.to(tl.int64), token.to(tl.int64)
    in_group = tl.program_id(1) % parts * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = chooser * GROUP + in_group
    head_mask = in_group < GROUP
    kv_head = (chooser // REPEATS).to(tl.int64)
    k_ptr += row * k_strides[0] + kv_head * k_strides[2]
    v_ptr += row * v_strides[0] + kv_head * v_strides[2]
    indices_ptr += row * indices_strides[0] + token * indices_strides[1] + chooser.to(tl.int64) * indices_strides[2]
    if factors_ptr is not None:
        factors_ptr += row * factors_strides[0] + token * factors_strides[1] + chooser.to(tl.int64) * factors_strides[2]
    q_ptr += row * q_strides[0] + token * q_strides[1]
    q = load_rows(q_ptr, heads, q_strides[2], head_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slots = tl.arange(0, BLOCK_S)
    choice = tl.load(indices_ptr + slots, mask=slots < NUM_SELECTED, other=-1)  # [BLOCK_S]

    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up over the keys of a tile at the end
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    # Beside products of float32, masks cost nothing, and every loop takes seconds to compile.
    UNMASKED: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32
    first_step, last_step = 0, NUM_SELECTED * SPLIT
    if UNMASKED:
        num_slots, spare, first_step = find_whole_blocks(choice, readable, NUM_SELECTED, BLOCK_SIZE, BLOCK_S)
        # One loop, whose next step is fetched in time, be a block one tile or several.
        for step in tl.range(0, num_slots * SPLIT):
            slot = step // SPLIT
            first, is_read = load_whole(indices_ptr, choice, slot, readable, spare, BLOCK_SIZE, BLOCK_S)
            first += key_start + step % SPLIT * BLOCK_N
            k = load_tile(k_tiles, k_ptr, row, first, kv_head, k_strides[1], HEAD_DIM, BLOCK_N, BLOCK_D, WIDE)
            v = load_tile(v_tiles, v_ptr, row, first, kv_head, v_strides[1], VALUE_DIM, BLOCK_N, BLOCK_DV, WIDE)
            scale_log2 = load_factor(factors_ptr, slot, is_read) * (scale * 1.4426950408889634)
            bias = tl.where(is_read, 0.0, float('-inf'))
            row_max, totals, out = _attend(q, k, v, row_max, totals, out, scale_log2, bias, False)
        # What is left is the block of which only the first keys may be read.
        first_step *= SPLIT
        last_step = tl.minimum(first_step + SPLIT, last_step)
    for step in tl.range(first_step, last_step, num_stages=1 if UNMASKED else None):
        slot = step // SPLIT
        first, last = load_block(indices_ptr, choice, slot, readable, BLOCK_SIZE, BLOCK_S)
        keys = first + step % SPLIT * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key_start + keys, k_strides[1], keys < last, HEAD_DIM, BLOCK_D, WIDE)
        v = load_rows(v_ptr, key_start + keys, v_strides[1], keys < last, VALUE_DIM, BLOCK_DV, WIDE)
        scale_log2 = load_factor(factors_ptr, slot, first < last) * (scale * 1.4426950408889634)
        bias = tl.where(keys < last, 0.0, float('-inf'))[None, :]
        row_max, totals, out = _attend(q, k, v, row_max, totals, out, scale_log2, bias, True)

    total = tl.sum(totals, 1)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    out = out / total[:, None]
    lse = tl.where(empty, float('-inf'), tl.fma(row_max, 0.6931471805599453, tl.log(total)))
    out_ptr += row * out_strides[0] + token * out_strides[1]
    store_rows(out_ptr, heads, out_strides[2], out, head_mask, VALUE_DIM, BLOCK_DV)
    num_heads = tl.num_programs(1) // parts * GROUP
    tl.store(lse_ptr + (row * num_heads + heads) * place.seqlen_q + token, lse, mask=head_mask)


@triton.jit
def _attend(q, k, v, row_max, totals, out, scale_log2, bias, MASKED: tl.constexpr):
    """Adds a tile of keys to a running softmax. bias: of the logits, 0, or -inf for keys that are not read; these are 0
    where MASKED, or else keys that the query reads in another step.
    """
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if MASKED:
        # A query that is not finite, and reads nothing.
        products = tl.where(bias == 0, products, 0.0)
    new_max = tl.maximum(row_max, tl.max(tl.fma(products, scale_log2, bias), 1))
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    weights = tl.exp2(tl.fma(products, scale_log2, bias - reference[:, None]))
    rescale = tl.exp2(row_max - reference)
    totals = tl.fma(totals, rescale[:, None], weights)
    out = add_product(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, totals, out
