"""The mass of full attention by block in benchmarks: the heaviest blocks, and the parts of the loss."""

from __future__ import annotations

import pytest
import torch

from benchmarks import block_loss
from benchmarks.learning_layers import heaviest_blocks

B, T, H, G, D = 2, 150, 2, 2, 16
BLOCK, NEAR = 16, 24


def reference_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the share of keys before the window by block, `[B, H, G, T, blocks]`."""
    logits = torch.einsum('bthgd,bshd->bhgts', q.unflatten(2, (H, G)), k) * D**-0.5
    t, s = torch.arange(T)[:, None], torch.arange(T)
    weights = logits.masked_fill(s > t, -torch.inf).softmax(-1) * (s <= t - NEAR)
    blocks = -(-T // BLOCK)
    return torch.nn.functional.pad(weights, (0, blocks * BLOCK - T)).unflatten(-1, (blocks, BLOCK)).sum(-1)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, T, heads, D, generator=generator) for heads in (H * G, H))
    return q, k


def test_heaviest_blocks_hold_the_most(tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    mass, blocks = reference_mass(*tensors).sum(2), heaviest_blocks(*tensors, BLOCK, NEAR, 3)
    held = mass.gather(-1, blocks.clamp(min=0).long().transpose(1, 2)).masked_fill(blocks.transpose(1, 2) < 0, 0)
    torch.testing.assert_close(held.sum(-1), mass.topk(3).values.sum(-1), rtol=1e-5, atol=1e-6)
    assert (blocks[:, :NEAR] == -1).all()


def test_parts_of_the_loss() -> None:
    parts = block_loss.make_parts((2, 1200, 4, 2, 8), 16, 'cpu', torch.float32)
    results = {name: run() for name, run in parts.items()}
    assert results['mass'].shape == (2, 16, 2, 19)
    assert results['divergence, eager'] > 0
    assert results['loss, divergence eager'] > 0
    for name in ('divergence, eager', 'loss, divergence eager'):
        assert all(grad.abs().max() > 0 for grad in results[f'{name}, forward and backward'])
