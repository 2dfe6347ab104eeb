"""Window attention with FlexAttention."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.geometry import Sequences, in_window
from native_sparse_attention.ops._flex import (
    Tiles,
    attend,
    find_tiles,
    heads_first,
    run,
    with_a_key,
    zero_unread,
)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = with_a_key(k, v)
    layout = sequences.layout()
    # [B, T]: the interval of keys that a query reads.
    first = layout.position - left if left >= 0 else layout.position * 0
    last = layout.position + right + 1 if right >= 0 else layout.key_len
    first, last = (
        (t.clamp(min=0).minimum(layout.key_len) + layout.key_start).clamp(0, k.shape[1]) for t in (first, last)
    )
    interval = (first[..., None, None], last.maximum(first)[..., None, None])
    k, v = (heads_first(zero_unread(t, *interval)) for t in (k, v))
    extents = [t.int() for t in (layout.position, layout.key_start, layout.key_len)]
    out, lse = run(_attend, heads_first(q), k, v, find_tiles(*interval, k.shape[2]), *extents, left, right, scale)
    return out.transpose(1, 2), lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    position: Tensor,
    key_start: Tensor,
    key_len: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        key_position = s - key_start[b, t]
        own = (key_position >= 0) & (key_position < key_len[b, t])
        return own & in_window(key_position, position[b, t], left, right)

    return attend(q, k, v, tiles, mask_mod, scale)
