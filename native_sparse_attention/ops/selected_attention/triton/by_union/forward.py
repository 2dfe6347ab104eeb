"""Forward kernel of selected attention with one program per query tile and index head.

A query with few heads leaves most rows of a tile empty, and neighbouring queries with many heads may have selected the
same blocks. So a program computes several neighbouring queries and loops in order over their `BlockUnion`. Shapes and
names are those of the kernels by query.
"""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import LARGE, is_small_tile
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import add_product, load_rows, split_finite
from native_sparse_attention.ops._triton.varlen import load_extent, locate_queries
from native_sparse_attention.ops.selected_attention.triton.arguments import KeySource
from native_sparse_attention.ops.selected_attention.triton.fp16_values import add_exact_product
from native_sparse_attention.ops.selected_attention.triton.loops.epilogue import store_output
from native_sparse_attention.ops.selected_attention.triton.loops.union_loop import (
    count_steps,
    find_reference,
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

# Float16 weights of full blocks are in units of 2 ** -FIXED_HEADROOM: weights down to this factor below the reference
# keep all of their bits, and float16 has as much room above it.
FIXED_HEADROOM = tl.constexpr(4.0)


@triton.jit
def union_forward_kernel(
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
    NEGATIVE_SCALE: tl.constexpr,
):
    """Compute outputs and log-sum-exps of BLOCK_M / BLOCK_G queries with all heads of an index head.

    union: tiles whose flag is 0 are left to the kernel by query. The rest is as in that kernel.
    """
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    NUM_SELECTED: tl.constexpr = sizes.num_selected
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_DV: tl.constexpr = tile.block_dv
    BLOCK_T: tl.constexpr = BLOCK_M // tile.block_g
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
    queries, heads, mask = locate_rows(first_query, num_queries, index_head, sizes.group, tile.block_g, BLOCK_M)
    tokens = (query_start + queries).to(tl.int64)
    positions = offset + queries
    k_ptr = tensors.k + (row * strides.k[0] + index_head // sizes.repeats * strides.k[2])
    v_ptr = tensors.v + (row * strides.v[0] + index_head // sizes.repeats * strides.v[2])
    q_ptr = tensors.q + row * strides.q[0]
    q = load_rows(q_ptr, tokens * strides.q[1] + heads * strides.q[2], 1, mask, sizes.head_dim, tile.block_d)
    if NEGATIVE_SCALE:
        # The largest product of a row must belong to its largest logit.
        q, scale = -q, -scale
    tile_tokens, token_mask = locate_tokens(query_start, first_query, num_queries, BLOCK_T)
    blocks, factors = load_indices_and_factors(
        tensors, strides, row, index_head, tile_tokens, token_mask, NUM_SELECTED, tile.block_s
    )

    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    blocks_ptr, bits_ptr = find_union(union, index_head, tile.union_size)
    pair = row * (tl.num_programs(1) // sizes.repeats) + index_head // sizes.repeats
    kv_head = index_head // sizes.repeats
    source = KeySource(k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, strides.k[1], strides.v[1], key_start)
    # In float32 the products dominate, so masks cost nothing and one loop saves seconds of compilation.
    UNMASKED: tl.constexpr = BLOCK_SIZE % tile.block_n == 0 and q.dtype != tl.float32
    # With factors, the logits of one block do not bound those of another.
    FIXED: tl.constexpr = UNMASKED and tensors.factors is None
    row_max, is_read = tl.full([BLOCK_M], float('-inf'), tl.float32), tl.full([BLOCK_M], 0, tl.int1)
    if FIXED:
        row_max, is_read = find_reference(
            q, source, blocks_ptr, bits_ptr, counts[0], offset + first_query, num_keys, scale, softcap,
            KEYS_AS_ROWS=fp16_values is None, sizes=sizes, tile=tile,
        )  # fmt: skip
    EXACT: tl.constexpr = tensors.low_bits is not None
    surplus = tl.zeros([BLOCK_M], tl.float32)
    inputs = (q, blocks, factors, num_keys, positions, scale, softcap, mask, is_read)
    pointers = (blocks_ptr, bits_ptr)
    if fp16_values is not None:
        fp16_ptr = fp16_values.data + row * fp16_strides[0] + kv_head * fp16_strides[2]
        fp16_source = KeySource(
            k_ptr, fp16_ptr, k_tiles, fp16_tiles, row, kv_head, strides.k[1], fp16_strides[1], key_start
        )
        row_max, total, surplus, out = _attend_in_fp16(
            inputs, source, fp16_source, pointers, counts, (row_max, total, out), SUM_BY_PRODUCT, sizes, tile
        )
    else:
        steps = count_steps(counts, union, pair, is_small_tile(q), UNMASKED)
        row_max, total, out = _attend_in_input_dtype(
            inputs, source, pointers, steps, counts[1], (row_max, total, out), HAS_FACTORS=tensors.factors is not None,
            UNMASKED=UNMASKED, FIXED=FIXED, EXACT=EXACT, sizes=sizes, tile=tile,
        )  # fmt: skip

    sums = (row_max, total, None if fp16_values is None else surplus, out)
    rows, num_heads = (row, tokens, heads, mask), tl.num_programs(1) * sizes.group
    store_output(tensors, strides, rows, num_heads, layout, sums, sizes.value_dim, BLOCK_DV)


@triton.jit
def _attend_in_input_dtype(
    inputs,
    source,
    pointers,
    steps,
    num_full,
    sums,
    HAS_FACTORS: tl.constexpr,
    UNMASKED: tl.constexpr,
    FIXED: tl.constexpr,
    EXACT: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Run the online softmax of a tile over its union, with values in their own dtype.

    First come the full blocks, without masks and, if FIXED, relative to the fixed reference in `sums`; then the other
    blocks. Where values may not be small, one loop over all blocks contains non-finite values instead; it runs twice if
    FIXED, the second time with a running maximum for the rows whose weights are not near the reference. The bits of
    other rows are the same in all of these passes.
    """
    SPLIT: tl.constexpr = (sizes.block_size + tile.block_n - 1) // tile.block_n
    ROWS: tl.constexpr = tile.block_m
    BLOCK_DV: tl.constexpr = tile.block_dv
    reference, total, out = sums
    q, mask, is_read = inputs[0], inputs[7], inputs[8]
    blocks_ptr, bits_ptr = pointers
    num_blocks, num_clean, num_unmasked = steps
    no_sums = tl.zeros([ROWS], tl.float32)
    first = num_full * SPLIT
    is_fixed = tl.full([ROWS], FIXED, tl.int1)
    passes = 2 if FIXED else 1
    row_max = reference
    if UNMASKED:
        entry = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, SPLIT)
        for step in tl.range(0, num_unmasked * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, _, out = _attend(
                inputs, source, entry, None, None, (row_max, total, no_sums, out), step, HAS_FACTORS, MASKED=False,
                CONTAIN_NONFINITE=False, EXACT=EXACT, FP16=False, SUM_BY_PRODUCT=False, FIXED=FIXED, sizes=sizes,
                tile=tile,
            )  # fmt: skip
            entry = following
        if FIXED:
            is_fixed = _are_near(total, is_read, num_unmasked, q.dtype) | (mask == 0)
            row_max = tl.where(total == 0, float('-inf'), row_max)
            if tl.min(is_fixed.to(tl.int32), 0) == 0:
                num_clean, passes = 0, 1
        for step in tl.range(first, num_clean * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, _, out = _attend(
                inputs, source, entry, None, None, (row_max, total, no_sums, out), step, HAS_FACTORS, MASKED=True,
                CONTAIN_NONFINITE=False, EXACT=EXACT, FP16=False, SUM_BY_PRODUCT=False, FIXED=False, sizes=sizes,
                tile=tile,
            )  # fmt: skip
            entry = following
    if num_clean < num_blocks:
        for _turn in tl.range(passes):
            row_max = tl.where(is_fixed, reference, float('-inf'))
            total, total_of_full, out = no_sums, no_sums, tl.zeros([ROWS, BLOCK_DV], tl.float32)
            entry = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, SPLIT)
            for step in tl.range(0, num_blocks * SPLIT, num_stages=2):
                following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
                row_max = tl.where((step >= first) & (total == 0), float('-inf'), row_max)
                row_max, total, _, out = _attend(
                    inputs, source, entry, None, is_fixed & (step < first), (row_max, total, no_sums, out), step,
                    HAS_FACTORS, MASKED=True, CONTAIN_NONFINITE=True, EXACT=EXACT, FP16=False, SUM_BY_PRODUCT=False,
                    FIXED=False, sizes=sizes, tile=tile,
                )  # fmt: skip
                total_of_full = tl.where(step < first, total, total_of_full)
                entry = following
            is_fixed = is_fixed & (_are_near(total_of_full, is_read, num_full, q.dtype) | (mask == 0))
    return row_max, total, out


@triton.jit
def _are_near(total, is_read, num_full, dtype: tl.constexpr):
    """Return whether sums of weights relative to a fixed reference are reliable.

    They must not be too large, nor so small that products with small values vanish. Where the reference is a logit that
    the row reads (`is_read`), a small sum is small only relative to the rest of the union.
    """
    LEAST: tl.constexpr = 1.0 if dtype == tl.float16 else 2.0**-20
    MOST: tl.constexpr = 2.0**15 if dtype == tl.float16 else 2.0**60
    return ((is_read | (total > LEAST)) & (total < MOST)) | (num_full == 0)


@triton.jit
def _attend_in_fp16(
    inputs,
    source,
    fp16_source,
    pointers,
    counts,
    sums,
    SUM_BY_PRODUCT: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Run the online softmax of a tile over its union: full blocks that fit float16, then the others.

    The others contain non-finite values where they are not small. So the bits of a row depend neither on the selections
    of other rows nor on later queries.
    """
    SPLIT: tl.constexpr = (sizes.block_size + tile.block_n - 1) // tile.block_n
    BLOCK_M: tl.constexpr = tile.block_m
    row_max, total, out = sums
    q, mask, is_read = inputs[0], inputs[7], inputs[8]
    blocks_ptr, bits_ptr = pointers
    num_blocks, num_fitting, are_small = counts
    are_small = are_small != 0
    is_small_row = tl.min((tl.abs(q.to(tl.float32)) < LARGE).to(tl.int32), 1) != 0
    SUMS: tl.constexpr = [BLOCK_M, 8] if SUM_BY_PRODUCT else [BLOCK_M]
    rounded = tl.zeros(SUMS, tl.float32)
    entry = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, SPLIT)
    for step in tl.range(0, num_fitting * SPLIT):
        following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
        row_max, total, rounded, out = _attend(
            inputs, fp16_source, entry, None, None, (row_max, total, rounded, out), step, HAS_FACTORS=False,
            MASKED=False, CONTAIN_NONFINITE=False, EXACT=True, FP16=True, SUM_BY_PRODUCT=SUM_BY_PRODUCT, FIXED=True,
            sizes=sizes, tile=tile,
        )  # fmt: skip
        entry = following
    surplus = tl.max(rounded, 1) - total if SUM_BY_PRODUCT else rounded
    # Where the row reads its reference, a small sum is small only relative to the rest of the union.
    is_near = (is_read | (total > 2.0**FIXED_HEADROOM)) & (surplus - surplus == 0)
    is_kept = (is_small_row & (is_near | (num_fitting == 0))) | (mask == 0)
    # The unit of the weights.
    row_max = tl.where(total == 0, float('-inf'), row_max - FIXED_HEADROOM)

    first = num_fitting * SPLIT
    if tl.min(is_kept.to(tl.int32), 0) == 0:
        # The products of some rows may be NaN, even for blocks that they did not select: compute those rows again.
        first, are_small = 0, False
        row_max, out = tl.where(is_kept, row_max, float('-inf')), tl.where(is_kept[:, None], out, 0.0)
        total, surplus = tl.where(is_kept, total, 0.0), tl.where(is_kept, surplus, 0.0)
    if are_small:
        # Usually the steps of one block.
        entry = load_entry(blocks_ptr, bits_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT, num_stages=2):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                inputs, source, entry, None, None, (row_max, total, surplus, out), step, HAS_FACTORS=False, MASKED=True,
                CONTAIN_NONFINITE=False, EXACT=True, FP16=False, SUM_BY_PRODUCT=False, FIXED=False, sizes=sizes,
                tile=tile,
            )  # fmt: skip
            entry = following
    else:
        entry = load_entry(blocks_ptr, bits_ptr, first, num_blocks, SPLIT)
        for step in tl.range(first, num_blocks * SPLIT):
            following = load_entry(blocks_ptr, bits_ptr, step + 1, num_blocks, SPLIT)
            row_max, total, surplus, out = _attend(
                inputs, source, entry, (is_kept & (step < num_fitting * SPLIT)) == 0, None,
                (row_max, total, surplus, out), step, HAS_FACTORS=False, MASKED=True, CONTAIN_NONFINITE=True,
                EXACT=True, FP16=False, SUM_BY_PRODUCT=False, FIXED=False, sizes=sizes, tile=tile,
            )  # fmt: skip
            entry = following
    return row_max, total, surplus, out


@triton.jit
def _attend(
    inputs,
    source,
    entry,
    takes,
    is_fixed,
    sums,
    step,
    HAS_FACTORS: tl.constexpr,
    MASKED: tl.constexpr,
    CONTAIN_NONFINITE: tl.constexpr,
    EXACT: tl.constexpr,
    FP16: tl.constexpr,
    SUM_BY_PRODUCT: tl.constexpr,
    FIXED: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Add a tile of keys to the sums of an online softmax: part step % SPLIT of block step // SPLIT of the union.

    takes: rows that add it, None for all. Not MASKED: the queries that selected the block read all keys of the tile.
    Not CONTAIN_NONFINITE: all products are finite. EXACT, FP16: as in the kernel by query. sums: row maximum, total,
    excess of the sum of rounded weights over the total (their sum, with SUM_BY_PRODUCT), and the weighted sum of
    values. FIXED: the reference of the weights does not change; is_fixed: it does not for these rows, or None. The
    scale is not negative.
    """
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_N: tl.constexpr = tile.block_n
    BLOCK_S: tl.constexpr = tile.block_s
    q, blocks, factors, num_keys, positions, scale, softcap, _, _ = inputs
    row_max, total, rounded_sum, out = sums
    block, is_selected, first, keys, key_mask = open_step(
        entry, step, num_keys, MASKED, BLOCK_SIZE, BLOCK_M, BLOCK_G, BLOCK_N
    )
    if takes is not None:
        is_selected = is_selected & takes
    k, v = load_keys(source, first, key_mask, MASKED, sizes, tile)
    scale_log2 = tl.full([BLOCK_M], scale * 1.4426950408889634, tl.float32)
    if HAS_FACTORS:
        factor = pick_factor(factors, find_slot(blocks, block, BLOCK_S), BLOCK_S)
        scale_log2 *= repeat_for_heads(factor, BLOCK_M // BLOCK_G, BLOCK_G)
    read = is_selected[:, None] & key_mask[None, :]
    if MASKED and sizes.causal:
        read = read & (keys[None, :] <= positions[:, None])
    products = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_N]
    if softcap is not None:
        products = cap_logits(products * scale_log2[:, None], softcap * 1.4426950408889634)
        scale_log2 = tl.full([BLOCK_M], 1.0, tl.float32)
    # A mask per row instead of per product. Factors may be negative or anything.
    BY_ROW: tl.constexpr = not MASKED and not HAS_FACTORS
    if CONTAIN_NONFINITE:
        v, nonfinite_rows = split_finite(v)
        out += tl.sum(tl.where(read, nonfinite_rows[None, :], 0.0), 1)[:, None]
    new_max, reference = row_max, row_max
    if FIXED:
        reference = row_max - FIXED_HEADROOM if FP16 else row_max
    else:
        if BY_ROW:
            largest = tl.where(is_selected, tl.max(products, 1) * scale_log2, float('-inf'))
        else:
            largest = tl.max(tl.where(read, products * scale_log2[:, None], float('-inf')), 1)
        new_max = tl.maximum(row_max, largest)
        if is_fixed is not None:
            new_max = tl.where(is_fixed, row_max, new_max)
        reference = tl.where(new_max == float('-inf'), 0.0, new_max)
        rescale = tl.exp2(row_max - reference)
        total, out = total * rescale, out * rescale[:, None]
        rounded_sum = rounded_sum * rescale
    shift = tl.where(is_selected, -reference, float('-inf')) if BY_ROW else -reference
    weights = tl.exp2(tl.fma(products, scale_log2[:, None], shift[:, None]))
    if not BY_ROW:
        weights = tl.where(read, weights, 0.0)
    total += tl.sum(weights, 1)
    if FP16:
        rounded = weights.to(v.dtype)
        if SUM_BY_PRODUCT:
            rounded_sum = add_product(rounded, tl.full([BLOCK_N, 8], 1.0, v.dtype), rounded_sum)
        else:
            rounded_sum += tl.sum(rounded.to(tl.float32) - weights, 1)
        out = add_product(rounded, v, out)
    elif EXACT:
        out = add_exact_product(weights, v, out)
    else:
        out = add_product(weights.to(v.dtype), v, out)
    return new_max, total, rounded_sum, out
