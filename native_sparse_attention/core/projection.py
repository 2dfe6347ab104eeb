"""Effect of autocast and quantisation on linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Types of devices that have autocast in every version of PyTorch.
_WITH_AUTOCAST = ('cuda', 'cpu')


def projection_dtype(x: Tensor) -> torch.dtype:
    """Return the output dtype of a linear layer for x: that of autocast if it is on, which leaves float64 unchanged."""
    dtype = x.dtype
    if dtype == torch.float64 or not is_autocast(x.device):
        return dtype
    return torch.get_autocast_dtype(x.device.type)


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast is on for a device; a device without autocast, such as meta, raises nothing."""
    kind = device.type
    if kind in _WITH_AUTOCAST:
        return torch.is_autocast_enabled(kind)
    # torch.compile cannot trace the first query in every version, and supports no device without autocast.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return has_autocast and torch.is_autocast_enabled(kind)


def floating_weight(module: nn.Module) -> Tensor | None:
    """Return the module's weight, or None if it is quantised to 8 bits or fewer: such a module casts
    its input itself.
    """
    weight = getattr(module, 'weight', None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1 else None
