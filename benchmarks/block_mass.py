"""A perfect choice of blocks, by the mass of full attention: for `benchmarks.learning` alone."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops.block_mass import block_mass


@torch.no_grad()
def heaviest_blocks(q: Tensor, k: Tensor, block_size: int, near: int, num_selected: int) -> Tensor:
    """Return the blocks of most mass before the last `near` tokens, int32 `[B, T, H, n]`, padded with -1.

    q: `[B, T, HQ, D]`. k: `[B, T, H, D]`.
    """
    mass = block_mass(q, k, block_size=block_size, window_size=(near - 1, 0))
    best, blocks = mass.topk(min(num_selected, mass.shape[-1]), dim=-1)
    return blocks.masked_fill(best == 0, -1).int()
