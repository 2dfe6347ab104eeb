"""Padded batches: the real tokens of every row are moved to its front, and back at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.checks import check_tensors


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Raise ValueError unless mask is bool, or integers of 0 and 1, `[B, T]` on the device of x `[B, T, ...]`.

    The content of integers is checked on the CPU alone; elsewhere all but 0 count as 1, as `mask.bool()` has them.
    """
    check_tensors(mask=mask)
    if mask.dtype.is_floating_point or mask.dtype.is_complex or mask.shape != x.shape[:2]:
        raise ValueError(
            f'mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but must be bool or integers '
            f'{tuple(x.shape[:2])}, True or 1 at real tokens'
        )
    if mask.device != x.device:
        raise ValueError(f'mask is on {mask.device}, but the input is on {x.device}')
    is_read = mask.dtype != torch.bool and mask.is_cpu and not torch.compiler.is_compiling()
    if is_read and not bool((mask.bool() == mask).all()):
        raise ValueError(f'mask has values from {int(mask.min())} to {int(mask.max())}, but integers must be 0 or 1')


def front_order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The order `[B, T]` that moves real tokens to the front of their row, and the number of them, int32 `[B]`."""
    return torch.argsort(~mask, dim=1, stable=True), mask.sum(1, dtype=torch.int32)


def to_front(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """x `[B, T, dim]` with real tokens first; what stood at padding is 0 and gets no gradient."""
    x = torch.where(mask[..., None], x, 0)
    return x.gather(1, order[..., None].expand_as(x))


def from_front(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `to_front`; padding is 0."""
    x = torch.zeros_like(x).scatter(1, order[..., None].expand_as(x), x)
    return torch.where(mask[..., None], x, 0)
