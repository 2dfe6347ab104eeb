"""The cache by itself: what it refuses, what it keeps, and that it never moves."""

from __future__ import annotations

import pytest
import torch

from native_sparse_attention.cache import LayerCache, ModelCache

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
    k, _ = append(growing, 3)
    append(growing, 6)
    assert growing.capacity == 16
    assert growing.k[:, :3].equal(k)
    assert growing.k_cmp is not None
    assert growing.k_cmp.shape[1] == 8


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
    with pytest.raises(ValueError, match='max_length is -1'):
        cache.crop(torch.tensor([3, 4]), max_length=-1)
    for _ in range(30):
        append(cache, 4)
        cache.crop(cache.lengths - 4)
    assert cache.lengths.tolist() == [3, 4]


@pytest.mark.parametrize('length', [torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])])
def test_crop_refuses_other_tensors(length: torch.Tensor) -> None:
    with pytest.raises(ValueError, match='length has shape'):
        make().crop(length)


@pytest.mark.parametrize(('name', 'value'), [('batch_size', 0), ('max_seq_len', 0), ('max_rollback', -1)])
def test_sizes(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f'{name} is {value}'):
        make(**{name: value})


def test_reorder_refuses() -> None:
    with pytest.raises(ValueError, match='index has shape'):
        make().reorder(torch.tensor([0]))


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
    k = cache[1].k.clone()
    cache.reorder(torch.tensor([1, 0]))
    assert cache[1].k.equal(k.flip(0))
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(ValueError, match='layers is empty'):
        ModelCache([])
