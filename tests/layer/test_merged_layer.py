"""Merged mode of the layer and of `nsa`: dense attention where everything is read, equal in every form of call."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention, nsa
from native_sparse_attention.inference import decode as decoding
from native_sparse_attention.nn.compress import MeanPool
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from native_sparse_attention.ops import select_blocks

SIZES: dict[str, Any] = {
    'dim': 32,
    'dim_head': 8,
    'heads': 4,
    'kv_heads': 2,
    'sliding_window_size': 6,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 4,
    'causal': True,
    'merge_window': True,
}
SCORES: dict[str, Any] = {'compressed_output': False, 'use_diff_topk': True}
modes = pytest.mark.parametrize(
    'mode',
    [
        {},
        {'use_diff_topk': True, 'query_heads_share_selected_kv': False},
        {'num_sinks': 2, 'softcap': 3.0},
        {'dim_value_head': 16, 'recompute': True},
        {'num_selected_blocks': 0},
        SCORES,
        {**SCORES, 'num_compressed_mem_kv': 0, 'num_sinks': 1},
        {'compressed_output': False, 'num_selected_blocks': 0},
        {'compressed_output': False, 'compress_mlp': MeanPool(), 'rotary_emb': False},
        {**SCORES, 'select_before_window': True, 'recompute': True},
        {'output_gate': True, 'recompute': True},
    ],
    ids=[
        '',
        'alone',
        'sinks',
        'values',
        'window',
        'scores',
        'scores, sinks',
        'scores, window',
        'scores by mean',
        'before',
        'output gate',
    ],
)


def make_layer(**settings: Any) -> SparseAttention:
    """Return a float64 layer with random parameters."""
    torch.manual_seed(0)
    layer = SparseAttention(**{**SIZES, **settings}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


@modes
def test_every_parameter_has_a_gradient(mode: dict[str, Any]) -> None:
    """Every parameter has a gradient, also at lengths without a compressed block."""
    layer = make_layer(**mode)
    for seqlen in (2, 25):
        layer.zero_grad()
        layer(torch.randn(2, seqlen, 32, dtype=torch.float64)).square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


@modes
@pytest.mark.parametrize('page_size', [None, 8])
def test_cached_calls_equal_the_full_forward(mode: dict[str, Any], page_size: int | None) -> None:
    layer = make_layer(**mode).eval()
    x = torch.randn(2, 31, 32, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.init_cache(2, 40, page_size=page_size)
        parts = [layer(part, cache=cache) for part in x.split([11, 1, 3, 1, 15], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-12)
    assert (cache.v_cmp is None) == (not layer.compressed_output)


@modes
def test_padded_and_packed_are_alone(mode: dict[str, Any]) -> None:
    layer = make_layer(**mode)
    x = torch.randn(1, 29, 32, dtype=torch.float64)
    first, second = (layer(part) for part in x.split([17, 12], dim=1))
    packed = layer(x, cu_seqlens=torch.tensor([0, 17, 29], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat((first, second), 1), rtol=0, atol=1e-12)
    mask = torch.arange(29) >= 17
    padded = layer(x, mask[None])
    torch.testing.assert_close(padded[:, 17:], second, rtol=0, atol=1e-12)
    assert (padded[:, :17] == 0).all()


@pytest.mark.parametrize('before', [False, True])
@pytest.mark.parametrize('diff', [False, True])
def test_equals_dense_where_every_block_is_selected(diff: bool, before: bool) -> None:
    """Outputs are equal at any weights; gradients too, except with use_diff_topk, which adds one."""
    compress = {'compress_mlp': MeanPool()} if not diff else {}
    settings: dict[str, Any] = {'use_diff_topk': diff, 'select_before_window': before, **compress}
    layer = make_layer(compressed_output=False, num_selected_blocks=20, **settings)
    shape = {name: SIZES[name] for name in ('dim', 'dim_head', 'heads', 'kv_heads', 'causal')}
    dense = DenseAttention(**shape).double()
    dense.load_state_dict({name: t for name, t in layer.state_dict().items() if name in dense.state_dict()})
    x = torch.randn(2, 41, 32, dtype=torch.float64, requires_grad=True)
    out, expected = layer(x), dense(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    if not diff:
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_equals_gated_dense_where_every_block_is_selected() -> None:
    """The compressed output is shut; outputs are equal at any weights of the output gate."""
    layer = make_layer(output_gate=True, num_selected_blocks=20)
    shape = {name: SIZES[name] for name in ('dim', 'dim_head', 'heads', 'kv_heads', 'causal')}
    dense = DenseAttention(**shape, output_gate=True).double()
    weights = {name: t for name, t in layer.state_dict().items() if name in dense.state_dict()}
    gate = layer.to_strategy_combine
    with torch.no_grad():
        gate.weight[::2], gate.bias[::2] = 0.0, -800.0
    weights |= {'output_gate.weight': gate.weight[1::2], 'output_gate.bias': gate.bias[1::2]}
    dense.load_state_dict(weights)
    x = torch.randn(2, 41, 32, dtype=torch.float64, requires_grad=True)
    out, expected = layer(x), dense(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


def test_second_gate_multiplies_the_sum() -> None:
    inputs = {name: t.double() for name, t in make_nsa_inputs().items()}
    gates = torch.rand(1, 16, 4, 2, dtype=torch.float64, requires_grad=True)
    sizes = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4, 'num_selected': 2}
    call = partial(nsa, **inputs, **sizes, window_size=(3, 0), merge_window=True)
    out, expected = call(gates=gates), call(gates=gates[..., :1]) * gates[..., 1:]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    grads = [torch.autograd.grad(y.square().sum(), gates)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-13)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_gates_of_half_precision_are_multiplied_in_float32(dtype: torch.dtype) -> None:
    sizes = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4, 'num_selected': 2}
    call = partial(nsa, **make_nsa_inputs(), **sizes, window_size=(3, 0), merge_window=True)
    gates = torch.rand(1, 16, 4, 2).to(dtype).requires_grad_()
    torch.testing.assert_close(call(gates=gates), call(gates=gates.float()), rtol=0, atol=0)
    call(gates=gates).sum().backward()
    assert gates.grad is not None
    assert gates.grad.dtype == dtype


def test_no_block_inside_the_window_is_selected() -> None:
    layer, found = make_layer(select_before_window=True, num_selected_blocks=20), []

    def choose(*scored: Tensor, **settings: Any) -> Tensor:
        found.append(select_blocks(*scored, **settings))
        return found[0]

    attend = layer._nsa
    layer._nsa = lambda *tensors, **settings: attend(*tensors, **settings | {'choose': choose})
    layer(torch.randn(1, 41, 32, dtype=torch.float64))
    for t in range(41):
        candidates = [j for j in range(11) if 4 * j <= t - 6]
        assert found[0][0, t, 0].tolist() == candidates + [-1] * (20 - len(candidates))


@pytest.mark.parametrize('missing', ['merge_window', 'causal'])
def test_selection_before_the_window_needs(missing: str) -> None:
    with pytest.raises(ValueError, match=f'select_before_window is True, but must be False unless {missing} is set'):
        make_layer(**{'select_before_window': True, missing: False})


def test_gate_starts_nearly_shut() -> None:
    layer = SparseAttention(**SIZES)
    assert isinstance(layer.to_strategy_combine, torch.nn.Linear)
    assert layer.to_strategy_combine.bias.tolist() == [-2.0] * 4
    assert not layer.to_strategy_combine.weight.any()
    gated = SparseAttention(**SIZES, output_gate=True)
    assert gated.to_strategy_combine.bias.tolist() == [-2.0, 2.0] * 4


def test_scores_alone_keep_nothing_of_values() -> None:
    layer = SparseAttention(**SIZES, **SCORES, num_sinks=1)
    names = dict(layer.named_parameters())
    absent = ('v_intrablock_positions', 'compress_mem_v', 'compress_sinks', 'to_strategy_combine', 'v_compress')
    assert not any(name.startswith(absent) for name in names)
    assert 'compress_mem_k' in names
    assert SparseAttention(**{**SIZES, **SCORES, 'num_selected_blocks': 0}).k_compress is None


def test_backend_for() -> None:
    layer = SparseAttention(**SIZES)
    ops = layer.backend_for(torch.empty(1, 16, 32)).ops
    assert set(ops) == {'compressed_attention', 'selected_attention', 'gated_sum', 'select_blocks'}
    ops = SparseAttention(**SIZES, **SCORES).backend_for(torch.empty(1, 16, 32)).ops
    assert 'gated_sum' not in ops


def test_transformer_generates() -> None:
    settings = {name: value for name, value in SIZES.items() if name not in ('dim', 'dim_head', 'heads', 'kv_heads')}
    settings.pop('causal')
    model = Transformer(64, 32, 2, 8, 4, 2, use_sparse_attn=True, sparse_attn_kwargs={**settings, **SCORES}).eval()
    prompt = torch.randint(64, (2, 9))
    cached = model.generate(prompt, 12, temperature=0)
    ids = prompt
    for _ in range(12):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    assert cached.equal(ids[:, 9:])


def test_deepcopy_and_state_dict() -> None:
    layer = make_layer(**SCORES)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    other = make_layer(**SCORES)
    other.load_state_dict(layer.state_dict())
    assert copy.deepcopy(layer)(x).equal(layer(x))
    assert other(x).equal(layer(x))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'merge_window': False, 'compressed_output': False}, 'compressed_output is False, but must be True unless'),
        ({'independent_branch_kv': True}, 'independent_branch_kv is True, but must be False where merge_window'),
        ({'compressed_output': False, 'strategy_combine_mlp': torch.nn.Linear(32, 4)}, 'strategy_combine_mlp is given'),
        ({'compressed_output': False, 'compress_mlp': (MeanPool(), MeanPool())}, 'compress_mlp is a pair'),
        ({'strategy_combine_mlp': torch.nn.Linear(32, 12)}, 'strategy_combine_mlp maps'),
        ({'merge_window': False, 'output_gate': True}, 'output_gate is True, but must be False unless merge_window is'),
        ({'compressed_output': False, 'output_gate': True}, 'output_gate is True, but must be False unless compressed'),
        ({'output_gate': True, 'strategy_combine_mlp': torch.nn.Linear(32, 4)}, 'strategy_combine_mlp maps'),
        ({'output_gate': 'no'}, "output_gate is 'no'"),
        ({'merge_window': 1}, 'merge_window is 1'),
        ({'compressed_output': None}, 'compressed_output is None'),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAttention(**{**SIZES, **settings})


def test_untrained_scores_warn() -> None:
    with pytest.warns(UserWarning, match='the network that scores blocks is not trained'):
        SparseAttention(**SIZES, compressed_output=False)


def make_nsa_inputs() -> dict[str, Tensor]:
    q, k, v = (torch.randn(1, 16, heads, 8) for heads in (4, 2, 2))
    return {'q': q, 'k': k, 'v': v, 'k_cmp': torch.randn(1, 7, 2, 8), 'v_cmp': torch.randn(1, 7, 2, 8)}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'gates': torch.ones(1, 16, 4, 3)}, r'gates has shape \(1, 16, 4, 3\), but must have \(1, 16, 4, 1\)'),
        ({'gates': None}, 'gates is None, but v_cmp is given'),
        ({'v_cmp': None}, 'v_cmp is None, but gates is given'),
        ({'gates': None, 'v_cmp': None, 'mem_kv': (torch.ones(2, 1, 8),)}, r'mem_kv is a tuple, but must be a pair'),
        ({'gates': None, 'v_cmp': None, 'mem_kv': (torch.ones(2, 1, 8),) * 2}, r'mem_kv\[1\] is given'),
        ({'k_window': torch.ones(1, 16, 2, 8)}, 'k_window is given, but must be None where merge_window is set'),
        ({'gates': None, 'merge_window': False}, 'gates is None, but must be given unless merge_window is set'),
        ({'gates': None, 'v_cmp': None, 'sinks_cmp': torch.zeros(4)}, 'sinks_cmp is given, but must be None'),
    ],
)
def test_nsa_refusals(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**make_nsa_inputs(), 'gates': torch.ones(1, 16, 4, 1), 'merge_window': True}
    sizes: dict[str, Any] = {
        'compress_block_size': 4,
        'compress_stride': 2,
        'selection_block_size': 4,
        'num_selected': 2,
    }
    with pytest.raises(ValueError, match=message):
        nsa(**{**arguments, **changes}, **sizes, window_size=(3, 0))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'sinks_cmp': torch.zeros(4)}, 'sinks_cmp is given, but must be None where gates is'),
        ({'mem_kv': (torch.ones(2, 1, 8), torch.ones(2, 1, 8))}, r'mem_kv\[1\] is given, but must be None where gates'),
        (
            {'k_window': torch.ones(2, 3, 2, 8), 'v_window': torch.ones(2, 3, 2, 8)},
            'k_window is given, but must be None',
        ),
        ({'networks': (MeanPool(), MeanPool())}, r'networks\[1\] is MeanPool\(\), but must be None for such a cache'),
        ({'networks': (None, None)}, r'networks\[0\] is None, but must be given for such a cache'),
        (
            {'positions': (torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))},
            r'positions\[1\] is .*, but must be None for such',
        ),
        ({'gates': torch.ones(2, 3, 4, 1)}, 'cache has has_v_cmp = False'),
    ],
)
def test_refused_decoding_leaves_the_cache(changes: dict[str, Any], message: str) -> None:
    layer = SparseAttention(**SIZES, **SCORES, compress_mlp=MeanPool(), num_compressed_mem_kv=0)
    cache = layer.init_cache(2, 16)
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    arguments: dict[str, Any] = {
        'gates': None,
        'networks': (MeanPool(), None),
        'positions': (torch.zeros(2, 4, 8), None),
        'merge_window': True,
        'raw_k': k,
        **changes,
    }
    sizes: dict[str, Any] = {'selection_block_size': 4, 'num_selected': 4, 'window_size': 6}
    with pytest.raises(ValueError, match=message):
        decoding.nsa_decode(q, k, k, arguments.pop('gates'), cache, **arguments, **sizes)
    assert cache.max_length == 0
    assert not cache.lengths.any()


@pytest.mark.full
@pytest.mark.parametrize(
    'mode',
    [
        {'use_diff_topk': True, 'query_heads_share_selected_kv': False, 'dim_value_head': 16, 'recompute': True},
        {**SCORES, 'num_sinks': 2, 'softcap': 3.0, 'compress_mlp': MeanPool(), 'rotary_emb': False},
        {'num_selected_blocks': 0},
    ],
    ids=['alone', 'scores by mean, sinks', 'window'],
)
def test_compiles_into_one_graph(mode: dict[str, Any]) -> None:
    torch.compiler.reset()
    layer = make_layer(**mode)
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-12)
