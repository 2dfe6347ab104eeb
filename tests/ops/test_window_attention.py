"""Window attention: its definition, dense attention where the window covers all keys, local-attention as a witness."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_attention import LocalAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from native_sparse_attention.ops import window_attention
from tests.definition import definition
from tests.support.problems import Extents, Heads, assert_agree, drawn_extents, drawn_heads, make_qkv, normal, whole

sides = st.integers(-1, 9)


@given(drawn_extents(), drawn_heads(), sides, sides, st.booleans(), st.sampled_from([None, 0.7]))
def test_definition(extents: Extents, heads: Heads, left: int, right: int, causal: bool, scale: float | None) -> None:
    settings: dict[str, Any] = {'window_size': (left, 0 if causal else right), 'causal': causal, 'scale': scale}
    settings |= extents.where
    op, by_definition = (partial(f, **settings) for f in (window_attention, definition.window_attention))
    assert_agree(op, by_definition, *make_qkv(extents, heads))


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('left', [-1, 32, 33, 1000])
@pytest.mark.parametrize('heads', [Heads(6, 2, 5, 5), Heads(4, 4, 3, 7), Heads(5, 1, 4, 2)])
def test_a_window_over_everything_is_dense_attention(heads: Heads, left: int, causal: bool) -> None:
    windowed = partial(window_attention, window_size=(left, 0 if causal else left), causal=causal)
    inputs = make_qkv(whole(33, batch=2), heads)
    assert_agree(lambda *t: windowed(*t)[0], partial(dense, causal=causal), *inputs)


@pytest.mark.parametrize('seqlen', [1, 2, 7, 16, 33, 50])
@pytest.mark.parametrize('window', [2, 3, 8, 17, 64])
def test_local_attention_agrees(seqlen: int, window: int) -> None:
    local = LocalAttention(
        window_size=window - 1,
        causal=True,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
        scale=0.3,
    )

    def witness(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    windowed = partial(window_attention, window_size=(window - 1, 0), scale=0.3)
    assert_agree(lambda *t: windowed(*t)[0], witness, *make_qkv(whole(seqlen, batch=2), Heads(3, 3, 6, 6)))


def test_a_window_of_one_returns_the_values() -> None:
    q, k, v = make_qkv(whole(9), Heads(4, 2, 3, 5))
    out, lse = window_attention(q, k, v, window_size=(0, 0))
    assert torch.equal(out, v.repeat_interleave(2, 2))
    logits = (q * k.repeat_interleave(2, 2)).sum(-1) * 3**-0.5
    torch.testing.assert_close(lse, logits.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_right_is_zero_where_causal() -> None:
    inputs = make_qkv(whole(9), Heads(2, 1, 3, 3))
    for left in (-1, 0, 4):
        results = [window_attention(*inputs, window_size=(left, right))[0] for right in (-1, 0)]
        assert torch.equal(*results)


def test_a_decoding_step_reads_the_last_keys() -> None:
    q, k, v = make_qkv(Extents(2, 1, 20, {}, [20, 20]), Heads(4, 2, 3, 5))
    out, _ = window_attention(q, k, v, window_size=(4, 0))
    alone, _ = window_attention(q, k[:, 15:], v[:, 15:], window_size=(-1, 0))
    torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)


def test_keys_outside_the_window_are_not_read() -> None:
    q, k, v = normal(1, 1, 2, 3), normal(1, 20, 1, 3), normal(1, 20, 1, 3)
    for tensor in (k, v):
        tensor[:, :11] = torch.nan
        tensor[:, 16:] = torch.nan
    settings: dict[str, Any] = {'window_size': (4, 0), 'q_offset': 15}
    op, by_definition = (partial(f, **settings) for f in (window_attention, definition.window_attention))
    assert_agree(op, by_definition, q, k, v)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'window_size': (3, 1)}, r'window_size is \(3, 1\), but right must be 0 \(or -1\) where causal is set'),
        ({'window_size': (-2, 0)}, r'window_size is \(-2, 0\), but must be \(left, right\), integers of at least -1'),
        ({'window_size': (3, -2), 'causal': False}, r'window_size is \(3, -2\), but must be'),
        ({'window_size': (3,)}, r'window_size is \(3,\), but must be'),
        ({'window_size': (2.5, 0)}, r'window_size is \(2.5, 0\), but must be'),
    ],
)
def test_wrong_windows(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_attention(*make_qkv(whole(5), Heads(2, 1, 3, 3)), **settings)
