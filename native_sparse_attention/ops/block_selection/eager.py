"""Block scores and block selection in plain PyTorch, from the definition."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call, SelectionRules
from native_sparse_attention.core.geometry import (
    compressed_block_end,
    forced_priority,
    max_length_of_compressed,
    num_selection_blocks,
    overlapping_blocks,
    shared_tokens,
)
from native_sparse_attention.ops._eager import cap, compute_dtype, in_query_chunks

# Larger than every index, so that padding is sorted behind the blocks.
NO_BLOCK = 2**31 - 1


@torch.no_grad()
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, sizes: tuple[int, int, int], call: Call, rules: SelectionRules
) -> Tensor:
    sequences, causal, scale, softcap = call
    num_selected, num_init, num_local, num_recent, share_group, block_counts = rules
    batch, seqlen, heads, _ = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    block_size, stride, selection_block_size = sizes
    float_dtype = compute_dtype(q.dtype)
    k_cmp = k_cmp.to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    row_lse = rearrange(lse, 'b (h g) t -> b t h g 1', h=kv_heads)
    layout, tokens = sequences.compressed_layout(block_size, stride)
    longest = min(sequences.seqlen_k, max_length_of_compressed(num_compressed, block_size, stride))
    # [N]
    block = torch.arange(num_selection_blocks(longest, selection_block_size), device=q.device)
    index = torch.arange(num_compressed, device=q.device)
    blocks_per_selection = selection_block_size // stride

    def select(start: int, stop: int) -> tuple[Tensor]:
        chunk = layout.chunk(start, stop)
        compressed, visible = chunk.key_position(index[None, None])
        if causal:
            visible = visible & (compressed_block_end(compressed, block_size, stride) <= chunk.position[..., None])
        logits = torch.einsum('bthgd,bshd->bthgs', queries[:, start:stop].to(float_dtype), k_cmp) * scale
        exponent = cap(logits, softcap) - row_lse[:, start:stop].to(float_dtype)
        weights = exponent.masked_fill(~visible[:, :, None, None], -torch.inf).exp()
        # [B, T, HI, C]
        weights = weights.sum(3) if share_group else rearrange(weights, 'b t h g s -> b t (h g) s')
        scores = weights.new_zeros(*weights.shape[:3], block.shape[0])
        if num_compressed:
            for offset in overlapping_blocks(*sizes):
                compressed = (block * blocks_per_selection + offset)[None, None]
                exists = (compressed >= 0) & (compressed < chunk.key_len[..., None])
                slot = (compressed + chunk.key_start[..., None]).clamp(0, num_compressed - 1)
                weight = weights.gather(-1, slot[:, :, None].expand_as(scores))
                share = shared_tokens(offset, *sizes) / stride
                scores += torch.where(exists[:, :, None], weight * share, 0)
        own_block = (chunk.position[..., None] - num_recent) // selection_block_size
        selectable = block < num_selection_blocks(tokens[:, start:stop, None], selection_block_size)
        if causal:
            selectable = selectable & (block <= own_block)
        priority = forced_priority(block, own_block, num_init, num_local, causal)
        counts = None if block_counts is None else block_counts[:, start:stop, :, None]
        return (_select_first(scores, priority[:, :, None], selectable[:, :, None], num_selected, counts),)

    with without_autocast(q):
        (blocks,) = in_query_chunks(select, seqlen, batch * heads * max(num_compressed, block.shape[0]), dims=(1,))
    return blocks


def chosen_scores(
    q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, sizes: tuple[int, int, int], call: Call
) -> Tensor:
    sequences, causal, scale, softcap = call
    batch, seqlen, heads, head_dim = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    index_heads, num_selected = block_indices.shape[2:]
    block_size, stride, selection_block_size = sizes
    float_dtype = compute_dtype(q.dtype)
    # Cast once, so that gradients of keys that several queries read are summed in float32.
    k_cmp = k_cmp.to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=index_heads)
    row_lse = rearrange(lse, 'b (h g) t -> b t h g 1 1', h=index_heads)
    layout, tokens = sequences.compressed_layout(block_size, stride)
    overlapping = overlapping_blocks(*sizes)
    offsets = torch.arange(overlapping.start, overlapping.stop, device=q.device)
    share = shared_tokens(offsets, *sizes).to(float_dtype) / stride
    row = torch.arange(batch, device=q.device)[:, None, None, None, None]
    kv_head = (torch.arange(index_heads, device=q.device) // (index_heads // kv_heads))[:, None, None]

    def score(start: int, stop: int) -> tuple[Tensor]:
        chunk = layout.chunk(start, stop)
        position, key_start, key_len, length = (
            t[..., None, None, None] for t in (chunk.position, chunk.key_start, chunk.key_len, tokens[:, start:stop])
        )
        # [B, T, HI, n, 1]
        block = block_indices[:, start:stop, ..., None].long()
        exists = (block >= 0) & (block < num_selection_blocks(length, selection_block_size))
        if causal:
            exists = exists & (block <= position // selection_block_size)
        # [B, T, HI, n, offsets]
        compressed = block.where(exists, 0) * (selection_block_size // stride) + offsets
        visible = exists & (compressed >= 0) & (compressed < key_len)
        if causal:
            visible = visible & (compressed_block_end(compressed, block_size, stride) <= position)
        slot = (compressed + key_start).clamp(0, max(0, num_compressed - 1))
        keys = torch.where(visible[..., None], k_cmp[row, slot, kv_head], 0)
        logits = torch.einsum('bthgd,bthnod->bthgno', queries[:, start:stop].to(float_dtype), keys) * scale
        invisible = ~visible[:, :, :, None]
        # Invisible logits must not reach the slope of the soft cap.
        logits = cap(logits.masked_fill(invisible, 0), softcap)
        exponent = logits - row_lse[:, start:stop].to(float_dtype)
        weights = exponent.masked_fill(invisible, -torch.inf).exp()
        scores = torch.einsum('bthgno,o->bthn', weights, share)
        return (scores * (stride / (block_size * (heads // index_heads))),)

    if num_compressed == 0:
        return torch.zeros(block_indices.shape, dtype=float_dtype, device=q.device)
    elements = batch * index_heads * num_selected * len(overlapping) * max(head_dim, heads // index_heads)
    with without_autocast(q):
        (scores,) = in_query_chunks(score, seqlen, elements, dims=(1,))
    return scores


def straight_through_scale(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    sizes: tuple[int, int, int],
    call: Call,
    forced: tuple[int, int, int],
) -> Tensor:
    scores = chosen_scores(q, k_cmp, lse, block_indices, sizes, call)
    layout, _ = call.sequences.compressed_layout(*sizes[:2])
    num_init, num_local, num_recent = forced
    own_block = (layout.position[..., None, None] - num_recent) // sizes[2]
    is_forced = forced_priority(block_indices, own_block, num_init, num_local, call.causal) > 0
    return 1 + (scores - scores.detach()).masked_fill(is_forced, 0)


def _select_first(
    scores: Tensor, priority: Tensor, selectable: Tensor, num_selected: int, counts: Tensor | None = None
) -> Tensor:
    """Return the first `num_selected` blocks by priority, then score, then index: int32 `[..., n]`, ascending, padded
    with -1. counts `[..., 1]`: blocks per row, if fewer.
    """
    by_score = scores.sort(dim=-1, descending=True, stable=True).indices
    priority = torch.where(selectable, priority, -1).expand_as(scores).gather(-1, by_score)
    by_priority = priority.sort(dim=-1, descending=True, stable=True)
    first = by_score.gather(-1, by_priority.indices)
    first = torch.where(by_priority.values >= 0, first, NO_BLOCK)
    # Pad at every number of blocks, so that torch.compile needs one graph for numbers below and above num_selected.
    first = torch.nn.functional.pad(first, (0, num_selected), value=NO_BLOCK)[..., :num_selected]
    if counts is not None:
        first = torch.where(torch.arange(num_selected, device=first.device) < counts, first, NO_BLOCK)
    first = first.sort(-1).values
    return torch.where(first < NO_BLOCK, first, -1).int()
