"""With one seed a dense and a sparse model start from bitwise the same shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from native_sparse_attention.nn.compress import AttentionPool, GroupedMLP, MeanResidualMLP
from native_sparse_attention.nn.transformer import Transformer

SPARSE: dict[str, Any] = {
    'sliding_window_size': 8,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
    'use_diff_topk': True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    'default': {},
    'wide networks': {'compress_mlp_expand_factor': 3.0},
    'pooling': {'compress_mlp': AttentionPool(8, 4)},
    'mean and MLP': {'compress_mlp': MeanResidualMLP(8, 4)},
    'a pair': {'compress_mlp': (GroupedMLP(8, 4, 2), AttentionPool(8, 4))},
    'gate of the user': {'strategy_combine_mlp': nn.Sequential(nn.Linear(24, 5), nn.Linear(5, 12))},
    'sinks, no memory': {'num_sinks': 2, 'num_compressed_mem_kv': 0},
    'merged': {'merge_window': True},
    'merged, scores alone': {'merge_window': True, 'compressed_output': False},
}


def make(sparse: bool, seed: int = 5, settings: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    kwargs = {**SPARSE, **(settings or {})}
    return Transformer(29, 24, 3, 8, 4, 2, use_sparse_attn=sparse, sparse_attn_kwargs=kwargs, **changes)


@pytest.mark.parametrize('settings', SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize('tie_embeddings', [False, True])
def test_starts_are_bitwise_equal(settings: dict[str, Any], tie_embeddings: bool):
    dense = dict(make(False, tie_embeddings=tie_embeddings).named_parameters())
    sparse = dict(make(True, settings=settings, tie_embeddings=tie_embeddings).named_parameters())
    assert dense.keys() <= sparse.keys()
    assert all(torch.equal(p, sparse[name]) for name, p in dense.items())
    other = dict(make(True, seed=6, settings=settings).named_parameters())
    assert not torch.equal(other['layers.2.attention.to_qkv.weight'], sparse['layers.2.attention.to_qkv.weight'])


def test_layers_start_from_weights_of_their_own():
    first, second, _ = (block.attention for block in make(True).blocks)
    assert not torch.equal(first.to_qkv.weight, second.to_qkv.weight)
    assert not torch.equal(first.combine_heads.weight, second.combine_heads.weight)


def test_gated_dense_model_starts_from_the_same_weights():
    plain = dict(make(False).named_parameters())
    gated = dict(make(False, dense_output_gate=True).named_parameters())
    assert all(torch.equal(p, gated[name]) for name, p in plain.items())
    names = {f'layers.{layer}.attention.output_gate.{part}' for layer in range(3) for part in ('weight', 'bias')}
    assert gated.keys() - plain.keys() == names


def test_branches_with_their_own_keys_and_values_start_from_those_of_the_dense_model():
    dense, sparse = make(False), make(True, settings={'independent_branch_kv': True})
    for block, other in zip(dense.blocks, sparse.blocks, strict=True):
        queries, keys_values = block.attention.to_qkv.weight.split([32, 32])
        assert torch.equal(other.attention.to_qkv.weight, torch.cat([queries, keys_values, keys_values, keys_values]))
        assert torch.equal(other.attention.combine_heads.weight, block.attention.combine_heads.weight)


def test_dense_twin_has_the_norms_of_queries_and_keys():
    dense, sparse = (dict(make(kind, settings={'qk_norm': True}).named_parameters()) for kind in (False, True))
    names = {f'layers.{layer}.attention.{name}_norm.weight' for layer in range(3) for name in 'qk'}
    assert names <= dense.keys() <= sparse.keys()
    assert names.isdisjoint(dict(make(False).named_parameters()))


def test_refuses_the_gate_of_the_dense_model_in_a_sparse_one():
    with pytest.raises(ValueError, match='dense_output_gate is True, but only a dense model has it'):
        make(True, dense_output_gate=True)
    with pytest.raises(ValueError, match="dense_output_gate is 'no', but must be True or False"):
        make(False, dense_output_gate='no')
