"""Layers and models whose weights accelerate keeps on the CPU or on disk and loads for each call of a module."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_compress import every_network
from tests.layer.test_pairs import SPARSE

SEQLEN = 13


def on_cpu(module: Any, _: Path) -> Any:
    return cpu_offload(module, execution_device=torch.device('cpu'))


def on_disk(module: Any, folder: Path) -> Any:
    return disk_offload(module, str(folder), execution_device=torch.device('cpu'))


offloads = pytest.mark.parametrize('offload', [on_cpu, on_disk])
Offload = Callable[[Any, Path], Any]


def random(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def make_layer(**settings: Any) -> SparseAttention:
    torch.manual_seed(0)
    return random(SparseAttention(8, 4, 4, kv_heads=2, causal=True, **SPARSE | settings))


def steps(layer: SparseAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        cache = layer.init_cache(len(x), SEQLEN)
        return torch.cat([layer(part, cache=cache) for part in x.split((6, *(1,) * (SEQLEN - 6)), dim=1)], 1)


def assert_is_offloaded(module: nn.Module) -> None:
    assert all(parameter.is_meta for parameter in module.parameters())


LAYERS: dict[str, dict[str, Any]] = {
    'default': {},
    'own branches': {'independent_branch_kv': True, 'num_sinks': 2},
    'merged': {'merge_window': True},
    'scores alone': {'merge_window': True, 'compressed_output': False},
    'recompute': {'recompute': True},
}


@offloads
@pytest.mark.parametrize('settings', LAYERS.values(), ids=LAYERS)
def test_layers(settings: dict[str, Any], offload: Offload, tmp_path: Path) -> None:
    layer, x = make_layer(**settings), torch.randn(2, SEQLEN, 8)
    mask = torch.arange(SEQLEN) < torch.tensor([SEQLEN, 5])[:, None]
    offloaded = offload(deepcopy(layer), tmp_path)
    assert_is_offloaded(offloaded)
    for inputs in ((x,), (x[:, :3],), (x, mask)):
        torch.testing.assert_close(offloaded(*inputs), layer(*inputs))
    with torch.no_grad():
        torch.testing.assert_close(offloaded(x, return_cache=True)[0], layer(x))
    torch.testing.assert_close(steps(offloaded, x), steps(layer, x))
    assert_is_offloaded(offloaded)
    x.requires_grad_()
    found, expected = (torch.autograd.grad(each(x).sin().sum(), x)[0] for each in (offloaded, layer))
    torch.testing.assert_close(found, expected)


@every_network
def test_networks(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    layer, x = make_layer(compress_mlp=make(2, 4, 4)), torch.randn(2, SEQLEN, 8)
    offloaded = on_cpu(deepcopy(layer), tmp_path)
    torch.testing.assert_close(offloaded(x), layer(x))
    torch.testing.assert_close(steps(offloaded, x), steps(layer, x))


@offloads
@pytest.mark.parametrize(('sparse', 'tie_embeddings'), [(False, False), (True, True)], ids=['dense', 'sparse, tied'])
def test_models(sparse: bool, tie_embeddings: bool, offload: Offload, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random(
        Transformer(
            29, 24, 2, 8, 4, 2, use_sparse_attn=sparse, sparse_attn_kwargs=SPARSE, tie_embeddings=tie_embeddings
        )
    )
    ids = torch.randint(29, (2, SEQLEN))
    offloaded = offload(deepcopy(model), tmp_path)
    assert_is_offloaded(offloaded)
    torch.testing.assert_close(offloaded(ids), model(ids))
    torch.testing.assert_close(offloaded(ids, return_loss=True), model(ids, return_loss=True))
    for options in ({'temperature': 0.0}, {'seed': 3, 'top_p': 0.9}, {'seed': 1, 'mask': torch.ones_like(ids)}):
        assert torch.equal(offloaded.generate(ids, 9, **options), model.generate(ids, 9, **options))
    assert torch.equal(offloaded.sample(ids, 20, 0, use_cache_kv=True), model.sample(ids, 20, 0, use_cache_kv=True))


def test_learned_frequencies(tmp_path: Path) -> None:
    """Learned frequencies are read without a call of the module that holds them."""
    layer, x = make_layer(rotary_emb=RotaryEmbedding(4, learned_freq=True)), torch.randn(2, SEQLEN, 8)
    with pytest.raises(
        ValueError, match=r"rotary_emb.freqs is on the meta device .*preload_module_classes=\['Rotary'\]"
    ):
        on_cpu(deepcopy(layer), tmp_path)(x)
    offloaded = cpu_offload(deepcopy(layer), torch.device('cpu'), preload_module_classes=['Rotary'])
    torch.testing.assert_close(offloaded(x), layer(x))
