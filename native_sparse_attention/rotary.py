"""Rotary position embedding from the frequencies of a rotary-embedding-torch instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention import ops


class Rotary(nn.Module):
    """Rotates pairs of neighbouring features, `x[..., 2i]` and `x[..., 2i + 1]`, by position times frequency i.

    Only the frequencies of the instance are used. Its own methods build positions in the dtype of the input and cache
    by a scalar offset; here angles are float32, from integer positions, whatever the dtype of the input and of the
    module. Features past twice the number of frequencies are left as they are.

    Args:
        head_dim: D, the features of a head.
        rotary_emb: an instance of rotary-embedding-torch, None for its default for `head_dim`. xpos is refused.
    """

    def __init__(self, head_dim: int, rotary_emb: RotaryEmbedding | None = None) -> None:
        super().__init__()
        if rotary_emb is None:
            if head_dim < 3:
                raise ValueError(f'head_dim is {head_dim}, but a default rotary embedding needs at least 3 features')
            rotary_emb = RotaryEmbedding(head_dim)
        if not isinstance(rotary_emb, RotaryEmbedding):
            raise ValueError(
                f'rotary_emb is a {type(rotary_emb).__name__}, but must be a RotaryEmbedding, None or False'
            )
        if rotary_emb.use_xpos:
            raise ValueError('rotary_emb uses xpos, which scales keys by position and is not supported: use_xpos=False')
        if 2 * len(rotary_emb.freqs) > head_dim:
            raise ValueError(
                f'rotary_emb has {len(rotary_emb.freqs)} frequencies, but heads of {head_dim} features take at most '
                f'{head_dim // 2}'
            )
        self.rotary_emb = rotary_emb

    def forward(self, x: Tensor, positions: Tensor, backend: str = 'auto') -> Tensor:
        """x: `[B, T, H, D]`, positions: integers `[B, T]` or `[1, T]`. Returns the shape and dtype of x."""
        return rotate(self.tables(positions), backend, x)[0]

    @property
    def freqs(self) -> Tensor:
        """Float32 `[F]`."""
        return self.rotary_emb.freqs.float()

    @property
    def interpolate_factor(self) -> float:
        return self.rotary_emb.interpolate_factor

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at positions `[B, T]`, float32 `[B, T, F]`, for any number of `rotate`."""
        return angle_tables(positions, self.freqs, self.interpolate_factor)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        # Casting the layer to a half type must not round the frequencies: at position 10,000 that is a wrong angle.
        freqs = self.rotary_emb.freqs.data
        super()._apply(fn, recurse)
        if self.rotary_emb.freqs.dtype != freqs.dtype:
            self.rotary_emb.freqs.data = freqs.to(self.rotary_emb.freqs.device)
        return self


def angle_tables(positions: Tensor, freqs: Tensor, interpolate_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position / interpolate_factor * freqs, float32: positions `[B, T]`, freqs `[F]`."""
    scaled = positions if interpolate_factor == 1 else positions.float() / interpolate_factor
    angles = scaled[..., None] * freqs
    return angles.cos(), angles.sin()


def rotate(tables: tuple[Tensor, Tensor] | None, backend: str, *tensors: Tensor | None) -> list[Any]:
    """Each of tensors `[B, T, heads, D]` that is not None, turned by tables, if there are any. backend: of the layer;
    eager serves flex, and angles that are learned.
    """
    if tables is None:
        return list(tensors)
    backend = 'eager' if backend == 'flex' or tables[0].requires_grad else backend
    return [None if t is None else ops.rotary(t, *tables, backend=backend) for t in tensors]
