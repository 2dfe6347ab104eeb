"""The layer in eager under torch.func, torch.export, selective checkpointing and other default devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_compress import every_network

SIZES: dict[str, Any] = {
    'sliding_window_size': 3,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 2,
    'num_local_blocks': 1,
    'num_init_blocks': 0,
}


def make_layer(**settings: Any) -> SparseAttention:
    torch.manual_seed(0)
    return SparseAttention(8, 4, 2, kv_heads=1, causal=True, backend='eager', **SIZES, **settings).double()


def tokens(batch: int, seqlen: int = 13) -> Tensor:
    return torch.randn(batch, seqlen, 8, dtype=torch.float64)


@every_network
@pytest.mark.parametrize(
    'settings',
    [{}, {'use_diff_topk': True, 'rotary_emb': False}, {'recompute': True}],
    ids=['default', 'diff_topk', 'recompute'],
)
def test_vmap(make: Callable[..., nn.Module], settings: dict[str, Any]) -> None:
    layer = make_layer(compress_mlp=make(1, 4, 4), **settings)
    x, weights = tokens(3), {name: p.detach() for name, p in layer.named_parameters()}
    torch.testing.assert_close(torch.vmap(lambda row: layer(row[None])[0])(x), layer(x))

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (row[None],)).sin().sum()

    per_row = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for index, row in enumerate(x):
        expected = torch.autograd.grad(loss(dict(layer.named_parameters()), row), [*layer.parameters()])
        torch.testing.assert_close([gradient[index] for gradient in per_row.values()], [*expected])
    ensemble = {name: torch.stack((w, 2 * w)) for name, w in weights.items()}
    out = torch.vmap(lambda w: torch.func.functional_call(layer, w, (x,)))(ensemble)
    for index in range(2):
        member = {name: w[index] for name, w in ensemble.items()}
        torch.testing.assert_close(out[index], torch.func.functional_call(layer, member, (x,)))


@pytest.mark.parametrize(
    ('strict', 'recompute'), [(False, False), pytest.param(True, False, marks=pytest.mark.full), (False, True)]
)
def test_export_of_every_length(strict: bool, recompute: bool) -> None:
    layer = make_layer(recompute=recompute).eval()
    exported = torch.export.export(
        layer,
        (tokens(1, 40),),
        dynamic_shapes=({1: torch.export.Dim('T', min=16, max=4096)},),
        strict=strict,
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for seqlen in (16, 40, 77, 300):
        x = tokens(1, seqlen)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize('saved', ['baddbmm', 'bmm', 'mm', 'exp'])
def test_selective_checkpointing(saved: str) -> None:
    layer, x = make_layer(), tokens(1).requires_grad_()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    out: Any = checkpoint(
        layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    leaves = [x, *layer.parameters()]
    found, expected = (torch.autograd.grad(each.sin().sum(), leaves) for each in (out, layer(x)))
    torch.testing.assert_close(found, expected)


def test_generation_under_another_default_device() -> None:
    torch.manual_seed(0)
    model = Transformer(11, 8, 2, 4, 2, use_sparse_attn=True, sparse_attn_kwargs=SIZES, backend='eager')
    ids = torch.randint(11, (2, 5))
    expected = model.generate(ids, 6, seed=3, top_p=0.9)
    with torch.device('meta'):
        assert model.generate(ids, 6, seed=3, top_p=0.9).equal(expected)
        model.generate(ids, 6, stop_tokens=3)
