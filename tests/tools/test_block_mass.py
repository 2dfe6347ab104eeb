"""The mass of full attention by block, which experiments of the learning benchmark read."""

from __future__ import annotations

import pytest
import torch

from benchmarks.block_mass import dense_mass_loss, far_mass, heaviest_blocks
from native_sparse_attention.ops import chosen_scores, compressed_attention

B, T, H, G, D = 2, 150, 2, 2, 16
BLOCK, NEAR = 16, 24
SIZES = (8, 4, BLOCK)


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


def test_loss_is_0_for_scores_like_the_mass_and_compares_with_the_scores_of_the_package(
    tensors: tuple[torch.Tensor, torch.Tensor],
) -> None:
    q, k = tensors
    generator = torch.Generator().manual_seed(1)
    compressed = (T - SIZES[0]) // SIZES[1] + 1
    q_cmp = torch.randn(B, T, H * G, D, generator=generator)
    k_cmp = torch.randn(B, compressed, H, D, generator=generator, requires_grad=True)
    # With as many rows as queries every query is drawn.
    loss = dense_mass_loss(q, k, q_cmp, k_cmp, sizes=SIZES, near=NEAR, num_rows=T)
    _, lse = compressed_attention(q_cmp, k_cmp, k_cmp, block_size=SIZES[0], stride=SIZES[1], seqlen_k=T)
    every = torch.arange(-(-T // BLOCK), dtype=torch.int32).expand(B, T, H, -1).contiguous()
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    scores = chosen_scores(q_cmp, k_cmp, lse, every, seqlen_k=T, **dict(zip(names, SIZES, strict=True)))
    scores, mass, t = scores.transpose(1, 2), reference_mass(q, k).mean(2), torch.arange(T)[:, None]
    scores = scores.masked_fill(torch.arange(every.shape[-1]) * BLOCK > t - NEAR, 0) + 1e-20
    target, share = (x / x.sum(-1, keepdim=True) for x in (mass, scores))
    rows = (torch.special.xlogy(target, target) - target * share.log()).sum(-1)[..., NEAR + BLOCK :]
    torch.testing.assert_close(loss, rows.mean(), rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, k_cmp)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
