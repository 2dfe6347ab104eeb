"""`SparseAttention` equals its definition to 1e-9 in float64: all settings, padded, packed, outputs and gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.compress import AttentionPool, GroupedMLP, MeanPool
from tests.definition import layer_definition
from tests.support.problems import cumulative

DIM = 8
SIZES: dict[str, Any] = {
    'dim': DIM,
    'dim_head': 5,
    'heads': 6,
    'kv_heads': 2,
    'sliding_window_size': 4,
    'compress_block_size': 5,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    'default': {},
    'differentiable selection': {'use_diff_topk': True},
    'heads alone': {'query_heads_share_selected_kv': False, 'use_diff_topk': True},
    'own branches': {'independent_branch_kv': True, 'dim_value_head': 3},
    'no rotary': {'rotary_emb': False},
    'no norm': {'norm': False},
    'qk norm': {'qk_norm': True, 'independent_branch_kv': True},
    'no memory': {'num_compressed_mem_kv': 0},
    'three memory pairs': {'num_compressed_mem_kv': 3},
    'no selection': {'num_selected_blocks': 0},
    'no forced blocks': {'num_init_blocks': 0, 'num_local_blocks': 0},
    'window of one': {'sliding_window_size': 1},
    'weights per head': {'compress_mlp': GroupedMLP(5, 5, 2)},
    'a pool for keys, a mean for values': {'compress_mlp': (AttentionPool(5, 5), MeanPool())},
}


def make_layer(**settings: Any) -> SparseAttention:
    """Return a layer in float64 with random parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        layer = SparseAttention(**(SIZES | settings)).double()
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return layer


def assert_is_its_definition(layer: SparseAttention, x: Tensor, *arguments: Any) -> None:
    parameters = [p for p in layer.parameters() if p.requires_grad]
    results = []
    for function in (layer, lambda *a: layer_definition.layer(layer, *a)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, *arguments)
        grads = torch.autograd.grad((out * out.detach().cos()).sum(), (leaf, *parameters), allow_unused=True)
        results.append((out, *(torch.zeros(()) if g is None else g for g in grads)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected.expand_as(result), rtol=1e-9, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
def test_definition(settings: dict[str, Any], causal: bool) -> None:
    layer = make_layer(causal=causal, **settings)
    assert_is_its_definition(layer, torch.randn(1, 13, DIM).double())
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 1:], mask[1, :3] = True, True
    assert_is_its_definition(layer, torch.randn(2, 7, DIM).double(), mask)
    assert_is_its_definition(layer, torch.randn(1, 11, DIM).double(), None, cumulative([0, 7, 2]))


@given(
    seqlen=st.integers(1, 20),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    dim_head=st.integers(4, 7),
    block_size=st.integers(1, 6),
    data=st.data(),
)
def test_drawn_shapes(
    seqlen: int, batch: int, heads: tuple[int, int], dim_head: int, block_size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, block_size))
    layer = make_layer(
        dim_head=dim_head,
        heads=heads[0],
        kv_heads=heads[1],
        compress_block_size=block_size,
        compress_block_sliding_stride=stride,
        selection_block_size=stride * data.draw(st.integers(1, 3)),
        num_selected_blocks=data.draw(st.integers(0, 5)),
        sliding_window_size=data.draw(st.integers(1, 9)),
        causal=data.draw(st.booleans()),
        use_diff_topk=data.draw(st.booleans()),
    )
    assert_is_its_definition(layer, torch.randn(batch, seqlen, DIM).double())
