"""Window attention with FlexAttention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import in_window
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops import _flex


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], call: Call, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    left, right = window
    modifiers = _prepare(modifiers, k.shape[1])
    k, v, nonfinite = _flex.without_nonfinite(*_flex.with_a_key(k, v))
    layout = call.sequences.layout()
    # [B, T, 1, 1]: the interval of keys that a query reads.
    first = layout.position - left if left >= 0 else layout.position * 0
    last = layout.position + right + 1 if right >= 0 else layout.key_len
    first, last = (
        (t.clamp(min=0).minimum(layout.key_len) + layout.key_start).clamp(0, k.shape[1])[..., None, None]
        for t in (first, last)
    )
    last = last.maximum(first)
    has_tables = modifiers.bias is not None or modifiers.attn_mask is not None
    has_segments = modifiers.query_segments is not None
    tiles = _flex.find_tiles(first, last, k.shape[1], all_are_read=not (has_tables or has_segments))
    extents = [t.int() for t in (layout.position, layout.key_start, layout.key_len)]
    q, k, v = (_flex.heads_first(t) for t in (q, k, v))
    out, lse = _flex.run(_attend, q, k, v, tiles, *extents, left, right, call.scale, modifiers)
    out = out.transpose(1, 2)
    if has_tables:
        is_nonfinite = _read_nonfinite(nonfinite, first, last, modifiers)
        return _flex.with_nan(out, lse, is_nonfinite.repeat_interleave(lse.shape[1] // is_nonfinite.shape[1], 1).mT)
    if modifiers.query_segments is not None and modifiers.key_segments is not None:
        nonfinite, first, last = _by_segment(nonfinite, first, last, modifiers.query_segments, modifiers.key_segments)
    return _flex.nonfinite_rows(out, lse, nonfinite, first, last)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: _flex.Tiles,
    position: Tensor,
    key_start: Tensor,
    key_len: Tensor,
    left: int,
    right: int,
    scale: float,
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor]:
    query_segments, key_segments = modifiers.query_segments, modifiers.key_segments
    bias, attn_mask = modifiers.bias, modifiers.attn_mask
    score_mod = _flex.capped(modifiers.softcap)

    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        key_position = s - key_start[b, t]
        own = (key_position >= 0) & (key_position < key_len[b, t])
        visible = own & in_window(key_position, position[b, t], left, right)
        if query_segments is not None and key_segments is not None:
            visible = visible & (query_segments[b, t] == key_segments[b, s]) & (query_segments[b, t] >= 0)
        if attn_mask is not None:
            visible = visible & _entry(attn_mask, b, h, t, s)
        if bias is not None:
            visible = visible & (_entry(bias, b, h, t, s) != -torch.inf)
        return visible

    if bias is None:
        return _flex.attend(q, k, v, tiles, mask_mod, scale, score_mod, pipelined=attn_mask is None)

    def biased(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, h, t, s)
        return score + _entry(bias, b, h, t, s)

    return _flex.attend(q, k, v, tiles, mask_mod, scale, biased, pipelined=False)


def _entry(table: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """Return entries of a table `[B or 1, HQ or 1, T, S]`."""
    return table[b % table.shape[0], h % table.shape[1], t, s]


def _prepare(modifiers: Modifiers, seqlen_k: int) -> Modifiers:
    """Return the modifiers detached, and padded for the added key if there is no other."""
    # FlexAttention refuses parameters in a mask, also where no gradient is recorded.
    modifiers = modifiers._replace(bias=None if modifiers.bias is None else modifiers.bias.detach())
    if seqlen_k:
        return modifiers
    key_segments, bias, attn_mask = modifiers.key_segments, modifiers.bias, modifiers.attn_mask
    if key_segments is not None:
        key_segments = F.pad(key_segments, (0, 1), value=-1)
    bias, attn_mask = (t if t is None else F.pad(t, (0, 1)) for t in (bias, attn_mask))
    return modifiers._replace(key_segments=key_segments, bias=bias, attn_mask=attn_mask)


def _by_segment(
    nonfinite: Tensor, first: Tensor, last: Tensor, query_segments: Tensor, key_segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `nonfinite [B, S, H]` sorted by key segment, and where each query's own segment lies in it.

    first, last: `[B, T, 1, 1]`.
    """
    seqlen_k = key_segments.shape[1]
    # Within a segment, keys are sorted by index.
    sort_key = key_segments.long() * (seqlen_k + 1) + torch.arange(seqlen_k, device=nonfinite.device)
    sort_key, order = sort_key.sort(1)
    segment_start = query_segments.long() * (seqlen_k + 1)
    first, last = (
        torch.searchsorted(sort_key, segment_start + t[..., 0, 0]).masked_fill(query_segments < 0, 0)[..., None, None]
        for t in (first, last)
    )
    return nonfinite.gather(1, order[..., None].expand_as(nonfinite)), first, last


def _read_nonfinite(nonfinite: Tensor, first: Tensor, last: Tensor, modifiers: Modifiers) -> Tensor:
    """Return bool `[B, HQ or H, T]`: whether a query reads a key of `nonfinite [B, S, H]` under bias and attn_mask."""
    key = torch.arange(nonfinite.shape[1], device=nonfinite.device)
    # [B, HQ or 1, T, S]
    visible = ((first[..., 0] <= key) & (key < last[..., 0]))[:, None]
    if modifiers.query_segments is not None and modifiers.key_segments is not None:
        of_query = modifiers.query_segments[:, None, :, None]
        visible = visible & (of_query == modifiers.key_segments[:, None, None]) & (of_query >= 0)
    if modifiers.attn_mask is not None:
        visible = visible & modifiers.attn_mask
    if modifiers.bias is not None:
        visible = visible & (modifiers.bias != -torch.inf)
    heads = nonfinite.shape[2]
    visible = visible.unflatten(1, (1, 1) if visible.shape[1] == 1 else (heads, -1))
    # Counts in bfloat16 are inexact, but a count is above 0 exactly if a non-finite key is read.
    counts = torch.einsum('bhgts,bsh->bhgt', visible.bfloat16(), nonfinite.bfloat16())
    return counts.flatten(1, 2) > 0
