"""Save queries without rotary embedding for the backward pass, and recompute the rotated ones there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from native_sparse_attention import ops
from native_sparse_attention.core import private
from native_sparse_attention.ops.rotary.api import backend_of


def recompute_rotated(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, backend: str, rotated: Tensor, layout: str = 'interleaved'
) -> Any:
    """Return a context in which autograd saves x and tables in place of rotated; the backward pass recomputes it.

    backend: of the layer. rotated: x rotated by tables, in the layout. The context does nothing unless Triton rotates:
    the attentions of other backends save copies and views. It does nothing where other hooks of saved tensors are
    active, such as those of a checkpoint, because autograd calls only the innermost.
    """
    if (
        torch.compiler.is_compiling()
        or tables is None
        or tables[0].requires_grad
        or backend == 'flex'
        or not rotated.requires_grad
        or not type(rotated) is type(x) is Tensor
        or not private.saved_tensor_hooks.is_free()
        or backend_of(x, *tables, backend=backend).name != 'triton'
    ):
        return nullcontext()
    pack = PackRotated(_memory(rotated), _Recomputed(x, tables, backend, layout))
    return saved_tensors_hooks(pack, lambda saved: saved.unpacked())


class PackRotated(NamedTuple):
    """Hook that saves the rotated tensor as one to be recomputed. It keeps no reference to it.

    memory: address and layout of the rotated tensor.
    """

    memory: tuple[Any, ...]
    recomputed: _Recomputed

    def __call__(self, t: Tensor) -> _Saved | _Recomputed:
        return self.recomputed.used() if type(t) is Tensor and _memory(t) == self.memory else _Saved.of(t)


class _Saved(NamedTuple):
    """A saved tensor and its version.

    The tensor is detached, since its graph may contain the node that saves it. Autograd does not check versions of
    tensors that hooks save.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, t: Tensor) -> _Saved:
        return cls(t.detach(), private.saved_tensor_hooks.version_of(t))

    def unpacked(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.tensor
        version = private.saved_tensor_hooks.version_of(self.tensor)
        if version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'{tuple(self.tensor.shape)} is at version {version}; expected version {self.version}'
            )
        return self.tensor


class _Recomputed:
    """Rotated x, computed when it is first unpacked and kept until it is unpacked as often as it was saved."""

    def __init__(self, x: Tensor, tables: tuple[Tensor, Tensor], backend: str, layout: str) -> None:
        self.x, self.tables = _Saved.of(x), [_Saved.of(table) for table in tables]
        self.backend, self.layout = backend, layout
        self.uses = self.uses_left = 0
        self.rotated: Tensor | None = None

    def used(self) -> _Recomputed:
        self.uses += 1
        return self

    @torch.no_grad()
    def unpacked(self) -> Tensor:
        rotated = self.rotated
        if rotated is None:
            cos, sin = (table.unpacked() for table in self.tables)
            rotated = ops.rotary(self.x.unpacked(), cos, sin, layout=self.layout, backend=self.backend)
            self.uses_left = self.uses
        self.uses_left -= 1
        self.rotated = rotated if self.uses_left > 0 else None
        return rotated


def _memory(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
