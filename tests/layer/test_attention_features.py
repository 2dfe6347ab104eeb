"""Soft caps, sinks and dropout in the layer: step by step, padded, packed, recomputed, saved and copied; dtypes of
inputs.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from tests.definition import layer_definition

DIM = 12
SIZES: dict[str, Any] = {
    'dim': DIM,
    'dim_head': 6,
    'heads': 4,
    'kv_heads': 2,
    'sliding_window_size': 5,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 6,
    'causal': True,
}
FEATURES: dict[str, dict[str, Any]] = {
    'softcap': {'softcap': 0.7},
    'sinks': {'num_sinks': 2},
    'both': {'softcap': 0.7, 'num_sinks': 1, 'use_diff_topk': True},
    'both, heads alone': {'softcap': 0.7, 'num_sinks': 1, 'query_heads_share_selected_kv': False},
    'both, own branches': {'softcap': 0.7, 'num_sinks': 1, 'independent_branch_kv': True},
}
INPUTS: dict[str, dict[str, Tensor]] = {
    'whole': {},
    'padded': {'mask': torch.tensor([[0] * 5 + [1] * 12, [1] * 9 + [0] * 8], dtype=torch.bool)},
    'packed': {'cu_seqlens': torch.tensor([0, 5, 5, 16], dtype=torch.int32)},
}


def make_layer(dtype: torch.dtype = torch.float64, **settings: Any) -> SparseAttention:
    torch.manual_seed(0)
    layer = SparseAttention(**SIZES | settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype).train('dropout' in settings)  # caches need evaluation mode


def tokens(batch: int, seqlen: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, seqlen, DIM, dtype=dtype)


def input_of(kind: str) -> Tensor:
    return tokens(1 if kind == 'packed' else 2, 17)


def run(layer: SparseAttention, x: Tensor, call: Any = None, **inputs: Tensor) -> dict[str, Tensor]:
    """Return the output of the layer, or of `call` in its place, and every gradient by name."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = (layer if call is None else call)(x, **inputs)
    out.sin().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {'out': out.detach(), 'x': x.grad, **grads}  # type: ignore[dict-item]


def assert_same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)


# Every kind of input with both features, and each other feature with one kind.
DEFINED = [('both', kind, causal) for kind in INPUTS for causal in (True, False)]
DEFINED += [
    (name, kind, causal)
    for name in FEATURES
    if name != 'both'
    for kind, causal in (('padded', True), ('packed', False))
]


@pytest.mark.parametrize(('features', 'kind', 'causal'), DEFINED)
def test_definition(features: str, kind: str, causal: bool) -> None:
    layer = make_layer(**FEATURES[features], causal=causal)
    x = input_of(kind)
    layer.zero_grad()
    results = []
    for function in (layer, lambda *args, **kwargs: layer_definition.layer(layer, *args, **kwargs)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, **INPUTS[kind])
        parameters = [p for p in layer.parameters() if p.requires_grad]
        results.append([out, *torch.autograd.grad(out.sin().sum(), [leaf, *parameters], allow_unused=True)])
    for result, expected in zip(*results, strict=True):
        assert (result is None) == (expected is None)
        if result is not None:
            assert_same(result, expected)


@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
def test_steps_and_chunks_equal_the_full_forward(features: dict[str, Any]) -> None:
    # In training mode: dropout is off with a cache.
    layer, x = make_layer(**features, dropout=0.5).train(), tokens(2, 41)
    whole = layer.eval()(x)
    layer.train()
    for sizes in ([1] * 41, [7, 1, 1, 20, 12], [40, 1], [41]):
        for page_size in (None, 8):
            cache = layer.init_cache(2, 48, page_size=page_size)
            with torch.no_grad():
                outs = [layer(part, cache=cache) for part in x.split(sizes, 1)]
            assert_same(torch.cat(outs, 1), whole)


@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
def test_ragged_rows_through_the_cache(features: dict[str, Any]) -> None:
    layer, x, more = make_layer(**features), tokens(2, 17), tokens(2, 3)
    mask = INPUTS['padded']['mask']
    cache = layer.init_cache(2, 32)
    prefill = layer(x, mask, cache=cache)
    steps = torch.cat([layer(step, cache=cache) for step in more.split(1, 1)], 1)
    for row in range(2):
        alone = layer(torch.cat((x[row, mask[row]], more[row]))[None])[0]
        assert_same(prefill[row, mask[row]], alone[:-3])
        assert_same(steps[row], alone[-3:])


@pytest.mark.full
@pytest.mark.parametrize('features', [FEATURES['softcap'], FEATURES['sinks']], ids=str)
def test_decoding_falls_back_and_says_why(features: dict[str, Any], device: torch.device) -> None:
    layer = make_layer(torch.float32, **features, backend='triton').requires_grad_(False).to(device)
    cache, step = layer.init_cache(2, 32), tokens(2, 1, torch.float32).to(device)
    reason = (
        'softcap is 0.7, but its kernels cap no logits'
        if 'softcap' in features
        else 'there are sinks, but its kernels have none'
    )
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call of decoding: {reason}"):
        layer(step, cache=cache)
    assert cache.lengths.tolist() == [0, 0]
    # More tokens than the kernels of decoding take go through those of nsa.
    prompt = tokens(2, 17, torch.float32).to(device)
    torch.testing.assert_close(layer(prompt, cache=cache), layer(prompt), rtol=1e-4, atol=1e-4)
    layer.backend = 'auto'
    assert not layer.decodes_fixed(cache, 1)
    layer(step, cache=cache)
    assert cache.lengths.tolist() == [18, 18]


@pytest.mark.full
def test_a_cache_serves_layers_with_and_without_features(device: torch.device) -> None:
    """Launches recorded for one layer are not used for the other."""
    plain = make_layer(torch.float32, backend='triton').to(device)
    other = make_layer(torch.float32, softcap=0.7, num_sinks=1, backend='eager').to(device)
    other.load_state_dict(dict(plain.state_dict()), strict=False)  # without the record of settings, which differ
    x = tokens(2, 5, torch.float32).to(device)
    caches = plain.init_cache(2, 32), plain.init_cache(2, 32)
    for step in x[:, :3].split(1, 1):
        for cache in caches:
            plain(step, cache=cache)
    of_plain, of_other = plain(x[:, 3:4], cache=caches[0]), other(x[:, 3:4], cache=caches[1])
    assert not of_plain.isclose(of_other).all()
    plain.backend = 'eager'
    for layer, cache, out in ((plain, caches[0], of_plain), (other, caches[1], of_other)):
        cache.crop(3)
        torch.testing.assert_close(layer(x[:, 3:4], cache=cache), out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('kind', INPUTS)
@pytest.mark.parametrize('features', FEATURES.values(), ids=FEATURES)
def test_dropout_with_recompute(features: dict[str, Any], kind: str) -> None:
    """The seed is drawn once, so the recomputation drops the same weights."""
    x, results = input_of(kind), []
    for recompute in (False, True):
        layer = make_layer(**features, dropout=0.4, recompute=recompute)
        torch.manual_seed(1)
        results.append(run(layer, x, **INPUTS[kind]))
    assert results[0].keys() == results[1].keys()
    assert all(results[0][name].equal(results[1][name]) for name in results[0])
    assert {'window_sinks', 'compress_sinks'} <= results[0].keys() or 'num_sinks' not in features


@pytest.mark.full
def test_the_kernels_drop_the_same_weights(device: torch.device) -> None:
    """The kernels drop the weights that eager drops, also when they are recomputed."""
    x, results = tokens(1, 17, torch.float32).to(device), []
    for backend, recompute in (('eager', False), ('triton', False), ('triton', True)):
        layer = make_layer(torch.float32, softcap=0.7, num_sinks=2, dropout=0.4, backend=backend, recompute=recompute)
        torch.manual_seed(1)
        results.append(run(layer.to(device), x))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-4)
        assert results[1][name].equal(results[2][name])


def test_dropout_is_for_training() -> None:
    layer, x = make_layer(dropout=0.4), tokens(2, 17)
    plain = make_layer()(x)
    assert layer.eval()(x).equal(plain)
    layer.train()
    first, second = layer(x), layer(x)
    assert not first.equal(plain)
    assert not first.equal(second)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert layer(x).equal(first)


def test_dropout_keeps_the_mean() -> None:
    layer, x = make_layer(dropout=0.3, dim_value_head=2), tokens(1, 9)
    outs = torch.cat([layer(x) for _ in range(200)])
    error = (outs.mean(0) - layer.eval()(x)[0]).abs()
    assert bool((error <= 5 * outs.std(0) / 200**0.5 + 1e-9).all())


def test_features_that_are_off_leave_the_state_as_it_was() -> None:
    names = set(make_layer().state_dict())
    assert not [name for name in names if 'sinks' in name]
    assert set(make_layer(softcap=1.0, dropout=0.1).state_dict()) == names
    layer = SparseAttention(**SIZES, num_sinks=3)
    assert set(layer.state_dict()) - names == {'compress_sinks', 'window_sinks'}
    for sinks in (layer.compress_sinks, layer.window_sinks):
        assert sinks is not None
        assert sinks.shape == (4, 3)
        assert sinks.eq(0).all()
    copy = SparseAttention(**SIZES, num_sinks=3)
    copy.load_state_dict(layer.state_dict())
    x = tokens(1, 9, torch.float32)
    assert copy(x).equal(layer(x))


def test_copied() -> None:
    layer, x = make_layer(softcap=0.7, num_sinks=1, dropout=0.2), tokens(1, 17)
    copy = deepcopy(layer)
    results = []
    for each in (layer, copy):
        torch.manual_seed(3)
        results.append(run(each, x))
    assert all(results[0][name].equal(results[1][name]) for name in results[0])
    with torch.no_grad():
        copy.window_sinks.fill_(9)  # type: ignore[union-attr]
    assert not copy.eval()(x).equal(layer.eval()(x))


def test_autocast() -> None:
    layer, x = make_layer(torch.float32, softcap=2.0, num_sinks=2, dropout=0.2), tokens(2, 17, torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        results = run(layer, x)
        whole = layer.eval()(x)
        steps = layer(x, return_cache=True)[0]
    assert results['out'].dtype == torch.bfloat16
    assert all(t.isfinite().all() for t in results.values())
    torch.testing.assert_close(steps, whole, rtol=0.05, atol=0.05)
    torch.testing.assert_close(whole.float(), layer(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize('kind', [SparseAttention, DenseAttention])
def test_float32_norm_of_a_half_input(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm runs in float32, where PyTorch has a fused kernel, and equals a call of the module; with a hook it is
    called.
    """
    layer: Any = make_layer(torch.float32) if kind is SparseAttention else DenseAttention(DIM, 6, 4, 2)
    inputs: list[torch.dtype] = []
    rms_norm = F.rms_norm
    monkeypatch.setattr(F, 'rms_norm', lambda x, *args: (inputs.append(x.dtype), rms_norm(x, *args))[1])
    x = tokens(2, 17, torch.bfloat16)
    with torch.autocast('cpu', torch.bfloat16):
        results = run(layer, x)
        layer.norm.register_forward_hook(lambda *_: None)
        expected = run(layer, x)
    assert inputs == [torch.float32, torch.bfloat16]
    assert all(value.equal(expected[name]) for name, value in results.items())


def test_half_layers() -> None:
    layer = make_layer(torch.bfloat16, softcap=2.0, num_sinks=2)
    results = run(layer, tokens(2, 17, torch.bfloat16))
    assert results['window_sinks'].dtype == torch.bfloat16
    assert all(t.isfinite().all() for t in results.values())


@pytest.mark.parametrize('norm', [True, False])
@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_an_input_of_another_dtype(dtype: torch.dtype, norm: bool) -> None:
    layer, x = make_layer(torch.float32, norm=norm), tokens(2, 17, dtype)
    message = f'^x has dtype {dtype}, but must have that of the weights, torch.float32, or be autocast$'
    cache = layer.init_cache(2, 17)
    for inputs in ({}, {'cache': cache}, {'return_cache': True}):
        with pytest.raises(ValueError, match=message):
            layer(x, **inputs)
    assert cache.max_length == 0


@pytest.mark.full
def test_autocast_takes_what_it_casts() -> None:
    torch._dynamo.reset()
    layer, x = make_layer(torch.float32), tokens(2, 17, torch.float32)
    compiled: Any = torch.compile(layer, fullgraph=True, backend='eager')
    with torch.autocast('cpu', torch.bfloat16):
        out = layer(x.half())
        assert out.dtype == layer(x.bfloat16()).dtype == torch.bfloat16
        assert compiled(x.half()).equal(out)
        with pytest.raises(ValueError, match=r'^x has dtype torch.float64, but must have that of the weights'):
            layer(x.double())
    torch._dynamo.reset()


class Casting(nn.Module):
    """A linear layer without a floating weight, as a quantised one may be."""

    def __init__(self, like: nn.Linear, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.in_features = like.in_features
        self.register_buffer('packed', like.weight.detach().mul(16).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.dtype), self.get_buffer('packed').to(self.dtype) / 16)


class ToFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_modules_that_cast_their_input_themselves() -> None:
    layer, x = make_layer(torch.float32), tokens(2, 17, torch.float32)
    layer.add_module('norm', ToFloat32())
    assert layer(x.half()).isfinite().all()
    layer.norm, layer.to_qkv = nn.Identity(), Casting(layer.to_qkv)  # type: ignore[assignment]
    layer.to_strategy_combine.half()
    assert layer(x.half()).isfinite().all()


@pytest.mark.parametrize('kind', [SparseAttention, DenseAttention])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('keeps_weight', [False, True])
def test_quantised_projections_decode(kind: type, dtype: torch.dtype, keeps_weight: bool) -> None:
    """Quantised projections equal plain ones with the same weights. The cache has the dtype of the other weights, not
    that of the rotary frequencies.
    """
    plain = make_layer(dtype) if kind is SparseAttention else DenseAttention(DIM, 6, 4).to(dtype)
    layer = deepcopy(plain)
    for name in ('to_qkv', 'combine_heads'):
        linear = plain.get_submodule(name)
        quantised = Casting(linear, dtype)  # type: ignore[arg-type]
        linear.weight = nn.Parameter(quantised.get_buffer('packed').to(dtype) / 16)
        if keeps_weight:
            quantised.weight = nn.Parameter(quantised.get_buffer('packed'), requires_grad=False)
        layer.add_module(name, quantised)
    x = tokens(2, 17, dtype)
    caches = [each.eval().init_cache(2, 17) for each in (layer, plain)]
    assert caches[0].dtype == dtype
    assert layer(x).equal(plain(x))
    for part in x.split([9, 1, 7], dim=1):
        out, expected = (each(part, cache=cache) for each, cache in zip((layer, plain), caches, strict=True))
        assert out.dtype == dtype
        assert out.equal(expected)


def test_a_cache_of_quantised_weights_alone() -> None:
    layer = DenseAttention(DIM, 6, 4, norm=False)
    layer.to_qkv, layer.combine_heads = Casting(layer.to_qkv), Casting(layer.combine_heads)  # type: ignore[assignment]
    with pytest.raises(ValueError, match='dtype is None, but must be given where all weights of the layer are quant'):
        layer.init_cache(2, 17)
    assert layer.init_cache(2, 17, dtype=torch.float16).dtype == torch.float16


def test_a_model_passes_them_on() -> None:
    names = set(SIZES) - {'dim', 'dim_head', 'heads', 'kv_heads', 'causal'}
    kwargs = {name: SIZES[name] for name in names} | {'softcap': 5.0, 'num_sinks': 1, 'dropout': 0.1}
    model = Transformer(9, 16, 2, dim_head=8, heads=2, use_sparse_attn=True, sparse_attn_kwargs=kwargs)
    layers = [module for module in model.modules() if isinstance(module, SparseAttention)]
    assert [(layer.softcap, layer.dropout) for layer in layers] == [(5.0, 0.1)] * 2
    ids = torch.randint(0, 9, (2, 20))
    model(ids, return_loss=True).backward()
    assert all(layer.window_sinks.grad.isfinite().all() for layer in layers)  # type: ignore[union-attr]
    prompt = ids[:, :7]
    assert model.sample(prompt, 15, 0).equal(model.sample(prompt, 15, 0, use_cache_kv=True))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'softcap': 0}, 'softcap is 0, but must be'),
        ({'softcap': -3.0}, 'softcap is -3.0, but must be'),
        ({'softcap': float('nan')}, 'softcap is nan, but must be'),
        ({'softcap': True}, 'softcap is True, but must be'),
        ({'num_sinks': -1}, 'num_sinks is -1, but must be an integer of at least 0'),
        ({'num_sinks': 1.0}, 'num_sinks is 1.0, but must be an integer of at least 0'),
        ({'dropout': 1.0}, 'dropout is 1.0, but must be'),
        ({'dropout': -0.1}, 'dropout is -0.1, but must be'),
        ({'dropout': '0.1'}, "dropout is '0.1', but must be"),
        ({'strategy_combine_mlp': 'x'}, "strategy_combine_mlp is 'x', but must be a module or None"),
        ({'strategy_combine_mlp': [nn.Sequential(nn.ReLU())]}, 'strategy_combine_mlp is a list, but must be'),
    ],
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAttention(**SIZES | changes)


@pytest.mark.parametrize('name', ['return_cache', 'return_block_loss'])
def test_wrong_flags_of_a_call(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 'no', but must be True or False$"):
        make_layer()(tokens(2, 9), **{name: 'no'})


@pytest.mark.parametrize(
    ('x', 'message'),
    [
        ([1], 'x is a list, but must be a tensor'),
        (torch.zeros(3), r'x has shape \(3,\), but must be'),
        (torch.zeros(1, 9, DIM, dtype=torch.int64), 'x has dtype torch.int64, but must be a floating dtype'),
    ],
)
def test_no_backend_for_refused_inputs(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer().backend_for(x)


@pytest.mark.parametrize(('features', 'name'), [({'num_sinks': 1}, 'sinks'), ({'dropout': 0.1}, 'dropout_p')])
def test_the_backend_it_would_take(features: dict[str, Any], name: str) -> None:
    layer, x = make_layer(torch.float32, **features, backend='flex'), tokens(1, 9, torch.float32)
    with torch.no_grad():  # on CPUs flex has no backward pass
        with pytest.raises(ValueError, match=f"'flex' cannot serve this call of .*: {name} is"):
            layer.backend_for(x)
        assert make_layer(torch.float32, backend='flex').backend_for(x).name == 'flex'
        if 'dropout' in features:
            assert layer.eval().backend_for(x).name == 'flex'
    layer.backend = 'auto'
    assert layer.backend_for(x).name == 'eager'


def test_repr_shows_active_features() -> None:
    assert make_layer().extra_repr() == ''
    assert make_layer(softcap=5, num_sinks=2, dropout=0.1).extra_repr() == 'softcap=5.0, num_sinks=2, dropout=0.1'


@pytest.mark.full
def test_compiles() -> None:
    """Compiled dropout has the same numbers in each pass of a call, and other numbers in each call."""
    torch._dynamo.reset()
    layer, x = make_layer(softcap=0.7, num_sinks=2, dropout=0.4, recompute=True), tokens(1, 9)
    compiled: Any = torch.compile(layer, fullgraph=True, backend='aot_eager')
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(run(layer, x, compiled))
    assert outs[0]['x'].equal(outs[1]['x'])
    assert not outs[0]['out'].equal(outs[2]['out'])
    # The gradient is that of the weights which were kept.
    direction, step = tokens(1, 9), 1e-5
    values = []
    for sign in (1, -1):
        torch.manual_seed(1)
        values.append(run(layer, x + sign * step * direction, compiled)['out'].sin().sum())
    slope = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close((outs[0]['x'] * direction).sum(), slope, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


class InFloat32(torch.nn.Linear):
    """A layer that autocast does not affect."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast('cpu', enabled=False):
            return super().forward(input)


@pytest.mark.parametrize('name', ['to_qkv', 'to_strategy_combine'])
def test_a_linear_layer_of_another_kind_reads_its_input_as_it_is(name: str) -> None:
    """Only inputs that autocast itself would cast may be cast beforehand."""
    layer = make_layer(torch.float32)
    plain = getattr(layer, name)
    other = InFloat32(plain.in_features, plain.out_features, bias=plain.bias is not None)
    setattr(layer, name, other)
    with torch.autocast('cpu', torch.bfloat16):
        assert layer(torch.randn(1, 20, plain.in_features)).isfinite().all()
