"""Steps of the kernels by query tile through the block union: block, queries that selected it, keys and values."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import is_small
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops.selected_attention.triton.index.block_union import load_flag
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import load_rows_of_indices


@triton.jit
def load_counts(union):
    """Load the three counts of the union of a program's tile (`BlockUnion`)."""
    counts_ptr = union.counts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 3
    return tl.load(counts_ptr), tl.load(counts_ptr + 1), tl.load(counts_ptr + 2)


@triton.jit
def is_skipped(union):
    """Return whether a program's tile is left to the kernel by query."""
    in_union = 1
    if union.flags is not None:
        in_union = load_flag(union, union.first_tile + tl.program_id(0), tl.program_id(1), tl.num_programs(1))
    return in_union == 0


@triton.jit
def find_union(union, index_head, UNION_SIZE: tl.constexpr):
    """Return the pointers to the blocks and the query bits of a program's tile."""
    offset = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + index_head) * UNION_SIZE
    return union.blocks + offset, union.query_bits + offset + offset // UNION_SIZE


@triton.jit
def count_steps(counts, union, pair, is_small_query, UNMASKED: tl.constexpr):
    """Return the blocks of a union; the first of them that need no containment of non-finite values, all or none; and
    the first of these that need no masks.

    counts: from `load_counts`. is_small_query: whether the other factors of products with k and v are small.
    """
    num_blocks, num_full, _ = counts
    num_clean = 0
    if UNMASKED:
        if is_small(union.large, pair, union.num_chunks) and is_small_query:
            num_clean = num_blocks
        num_full = tl.minimum(num_full, num_clean)
    return num_blocks, num_clean, num_full


@triton.jit
def find_reference(
    q,
    source,
    blocks_ptr,
    bits_ptr,
    num_blocks,
    position,
    num_keys,
    scale,
    softcap,
    KEYS_AS_ROWS: tl.constexpr,
    sizes: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the reference of the weights of full blocks, in bits, and whether it is a finite logit that the row reads.

    The reference is the largest logit of a row among the first keys of the sequence and the keys up to the tile's first
    query (at `position`), which usually contain the row's maximum; 0 if the row reads none of them. Only blocks whose
    place in the union depends on positions alone are used, so other queries do not change a bit of it. If not causal,
    that is the first block.

    KEYS_AS_ROWS: compute k q^T instead of q k^T. On Hopper the latter is an asynchronous product whose operand may stay
    in shared memory through the loops that follow, which costs the second program of an SM.
    """
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_G: tl.constexpr = tile.block_g
    BLOCK_M: tl.constexpr = tile.block_m
    BLOCK_T: tl.constexpr = BLOCK_M // BLOCK_G
    NUM_KEYS: tl.constexpr = 16  # of either kind
    lanes = tl.arange(0, 2 * NUM_KEYS)
    own_block = position // BLOCK_SIZE
    is_early = lanes < NUM_KEYS  # keys of the first block, which has at least as many
    keys = tl.where(is_early, lanes, position + 1 - 2 * NUM_KEYS + lanes)
    exists = is_early
    if sizes.causal:
        # The own block is the last of the union if it is the own block of all queries and one of them selected it.
        exists |= (keys >= own_block * BLOCK_SIZE) & (own_block == (position + BLOCK_T - 1) // BLOCK_SIZE)
    exists = exists & (keys >= 0) & (keys < num_keys)
    first_block, before_first, after_first = load_entry(blocks_ptr, bits_ptr, 0, num_blocks, 1)
    last = tl.maximum(num_blocks - 1, 0)
    last_block, before_last, after_last = load_entry(blocks_ptr, bits_ptr, last, num_blocks, 1)
    k = load_rows(
        source.k, source.key_start + keys, source.k_stride, exists, sizes.head_dim, tile.block_d, tile.int64_offsets
    )
    bits_of_first = tl.where(first_block == 0, after_first - before_first, 0)
    bits_of_last = tl.where(last_block == own_block, after_last - before_last, 0)
    query = (tl.arange(0, BLOCK_M) // BLOCK_G).to(tl.int64)
    bits = tl.where(is_early[None, :], bits_of_first, bits_of_last) >> query[:, None]
    if KEYS_AS_ROWS:
        products = tl.trans(tl.dot(k, tl.trans(q), input_precision='ieee'))
    else:
        products = tl.dot(q, tl.trans(k), input_precision='ieee')
    logits = products * (scale * 1.4426950408889634)
    if softcap is not None:
        logits = cap_logits(logits, softcap * 1.4426950408889634)
    largest = tl.max(tl.where(((bits & 1) != 0) & exists[None, :], logits, float('-inf')), 1)
    is_read = tl.abs(largest) < float('inf')
    return tl.where(is_read, largest, 0.0), is_read


@triton.jit
def load_entry(blocks_ptr, bits_ptr, step, num_blocks, SPLIT: tl.constexpr):
    """Return the block of a step and two numbers whose difference has a bit for every query that selected it.

    It is loaded one step ahead, like `load_entries`. The difference is taken in its own step: here it would wait for
    the loads.
    """
    index = step // SPLIT
    exists = index < num_blocks
    block = tl.load(blocks_ptr + index, mask=exists, other=0)
    before = tl.load(bits_ptr + index, mask=exists, other=0)
    return block, before, tl.load(bits_ptr + index + 1, mask=exists, other=0)


@triton.jit
def open_step(
    entry,
    step,
    num_keys,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the block of a step, the rows whose query selected it, the step's first key, all keys and their mask.

    entry: from `load_entry`. Not MASKED: all keys exist.
    """
    SPLIT: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    block, before, after = entry
    bits = after - before
    is_selected = (bits >> (tl.arange(0, BLOCK_M) // BLOCK_G).to(tl.int64)) & 1
    first = block * BLOCK_SIZE + step % SPLIT * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    key_mask = tl.full([BLOCK_N], 1, tl.int1)
    if MASKED:
        key_mask = keys < tl.minimum((block + 1) * BLOCK_SIZE, num_keys)
    return block, is_selected != 0, first, keys, key_mask


@triton.jit
def load_keys(source, first, mask, MASKED: tl.constexpr, sizes: tl.constexpr, tile: tl.constexpr):
    """Load k [BLOCK_N, BLOCK_D] and v [BLOCK_N, BLOCK_DV] of a step. source: `KeySource`. Not MASKED: all exist."""
    BLOCK_N: tl.constexpr = tile.block_n
    HEAD_DIM: tl.constexpr = sizes.head_dim
    VALUE_DIM: tl.constexpr = sizes.value_dim
    INT64_OFFSETS: tl.constexpr = tile.int64_offsets
    first += source.key_start
    if MASKED:
        rows = first + tl.arange(0, BLOCK_N)
        k = load_rows(source.k, rows, source.k_stride, mask, HEAD_DIM, tile.block_d, INT64_OFFSETS)
        v = load_rows(source.v, rows, source.v_stride, mask, VALUE_DIM, tile.block_dv, INT64_OFFSETS)
    else:
        k = load_tile(
            source.k_tiles, source.k, source.row, first, source.kv_head, source.k_stride, HEAD_DIM, BLOCK_N,
            tile.block_d, INT64_OFFSETS,
        )  # fmt: skip
        v = load_tile(
            source.v_tiles, source.v, source.row, first, source.kv_head, source.v_stride, VALUE_DIM, BLOCK_N,
            tile.block_dv, INT64_OFFSETS,
        )  # fmt: skip
    return k, v


@triton.jit
def locate_rows(
    first_query, num_queries, index_head, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return query (within its sequence), head and mask of every row of a query tile: BLOCK_G rows per query."""
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // BLOCK_G
    return queries, index_head * GROUP + rows % BLOCK_G, (queries < num_queries) & (rows % BLOCK_G < GROUP)


@triton.jit
def locate_tokens(query_start, first_query, num_queries, BLOCK_T: tl.constexpr):
    """Return token and mask of every query of a query tile."""
    queries = first_query + tl.arange(0, BLOCK_T)
    return (query_start + queries).to(tl.int64), queries < num_queries


@triton.jit
def load_indices_and_factors(
    tensors, strides, row, index_head, tokens, mask, NUM_SELECTED: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Load the indices and factors of every query of a tile, [BLOCK_T, BLOCK_S]; 0 and 0 without factors."""
    blocks = 0
    factors = 0
    if tensors.factors is not None:
        indices_ptr = tensors.indices + (row * strides.indices[0] + index_head * strides.indices[2])
        blocks = load_rows_of_indices(indices_ptr, tokens * strides.indices[1], mask, NUM_SELECTED, BLOCK_S)
        factors_ptr = tensors.factors + (row * strides.factors[0] + index_head * strides.factors[2])
        slots = tl.arange(0, BLOCK_S)
        mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
        offsets = (tokens * strides.factors[1])[:, None] + slots[None, :]
        factors = tl.load(factors_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return blocks, factors


@triton.jit
def repeat_for_heads(values, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    """Repeat values per query [BLOCK_T] for the rows of the tile [BLOCK_T * BLOCK_G]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [BLOCK_T, BLOCK_G]), [BLOCK_T * BLOCK_G])


@triton.jit
def find_slot(blocks, block, BLOCK_S: tl.constexpr):
    """Return the first slot of a block in each query's indices [BLOCK_T, BLOCK_S], BLOCK_S where it is absent."""
    return tl.min(tl.where(blocks == block, tl.arange(0, BLOCK_S)[None, :], BLOCK_S), 1)


@triton.jit
def pick_factor(factors, slot, BLOCK_S: tl.constexpr):
    """Return the factor in each query's slot, 0 if the slot is BLOCK_S."""
    slots = tl.arange(0, BLOCK_S)
    return tl.sum(tl.where(slots[None, :] == slot[:, None], factors, 0.0), 1)
