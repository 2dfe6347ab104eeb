"""The mass of full attention by block, which experiments of the learning benchmark read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.block_mass import far_mass, heaviest_blocks

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


def test_far_mass_is_that_of_full_attention(tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected = reference_mass(*tensors).sum(2).mT
    torch.testing.assert_close(far_mass(*tensors, torch.arange(T), BLOCK, NEAR), expected, rtol=1e-5, atol=1e-6)
    some, (q, k) = torch.tensor([3, 60, 149]), tensors
    torch.testing.assert_close(far_mass(q[:, some], k, some, BLOCK, NEAR), expected[..., some], rtol=1e-5, atol=1e-6)


def test_heaviest_blocks_hold_the_most(tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    mass, blocks = reference_mass(*tensors).sum(2), heaviest_blocks(*tensors, BLOCK, NEAR, 3)
    held = mass.gather(-1, blocks.clamp(min=0).long().transpose(1, 2)).masked_fill(blocks.transpose(1, 2) < 0, 0)
    torch.testing.assert_close(held.sum(-1), mass.topk(3).values.sum(-1), rtol=1e-5, atol=1e-6)
    assert (blocks[:, :NEAR] == -1).all()
