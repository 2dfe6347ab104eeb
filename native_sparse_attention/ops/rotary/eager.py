"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.ops._eager import compute_dtype


def rotary(x: Tensor, cos: Tensor, sin: Tensor, is_half: bool) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, F]
    num_rotated = 2 * cos.shape[-1]
    shape, dim = ((2, cos.shape[-1]), -2) if is_half else ((cos.shape[-1], 2), -1)
    first, second = x[..., :num_rotated].to(compute_dtype(x.dtype)).unflatten(-1, shape).unbind(dim)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim).flatten(-2).to(x.dtype)
    return pairs if num_rotated == x.shape[-1] else concatenate((pairs, x[..., num_rotated:]), -1)


def norm_rotary(
    x: Tensor,
    weight: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    eps: float,
    num_plain: int,
    num_rotated: int,
    is_half: bool,
) -> tuple[Tensor, ...]:
    wide = x.to(compute_dtype(x.dtype))
    rms = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    plain = (wide / rms * weight.to(x.dtype)).to(x.dtype)
    rotated = plain if tables is None or not num_rotated else rotary(plain, *tables, is_half)
    return (rotated,) * num_rotated + (plain,) * num_plain
