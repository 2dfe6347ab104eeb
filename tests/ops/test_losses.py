"""The loss of the block scores: its definition, its gradient and its sample of queries."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import losses
from native_sparse_attention.core.random import split_mix
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops import _eager, compressed_attention
from tests.definition import losses as definition
from tests.support.problems import Extents, Heads, drawn_extents, make_compressed, make_qkv, packed, whole

SIZES: dict[str, Any] = {'compress_block_size': 2, 'compress_stride': 1, 'selection_block_size': 2}
# In the second form the last blocks of a sequence, and those of a query without a window, may have no score.
FORMS = [SIZES, {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 2}]


def make_problem(
    extents: Extents, heads: Heads, sizes: dict[str, Any] = SIZES, **changes: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return tensors of the loss and its settings."""
    compress = sizes['compress_block_size'], sizes['compress_stride']
    q, k, _ = make_qkv(extents, heads)
    q_cmp, k_cmp = make_qkv(extents, heads)[0].flip(1), make_compressed(extents, heads, *compress)[0]
    options = {'window_size': (3, 0), **sizes, **extents.where, **changes}
    return [q, k, q_cmp.requires_grad_(), k_cmp.requires_grad_()], options


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


@settings(max_examples=25)
@given(
    extents=drawn_extents(max_seqlen=16),
    group_size=st.sampled_from([1, 2]),
    sizes=st.sampled_from(FORMS),
    share_group=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([None, (0, 0), (3, 0), (5, 2), (-1, 0)]),
    min_position=st.sampled_from([0, 0, 7]),
    softcap=st.sampled_from([None, 2.0]),
    chunk=st.sampled_from([_eager.CHUNK_ELEMENTS, 100]),
)
def test_definition(
    extents: Extents,
    group_size: int,
    sizes: dict[str, Any],
    share_group: bool,
    causal: bool,
    window: tuple[int, int] | None,
    min_position: int,
    softcap: float | None,
    chunk: int,
) -> None:
    window = window and (window[0], 0 if causal else window[1])
    heads = Heads(2 * group_size, 2, 4, 4)
    changes = {'causal': causal, 'softcap': softcap, 'window_size': window, 'min_position': min_position}
    tensors, options = make_problem(extents, heads, sizes, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_eager, 'CHUNK_ELEMENTS', chunk)
        loss = block_score_loss(*tensors, **options, share_group=share_group)
        found = gradients(loss, tensors[2:])
    q, k, q_cmp, k_cmp = tensors
    where = {name: value for name, value in options.items() if name not in (*SIZES, 'window_size', 'min_position')}
    seqlen_k = None if extents.packed else extents.seqlen_k
    compress = {'block_size': sizes['compress_block_size'], 'stride': sizes['compress_stride']}
    _, lse = compressed_attention(q_cmp, k_cmp, k_cmp, **compress, seqlen_k=seqlen_k, **where)
    gold = definition.block_score_loss(q, k, q_cmp, k_cmp, lse, **options, share_group=share_group, seqlen_k=seqlen_k)
    torch.testing.assert_close(loss, gold, rtol=1e-9, atol=1e-12)
    for grad, expected in zip(found, gradients(gold, tensors[2:]), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_scores_that_equal_the_mass_have_no_loss() -> None:
    """Compressed attention of single tokens scores a block by its mass; the loss grows when the scores are others."""
    q = torch.randn(1, 24, 2, 4, dtype=torch.float64)
    k = torch.randn(1, 24, 1, 4, dtype=torch.float64)
    sizes: dict[str, Any] = {'compress_block_size': 1, 'compress_stride': 1, 'selection_block_size': 2}
    found = [float(block_score_loss(q, k, q, keys, **sizes)) for keys in (k, 0.5 * k)]
    assert found[0] == pytest.approx(0, abs=1e-12)
    assert found[1] > 0.01


@pytest.mark.parametrize(('seqlen', 'num_queries'), [(200, 64), (200, 200), (7, 512), (0, 512)])
def test_one_query_is_drawn_from_each_part(seqlen: int, num_queries: int) -> None:
    count = min(seqlen, num_queries)
    borders = torch.arange(count + 1) * seqlen // max(1, count)
    drawn = torch.stack([losses._draw_rows(3, seqlen, num_queries, torch.tensor([seed])) for seed in range(20)])
    assert drawn.shape == (20, 3, count)
    assert ((drawn >= borders[:-1]) & (drawn < borders[1:])).all()
    if count < seqlen:
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[:, 0], drawn[:, 1])  # rows of a batch draw queries of their own


def test_known_random_numbers() -> None:
    """Values of SplitMix64 that its authors publish."""
    known = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    numbers = split_mix(torch.tensor([1234567]), torch.arange(5))
    assert numbers.tolist() == [number >> 32 for number in known]


@pytest.mark.full
@pytest.mark.skipif(shutil.which('g++') is None, reason='inductor needs a compiler')
def test_queries_of_several_rows_are_drawn_alike_when_compiled() -> None:
    # Compiled, the numbers of the second row are computed from its index: products beyond 64 bits have to wrap around.
    def draw(seed: torch.Tensor) -> torch.Tensor:
        return losses._draw_rows(2, 500, 20, seed)

    seed = torch.tensor([2**62 + 1])
    assert torch.equal(torch.compile(draw, fullgraph=True)(seed), draw(seed))


def test_sampled_queries_estimate_the_loss() -> None:
    tensors, options = make_problem(packed([40, 25, 63]), Heads(2, 1, 4, 4))
    every = block_score_loss(*tensors, **options)
    some = torch.stack([block_score_loss(*tensors, **options, num_queries=16, seed=seed) for seed in range(100)])
    torch.testing.assert_close(some.mean(), every, rtol=0.05, atol=0)
    assert some.std() > 0


def test_a_seed_repeats_the_loss() -> None:
    tensors, options = make_problem(packed([9, 0, 15]), Heads(2, 1, 4, 4))
    found = [block_score_loss(*tensors, **options, num_queries=8, seed=seed) for seed in (1, 1, torch.tensor([1]), 2)]
    assert found[0] == found[1] == found[2] != found[3]


def test_nothing_to_rank() -> None:
    for extents in (whole(3), whole(0)):
        tensors, options = make_problem(extents, Heads(2, 1, 4, 4))
        loss = block_score_loss(*tensors, **options)
        assert loss == 0
        assert all((grad == 0).all() for grad in gradients(loss, tensors[2:]))


def test_blocks_without_a_score_are_no_candidates() -> None:
    """Without a window the block of a query often shares tokens with no visible compressed block."""
    sizes = {'compress_block_size': 4, 'compress_stride': 4, 'selection_block_size': 4}
    (q, k, q_cmp, k_cmp), options = make_problem(whole(16), Heads(2, 1, 4, 4), sizes, window_size=None)
    last = {**options, 'q_offset': 14}  # the keys before its block are those of 3 blocks
    found = block_score_loss(q[:, 14:15], k, q_cmp[:, 14:15], k_cmp, **last)
    far = block_score_loss(q[:, 14:15], k, q_cmp[:, 14:15], k_cmp, **{**last, 'window_size': (2, 0)})
    torch.testing.assert_close(found, far)


def test_scores_that_underflow_stay_finite() -> None:
    tensors, options = make_problem(whole(16), Heads(2, 1, 4, 4))
    q, k, *scored = (t.detach().float() for t in tensors)
    scored = [(1e3 * t).requires_grad_() for t in scored]
    loss = block_score_loss(q, k, *scored, **options)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in gradients(loss, scored))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_queries': 0}, 'num_queries is 0'),
        ({'min_position': -1}, 'min_position is -1'),
        ({'seed': 0.5}, 'seed is 0.5, but must be an int of 64 bits'),
        ({'seed': 2**63}, 'seed is 9223372036854775808, but must be an int of 64 bits'),
        ({'seed': torch.tensor([1, 2])}, r'seed has dtype torch.int64 and shape \(2,\), but must be int64'),
        ({'seed': torch.tensor([1.0])}, 'seed has dtype torch.float32'),
        ({'q_cmp': torch.zeros(1, 4, 2, 4)}, 'q_cmp has shape'),
        ({'k_cmp': torch.zeros(1, 7, 2, 4, dtype=torch.float64)}, 'k_cmp has 2 heads, but must have 1, as k'),
        ({'share_group': 1}, 'share_group is 1'),
        ({'window_size': (3, 2)}, 'right must be 0'),
        ({'selection_block_size': 0}, 'selection_block_size is 0'),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    tensors, options = make_problem(whole(8), Heads(2, 1, 4, 4))
    names = ('q', 'k', 'q_cmp', 'k_cmp')
    with pytest.raises(ValueError, match=message):
        block_score_loss(**{**dict(zip(names, tensors, strict=True)), **options, **changes})


@pytest.mark.parametrize('seqlen', [0, 1, 2])
def test_no_row_has_a_gradient_of_zeros(seqlen: int) -> None:
    """Without a query or without a compressed block, backward can be called as always."""
    q, k = torch.randn(1, seqlen, 4, 8), torch.randn(1, seqlen, 2, 8)
    q_cmp, k_cmp = q.clone().requires_grad_(), torch.randn(1, max(0, seqlen - 1), 2, 8, requires_grad=True)
    loss = block_score_loss(q, k, q_cmp, k_cmp, **SIZES, window_size=(3, 0))
    assert loss.item() == 0
    loss.backward()
    assert all(t.grad is not None and not t.grad.any() for t in (q_cmp, k_cmp))
