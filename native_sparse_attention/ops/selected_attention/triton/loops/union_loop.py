"""Steps of kernels of neighbours through the union of what queries chose: which block, whose, and its keys."""

# To pyright a jit function that another calls never returns, and a number is no constant.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.finite import is_small
from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import load_rows, load_tile
from native_sparse_attention.ops.selected_attention.triton.index.block_union import load_flag
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import load_choices


@triton.jit
def load_counts(sharing):
    """Those of the union of a program's tile: `Sharing`."""
    counts_ptr = sharing.counts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 3
    return tl.load(counts_ptr), tl.load(counts_ptr + 1), tl.load(counts_ptr + 2)


@triton.jit
def is_left_out(sharing):
    """Whether a program's tile is left to the kernel per query."""
    is_shared = 1
    if sharing.flags is not None:
        is_shared = load_flag(sharing, sharing.first_tile + tl.program_id(0), tl.program_id(1), tl.num_programs(1))
    return is_shared == 0


@triton.jit
def find_union(sharing, index_head, UNION: tl.constexpr):
    """Where the blocks of a program's tile begin, and who chose them."""
    in_unions = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + index_head) * UNION
    return sharing.blocks + in_unions, sharing.members + in_unions + in_unions // UNION


@triton.jit
def count_in_union(counts, sharing, pair, is_small_query, UNMASKED: tl.constexpr):
    """Blocks of a union; the first of them that are read without care, all or none; the first of these that are read
    without masks. counts: of `Sharing`. is_small_query: whether what is multiplied beside k and v is small.
    """
    num_blocks, num_whole, _ = counts
    num_clean = 0
    if UNMASKED:
        if is_small(sharing.large, pair, sharing.num_chunks) and is_small_query:
            num_clean = num_blocks
        num_whole = tl.minimum(num_whole, num_clean)
    return num_blocks, num_clean, num_whole


@triton.jit
def find_reference(
    q,
    source,
    blocks_ptr,
    members_ptr,
    num_blocks,
    position,
    num_keys,
    scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEYS_AS_ROWS: tl.constexpr,
):
    """What weights of whole blocks are relative to: the largest logit of every row, in bits, among the first keys of
    the sequence and those up to the tile's first query, `position`, which most often are the largest of all. Only of
    what a row reads, in blocks whose place in the union depends on positions alone: so nobody else changes a bit of it.
    Not causal, that is the first block. And whether there is such a logit, and it is finite; else it is 0.

    KEYS_AS_ROWS: by products that do not run by themselves on Hopper, whose operand might keep its place in shared
    memory through the loops that follow, and so a second program from an SM.
    """
    k_ptr, _, _, _, _, _, k_stride, _, key_start = source
    NUM_KEYS: tl.constexpr = 16  # of each
    place = tl.arange(0, 2 * NUM_KEYS)
    own_block = position // BLOCK_SIZE
    is_early = place < NUM_KEYS  # of the first block, which has as many at least
    keys = tl.where(is_early, place, position + 1 - 2 * NUM_KEYS + place)
    exists = is_early
    if CAUSAL:
        # The own block is the last of the union where it is that of all queries, and one of them chose it.
        exists |= (keys >= own_block * BLOCK_SIZE) & (own_block == (position + BLOCK_T - 1) // BLOCK_SIZE)
    exists = exists & (keys >= 0) & (keys < num_keys)
    first_block, before_first, after_first = load_entry(blocks_ptr, members_ptr, 0, num_blocks, 1)
    last = tl.maximum(num_blocks - 1, 0)
    last_block, before_last, after_last = load_entry(blocks_ptr, members_ptr, last, num_blocks, 1)
    k = load_rows(k_ptr, key_start + keys, k_stride, exists, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
    choose_first = tl.where(first_block == 0, after_first - before_first, 0)
    choose_last = tl.where(last_block == own_block, after_last - before_last, 0)
    member = (tl.arange(0, BLOCK_T * BLOCK_G) // BLOCK_G).to(tl.int64)
    choose = tl.where(is_early[None, :], choose_first, choose_last) >> member[:, None]
    if KEYS_AS_ROWS:
        products = tl.trans(tl.dot(k, tl.trans(q), input_precision='ieee'))
    else:
        products = tl.dot(q, tl.trans(k), input_precision='ieee')
    logits = products * (scale * 1.4426950408889634)
    if softcap is not None:
        logits = cap_logits(logits, softcap * 1.4426950408889634)
    largest = tl.max(tl.where(((choose & 1) != 0) & exists[None, :], logits, float('-inf')), 1)
    is_read = tl.abs(largest) < float('inf')
    return tl.where(is_read, largest, 0.0), is_read


@triton.jit
def load_entry(blocks_ptr, members_ptr, step, num_blocks, SPLIT: tl.constexpr):
    """The block that a step is of, and two numbers whose difference is who chose it, a bit for every query. To be
    loaded a step ahead, as `load_entries`: what is made of them here would wait for them in the step before.
    """
    place = step // SPLIT
    exists = place < num_blocks
    block = tl.load(blocks_ptr + place, mask=exists, other=0)
    before = tl.load(members_ptr + place, mask=exists, other=0)
    return block, before, tl.load(members_ptr + place + 1, mask=exists, other=0)


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
    block, before, after = entry
    members = after - before
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
    INT64_OFFSETS: tl.constexpr,
):
    """k `[BLOCK_N, BLOCK_D]` and v `[BLOCK_N, BLOCK_DV]` of a step. source: where they are. MASKED: the mask
    says which are there.
    """
    k_ptr, v_ptr, k_tiles, v_tiles, row, kv_head, k_stride, v_stride, key_start = source
    first += key_start
    if MASKED:
        rows = first + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, rows, k_stride, mask, HEAD_DIM, BLOCK_D, INT64_OFFSETS)
        v = load_rows(v_ptr, rows, v_stride, mask, VALUE_DIM, BLOCK_DV, INT64_OFFSETS)
    else:
        k = load_tile(k_tiles, k_ptr, row, first, kv_head, k_stride, True, HEAD_DIM, BLOCK_N, BLOCK_D, INT64_OFFSETS)
        v = load_tile(v_tiles, v_ptr, row, first, kv_head, v_stride, True, VALUE_DIM, BLOCK_N, BLOCK_DV, INT64_OFFSETS)
    return k, v


@triton.jit
def rows_of_tile(
    first_query, num_queries, index_head, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Query in its sequence and head of every row, and whether there are such: every query with every head."""
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // BLOCK_G
    return queries, index_head * GROUP + rows % BLOCK_G, (queries < num_queries) & (rows % BLOCK_G < GROUP)


@triton.jit
def members_of_tile(query_start, first_query, num_queries, BLOCK_T: tl.constexpr):
    """Token of every query of a tile, and whether there is such."""
    members = first_query + tl.arange(0, BLOCK_T)
    return (query_start + members).to(tl.int64), members < num_queries


@triton.jit
def load_choices_and_factors(
    indices_ptr,
    factors_ptr,
    indices_strides,
    factors_strides,
    row,
    index_head,
    tokens,
    mask,
    NUM_SELECTED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What every query of a tile chose and the factors of its logits, `[BLOCK_T, BLOCK_S]`; 0 and 0 without factors."""
    choices = 0
    factors = 0
    if factors_ptr is not None:
        indices_ptr += row * indices_strides[0] + index_head * indices_strides[2]
        choices = load_choices(indices_ptr, tokens * indices_strides[1], mask, NUM_SELECTED, BLOCK_S)
        factors_ptr += row * factors_strides[0] + index_head * factors_strides[2]
        slots = tl.arange(0, BLOCK_S)
        mask = mask[:, None] & (slots < NUM_SELECTED)[None, :]
        places = (tokens * factors_strides[1])[:, None] + slots[None, :]
        factors = tl.load(factors_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return choices, factors


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
