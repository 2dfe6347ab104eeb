"""Rings: tensors `[B, R, H, D]` of the latest tokens of each row, position p in slot p mod R."""

from __future__ import annotations

import torch
from torch import Tensor


def write_ring(ring: Tensor, tokens: Tensor, old: Tensor, new: Tensor) -> None:
    """Write tokens `[B, T, H, D]` at positions old to new - 1 of each row; old, new: int64 `[B]`.

    A slot takes the latest position that maps to it, or keeps its entry.
    """
    if tokens.shape[1] == 0:
        return
    size = ring.shape[1]
    last = (new - 1)[:, None]
    latest = last - (last - torch.arange(size, device=ring.device)) % size
    source = latest - old[:, None]
    written = tokens[rows_of(ring), source.clamp(0, tokens.shape[1] - 1)]
    ring.copy_(torch.where((source >= 0)[..., None, None], written, ring))


def read_ring(ring: Tensor, position: Tensor) -> Tensor:
    """Return the entries at positions `[B, n]`; those of negative or overwritten positions are undefined."""
    return ring[rows_of(ring), position % ring.shape[1]]


def rows_of(tensor: Tensor) -> Tensor:
    """Return int64 `[B, 1]`: the index of every row."""
    return torch.arange(tensor.shape[0], device=tensor.device)[:, None]
