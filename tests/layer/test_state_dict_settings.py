"""A state dict made under other settings does not load silently."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_pairs import SPARSE

SIZES: dict[str, Any] = {'dim': 16, 'dim_head': 8, 'heads': 4, 'kv_heads': 2, 'causal': True, **SPARSE}


def make(**settings: Any) -> SparseAttention:
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'num_selected_blocks|compressed_output')
        return SparseAttention(**SIZES | settings)


# Settings of one layer and of another, with the part of the error that names the difference.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    'forced first blocks': ({}, {'num_init_blocks': 2}, 'num_init_blocks is 2, but must be 1'),
    'forced local blocks': ({'num_local_blocks': 0}, {}, 'num_local_blocks is 2, but must be 0'),
    'mode': ({}, {'merge_window': True}, 'merge_window is True, but must be False'),
    'selection before the window': (
        {'merge_window': True},
        {'merge_window': True, 'select_before_window': True},
        'select_before_window is True, but must be False',
    ),
    'form of the gate': (
        {'merge_window': True},
        {},
        "gate is '3 sigmoids per head', but must be '1 sigmoids per head'",
    ),
    'gate of the output': (
        {'merge_window': True},
        {'merge_window': True, 'output_gate': True},
        "gate is '2 sigmoids per head', but must be '1 sigmoids per head'",
    ),
    'scores alone': (
        {'merge_window': True},
        {'merge_window': True, 'compressed_output': False},
        'compressed_output is False, but must be True',
    ),
    'heads of other sizes': ({}, {'heads': 8, 'kv_heads': 4, 'dim_head': 4}, 'dim_head is 4, but must be 8'),
    'not causal': ({}, {'causal': False}, 'causal is False, but must be True'),
    'rotary': ({}, {'rotary_emb': False}, "rotary is None, but must be '4 frequencies from 0.001, interpolated by 1'"),
    'other frequencies': ({}, {'rotary_emb': RotaryEmbedding(8, theta=500)}, "rotary is '4 frequencies from 0.009457"),
    'interpolation': ({}, {'rotary_emb': RotaryEmbedding(8, interpolate_factor=2.0)}, "rotary is '4 .* by 2'"),
    'soft cap': ({'softcap': 5.0}, {}, 'softcap is None, but must be 5.0'),
    'selection per head': (
        {},
        {'query_heads_share_selected_kv': False},
        'query_heads_share_selected_kv is False, but must be True',
    ),
    'block size': ({}, {'selection_block_size': 8}, 'selection_block_size is 8, but must be 4'),
    'stride': ({}, {'compress_block_sliding_stride': 4}, 'compress_block_sliding_stride is 4, but must be 2'),
}


@pytest.mark.parametrize(('first', 'second', 'message'), DIFFERENT.values(), ids=DIFFERENT)
def test_other_settings(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    state, layer = make(**first).state_dict(), make(**second)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state, strict=False)
    model = nn.ModuleDict({'attention': layer})
    with pytest.raises(RuntimeError, match=rf'attention\.{message}'):
        model.load_state_dict(nn.ModuleDict({'attention': make(**first)}).state_dict(), strict=False)


def test_budgets_backends_and_dropout_may_differ() -> None:
    state = make().state_dict()
    for settings in (
        {'num_selected_blocks': 6, 'sliding_window_size': 9},
        {'backend': 'eager', 'recompute': True, 'dropout': 0.1},
        {'use_diff_topk': False},
    ):
        make(**settings).load_state_dict(state)


def test_models() -> None:
    def make_model(sparse: bool, heads: int = 4, **settings: Any) -> Transformer:
        dim_head = 32 // heads
        return Transformer(
            29, 24, 2, dim_head, heads, heads // 2, use_sparse_attn=sparse, sparse_attn_kwargs=SPARSE | settings
        )

    state = make_model(True).state_dict()
    make_model(True).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'layers\.1\.attention\.num_init_blocks is 0, but must be 1'):
        make_model(True, num_init_blocks=0).load_state_dict(state)
    dense = make_model(False).state_dict()
    make_model(True).load_state_dict(dense, strict=False)
    for sparse in (False, True):
        with pytest.raises(RuntimeError, match=r'layers\.0\.attention\.heads is 8, but must be 4'):
            make_model(sparse, heads=8).load_state_dict(dense, strict=False)


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize('copy', [deepcopy, saved_and_loaded])
def test_settings_survive_copies(copy: Any) -> None:
    state = copy(make().state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        make().load_state_dict(state)
    with pytest.raises(RuntimeError, match='num_init_blocks is 2, but must be 1'):
        make(num_init_blocks=2).load_state_dict(state)


def test_state_dicts_without_settings_load() -> None:
    """State dicts of earlier versions, of formats without metadata, and copies as plain dicts."""
    layer, state = make(num_init_blocks=2), make().state_dict()
    assert not any('settings' in key for key in state)
    old: Any = deepcopy(state)
    for metadata in old._metadata.values():
        metadata.pop('settings', None)
    for each in (dict(state), old):
        layer.load_state_dict(each)
    assert torch.equal(layer.to_qkv.weight, state['to_qkv.weight'])


def test_frequencies_without_values_are_not_compared() -> None:
    with torch.device('meta'):
        layer = make(rotary_emb=RotaryEmbedding(8, theta=500))
    layer.load_state_dict(make().state_dict(), assign=True)


def test_dense_attention() -> None:
    state = DenseAttention(16, 8, 4, 2).state_dict()
    DenseAttention(16, 8, 4, 2).load_state_dict(state)
    with pytest.raises(RuntimeError, match='kv_heads is 4, but must be 2'):
        DenseAttention(16, 8, 4, 4).load_state_dict(state, strict=False)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.init_device_mesh('cpu', (1,))
    torch.distributed.destroy_process_group()


def test_sharded_layers(mesh: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def shard(**settings: Any) -> Any:
        layer = make(**settings)
        fully_shard(layer, mesh=mesh)
        return fully_shard(nn.Sequential(layer), mesh=mesh)

    state = shard().state_dict()
    shard().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'0\.num_init_blocks is 2, but must be 1'):
        shard(num_init_blocks=2).load_state_dict(state)
    set_model_state_dict(shard(), get_model_state_dict(shard()))
