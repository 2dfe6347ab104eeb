"""Choice of regions in plain PyTorch, from the definition.

Attention, block scores and block selection within regions are the `eager` functions of the ops without regions, which
take the `Regions` that a query reads.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import compressed_block_end, num_compressed_blocks
from native_sparse_attention.ops._eager import (
    cap,
    compute_dtype,
    in_query_chunks,
    masked_softmax,
    select_first,
)
from native_sparse_attention.ops.compressed_regions.regions import RegionRules, make_region_keys, region_extents


@torch.no_grad()
def select_regions(q: Tensor, k_cmp: Tensor, sizes: tuple[int, int], call: Call, rules: RegionRules) -> Tensor:
    """Select the regions of compressed blocks that each query reads.

    The score of a region is the softmax weight of its key among the visible region keys, summed over the heads that
    select together. A region key is visible where all compressed blocks of the region are. Causal: always selected are
    the region of the newest compressed block that may be visible at the position of the query, the one before it, and
    region 0. Not causal: the region of the position, region 0, the neighbours of the former, and an incomplete last
    region. The remaining ones are the best; ties go to the lower region.

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        sizes: (l, d) of the compressed blocks.

    Returns:
        int32 `[B, T, H, R]` (`[B, T, HQ, R]` where heads select alone), ascending, padded at the end with -1.
    """
    sequences, causal, scale, softcap = call
    size, num_regions, share_group = rules
    batch, seqlen, heads, _ = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    float_dtype = compute_dtype(q.dtype)
    keys = make_region_keys(k_cmp, sequences, size, *sizes).to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    of_blocks, _ = sequences.compressed_layout(*sizes)
    extents = region_extents(size, *sizes)
    of_keys, _ = sequences.compressed_layout(*extents)
    key_index = torch.arange(keys.shape[1], device=q.device)
    # Of one sequence, the incomplete region included.
    region = torch.arange(-(-num_compressed // size), device=q.device)

    def select(start: int, stop: int) -> tuple[Tensor]:
        blocks, chunk = of_blocks.chunk(start, stop), of_keys.chunk(start, stop)
        position, count = blocks.position[..., None], blocks.key_len[..., None]
        complete, visible = chunk.key_position(key_index[None, None])
        if causal:
            visible = visible & (compressed_block_end(complete, *extents) <= position)
        logits = torch.einsum('bthgd,bshd->bthgs', queries[:, start:stop].to(float_dtype), keys) * scale
        weights, _ = masked_softmax(cap(logits, softcap), visible[:, :, None, None], float_dtype)
        # [B, T, HI, RC]
        weights = weights.sum(3) if share_group else rearrange(weights, 'b t h g s -> b t (h g) s')
        scores = weights.new_zeros(*weights.shape[:3], len(region))
        if len(key_index):
            slot = (region + chunk.key_start[..., None]).clamp(0, len(key_index) - 1)
            has_key = (region < chunk.key_len[..., None])[:, :, None]
            scores = torch.where(has_key, weights.gather(-1, slot[:, :, None].expand_as(scores)), 0)
        exists = region < (count + size - 1) // size
        if causal:
            own = (num_compressed_blocks(position + 1, *sizes) - 1) // size
            exists = exists & (region <= own)
            priority = (region == own) * 3 + (region == own - 1) * 2 + (region == 0)
        else:
            own = (position // extents[1]).clamp(min=0).minimum((count - 1) // size)
            incomplete = (region == count // size) & (count % size > 0)
            priority = (region == own) * 16 + incomplete * 8 + (region == 0) * 4
            priority = priority + (region == own - 1) * 2 + (region == own + 1)
        return (select_first(scores, priority[:, :, None], exists[:, :, None], num_regions),)

    with without_autocast(q):
        (indices,) = in_query_chunks(select, seqlen, batch * heads * max(len(key_index), len(region)), dims=(1,))
    return indices
