"""The loss of the block scores: its definition, its gradient and its random blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.checks import make_sequences
from native_sparse_attention.losses import add_random_blocks, block_score_loss
from native_sparse_attention.ops import compressed_attention, select_blocks
from tests.definition import definition
from tests.support.problems import Extents, Heads, drawn_extents, make_compressed, make_qkv, packed, whole

SIZES = {'compress_block_size': 2, 'compress_stride': 1, 'selection_block_size': 2}


def make_problem(extents: Extents, heads: Heads, share_group: bool = True, **changes: Any) -> tuple[Any, Any, Any]:
    """Tensors of the loss, its settings, and where queries stand among keys."""
    options = {'causal': True, 'softcap': None, **changes}
    q, k, _ = make_qkv(extents, heads)
    q_cmp = make_qkv(extents, heads)[0].flip(1)
    k_cmp, v_cmp = make_compressed(extents, heads, 2, 1)
    where = {**options, **extents.where}
    seqlen_k = None if extents.packed else extents.seqlen_k
    _, lse = compressed_attention(q_cmp, k_cmp, v_cmp, block_size=2, stride=1, seqlen_k=seqlen_k, **where)
    chosen = {'num_selected': 4, 'num_init': 1, 'num_local': 1, 'share_group': share_group, 'seqlen_k': seqlen_k}
    blocks = select_blocks(q_cmp, k_cmp, lse, **SIZES, **chosen, **where)
    leaves = [q_cmp.requires_grad_(), k_cmp.requires_grad_()]
    return (q, k, *leaves, lse, blocks), {**SIZES, 'num_init': 1, 'num_local': 1, **where}, seqlen_k


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


@settings(max_examples=20)
@given(
    extents=drawn_extents(max_seqlen=16),
    group_size=st.sampled_from([1, 2]),
    num_random=st.integers(0, 3),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
def test_definition(
    extents: Extents, group_size: int, num_random: int, share_group: bool, causal: bool, softcap: float | None
) -> None:
    heads = Heads(2 * group_size, 2, 4, 4)
    tensors, options, seqlen_k = make_problem(extents, heads, share_group, causal=causal, softcap=softcap)
    loss = block_score_loss(*tensors, **options, num_random=num_random, seed=3)
    names = ('q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k')
    sequences = make_sequences(tensors[0], extents.seqlen_k, **{name: extents.where.get(name) for name in names})
    seed = torch.tensor([3])
    candidates, _ = add_random_blocks(tensors[5], sequences, 2, (1, 1), causal, num_random, seed)
    q, k, q_cmp, k_cmp, lse, _ = tensors
    gold = definition.block_score_loss(q, k, q_cmp, k_cmp, lse, candidates, **options, seqlen_k=seqlen_k)
    torch.testing.assert_close(loss, gold, rtol=1e-9, atol=1e-12)
    leaves = [tensors[2], tensors[3]]
    for grad, expected in zip(gradients(loss, leaves), gradients(gold, leaves), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_scores_that_equal_the_mass_have_no_loss() -> None:
    """Compressed attention of single tokens scores a block by its mass; the loss grows when the scores are others."""
    q = torch.randn(1, 24, 2, 4, dtype=torch.float64)
    k = torch.randn(1, 24, 1, 4, dtype=torch.float64)
    sizes: dict[str, Any] = {'compress_block_size': 1, 'compress_stride': 1, 'selection_block_size': 2}
    options: dict[str, Any] = {'num_init': 1, 'num_local': 1, 'num_random': 0, **sizes}
    losses = []
    for keys in (k, 0.5 * k):
        _, lse = compressed_attention(q[:, :, :1], keys, keys, block_size=1, stride=1, seqlen_k=24)
        every = torch.arange(12, dtype=torch.int32).expand(1, 24, 1, 12)
        one = q[:, :, :1]
        losses.append(float(block_score_loss(one, k, one, keys, lse, every, **options)))
    assert losses[0] == pytest.approx(0, abs=1e-12)
    assert losses[1] > 0.01


def test_random_blocks_are_drawn_evenly() -> None:
    extents = whole(200)
    q = torch.zeros(1, 200, 1, 4)
    sequences = make_sequences(q, extents.seqlen_k, None, None, None, None)
    nothing = torch.full((1, 200, 1, 1), -1, dtype=torch.int32)
    drawn, is_ranked = add_random_blocks(nothing, sequences, 10, (1, 2), True, 64, torch.tensor([0]))
    last = drawn[0, -1, 0]
    assert set(last.tolist()) - {-1} == set(range(20))  # all 20 blocks, each once
    assert (last[last >= 0].diff() > 0).all()
    assert set(last[is_ranked[0, -1, 0]].tolist()) == set(range(1, 18))  # not the first block and two local ones
    few, _ = add_random_blocks(nothing, sequences, 10, (1, 2), True, 1, torch.tensor([0]))
    counts = few[0, 190:, 0].flatten()
    assert ((counts >= -1) & (counts < 20)).all()
    assert (few[0, :10] <= 0).all()
    mean = torch.stack([
        add_random_blocks(nothing, sequences, 10, (1, 2), True, 1, torch.tensor([seed]))[0][0, -1, 0].max()
        for seed in range(200)
    ]).double().mean()  # fmt: skip
    assert 8 < mean < 11  # 9.5


def test_a_seed_repeats_the_loss() -> None:
    tensors, options, _ = make_problem(packed([9, 0, 15]), Heads(2, 1, 4, 4))
    found = [block_score_loss(*tensors, **options, num_random=1, seed=seed) for seed in (1, 1, torch.tensor([1]), 2)]
    assert found[0] == found[1] == found[2] != found[3]


def test_nothing_to_rank() -> None:
    tensors, options, _ = make_problem(whole(3), Heads(2, 1, 4, 4))
    loss = block_score_loss(*tensors, **options)
    assert loss == 0
    assert all((grad == 0).all() for grad in gradients(loss, [tensors[2], tensors[3]]))


def test_scores_that_underflow_stay_finite() -> None:
    tensors, options, _ = make_problem(whole(16), Heads(2, 1, 4, 4))
    q, k, q_cmp, k_cmp, _, blocks = tensors
    q_cmp, k_cmp = ((1e3 * t.detach().float()).requires_grad_() for t in (q_cmp, k_cmp))
    _, lse = compressed_attention(q_cmp, k_cmp, k_cmp, block_size=2, stride=1, seqlen_k=16)
    loss = block_score_loss(q.float(), k.float(), q_cmp, k_cmp, lse, blocks, **options)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in gradients(loss, [q_cmp, k_cmp]))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_random': -1}, 'num_random is -1'),
        ({'seed': 0.5}, 'seed is 0.5, but must be an int'),
        ({'q_cmp': torch.zeros(1, 4, 2, 4)}, 'q_cmp has shape'),
        ({'k_cmp': torch.zeros(1, 7, 2, 4, dtype=torch.float64)}, 'k_cmp has 2 heads, but must have 1, as k'),
        ({'backend': 'fast'}, 'backend'),
        ({'selection_block_size': 0}, 'selection_block_size is 0'),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    tensors, options, _ = make_problem(whole(8), Heads(2, 1, 4, 4))
    names = ('q', 'k', 'q_cmp', 'k_cmp', 'lse', 'block_indices')
    with pytest.raises(ValueError, match=message):
        block_score_loss(**{**dict(zip(names, tensors, strict=True)), **options, **changes})
