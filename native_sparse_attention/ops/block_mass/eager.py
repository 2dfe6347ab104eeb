"""Eager mass of full attention by selection block, in query chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import QueryLayout, in_window, num_selection_blocks
from native_sparse_attention.ops._eager import cap, compute_dtype, in_query_chunks


@torch.no_grad()
def block_mass(q: Tensor, k: Tensor, tokens: QueryLayout, rules: MassRules, call: Call) -> Tensor:
    batch, num_queries, heads, _ = q.shape
    dtype, (seqlen_k, kv_heads) = compute_dtype(q.dtype), k.shape[1:3]
    count = num_selection_blocks(seqlen_k, rules.block_size)
    group = heads // kv_heads if rules.share_group else 1
    keys, index = k.to(dtype), torch.arange(seqlen_k, device=q.device)
    in_blocks = torch.arange(count * rules.block_size, device=q.device)
    queries, least = q.to(dtype).unflatten(2, (kv_heads, -1)) * call.scale, torch.finfo(dtype).min

    def weigh(start: int, stop: int) -> tuple[Tensor]:
        chunk = tokens.chunk(start, stop)
        position, visible = chunk.key_position(index[None, None])
        own = chunk.position[..., None]
        if call.causal:
            visible = visible & (position <= own)
        far = visible if rules.window_size is None else visible & ~in_window(position, own, *rules.window_size)
        # The largest tensor of the op, so it is changed in place.
        logits = cap(torch.einsum('bthgd,bshd->bthgs', queries[:, start:stop], keys), call.softcap)
        weights = logits.masked_fill_(~visible[:, :, None, None], least).softmax(-1)
        weights = weights.flatten(2, 3).unflatten(2, (-1, group)).mean(3).masked_fill_(~far[:, :, None], 0)
        if call.sequences.cu_seqlens is None:
            weights = torch.nn.functional.pad(weights, (0, len(in_blocks) - seqlen_k))
        else:  # blocks count from the first key of a sequence
            slot = chunk.key_start[..., None] + in_blocks
            of_sequence = in_blocks < chunk.key_len[..., None]
            slot = slot.clamp(max=seqlen_k - 1)[:, :, None].expand(-1, -1, weights.shape[2], -1)
            weights = weights.gather(-1, slot).masked_fill(~of_sequence[:, :, None], 0)
        return (weights.unflatten(-1, (count, rules.block_size)).sum(-1),)

    if not seqlen_k:
        return q.new_zeros(batch, num_queries, heads // group, 0, dtype=dtype)
    with without_autocast(q):
        (mass,) = in_query_chunks(weigh, num_queries, batch * heads * seqlen_k, dims=(1,))
    return mass
