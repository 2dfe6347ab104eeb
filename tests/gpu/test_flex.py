"""FlexAttention's kernels against eager in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.ops import compressed_attention, selected_attention, window_attention
from native_sparse_attention.testing import make_block_indices, make_qkv, measure_errors, outputs_and_gradients

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32], ids=lambda t: str(t).removeprefix('torch.'))


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device='cuda')


def assert_flex_matches(op: Callable[..., tuple[Tensor, Tensor]], tensors: dict[str, Tensor], **settings: Any) -> None:
    """Output, log-sum-exp and every gradient, as near to eager in float64 as FlexAttention's arithmetic is.

    float32 results within 1e-5 of the largest value. Half types by the error rules, but for two kinds of gradients,
    which may have twice the error that these allow, 2.5 times in the mean, and are not held to rule 3. Those that pass
    through the logits: the kernels take the product of output and its gradient from the rounded output, which shows in
    rows of few keys. And those of memory pairs, which are rounded per row of the batch before they are added.
    """
    outputs = op(**tensors, **settings, backend='eager')
    generator = torch.Generator('cuda').manual_seed(1)
    grads = [torch.randn(t.shape, dtype=t.dtype, device='cuda', generator=generator) for t in outputs]

    def run(dtype: torch.dtype | None, backend: str) -> dict[str, Tensor]:
        cast = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
        return outputs_and_gradients(lambda **leaves: op(**leaves, **settings, backend=backend), cast, grads)

    result, same_dtype, gold = run(None, 'flex'), run(None, 'eager'), run(torch.float64, 'eager')
    dtype = tensors['q'].dtype
    for name, expected in gold.items():
        if dtype == torch.float32 or name == 'out1':
            finite = expected[expected.isfinite()].abs().tolist()
            tolerance = {'rtol': 1e-5, 'atol': 1e-5 * max([1.0, *finite])}
            torch.testing.assert_close(result[name], expected.float(), **tolerance, msg=partial(titled, name))
            continue
        row_dims = 3 if name == 'grad of block_scale' else 1
        errors = measure_errors(result[name], expected, same_dtype[name], row_dims=row_dims, dtype=dtype)
        if name not in ('out0', 'grad of v', 'grad of v_cmp'):
            wider = {'max_allowed': 2 * errors.max_allowed, 'mean_allowed': 2.5 * errors.mean_allowed}
            errors = replace(errors, **wider, row_allowed=torch.inf, norm_allowed=2 * errors.norm_allowed)
        assert not errors.broken_rules(), (name, errors.broken_rules())


def titled(name: str, message: str) -> str:
    return f'{name}: {message}'


def qkv(*sizes: int, dtype: torch.dtype, **shape: Any) -> dict[str, Any]:
    generator = torch.Generator('cuda').manual_seed(0)
    shape = {'heads': 6, 'kv_heads': 2, 'head_dim': 64} | shape
    return dict(zip('qkv', make_qkv(*sizes, dtype=dtype, device='cuda', generator=generator, **shape), strict=True))


WINDOWS: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    'whole': ((2, 300, 300), {}, {'window_size': (100, 0)}),
    'group of one': ((1, 257, 257), {'heads': 2}, {'window_size': (63, 0)}),
    'group of 16': ((1, 200, 200), {'heads': 16, 'kv_heads': 1}, {'window_size': (63, 0)}),
    'dense': ((1, 640, 640), {'head_dim': 128}, {'window_size': (-1, 0)}),
    'dense, not causal': ((1, 256, 384), {}, {'window_size': (-1, -1), 'causal': False}),
    'one query': ((2, 1, 500), {}, {'window_size': (200, 0)}),
    'one token': ((1, 1, 1), {}, {'window_size': (3, 0)}),
    'sliced': ((2, 130, 130), {'layout': 'sliced'}, {'window_size': (30, 0)}),
    'expanded': ((2, 130, 130), {'layout': 'expanded'}, {'window_size': (30, 0)}),
    'transposed': ((2, 130, 130), {'layout': 'transposed'}, {'window_size': (30, 0)}),
    'rows': (
        (3, 70, 333),
        {'head_dim': 40, 'value_dim': 24},
        {'window_size': (37, 11), 'causal': False, 'q_offset': [5, -40, 300], 'seqlens_k': [333, 100, 0]},
    ),
    'packed': ((1, 400, 400), {}, {'window_size': (70, 0), 'cu_seqlens': [0, 0, 129, 130, 390, 390]}),
    'packed, other keys': (
        (1, 150, 420),
        {},
        {'window_size': (-1, 0), 'cu_seqlens': [0, 1, 90, 90, 140], 'cu_seqlens_k': [0, 128, 218, 400, 410]},
    ),
}


def on_gpu(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: integers(*value) if isinstance(value, list) else value for name, value in settings.items()}


@dtypes
@pytest.mark.parametrize('case', WINDOWS)
def test_window(case: str, dtype: torch.dtype):
    sizes, shape, settings = WINDOWS[case]
    assert_flex_matches(window_attention, qkv(*sizes, dtype=dtype, **shape), **on_gpu(settings))


HEAD_DIMS = [
    (8, 12),
    (16, 16),
    (16, 128),
    (40, 40),
    (64, 256),
    (80, 80),
    (100, 100),
    (128, 128),
    (192, 128),
    (192, 192),
]


@dtypes
@pytest.mark.parametrize(('head_dim', 'value_dim'), [*HEAD_DIMS, (192, 192), (200, 200), (256, 64), (256, 256)])
def test_head_dims(head_dim: int, value_dim: int, dtype: torch.dtype):
    tensors = qkv(1, 270, 270, dtype=dtype, head_dim=head_dim, value_dim=value_dim)
    assert_flex_matches(window_attention, tensors, window_size=(100, 0))


# Sizes in tokens, memory pairs, the rest.
COMPRESSED: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    'whole': ((2, 700, 700), 4, {}),
    'no memory': ((1, 700, 700), 0, {}),
    'not causal': ((1, 300, 300), 1, {'causal': False}),
    'memory alone': ((1, 20, 20), 3, {}),
    'rows': ((3, 40, 700), 2, {'q_offset': [5, -20, 650], 'seqlens_k': [700, 100, 0]}),
    'packed': ((1, 700, 700), 2, {'cu_seqlens': [0, 0, 33, 50, 690, 690]}),
}


@dtypes
@pytest.mark.parametrize('case', COMPRESSED)
def test_compressed(case: str, dtype: torch.dtype):
    (batch, seqlen_q, seqlen_k), pairs, settings = COMPRESSED[case]
    compressed = qkv(batch, seqlen_q, max(0, (seqlen_k - 32) // 16 + 1), dtype=dtype)
    tensors = {'q': compressed['q'], 'k_cmp': compressed['k'], 'v_cmp': compressed['v']}
    memory = {f'mem_{name}': t[0].transpose(0, 1) for name, t in qkv(1, 1, pairs, dtype=dtype).items() if name != 'q'}
    if 'cu_seqlens' not in settings:
        settings = settings | {'seqlen_k': seqlen_k}

    def attention(mem_k: Tensor, mem_v: Tensor, **tensors_and_settings: Any) -> tuple[Tensor, Tensor]:
        return compressed_attention(**tensors_and_settings, mem_kv=(mem_k, mem_v))

    op, tensors = (attention, tensors | memory) if pairs else (compressed_attention, tensors)
    assert_flex_matches(op, tensors, block_size=32, stride=16, **on_gpu(settings))


# Sizes in tokens, block size, heads that choose, kind of indices, shape, the rest.
SELECTED: dict[str, tuple[tuple[int, int, int], int, int, str, dict[str, Any], dict[str, Any]]] = {
    'group of 3': ((2, 500, 500), 64, 2, 'valid', {}, {}),
    'group of 16': ((1, 500, 500), 64, 1, 'valid', {'heads': 16, 'kv_heads': 1}, {}),
    'group of one': ((1, 500, 500), 16, 2, 'duplicates', {'heads': 2}, {}),
    'heads choose alone': ((1, 300, 300), 32, 6, 'junk', {}, {}),
    'odd blocks': ((1, 300, 300), 37, 2, 'junk', {'head_dim': 40, 'value_dim': 24}, {}),
    'blocks beyond tiles': ((1, 600, 600), 200, 2, 'valid', {}, {}),
    'not causal': ((1, 200, 300), 32, 2, 'unordered', {}, {'causal': False}),
    'nothing chosen': ((1, 100, 100), 16, 2, 'none', {}, {}),
    'one query': ((2, 1, 700), 64, 2, 'valid', {}, {}),
    'rows': ((3, 40, 700), 64, 2, 'junk', {}, {'q_offset': [5, -20, 650], 'seqlens_k': [700, 100, 0]}),
    'packed': ((1, 500, 500), 32, 2, 'junk', {}, {'cu_seqlens': [0, 0, 33, 150, 490, 490]}),
}


def selected_problem(case: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    (batch, seqlen_q, seqlen_k), block_size, index_heads, kind, shape, settings = SELECTED[case]
    tensors = qkv(batch, seqlen_q, seqlen_k, dtype=dtype, **shape)
    generator = torch.Generator('cuda').manual_seed(2)
    offset = 0 if 'causal' in settings else seqlen_k - seqlen_q
    tensors['block_indices'] = make_block_indices(
        kind,
        batch,
        seqlen_q,
        index_heads,
        6,
        seqlen_k=seqlen_k,
        block_size=block_size,
        q_offset=offset,
        device='cuda',
        generator=generator,
    )
    return tensors, {'block_size': block_size} | on_gpu(settings)


@dtypes
@pytest.mark.parametrize('case', SELECTED)
def test_selected(case: str, dtype: torch.dtype):
    tensors, settings = selected_problem(case, dtype)
    assert_flex_matches(selected_attention, tensors, **settings)


@dtypes
@pytest.mark.parametrize('case', ['group of 3', 'heads choose alone', 'odd blocks', 'one query', 'rows', 'packed'])
def test_block_scale(case: str, dtype: torch.dtype):
    tensors, settings = selected_problem(case, dtype)
    noise = torch.randn(tensors['block_indices'].shape, device='cuda', generator=torch.Generator('cuda').manual_seed(3))
    assert_flex_matches(selected_attention, tensors | {'block_scale': 1 + 0.1 * noise}, **settings)


@pytest.mark.parametrize(('num_selected', 'factors'), [(64, False), (20, True)])
def test_many_blocks(num_selected: int, factors: bool):
    """The indices that the mask loads fit shared memory up to the largest number of blocks; one more is refused."""
    tensors = qkv(1, 600, 600, dtype=torch.bfloat16)
    indices = make_block_indices('valid', 1, 600, 2, num_selected, seqlen_k=600, block_size=8, device='cuda')
    tensors['block_indices'] = indices
    if factors:
        tensors['block_scale'] = torch.ones(indices.shape, device='cuda')
    assert_flex_matches(selected_attention, tensors, block_size=8)
    q, k, v = (tensors[name] for name in 'qkv')
    with pytest.raises(ValueError, match='65 blocks are selected'):
        selected_attention(q, k, v, indices.new_zeros(1, 600, 2, 65), block_size=8, backend='flex')


def test_without_gradients():
    """The forward pass alone has the same bits."""
    tensors, settings = selected_problem('group of 3', torch.bfloat16)
    recorded, _ = selected_attention(**tensors | {'q': tensors['q'].requires_grad_()}, **settings, backend='flex')
    with torch.no_grad():
        out, _ = selected_attention(**tensors, **settings, backend='flex')
    assert torch.equal(out, recorded)


def test_float16():
    assert_flex_matches(window_attention, qkv(2, 300, 300, dtype=torch.float16), window_size=(100, 0))


@pytest.mark.parametrize(
    'call',
    [
        partial(window_attention, window_size=(3, 0), seqlens_k=torch.zeros(1, dtype=torch.int32)),
        partial(compressed_attention, block_size=32, stride=16, seqlen_k=20),
        partial(selected_attention, block_indices=torch.zeros(1, 100, 2, 0, dtype=torch.int32), block_size=16),
    ],
    ids=lambda call: call.func.__name__,
)
def test_nothing_to_read(call: partial):
    """Rows without keys have output 0, log-sum-exp -inf and gradients 0, never NaN."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 100, 100, dtype=torch.bfloat16).values())
    if call.func is compressed_attention:
        k, v = k[:, :0], v[:, :0]
    settings = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in call.keywords.items()}
    out, lse = call.func(q, k, v, **settings, backend='flex')
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@dtypes
def test_unread_keys_may_hold_anything(dtype: torch.dtype):
    """NaN in unread keys reaches neither outputs nor gradients."""
    tensors = qkv(2, 100, 700, dtype=dtype)
    generator = torch.Generator('cuda').manual_seed(2)
    indices = make_block_indices('valid', 2, 100, 2, 2, seqlen_k=600, block_size=32, device='cuda', generator=generator)
    calls = {
        window_attention: {'window_size': (20, 0), 'q_offset': 400, 'seqlens_k': integers(500, 450)},
        selected_attention: {
            'block_indices': indices,
            'block_size': 32,
            'q_offset': 400,
            'seqlens_k': integers(500, 450),
        },
    }
    for op, settings in calls.items():
        clean = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        out, lse = op(**clean, **settings, backend='eager')
        (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
        unread = (clean['v'].grad == 0).all(-1)
        assert unread.any()
        dirty = {n: t.clone() for n, t in tensors.items()}
        for name in 'kv':
            dirty[name][unread] = torch.nan
        dirty = {n: t.requires_grad_() for n, t in dirty.items()}
        out_dirty, lse = op(**dirty, **settings, backend='flex')
        (out_dirty.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
        torch.testing.assert_close(out_dirty, out, atol=2e-2, rtol=2e-2)
        for name, tensor in dirty.items():
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad, clean[name].grad, atol=2e-1, rtol=2e-2)


@pytest.mark.parametrize('op', [window_attention, selected_attention])
def test_gradients_of_rows_that_read_nan(op: Callable[..., tuple[Tensor, Tensor]]):
    """Gradients are NaN where those of eager are; those of other keys in the tiles of a NaN may be NaN too."""
    tensors = qkv(1, 700, 700, dtype=torch.float32)
    tensors['k'][0, 300, 1], tensors['v'][0, 300, 1] = torch.nan, torch.nan
    indices = make_block_indices('valid', 1, 700, 2, 4, seqlen_k=700, block_size=32, device='cuda')
    selected = {'block_indices': indices, 'block_size': 32}
    settings = {'window_size': (20, 0)} if op is window_attention else selected
    gradients = []
    for backend in ('flex', 'eager'):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        op(**leaves, **settings, backend=backend)[0].sum().backward()
        gradients.append([t.grad for t in leaves.values()])
    (q, *keys), (expected, *expected_keys) = gradients
    torch.testing.assert_close(q, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
    for result, wanted in zip(keys, expected_keys, strict=True):
        assert wanted.isnan().any()
        assert result[wanted.isnan()].isnan().all()
        torch.testing.assert_close(result[:, :, 0], wanted[:, :, 0], atol=1e-4, rtol=1e-4)  # the other KV head


def test_few_graphs_serve_many_lengths():
    """Lengths and batch sizes above 1 need no new kernels."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for batch, seqlen in ((2, 300), (3, 130), (2, 77), (4, 400), (2, 650), (2, 200), (5, 901), (2, 1111)):
        tensors = qkv(batch, seqlen, seqlen, dtype=torch.bfloat16)
        indices = make_block_indices('valid', batch, seqlen, 2, 4, seqlen_k=seqlen, block_size=64, device='cuda')
        leaves = {n: t.requires_grad_() for n, t in tensors.items()}
        selected_attention(**leaves, block_indices=indices, block_size=64, backend='flex')[0].sum().backward()
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] <= 3


@pytest.mark.parametrize('dynamic', [None, True])
def test_inside_a_compiled_function(dynamic: bool | None):
    """A function that calls the ops compiles into one graph, backward included."""
    torch._dynamo.reset()
    tensors = qkv(2, 300, 300, dtype=torch.float32)
    indices = make_block_indices('valid', 2, 300, 2, 4, seqlen_k=300, block_size=64, device='cuda')

    def attend(backend: str, *qkv: Tensor) -> Tensor:
        q, k, v = qkv
        out, lse = window_attention(q, k, v, window_size=(50, 0), backend=backend)
        out = out + selected_attention(q, k, v, indices, block_size=64, backend=backend)[0]
        return out + compressed_attention(q, k, v, block_size=1, stride=1, backend=backend)[0] + lse.mean()

    results = []
    for function, backend in ((torch.compile(attend, fullgraph=True, dynamic=dynamic), 'flex'), (attend, 'eager')):
        leaves = [t.clone().requires_grad_() for t in tensors.values()]
        out = function(backend, *leaves)
        out.sin().sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('compiled', [False, True], ids=['', 'compiled'])
def test_layer_trains_as_with_eager(compiled: bool):
    """Losses and gradients of a layer under autocast, in both backends."""
    torch._dynamo.reset()
    results = []
    for backend in ('flex', 'eager'):
        torch.manual_seed(0)
        layer = SparseAttention(
            128, 32, 8, 64, 32, 16, 64, 4, kv_heads=4, causal=True, use_diff_topk=True, backend=backend
        ).cuda()
        x = torch.randn(2, 500, 128, device='cuda', requires_grad=True)
        function = torch.compile(layer) if compiled and backend == 'flex' else layer
        with torch.autocast('cuda', dtype=torch.bfloat16):
            out = function(x)
        out.float().square().mean().backward()
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    for result, expected in zip(*results, strict=True):
        if expected is not None:
            error = (result - expected).norm() / expected.norm().clamp(min=1e-6)
            assert error < 0.03


@pytest.mark.parametrize(('change', 'reason'), [({'dtype': torch.float64}, 'float64'), ({'head_dim': 264}, '264')])
def test_refusals(change: dict[str, Any], reason: str):
    tensors = qkv(1, 20, 20, **({'dtype': torch.bfloat16} | change))
    with pytest.raises(ValueError, match=reason):
        window_attention(**tensors, window_size=(3, 0), backend='flex')
    window_attention(**tensors, window_size=(3, 0))


def test_deterministic():
    """Two runs have equal bits with deterministic algorithms, which refuse gradients of block_scale."""
    tensors, settings = selected_problem('group of 3', torch.bfloat16)
    indices = tensors.pop('block_indices')
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
            out, lse = selected_attention(**leaves, block_indices=indices, **settings, backend='flex')
            torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
            results.append([out, lse, *(t.grad for t in leaves.values())])
        assert all(map(torch.equal, *results))
        factors = torch.ones(indices.shape, device='cuda', requires_grad=True)
        with pytest.raises(ValueError, match='deterministic'):
            selected_attention(**tensors, block_indices=indices, block_scale=factors, **settings, backend='flex')
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_is_linear_in_length():
    """Doubling the length doubles the peak of memory; a T x S tensor would quadruple it."""
    peaks = []
    for seqlen in (16384, 32768):
        tensors = {n: t.requires_grad_() for n, t in qkv(1, seqlen, seqlen, dtype=torch.bfloat16).items()}
        indices = torch.randint(0, seqlen // 64, (1, seqlen, 2, 8), dtype=torch.int32, device='cuda')
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        selected_attention(**tensors, block_indices=indices, block_size=64, backend='flex')[0].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.3 * peaks[0]
    assert peaks[1] < 32768**2
