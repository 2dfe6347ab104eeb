"""Modules made on the meta device equal new ones after `to_empty` and a loop of `reset_parameters`; ties hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.gate import make_gate, make_output_gate
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_compress import every_network
from tests.layer.test_pairs import SPARSE


def reset(module: nn.Module) -> None:
    """Reset all modules, as users of FSDP do."""
    for each in module.modules():
        if hasattr(each, 'reset_parameters'):
            each.reset_parameters()  # type: ignore[operator]


def assert_resets(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    new, after = make(), torch.rand(1)
    with torch.device('meta'):
        module = make()
    module.to_empty(device='cpu')
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(3)
    reset(module)
    parameters = dict(module.named_parameters())
    assert parameters.keys() == dict(new.named_parameters()).keys()
    for name, parameter in new.named_parameters():
        assert torch.equal(parameters[name], parameter), name
        assert parameters[name].requires_grad == parameter.requires_grad, name
    assert torch.equal(torch.rand(1), after)


@every_network
def test_networks(make: Callable[..., nn.Module]) -> None:
    assert_resets(lambda: make(2, 4, 4))


LAYERS: dict[str, dict[str, Any]] = {
    'default': {},
    'not shared': {'query_heads_share_selected_kv': False, 'dim_value_head': 3},
    'own branches': {'independent_branch_kv': True},
    'qk norm': {'qk_norm': True},
    'sinks': {'num_sinks': 2, 'num_compressed_mem_kv': 2},
    'merged': {'merge_window': True},
    'scores alone': {'merge_window': True, 'compressed_output': False},
    'no norm, no rotary': {'norm': False, 'rotary_emb': False},
}


@pytest.mark.parametrize('settings', LAYERS.values(), ids=LAYERS)
def test_layers(settings: dict[str, Any]) -> None:
    assert_resets(lambda: SparseAttention(16, 4, 4, kv_heads=2, causal=True, **SPARSE | settings))


@pytest.mark.parametrize('learned', [False, True])
def test_layers_with_rotary_instances(learned: bool) -> None:
    rotary = RotaryEmbedding(4, theta=500, learned_freq=learned)
    assert_resets(lambda: SparseAttention(16, 4, 4, causal=True, rotary_emb=rotary, **SPARSE))
    assert_resets(lambda: DenseAttention(16, 4, 4, rotary_emb=rotary))


def test_learned_frequencies_without_values() -> None:
    with torch.device('meta'):
        layer = DenseAttention(16, 4, 4, rotary_emb=RotaryEmbedding(4, learned_freq=True))
    layer.to_empty(device='cpu')
    with pytest.raises(ValueError, match='rotary_emb was made on the meta device'):
        reset(layer)


def test_gates() -> None:
    assert_resets(lambda: make_gate(5, 3))
    assert_resets(lambda: make_output_gate(5, 3))


def make_model(sparse: bool = True, settings: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    kwargs = {**SPARSE, **(settings or {})}
    return Transformer(29, 24, 2, 8, 4, 2, use_sparse_attn=sparse, sparse_attn_kwargs=kwargs, **changes)


@pytest.mark.parametrize('settings', LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize('tied', [False, True])
def test_models(settings: dict[str, Any], tied: bool) -> None:
    assert_resets(lambda: make_model(settings=settings, tie_embeddings=tied))


@pytest.mark.parametrize('changes', [{}, {'dense_output_gate': True}, {'tie_embeddings': True}])
def test_dense_models(changes: dict[str, Any]) -> None:
    assert_resets(lambda: make_model(False, **changes))


def test_a_reset_starts_dense_and_sparse_models_alike() -> None:
    """Networks and gates of the sparse model draw last, so any of them leave the other weights equal."""
    settings = {
        'compress_mlp': nn.Sequential(nn.Flatten(-2), nn.Linear(32, 8)),
        'strategy_combine_mlp': nn.Sequential(nn.Linear(24, 5), nn.Linear(5, 12)),
    }
    models = make_model(False), make_model(settings=settings)
    for model in models:
        torch.manual_seed(4)
        reset(model)
    dense, sparse = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(parameter, sparse[name]) for name, parameter in dense.items())


def test_given_networks_and_gates_keep_their_weights() -> None:
    gate, network = nn.Linear(24, 12), nn.Sequential(nn.Flatten(-2), nn.Linear(32, 8))
    layer = make_model(settings={'strategy_combine_mlp': gate, 'compress_mlp': network}).blocks[1].attention
    assert torch.equal(layer.get_parameter('to_strategy_combine.weight'), gate.weight)
    for name in ('k_compress', 'v_compress'):
        assert torch.equal(layer.get_parameter(f'{name}.1.weight'), network.get_parameter('1.weight'))


def is_tied(model: Transformer) -> bool:
    return model.token_emb.weight is model.to_logits.weight and len(model.state_dict()) > len([*model.parameters()])


@pytest.mark.parametrize('drop', [None, 'token_emb.weight', 'to_logits.weight'])
def test_tied_weights_stay_tied(drop: str | None) -> None:
    source = make_model(tie_embeddings=True)
    state = source.state_dict()
    if drop is not None:  # as safetensors stores a shared tensor
        del state[drop]
    ids = torch.randint(29, (1, 9))
    for assign in (False, True):
        with torch.device('meta'):
            model = make_model(tie_embeddings=True)
        if not assign:
            model = model.to_empty(device='cpu')
            assert is_tied(model)
        model.load_state_dict(state, assign=assign, strict=drop is None)
        assert is_tied(model)
        assert torch.equal(model(ids), source(ids))
    assert is_tied(model.double())


def test_weights_that_are_not_tied_stay_apart() -> None:
    model = make_model()
    model.load_state_dict(make_model(tie_embeddings=True).state_dict(), assign=True)
    assert not is_tied(model)
    replaced = make_model(tie_embeddings=True)
    replaced.to_logits = nn.Linear(24, 29, bias=False)
    assert not is_tied(replaced.double())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip('torch was built without distributed')
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield torch.distributed.init_device_mesh('cpu', (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings('ignore:DTensor random operators')
@pytest.mark.parametrize('settings', LAYERS.values(), ids=LAYERS)
def test_sharded_models(settings: dict[str, Any], mesh: Any) -> None:
    """Fixed starts of sharded parameters are checked; random ones depend on the sharding."""
    from torch.distributed.fsdp import fully_shard

    new = make_model(settings=settings, tie_embeddings=True)
    with torch.device('meta'):
        model = make_model(settings=settings, tie_embeddings=True)
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device='cpu')
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    reset(model)
    assert model.token_emb.weight is model.to_logits.weight
    expected = dict(new.named_parameters())
    for name, parameter in model.named_parameters():
        values: Any = parameter
        assert values.full_tensor().isfinite().all(), name
        if len(expected[name].unique()) < 3:
            assert torch.equal(values.full_tensor(), expected[name]), name
