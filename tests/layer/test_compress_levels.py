"""Two levels of compression in `nsa` and `SparseAttention`: one level where every region is read; every call form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention, nsa
from native_sparse_attention.inference import decode as decoding
from native_sparse_attention.nn.transformer import Transformer
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops.compressed_regions import eager
from tests.layer.test_functional import HEADS, call, make_inputs, settings_of
from tests.support.problems import Extents, normal, packed, row_integers, whole

SIZES = (5, 2, 4)
EXTENTS = {
    'whole': whole(41),
    'rows of their own': Extents(
        2, 9, 44, {'q_offset': row_integers([2, 31]), 'seqlens_k': row_integers([17, 40])}, [17, 40]
    ),
    'packed': packed([0, 3, 39, 0, 8], uncovered=2),
}
LEVELS: dict[str, Any] = {'compress_levels': 2, 'region_size': 4, 'num_regions': 3}
EVERY = {**LEVELS, 'num_regions': 50}
MODES: dict[str, dict[str, Any]] = {
    'separate': {'use_diff_topk': True},
    'alone': {'use_diff_topk': True, 'share_group': False, 'softcap': 0.8},
    'no selection': {'num_selected': 0},
    'merged': {'merge_window': True, 'use_diff_topk': True, 'num_recent': 4},
    'output gate': {'merge_window': True, 'use_diff_topk': True},
    'scores': {'merge_window': True, 'use_diff_topk': True},
}
LAYER: dict[str, Any] = {
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
}
layer_modes = pytest.mark.parametrize(
    'mode',
    [
        {},
        {'use_diff_topk': True, 'query_heads_share_selected_kv': False},
        {'num_sinks': 2, 'softcap': 3.0, 'num_compressed_mem_kv': 0},
        {'independent_branch_kv': True, 'recompute': True},
        {'merge_window': True, 'select_before_window': True, 'output_gate': True, 'recompute': True},
        {'merge_window': True, 'compressed_output': False, 'use_diff_topk': True},
    ],
    ids=['separate', 'alone', 'sinks', 'branches', 'merged', 'scores'],
)


def make_problem(extents: Extents, mode: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of `nsa` by name, with sinks of the compressed branch, and the other arguments."""
    settings = settings_of(SIZES, **{'num_selected': 5, **MODES[mode]}, **extents.where)
    inputs = make_inputs(extents, HEADS, SIZES, pairs=2)
    inputs['sinks_cmp'] = normal(HEADS.heads)
    if settings.get('merge_window'):
        for name in ('q_window', 'k_window', 'v_window'):
            del inputs[name]
        inputs['gates'] = inputs['gates'][..., : 2 if mode == 'output gate' else 1].clone()
    return inputs, settings


def make_layer(mode: dict[str, Any], **levels: Any) -> SparseAttention:
    torch.manual_seed(3)
    layer = SparseAttention(**{**LAYER, **mode}, **levels).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
    return layer


def run_layer(layer: SparseAttention, *inputs: Any, **call: Any) -> dict[str, Tensor]:
    """Return the output and the gradients of all parameters."""
    out = layer(*inputs, **call)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).sin()
    layer.zero_grad()
    (out * weights).sum().backward()
    return {'out': out.detach(), **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f'{n}: {m}')


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
def test_every_region_is_one_level(extents: Extents, mode: str) -> None:
    """Outputs and gradients agree to 1e-12 in float64."""
    inputs, settings = make_problem(extents, mode)
    if mode == 'scores':
        for name in ('v_cmp', 'gates', 'mem_v', 'sinks_cmp'):
            del inputs[name]

    def attend(*tensors: Tensor, **levels: Any) -> Tensor:
        given: dict[str, Any] = dict(zip(inputs, tensors, strict=True))
        if mode == 'scores':
            mem_k = given.pop('mem_k')
            return nsa(**given, v_cmp=None, gates=None, mem_kv=(mem_k, None), **settings, **levels)
        return call(nsa, given, **settings, **levels)

    results = []
    for levels in ({}, EVERY):
        leaves = [t.clone().requires_grad_() for t in inputs.values()]
        out = attend(*leaves, **levels)
        dout = torch.arange(out.numel()).view(out.shape).to(out).sin()
        grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        results.append([out.detach(), *grads])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found is None) == (expected is None)
        if expected is None:
            continue
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    some = attend(*inputs.values(), **LEVELS)
    assert some.isfinite().all()
    assert (some - results[0][0]).abs().max() > 1e-4, 'no query leaves a region out'


@pytest.mark.parametrize('mode', ['separate', 'merged'])
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
def test_gradients(extents: Extents, mode: str) -> None:
    """Some regions are read; without `use_diff_topk`, whose factor of 1 finite differences do not see."""
    inputs, settings = make_problem(extents, mode)
    leaves = [t.clone().requires_grad_() for t in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *t: call(nsa, dict(zip(inputs, t, strict=True)), **{**settings, 'use_diff_topk': False}, **LEVELS),
        leaves,
        fast_mode=True,
    )


@layer_modes
def test_layer_with_every_region(mode: dict[str, Any]) -> None:
    x = torch.randn(2, 61, 32, dtype=torch.float64)
    expected = run_layer(make_layer(mode), x)
    assert_equal(run_layer(make_layer(mode, **EVERY), x), expected)
    assert (make_layer(mode, **LEVELS)(x) - expected['out']).abs().max() > 1e-4


@layer_modes
def test_padded_and_packed_rows(mode: dict[str, Any]) -> None:
    """A row equals itself alone, padded on either side or packed with others."""
    layer = make_layer(mode, **LEVELS)
    lengths = (61, 30, 47)
    rows = [torch.randn(1, length, 32, dtype=torch.float64) for length in lengths]
    alone = [layer(row)[0] for row in rows]
    for side in ('left', 'right'):
        x, mask = torch.zeros(3, 61, 32, dtype=torch.float64), torch.zeros(3, 61, dtype=torch.bool)
        for i, row in enumerate(rows):
            part = slice(61 - row.shape[1], 61) if side == 'left' else slice(0, row.shape[1])
            x[i, part], mask[i, part] = row[0], True
        out = layer(x, mask=mask)
        for i, expected in enumerate(alone):
            torch.testing.assert_close(out[i][mask[i]], expected, rtol=1e-12, atol=1e-12)
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    out = layer(torch.cat(rows, 1), cu_seqlens=borders)[0]
    torch.testing.assert_close(out, torch.cat(alone), rtol=1e-12, atol=1e-12)


@layer_modes
@pytest.mark.parametrize('page_size', [None, 8])
def test_cached_equals_uncached(page_size: int | None, mode: dict[str, Any]) -> None:
    """A prompt, then chunks and single tokens."""
    layer = make_layer(mode, **LEVELS).eval()
    x = torch.randn(2, 75, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)
        cache = layer.init_cache(2, 80, page_size=page_size)
        outs = [layer(part, cache=cache) for part in x.split([40, 7, *[1] * 20, 8], 1)]
        assert not layer.decodes_fixed(cache, 1)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-12, atol=1e-12)


def test_cached_rows_of_their_own() -> None:
    """Rows of a cache have lengths of their own."""
    layer = make_layer({'merge_window': True}, **LEVELS).eval()
    lengths = (60, 33)
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    mask = torch.arange(60) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        cache = layer.init_cache(2, 80)
        layer(x[:, :60], mask=mask, cache=cache)
        outs = torch.cat([layer(x[:, 60 + i : 61 + i], cache=cache) for i in range(10)], 1)
        for i, length in enumerate(lengths):
            alone = layer(torch.cat((x[i : i + 1, :length], x[i : i + 1, 60:]), 1))[:, length:]
            torch.testing.assert_close(outs[i : i + 1], alone, rtol=1e-12, atol=1e-12)


def test_recompute_selects_regions_alike() -> None:
    x = torch.randn(2, 61, 32, dtype=torch.float64)
    expected = run_layer(make_layer({'use_diff_topk': True}, **LEVELS), x)
    assert_equal(run_layer(make_layer({'use_diff_topk': True, 'recompute': True}, **LEVELS), x), expected)


@pytest.mark.parametrize('recomputes', [False, True])
def test_layer_by_the_kernels(recomputes: bool, device: torch.device) -> None:
    """Output and gradients are as near to float64 as those of eager in float32, in a layer of large weights."""
    mode = {'merge_window': True, 'select_before_window': True, 'output_gate': True, 'use_diff_topk': True}
    sizes = {'dim_head': 16, 'compress_block_size': 8, 'compress_block_sliding_stride': 4, 'selection_block_size': 16}
    layer = make_layer({**mode, **sizes, 'qk_norm': True, 'recompute': recomputes}, **LEVELS).float().to(device)
    x = torch.randn(2, 120, 32, device=device)
    by_kernels, by_eager = (
        {name: t.double() for name, t in run_layer(layer, x, backend=backend).items()}
        for backend in ('triton', 'eager')
    )
    gold = run_layer(layer.double(), x.double(), backend='eager')
    assert by_kernels.keys() == gold.keys()
    for name, expected in gold.items():
        error, of_eager = ((result[name] - expected).norm() for result in (by_kernels, by_eager))
        assert error <= 2 * of_eager + 1e-6 * expected.norm(), name


def test_defaults() -> None:
    seen = []

    def record(q: Tensor, k_cmp: Tensor, sizes: Any, call: Any, rules: Any) -> Tensor:
        seen.append(rules)
        return select_regions(q, k_cmp, sizes, call, rules)

    select_regions = eager.select_regions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, 'select_regions', record)
        make_layer({}, compress_levels=2)(torch.randn(1, 9, 32, dtype=torch.float64))
    assert seen == [(64, 16, True)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    'three levels': ({'compress_levels': 3}, 'compress_levels is 3, but must be 1 or 2'),
    'no level': ({'compress_levels': 0}, 'compress_levels is 0, but must be an integer of at least 1'),
    'a region of one level': ({'compress_levels': 1}, 'region_size is 4, but must be None where compress_levels is 1'),
    'regions of one level': (
        {'compress_levels': 1, 'region_size': None}, 'num_regions is 3, but must be None where compress_levels is 1'
    ),
    'no region': ({'num_regions': 0}, 'num_regions is 0, but must be an integer of at least 1'),
    'two regions': ({'num_regions': 2}, 'num_regions is 2, but must be at least 3'),
    'regions of 6 tokens': ({'region_size': 3}, r'region_size is 3, but 3 \* 2 tokens, those of a region, must be'),
    'a region as text': ({'region_size': 'all'}, 'region_size is .*all.*, but must be an integer'),
    'not causal': ({'causal': False}, 'compress_levels is 2, but must be 1 where causal is False'),
}  # fmt: skip


@pytest.mark.parametrize(('changes', 'message'), REFUSED.values(), ids=REFUSED)
def test_refused_settings(changes: dict[str, Any], message: str) -> None:
    inputs, settings = make_problem(whole(12), 'no selection')
    with pytest.raises(ValueError, match=message) as error:
        call(nsa, inputs, **{**settings, **LEVELS, **changes})
    assert '\n' not in str(error.value)
    with pytest.raises(ValueError, match=message):
        make_layer({}, **{**LEVELS, **changes}) if 'causal' not in changes else make_layer(changes, **LEVELS)


def test_refused_beside_two_levels() -> None:
    inputs, settings = make_problem(whole(12), 'separate')
    with pytest.raises(ValueError, match=r'choose is <function .*>, but must be select_blocks where'):
        call(nsa, inputs, **settings, **LEVELS, choose=lambda *scored, **given: select_blocks(*scored, **given))
    with pytest.raises(ValueError, match=r"backend 'flex' cannot serve .* it has no regions of compressed blocks"):
        call(nsa, inputs, **settings, **LEVELS, backend='flex')


def test_decode_kernels_refuse_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer({}, **LEVELS).eval().float()
    cache = layer.init_cache(1, 20)
    q, k, v = layer._stand_ins(1, 1)
    choice = decoding.backend_of(q, k, v, cache, 4, 4, compress_levels=2)
    assert choice.name == 'eager'
    with torch.no_grad(), pytest.raises(ValueError, match='compress_levels is 2, but its kernels have one level'):
        layer(torch.randn(1, 1, 32), cache=cache, backend='triton')
    assert int(cache.lengths[0]) == 0


def test_transformer_generates() -> None:
    """Cached generation equals generation by whole forwards."""
    torch.manual_seed(0)
    attention = {name: value for name, value in LAYER.items() if name not in ('dim', 'dim_head', 'heads', 'kv_heads')}
    del attention['causal']
    model = Transformer(40, 32, 2, 8, 4, 2, use_sparse_attn=True, sparse_attn_kwargs=attention | LEVELS).double().eval()
    ids = prompt = torch.randint(40, (2, 50))
    cached = model.generate(prompt, 12, temperature=0)
    for _ in range(12):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    assert cached.equal(ids[:, 50:])
