"""Norms of queries and keys with rotary embedding in one kernel equal the norms followed by rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from native_sparse_attention import SparseAttention
from native_sparse_attention.core import backend as backends
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.heads import HeadNorm
from tests.layer.test_recompute import Calls

DIM = 24
SIZES: dict[str, Any] = {
    'dim': DIM,
    'dim_head': 12,
    'heads': 4,
    'kv_heads': 2,
    'sliding_window_size': 5,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
    'causal': True,
    'qk_norm': True,
    'backend': 'triton',
}
MERGED: dict[str, Any] = {'merge_window': True}
SETTINGS: dict[str, dict[str, Any]] = {
    'separate': {},
    'own branches': {'independent_branch_kv': True},
    'merged': MERGED,
    'scores': {**MERGED, 'compressed_output': False, 'use_diff_topk': True},
    'window': {**MERGED, 'compressed_output': False, 'num_selected_blocks': 0},
    'no rotary': {'rotary_emb': False},
    'partial, half': {'rotary_emb': RotaryEmbedding(8), 'rotary_layout': 'half'},
    'recompute': {'recompute': True},
    'merged, recompute': {**MERGED, 'recompute': True},
    'not causal': {'causal': False},
}
INPUTS: dict[str, dict[str, Tensor]] = {
    'whole': {},
    'padded': {'mask': torch.tensor([[0] * 3 + [1] * 8, [1] * 11], dtype=torch.bool)},
    'packed': {'cu_seqlens': torch.tensor([0, 5, 5, 9], dtype=torch.int32)},
}
SEQLEN = 11


def make_layer(kind: type[nn.Module] = SparseAttention, **settings: Any) -> Any:
    torch.manual_seed(0)
    shared = ('dim', 'dim_head', 'heads', 'kv_heads', 'qk_norm')
    layer = kind(**(SIZES if kind is SparseAttention else {name: SIZES[name] for name in shared}) | settings)
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return layer


def make_input(device: torch.device, batch: int = 2) -> Tensor:
    return torch.randn(batch, SEQLEN, DIM).to(device)


def run(layer: Any, x: Tensor, **inputs: Any) -> tuple[list[Tensor], dict[str, int]]:
    """Return the output and all gradients, and the calls of registered ops."""
    x = x.clone().requires_grad_()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    with Calls() as calls:
        out = layer(x, **inputs)
        grads = torch.autograd.grad(out.float().sin().sum(), leaves, materialize_grads=True)
    return [out.detach(), *grads], calls.counts


def called_as_modules(layer: Any) -> list[Any]:
    """Add hooks that change nothing, so that the norms are called."""
    return [norm.register_forward_hook(lambda *_: None) for norm in (layer.q_norm, layer.k_norm)]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    """Assert equality up to roundings in float32, which attention and its gradients multiply."""
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert (result - wanted).norm() <= 5e-5 * wanted.norm(), index


def assert_equals_the_composition(layer: Any, x: Tensor, counts: tuple[int, int], **inputs: Any) -> None:
    """counts: of the forward and of the backward kernel."""
    results, calls = run(layer, x, **inputs)
    assert (calls['norm_rotary'], calls['norm_rotary_backward']) == counts
    hooks = called_as_modules(layer)
    expected, calls = run(layer, x, **inputs)
    assert 'norm_rotary' not in calls
    for hook in hooks:
        hook.remove()
    assert_same(results, expected)


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('merged', 'whole'),
        *(pytest.param(name, 'whole', marks=pytest.mark.full) for name in SETTINGS if name != 'merged'),
        pytest.param('separate', 'padded', marks=pytest.mark.full),
        pytest.param('merged', 'packed', marks=pytest.mark.full),
    ],
)
def test_equals_the_composition(name: str, kind: str, device: torch.device) -> None:
    layer = make_layer(**SETTINGS[name]).to(device)
    inputs = {key: value.to(device) for key, value in INPUTS[kind].items()}
    count = 4 if name == 'own branches' else 2
    # Queries are recomputed in the backward pass.
    counts = count + layer.recompute, count
    assert_equals_the_composition(layer, make_input(device, 1 if kind == 'packed' else 2), counts, **inputs)


@pytest.mark.parametrize('kind', INPUTS)
@pytest.mark.parametrize('settings', [{}, {'rotary_layout': 'half'}, {'rotary_emb': False}], ids=str)
def test_the_dense_twin(
    settings: dict[str, Any], kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, '_left_out', lambda name, device: None)  # 'auto' takes Triton on CPUs too
    layer = make_layer(DenseAttention, **settings).to(device)
    inputs = {key: value.to(device) for key, value in INPUTS[kind].items()}
    assert_equals_the_composition(layer, make_input(device, 1 if kind == 'packed' else 2), (2, 2), **inputs)


@pytest.mark.parametrize('merge_window', [False, True])
def test_recomputation_has_the_same_bits(merge_window: bool, device: torch.device) -> None:
    layers = [make_layer(merge_window=merge_window, recompute=again).to(device) for again in (False, True)]
    x = make_input(device)
    kept, again = (run(layer, x)[0] for layer in layers)
    for a, b in zip(kept, again, strict=True):
        assert a.equal(b)


def test_weights_that_change_before_the_backward_pass(device: torch.device) -> None:
    """Recomputed queries have the old weights."""
    layer, x = make_layer(recompute=True).to(device), make_input(device)
    (expected,) = torch.autograd.grad(layer(x).sin().sum(), layer.to_qkv.weight)
    out = layer(x).sin().sum()
    with torch.no_grad():
        layer.q_norm.weight.add_(1)
    (grad,) = torch.autograd.grad(out, layer.to_qkv.weight)
    assert grad.equal(expected)


def add_hook(norm: HeadNorm) -> None:
    norm.register_forward_hook(lambda module, args, out: out.sin())


def add_pre_hook(norm: HeadNorm) -> None:
    norm.register_forward_pre_hook(lambda module, args: (args[0].sin(),))


def add_backward_hook(norm: HeadNorm) -> None:
    norm.register_full_backward_hook(lambda module, grads, _: tuple(3 * grad for grad in grads))


def add_parametrization(norm: HeadNorm) -> None:
    class Tripled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 3 * weight

    parametrize.register_parametrization(norm, 'weight', Tripled())


def add_mask(norm: HeadNorm) -> None:
    prune.l1_unstructured(norm, 'weight', 4)


def add_forward(norm: HeadNorm) -> None:
    norm.forward = (lambda forward: lambda x: forward(x).sin())(norm.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ('name', 'change'),
    [
        ('q_norm', add_hook),
        ('k_norm', add_hook),
        ('q_norm', add_pre_hook),
        ('k_norm', add_backward_hook),
        ('q_norm', add_parametrization),
        ('k_norm', add_mask),
        ('q_norm', add_forward),
    ],
)
def test_changed_norms_are_called(name: str, change: Callable[[HeadNorm], None], device: torch.device) -> None:
    """Whatever a call of the norm does beyond its class shows in the result, as in eager, which always calls it."""
    results = []
    for backend in ('triton', 'eager'):
        layer = make_layer(backend=backend).to(device)
        change(getattr(layer, name))
        torch.manual_seed(1)
        found, calls = run(layer, make_input(device))
        assert 'norm_rotary' not in calls
        results.append(found)
    assert_same(*results)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize('name', ['q_norm', 'k_norm'])
def test_replaced_norms_are_called(name: str, device: torch.device) -> None:
    layers = [make_layer(backend=backend).to(device) for backend in ('triton', 'eager')]
    for layer in layers:
        setattr(layer, name, Doubled())
    x = make_input(device)
    assert_same(*(run(layer, x)[0] for layer in layers))


@pytest.mark.parametrize('name', ['q_norm', 'k_norm'])
@pytest.mark.parametrize('kind', [SparseAttention, DenseAttention])
def test_one_norm_alone(kind: type[nn.Module], name: str, device: torch.device) -> None:
    results = []
    for absent in (None, nn.Identity()):
        layer = make_layer(kind).to(device)
        setattr(layer, name, absent)
        results.append(run(layer, make_input(device))[0])
    assert_same(*results)


def test_another_eps(device: torch.device) -> None:
    layer, x = make_layer(**MERGED).to(device), make_input(device)
    before = layer(x)
    layer.q_norm.eps = layer.k_norm.eps = 0.5
    assert not layer(x).allclose(before)
    assert_equals_the_composition(layer, x, (2, 2))


def test_learned_frequencies(device: torch.device) -> None:
    """Their gradients need rotary in eager, so that the norms are called."""
    layer = make_layer(rotary_emb=RotaryEmbedding(8, learned_freq=True)).to(device)
    _, calls = run(layer, make_input(device))
    assert 'norm_rotary' not in calls


def test_frozen_weights(device: torch.device) -> None:
    layer, x = make_layer(**MERGED).to(device), make_input(device)
    expected, _ = run(layer, x)
    names = ['x', *(name for name, p in layer.named_parameters() if p.requires_grad)]
    layer.q_norm.requires_grad_(False)
    results, calls = run(layer, x)
    assert calls['norm_rotary'] == 2
    kept = [result for name, result in zip(['out', *names], expected, strict=True) if name != 'q_norm.weight']
    for result, wanted in zip(results, kept, strict=True):
        assert result.equal(wanted)


@pytest.mark.parametrize('name', ['separate', 'merged'])
def test_decoding_matches_the_full_forward(name: str, device: torch.device) -> None:
    layer, x = make_layer(**SETTINGS[name]).to(device).eval(), make_input(device)
    with torch.no_grad():
        cache = layer.init_cache(2, SEQLEN)
        parts = [layer(part, cache=cache) for part in x.split((6, 1, 3, 1), 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('dtype', [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_types(dtype: torch.dtype, device: torch.device) -> None:
    """Under autocast the error relative to float32 is at most twice that of the composition."""
    layer, x = make_layer(**MERGED).to(device), make_input(device)
    expected, _ = run(layer, x)
    errors = []
    for composed in (False, True):
        hooks = called_as_modules(layer) if composed else []
        with torch.autocast(device.type, dtype):
            results, calls = run(layer, x)
        assert ('norm_rotary' in calls) != composed
        errors.append([float((a.float() - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)])
        for hook in hooks:
            hook.remove()
    assert all(fused <= 2 * composed + 1e-5 for fused, composed in zip(*errors, strict=True)), errors


@pytest.mark.full
@pytest.mark.parametrize('name', ['separate', 'merged', 'recompute'])
def test_compiles(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(**SETTINGS[name]).to(device), make_input(device)
    compiler = 'inductor' if device.type == 'cuda' else 'aot_eager'
    compiled: Any = torch.compile(layer, fullgraph=True, backend=compiler)
    expected, _ = run(layer, x)
    inputs = x.clone().requires_grad_()
    out = compiled(inputs)
    leaves = [inputs, *(p for p in layer.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(out.sin().sum(), leaves, materialize_grads=True)
    assert_same([out.detach(), *grads], expected)
    torch._dynamo.reset()
