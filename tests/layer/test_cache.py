"""The cache, alone and in the layer: refusals, content, and fixed memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from native_sparse_attention import SparseAttention
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.model_cache import ModelCache

SIZES = {'kv_heads': 2, 'head_dim': 4, 'value_dim': 3}


def make(batch_size: int = 2, max_seq_len: int = 16, **settings: object) -> LayerCache:
    return LayerCache(batch_size, max_seq_len, **SIZES | settings)  # type: ignore[arg-type]


def append(cache: LayerCache, num_tokens: int, counts: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    cache.reserve(num_tokens)
    k, v = (torch.randn(cache.batch_size, num_tokens, 2, dim) for dim in (4, 3))
    cache.append(k, v, counts=None if counts is None else torch.tensor(counts, dtype=torch.int32))
    return k, v


def test_tokens_stand_behind_each_row() -> None:
    cache = make()
    k1, _ = append(cache, 3, [3, 1])
    k2, v2 = append(cache, 2)
    assert cache.lengths.tolist() == [5, 3]
    assert cache.max_length == 5
    assert cache.k[0, :5].equal(torch.cat((k1[0], k2[0])))
    assert cache.k[1, :3].equal(torch.cat((k1[1, :1], k2[1])))
    assert cache.v[1, 1:3].equal(v2[1])
    assert cache.positions(2).tolist() == [[5, 6], [3, 4]]


def test_capacity() -> None:
    cache = make(max_seq_len=4)
    append(cache, 3)
    with pytest.raises(ValueError, match='holds up to 3 tokens a row and gets 2 more, but its capacity is 4'):
        cache.reserve(2)
    cache.reserve(1)
    growing = make(max_seq_len=4, grows=True, compress=(4, 2), has_raw_k=True)
    growing.session.workspace['sums', 2] = torch.zeros(2)
    k, _ = append(growing, 3)
    assert growing.session.workspace
    append(growing, 6)
    assert growing.capacity == 16
    assert not growing.session.workspace, 'it is as large as the capacity was'
    assert growing.k[:, :3].equal(k)
    assert growing.k_cmp is not None
    assert growing.k_cmp.shape[1] == 8


def test_the_host_advances_by_itself() -> None:
    """A replayed graph advances the lengths; the host follows, and refuses as if it had appended."""
    cache, appended = make(max_seq_len=8, max_rollback=2), make(max_seq_len=8, max_rollback=2)
    append(appended, 6)
    model = ModelCache([cache, make(max_seq_len=8)])
    model.reserve(6)
    model.advance(6)
    assert (cache.max_length, cache._peak, model[1].max_length) == (appended.max_length, appended._peak, 6)
    assert cache.lengths.tolist() == [0, 0]
    cache.lengths.fill_(6)
    cache._peaks.fill_(6)
    for refuse in (lambda c: c.reserve(3), lambda c: c.crop(3)):
        with pytest.raises(ValueError) as expected:  # noqa: PT011
            refuse(appended)
        message = re.escape(str(expected.value).removeprefix('the cache'))
        with pytest.raises(ValueError, match=message):
            refuse(model)
    model.reserve(2)


def test_read_gives_views() -> None:
    cache = make(compress=(4, 2), has_window=True)
    append(cache, 5)
    held = cache.k, cache.v, cache.k_window, cache.v_window, cache.k_cmp, cache.v_cmp
    for read, tensor in zip((*cache.read(5), *cache.read_compressed(1)), held, strict=True):
        assert read is not None
        assert tensor is not None
        assert (read.data_ptr(), read.stride()) == (tensor.data_ptr(), tensor.stride())
        assert read.shape[1] == (1 if tensor.shape[1] == 8 else 5)
    assert make().read(3)[2:] == (None, None)


def test_crop_bounds() -> None:
    cache = make(max_rollback=4)
    append(cache, 12)
    with pytest.raises(ValueError, match='crop to at least 8, or to 0'):
        cache.crop(7)
    with pytest.raises(ValueError, match='length is -1'):
        cache.crop(-1)
    cache.crop(9)
    with pytest.raises(ValueError, match='has held 12 tokens'):
        cache.crop(6)
    append(cache, 1)
    assert cache.max_length == 10
    with pytest.raises(ValueError, match='has held 12 tokens'):
        cache.crop(7)
    cache.crop(8)
    cache.crop(12)
    assert cache.lengths.tolist() == [8, 8]
    with pytest.raises(ValueError, match='length is 7'):
        cache.crop(torch.tensor([8, 7]))
    cache.crop(torch.tensor([8, 0]))
    assert cache.lengths.tolist() == [8, 0]
    cache.crop(0)
    append(cache, 3)
    cache.crop(1)
    assert cache.lengths.tolist() == [1, 1]


def test_a_short_row_has_its_own_limit() -> None:
    cache = make(max_rollback=4)
    append(cache, 12, [12, 6])
    cache.crop(torch.tensor([10, 4]), max_length=10)
    assert cache.lengths.tolist() == [10, 4]
    with pytest.raises(ValueError, match='length is 1, but the cache has held 6'):
        cache.crop(torch.tensor([10, 1]))


def test_per_row_crop_bounds_the_host() -> None:
    cache = make()
    append(cache, 6)
    cache.crop(torch.tensor([3, 4]), max_length=5)
    assert cache.max_length == 5
    cache.crop(torch.tensor([3, 4]))
    assert cache.max_length == 4
    for _ in range(30):
        append(cache, 4)
        cache.crop(cache.lengths - 4)
    assert cache.lengths.tolist() == [3, 4]


@pytest.mark.parametrize('page_size', [None, 8])
def test_crop_refuses_wrong_limits(page_size: int | None) -> None:
    """A limit that is no length, or that rows exceed, is refused, and nothing is cropped."""
    sizes: dict[str, Any] = {'compress_block_size': 4, 'compress_block_sliding_stride': 2, 'selection_block_size': 4}
    layer = SparseAttention(8, 4, 2, 3, num_selected_blocks=4, causal=True, backend='eager', **sizes).eval()
    x = torch.randn(2, 11, 8)
    whole, cache = (layer.init_cache(2, 16, page_size=page_size) for _ in range(2))
    layer(x[:, :10], cache=whole)
    layer(x[:, :10], cache=cache)
    length = torch.tensor([5, 9])
    bounds: list[Any] = [-1, 2.5, 9.0, True, '9', torch.tensor(9)]
    for max_length in bounds:
        with pytest.raises(ValueError, match='but must be an integer of at least 0'):
            cache.crop(length, max_length=max_length)
    with pytest.raises(ValueError, match='max_length is 8, but must be at least 9, the longest row'):
        cache.crop(length, max_length=8)
    with pytest.raises(ValueError, match='max_length is 9, but must be left out where length is an int'):
        cache.crop(9, max_length=9)
    assert layer(x[:, 10:], cache=cache).equal(layer(x[:, 10:], cache=whole))
    for max_length in (9, 11, 20):
        cache.crop(length, max_length=max_length)
        assert cache.lengths.max() == 9 <= cache.max_length <= 11
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize('length', [torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])])
def test_crop_refuses_other_tensors(length: torch.Tensor) -> None:
    with pytest.raises(ValueError, match='length has shape'):
        make().crop(length)


@pytest.mark.parametrize('length', [2.5, True, '2'])
def test_crop_refuses_non_integers(length: Any) -> None:
    cache = make()
    append(cache, 6)
    with pytest.raises(ValueError, match=f'length is {length!r}, but must be an integer of at least 0'):
        cache.crop(length)
    assert cache.max_length == 6


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('batch_size', 0),
        ('max_seq_len', 0),
        ('max_seq_len', True),
        ('kv_heads', 0),
        ('head_dim', 0),
        ('value_dim', 1.5),
        ('max_rollback', -1),
        ('max_rollback', True),
    ],
)
def test_sizes(name: str, value: float) -> None:
    sizes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f'{name} is {value}, but must be an integer of at least'):
        make(**sizes)


@pytest.mark.parametrize('name', ['has_raw_k', 'has_raw_v', 'has_window', 'grows'])
def test_flags(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 'no', but must be True or False"):
        make(2, 16, **{name: 'no'})


def test_sizes_of_blocks() -> None:
    with pytest.raises(ValueError, match='compress_stride is 5, but must be at most compress_block_size, 4'):
        make(compress=(4, 5))


@pytest.mark.parametrize('compress', [8, (8,), (8, 4, 2), '84'])
def test_blocks_are_a_pair(compress: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f'compress is {compress!r}, but must be a pair')):
        make(compress=compress)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int8, torch.bool, torch.complex64, 'float32'])
def test_a_cache_of_no_float(dtype: Any) -> None:
    layer = SparseAttention(8, 4, 2, 3, 2, 2, 2, 2, causal=True, num_init_blocks=0, num_local_blocks=1)
    message = re.escape(f'dtype is {dtype!r}, but must be float64, float32, bfloat16 or float16')
    with pytest.raises(ValueError, match=message):
        make(dtype=dtype)
    for page_size in (None, 4):
        with pytest.raises(ValueError, match=message):
            layer.init_cache(1, 40, dtype=dtype, page_size=page_size)


def test_reorder_refuses() -> None:
    cache = make()
    append(cache, 6, [6, 4])
    index: Any
    for index, message in (
        (torch.tensor([0]), 'index has shape'),
        ([1, 0], 'index is a list, but must be a tensor'),
        (torch.tensor([0, 2]), r'index is \[0, 2\], but must be rows from 0 to 1'),
        (torch.tensor([-1, 0]), r'index is \[-1, 0\], but must be rows from 0 to 1'),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reorder(index)
    assert cache.lengths.tolist() == [6, 4]


def test_nothing_is_kept_that_can_be_derived() -> None:
    plain = make(compress=(4, 2))
    assert [t.shape[1] for t in plain._tensors()] == [16, 16, 8, 8]
    rotated = make(compress=(4, 2), has_raw_k=True, max_rollback=5)
    assert rotated.raw_k is not None
    assert rotated.raw_k.shape[1] == 4 - 1 + 5
    assert rotated.raw_v is None


def test_model_cache_moves_its_layers_together() -> None:
    cache = ModelCache([make(), make()])
    for layer in cache:
        append(layer, 5)
    assert (len(cache), cache.max_length, cache.capacity, cache.batch_size) == (2, 5, 16, 2)
    cache.crop(3)
    assert [layer.lengths.tolist() for layer in cache] == [[3, 3]] * 2
    k = cache[1].read(3)[0].clone()
    cache.reorder(torch.tensor([1, 0]))
    assert cache[1].read(3)[0].equal(k.flip(0))
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(ValueError, match='layers is empty'):
        ModelCache([])


# The layer has blocks of 7 and strides of 3, which match no border of the cache; pages have 12 tokens.
KINDS = {'contiguous': None, 'paged': 12}
SETTINGS = {
    'ring of keys': {},
    'no ring': {'rotary_emb': False},
    'own branches': {'independent_branch_kv': True, 'dim_value_head': 4},
}
DIM, MAX_ROLLBACK = 12, 9
LAYER = {
    'dim': DIM,
    'dim_head': 6,
    'heads': 4,
    'kv_heads': 2,
    'sliding_window_size': 5,
    'compress_block_size': 7,
    'compress_block_sliding_stride': 3,
    'selection_block_size': 6,
    'num_selected_blocks': 4,
    'causal': True,
    'backend': 'eager',
}


def make_layer(setting: str) -> SparseAttention:
    layer = SparseAttention(**LAYER | SETTINGS[setting])  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.eval()  # caches need evaluation mode


@pytest.fixture(params=SETTINGS)
def layer(request: pytest.FixtureRequest) -> SparseAttention:
    return make_layer(request.param)


@pytest.fixture(params=KINDS)
def page_size(request: pytest.FixtureRequest) -> int | None:
    return KINDS[request.param]


def state(cache: LayerCache) -> list[list[torch.Tensor]]:
    """Return the readable content of every row: its tokens, its complete blocks, and its part of the ring."""
    assert cache.compress is not None
    block_size, stride = cache.compress
    rows = []
    for row, (length, peak) in enumerate(zip(cache.lengths.tolist(), cache._peaks.tolist(), strict=True)):
        held = [t[row] for t in cache.read(length) if t is not None]
        held += [t[row] for t in cache.read_compressed(max(0, (length - block_size) // stride + 1))]
        for ring in (cache.raw_k, cache.raw_v):
            if ring is not None:
                held.append(ring[row, torch.arange(max(0, peak - ring.shape[1]), length) % ring.shape[1]])
        rows.append([t.clone() for t in held])
    return rows


def poison(cache: LayerCache) -> None:
    for tensor in cache._tensors():
        tensor.fill_(torch.nan)


def assert_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for row, expected_row in zip(found, expected, strict=True):
        assert all(a.equal(b) for a, b in zip(row, expected_row, strict=True))


def test_a_crop_leaves_no_trace(layer: SparseAttention, page_size: int | None) -> None:
    """Appending and removing up to max_rollback tokens leaves the same bits as never appending them."""
    x, other = torch.randn(2, 40, DIM), torch.randn(2, MAX_ROLLBACK, DIM)
    for start, further in ((1, 9), (6, 1), (11, 4), (12, 9), (20, 8)):
        never, cropped = (layer.init_cache(2, 41, MAX_ROLLBACK, page_size=page_size) for _ in range(2))
        for cache in (never, cropped):
            layer(x[:, :start], cache=cache)
        layer(other[:, :further], cache=cropped)
        cropped.crop(start)
        for step in x[:, start:].split([3, *[1] * 10, 40 - start - 13], 1):
            assert layer(step, cache=cropped).equal(layer(step, cache=never)), (start, further)
        for row, expected in zip(state(cropped), state(never), strict=True):
            # The rings of both end with the same tokens, and hold all that a crop may need.
            assert all(a.equal(b[-len(a) :]) for a, b in zip(row, expected, strict=True) if len(a))


def test_a_crop_per_row_leaves_no_trace(layer: SparseAttention, page_size: int | None) -> None:
    x, other = torch.randn(3, 30, DIM), torch.randn(3, MAX_ROLLBACK, DIM)
    mask = torch.arange(20) < torch.tensor([20, 14, 5])[:, None]
    never, cropped = (layer.init_cache(3, 41, MAX_ROLLBACK, page_size=page_size) for _ in range(2))
    for cache in (never, cropped):
        layer(x[:, :20], mask, cache=cache)
    for _ in range(3):
        layer(other, cache=cropped)
        cropped.crop(torch.tensor([20, 14, 5]), max_length=20)
    for step in x[:, 20:].split([1, 1, 4, 4], 1):
        assert layer(step, cache=cropped).equal(layer(step, cache=never))


def test_beams_right_after_a_crop(layer: SparseAttention, page_size: int | None) -> None:
    cache = layer.init_cache(3, 64, MAX_ROLLBACK, page_size=page_size)
    layer(torch.randn(3, 25, DIM), torch.arange(25) < torch.tensor([25, 11, 18])[:, None], cache=cache)
    cache.crop(torch.tensor([16, 11, 12]))
    before = state(cache)
    index = torch.tensor([2, 0, 2])
    cache.reorder(index)
    assert cache.lengths.tolist() == [12, 16, 12]
    assert_equal(state(cache), [before[row] for row in index])
    with pytest.raises(ValueError, match='has held 18 tokens'):
        cache.crop(torch.tensor([8, 16, 12]))
    # Two rows with one past continue differently.
    more = torch.randn(3, 9, DIM)
    layer(more, cache=cache)
    after = state(cache)
    assert_equal([[t[:12] for t in after[0][:2]]], [[t[:12] for t in after[2][:2]]])
    assert not after[0][0][12:].equal(after[2][0][12:])
    cache.crop(torch.tensor([12, 16, 12]))
    assert layer(more, cache=cache).isfinite().all()
    assert_equal(state(cache), after)


def test_unused_memory_is_not_read(layer: SparseAttention, page_size: int | None) -> None:
    """NaN is in unused memory, behind short rows and in rings too."""
    x = torch.randn(3, 40, DIM)
    mask = torch.arange(20) < torch.tensor([20, 9, 0])[:, None]
    clean, poisoned = (layer.init_cache(3, 48, MAX_ROLLBACK, page_size=page_size) for _ in range(2))
    poison(poisoned)
    for cache in (clean, poisoned):
        layer(x[:, :20], mask, cache=cache)
    for step in x[:, 20:].split([1, 1, 7, 1, 10], 1):
        out = layer(step, cache=poisoned)
        assert out.isfinite().all()
        assert out.equal(layer(step, cache=clean))


def test_a_full_cache_raises_before_it_writes(layer: SparseAttention, page_size: int | None) -> None:
    cache = layer.init_cache(2, 23, page_size=page_size)
    poison(cache)
    x = torch.randn(2, 24, DIM)
    layer(x[:, :20], cache=cache)
    before = [t.clone() for t in (cache.lengths, cache._peaks, *cache._tensors())]
    for num_tokens in (4, 24):
        with pytest.raises(ValueError, match='capacity is 23'):
            layer(x[:, :num_tokens], cache=cache)
    after = (cache.lengths, cache._peaks, *cache._tensors())
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, after, strict=True))
    layer(x[:, 20:23], cache=cache)
    assert cache.lengths.tolist() == [23, 23]
