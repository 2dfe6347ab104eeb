"""The paged cache has the bits of the contiguous one wherever its pages lie, and writes nothing elsewhere."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import LayerCache, SparseAttention
from native_sparse_attention.inference.cache import PAIRS, TOKENS
from native_sparse_attention.inference.paged_cache import PagedLayerCache
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_cache import DIM, MAX_ROLLBACK, SETTINGS, make_layer

BATCH, CAPACITY, PAGE_SIZE = 3, 60, 12
SPARE = 5  # pages of another owner in every pool


def make_pools(layout: dict, page_size: int, num_pages: int, num_pages_cmp: int) -> dict[str, Tensor]:
    """Return pools filled with NaN. Those of k and v alternate in one tensor, so neither is contiguous."""
    names = [*TOKENS[: 4 if layout['has_window'] else 2], *(PAIRS if layout['compress'] else ())]
    pools = {}
    for name in names:
        is_pair = name in PAIRS
        entries = page_size // layout['compress'][1] if is_pair else page_size
        dim = layout['value_dim' if name.startswith('v') else 'head_dim']
        shape = num_pages_cmp if is_pair else num_pages, 2, entries, layout['kv_heads'], dim
        pools[name] = torch.full(shape, torch.nan)[:, 1]
    return pools


def make_paged(
    layer: SparseAttention | DenseAttention, page_size: int = PAGE_SIZE, full: bool = True
) -> PagedLayerCache:
    """Return a cache with pages in random order, mixed among the rows; `full=False`: tables without pages."""
    layout = layer.init_cache(1, 1).layout
    pages = -(-CAPACITY // page_size)
    needed = BATCH * pages
    pools = make_pools(layout, page_size, needed + SPARE, needed + SPARE + 2)
    tables = [
        torch.randperm(count)[:needed].view(BATCH, pages).int() if full else torch.full((BATCH, pages), -1).int()
        for count in (needed + SPARE, needed + SPARE + 2)
    ]
    cache = PagedLayerCache(
        BATCH,
        CAPACITY,
        page_size=page_size,
        selection_block_size=getattr(layer, 'selection_block_size', 1),
        pools=pools,
        block_table=tables[0],
        block_table_cmp=tables[1] if layout['compress'] else None,
        max_rollback=MAX_ROLLBACK,
        **layout,
    )
    for ring in (cache.raw_k, cache.raw_v):
        if ring is not None:
            ring.fill_(torch.nan)
    return cache


def make_any(setting: str) -> SparseAttention | DenseAttention:
    if setting != 'dense':
        return make_layer(setting)
    return DenseAttention(DIM, dim_head=6, heads=4, kv_heads=2, dim_value_head=5).eval()


@pytest.fixture(params=[*SETTINGS, 'dense'])
def layer(request: pytest.FixtureRequest) -> SparseAttention | DenseAttention:
    return make_any(request.param)


def caches(
    layer: SparseAttention | DenseAttention, page_size: int = PAGE_SIZE, full: bool = True
) -> tuple[LayerCache, PagedLayerCache]:
    return layer.init_cache(BATCH, CAPACITY, MAX_ROLLBACK), make_paged(layer, page_size, full)


def step(layer: torch.nn.Module, pair: tuple[LayerCache, ...], x: Tensor, counts: list[int] | None = None) -> None:
    """Assert that both caches give the same bits, without NaN."""
    mask = None if counts is None else torch.arange(x.shape[1]) < torch.tensor(counts)[:, None]
    expected, found = (layer(x, mask, cache=cache) for cache in pair)
    assert found.isfinite().all()
    assert found.equal(expected)
    assert pair[0].lengths.equal(pair[1].lengths)
    assert pair[0].max_length == pair[1].max_length


def test_prefill_chunks_and_steps(layer: SparseAttention | DenseAttention) -> None:
    x = torch.randn(BATCH, CAPACITY, DIM)
    for sizes in ([CAPACITY], [1] * 30, [20, 1, 1, 5, 12, 1, 20]):
        for page_size in (6, 12, 24):
            pair = caches(layer, page_size=page_size)
            for chunk in x[:, : sum(sizes)].split(sizes, 1):
                step(layer, pair, chunk)


def test_rows_of_different_lengths(layer: SparseAttention | DenseAttention) -> None:
    pair = caches(layer)
    step(layer, pair, torch.randn(BATCH, 25, DIM), [25, 11, 0])
    for _ in range(14):
        step(layer, pair, torch.randn(BATCH, 1, DIM), torch.randint(0, 2, (BATCH,)).tolist())
    step(layer, pair, torch.randn(BATCH, 9, DIM))


def written(cache: PagedLayerCache, name: str) -> Tensor:
    """Return bool `[num_pages, page_size]`: the written entries. An entry is written completely or not at all."""
    finite = getattr(cache, name).isfinite().flatten(2)
    assert finite.all(-1).equal(finite.any(-1))
    return finite.all(-1)


@pytest.mark.parametrize('setting', SETTINGS)
def test_only_real_tokens_and_complete_blocks_are_written(setting: str) -> None:
    layer = make_layer(setting)
    cache = make_paged(layer)
    counts = [0, 0, 0]
    for added in ([19, 6, 0], [1, 1, 0], [0, 1, 1], [6, 13, 9]):
        num_tokens = max(added) + 1
        mask = torch.arange(num_tokens) < torch.tensor(added)[:, None]
        layer(torch.randn(BATCH, num_tokens, DIM), mask, cache=cache)
        counts = [a + b for a, b in zip(counts, added, strict=True)]
        for name in (*TOKENS, *PAIRS):
            pool = getattr(cache, name)
            if pool is None:
                continue
            table, size = (cache.block_table_cmp, 4) if name in PAIRS else (cache.block_table, PAGE_SIZE)
            expected = torch.zeros(pool.shape[:2], dtype=torch.bool)
            assert table is not None
            for row, count in enumerate(counts):
                for entry in range(max(0, (count - 7) // 3 + 1) if name in PAIRS else count):
                    expected[table[row, entry // size], entry % size] = True
            assert written(cache, name).equal(expected), name


class Owner:
    """Allocate pages for rows as they grow, in random order, and free them."""

    def __init__(self, cache: PagedLayerCache) -> None:
        self.cache = cache
        self.free = {name: torch.randperm(getattr(cache, name).shape[0]).tolist() for name in ('k', 'k_cmp')}

    def allot(self, counts: list[int]) -> None:
        """Allocate pages for `counts` more tokens per row; every page of tokens comes with one of compressed pairs."""
        for row, (length, count) in enumerate(zip(self.cache.lengths.tolist(), counts, strict=True)):
            for column in range(-(-(length + count) // PAGE_SIZE)):
                for name, table in (('k', self.cache.block_table), ('k_cmp', self.cache.block_table_cmp)):
                    assert table is not None
                    if table[row, column] < 0:
                        table[row, column] = self.free[name].pop()


@pytest.mark.parametrize('setting', SETTINGS)
def test_tables_grow_in_place(setting: str) -> None:
    layer = make_layer(setting)
    pair = caches(layer, full=False)
    cache = pair[1]
    addresses = [t.data_ptr() for t in (cache.block_table, cache.block_table_cmp) if t is not None]
    owner = Owner(cache)
    for counts in ([11, 5, 0], [1, 1, 1], [1, 0, 0], *[[1, 1, 1]] * 12, [9, 2, 7], [0, 7, 0]):
        owner.allot(counts)
        cache.validate_tables()
        step(layer, pair, torch.randn(BATCH, max(counts), DIM), counts)
    assert addresses == [t.data_ptr() for t in (cache.block_table, cache.block_table_cmp) if t is not None]
    # A finished row is replaced by another one with an empty past.
    for each in pair:
        each.crop(torch.tensor([CAPACITY, 0, CAPACITY]))
    assert cache.block_table is not None
    cache.block_table[1] = -1
    owner.allot([1, 13, 1])
    step(layer, pair, torch.randn(BATCH, 13, DIM), [1, 13, 1])


def test_a_page_that_is_not_there() -> None:
    """Writes to a missing page are dropped; validation reports it beforehand."""
    layer = make_layer('ring of keys')
    cache = make_paged(layer, full=False)
    assert cache.block_table is not None
    assert cache.block_table_cmp is not None
    x = torch.randn(BATCH, PAGE_SIZE, DIM)
    layer(x, cache=cache)
    assert all(not written(cache, name).any() for name in ('k', 'v', *PAIRS))
    cache.reset()
    cache.block_table[:, 0] = torch.tensor([4, 19, 0])
    with pytest.raises(ValueError, match=r'block_table_cmp\[0, 0\] is -1, but must be a page from 0 to 21'):
        cache.validate_tables(PAGE_SIZE)
    cache.validate_tables(6)  # fewer than a block
    cache.block_table_cmp[:, 0] = torch.tensor([3, 2, 1])
    layer(x, cache=cache)
    cache.validate_tables()
    before = written(cache, 'k').sum()
    for page in (-1, 20, 2**31 - 1, -(2**31)):
        cache.block_table[1, 1] = page
        cache.block_table[[0, 2], 1] = torch.tensor([1, 2], dtype=torch.int32)
        with pytest.raises(ValueError, match=rf'block_table\[1, 1\] is {page}, but must be a page from 0 to 19'):
            cache.validate_tables(1)
        layer(x[:, :1], cache=cache)
        assert written(cache, 'k').sum() == before + 2
        cache.crop(PAGE_SIZE)
    with pytest.raises(ValueError, match='num_tokens is -1, but must be an integer of at least 0'):
        cache.validate_tables(-1)
    with pytest.raises(ValueError, match='block_table has 5 pages a row, but must have 6 for row 0'):
        cache.validate_tables(CAPACITY)


def test_a_full_cache_raises_before_it_writes() -> None:
    layer = make_layer('ring of keys')
    cache = make_paged(layer)
    layer(torch.randn(BATCH, CAPACITY - 2, DIM), cache=cache)
    before = [t.clone().nan_to_num(7) for t in (cache.lengths, *cache._tensors())]
    with pytest.raises(ValueError, match='holds up to 58 tokens a row and gets 3 more, but its capacity is 60'):
        layer(torch.randn(BATCH, 3, DIM), cache=cache)
    after = (cache.lengths, *cache._tensors())
    assert all(a.equal(b.nan_to_num(7)) for a, b in zip(before, after, strict=True))
    layer(torch.randn(BATCH, 2, DIM), cache=cache)


def test_crop_and_again(layer: SparseAttention | DenseAttention) -> None:
    pair = caches(layer)
    step(layer, pair, torch.randn(BATCH, 23, DIM), [23, 9, 14])
    for _ in range(4):
        step(layer, pair, torch.randn(BATCH, 5, DIM))
        lengths = pair[0].lengths - torch.tensor([5, 1, 3])
        for cache in pair:
            cache.crop(lengths)
        step(layer, pair, torch.randn(BATCH, 1, DIM))


def test_beams(layer: SparseAttention | DenseAttention) -> None:
    """Rows with one past continue differently: the tables stay, and no page gets a second owner."""
    pair = caches(layer)
    assert pair[1].block_table is not None
    table = pair[1].block_table.clone()
    step(layer, pair, torch.randn(BATCH, 23, DIM), [23, 9, 14])
    for index in ([2, 0, 2], [1, 1, 1], [1, 2, 0]):
        step(layer, pair, torch.randn(BATCH, 4, DIM))
        lengths = pair[0].lengths - 3
        for cache in pair:
            cache.crop(lengths)
            cache.reorder(torch.tensor(index))
        step(layer, pair, torch.randn(BATCH, 1, DIM))
    assert pair[1].block_table.equal(table)


@given(st.data())
def test_any_calls(data: st.DataObject) -> None:
    layer = make_any(data.draw(st.sampled_from([*SETTINGS, 'dense']), 'setting'))
    pair = caches(layer, page_size=data.draw(st.sampled_from([6, 12, 18]), 'page_size'))
    for _ in range(data.draw(st.integers(1, 6), 'calls')):
        room = CAPACITY - pair[0].max_length
        match data.draw(st.sampled_from(['append', 'append', 'append', 'crop', 'reorder', 'reset']), 'call'):
            case 'append' if room:
                num_tokens = data.draw(st.integers(1, min(room, 20)), 'tokens')
                counts = [data.draw(st.integers(0, num_tokens), 'count') for _ in range(BATCH)]
                step(layer, pair, torch.randn(BATCH, num_tokens, DIM), counts)
            case 'crop':
                back = torch.tensor([data.draw(st.integers(0, MAX_ROLLBACK), 'back') for _ in range(BATCH)])
                lengths = torch.maximum(pair[0]._peaks - back, torch.tensor(0))
                for cache in pair:
                    cache.crop(lengths)
            case 'reorder':
                index = torch.tensor([data.draw(st.integers(0, BATCH - 1), 'row') for _ in range(BATCH)])
                for cache in pair:
                    cache.reorder(index)
            case 'reset':
                for cache in pair:
                    cache.reset()
    if pair[0].max_length < CAPACITY:
        step(layer, pair, torch.randn(BATCH, 1, DIM))


@pytest.mark.parametrize('setting', SETTINGS)
def test_the_host_reads_nothing(setting: str) -> None:
    """Tensors have no content, so every read on the host would raise."""
    layer = make_layer(setting).to('meta')
    cache = layer.init_cache(2, 24, page_size=12)
    for num_tokens in (9, 1, 3):
        x = torch.empty(2, num_tokens, DIM, device='meta')
        assert layer(x, x[..., 0] > 0, cache=cache).shape == x.shape
    cache.crop(torch.empty(2, dtype=torch.int32, device='meta'), max_length=12)
    cache.reorder(torch.empty(2, dtype=torch.int64, device='meta'))
    assert cache.max_length == 12


def test_half_types() -> None:
    layer = make_layer('ring of keys')
    whole, paged = (layer.init_cache(2, 30, dtype=torch.bfloat16, page_size=size) for size in (None, 6))
    for chunk in torch.randn(2, 30, DIM).split([17, 1, 12], 1):
        assert layer(chunk, cache=paged).equal(layer(chunk, cache=whole))


@pytest.mark.parametrize('sparse', [True, False])
def test_a_model(sparse: bool) -> None:
    model = Transformer(17, 16, 2, dim_head=8, heads=2, use_sparse_attn=sparse, backend='eager').eval()
    ids = torch.randint(17, (2, 40))
    whole, paged = (model.init_cache(2, 40, page_size=size) for size in (None, 8))
    for chunk in ids.split([21, 1, 1, 8, 9], 1):
        assert model(chunk, cache=paged).equal(model(chunk, cache=whole))
    cache = paged[0]
    assert isinstance(cache, PagedLayerCache)
    assert cache.k.shape == (10, 8, 2, 8)
    assert cache.block_table is not None
    assert cache.block_table.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (cache.page_size, cache.page_size_cmp) == (8, 2 if sparse else None)


def test_one_table_may_serve_both_pools() -> None:
    layer = make_layer('no ring')
    layout = layer.init_cache(1, 1).layout
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    cache = PagedLayerCache(
        2, 20, page_size=12, selection_block_size=6, pools=make_pools(layout, 12, 5, 5), block_table=table, **layout
    )
    assert cache.block_table is table
    assert cache.block_table_cmp is table
    x = torch.randn(2, 20, DIM)
    assert layer(x, cache=cache).equal(layer(x, cache=layer.init_cache(2, 20)))


LAYOUT = {
    'kv_heads': 2,
    'head_dim': 6,
    'value_dim': 6,
    'compress': (7, 3),
    'has_window': False,
}
POOLS = make_pools(LAYOUT, 12, 4, 4)
REFUSED = {
    'page_size is 0, but must be an integer of at least 1': {'page_size': 0},
    'page_size is True, but must be an integer of at least 1': {'page_size': True},
    'selection_block_size is 0, but must be an integer of at least 1': {'selection_block_size': 0},
    'compress_stride is 0, but must be an integer of at least 1': {'compress': (7, 0)},
    'page_size is 16, but must be a multiple of selection_block_size, 6': {'page_size': 16},
    'page_size is 12, but must be a multiple of the compression stride, 5': {'compress': (7, 5)},
    'compress is 8, but must be a pair (block size, stride) or None': {'compress': 8},
    'num_pages is 0, but must be an integer of at least 1': {'num_pages': 0},
    'num_pages is 4, but must be left out where pools are given': {'num_pages': 4},
    'num_pages is 3, but must be at least 4 for 2 rows of 2 pages': {'pools': None, 'num_pages': 3},
    'pools has k, v, but must have k, v, k_cmp, v_cmp': {'pools': {name: POOLS[name] for name in ('k', 'v')}},
    'pools has k, v, k_cmp, v_cmp, but must have k, v, k_window, v_window, k_cmp, v_cmp': {'has_window': True},
    'pools is a list, but must be a mapping of names to tensors': {'pools': [POOLS['k'], POOLS['v']]},
    'v is a list, but must be a tensor': {'pools': POOLS | {'v': [[0.0]]}},
    'block_table is a list, but must be a tensor': {'block_table': [[0, 1], [2, 3]]},
    'block_table_cmp is a list, but must be a tensor': {'block_table_cmp': [[0, 1], [2, 3]]},
    'v has shape (3, 12, 2, 6), but must be [num_pages, 12, 2, 6]': {'pools': POOLS | {'v': POOLS['v'][:3]}},
    'k_cmp has shape (4, 12, 2, 6), but must be [num_pages, 4, 2, 6]': {'pools': POOLS | {'k_cmp': POOLS['k']}},
    'k has shape (0, 12, 2, 6), but must be': {'pools': POOLS | {'k': POOLS['k'][:0]}},
    'v is torch.float16 on cpu, but must be torch.float32 on cpu': {'pools': POOLS | {'v': POOLS['v'].half()}},
    'block_table has shape (2, 1) and dtype torch.int32, but must be int32 [2, n], n at least 2': {
        'block_table': torch.zeros(2, 1, dtype=torch.int32)
    },
    'block_table_cmp has shape (2, 2) and dtype torch.int64': {'block_table_cmp': torch.zeros(2, 2).long()},
    'device is meta, but the pools are on cpu': {'device': 'meta'},
    'block_table is on meta, but must be on cpu': {'block_table': torch.zeros(2, 2).int().to('meta')},
}


@pytest.mark.parametrize('message', REFUSED)
def test_refusals(message: str) -> None:
    arguments = {'page_size': 12, 'selection_block_size': 6, 'pools': POOLS} | LAYOUT
    PagedLayerCache(2, 20, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message)):
        PagedLayerCache(2, 20, **arguments | REFUSED[message])  # type: ignore[arg-type]


def test_refusals_of_the_layer() -> None:
    layer = make_layer('no ring')
    with pytest.raises(ValueError, match='page_size is 8, but must be a multiple of selection_block_size, 6'):
        layer.init_cache(2, 20, page_size=8)
    with pytest.raises(ValueError, match='num_pages is 5, but must be left out without page_size'):
        layer.init_cache(2, 20, num_pages=5)
    with pytest.raises(ValueError, match='batch_size is 0'):
        layer.init_cache(0, 20, page_size=6)
