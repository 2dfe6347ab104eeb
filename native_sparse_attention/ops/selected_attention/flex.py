"""Selected attention with FlexAttention.

The heads that share selected blocks become consecutive queries of one head. So a query tile holds few tokens, the union
of their blocks is small, and k and v are not repeated.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import num_selection_blocks
from native_sparse_attention.ops import _flex

# The mask loads one index per selected block. With more blocks than this, the loads of several pipeline stages may
# exceed shared memory; with block_scale they do.
FEW_BLOCKS = 16


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_scale: Tensor | None, block_size: int, call: Call
) -> tuple[Tensor, Tensor]:
    sequences, causal, scale, softcap = call
    k, v, nonfinite = _flex.without_nonfinite(*_flex.with_a_key(k, v))
    index_heads, num_selected = block_indices.shape[2:]
    rows_per_token = q.shape[2] // index_heads
    layout = sequences.layout()
    # [B, T]: number of keys of its sequence that a query may read.
    num_keys = layout.key_len
    if causal:
        num_keys = num_keys.minimum(layout.position + 1).clamp(min=0)
    # [B, T, HI, n]: selected blocks, -1 where an index names none, and their key intervals.
    key_start, end = (t[..., None, None] for t in (layout.key_start, layout.key_start + num_keys))
    readable = (block_indices >= 0) & (block_indices < num_selection_blocks(num_keys, block_size)[..., None, None])
    blocks = torch.where(readable, block_indices, -1).int()
    first = torch.where(readable, key_start + blocks.long() * block_size, 0).clamp(0, k.shape[1])
    last = torch.where(readable, (first + block_size).minimum(end), 0).clamp(0, k.shape[1])
    tiles = _flex.find_tiles(first, last, k.shape[1], rows_per_token)
    rows = rearrange(q, 'b t (h r) d -> b h (t r) d', h=index_heads).contiguous()
    extents = [t.int() for t in (layout.key_start, num_keys)]
    if num_selected == 0:
        block_scale = None
    if block_scale is not None:
        block_scale = block_scale.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    settings = (block_size, num_selected, rows_per_token, _flex.rows_of_tile(rows_per_token), scale, softcap)
    k, v = _flex.heads_first(k), _flex.heads_first(v)
    out, lse = _flex.run(_attend, rows, k, v, tiles, *extents, blocks, block_scale, *settings)
    out = rearrange(out, 'b h (t r) d -> b t (h r) d', r=rows_per_token)
    lse = rearrange(lse, 'b h (t r) -> b (h r) t', r=rows_per_token)
    return _flex.nonfinite_rows(out, lse, nonfinite, first, last)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: _flex.Tiles,
    key_start: Tensor,
    num_keys: Tensor,
    blocks: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    num_selected: int,
    rows_per_token: int,
    tile_rows: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    def mask_mod(b: Tensor, h: Tensor, row: Tensor, s: Tensor) -> Tensor:
        t = row // rows_per_token
        key_position = s - key_start[b, t]
        block = key_position // block_size
        is_selected = s < 0
        for i in range(num_selected):
            is_selected = is_selected | (blocks[b, t, h, i] == block)
        return is_selected & (key_position >= 0) & (key_position < num_keys[b, t])

    cap = _flex.capped(softcap)
    if block_scale is None:
        return _flex.attend(q, k, v, tiles, mask_mod, scale, cap, tile_rows, pipelined=num_selected <= FEW_BLOCKS)

    def scale_block(score: Tensor, b: Tensor, h: Tensor, row: Tensor, s: Tensor) -> Tensor:
        t = row // rows_per_token
        block = (s - key_start[b, t]) // block_size
        # The first entry of a repeated index counts, so the loop runs backwards.
        entry = s * 0
        for i in reversed(range(num_selected)):
            entry = torch.where(blocks[b, t, h, i] == block, i, entry)
        score = score * block_scale[b, t, h, entry]
        return score if cap is None else cap(score, b, h, row, s)

    return _flex.attend(q, k, v, tiles, mask_mod, scale, scale_block, tile_rows, pipelined=False)
