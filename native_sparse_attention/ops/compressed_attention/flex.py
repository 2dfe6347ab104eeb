"""Compressed attention with FlexAttention; the memory pairs stand before the compressed keys."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import compressed_block_end, num_compressed_blocks
from native_sparse_attention.ops import _flex


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
    k, v = _flex.with_a_key(k_cmp, v_cmp)
    layout, _ = sequences.compressed_layout(block_size, stride)
    visible = num_compressed_blocks(layout.position + 1, block_size, stride) if causal else layout.key_len
    # [B, T, 1, 1]: the interval of compressed keys that a query reads.
    last = layout.key_start + visible.minimum(layout.key_len)
    first, last = (t.clamp(0, k.shape[1])[..., None, None] for t in (layout.key_start, last))
    last = last.maximum(first)
    num_memory = 0
    if mem_kv is not None:
        num_memory = mem_kv[0].shape[1]
        memory = (rearrange(mem, 'h m d -> 1 m h d').expand(len(q), -1, -1, -1) for mem in mem_kv)
        k, v = (concatenate(pair, 1) for pair in zip(memory, (k, v), strict=True))
    # [B, T]: memory pairs that a query reads.
    memory_read = layout.covered.long() * num_memory
    if num_memory:
        before = memory_read[..., None, None]
        first, last = torch.cat((before * 0, first + num_memory), -1), torch.cat((before, last + num_memory), -1)
    k, v, nonfinite = _flex.without_nonfinite(k, v)
    tiles = _flex.find_tiles(first, last, k.shape[1])
    extents = [t.int() for t in (layout.position, layout.key_start + num_memory, layout.key_len, memory_read)]
    q, k, v = (_flex.heads_first(t) for t in (q, k, v))
    out, lse = _flex.run(_attend, q, k, v, tiles, *extents, block_size, stride, causal, scale, softcap)
    return _flex.nonfinite_rows(out.transpose(1, 2), lse, nonfinite, first, last)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: _flex.Tiles,
    position: Tensor,
    key_start: Tensor,
    key_len: Tensor,
    memory_read: Tensor,
    block_size: int,
    stride: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        block = s - key_start[b, t]
        visible = (block >= 0) & (block < key_len[b, t])
        if causal:
            visible = visible & (compressed_block_end(block, block_size, stride) <= position[b, t])
        return visible | (s < memory_read[b, t])

    return _flex.attend(q, k, v, tiles, mask_mod, scale, _flex.capped(softcap))
