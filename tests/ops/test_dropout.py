"""Dropout of weights in eager: rate, positions and seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import window_attention
from tests.support.problems import Heads, make_qkv, whole

HEADS = Heads(4, 2, 3, 5)
WEIGHTS = 96


def dropped_weights(seed: int | Tensor | None, dropout_p: float, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights `[B, T, HQ, S]` with and without dropout, and the log-sum-exp with it: the values are unit
    vectors.
    """
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(batch, WEIGHTS, n, 8, generator=generator) for n in (3, 1))
    v = torch.eye(WEIGHTS).expand(batch, -1, -1)[:, :, None]
    settings: dict[str, Any] = {'window_size': (-1, -1), 'causal': False}
    whole_weights, _ = window_attention(q, k, v, **settings)
    weights, lse = window_attention(q, k, v, **settings, dropout_p=dropout_p, dropout_seed=seed)
    return weights, whole_weights, lse


@pytest.mark.parametrize('dropout_p', [0.01, 0.25, 0.5, 0.9])
def test_dropout_drops_one_in_so_many(dropout_p: float) -> None:
    weights, undropped, lse = dropped_weights(3, dropout_p)
    kept = weights != 0
    torch.testing.assert_close(weights, undropped * kept / (1 - dropout_p))
    deviation = (dropout_p * (1 - dropout_p)) ** 0.5
    for share in (kept, kept[0], kept[:, :48], kept[:, :, 0], kept[..., ::2], kept[..., 5]):
        assert abs(float(share.float().mean()) - (1 - dropout_p)) < 5 * deviation / share.numel() ** 0.5
    without = dropped_weights(3, 0.0)
    assert lse.equal(without[2])
    assert without[0].equal(undropped)


def test_dropout_of_rows_heads_queries_and_keys_is_unrelated() -> None:
    kept = (dropped_weights(3, 0.5)[0] != 0).float() - 0.5
    pairs = (
        (kept[0], kept[1]),
        (kept[:, :, 0], kept[:, :, 1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[..., 1:], kept[..., :-1]),
    )
    for first, second in pairs:
        correlation = float((first * second).mean()) * 4
        assert abs(correlation) < 5 / first.numel() ** 0.5


def test_dropout_is_a_function_of_the_seed() -> None:
    weights, _, _ = dropped_weights(3, 0.5)
    assert weights.equal(dropped_weights(torch.tensor([3]), 0.5)[0])
    for other in (4, -3, 3 + 2**32, None):
        assert not weights.equal(dropped_weights(other, 0.5)[0])
    torch.manual_seed(0)
    drawn = [dropped_weights(None, 0.5)[0] for _ in range(2)]
    torch.manual_seed(0)
    assert drawn[0].equal(dropped_weights(None, 0.5)[0])
    assert not drawn[0].equal(drawn[1])


def test_dropout_of_a_row_does_not_depend_on_others() -> None:
    inputs = make_qkv(whole(9, batch=2), HEADS)
    settings: dict[str, Any] = {'window_size': (4, 0), 'dropout_p': 0.5, 'dropout_seed': 3}
    out, _ = window_attention(*inputs, **settings)
    alone, _ = window_attention(*(t[:1] for t in inputs), **settings)
    torch.testing.assert_close(out[:1], alone, rtol=1e-12, atol=1e-12)


def test_dropout_draws_a_seed_only_where_it_needs_one() -> None:
    inputs = make_qkv(whole(5), HEADS)
    state = torch.get_rng_state()
    window_attention(*inputs, window_size=(4, 0), dropout_p=0.0)
    window_attention(*inputs, window_size=(4, 0), dropout_p=0.5, dropout_seed=3)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_weights_are_rounded_after_dropout(dtype: torch.dtype) -> None:
    q, k, _ = (t.to(dtype) for t in make_qkv(whole(16), Heads(1, 1, 4, 4)))
    v = torch.eye(16)[None, :, None]
    settings: dict[str, Any] = {'window_size': (-1, 0), 'dropout_p': 0.3, 'dropout_seed': 1, 'softcap': 2.0}
    out, _ = window_attention(q, k, v.to(dtype), **settings)
    exact, _ = window_attention(q.float(), k.float(), v, **settings)
    assert out.equal(exact.to(dtype))
