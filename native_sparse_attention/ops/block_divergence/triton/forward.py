"""Forward kernels of `block_divergence`: log-sum-exp of the blocks by head, divergence of each row, their mean."""

# To pyright a jit function that another calls never returns, a number is no constant, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from native_sparse_attention.ops._triton.softcap import cap_logits
from native_sparse_attention.ops._triton.tiles import load_rows
from native_sparse_attention.ops.block_divergence.triton.tiles import (
    LOG2_E,
    NO_KEY,
    load_extents,
    locate_rows,
    share_of,
)

# As in eager.
TINY = tl.constexpr(1e-20)


@triton.jit
def block_lse_kernel(
    q_ptr,
    k_ptr,
    drawn,
    block_lse_ptr,
    part_lse_ptr,
    q_strides,
    k_strides,
    sizes,
    scale,
    softcap,
    meta: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """q: `[B, T, HQ, D]`. k: `[B, C, H, D]`. block_lse: `[B, queries of the launch, HQ, blocks]`, base 2, of the logits
    of compressed keys, weighted by their share of the block; written where a query counts. part_lse: `[B, queries of
    the launch, HQ, parts]`, of the keys that begin in BLOCK_J blocks.

    One program per BLOCK_J blocks and tile of BLOCK_M queries, each with the heads of a KV head.
    """
    num_queries = sizes.stop_query - sizes.first_query
    parts, tiles = tl.cdiv(sizes.num_blocks, BLOCK_J), tl.cdiv(num_queries * meta.group, BLOCK_M)
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts % tiles
    batch_row = (tl.program_id(0) // (parts * tiles)).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    places, tokens, heads, is_query, first_keys, visible = locate_rows(
        tile, drawn, batch_row, kv_head, sizes, meta, BLOCK_M
    )
    q_ptr += batch_row * q_strides[0] + heads[:, None] * q_strides[2]
    q = load_rows(q_ptr, tokens, q_strides[1], visible > 0, meta.head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    k_ptr += batch_row * k_strides[0] + kv_head * k_strides[2]
    places -= batch_row * (sizes.num_queries - num_queries) + sizes.first_query
    out_rows = places * (tl.num_programs(1) * meta.group) + heads
    scale_log2 = (scale if softcap is None else 1.0) * LOG2_E

    columns = part * BLOCK_J + tl.arange(0, BLOCK_J)
    row_max = tl.full([BLOCK_M], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    first = tl.min(tl.where(visible > 0, first_keys, NO_KEY), 0)
    while first < NO_KEY:  # for each sequence of the queries
        is_member = (first_keys == first) & (visible > 0)
        members_see = tl.where(is_member, visible, 0)
        num_seen = tl.max(members_see, 0)
        block_total = tl.zeros([BLOCK_M, BLOCK_J], tl.float32)
        reference = tl.zeros([BLOCK_M], tl.float32)
        is_seen = part * BLOCK_J * meta.per_selection + meta.first_offset < num_seen
        num_offsets = tl.where(is_seen, meta.per_selection - meta.first_offset, 0)
        for step in tl.range(0, num_offsets):
            offset = meta.first_offset + step
            keys = columns * meta.per_selection + offset
            exists = (keys >= 0) & (keys < num_seen)
            k = load_rows(k_ptr, first + keys, k_strides[1], exists, meta.head_dim, BLOCK_D, meta.int64_offsets)
            logits = tl.dot(q, tl.trans(k), input_precision='ieee')  # [BLOCK_M, BLOCK_J]
            if softcap is not None:
                logits = cap_logits(logits * scale, softcap)
            seen = exists[None, :] & (keys[None, :] < members_see[:, None])
            logits = tl.where(seen, logits * scale_log2, float('-inf'))
            new_max = tl.maximum(row_max, tl.max(logits, 1))
            reference = tl.where(new_max == float('-inf'), 0.0, new_max)
            weights = tl.exp2(logits - reference[:, None])
            rescale = tl.exp2(row_max - reference)
            row_max = new_max
            # A key begins in one block, though it may reach into others.
            total = total * rescale + tl.where(offset >= 0, tl.sum(weights, 1), 0.0)
            block_total = block_total * rescale[:, None] + weights * share_of(offset, meta)
        out = block_lse_ptr + out_rows[:, None] * sizes.num_blocks + columns[None, :]
        mask = is_member[:, None] & (columns < sizes.num_blocks)[None, :]
        tl.store(out, tl.log2(block_total) + reference[:, None], mask=mask)
        first = tl.min(tl.where((visible > 0) & (first_keys > first), first_keys, NO_KEY), 0)
    tl.store(part_lse_ptr + out_rows * parts + part, row_max + tl.log2(total), mask=is_query)


@triton.jit
def divergence_kernel(
    block_lse_ptr,
    part_lse_ptr,
    mass_ptr,
    drawn,
    divergence_ptr,
    dscores_ptr,
    lse_ptr,
    delta_ptr,
    mass_strides,
    sizes,
    num_parts,
    meta: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """block_lse, part_lse: as `block_lse_kernel` writes them. mass: `[B, R, HI, blocks]`. divergence: `[B, R, HI]`,
    -inf for a row that does not count. dscores: `[B, R, HI, blocks]`, the gradient of the divergence by the score of
    each of the heads that select together. lse: `[B, R, HQ]`, base 2. delta: `[B, R, HQ]`, the sum of dscores
    times the scores of the head.

    One program per row of an index head.
    """
    num_queries = sizes.stop_query - sizes.first_query
    local = tl.program_id(0).to(tl.int64)
    batch_row, query = local // num_queries, sizes.first_query + local % num_queries
    place, index_head = batch_row * sizes.num_queries + query, tl.program_id(1).to(tl.int64)
    _, visible, near, beyond, end = load_extents(drawn, place, mask=True, sizes=sizes, meta=meta)
    heads = tl.arange(0, BLOCK_G)
    is_head = heads < meta.group
    num_heads = tl.num_programs(1) * meta.group
    heads_in = local * num_heads + index_head * meta.group + heads
    heads_out = place * num_heads + index_head * meta.group + heads

    row_max = tl.full([BLOCK_G], float('-inf'), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for first_part in tl.range(0, num_parts, BLOCK_P):
        parts = first_part + tl.arange(0, BLOCK_P)
        mask = is_head[:, None] & (parts < num_parts)[None, :]
        pointers = part_lse_ptr + heads_in[:, None] * num_parts + parts[None, :]
        part_lse = tl.load(pointers, mask=mask, other=float('-inf'))  # [BLOCK_G, BLOCK_P]
        new_max = tl.maximum(row_max, tl.max(part_lse, 1))
        reference = tl.where(new_max == float('-inf'), 0.0, new_max)
        total = total * tl.exp2(row_max - reference) + tl.sum(tl.exp2(part_lse - reference[:, None]), 1)
        row_max = new_max
    lse = tl.where(is_head & (visible > 0), row_max + tl.log2(total), 0.0)
    tl.store(lse_ptr + heads_out, lse, mask=is_head)

    mass_ptr += batch_row * mass_strides[0] + query * mass_strides[1] + index_head * mass_strides[2]
    block_lse_ptr += heads_in[:, None] * sizes.num_blocks
    num_candidates = near + tl.maximum(end - beyond, 0)
    masses = tl.zeros([BLOCK_J], tl.float32)
    mean_scores = tl.zeros([BLOCK_J], tl.float32)
    cross = tl.zeros([BLOCK_J], tl.float32)
    for first in tl.range(0, tl.maximum(near, end), BLOCK_J):
        columns = first + tl.arange(0, BLOCK_J)
        is_candidate = (columns < near) | ((columns >= beyond) & (columns < end))
        score = tl.sum(_load_scores(block_lse_ptr, columns, is_candidate, is_head, lse), 0) / meta.group + TINY
        mass = tl.load(mass_ptr + columns * mass_strides[3], mask=is_candidate, other=0.0)
        masses += mass
        mean_scores += tl.where(is_candidate, score, 0.0)
        cross += tl.where(mass == 0, 0.0, mass * tl.log(mass / score))
    total_mass = tl.sum(masses, 0)
    total_score = tl.sum(mean_scores, 0) + (sizes.num_blocks - num_candidates) * TINY
    counts = total_mass > 0
    # KL(t || s) of t = mass / total_mass and s = score / total_score.
    divergence = tl.sum(cross, 0) / total_mass + tl.log(total_score / total_mass)
    row = place * tl.num_programs(1) + index_head
    tl.store(divergence_ptr + row, tl.where(counts, divergence, float('-inf')))

    dscores_ptr += row * sizes.num_blocks
    near, end = tl.where(counts, near, 0), tl.where(counts, end, 0)
    delta = tl.zeros([BLOCK_G], tl.float32)
    for first in tl.range(0, sizes.num_blocks, BLOCK_J):
        columns = first + tl.arange(0, BLOCK_J)
        is_candidate = (columns < near) | ((columns >= beyond) & (columns < end))
        scores = _load_scores(block_lse_ptr, columns, is_candidate, is_head, lse)
        score = tl.sum(scores, 0) / meta.group + TINY
        mass = tl.load(mass_ptr + columns * mass_strides[3], mask=is_candidate, other=0.0)
        dscores = (1.0 / total_score - mass / total_mass / score) / meta.group
        dscores = tl.where(is_candidate, dscores, 0.0)
        delta += tl.sum(dscores[None, :] * scores, 1)
        tl.store(dscores_ptr + columns, dscores, mask=columns < sizes.num_blocks)
    tl.store(delta_ptr + heads_out, delta, mask=is_head)


@triton.jit
def _load_scores(block_lse_ptr, columns, is_candidate, is_head, lse):
    """Return the scores `[BLOCK_G, BLOCK_J]` of heads, 0 where there is no candidate."""
    mask = is_head[:, None] & is_candidate[None, :]
    block_lse = tl.load(block_lse_ptr + columns[None, :], mask=mask, other=float('-inf'))
    return tl.exp2(block_lse - lse[:, None])


@triton.jit
def mean_kernel(divergence_ptr, loss_ptr, weight_ptr, num_rows, BLOCK: tl.constexpr):
    """divergence: `[B, R, HI]`. loss: their mean over the rows that count; weight: of each of them in the mean."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, num_rows, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        divergence = tl.load(divergence_ptr + rows, mask=rows < num_rows, other=float('-inf'))
        counts = divergence != float('-inf')
        total += tl.where(counts, divergence, 0.0)
        count += tl.where(counts, 1.0, 0.0)
    weight = 1.0 / tl.maximum(tl.sum(count, 0), 1.0)
    tl.store(weight_ptr, weight)
    tl.store(loss_ptr, tl.sum(total, 0) * weight)
