"""Sizes that the networks φ refuse."""

from __future__ import annotations

from typing import Any

import pytest

from native_sparse_attention.nn.compress import (
    AttentionPool,
    CompressMLP,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    SingleProjection,
)

SIZES: dict[type, dict[str, Any]] = {
    CompressMLP: {'dim_head': 4, 'compress_window_size': 3, 'dim_out': 5},
    GroupedMLP: {'dim_head': 4, 'compress_window_size': 3, 'heads': 2},
    AttentionPool: {'dim_head': 4, 'compress_window_size': 3},
    ConvLinearCompress: {'heads': 2, 'dim_head': 4, 'compress_window_size': 3},
    SingleProjection: {'dim_head': 4, 'compress_window_size': 3, 'heads': 2},
    CompressTransformer: {'num_layers': 1, 'dim': 8, 'num_heads': 2, 'ff_hidden_dim': 8},
}


@pytest.mark.parametrize('value', [0, -1, 1.5, 'a', True])
@pytest.mark.parametrize(('network', 'name'), [(network, name) for network in SIZES for name in SIZES[network]])
def test_sizes(network: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'^{name} is {value!r}, but must be an integer of at least 1$'):
        network(**SIZES[network] | {name: value})


def test_heads_of_the_transformer() -> None:
    with pytest.raises(ValueError, match=r'^dim is 8, but must be a multiple of num_heads, 3$'):
        CompressTransformer(1, 8, 3)


def test_dropout_of_the_transformer() -> None:
    with pytest.raises(ValueError, match=r'^dropout is 1.0, but must be a number in \[0, 1\)$'):
        CompressTransformer(1, 8, 2, dropout=1.0)
