"""Padded batches: move the real tokens of each row to its front, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.checks import check_tensors, is_readable


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Raise ValueError unless mask is bool, or integers of 0 and 1, `[B, T]` on the device of x `[B, T, ...]`.

    Values of integers are checked on the CPU alone; elsewhere every value other than 0 counts as 1.
    """
    check_tensors(mask=mask)
    if mask.dtype.is_floating_point or mask.dtype.is_complex or mask.shape != x.shape[:2]:
        raise ValueError(
            f'mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but must be bool or integers '
            f'{tuple(x.shape[:2])}, True or 1 at real tokens'
        )
    if mask.device != x.device:
        raise ValueError(f'mask is on {mask.device}, but the input is on {x.device}')
    if mask.dtype != torch.bool and is_readable(mask):
        values = mask.long()  # PyTorch does not compare most unsigned dtypes
        if not bool((values.bool() == values).all()):
            lowest, highest = int(values.min()), int(values.max())
            raise ValueError(f'mask has values from {lowest} to {highest}, but integers must be 0 or 1')


class FrontOrder(NamedTuple):
    """Order of a padded batch in which real tokens come first.

    mask: bool `[B, T]`, true at real tokens. index: int64 `[B, T]`, the source index of each token. lengths: int32
    `[B]`, real tokens of each row.
    """

    mask: Tensor
    index: Tensor
    lengths: Tensor


def front_order(mask: Tensor) -> FrontOrder:
    """Return the order of a padded batch in which real tokens come first.

    Args:
        mask: `[B, T]`, bool or integers, true at real tokens.
    """
    mask = mask.bool()
    return FrontOrder(mask, torch.argsort(~mask, dim=1, stable=True), mask.sum(1, dtype=torch.int32))


def move_to_front(x: Tensor, order: FrontOrder | None) -> Tensor:
    """Return x with real tokens first, and padding set to 0 and without gradient.

    Args:
        x: `[B, T, ...]`.
        order: of the rows; None returns x itself.
    """
    if order is None:
        return x
    shape = (*x.shape[:2], *[1] * (x.ndim - 2))
    return torch.where(order.mask.view(shape), x, 0).gather(1, order.index.view(shape).expand_as(x))


def to_front(x: Tensor, mask: Tensor | None) -> tuple[Tensor, FrontOrder | None]:
    """Return `move_to_front` of x `[B, T, ...]` and the order of a mask `[B, T]`. Without a mask, return x and None."""
    if mask is None:
        return x, None
    order = front_order(mask)
    return move_to_front(x, order), order


def from_front(x: Tensor, order: FrontOrder | None) -> Tensor:
    """Return the inverse of `move_to_front`; padding is 0.

    Args:
        x: `[B, T, ...]`, real tokens first.
        order: of the rows; None returns x itself.
    """
    if order is None:
        return x
    shape = (*x.shape[:2], *[1] * (x.ndim - 2))
    x = torch.zeros_like(x).scatter(1, order.index.view(shape).expand_as(x), x)
    return torch.where(order.mask.view(shape), x, 0)
