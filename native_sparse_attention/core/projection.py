"""Effect of autocast and quantisation on linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def projection_dtype(x: Tensor) -> torch.dtype:
    """Return the output dtype of a linear layer for x: that of autocast if it is on, which leaves float64 unchanged."""
    device_type = x.device.type
    if x.dtype == torch.float64:
        return x.dtype
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if has_autocast and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def floating_weight(module: nn.Module) -> Tensor | None:
    """Return the module's weight, or None if it is quantised to 8 bits or fewer: such a module casts
    its input itself.
    """
    weight = getattr(module, 'weight', None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1 else None
