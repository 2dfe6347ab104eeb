"""Compressed attention in plain PyTorch, from the definition."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import compressed_block_end
from native_sparse_attention.ops._eager import compute_dtype, in_query_chunks, masked_attention


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int],
    call: Call,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (block_size, stride), (sequences, causal, scale, softcap) = sizes, call
    batch, seqlen, heads, _ = q.shape
    num_compressed, kv_heads = k_cmp.shape[1:3]
    float_dtype = compute_dtype(q.dtype)
    # Cast once, so that gradients of keys that several chunks read are summed in float32.
    keys, values = k_cmp.to(float_dtype), v_cmp.to(float_dtype)
    num_memory = 0
    if mem_kv is not None:
        num_memory = mem_kv[0].shape[1]
        memory = (mem.to(float_dtype).transpose(0, 1).expand(batch, -1, -1, -1) for mem in mem_kv)
        keys, values = (torch.cat(pair, 1) for pair in zip(memory, (keys, values), strict=True))
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    layout, _ = sequences.compressed_layout(block_size, stride)
    index = torch.arange(num_compressed, device=q.device)

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        chunk = layout.chunk(start, stop)
        # [B, T, C]
        block, visible = chunk.key_position(index[None, None])
        if causal:
            visible = visible & (compressed_block_end(block, block_size, stride) <= chunk.position[..., None])
        visible = torch.cat((chunk.covered[..., None].expand(-1, -1, num_memory), visible), -1)
        return masked_attention(
            queries[:, start:stop].to(float_dtype),
            keys,
            values,
            visible[:, None],
            scale,
            q.dtype,
            softcap=softcap,
            sinks=sinks,
        )

    with without_autocast(q):
        out, lse = in_query_chunks(attend, seqlen, batch * heads * num_compressed, dims=(1, 2))
    return out, lse
