"""Calls with a cache that raise or are interrupted: lengths are restored, or the torn cache is refused and repaired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import ModelCache
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_cache import DIM, SETTINGS, state
from tests.layer.test_paged_cache import make_any
from tests.layer.test_transformer import KINDS, make_ids, make_model

DEPTH = 3
MASK = torch.arange(40) < torch.tensor([40, 31])[:, None]


class Interrupted(BaseException):
    """Like KeyboardInterrupt, no subclass of `Exception`."""


def interrupt(*args: Any) -> None:
    raise Interrupted


def make(sparse: bool) -> Transformer:
    return make_model(sparse, depth=DEPTH, backend='eager')


def places(model: Transformer) -> dict[str, nn.Module]:
    """Return modules that run before and after the append of the first and of the last layer, and at the end."""
    first, *_, last = model.blocks
    return {
        'first norm': first.attention.norm,
        'first projection': first.attention.combine_heads,
        'first feed-forward': first.feed_forward,
        'last qkv': last.attention.to_qkv,
        'last projection': last.attention.combine_heads,
        'head': model.to_logits,
    }


PLACES = list(places(make(False)))


def assert_same(found: ModelCache, expected: ModelCache) -> None:
    for layer, other in zip(found, expected, strict=True):
        assert layer.lengths.equal(other.lengths)
        assert layer.max_length == other.max_length


def fail(model: Transformer, place: str, call: Callable[[], object]) -> None:
    handle = places(model)[place].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        call()
    handle.remove()


CALLS: dict[str, Callable[[Transformer, ModelCache], object]] = {
    'a token': lambda model, cache: model(make_ids(2, 1), cache=cache),
    'a step': lambda model, cache: DecodeStep(model, cache)(make_ids(2, 1)),
    'some tokens': lambda model, cache: model(make_ids(2, 7), cache=cache, mask=MASK[:, -7:]),
    'more than max_rollback': lambda model, cache: model(make_ids(2, 40), cache=cache, mask=MASK),
    'chunks': lambda model, cache: model.prefill(make_ids(2, 40), cache, chunk_size=13, mask=MASK),
}


@KINDS
@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('held', [0, 21])
def test_an_interrupted_call_leaves_the_cache_as_it_was(sparse: bool, place: str, held: int) -> None:
    model = make(sparse)
    for call in CALLS.values():
        never, failed = (model.init_cache(2, 64, max_rollback=9) for _ in range(2))
        for cache in (never, failed):
            if held:
                model(make_ids(2, held), cache=cache, mask=MASK[:, 40 - held :])
        fail(model, place, lambda call=call, cache=failed: call(model, cache))
        assert_same(failed, never)
        for cache in (never, failed):
            if held:
                cache.crop(torch.tensor([19, 11]))  # the longest rollback that one token leaves
        for count in (1, 12):
            ids = make_ids(2, count, seed=count)
            assert model(ids, cache=failed).equal(model(ids, cache=never))


def test_a_chunk_that_fails_takes_all_chunks_back() -> None:
    model = make(True)
    cache, calls = model.init_cache(1, 64), []
    model(make_ids(1, 5), cache=cache)

    def count(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise Interrupted

    model.blocks[1].feed_forward.register_forward_pre_hook(count)
    with pytest.raises(Interrupted):
        model.prefill(make_ids(1, 50), cache, chunk_size=20)
    assert [layer.lengths.tolist() for layer in cache] == [[5]] * DEPTH
    assert [layer.max_length for layer in cache] == [5] * DEPTH


def tear(model: Transformer, max_rollback: int = 2) -> ModelCache:
    """Return a cache of 11 tokens whose first layers have 8 more, which max_rollback does not allow to remove."""
    cache = model.init_cache(2, 64, max_rollback=max_rollback)
    model(make_ids(2, 11), cache=cache)
    for layer, block in zip(cache[:2], model.blocks, strict=False):
        block(torch.randn(2, 8, 24, dtype=torch.float64), cache=layer)
    return cache


@KINDS
def test_a_torn_cache_is_refused(sparse: bool) -> None:
    model = make(sparse)
    cache, ids = tear(model), make_ids(2, 1)
    message = r'layers 0 to 1 hold up to 19, layer 2 holds up to 11 tokens a row; crop\(11\) repairs it'
    calls = (
        lambda: model(ids, cache=cache),
        lambda: model.prefill(ids, cache),
        lambda: DecodeStep(model, cache)(ids),
        lambda: cache.reserve(1),
        lambda: cache.check_even(),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert [layer.max_length for layer in cache] == [19, 19, 11]
    assert 'torn: layers 0 to 1 hold up to 19, layer 2 holds up to 11' in repr(cache)


@KINDS
@pytest.mark.parametrize('number', [0, 2])
def test_a_crop_by_row_of_one_layer_is_noticed(sparse: bool, number: int) -> None:
    """Where the longest row stays, the host's bounds do not show it."""
    model = make(sparse)
    cache, never = (model.init_cache(2, 64) for _ in range(2))
    for each in (cache, never):
        model(make_ids(2, 11), cache=each)
    cache[number].crop(torch.tensor([11, 8]))
    with pytest.raises(ValueError, match=r'up to 11 after 0 crops by row.*after 1 crops|after 1 crops.*after 0 crops'):
        model(make_ids(2, 1), cache=cache)
    with pytest.raises(ValueError, match='cache is torn by an interrupted call or a crop of one layer'):
        model(make_ids(1, 1), cache=cache.select(torch.tensor([1])))
    cache.crop(11)
    never.crop(torch.tensor([11, 8]))
    assert [layer.lengths.tolist() for layer in cache] == [[11, 8]] * DEPTH
    assert model(make_ids(2, 3), cache=cache).equal(model(make_ids(2, 3), cache=never))
    for layer in cache:  # by row, the same in each layer
        layer.crop(torch.tensor([13, 9]))
    never.crop(torch.tensor([13, 9]))
    assert model(make_ids(2, 1), cache=cache).equal(model(make_ids(2, 1), cache=never))


def test_a_call_that_cannot_be_taken_back_tears_the_cache() -> None:
    """Rings hold 2 tokens more than a block, and the call has 8 tokens: too few to copy rings, too many to remove."""
    model = make(True)
    cache = model.init_cache(2, 64, max_rollback=2)
    model(make_ids(2, 11), cache=cache)
    fail(model, 'last qkv', lambda: model(make_ids(2, 8), cache=cache))
    with pytest.raises(ValueError, match=r'cache is torn .* crop\(0\) where max_rollback does not reach that far'):
        model(make_ids(2, 1), cache=cache)
    before = [layer.lengths.tolist() for layer in cache]
    with pytest.raises(ValueError, match='but the cache has held 19 tokens and max_rollback is 2'):
        cache.crop(11)
    assert [layer.lengths.tolist() for layer in cache] == before, 'all layers or none'
    cache.crop(0)
    assert model(make_ids(2, 4), cache=cache).equal(model(make_ids(2, 4), cache=model.init_cache(2, 64, 2)))


@KINDS
@pytest.mark.parametrize(
    ('length', 'expected'),
    [(11, [11, 11]), (64, [11, 11]), (8, [8, 8]), (torch.tensor([11, 7]), [11, 7]), (torch.tensor([30, 9]), [11, 9])],
)
def test_a_crop_repairs(sparse: bool, length: Any, expected: list[int]) -> None:
    model = make(sparse)
    cache, never = tear(model, max_rollback=20), model.init_cache(2, 64, max_rollback=20)
    model(make_ids(2, 11), cache=never)
    for each in (cache, never):
        each.crop(length)
    assert [layer.lengths.tolist() for layer in cache] == [expected] * DEPTH
    for count in (1, 6):
        assert model(make_ids(2, count), cache=cache).equal(model(make_ids(2, count), cache=never))


@KINDS
def test_a_repair_to_0_leaves_no_trace(sparse: bool) -> None:
    """The layers are empty, so a reset of one of them changes nothing."""
    model = make(sparse)
    cache = tear(model)
    cache[2].crop(torch.tensor([11, 10]))
    cache.crop(0)
    assert [layer.row_crops for layer in cache] == [0] * DEPTH
    cache[0].reset()
    assert model(make_ids(2, 4), cache=cache).equal(model(make_ids(2, 4), cache=model.init_cache(2, 64, 2)))


def test_a_repair_checks_its_arguments() -> None:
    cache = tear(make(False))
    with pytest.raises(ValueError, match='length has shape'):
        cache.crop(torch.tensor([3]))
    with pytest.raises(ValueError, match='must be left out where length is an int'):
        cache.crop(3, max_length=4)
    with pytest.raises(ValueError, match='length is -1'):
        cache.crop(-1)
    cache.reset()
    cache.check_even()


@KINDS
def test_room_in_all_layers_before_the_first_write(sparse: bool) -> None:
    model = make(sparse)
    cache = ModelCache(
        [block.attention.init_cache(2, size) for block, size in zip(model.blocks, (64, 64, 12), strict=True)]
    )
    assert cache.capacity == 12
    model(make_ids(2, 10), cache=cache)
    before = [t.clone() for layer in cache for t in (layer.lengths, layer._peaks, *layer._tensors())]
    calls = (
        lambda: model(make_ids(2, 3), cache=cache),
        lambda: model.prefill(make_ids(2, 3), cache, chunk_size=1),
        lambda: cache.reserve(3),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r'cache\[2\] holds up to 10 tokens .* its capacity is 12'):
            call()
    after = [t for layer in cache for t in (layer.lengths, layer._peaks, *layer._tensors())]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    model(make_ids(2, 2), cache=cache)


def test_nothing_grows_where_a_layer_has_no_room() -> None:
    model = make(False)
    _, growing = model(make_ids(1, 3), return_cache=True)
    mixed = ModelCache([growing[0], growing[1], model.init_cache(1, 70)[2]])
    mixed[2].advance(3)
    with pytest.raises(ValueError, match=r'cache\[2\] holds up to 3 tokens a row and gets 100 more'):
        mixed.reserve(100)
    assert growing[0].capacity == 64
    growing.reserve(100)
    assert growing.capacity == 128


@pytest.mark.parametrize('setting', [*SETTINGS, 'dense'])
@pytest.mark.parametrize('num_tokens', [1, 7, 30])
def test_a_layer_by_itself(setting: str, num_tokens: int) -> None:
    """An error after the append: in the op, and in the projection of heads."""
    layer = make_any(setting)
    x = torch.randn(2, 50, DIM)
    mask = torch.arange(num_tokens) < torch.tensor([num_tokens, num_tokens - 1])[:, None]
    never, failed = (layer.init_cache(2, 60, max_rollback=31) for _ in range(2))
    for cache in (never, failed):
        layer(x[:, :12], cache=cache)
    handle = layer.combine_heads.register_forward_pre_hook(interrupt)
    for padding in (None, mask):
        with pytest.raises(Interrupted):
            layer(x[:, :num_tokens], padding, cache=failed)
    handle.remove()
    assert failed.lengths.equal(never.lengths)
    assert failed.max_length == never.max_length
    for step in x[:, 12:].split([1, 7, 30], 1):
        assert layer(step, cache=failed).equal(layer(step, cache=never))
    if setting != 'dense':
        assert all(
            a.equal(b)
            for row, other in zip(state(failed), state(never), strict=True)
            for a, b in zip(row, other, strict=True)
        )


def test_an_op_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from native_sparse_attention import functional

    layer = make_any('ring of keys')
    cache = layer.init_cache(2, 60)
    layer(torch.randn(2, 12, DIM), cache=cache)
    monkeypatch.setattr(functional, 'nsa', interrupt_with)
    with pytest.raises(Interrupted):
        layer(torch.randn(2, 40, DIM), cache=cache)
    assert (cache.lengths.tolist(), cache.max_length, cache._peaks.tolist()) == ([12, 12], 12, [12, 12])


def interrupt_with(*args: Any, **options: Any) -> Tensor:
    raise Interrupted


@KINDS
def test_the_checks_read_nothing_from_the_device(sparse: bool) -> None:
    """Tensors have no content, so every read would raise."""
    model = make(sparse).to('meta')
    cache = model.init_cache(2, 64)
    for count in (9, 1, 40, 1):
        assert model(torch.empty(2, count, dtype=torch.int64, device='meta'), cache=cache).shape[1] == count
    cache.crop(49)
    assert 'lengths=up to 49' in repr(cache)
    with pytest.raises(ValueError, match='max_rollback is 32'):
        cache.crop(3)


def test_layers_of_a_model_cache() -> None:
    model = make(False)
    one, two = model.init_cache(1, 8), model.init_cache(2, 8)
    with pytest.raises(ValueError, match=r'layers\[1\] has 2 rows, but must have 1 as layers\[0\]'):
        ModelCache([one[0], two[1]])
    layers: Any = [one[0], one]
    with pytest.raises(ValueError, match=r'layers\[1\] is a ModelCache, but must be a LayerCache'):
        ModelCache(layers)
