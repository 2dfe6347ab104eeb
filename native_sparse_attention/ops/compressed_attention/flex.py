"""Compressed attention with FlexAttention; the memory pairs stand before the compressed keys."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.geometry import Sequences, compressed_block_end, num_compressed_blocks
from native_sparse_attention.ops._flex import (
    Tiles,
    attend,
    find_tiles,
    heads_first,
    run,
    with_a_key,
    zero_unread,
)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sequences: Sequences,
    block_size: int,
    stride: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    k, v = with_a_key(k_cmp, v_cmp)
    layout, _ = sequences.compressed_layout(block_size, stride)
    visible = num_compressed_blocks(layout.position + 1, block_size, stride) if causal else layout.key_len
    # [B, T, 1, E]: the interval of compressed keys that a query reads.
    first = layout.key_start.clamp(0, k.shape[1])[..., None, None]
    last = (layout.key_start + visible.minimum(layout.key_len)).clamp(0, k.shape[1])[..., None, None].maximum(first)
    k, v = (zero_unread(t, first, last) for t in (k, v))
    num_mem = layout.covered.int() * (0 if mem_kv is None else mem_kv[0].shape[1])
    if mem_kv is not None:
        pairs = zip(mem_kv, (k, v), strict=True)
        k, v = (torch.cat((rearrange(mem, 'h m d -> 1 m h d').expand(len(t), -1, -1, -1), t), 1) for mem, t in pairs)
        memory = num_mem.long()[..., None, None]
        shift = mem_kv[0].shape[1]
        first, last = torch.cat((memory * 0, first + shift), -1), torch.cat((memory, last + shift), -1)
    key_start = layout.key_start + (0 if mem_kv is None else mem_kv[0].shape[1])
    k, v = heads_first(k), heads_first(v)
    tiles = find_tiles(first, last, k.shape[2])
    extents = [t.int() for t in (layout.position, key_start, layout.key_len, num_mem)]
    out, lse = run(_attend, heads_first(q), k, v, tiles, *extents, block_size, stride, causal, scale)
    return out.transpose(1, 2), lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    position: Tensor,
    key_start: Tensor,
    key_len: Tensor,
    num_mem: Tensor,
    block_size: int,
    stride: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        block = s - key_start[b, t]
        visible = (block >= 0) & (block < key_len[b, t])
        if causal:
            visible = visible & (compressed_block_end(block, block_size, stride) <= position[b, t])
        return visible | (s < num_mem[b, t])

    return attend(q, k, v, tiles, mask_mod, scale)
