"""Autocast: whether it is on, and code that it must not change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Types of devices that have autocast in every version of PyTorch.
_WITH_AUTOCAST = ('cuda', 'cpu')


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device; a device without autocast, such as meta, raises nothing."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast, which would turn the float32 products of an op into half ones."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate with autocast disabled.

    `torch.cat` under autocast raises for the half type that is not autocast's.
    """
    with without_autocast(tensors[0]):
        return torch.cat(list(tensors), dim)


def _has_autocast(kind: str) -> bool:
    if kind in _WITH_AUTOCAST:
        return True
    # torch.compile cannot trace this query in every version, and supports no device without autocast.
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
