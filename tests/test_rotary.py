"""Rotary angles: those of the library, float32 whatever the layer is, learned and partial ones too."""

from __future__ import annotations

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding

from tests.test_attention import make_layer, tokens


def test_matches_the_library() -> None:
    layer = make_layer()
    assert layer.rotary is not None
    x = torch.randn(2, 50, 3, 6)
    expected = RotaryEmbedding(6).rotate_queries_or_keys(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(layer.rotary(x, torch.arange(50)[None]), expected)


def test_half_layers_keep_their_angles() -> None:
    layer, x = make_layer(), torch.randn(1, 1, 1, 6)
    assert layer.rotary is not None
    expected = layer.rotary(x, torch.tensor([[100_003]]))
    assert layer.bfloat16().to_qkv.weight.dtype == torch.bfloat16
    assert layer.rotary(x, torch.tensor([[100_003]])).equal(expected)


def test_interpolation_learned_and_partial() -> None:
    emb = RotaryEmbedding(4, interpolate_factor=2.0, learned_freq=True)
    layer = make_layer(rotary_emb=emb)
    assert layer.rotary is not None
    x = torch.randn(1, 9, 1, 6)
    out = layer.rotary(x, torch.arange(9)[None])
    assert out[..., 4:].equal(x[..., 4:])
    expected = RotaryEmbedding(4, custom_freqs=emb.freqs.data, interpolate_factor=2.0)
    expected = expected.rotate_queries_or_keys(x[:, :, 0].double()).float()
    torch.testing.assert_close(out[:, :, 0], expected)
    layer(tokens(1, 9)).sum().backward()
    assert emb.freqs.grad is not None


def test_xpos_is_refused() -> None:
    with pytest.raises(ValueError, match='xpos'):
        make_layer(rotary_emb=RotaryEmbedding(6, use_xpos=True))
