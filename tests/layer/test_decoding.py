"""`nsa_decode` by the ops of `nsa`: steps equal `nsa` of the whole sequence, and errors write nothing."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import LayerCache, ModelCache, ops
from native_sparse_attention.functional import nsa
from native_sparse_attention.inference.decode import backend_of, nsa_decode
from native_sparse_attention.inference.paged_cache import PagedLayerCache
from native_sparse_attention.nn.compress import CompressMLP, MeanPool
from native_sparse_attention.nn.compress.apply import compress_pair
from native_sparse_attention.nn.rotary import angle_tables
from native_sparse_attention.ops._triton.support import is_interpreted

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 8, 6
BLOCK_SIZE, STRIDE = 8, 4
SETTINGS = {'selection_block_size': 8, 'num_selected': 3, 'window_size': 7}
BACKENDS = [
    'eager',
    pytest.param(
        'triton',
        marks=pytest.mark.skipif(
            importlib.util.find_spec('triton') is None or not is_interpreted(),
            reason='without a GPU kernels run in the interpreter',
        ),
    ),
]

pytestmark = pytest.mark.usefixtures('no_gradients')


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def make_tokens(num_tokens: int, independent: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(BATCH, num_tokens, heads, dim, dtype=dtype)

    tokens = {'q': normal(HEADS, HEAD_DIM), 'gates': torch.rand(BATCH, num_tokens, HEADS, 3)}
    for key, value in (('k', 'v'), *((('raw_k', 'raw_v'), ('k_window', 'v_window')) if independent else ())):
        tokens |= {key: normal(KV_HEADS, HEAD_DIM), value: normal(KV_HEADS, VALUE_DIM)}
    return tokens


def make_layer(freqs: bool = True, pairs: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    def pair(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(KV_HEADS, count, dim, dtype=dtype) for dim in (HEAD_DIM, VALUE_DIM))

    return {
        'networks': (CompressMLP(HEAD_DIM, BLOCK_SIZE).to(dtype), MeanPool()),
        'positions': pair(BLOCK_SIZE),
        'freqs': torch.rand(3) if freqs else None,
        'mem_kv': pair(pairs) if pairs else None,
        **SETTINGS,
    }


def make_cache(independent: bool = False, **changes: Any) -> LayerCache:
    layout: dict[str, Any] = {
        'kv_heads': KV_HEADS,
        'head_dim': HEAD_DIM,
        'value_dim': VALUE_DIM,
        'compress': (BLOCK_SIZE, STRIDE),
        'has_raw_k': True,
        'has_raw_v': independent,
        'has_window': independent,
        'max_rollback': 2,
    }
    kind = PagedLayerCache if 'page_size' in changes else LayerCache
    return kind(BATCH, 40, **layout | changes)


def attend_whole(tokens: dict[str, Tensor], layer: dict[str, Any], factor: float = 1.0, **more: Any) -> Tensor:
    """Return `nsa` of a whole sequence."""
    layer = dict(layer)
    q, k, v, gates = (tokens[name] for name in ('q', 'k', 'v', 'gates'))
    networks, positions, freqs, window = (layer.pop(n) for n in ('networks', 'positions', 'freqs', 'window_size'))
    raw = tokens.get('raw_k', k), tokens.get('raw_v', v)
    rotated_q, rotated_k, k_window = q, k, tokens.get('k_window')
    if freqs is not None:
        tables = angle_tables(torch.arange(q.shape[1])[None], freqs, factor)
        rotated_q, rotated_k = (ops.rotary(t, *tables, backend='eager') for t in (q, k))
        k_window = None if k_window is None else ops.rotary(k_window, *tables, backend='eager')
    return nsa(
        *(rotated_q, rotated_k, v, *compress_pair(networks, raw, positions, STRIDE), gates),
        q_cmp=tokens.get('q_cmp', q),
        k_window=k_window,
        v_window=tokens.get('v_window'),
        compress_block_size=BLOCK_SIZE,
        compress_stride=STRIDE,
        window_size=(window - 1, 0),
        backend='eager',
        **layer,
        **more,
    )


def split(tokens: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    parts = {name: t.split(sizes, 1) for name, t in tokens.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


@pytest.mark.parametrize('independent', [False, True])
@pytest.mark.parametrize(('freqs', 'pairs'), [(True, 1), (False, 0)])
@pytest.mark.parametrize('sizes', [[37], [1] * 37, [20, 3, 0, 1, 13]], ids=['whole', 'steps', 'chunks'])
def test_steps_equal_the_full_forward(sizes: list[int], freqs: bool, pairs: int, independent: bool) -> None:
    tokens = make_tokens(37, independent, torch.float64)
    layer = make_layer(freqs, pairs, torch.float64)
    cache = make_cache(independent, dtype=torch.float64)
    parts = [nsa_decode(**part, cache=cache, **layer, backend='eager') for part in split(tokens, sizes)]
    torch.testing.assert_close(torch.cat(parts, 1), attend_whole(tokens, layer), rtol=1e-9, atol=1e-9)
    assert cache.lengths.tolist() == [37, 37]
    assert cache.max_length == 37


@pytest.mark.parametrize(
    'settings',
    [
        {'num_selected': 0},
        {'num_init': 0, 'num_local': 1},
        {'share_group': False},
        {'scale': 0.7},
        {'window_size': 1},
        {'window_size': 50, 'num_selected': 50},
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any]) -> None:
    tokens, layer = make_tokens(30, dtype=torch.float64), make_layer(dtype=torch.float64) | settings
    cache = make_cache(dtype=torch.float64)
    parts = [nsa_decode(**part, cache=cache, **layer, backend='eager') for part in split(tokens, [25, 1, 4])]
    torch.testing.assert_close(torch.cat(parts, 1), attend_whole(tokens, layer), rtol=1e-9, atol=1e-9)


def test_angles_between_positions() -> None:
    tokens, layer, cache = make_tokens(20), make_layer(), make_cache()
    out = nsa_decode(**tokens, cache=cache, **layer, interpolate_factor=3.0, backend='eager')
    torch.testing.assert_close(out, attend_whole(tokens, layer, 3.0), rtol=1e-5, atol=1e-5)
    layer['freqs'] = layer['freqs'] / 3
    torch.testing.assert_close(out, attend_whole(tokens, layer), rtol=1e-4, atol=1e-4)


def rotate_tokens(tokens: dict[str, Tensor], positions: Tensor, freqs: Tensor, factor: float) -> dict[str, Tensor]:
    """Rotate tokens as a caller does, by tables times a factor, as YaRN has it."""
    tables = [factor * table for table in angle_tables(positions, freqs)]
    q, k = (ops.rotary(tokens[name], *tables, backend='eager') for name in 'qk')
    return tokens | {'q': q, 'k': k, 'q_cmp': tokens['q'], 'raw_k': tokens['k']}


@pytest.mark.parametrize('backend', BACKENDS)
def test_the_caller_may_rotate(backend: str) -> None:
    """Steps of rows of unequal lengths equal `nsa` of each row alone; with plain tables they equal steps that rotate by
    freqs.
    """
    counts, steps, layer = torch.tensor([21, 10], dtype=torch.int32), [1, 3, 1], make_layer()
    first, later = make_tokens(21), [make_tokens(count) for count in steps]
    freqs, layer['freqs'] = layer['freqs'], None
    found: dict[float, Tensor] = {}
    for factor in (1.3, 1.0):
        cache = make_cache()
        prompt = rotate_tokens(first, torch.arange(21)[None], freqs, factor)
        nsa_decode(**prompt, cache=cache, **layer, counts=counts, backend='eager')
        parts, outs = [], []
        for new in later:
            parts.append(rotate_tokens(new, cache.positions(new['q'].shape[1]), freqs, factor))
            outs.append(nsa_decode(**parts[-1], cache=cache, **layer, backend=backend))
        found[factor] = torch.cat(outs, 1)
        for row, count in enumerate(counts.tolist()):
            joined = {
                name: torch.cat([t[row : row + 1, :count], *(part[name][row : row + 1] for part in parts)], 1)
                for name, t in prompt.items()
            }
            expected = attend_whole(joined, layer)[:, count:]
            torch.testing.assert_close(found[factor][row : row + 1], expected, rtol=1e-5, atol=1e-5)
    cache = make_cache()
    nsa_decode(**first, cache=cache, **layer | {'freqs': freqs}, counts=counts, backend='eager')
    outs = [nsa_decode(**new, cache=cache, **layer | {'freqs': freqs}, backend=backend) for new in later]
    torch.testing.assert_close(found[1.0], torch.cat(outs, 1), rtol=1e-5, atol=1e-5)


def test_counts() -> None:
    """Tokens behind the real ones leave no trace."""
    layer, cache = make_layer(), make_cache()
    first, second = make_tokens(21), make_tokens(3)
    counts = torch.tensor([21, 10], dtype=torch.int32)
    for name in ('k', 'v'):
        first[name][1, 10:] = 1e3
    nsa_decode(**first, cache=cache, **layer, counts=counts, backend='eager')
    out = nsa_decode(**second, cache=cache, **layer, backend='eager')
    assert cache.lengths.tolist() == [24, 13]
    for row, count in enumerate(counts.tolist()):
        joined = {
            name: torch.cat((t[row : row + 1, :count], second[name][row : row + 1]), 1) for name, t in first.items()
        }
        expected = attend_whole(joined, layer)[:, count:]
        torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('backend', BACKENDS)
def test_the_result_has_the_dtype_of_q(backend: str) -> None:
    layer, cache = make_layer(pairs=0), make_cache(dtype=torch.float16)
    out = nsa_decode(**make_tokens(9), cache=cache, **layer, backend=backend)
    assert out.dtype == torch.float32


def test_flex_decodes_by_the_ops_of_nsa(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(
        'native_sparse_attention.inference.decode.functional.nsa',
        lambda q, *_, backend, **__: taken.append(backend) or q,
    )
    nsa_decode(**make_tokens(3), cache=make_cache(), **make_layer(freqs=False), backend='flex')
    assert taken == ['flex']


def test_backend() -> None:
    q, k, v = (make_tokens(3)[name] for name in 'qkv')
    choice = backend_of(q, k, v, make_cache(), 8, 3)
    assert choice.name == 'eager'
    assert choice.passed_over == {'triton': 'the tensors are on cpu'}
    for num_tokens in (0, 17):
        others = make_tokens(num_tokens)
        new = (others['q'], others['k'], others['v'])
        assert backend_of(*new, make_cache(), 8, 3, backend='triton').name == 'eager'
    with pytest.raises(ValueError, match="backend is 'cuda', but must be"):
        backend_of(q, k, v, make_cache(), 8, 3, backend='cuda')


@pytest.mark.skipif(not is_interpreted(), reason='on a GPU the tensors of this test lie elsewhere')
@pytest.mark.parametrize(
    ('dtype', 'group', 'sizes', 'num_selected', 'reason'),
    [
        (torch.float64, 1, (8, 4, 8), 3, 'the cache has dtype torch.float64, but its kernels compute in float32'),
        (torch.float32, 65, (8, 4, 8), 3, '65 heads share a key head, but its kernels take up to 64'),
        (
            torch.float32,
            1,
            (256, 1, 64),
            3,
            '319 compressed blocks overlap a selection block, but its kernels take up to 128',
        ),
        (torch.float32, 1, (8, 4, 8), 513, 'n is 513, but its kernels choose up to 512 blocks'),
    ],
)
def test_calls_that_kernels_do_not_support(
    dtype: torch.dtype, group: int, sizes: tuple[int, int, int], num_selected: int, reason: str
) -> None:
    q, k = torch.zeros(BATCH, 1, group, 8), torch.zeros(BATCH, 1, 1, 8)
    cache = make_cache(kv_heads=1, value_dim=8, compress=sizes[:2], dtype=dtype)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call of decoding: {reason}"):
        backend_of(q, k, k, cache, sizes[2], num_selected, backend='triton')


def without_rows(tokens: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: t[:count] for name, t in tokens.items()}


ERRORS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    'rank': (lambda: {'q': torch.zeros(2, 3, 4)}, 'q has shape (2, 3, 4), but must have 4 dimensions'),
    'gates': (lambda: {'gates': torch.rand(2, 3, 4, 2)}, 'gates has shape (2, 3, 4, 2), but must have (2, 3, 4, 3)'),
    'integer gates': (lambda: {'gates': torch.ones(2, 3, 4, 3).int()}, 'gates has dtype torch.int32'),
    'heads': (
        lambda: {'k': torch.zeros(2, 3, 4, 8), 'v': torch.zeros(2, 3, 4, 6)},
        'cache holds 2 heads of sizes (8, 6), but k and v have 4 of (8, 6)',
    ),
    'head sizes': (
        lambda: {'v': torch.zeros(2, 3, 2, 8)},
        'cache holds 2 heads of sizes (8, 6), but k and v have 2 of (8, 8)',
    ),
    'tokens': (
        lambda: {'k': torch.zeros(2, 4, 2, 8), 'v': torch.zeros(2, 4, 2, 6)},
        'k has 4 tokens, but q has 3',
    ),
    'batch': (lambda: without_rows(make_tokens(3), 1), 'q has batch size 1, but cache has 2'),
    'not compressed': (
        lambda: {'cache': make_cache(compress=None)},
        'cache has no compressed keys, but needs compress=(l, d)',
    ),
    'window missing': (
        lambda: {'cache': make_cache(has_window=True)},
        'cache has has_window = True, but k_window and v_window go with it',
    ),
    'window too many': (
        lambda: {'k_window': torch.zeros(2, 3, 2, 8), 'v_window': torch.zeros(2, 3, 2, 6)},
        'cache has has_window = False, but k_window and v_window go with it',
    ),
    'pages': (
        lambda: {'cache': make_cache(page_size=12, selection_block_size=4)},
        'cache has page_size 12, but must have a multiple of selection_block_size, 8',
    ),
    'raw_k': (lambda: {'raw_k': torch.zeros(2, 3, 2, 6)}, 'raw_k has shape (2, 3, 2, 6), but must have (2, 3, 2, 8)'),
    'layout': (lambda: {'rotary_layout': 'split'}, "rotary_layout is 'split', but must be 'interleaved' or 'half'"),
    'layout without freqs': (
        lambda: {'rotary_layout': 'half', 'freqs': None},
        "rotary_layout is 'half', but must be left out where freqs are None",
    ),
    'interpolation without freqs': (
        lambda: {'interpolate_factor': 2.0, 'freqs': None},
        'interpolate_factor is 2.0, but must be left out where freqs are None',
    ),
    'freqs without compressed keys': (
        lambda: {
            'cache': make_cache(compress=None, has_raw_k=False, has_v_cmp=False),
            **dict.fromkeys(('networks', 'positions'), (None, None)),
            'merge_window': True,
            'gates': None,
            'num_selected': 0,
            'mem_kv': None,
            'freqs': torch.ones(5),
        },
        'freqs has shape (5,), but must have at most 4 (D / 2)',
    ),
    'q_cmp': (
        lambda: {'q_cmp': torch.zeros(2, 3, 2, 8), 'freqs': None},
        'q_cmp has shape (2, 3, 2, 8), but must have (2, 3, 4, 8)',
    ),
    'q_cmp of another dtype': (
        lambda: {'q_cmp': torch.zeros(2, 3, 4, 8).half(), 'freqs': None},
        'q_cmp has dtype torch.float16, but q has torch.float32',
    ),
    'q_cmp of another kind': (lambda: {'q_cmp': 3, 'freqs': None}, 'q_cmp is a int, but must be a tensor'),
    'raw_k of another kind': (lambda: {'raw_k': [1.0]}, 'raw_k is a list, but must be a tensor'),
    'q_cmp and freqs': (lambda: {'q_cmp': torch.zeros(2, 3, 4, 8)}, 'q_cmp is given, but must be None where freqs are'),
    'raw_v': (lambda: {'raw_v': torch.zeros(2, 1, 2, 6)}, 'raw_v has shape (2, 1, 2, 6), but must have (2, 3, 2, 6)'),
    'k_window': (
        lambda: {
            'cache': make_cache(has_window=True),
            'k_window': torch.zeros(2, 3, 1, 8),
            'v_window': torch.zeros(2, 3, 2, 6),
        },
        'k_window has shape (2, 3, 1, 8), but must have (2, 3, 2, 8)',
    ),
    'capacity': (lambda: make_tokens(41), 'the cache holds up to 0 tokens a row and gets 41 more'),
    'backend': (lambda: {'backend': 'cuda'}, "backend is 'cuda', but must be"),
    'counts of a row': (lambda: {'counts': torch.tensor([3])}, 'counts has 1 entries, but must have 2'),
    'counts by token': (lambda: {'counts': torch.ones(2, 3).int()}, 'counts has shape (2, 3), but must have 1 dim'),
    'counts as floats': (lambda: {'counts': torch.ones(2)}, 'counts has dtype torch.float32, but must be int32'),
    'counts elsewhere': (lambda: {'counts': torch.ones(2).int().to('meta')}, 'counts is on meta, but q is on cpu'),
    'more than all': (lambda: {'counts': torch.tensor([3, 4])}, 'counts is [3, 4], but must lie in [0, 3]'),
    'less than none': (lambda: {'counts': torch.tensor([-1, 3])}, 'counts is [-1, 3], but must lie in [0, 3]'),
    'gates elsewhere': (lambda: {'gates': torch.rand(2, 3, 4, 3, device='meta')}, 'gates is on meta'),
    'tokens elsewhere': (
        lambda: {name: t.to('meta') for name, t in make_tokens(3).items()},
        'q is on meta, but cache is on cpu',
    ),
    'raw_k elsewhere': (lambda: {'raw_k': torch.zeros(2, 3, 2, 8, device='meta')}, 'raw_k is on meta, but q is on cpu'),
    'raw_k of another dtype': (
        lambda: {'raw_k': torch.zeros(2, 3, 2, 8).half()},
        'raw_k has dtype torch.float16, but q has torch.float32',
    ),
}


def test_a_cache_of_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match='cache is a ModelCache, but must be a LayerCache'):
        nsa_decode(**make_tokens(3), cache=ModelCache([make_cache()]), **make_layer())  # type: ignore[arg-type]


def assert_refused(changes: dict[str, Any], message: str, backend: str) -> None:
    """Assert that the call raises and nothing is written."""
    call = {**make_tokens(3), 'cache': make_cache(), **make_layer(), 'backend': backend, **changes}
    cache = call['cache']
    before = [t.clone() for t in cache._tensors()]
    with pytest.raises(ValueError, match=re.escape(message)):
        nsa_decode(**call)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.max_length == 0
    for tensor, old in zip(cache._tensors(), before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize('name', ERRORS)
def test_errors(name: str) -> None:
    make, message = ERRORS[name]
    assert_refused(make(), message, 'eager')


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_selected': -1}, 'num_selected is -1, but must be an integer of at least 0'),
        ({'num_init': -1}, 'num_init is -1, but must be an integer of at least 0'),
        ({'num_local': -2}, 'num_local is -2, but must be an integer of at least 0'),
        ({'selection_block_size': 6}, 'selection_block_size is 6, but must be a multiple of compress_stride, 4'),
        ({'selection_block_size': 0}, 'selection_block_size is 0, but must be an integer of at least 1'),
        ({'window_size': -3}, 'window_size is'),
        ({'mem_kv': (torch.zeros(2, 1, 8), torch.zeros(2, 2, 6))}, 'mem'),
        ({'mem_kv': (torch.zeros(1, 1, 8), torch.zeros(1, 1, 6))}, 'mem'),
        ({'mem_kv': (torch.zeros(2, 1, 8), torch.zeros(2, 1, 6).int())}, 'mem_kv[1] has dtype torch.int32'),
        (
            {'mem_kv': (torch.zeros(2, 1, 8, device='meta'), torch.zeros(2, 1, 6))},
            'mem_kv[0] is on meta, but q is on cpu',
        ),
        ({'freqs': torch.rand(5)}, '5'),
        ({'freqs': torch.rand(3).double()}, 'freqs has dtype torch.float64, but must be float32'),
        ({'freqs': torch.rand(3, device='meta')}, 'freqs is on meta, but q is on cpu'),
        ({'raw_v': torch.zeros(2, 3, 2, 6)}, 'cache has has_raw_v = False, but raw_v is given'),
        ({'scale': float('nan')}, 'scale is nan, but must be a finite number'),
        ({'scale': True}, 'scale is True, but must be a finite number'),
        ({'softcap': 0.0}, 'softcap is 0.0, but must be a finite number above 0'),
        ({'sinks': torch.zeros(3)}, 'sinks has shape (3,), but must have (4,) or (4, M)'),
        ({'sinks_cmp': torch.zeros(3)}, 'sinks_cmp has shape (3,), but must have (4,) or (4, M)'),
        ({'num_splits': -1}, 'num_splits is -1, but must be an integer of at least 0'),
        ({'num_splits': 65}, 'num_splits is 65, but must be at most 64'),
        ({'positions': (torch.zeros(2, 4, 8), torch.zeros(2, 8, 6))}, 'positions'),
        ({'positions': (torch.zeros(2, 8, 8).int(), torch.zeros(2, 8, 6))}, 'positions[0] has dtype torch.int32'),
        (
            {'positions': (torch.zeros(2, 8, 8), torch.zeros(2, 8, 6, device='meta'))},
            'positions[1] is on meta, but q is on cpu',
        ),
        ({'k_window': torch.zeros(2, 3, 2, 8)}, 'k_window'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str, backend: str) -> None:
    """Both backends refuse wrong settings before anything is written."""
    assert_refused(changes, message, backend)


class Fails(nn.Module):
    def forward(self, blocks: Tensor) -> Tensor:
        raise RuntimeError('mat1 and mat2 must have the same dtype')


@pytest.mark.full
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('network', [nn.Flatten(3), Fails()], ids=['size', 'dtype'])
def test_networks_that_fail(network: nn.Module, backend: str) -> None:
    """Failing networks change nothing, not even in a ring that holds no more than the next block needs."""
    layer, old, new = make_layer(), make_tokens(22), make_tokens(9)
    failing: dict[str, Any] = layer | {'networks': (MeanPool(), network)}
    failed, cache = (make_cache(max_rollback=0) for _ in range(2))
    for held in (failed, cache):
        nsa_decode(**old, cache=held, **layer, backend='eager')
    with pytest.raises((ValueError, RuntimeError), match=r'must map|same dtype'):
        nsa_decode(**make_tokens(9), cache=failed, **failing, backend=backend)
    assert failed.lengths.tolist() == [22, 22]
    assert failed.max_length == 22
    outs = [nsa_decode(**new, cache=held, **layer, backend=backend) for held in (failed, cache)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({}, 'compressed_attention: the tensors are on cpu'),
        ({'gates': torch.ones(2, 17, 4, 3).double()}, 'gated_sum: gates has dtype torch.float64'),
    ],
    ids=['device', 'gates'],
)
def test_ops_that_the_kernels_do_not_serve(
    changes: dict[str, Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more tokens than the decode kernels take run the ops of `nsa`."""
    if not changes:
        monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    message = f"backend 'triton' cannot serve this call of {reason}"
    assert_refused({**make_tokens(17), **changes}, message, 'triton')


@pytest.mark.parametrize('backend', BACKENDS)
def test_rotary_needs_a_ring(backend: str) -> None:
    """Compression needs keys before rotary embedding, which a cache without a ring does not hold."""
    assert_refused({'cache': make_cache(has_raw_k=False)}, 'has_raw_k', backend)
