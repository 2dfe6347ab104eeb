"""The inverse index of blocks against its definition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._triton import inverse_index
from native_sparse_attention.ops._triton.inverse_index import (
    SHORT_TILE,
    TILES,
    InverseIndex,
    Tile,
    group_pairs,
    make_inverse_index,
    num_block_slots,
)
from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.tiles import sort_tile
from native_sparse_attention.ops._triton.varlen import make_layout
from tests.support.harness import make_sequences, place
from tests.support.problems import Extents, cumulative, drawn_extents, packed, row_integers

INT32 = torch.iinfo(torch.int32)
JUNK = (-1, -2, INT32.min, INT32.max, 10**6)
CsrRows = dict[int, list[int]]
SMALL_TILE = Tile(7, 4, 2)
ways = pytest.mark.parametrize('tile', [None, SMALL_TILE], ids=['sorted as a whole', 'counted'])


def make_indices(extents: Extents, index_heads: int, num_selected: int, block_size: int, dtype: torch.dtype) -> Tensor:
    shape = (extents.batch, extents.seqlen_q, index_heads, num_selected)
    indices = torch.randint(-1, extents.seqlen_k // block_size + 2, shape)
    junk = torch.tensor(JUNK)[torch.randint(0, len(JUNK), shape)]
    return torch.where(torch.rand(shape) < 0.2, junk, indices).to(dtype)


def entries_of_pair(
    rows: Tensor, row: int, sequences: Sequences, block_size: int, causal: bool, unique: bool, tokens: range
) -> CsrRows:
    """Return the CSR rows of one pair from indices `[T, R, n]`, by definition."""
    layout = sequences.layout()
    lists: CsrRows = defaultdict(list)
    for t, of_token in zip(tokens, rows[tokens.start : tokens.stop].tolist(), strict=True):
        position, num_keys = int(layout.position[row, t]), int(layout.key_len[row, t])
        first_slot = 0
        if sequences.cu_seqlens is not None and sequences.cu_seqlens_k is not None:
            sequence = sum(end <= t for end in sequences.cu_seqlens[1:].tolist())
            if sequence < len(sequences.cu_seqlens_k) - 1:
                first_slot = int(sequences.cu_seqlens_k[sequence]) // block_size + sequence
        for r, indices in enumerate(of_token):
            for i, block in enumerate(indices):
                first = block * block_size
                if not 0 <= first < num_keys or (causal and first > position) or (unique and block in indices[:i]):
                    continue
                lists[first_slot + block].append(((t - tokens.start) * len(of_token) + r) * len(indices) + i)
    return dict(lists)


@contextmanager
def sorted_by(tile: Tile | None) -> Iterator[None]:
    """Sort by a counting sort with tiles of this size, or all keys as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inverse_index, 'MAX_SHORT_ENTRIES', 0)
        if tile is None:
            patch.setattr(inverse_index, 'MAX_COUNTS', 0)
            patch.delattr(inverse_index, 'index_sorted_tiles')
        else:
            sort_keys = inverse_index._sort_keys
            patch.setattr(inverse_index, 'MIN_COUNTED', 1)
            patch.setattr(inverse_index, 'TILES', (tile,))
            patch.setattr(inverse_index, '_sort_keys', lambda keys, *rest: sort_keys(keys[:, :0], *rest))
        yield


def check(
    extents: Extents,
    device: torch.device,
    *,
    kv_heads: int = 2,
    repeats: int = 1,
    num_selected: int = 4,
    block_size: int = 3,
    causal: bool = True,
    unique: bool = True,
    dtype: torch.dtype = torch.int32,
    tokens: range | None = None,
    tile: Tile | None = None,
) -> None:
    sequences = make_sequences(extents, device)
    indices = place(make_indices(extents, kv_heads * repeats, num_selected, block_size, dtype), device)
    layout = make_layout(sequences)
    num_slots = num_block_slots(layout, block_size)
    with sorted_by(tile):
        groups = group_pairs(indices, kv_heads, num_slots)
    assert [pair for group in groups for pair in group] == list(range(extents.batch * kv_heads))
    sizes = {'kv_heads': kv_heads, 'block_size': block_size}
    asked = range(extents.seqlen_q) if tokens is None else tokens
    for pairs in groups:
        with sorted_by(tile):
            index = make_inverse_index(indices, layout, pairs, **sizes, causal=causal, unique=unique, tokens=tokens)
        assert index.entries.shape == (len(pairs), len(asked) * repeats * num_selected)
        assert index.starts.shape == (len(pairs), num_slots + 1)
        assert index.entries.dtype == index.starts.dtype == torch.int32
        for pair, entries, starts in zip(pairs, index.entries, index.starts.tolist(), strict=True):
            row, head = divmod(pair, kv_heads)
            own = indices[row, :, head * repeats : (head + 1) * repeats]
            found = {s: entries[starts[s] : starts[s + 1]].tolist() for s in range(num_slots)}
            found = {slot: entries for slot, entries in found.items() if entries}
            assert found == entries_of_pair(own, row, sequences, block_size, causal, unique, asked)
            # Every entry occurs once, so none of them points outside the tensors.
            assert entries.sort().values.tolist() == list(range(len(entries)))


@given(
    drawn_extents(max_seqlen=16),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.tuples(st.floats(0, 1), st.floats(0, 1)) | st.none(),
    st.sampled_from([None, Tile(3, 4, 0), SMALL_TILE]),
)
def test_drawn_problems(
    extents: Extents,
    kv_heads: int,
    repeats: int,
    num_selected: int,
    block_size: int,
    causal: bool,
    unique: bool,
    dtype: torch.dtype,
    part: tuple[float, float] | None,
    tile: Tile | None,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    sizes = {'kv_heads': kv_heads, 'repeats': repeats, 'num_selected': num_selected, 'block_size': block_size}
    tokens = None if part is None else range(*sorted(round(share * extents.seqlen_q) for share in part))
    check(extents, device, **sizes, causal=causal, unique=unique, dtype=dtype, tokens=tokens, tile=tile)


@pytest.mark.quick
@ways
@pytest.mark.parametrize('unique', [True, False])
@pytest.mark.parametrize(
    'extents',
    [
        Extents(1, 40, 40, {}, [40]),
        Extents(
            3, 17, 40, {'q_offset': row_integers([5, -9, 30]), 'seqlens_k': row_integers([40, 0, 33])}, [40, 0, 33]
        ),
        packed([0, 0, 17, 1, 20, 0], uncovered=9),
        Extents(
            1,
            60,
            90,
            {'cu_seqlens': cumulative([0, 1, 30, 20]), 'cu_seqlens_k': cumulative([40, 30, 0, 15])},
            [40, 30, 0, 15],
        ),
    ],
    ids=['tiles', 'rows', 'packed', 'packed, other keys'],
)
def test_tiles_of_tokens(extents: Extents, unique: bool, tile: Tile | None, device: torch.device) -> None:
    check(extents, device, kv_heads=1, repeats=3, unique=unique, num_selected=9, tile=tile)


@pytest.mark.parametrize('tile', [SHORT_TILE, *TILES], ids=lambda tile: str(2**tile.log_size))
def test_tiles_that_are_launched(tile: Tile, device: torch.device) -> None:
    seqlen = 2**tile.log_size // 16 + 5
    check(Extents(1, seqlen, seqlen, {}, [seqlen]), device, kv_heads=1, num_selected=13, tile=tile)


@pytest.mark.parametrize('tokens', [range(17), range(40, 71), range(81, 93), range(20, 20)], ids=str)
@ways
@pytest.mark.parametrize(
    'extents', [Extents(2, 93, 93, {}, [93] * 2), packed([0, 41, 0, 31, 12], uncovered=9)], ids=['whole', 'packed']
)
def test_tokens_of_a_range(extents: Extents, tile: Tile | None, tokens: range, device: torch.device) -> None:
    check(extents, device, kv_heads=1, repeats=2, num_selected=5, tokens=tokens, tile=tile)


@ways
@pytest.mark.parametrize('most', [150, 17], ids=['groups of pairs', 'parts of a pair'])
def test_pairs_in_groups(most: int, tile: Tile | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_index, 'MAX_ENTRIES', most)
    check(Extents(3, 12, 12, {}, [12] * 3), device, tile=tile)


@pytest.mark.parametrize(
    'extents', [Extents(3, 12, 12, {}, [12] * 3), packed([0, 41, 0, 31, 12], uncovered=9)], ids=['whole', 'packed']
)
def test_long_entries_of_pairs(extents: Extents, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs with many entries, which are sorted together with those of other pairs."""
    monkeypatch.setattr(inverse_index, 'MAX_ROW', 0)
    check(extents, device, tile=None)


def make_lists(indices: Tensor, sequences: Sequences, pairs: range, tile: Tile | None) -> InverseIndex:
    layout, kv_heads = make_layout(sequences), indices.shape[2]
    with sorted_by(tile):
        return make_inverse_index(indices, layout, pairs, kv_heads=kv_heads, block_size=3, causal=True, unique=True)


@ways
def test_a_pair_does_not_depend_on_its_group(tile: Tile | None, device: torch.device) -> None:
    extents = Extents(2, 20, 20, {}, [20, 20])
    indices = make_indices(extents, 2, 4, 3, torch.int32).to(device)
    sequences = make_sequences(extents, device)
    together = make_lists(indices, sequences, range(4), tile)
    for pair in range(4):
        alone = make_lists(indices, sequences, range(pair, pair + 1), tile)
        assert alone.entries[0].equal(together.entries[pair])
        assert alone.starts[0].equal(together.starts[pair])


@ways
@pytest.mark.parametrize(
    'borders', [[0, 15, 5, 20], [0, 3, 500, INT32.max], [INT32.min, -5, 3, 20], [9, 9, 10, 12], [20, 4, 4, 0]], ids=str
)
def test_junk_in_borders_stays_inside_the_lists(borders: list[int], tile: Tile | None, device: torch.device) -> None:
    extents = Extents(1, 20, 20, {}, [20])
    indices = make_indices(extents, 1, 4, 3, torch.int32).to(device)
    cu_seqlens = row_integers(borders).to(device)
    index = make_lists(indices, Sequences(1, 20, 20, device, None, None, cu_seqlens, cu_seqlens), range(1), tile)
    assert index.entries[0].sort().values.tolist() == list(range(80))
    assert (index.starts.diff() >= 0).all()
    assert index.starts.min() == 0
    assert index.starts.max() <= 80


@pytest.mark.quick
@pytest.mark.parametrize(
    ('num_rows', 'num_selected', 'num_slots', 'log_size'),
    [
        (2**15, 16, 512, 10),
        (2**17, 16, 2048, 11),
        (2**20, 16, 2**14, 12),
        (2**22, 16, 2**16, None),  # a quarter of these tokens at a time would be counted
        (2**21, 64, 512, 10),
        (2**22, 64, 512, 11),
        (2**15, 3000, 512, 12),
        (2**15, 5000, 512, None),
        (2**9, 16, 2**18, None),
        (2**8, 16, 4, None),
        (0, 16, 4, None),
        (2**8, 0, 4, None),
        (2**14, 16, 512, 8),
        (2**14, 17, 512, 10),
        (2**14, 16, 513, 10),
        (2**10, 256, 4, 8),
        (2**9, 257, 4, 10),
    ],
)
def test_selection_of_tiles(num_rows: int, num_selected: int, num_slots: int, log_size: int | None) -> None:
    tile = inverse_index._choose_tile(4, num_rows, num_selected, num_slots)
    assert (None if tile is None else tile.log_size) == log_size


@pytest.mark.parametrize('seqlen', [2**9, 2**12, 2**15, 2**18, 2**20])
@pytest.mark.parametrize('num_selected', [1, 13, 16, 33])
def test_workspace_of_a_group(seqlen: int, num_selected: int) -> None:
    """Keys, entries and counts of a group of several pairs, of all tokens or of a part of them."""
    indices = torch.empty(1, device='meta').expand(8, seqlen, 64, num_selected)
    num_slots = seqlen // 64
    pairs = len(group_pairs(indices, 64, num_slots)[0])
    for tokens in (seqlen, seqlen // 3, 1):
        tile = inverse_index._choose_tile(pairs, tokens, num_selected, num_slots)
        if tile is not None and pairs > 1:
            counts = inverse_index._num_counts(tile, tokens, num_selected, num_slots)
            assert pairs * 4 * (2 * tokens * num_selected + counts) <= 2**29


@triton.jit
def sort_kernel(keys_ptr, LOG_SIZE: tl.constexpr, ROTATION: tl.constexpr):
    places = tl.arange(0, 2**LOG_SIZE)
    tl.store(keys_ptr + places, sort_tile(tl.load(keys_ptr + places), LOG_SIZE, ROTATION))


@pytest.mark.parametrize(('log_size', 'rotation'), [(1, 0), (4, 0), (4, 1), (5, 2), (5, 4)])
def test_sort_of_a_tile(log_size: int, rotation: int, device: torch.device) -> None:
    keys = torch.randint(2**30, (2**log_size,), dtype=torch.int32, device=device)
    keys[:2] = torch.tensor([2**30 - 1, 0])
    expected = keys.sort().values
    launch(sort_kernel, (1,), keys, LOG_SIZE=log_size, ROTATION=rotation, device=device)
    assert keys.equal(expected)
