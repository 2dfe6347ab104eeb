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
    taint,
    with_a_key,
    without_nonfinite,
)
from native_sparse_attention.ops._modifiers import OFF, Modifiers


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
    k, v, nonfinite = without_nonfinite(*with_a_key(k, v))
    layout = sequences.layout()
    # [B, T, 1, 1]: the interval of keys that a query reads.
    first = layout.position - left if left >= 0 else layout.position * 0
    last = layout.position + right + 1 if right >= 0 else layout.key_len
    first, last = (
        (t.clamp(min=0).minimum(layout.key_len) + layout.key_start).clamp(0, k.shape[1])[..., None, None]
        for t in (first, last)
    )
    last = last.maximum(first)
    tiles = find_tiles(first, last, k.shape[1])
    extents = [t.int() for t in (layout.position, layout.key_start, layout.key_len)]
    q, k, v = (heads_first(t) for t in (q, k, v))
    out, lse = run(_attend, q, k, v, tiles, *extents, left, right, scale)
    return taint(out.transpose(1, 2), lse, nonfinite, first, last)


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
