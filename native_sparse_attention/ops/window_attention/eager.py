"""Window attention in plain PyTorch, from the definition."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import in_window
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops import _eager

# Smallest number of queries per chunk: they share one copy of the keys in their windows.
CHUNK_QUERIES = 256


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], call: Call, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    left, right = window
    batch, seqlen, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    float_dtype = _eager.compute_dtype(q.dtype)
    # Cast once, so that gradients of keys that several chunks read are summed in float32.
    k, v = k.to(float_dtype), v.to(float_dtype)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=kv_heads)
    layout = call.sequences.layout()
    # With a table of queries by keys, a chunk reads all keys.
    has_tables = modifiers.bias is not None or modifiers.attn_mask is not None
    bounded = min(left, right) >= 0 and call.sequences.queries_follow_keys and not has_tables
    chunk_queries = max(left + right, CHUNK_QUERIES) if bounded else seqlen
    span = min(seqlen_k, chunk_queries + left + right) if bounded else seqlen_k

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        chunk = layout.chunk(start, stop)
        # [1 or B, keys]: the keys between the first query's leftmost and the last query's rightmost, or all.
        num_keys = stop - start + left + right
        if bounded and start < stop and num_keys < seqlen_k:
            first = (chunk.key_start + chunk.position)[:, :1] - left
            index = first + torch.arange(num_keys, device=q.device)
            row = torch.arange(batch, device=q.device)[:, None]
            in_memory = index.clamp(0, seqlen_k - 1)
            keys, values = k[row, in_memory], v[row, in_memory]
        else:
            index = in_memory = torch.arange(seqlen_k, device=q.device)[None]
            keys, values = k, v
        # [B, T, keys]
        key_position, own = chunk.key_position(index[:, None])
        visible = own & in_window(key_position, chunk.position[..., None], left, right)
        bias = modifiers.bias
        return _eager.masked_attention(
            queries[:, start:stop].to(float_dtype),
            keys,
            values,
            _allowed(visible, modifiers, start, stop, in_memory),
            call.scale,
            q.dtype,
            softcap=modifiers.softcap,
            bias=None if bias is None else bias[:, :, start:stop].to(float_dtype),
            sinks=modifiers.sinks,
            kept=_eager.dropout_factors(modifiers, batch, heads, start, stop, in_memory, float_dtype),
        )

    with without_autocast(q):
        out, lse = _eager.in_query_chunks(attend, seqlen, batch * heads * span, dims=(1, 2), chunk=chunk_queries)
    return out, lse


def _allowed(visible: Tensor, modifiers: Modifiers, start: int, stop: int, index: Tensor) -> Tensor:
    """Return `[B, HQ or 1, T, keys]`: visible `[B, T, keys]` and allowed by segments and attn_mask.

    start, stop: the queries. index: `[1 or B, keys]`, positions along the key axis; all of them with an attn_mask.
    """
    query_segments, key_segments, attn_mask = modifiers.query_segments, modifiers.key_segments, modifiers.attn_mask
    if query_segments is not None and key_segments is not None:
        of_query = query_segments[:, start:stop, None]
        of_key = key_segments.gather(1, index.expand(len(key_segments), -1))[:, None]
        visible = visible & (of_query == of_key) & (of_query >= 0)
    visible = visible[:, None]
    return visible if attn_mask is None else visible & attn_mask[:, :, start:stop]
