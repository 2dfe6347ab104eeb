"""Forward kernel of selected attention with one program per query and tile of the heads that share its blocks."""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows
from native_sparse_attention.ops.selected_attention.triton.arguments import KeySource, Selection
from native_sparse_attention.ops.selected_attention.triton.fp16_values import (
    FITS,
    HEADROOM,
    add_exact_product,
    find_flags,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_union import open_query
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import (
    ANY,
    FULL,
    TAIL,
    find_full_blocks,
    find_keys,
    load_factor,
    load_step,
    select_row,
)
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import store_output


@triton.jit
def forward_kernel(
    tensors,
    strides,
    k_tiles,
    v_tiles,
    fp16_tiles,
    fp16_values,
    fp16_strides,
    layout,
    union,
    scale,
    softcap,
    sizes: tl.constexpr,
    tile: tl.constexpr,
    SUM_BY_PRODUCT: tl.constexpr,
):
    """Compute the output and log-sum-exp of one query and up to BLOCK_M of the heads that share its blocks.

    tensors, strides: `ForwardTensors`, `Strides`. k_tiles, v_tiles, fp16_tiles: tensor descriptors with tiles
    `[1, BLOCK_N, 1, BLOCK_D or BLOCK_DV]`, or None. fp16_values: `Fp16Values`, or None. union: `BlockUnion`; queries of
    tiles that take their union are skipped. softcap: of the logits, or None, as in all kernels of selected attention.

    With tensors.low_bits the weights keep 11 bits (fp16_values.py). SUM_BY_PRODUCT: sum float16 weights by a product
    with columns of ones.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_DV: tl.constexpr = tile.block_dv
    head_tiles = tl.cdiv(GROUP, BLOCK_M)
    index_head = tl.program_id(1) // head_tiles
    sequence, row, token, in_union = open_query(index_head, layout, union, head_tiles)
    if in_union:
        return
    key_start, readable = find_keys(sequence, token, layout, sizes.causal)
    row, token = row.to(tl.int64), token.to(tl.int64)
    in_group = tl.program_id(1) % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = index_head * GROUP + in_group
    head_mask = in_group < GROUP
    kv_head = (index_head // sizes.repeats).to(tl.int64)
    k_ptr = tensors.k + (row * strides.k[0] + kv_head * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + kv_head * strides.v[2])
    indices_ptr = tensors.indices
    indices_ptr += row * strides.indices[0] + token * strides.indices[1] + index_head.to(tl.int64) * strides.indices[2]
    factors_ptr = tensors.factors
    if factors_ptr is not None:
        factors_ptr += (
            row * strides.factors[0] + token * strides.factors[1] + index_head.to(tl.int64) * strides.factors[2]
        )
    q_ptr = tensors.q + (row * strides.q[0] + token * strides.q[1])
    q = load_rows(q_ptr, heads, strides.q[2], head_mask, sizes.head_dim, tile.block_d)  # [BLOCK_M, BLOCK_D]
    slots = tl.arange(0, tile.block_s)
    blocks = tl.load(indices_ptr + slots, mask=slots < sizes.num_selected, other=-1)  # [BLOCK_S]

    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    surplus = tl.zeros([BLOCK_M], tl.float32)
    sums = (row_max, total, surplus, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32))
    EXACT: tl.constexpr = tensors.low_bits is not None
    scale_log2 = scale * 1.4426950408889634
    source = KeySource(k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, strides.k[1], strides.v[1], key_start)
    # In float32 the products dominate, so masks cost nothing and one loop saves seconds of compilation.
    if BLOCK_SIZE % BLOCK_N == 0 and q.dtype != tl.float32:
        num_slots, first_slot, tail_slot, num_tail_keys = find_full_blocks(
            blocks, readable, sizes.num_selected, BLOCK_SIZE, tile.block_s
        )
        selection = Selection(indices_ptr, blocks, readable, num_slots, first_slot, tail_slot)
        num_steps = num_slots * (BLOCK_SIZE // BLOCK_N)
        inputs = (q, scale_log2, softcap)
        if fp16_values is not None:
            # All full blocks in float16, or none: computed again where a block turns out not to fit.
            is_full = (blocks >= 0) & (blocks < readable // BLOCK_SIZE)
            pair = row * (tl.num_programs(1) // head_tiles // sizes.repeats) + kv_head
            flags_ptr = find_flags(fp16_values, pair, sequence, key_start, layout, BLOCK_SIZE)
            flags = tl.load(flags_ptr + tl.where(is_full, blocks, 0), mask=is_full, other=FITS)
            fp16_ptr = fp16_values.data + row * fp16_strides[0] + kv_head * fp16_strides[2]
            fp16_source = KeySource(
                k_ptr, fp16_ptr, k_tiles, fp16_tiles, row, kv_head, strides.k[1], fp16_strides[1], key_start
            )
            sums = _attend_to_full_blocks(
                inputs, factors_ptr, fp16_source, selection, num_steps, EXACT, FP16=True, SUM_BY_PRODUCT=SUM_BY_PRODUCT,
                sizes=sizes, tile=tile,
            )  # fmt: skip
            if tl.min(flags.to(tl.int32), 0) != FITS:
                sums = _attend_to_full_blocks(
                    inputs, factors_ptr, source, selection, num_steps, EXACT, FP16=False, SUM_BY_PRODUCT=False,
                    sizes=sizes, tile=tile,
                )  # fmt: skip
        else:
            sums = _attend_to_full_blocks(
                inputs, factors_ptr, source, selection, num_steps, EXACT, FP16=False, SUM_BY_PRODUCT=False, sizes=sizes,
                tile=tile,
            )  # fmt: skip
        # A few keys of one block remain: small tiles read none in vain, and a short pipeline fills quickly.
        for step in tl.range(0, tl.cdiv(num_tail_keys, 16), num_stages=3):
            k, v, slot, is_read, read = load_step(source, selection, step, TAIL, 16, sizes, tile)
            factor = load_factor(factors_ptr, slot, is_read)
            sums = _attend(
                q, k, v, sums, factor * scale_log2, softcap, read, MASKED=True, EXACT=EXACT, FP16=False,
                SUM_BY_PRODUCT=False,
            )  # fmt: skip
    else:
        selection = select_row(indices_ptr, blocks, readable)
        for step in tl.range(0, sizes.num_selected * tl.cdiv(BLOCK_SIZE, BLOCK_N)):
            k, v, slot, is_read, read = load_step(source, selection, step, ANY, BLOCK_N, sizes, tile)
            factor = load_factor(factors_ptr, slot, is_read)
            sums = _attend(
                q, k, v, sums, factor * scale_log2, softcap, read, MASKED=True, EXACT=EXACT, FP16=False,
                SUM_BY_PRODUCT=False,
            )  # fmt: skip

    row_max, total, surplus, out = sums
    sums = (row_max, total, None if fp16_values is None else surplus, out)
    rows, num_heads = (row, token, heads, head_mask), tl.num_programs(1) // head_tiles * GROUP
    store_output(tensors, strides, rows, num_heads, layout, sums, sizes.value_dim, BLOCK_DV)


@triton.jit
def _attend_to_full_blocks(
    inputs,
    factors_ptr,
    source,
    selection,
    num_steps,
    EXACT: tl.constexpr,
    FP16: tl.constexpr,
    SUM_BY_PRODUCT: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Run the online softmax over the full blocks, in steps of `load_step`.

    Returns for each row the reference of the weights, their sum, the excess of the sum of rounded weights over it, and
    the weighted sum of values. inputs: q, scale in bits, softcap. factors_ptr: factors of the row, or None.
    """
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_DV: tl.constexpr = tile.block_dv
    q, scale_log2, softcap = inputs
    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # per key of a tile, summed at the end
    SUMS: tl.constexpr = ([BLOCK_M, 8] if SUM_BY_PRODUCT else [BLOCK_M, BLOCK_N]) if FP16 else [BLOCK_M]
    rounded = tl.zeros(SUMS, tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    sums = (row_max, totals, rounded, out)
    # A single loop, so that the pipeline runs on from block to block.
    for step in tl.range(0, num_steps):
        k, v, slot, is_read, read = load_step(source, selection, step, FULL, BLOCK_N, sizes, tile)
        factor = load_factor(factors_ptr, slot, is_read)
        sums = _attend(
            q, k, v, sums, factor * scale_log2, softcap, read, MASKED=False, EXACT=EXACT, FP16=FP16,
            SUM_BY_PRODUCT=SUM_BY_PRODUCT,
        )  # fmt: skip
    row_max, totals, rounded, out = sums
    total = tl.sum(totals, 1)
    if FP16:
        row_max -= HEADROOM
        rounded = tl.max(rounded, 1) - total if SUM_BY_PRODUCT else tl.sum(rounded, 1)
    return row_max, total, rounded, out


@triton.jit
def _attend(
    q,
    k,
    v,
    sums,
    scale_log2,
    softcap,
    read,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    FP16: tl.constexpr,
    SUM_BY_PRODUCT: tl.constexpr,
):
    """Add a tile of keys to the sums of an online softmax.

    read: mask of the keys, which are 0 outside it; if not MASKED, whether all are read. sums: row maximum; total
    [BLOCK_M], or if not MASKED [BLOCK_M, BLOCK_N]; the excess of the sum of rounded weights over the total, likewise,
    or with SUM_BY_PRODUCT their sum in 8 equal columns; and the weighted sum of values. EXACT: keep more bits of the
    weights than v has. FP16: v is float16 (fp16_values.py).
    """
    row_max, total, rounded_sum, out = sums
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if MASKED or softcap is not None:
        # A query that is not finite may read nothing here; a soft cap makes some of its logits finite.
        products = tl.where(read, products, 0.0)
    if softcap is not None:
        products = cap_logits(products * scale_log2, softcap * 1.4426950408889634)
        scale_log2 = 1.0
    bias = tl.where(read, 0.0, float('-inf'))
    new_max = tl.maximum(row_max, tl.max(tl.fma(products, scale_log2, bias), 1))
    reference = tl.where(new_max == float('-inf'), 0.0, new_max)
    rescale = tl.exp2(row_max - reference)
    if FP16:
        reference -= HEADROOM
    weights = tl.exp2(tl.fma(products, scale_log2, bias - reference[:, None]))
    total = tl.fma(total, rescale, tl.sum(weights, 1)) if MASKED else tl.fma(total, rescale[:, None], weights)
    if FP16:
        rounded = weights.to(v.dtype)
        if SUM_BY_PRODUCT:
            ones = tl.full([v.shape[0], 8], 1.0, v.dtype)
            rounded_sum = add_product(rounded, ones, rounded_sum * rescale[:, None])
        else:
            rounded_sum = tl.fma(rounded_sum, rescale[:, None], rounded.to(tl.float32) - weights)
        out = add_product(rounded, v, out * rescale[:, None])
    elif EXACT:
        rounded_sum = rounded_sum * rescale
        out = add_exact_product(weights, v, out * rescale[:, None])
    else:
        out = add_product(weights.to(v.dtype), v, out * rescale[:, None])
    return new_max, total, rounded_sum, out
