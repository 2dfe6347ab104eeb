"""Caches of other rows (`select`, `repeat_interleave`), crops of any depth, and `repr`."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import native_sparse_attention
from native_sparse_attention import LayerCache, ModelCache, PagedLayerCache, SparseAttention
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.nn.dense import DenseAttention
from tests.layer.test_cache import DIM, LAYER, MAX_ROLLBACK, SETTINGS, append, assert_equal, make, state
from tests.layer.test_paged_cache import make_any, make_paged
from tests.layer.test_transformer import KINDS, assert_near, make_ids, make_model

INDICES = {
    'one row to beams': (1, [0] * 5),
    'rows repeated': (3, [2, 0, 2, 2, 1]),
    'rows left out': (3, [1]),
    'as many': (2, [1, 1]),
}
layers = pytest.mark.parametrize('setting', [*SETTINGS, 'dense'])


def fill(layer: SparseAttention | DenseAttention, cache: LayerCache, num_tokens: int = 20) -> None:
    """Fill rows to lengths 20, 15 and 10; up to 4 tokens have been removed from the longest."""
    counts = torch.tensor([num_tokens, num_tokens - 5, num_tokens - 10])[: cache.batch_size]
    layer(
        torch.randn(cache.batch_size, num_tokens, DIM, dtype=cache.dtype),
        torch.arange(num_tokens) < counts[:, None],
        cache=cache,
    )
    layer(torch.randn(cache.batch_size, 4, DIM, dtype=cache.dtype), cache=cache)
    cache.crop(counts)


@layers
@pytest.mark.parametrize('name', INDICES)
@pytest.mark.parametrize('page_size', [None, 12])
def test_a_cache_of_other_rows(setting: str, name: str, page_size: int | None) -> None:
    layer, (rows, index) = make_any(setting).double(), INDICES[name]
    cache = layer.init_cache(rows, 48, MAX_ROLLBACK, page_size=page_size)
    fill(layer, cache)
    before = [t.clone() for t in (cache.lengths, cache._peaks, *cache._tensors())]
    chosen = cache.select(torch.tensor(index, dtype=torch.int32 if page_size else torch.int64))
    assert type(chosen) is type(cache)
    assert (chosen.batch_size, chosen.capacity, chosen.max_length) == (len(index), 48, cache.max_length)
    assert chosen.lengths.tolist() == [cache.lengths.tolist()[row] for row in index]
    assert chosen._peaks.tolist() == [cache._peaks.tolist()[row] for row in index]
    # Rows continue differently, each as it would alone.
    x = torch.randn(len(index), 14, DIM).double()
    outs = [layer(part, cache=chosen) for part in x.split([1, 9, 1, 3], 1)]
    assert all(a.equal(b) for a, b in zip(before, (cache.lengths, cache._peaks, *cache._tensors()), strict=True))
    for i, row in enumerate(index):
        alone = cache.select(torch.tensor([row]))
        expected = [layer(part, cache=alone) for part in x[i : i + 1].split([1, 9, 1, 3], 1)]
        assert_near(torch.cat(outs, 1)[i : i + 1], torch.cat(expected, 1))


@pytest.mark.parametrize('setting', SETTINGS)
@pytest.mark.parametrize('page_size', [None, 12])
def test_a_selected_cache_holds_what_reorder_gives(setting: str, page_size: int | None) -> None:
    layer = make_any(setting)
    cache = layer.init_cache(3, 48, MAX_ROLLBACK, page_size=page_size)
    fill(layer, cache)
    chosen = cache.select(torch.tensor([2, 2, 0]))
    cache.reorder(torch.tensor([2, 2, 0]))
    assert_equal(state(chosen), state(cache))
    chosen.crop(cache._peaks - MAX_ROLLBACK)
    with pytest.raises(ValueError, match='max_rollback is 9'):
        chosen.crop(cache._peaks - MAX_ROLLBACK - 1)


def test_repeats() -> None:
    cache = make()
    append(cache, 5, [5, 3])
    repeated = cache.repeat_interleave(3)
    assert repeated.lengths.tolist() == [5, 5, 5, 3, 3, 3]
    assert repeated.k[1, :5].equal(cache.k[0, :5])
    repeats: list[Any] = [0, -1, True, 1.5, torch.tensor([1, 2])]
    for each in repeats:
        with pytest.raises(ValueError, match=r'repeats is .* but must be an integer of at least 1'):
            cache.repeat_interleave(each)


def test_a_growing_cache_goes_on_growing() -> None:
    layer = make_any('ring of keys')
    _, cache = layer(torch.randn(1, 60, DIM), return_cache=True)
    chosen = cache.select(torch.tensor([0, 0]))
    assert layer(torch.randn(2, 30, DIM), cache=chosen).isfinite().all()
    assert (chosen.capacity, cache.capacity) == (128, 64)


def test_select_refuses() -> None:
    cache = make()
    index: Any
    for index, message in (
        ([1, 0], 'index is a list, but must be a tensor'),
        (torch.tensor([], dtype=torch.int64), r'index has shape \(0,\) .* but must be integers \[N\], N at least 1'),
        (torch.tensor(0), 'index has shape'),
        (torch.tensor([[0]]), 'index has shape'),
        (torch.tensor([0.0]), 'dtype torch.float32'),
        (torch.tensor([True]), 'dtype torch.bool'),
        (torch.tensor([0, 1, 2]), r'index is \[0, 1, 2\], but must be rows from 0 to 1'),
        (torch.tensor([-1]), r'index is \[-1\], but must be rows from 0 to 1'),
    ):
        with pytest.raises(ValueError, match=message):
            cache.select(index)


def test_pages_of_the_caller_are_not_selected() -> None:
    cache = make_paged(make_any('no ring'))
    message = 'pools and block_table and block_table_cmp were given to this PagedLayerCache, but select'
    with pytest.raises(ValueError, match=message):
        cache.select(torch.tensor([0]))
    with pytest.raises(ValueError, match=message):
        cache.repeat_interleave(2)


@KINDS
def test_beams_of_a_model(sparse: bool) -> None:
    """A prompt is read once and continues in 4 beams, by a `DecodeStep` of their own."""
    model, prompt, new = make_model(sparse, backend='eager'), make_ids(1, 15), make_ids(4, 6)
    cache = model.init_cache(1, 32)
    model.prefill(prompt, cache)
    for beams in (cache.repeat_interleave(4), cache.select(torch.zeros(4, dtype=torch.int64))):
        assert isinstance(beams, ModelCache)
        assert (len(beams), beams.batch_size, beams.lengths.tolist()) == (2, 4, [15] * 4)
        step = DecodeStep(model, beams)
        found = torch.cat([step(token) for token in new.split(1, 1)], 1)
        expected = model(torch.cat((prompt.expand(4, -1), new), 1))[:, 15:]
        assert_near(found, expected)
    assert cache.lengths.tolist() == [15]


@layers
@pytest.mark.parametrize('page_size', [None, 12])
def test_crops_of_any_depth(setting: str, page_size: int | None) -> None:
    layer, x = make_any(setting).double(), torch.randn(2, 60, DIM).double()
    cache = layer.init_cache(2, 60, max_rollback=None, page_size=page_size)
    layer(x, cache=cache)
    for length in (55, 31, 12, 8, 7, 1):
        never = layer.init_cache(2, 60, page_size=page_size)
        layer(x[:, :length], cache=never)
        cache.crop(length)
        assert cache.lengths.tolist() == [length] * 2
        for part in x[:, length:].split([1, 1, 59 - length - 1] if length < 59 else [1, 4], 1):
            assert_near(layer(part, cache=cache), layer(part, cache=never))
    cache.crop(torch.tensor([3, 44]))
    assert cache.lengths.tolist() == [3, 44]


def test_a_growing_cache_keeps_raw_keys() -> None:
    """Slots of a ring as long as the capacity stay where they are when both grow."""
    layer = make_any('ring of keys').double()
    assert isinstance(layer, SparseAttention)
    grown = LayerCache(1, 8, max_rollback=None, grows=True, dtype=torch.float64, **layer._cache_layout)
    x = torch.randn(1, 40, DIM).double()
    for part in x.split([5, 2, 20, 13], 1):
        layer(part, cache=grown)
    assert grown.raw_k is not None
    assert (grown.capacity, grown.raw_k.shape[1]) == (64, 64)
    grown.crop(6)
    fresh = layer.init_cache(1, 40)
    layer(x[:, :6], cache=fresh)
    assert_near(layer(x[:, 6:], cache=grown), layer(x[:, 6:], cache=fresh))


def test_raw_keys_of_the_kernels() -> None:
    """The decode kernels write and read a ring as long as the capacity."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {'dim': 32, 'dim_head': 16, 'heads': 2, 'kv_heads': 1, 'sliding_window_size': 4}
    sizes |= {'compress_block_size': 8, 'compress_block_sliding_stride': 4, 'selection_block_size': 8}
    layer = SparseAttention(num_selected_blocks=4, causal=True, **sizes).eval()
    x = torch.randn(1, 24, 32)
    outs = {}
    for backend in ('eager', 'triton'):
        layer.backend = 'eager'
        cache = layer.init_cache(1, 24, max_rollback=None)
        layer(x[:, :20], cache=cache)
        cache.crop(7)
        layer.backend = backend
        for part in (x[:, 7:8], x[:, 8:13]):
            outs[backend] = layer(part, cache=cache)
    torch.testing.assert_close(outs['triton'], outs['eager'], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('page_size', [None, 12])
def test_a_crop_below_the_bound_of_the_host(page_size: int | None) -> None:
    """A mask left all rows shorter than the tokens of the call, so the host knows only a bound."""
    layer = make_any('ring of keys').double()
    cache, never = (layer.init_cache(2, 60, MAX_ROLLBACK, page_size=page_size) for _ in range(2))
    x, mask = torch.randn(2, 40, DIM).double(), torch.arange(40) < torch.tensor([15, 12])[:, None]
    layer(x, mask, cache=cache)
    assert cache.max_length == 40
    layer(x[:, :15], mask[:, :15], cache=never)
    never.crop(torch.tensor([8, 8]))
    cache.crop(8)
    assert (cache.lengths.tolist(), cache.max_length, cache._peak) == ([8, 8], 8, 15)
    with pytest.raises(ValueError, match='length is 5, but the cache has held 15 tokens and max_rollback is 9'):
        cache.crop(5)
    assert_near(layer(x[:, 8:20], cache=cache), layer(x[:, 8:20], cache=never))


@pytest.mark.gpu
def test_a_crop_reads_a_gpu_only_where_it_must() -> None:
    cache = LayerCache(2, 64, kv_heads=1, head_dim=4, value_dim=4, max_rollback=9, device='cuda')
    k = torch.randn(2, 40, 1, 4, device='cuda')
    cache.append(k, k, counts=torch.tensor([15, 12], dtype=torch.int32, device='cuda'))
    cache.crop(8)
    assert (cache.lengths.tolist(), cache.max_length, cache._peak) == ([8, 8], 8, 15)
    torch.cuda.set_sync_debug_mode('error')
    try:
        cache.crop(7)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_texts_of_caches() -> None:
    layer = SparseAttention(**LAYER)  # type: ignore[arg-type]
    cache = layer.init_cache(2, 2**16, dtype=torch.bfloat16)
    size = f'{cache.nbytes / 2**30:.3g} GiB'
    assert cache.nbytes == sum(
        t.nbytes for t in (cache.k, cache.v, cache.k_cmp, cache.v_cmp, cache.raw_k) if t is not None
    )
    text = 'rows=2, capacity=65536, lengths=[0, 0], max_rollback=32, dtype=bfloat16, device=cpu'
    assert repr(cache) == f'LayerCache({text}, {size})'
    assert float(size.split()[0]) > 0
    paged = layer.init_cache(20, 48, page_size=12, max_rollback=None)
    layer.eval()(torch.randn(20, 3, DIM), torch.arange(3) < torch.tensor([1, *[3] * 19])[:, None], cache=paged)
    text = 'rows=20, capacity=48, lengths=1 to 3, max_rollback=None, dtype=float32, device=cpu, page_size=12, '
    assert repr(paged).startswith(f'PagedLayerCache({text}')
    _, growing = layer(torch.randn(1, 3, DIM), return_cache=True)
    assert ', grows=True' in repr(growing)
    assert 'lengths=up to 0' in repr(layer.init_cache(2, 48, device='meta'))
    model = ModelCache([layer.init_cache(2, 30), layer.init_cache(2, 40), layer.init_cache(2, 50)])
    assert repr(model).startswith('ModelCache(layers=3 of LayerCache, rows=2, capacity=30 to 50, lengths=[0, 0]')
    assert repr(model).endswith(f'{model.nbytes / 2**30:.3g} GiB)')
    assert issubclass(PagedLayerCache, LayerCache)


def test_the_version() -> None:
    """The package defines the version, and the build reads it from there."""
    found = native_sparse_attention.__version__
    assert re.fullmatch(r'\d+\.\d+\.\d+', found)
    root = Path(native_sparse_attention.__file__).parent
    assert f"__version__ = '{found}'" in (root / '__init__.py').read_text()
    project = root.parent / 'pyproject.toml'
    if project.exists():
        assert "dynamic = ['version']" in project.read_text()
        assert "path = 'native_sparse_attention/__init__.py'" in project.read_text()
    citation = root.parent / 'CITATION.cff'
    if citation.exists():
        assert f'\nversion: {found}\n' in citation.read_text()
    try:
        installed = version('native-sparse-attention')
    except PackageNotFoundError:
        return
    assert installed == found
