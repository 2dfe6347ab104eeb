"""The layer: decoding steps, chunks, packed and padded rows equal the whole sequence, with every setting."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from native_sparse_attention import ModelCache, SparseAttention
from native_sparse_attention.nn.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    SingleProjection,
)

DIM = 12
SIZES = {
    'dim': DIM,
    'dim_head': 6,
    'heads': 6,
    'sliding_window_size': 5,
    'compress_block_size': 7,
    'compress_block_sliding_stride': 3,
    'selection_block_size': 6,
    'num_selected_blocks': 4,
    'kv_heads': 2,
}
SETTINGS = {
    'default': {},
    'diff_topk': {'use_diff_topk': True},
    'heads alone': {'query_heads_share_selected_kv': False, 'use_diff_topk': True},
    'own branches': {'independent_branch_kv': True},
    'own branches, no rotary': {'independent_branch_kv': True, 'rotary_emb': False, 'dim_value_head': 4},
    'no selection': {'num_selected_blocks': 0},
    'no rotary': {'rotary_emb': False},
    'no memory': {'num_compressed_mem_kv': 0},
    'three memory pairs': {'num_compressed_mem_kv': 3},
    'values of another size': {'dim_value_head': 4},
    'no norm': {'norm': False},
    'qk norm': {'qk_norm': True},
    'qk norm, own branches': {'qk_norm': True, 'independent_branch_kv': True},
    'no forced blocks': {'num_init_blocks': 0, 'num_local_blocks': 0},
    'few blocks': {'num_selected_blocks': 2},
    'stride = block': {'compress_block_size': 4, 'compress_block_sliding_stride': 4, 'selection_block_size': 4},
    'stride 1': {'compress_block_size': 5, 'compress_block_sliding_stride': 1, 'selection_block_size': 3},
    'block of one': {'compress_block_size': 1, 'compress_block_sliding_stride': 1, 'selection_block_size': 1},
    'selection below compression': {'compress_block_size': 9, 'selection_block_size': 3},
    'window of one': {'sliding_window_size': 1},
    'one head': {'heads': 1, 'kv_heads': 1},
    'mean pool': {'compress_mlp': MeanPool()},
}


def make_layer(**settings: object) -> SparseAttention:
    """Return a causal layer in float64 with random parameters, learned positions and memory pairs included."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        layer = SparseAttention(**({**SIZES, 'causal': True} | settings)).double()  # type: ignore[arg-type]
    for parameter in layer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return layer.eval()  # caches need evaluation mode


def tokens(batch: int, seqlen: int) -> Tensor:
    return torch.randn(batch, seqlen, DIM, dtype=torch.float64)


def assert_same(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)


@pytest.fixture(params=SETTINGS)
def layer(request: pytest.FixtureRequest) -> SparseAttention:
    return make_layer(**SETTINGS[request.param])


def test_steps_and_chunks_equal_the_full_forward(layer: SparseAttention) -> None:
    x = tokens(2, 29)
    whole = layer(x)
    for sizes in ([1] * 29, [7, 1, 1, 12, 8], [28, 1]):
        cache = layer.init_cache(2, 29)
        addresses = [t.data_ptr() for t in cache._tensors()]
        grown = None
        for chunk, start in zip(x.split(sizes, 1), itertools.accumulate([0, *sizes]), strict=False):
            out, returned = layer(chunk, cache=cache, return_cache=True)
            out_grown, grown = layer(chunk, cache=grown, return_cache=True)
            assert returned is cache
            assert_same(out, whole[:, start : start + chunk.shape[1]])
            assert_same(out_grown, out)
        assert addresses == [t.data_ptr() for t in cache._tensors()]
        assert cache.lengths.tolist() == [29, 29]


def test_ragged_rows_through_the_cache(layer: SparseAttention) -> None:
    x, more = tokens(3, 23), tokens(3, 9)
    mask = torch.zeros(3, 23, dtype=torch.bool)
    mask[0, 4:], mask[1, :11] = True, True
    mask[2, 20] = True
    cache = layer.init_cache(3, 64)
    prefill = layer(x.masked_fill(~mask[..., None], torch.nan), mask, cache=cache)
    assert cache.lengths.tolist() == [19, 11, 1]
    steps = torch.cat([layer(step, cache=cache) for step in more.split([1, 1, 6, 1], 1)], 1)
    for row in range(3):
        alone = layer(torch.cat((x[row, mask[row]], more[row]))[None])[0]
        assert_same(prefill[row, mask[row]], alone[:-9])
        assert_same(steps[row], alone[-9:])


def test_a_padded_step_leaves_finished_rows_alone(layer: SparseAttention) -> None:
    x, more = tokens(2, 10), tokens(2, 5)
    cache = layer.init_cache(2, 32)
    layer(x, cache=cache)
    finished = torch.tensor([[True], [False]])
    for step in more.split(1, 1):
        layer(step, finished, cache=cache)
    assert cache.lengths.tolist() == [15, 10]
    out = layer(more[:, :1], cache=cache)
    assert_same(out[1], layer(torch.cat((x[1], more[1, :1]))[None])[0, -1:])


@pytest.mark.parametrize('causal', [True, False])
def test_packed_is_alone(causal: bool, layer: SparseAttention) -> None:
    layer.causal = causal
    lengths = [0, 5, 20, 0, 1, 9, 0]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x = tokens(1, 40)
    out = layer(x, cu_seqlens=cu_seqlens)
    for start, stop in itertools.pairwise(cu_seqlens.tolist()):
        assert_same(out[:, start:stop], layer(x[:, start:stop]))
    assert out[:, 35:].eq(0).all()
    out = layer(x.masked_fill(torch.arange(40)[:, None] >= 35, torch.nan), cu_seqlens=cu_seqlens)
    assert out[:, 35:].eq(0).all()
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize('causal', [True, False])
def test_padded_is_alone(causal: bool, layer: SparseAttention) -> None:
    layer.causal = causal
    x = tokens(4, 30)
    mask = torch.zeros(4, 30, dtype=torch.bool)
    mask[0, 8:] = mask[1, :17] = mask[2, 3::2] = True
    out = layer(x.masked_fill(~mask[..., None], torch.nan), mask)
    for row in range(4):
        assert_same(out[row, mask[row]], layer(x[row, mask[row]][None])[0])
    assert out[~mask].eq(0).all()
    out.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_padding_changes_no_gradient(layer: SparseAttention) -> None:
    x = tokens(1, 21).requires_grad_()
    padded = torch.cat((torch.full((1, 9, DIM), torch.nan, dtype=torch.float64), x), 1)
    parameters = [x, *(p for p in layer.parameters() if p.requires_grad)]
    grads = [
        torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True)
        for out in (layer(padded, torch.arange(30)[None] >= 9), layer(x))
    ]
    for with_padding, alone in zip(*grads, strict=True):
        assert (with_padding is None) == (alone is None)
        if alone is not None:
            assert_same(with_padding, alone)


def test_the_future_changes_nothing(layer: SparseAttention) -> None:
    x = tokens(1, 40)
    past = layer(x)
    for start in (1, 13, 39):
        changed = x.clone()
        changed[:, start:] = tokens(1, 40 - start) * 100
        assert layer(changed)[:, :start].equal(past[:, :start])


@given(st.data())
def test_drawn_settings_and_chunks(data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, 5), 'stride')
    kv_heads = data.draw(st.integers(1, 3), 'kv_heads')
    layer = make_layer(
        dim_head=data.draw(st.integers(3, 9), 'dim_head'),
        dim_value_head=data.draw(st.integers(1, 9), 'dim_value_head'),
        kv_heads=kv_heads,
        heads=kv_heads * data.draw(st.integers(1, 3), 'group_size'),
        sliding_window_size=data.draw(st.integers(1, 12), 'window'),
        compress_block_size=stride + data.draw(st.integers(0, 8), 'block - stride'),
        compress_block_sliding_stride=stride,
        selection_block_size=stride * data.draw(st.integers(1, 4), 'selection / stride'),
        num_selected_blocks=data.draw(st.integers(0, 6), 'num_selected'),
        num_compressed_mem_kv=data.draw(st.integers(0, 2), 'memory'),
        num_init_blocks=data.draw(st.integers(0, 2), 'init'),
        num_local_blocks=data.draw(st.integers(0, 3), 'local'),
        use_diff_topk=data.draw(st.booleans(), 'diff_topk'),
        query_heads_share_selected_kv=data.draw(st.booleans(), 'share'),
        independent_branch_kv=data.draw(st.booleans(), 'own branches'),
    )
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5), 'chunks')
    x = tokens(2, sum(sizes))
    cache = layer.init_cache(2, sum(sizes), max_rollback=0)
    out = torch.cat([layer(chunk, cache=cache) for chunk in x.split(sizes, 1)], 1)
    assert_same(out, layer(x))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.sampled_from(sorted(SETTINGS))
)
def test_crop_takes_back(moves: list[tuple[int, int]], setting: str) -> None:
    layer = make_layer(**SETTINGS[setting])
    cache = layer.init_cache(1, 64, max_rollback=9)
    kept = tokens(1, 0)
    high_water = 0
    for appended, taken_back in moves:
        new = tokens(1, appended)
        layer(new, cache=cache)
        kept = torch.cat((kept, new), 1)
        high_water = max(high_water, kept.shape[1])
        length = max(kept.shape[1] - taken_back, high_water - 9, 0)
        cache.crop(length)
        kept = kept[:, :length]
        assert cache.lengths.tolist() == [length]
    last = tokens(1, 3)
    assert_same(layer(last, cache=cache), layer(torch.cat((kept, last), 1))[:, -3:])


def test_crop_per_row_and_reorder(layer: SparseAttention) -> None:
    x, more = tokens(3, 20), tokens(3, 4)
    cache = layer.init_cache(3, 64)
    layer(x, cache=cache)
    cache.crop(torch.tensor([20, 17, 11]), max_length=20)
    addresses = [t.data_ptr() for t in cache._tensors()]
    cache.reorder(torch.tensor([2, 0, 2]))
    assert addresses == [t.data_ptr() for t in cache._tensors()]
    out = layer(more, cache=cache)
    for row, (source, length) in enumerate([(2, 11), (0, 20), (2, 11)]):
        assert_same(out[row], layer(torch.cat((x[source, :length], more[row]))[None])[0, -4:])
    cache.reset()
    assert_same(layer(x, cache=cache), layer(x))


def test_a_full_cache_raises_before_it_writes() -> None:
    layer = make_layer()
    cache = layer.init_cache(2, 8)
    layer(tokens(2, 6), cache=cache)
    before = [t.clone() for t in (cache.lengths, *cache._tensors())]
    with pytest.raises(ValueError, match='capacity is 8'):
        layer(tokens(2, 3), cache=cache)
    assert all(a.equal(b) for a, b in zip(before, (cache.lengths, *cache._tensors()), strict=True))
    layer(tokens(2, 2), cache=cache)


def test_a_backend_that_cannot_serve_writes_nothing() -> None:
    layer = make_layer()
    cache = layer.init_cache(2, 8)
    layer(tokens(2, 3), cache=cache)
    before = [t.clone() for t in (cache.lengths, *cache._tensors())]
    layer.backend = 'triton'
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call"):
        layer(tokens(2, 3), cache=cache)
    assert all(a.equal(b) for a, b in zip(before, (cache.lengths, *cache._tensors()), strict=True))


def test_no_new_tokens(layer: SparseAttention) -> None:
    x = tokens(2, 9)
    cache = layer.init_cache(2, 16)
    layer(x, cache=cache)
    assert layer(tokens(2, 0), cache=cache).shape == (2, 0, DIM)
    assert_same(layer(x[:, :2], cache=cache), layer(torch.cat((x, x[:, :2]), 1))[:, 9:])


def test_a_cache_made_in_inference_mode_serves_outside() -> None:
    layer, x = make_layer(), tokens(1, 80)
    with torch.inference_mode():
        _, cache = layer(x[:, :40], return_cache=True)
        layer(x[:, 40:70], cache=cache)
    assert_same(layer(x[:, 70:], cache=cache), layer(x)[:, 70:])


def test_every_parameter_gets_a_gradient(layer: SparseAttention) -> None:
    layer(tokens(1, 40)).sin().sum().backward()
    assert [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None] == []


def test_a_row_does_not_depend_on_its_neighbours(layer: SparseAttention) -> None:
    x = tokens(3, 33)
    for row, out in enumerate(layer(x)):
        assert_same(out, layer(x[row : row + 1])[0])


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('setting', ['diff_topk', 'heads alone', 'own branches', 'values of another size'])
def test_gradcheck(setting: str, causal: bool) -> None:
    layer = make_layer(
        **SETTINGS[setting] | {'dim': 3, 'dim_head': 3, 'heads': 2, 'kv_heads': 1, 'causal': causal, 'norm': True}
    )
    names, parameters = zip(*((n, p) for n, p in layer.named_parameters() if p.requires_grad), strict=True)
    x = torch.randn(1, 13, 3, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, (x, *parameters), fast_mode=True)


def test_diff_topk_has_no_effect_forward_and_teaches_the_compressed_branch() -> None:
    layer = make_layer()
    x = tokens(2, 40)
    grads = {}
    outs = {}
    for layer.use_diff_topk in (False, True):
        # Only the selected branch receives the gradient: the other gates are closed.
        layer.to_strategy_combine.bias.data.copy_(torch.tensor([-40.0, 0.0, -40.0] * 6))  # type: ignore[union-attr]
        layer.to_strategy_combine.weight.data.zero_()  # type: ignore[union-attr]
        outs[layer.use_diff_topk] = layer(x)
        (grads[layer.use_diff_topk],) = torch.autograd.grad(
            outs[layer.use_diff_topk].square().sum(), layer.k_intrablock_positions
        )
    assert outs[False].equal(outs[True])
    assert grads[False].norm() < 1e-12 < 1e-3 < grads[True].norm()


def networks() -> dict[str, object]:
    return {
        'grouped': GroupedMLP(6, 7, 2),
        'attention pool': AttentionPool(6, 7),
        'conv': ConvLinearCompress(2, 6, 7),
        'projection': SingleProjection(6, 7, 2),
        'transformer': CompressTransformer(2, 12, 2),
        'mean': MeanPool(),
        'pair': (MeanPool(), AttentionPool(6, 7)),
    }


@pytest.mark.parametrize('name', networks())
def test_every_network_decodes(name: str) -> None:
    layer = make_layer(compress_mlp=networks()[name])
    x = tokens(2, 37)
    cache = layer.init_cache(2, 37)
    steps = torch.cat([layer(step, cache=cache) for step in x.split(1, 1)], 1)
    assert_same(steps, layer(x))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'heads': 5}, 'heads is 5, but must be a multiple of kv_heads, 2'),
        ({'selection_block_size': 7}, 'selection_block_size is 7, but must be a multiple of'),
        ({'compress_block_sliding_stride': 9}, 'compress_block_sliding_stride is 9, but must be at most'),
        ({'sliding_window_size': 0}, 'sliding_window_size is 0, but must be an integer of at least 1'),
        ({'num_selected_blocks': -1}, 'num_selected_blocks is -1, but must be an integer of at least 0'),
        ({'dim_head': 6.5}, 'dim_head is 6.5'),
        ({'backend': 'cuda'}, "backend is 'cuda', but must be one of"),
        ({'compress_mlp': nn.Flatten(3)}, 'compress_mlp'),
        ({'compress_mlp_expand_factor': 0.0}, 'compress_mlp_expand_factor is 0.0, but must be a number'),
        ({'compress_mlp': MeanPool(), 'dim_value_head': 4}, 'compress_mlp'),
        ({'strategy_combine_mlp': nn.Linear(DIM, 7)}, 'strategy_combine_mlp maps'),
        ({'strategy_combine_mlp': nn.Linear(7, 18)}, 'strategy_combine_mlp must map'),
        ({'rotary_emb': True}, 'rotary_emb is True'),
        ({'dim_head': 2}, 'dim_head is 2, but a default rotary embedding'),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SparseAttention(**{**SIZES, 'causal': True} | settings)  # type: ignore[arg-type]
    assert '\n' not in str(error.value)


def test_wrong_inputs() -> None:
    layer, x = make_layer(), tokens(2, 10)
    cache = layer.init_cache(2, 16)
    cu_seqlens = torch.tensor([0, 10], dtype=torch.int32)
    for message, arguments in {
        r'x has shape \(2, 10, 5\)': {'x': x[..., :5]},
        'x is a list, but must be a tensor': {'x': [[[0.0] * DIM]]},
        'x has dtype torch.int64, but must be a floating dtype': {'x': x.long()},
        'cache is a ModelCache, but must be a LayerCache': {'x': x, 'cache': ModelCache([cache])},
        'mask has shape': {'x': x, 'mask': torch.ones(2, 9, dtype=torch.bool)},
        'mask and cu_seqlens are given': {'x': x, 'mask': x[..., 0] == 0, 'cu_seqlens': cu_seqlens},
        'x has batch size 2': {'x': x, 'cu_seqlens': cu_seqlens},
        'cu_seqlens is given, but a cache': {'x': x[:1], 'cu_seqlens': cu_seqlens, 'return_cache': True},
        'x has batch size 1, but cache has 2': {'x': x[:1], 'cache': cache},
        'cu_seqlens ends at 11': {'x': x[:1], 'cu_seqlens': cu_seqlens + torch.tensor([0, 1], dtype=torch.int32)},
        'cache was made for compress = ': {'x': x, 'cache': make_layer(**SETTINGS['stride 1']).init_cache(2, 16)},
        'cache was made for has_raw_v = ': {'x': x, 'cache': make_layer(independent_branch_kv=True).init_cache(2, 16)},
        'cache was made for has_raw_k = ': {'x': x, 'cache': make_layer(rotary_emb=False).init_cache(2, 16)},
        'a cache is given by name': {'x': x, 'mask': cache},
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            layer(**arguments)
        assert '\n' not in str(error.value)
    with pytest.raises(ValueError, match='needs causal=True'):
        make_layer(causal=False).init_cache(1, 8)
    with pytest.raises(ValueError, match='needs causal=True'):
        make_layer(causal=False)(x, return_cache=True)


def test_forced_blocks_alone_warn() -> None:
    for causal, num_selected, warns in (
        (True, 3, True),
        (True, 4, False),
        (False, 4, True),
        (False, 5, False),
        (True, 0, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            SparseAttention(**SIZES | {'num_selected_blocks': num_selected, 'causal': causal})  # type: ignore[arg-type]
        assert any('are forced' in str(w.message) for w in caught) == warns


def test_backend_of_a_call() -> None:
    layer, x = make_layer(backend='flex'), tokens(1, 9)
    with pytest.raises(ValueError, match="backend 'flex' cannot serve"):
        layer(x)
    assert layer(x, backend='eager').equal(layer(x, backend='auto'))
    assert layer(x, backend='eager', return_cache=True)[0].shape == x.shape
    with pytest.raises(ValueError, match="backend 'triton' cannot serve"):
        layer(x, backend='triton')
    with pytest.raises(ValueError, match="backend is 'fast', but must be one of"):
        layer(x, backend='fast')


def test_backend_for_says_why() -> None:
    layer, x = make_layer(), tokens(1, 9)
    choice = layer.backend_for(x)
    assert choice.name == 'eager'
    assert choice.passed_over['flex'] == 'the tensors are on cpu'
    layer.backend = 'triton'
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call"):
        layer(x)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_types_and_autocast(dtype: torch.dtype) -> None:
    layer = make_layer(use_diff_topk=True).float()
    x = torch.randn(2, 40, DIM)
    expected = layer(x)
    with torch.autocast('cpu', dtype):
        out = layer(x)
        cache = layer.init_cache(2, 40)
        steps = torch.cat([layer(step, cache=cache) for step in x.split(1, 1)], 1)
    out.float().sum().backward()
    assert out.dtype == cache.dtype == dtype
    half = layer.to(dtype)(x.to(dtype))
    for result in (out, steps, half):
        # Single rows may select another block where scores are close; on average only rounding remains.
        assert (result.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_a_cache_of_another_dtype() -> None:
    layer = make_layer().float()
    x = torch.randn(1, 30, DIM)
    cache = layer.init_cache(1, 30, dtype=torch.bfloat16)
    out = torch.cat([layer(chunk, cache=cache) for chunk in x.split([20, 5, 5], 1)], 1)
    assert out.dtype == torch.float32
    expected = layer(x)
    assert (out - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_a_forward_with_a_cache_has_no_gradient() -> None:
    layer, x = make_layer(), tokens(1, 9)
    out, cache = layer(x, return_cache=True)
    assert not out.requires_grad
    assert not cache.k.requires_grad


@pytest.mark.parametrize('seqlen', [0, 1, 2, 6, 7, 8])
@pytest.mark.parametrize('batch', [0, 1])
def test_short_and_empty(seqlen: int, batch: int) -> None:
    for causal in (True, False):
        layer = make_layer(causal=causal, use_diff_topk=True)
        x = tokens(batch, seqlen).requires_grad_()
        out = layer(x)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
