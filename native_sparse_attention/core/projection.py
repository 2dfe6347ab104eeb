"""Effect of autocast and quantisation on linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from native_sparse_attention.core.autocast import is_autocast


def projection_dtype(x: Tensor) -> torch.dtype:
    """Return the output dtype of a linear layer for x: that of autocast if it is on, which leaves float64 unchanged."""
    dtype = x.dtype
    if dtype == torch.float64 or not is_autocast(x.device):
        return dtype
    return torch.get_autocast_dtype(x.device.type)


def floating_weight(module: nn.Module) -> Tensor | None:
    """Return the module's weight, or None if it is quantised to 8 bits or fewer: such a module casts
    its input itself.
    """
    weight = getattr(module, 'weight', None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype.itemsize > 1 else None
