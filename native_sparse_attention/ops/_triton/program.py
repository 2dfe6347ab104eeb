"""Recorded calls, forward and backward, and a gradient of one as a registered op."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from native_sparse_attention.core import private
from native_sparse_attention.ops._triton.registered import register_derivative, register_op

# Largest number of tensors that a forward pass saves.
MAX_SAVED = 40
# Programs by number, for the op.
_programs: WeakValueDictionary[int, Program] = WeakValueDictionary()
_numbers = itertools.count()
# Shape, strides and dtype.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Program:
    """Recorded call.

    Attributes:
        device: of all tensors.
        forward: forward(*inputs) returns the output and the tuple of tensors that `backward` reads.
        backward: backward(dout, saved) returns the gradients of the differentiable inputs, and empties the list saved.
            dout is contiguous and aligned to 16 bytes. None for a call without gradients.
        differentiable: indices of the inputs that have gradients.
        layouts: of the gradients.
        are_watched: whether a hook must be called for every launch, which a program does not.
        source: of both functions.
    """

    device: torch.device
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    differentiable: tuple[int, ...]
    layouts: tuple[Layout, ...]
    are_watched: Callable[[], bool]
    source: str
    number: int = field(default_factory=_numbers.__next__)

    def __post_init__(self) -> None:
        _programs[self.number] = self

    def differentiate(self, dout: Tensor, saved: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients. Empties `saved`, so that each tensor is released after its last use."""
        if not dout.is_contiguous() or dout.data_ptr() % 16:
            dout = dout.clone(memory_format=torch.contiguous_format)
        return execute(self.device, self.backward, dout, saved)  # type: ignore[arg-type]

    def gradients(self, dout: Tensor, saved: list[Tensor]) -> list[Tensor]:
        """Return the gradients by one opaque op each, for transforms, modes and compiled autograd. The op has no
        second derivative.
        """
        padded = (*saved, *(None,) * (MAX_SAVED - len(saved)))
        return [_gradient(self.number, index, dout, *padded) for index in range(len(self.differentiable))]


def execute(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of recorded operations, which autocast, if it is on, would cast a second time."""
    if not torch.is_autocast_enabled(device.type):
        return on_device(device, function, *args)
    torch.set_autocast_enabled(device.type, False)
    try:
        return on_device(device, function, *args)
    finally:
        torch.set_autocast_enabled(device.type, True)


def on_device(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    if device.type != 'cuda' or device.index == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)


# PyTorch's loop for batched gradients takes no list of tensors.
_SAVED = ', '.join(f'Tensor? saved_{i}' for i in range(MAX_SAVED))


@register_op('nsa_backward', f'int program, int index, Tensor dout, {_SAVED}')
def _gradient(program: int, index: int, dout: Tensor, *saved: Tensor | None) -> Tensor:
    return _programs[program].differentiate(dout, [t for t in saved if t is not None])[index]


@_gradient.register_fake
def _(program: int, index: int, dout: Tensor, *saved: Tensor | None) -> Tensor:
    shape, strides, dtype = _programs[program].layouts[index]
    return dout.new_empty_strided(shape, strides, dtype=dtype)


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        f'{private.qualified_name(_gradient)} has no second derivative: use backend="eager" for double backward'
    )


register_derivative(_gradient, _refuse, lambda ctx, inputs, output: None)
