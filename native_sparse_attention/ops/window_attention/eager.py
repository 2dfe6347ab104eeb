"""Window attention in plain PyTorch, from the definition."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.geometry import Sequences, in_window
from native_sparse_attention.ops import _random
from native_sparse_attention.ops._eager import compute_dtype, in_query_chunks, masked_attention, without_autocast
from native_sparse_attention.ops._modifiers import OFF, Modifiers

# Queries that share one read of their window, where the window is narrower than that.
CHUNK_QUERIES = 256


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    left: int,
    right: int,
    scale: float,
    modifiers: Modifiers = OFF,
) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    float_dtype = compute_dtype(q.dtype)
    # Cast here, once, so that gradients of keys that several chunks read are added in float32.
    k, v = k.to(float_dtype), v.to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    layout = sequences.layout()
    # Tables of queries by keys are read whole, and the keys with them.
    whole = modifiers.bias is not None or modifiers.attn_mask is not None
    bounded = min(left, right) >= 0 and sequences.queries_follow_keys and not whole
    chunk_queries = max(left + right, CHUNK_QUERIES) if bounded else seqlen
    span = min(seqlen_k, chunk_queries + left + right) if bounded else seqlen_k

    row = torch.arange(batch, device=q.device)[:, None]

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        chunk = layout.chunk(start, stop)
        # [1 or B, keys]: the keys between the first query's leftmost and the last query's rightmost, or all.
        num_keys = stop - start + left + right
        if bounded and start < stop and num_keys < seqlen_k:
            first = (chunk.key_start + chunk.position)[:, :1] - left
            index = first + torch.arange(num_keys, device=q.device)
            in_memory = index.clamp(0, seqlen_k - 1)
            keys, values = k[row, in_memory], v[row, in_memory]
        else:
            index = in_memory = torch.arange(seqlen_k, device=q.device)[None]
            keys, values = k, v
        # [B, T, keys]
        key_position, own = chunk.key_position(index[:, None])
        visible = own & in_window(key_position, chunk.position[..., None], left, right)
        if modifiers.query_segments is not None and modifiers.key_segments is not None:
            query_segment = modifiers.query_segments[:, start:stop, None]
            same = query_segment == modifiers.key_segments[row, in_memory][:, None]
            visible = visible & same & (query_segment >= 0)
        visible = visible[:, None]
        bias, attn_mask, kept = modifiers.bias, modifiers.attn_mask, None
        if attn_mask is not None:
            visible = visible & attn_mask[:, :, start:stop]
        if bias is not None:
            bias = bias[:, :, start:stop].to(float_dtype)
        if modifiers.dropout_seed is not None:
            rows_of_batch, head = (torch.arange(size, device=q.device) for size in (batch, heads))
            query = torch.arange(start, stop, device=q.device)
            place = (rows_of_batch[:, None, None, None], head[:, None, None], query[:, None], in_memory[:, None, None])
            kept = _random.keep(modifiers.dropout_seed, modifiers.dropout_p, *place).to(float_dtype)
            kept = kept / (1 - modifiers.dropout_p)
        return masked_attention(
            queries[:, start:stop].to(float_dtype),
            keys,
            values,
            visible,
            scale,
            q.dtype,
            softcap=modifiers.softcap,
            bias=bias,
            sinks=modifiers.sinks,
            kept=kept,
        )

    with without_autocast(q):
        out, lse = in_query_chunks(attend, seqlen, batch * heads * span, dims=(1, 2), chunk=chunk_queries)
    return out, lse
