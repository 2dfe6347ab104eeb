"""torchao's float8 quantisation of new layers, whose gates have weights of 0 (docs/faq.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from native_sparse_attention import SparseAttention
from native_sparse_attention.compress import MeanResidualMLP
from native_sparse_attention.integrations.transformers import convert_to_nsa
from native_sparse_attention.nn.dense import DenseAttention
from tests.support.hf_models import MERGED, dense_model, random_ids

SIZES: dict[str, Any] = {'dim': 32, 'dim_head': 8, 'heads': 4, 'kv_heads': 2, 'causal': True}
BLOCKS: dict[str, Any] = {
    'sliding_window_size': 8,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 5,
}
LAYERS = {
    'separate': lambda: SparseAttention(**SIZES, **BLOCKS),
    'mean and MLP': lambda: SparseAttention(**SIZES, **BLOCKS, compress_mlp=MeanResidualMLP(8, 4)),
    'merged': lambda: SparseAttention(**SIZES, **BLOCKS, merge_window=True, output_gate=True),
    'dense': lambda: DenseAttention(**SIZES, output_gate=True),
}


def has_no_row_of_zeros(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and bool(module.weight.any(1).all())


@pytest.mark.parametrize('make', LAYERS.values(), ids=LAYERS)
@torch.no_grad()
def test_layers_without_a_row_of_zeros_are_quantised(make: Any) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(2, 20, 32)
    expected = layer(x)
    quantize_(layer, Float8WeightOnlyConfig(), has_no_row_of_zeros)
    assert type(layer.to_qkv.weight).__name__ == 'Float8Tensor'
    torch.testing.assert_close(layer(x), expected, rtol=0.1, atol=0.05)


@torch.no_grad()
def test_converted_models_too() -> None:
    model, ids = convert_to_nsa(dense_model(), MERGED), random_ids(1, 40)
    expected = model(ids).logits
    quantize_(model, Float8WeightOnlyConfig(), has_no_row_of_zeros)
    assert (model(ids).logits - expected).norm() < 0.1 * expected.norm()


def test_a_row_of_zeros_becomes_nan() -> None:
    """If this fails, docs/faq.md describes an older torchao."""
    linear = nn.Linear(32, 2)
    nn.init.zeros_(linear.weight[:1])
    quantize_(linear, Float8WeightOnlyConfig())
    assert linear(torch.ones(1, 32)).isnan().tolist() == [[True, False]]
