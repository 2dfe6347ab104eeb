"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._eager import compute_dtype


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, F]
    num_rotated = 2 * cos.shape[-1]
    even, odd = x[..., :num_rotated].to(compute_dtype(x.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
    return pairs if num_rotated == x.shape[-1] else torch.cat((pairs, x[..., num_rotated:]), -1)
