"""Rotary position embedding from the frequencies of a rotary-embedding-torch instance."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from native_sparse_attention import ops
from native_sparse_attention.ops.rotary import fan_out
from native_sparse_attention.ops.rotary.api import backend_of


class Rotary(nn.Module):
    """Rotates pairs of neighbouring features, `x[..., 2i]` and `x[..., 2i + 1]`, by position times frequency i.

    Only the frequencies of the instance are used. Its own methods build positions in the dtype of the input and cache
    by a scalar offset; here angles are float32, from integer positions, whatever the dtype of the input and of the
    module. Features past twice the number of frequencies are left as they are.

    Args:
        dim_head: D, the features of a head.
        rotary_emb: an instance of rotary-embedding-torch, None for its default for `dim_head`. xpos is refused.
    """

    def __init__(self, dim_head: int, rotary_emb: RotaryEmbedding | None = None) -> None:
        super().__init__()
        if rotary_emb is None:
            if dim_head < 3:
                raise ValueError(f'dim_head is {dim_head}, but a default rotary embedding needs at least 3 features')
            rotary_emb = RotaryEmbedding(dim_head)
        if not isinstance(rotary_emb, RotaryEmbedding):
            raise ValueError(
                f'rotary_emb is a {type(rotary_emb).__name__}, but must be a RotaryEmbedding, None or False'
            )
        if rotary_emb.use_xpos:
            raise ValueError('rotary_emb uses xpos, which scales keys by position and is not supported: use_xpos=False')
        if 2 * len(rotary_emb.freqs) > dim_head:
            raise ValueError(
                f'rotary_emb has {len(rotary_emb.freqs)} frequencies, but heads of {dim_head} features take at most '
                f'{dim_head // 2}'
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
    backend = _served_by(tables, backend)
    return [None if t is None else ops.rotary(t, *tables, backend=backend) for t in tensors]


def turned_and_plain(
    tables: tuple[Tensor, Tensor] | None, backend: str, x: Tensor, num_turned: int, num_plain: int = 0
) -> tuple[Tensor, ...]:
    """x turned by tables, if there are any, for so many readers, and as it is for the others: `ops.rotary.fan_out`."""
    backend = 'eager' if backend == 'flex' else backend if tables is None else _served_by(tables, backend)
    return fan_out(x, num_plain, num_turned, tables, backend=backend)


def turned_again(x: Tensor, tables: tuple[Tensor, Tensor] | None, backend: str, turned: Tensor) -> Any:
    """A context in which autograd saves x and tables in place of turned, `rotate(tables, backend, x)[0]`, which the
    backward pass makes again.

    Only where the kernel turns, as the ops that go with it save what they are given; others save copies and views. Only
    where no other hooks of saved tensors are active, a checkpoint's say, since autograd calls none but the innermost.
    """
    if (
        torch.compiler.is_compiling()
        or tables is None
        or not turned.requires_grad
        or not type(turned) is type(x) is Tensor
        or not _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        or _autograd._top_saved_tensors_default_hooks(True) is not None
        or backend_of(x, *tables, backend=_served_by(tables, backend)).name != 'triton'
    ):
        return nullcontext()
    # Neither the hooks nor what they keep refers to turned.
    place, again = _place(turned), _TurnedAgain(x, tables, backend)

    def pack(t: Tensor) -> _Saved | _TurnedAgain:
        return again.used() if type(t) is Tensor and _place(t) == place else _Saved.of(t)

    return saved_tensors_hooks(pack, lambda saved: saved.unpacked())


class _Saved(NamedTuple):
    """A tensor, detached, as its graph may lead to what saves it; and its version, which autograd does not check where
    there are hooks.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, t: Tensor) -> _Saved:
        return cls(t.detach(), t._version)

    def unpacked(self) -> Tensor:
        if not torch.compiler.is_compiling() and self.tensor._version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'{tuple(self.tensor.shape)} is at version {self.tensor._version}; expected version {self.version}'
            )
        return self.tensor


class _TurnedAgain:
    """Turned x: made by the first of those that saved it, held until the last of them has it."""

    def __init__(self, x: Tensor, tables: tuple[Tensor, Tensor], backend: str) -> None:
        self.x, self.tables, self.backend = _Saved.of(x), [_Saved.of(table) for table in tables], backend
        self.uses = self.uses_left = 0
        self.turned: Tensor | None = None

    def used(self) -> _TurnedAgain:
        self.uses += 1
        return self

    @torch.no_grad()
    def unpacked(self) -> Tensor:
        turned = self.turned
        if turned is None:
            cos, sin = (table.unpacked() for table in self.tables)
            turned = rotate((cos, sin), self.backend, self.x.unpacked())[0]
            self.uses_left = self.uses
        self.uses_left -= 1
        self.turned = turned if self.uses_left > 0 else None
        return turned


def _served_by(tables: tuple[Tensor, Tensor], backend: str) -> str:
    return 'eager' if backend == 'flex' or tables[0].requires_grad else backend


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
