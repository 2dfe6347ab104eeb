"""Mass of full attention by block: what a perfect choice of blocks would know, for `benchmarks.learning` alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.geometry import overlapping_blocks, shared_tokens

QUERIES = 128  # of a tile
# Keeps the logarithm of a score finite that underflowed.
TINY = 1e-20


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
    grid = (triton.cdiv(num_queries, QUERIES), batch * heads)
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


def dense_mass_loss(
    q: Tensor, k: Tensor, q_cmp: Tensor, k_cmp: Tensor, *, sizes: tuple[int, int, int], near: int, num_rows: int
) -> Tensor:
    """Return KL(mass || scores) over the blocks before the window, the mean over a random query of each stripe.

    The mass is that of full attention, without gradient, of num_rows queries of a sequence: the cost is linear in T.
    Blocks that lie in the window in part count with the part before it.

    q, k: with rotary embedding. q_cmp, k_cmp: what scores are computed from. sizes: l, d, l'.
    """
    (seqlen, dim), kv_heads, block_size = q.shape[1::2], k.shape[2], sizes[2]
    num_blocks, stripe = -(-seqlen // block_size), seqlen // num_rows
    t = torch.arange(num_rows, device=q.device) * stripe + torch.randint(stripe, (num_rows,), device=q.device)
    with torch.no_grad():
        # [B, H, R, blocks]
        mass = far_mass(q[:, t], k, t, block_size, near).mT
        far = mass.sum(-1, keepdim=True)
        counts = (t >= near + block_size)[None, None] & (far[..., 0] > TINY)
        target = mass / far.clamp(min=TINY)
        may_be_far = torch.arange(num_blocks, device=q.device) * block_size <= t[:, None] - near
    with torch.autocast(q.device.type, enabled=False):
        own = q_cmp[:, t].unflatten(2, (kv_heads, -1)).float()
        scored = torch.einsum('brhgd,bchd->bhgrc', own, k_cmp.float()) * dim**-0.5
        end = torch.arange(k_cmp.shape[1], device=q.device) * sizes[1] + sizes[0] - 1
        # Rows without a visible compressed block do not count.
        shares = scored.masked_fill(end > t[:, None], torch.finfo(torch.float32).min).softmax(-1).mean(2)
        share_of_block = _overlaps(k_cmp.shape[1], num_blocks, sizes, q.device)
        scores = (shares @ share_of_block).masked_fill(~may_be_far, 0) + TINY
        log_scores = scores.log() - scores.sum(-1, keepdim=True).log()
        divergence = (torch.special.xlogy(target, target) - target * log_scores).sum(-1)
        return divergence.where(counts, 0).sum() / counts.sum().clamp(min=1)


def _overlaps(num_compressed: int, num_blocks: int, sizes: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return `[compressed blocks, blocks]`, the weight of each compressed block in the score of each block."""
    block = torch.arange(num_blocks, device=device)
    weights = torch.zeros(num_compressed, num_blocks, device=device)
    for offset in overlapping_blocks(*sizes):
        compressed = block * (sizes[2] // sizes[1]) + offset
        share = shared_tokens(offset, *sizes) / sizes[1]
        weights += (torch.arange(num_compressed, device=device)[:, None] == compressed) * share
    return weights
