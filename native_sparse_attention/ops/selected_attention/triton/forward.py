"""Forward kernel of selected attention: one program per query and tile of the heads that share its choice."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.placement import find_query
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, store_rows
from native_sparse_attention.ops.selected_attention.triton.choice import find_keys, load_block, load_factor
from native_sparse_attention.ops.selected_attention.triton.sharing import load_flag_of_query


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    sharing: what the kernel of neighbours does is left to it.
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
    # One loop, whose next step is fetched in time, be a block one tile or several.
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    for step in tl.range(0, NUM_SELECTED * SPLIT):
        slot = step // SPLIT
        first, last = load_block(indices_ptr, choice, slot, readable, BLOCK_SIZE, BLOCK_S)
        scale_log2 = load_factor(factors_ptr, slot, first < last) * (scale * 1.4426950408889634)
        row_max, totals, out = _attend(
            q, k_ptr, v_ptr, k_strides[1], v_strides[1], row_max, totals, out, first + step % SPLIT * BLOCK_N, last,
            key_start, scale_log2, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, WIDE,
        )  # fmt: skip

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
def _attend(
    q,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    row_max,
    totals,
    out,
    first,
    last,
    key_start,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Adds a tile of keys from `first` on to a running softmax. All rows read the same keys, so those that are not read
    are not loaded.
    """
    keys = first + tl.arange(0, BLOCK_N)
    mask = keys < last
    k = load_rows(k_ptr, key_start + keys, k_stride, mask, HEAD_DIM, BLOCK_D, WIDE)  # [BLOCK_N, BLOCK_D]
    v = load_rows(v_ptr, key_start + keys, v_stride, mask, VALUE_DIM, BLOCK_DV, WIDE)  # [BLOCK_N, BLOCK_DV]
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    logits = tl.where(mask[None, :], products * scale_log2, float('-inf'))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    weights = tl.exp2(tl.fma(products, scale_log2, -reference[:, None]))
    weights = tl.where(mask[None, :], weights, 0.0)
    rescale = tl.exp2(row_max - reference)
    totals = tl.fma(totals, rescale[:, None], weights)
    out = out * rescale[:, None]
    out = add_product(weights.to(v.dtype), v, out)
    return new_max, totals, out
