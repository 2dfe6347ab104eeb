"""Mass of full attention by block: what a perfect choice of blocks would know, for `benchmarks.learning` alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 128  # of a tile


@triton.jit
def _block_lse_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    block_lse_ptr,
    lse_ptr,
    scale,
    num_queries,
    seqlen,
    num_blocks,
    near,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Write the log-sum-exp of each block's keys before the last `near` tokens, and that of all causal keys."""
    tile, row = tl.program_id(0), tl.program_id(1)
    batch, head = row // HEADS, row % HEADS
    kv_heads: tl.constexpr = HEADS // GROUP
    query = tile * QUERIES + tl.arange(0, QUERIES)
    feature, token = tl.arange(0, DIM), tl.arange(0, BLOCK)
    is_query = query < num_queries
    t = tl.load(position_ptr + query, mask=is_query, other=0)
    base = batch.to(tl.int64) * seqlen
    q_row = (batch.to(tl.int64) * num_queries + query) * HEADS + head
    q = tl.load(q_ptr + q_row[:, None] * DIM + feature[None], mask=is_query[:, None], other=0.0)
    top = tl.full((QUERIES,), -float('inf'), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    for block in range(tl.max(t) // BLOCK + 1):
        s = block * BLOCK + token
        k_row = (base + s) * kv_heads + head // GROUP
        k = tl.load(k_ptr + k_row[None] * DIM + feature[:, None], mask=s[None] < seqlen, other=0.0)
        logits = tl.dot(q, k) * scale
        logits = tl.where(s[None] <= t[:, None], logits, -float('inf'))
        new_top = tl.maximum(top, tl.max(logits, 1))
        exponent = tl.where(new_top == -float('inf'), 0.0, new_top)
        weights = tl.exp(logits - exponent[:, None])
        total = total * tl.exp(top - exponent) + tl.sum(weights, 1)
        top = new_top
        far = tl.sum(tl.where(s[None] <= t[:, None] - near, weights, 0.0), 1)
        out = (row.to(tl.int64) * num_blocks + block) * num_queries + query
        tl.store(block_lse_ptr + out, tl.log(far) + exponent, mask=is_query)
    tl.store(lse_ptr + row.to(tl.int64) * num_queries + query, top + tl.log(total), mask=is_query)


@torch.no_grad()
def far_mass(q: Tensor, k: Tensor, position: Tensor, block_size: int, near: int) -> Tensor:
    """Return the share of the keys before the last `near` tokens in causal attention, by block.

    q: `[B, R, HQ, D]` queries at the positions `[R]`. k: `[B, T, H, D]`. On a GPU; D is a power of two.

    Returns:
        float32 `[B, H, blocks, R]`, the sum over the query heads of a KV head.
    """
    batch, num_queries, heads, dim = q.shape
    seqlen, kv_heads = k.shape[1:3]
    num_blocks = -(-seqlen // block_size)
    block_lse = torch.full((batch, heads, num_blocks, num_queries), -torch.inf, device=q.device)
    lse = torch.empty(batch, heads, num_queries, device=q.device)
    grid = (-(-num_queries // QUERIES), batch * heads)
    _block_lse_kernel[grid](
        *(q.contiguous(), k.contiguous(), position, block_lse, lse),
        *(dim**-0.5, num_queries, seqlen, num_blocks, near),
        HEADS=heads,  # pyright: ignore[reportArgumentType]
        GROUP=heads // kv_heads,  # pyright: ignore[reportArgumentType]
        DIM=dim,  # pyright: ignore[reportArgumentType]
        BLOCK=block_size,  # pyright: ignore[reportArgumentType]
        QUERIES=QUERIES,  # pyright: ignore[reportArgumentType]
    )
    return block_lse.sub_(lse[:, :, None]).exp_().unflatten(1, (kv_heads, -1)).sum(2)


@torch.no_grad()
def heaviest_blocks(q: Tensor, k: Tensor, block_size: int, near: int, num_selected: int) -> Tensor:
    """Return the blocks of most `far_mass`, int32 `[B, T, H, n]`, padded with -1."""
    mass = far_mass(q, k, torch.arange(q.shape[1], device=q.device), block_size, near).transpose(2, 3)
    best, blocks = mass.topk(min(num_selected, mass.shape[-1]), dim=-1)
    return blocks.masked_fill(best == 0, -1).transpose(1, 2).int()
