"""Block unions and their flags against the definition, and the results of tiles that take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops._triton.varlen import make_layout
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.index import block_union
from native_sparse_attention.ops.selected_attention.triton.index.block_union import BlockUnion, build_unions
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    is_junk,
    make_grads,
    make_sequences,
    place,
    poisoned_allocations,
    run_triton,
)
from tests.support.problems import Extents, Heads, cumulative, drawn_extents, packed, row_integers, whole
from tests.support.selected_attention_problems import (
    make_indices,
    make_inputs,
    mixed,  # noqa: F401, every test takes it
)

HEADS = Heads(12, 1, 16, 16)
# Flags of large keys and values, which these tests do not use.
NOT_FOUND = torch.zeros(1, 1, 1, dtype=torch.int8)


def tiles_by_definition(sequences: Sequences, block_t: int) -> dict[int, list[tuple[int, int]]]:
    """Return batch rows and tokens of every query tile, by tile index."""
    tiles: dict[int, list[tuple[int, int]]] = {}
    if sequences.cu_seqlens is None:
        per_row = -(-sequences.seqlen_q // block_t)
        for row in range(sequences.batch):
            for token in range(sequences.seqlen_q):
                tiles.setdefault(row * per_row + token // block_t, []).append((row, token))
        return tiles
    starts = sequences.cu_seqlens.tolist()
    for sequence, (start, stop) in enumerate(zip(starts, [*starts[1:], sequences.seqlen_q], strict=True)):
        for token in range(start, stop):
            tile = start // block_t + sequence + (token - start) // block_t
            tiles.setdefault(tile, []).append((0, token))
    return tiles


def tile_before(
    tile: int, tiles: dict[int, list[tuple[int, int]]], sequences: Sequences
) -> list[tuple[int, int]] | None:
    """Return the queries of the previous tile of the sequence, whose selections decide, or None."""
    row, token = tiles[tile][0]
    is_first = token == 0 if sequences.cu_seqlens is None else token in sequences.cu_seqlens.tolist()
    if is_first:
        return None
    assert tiles[tile - 1][-1] == (row, token - 1)
    return tiles[tile - 1]


def flag_by_definition(
    indices: Tensor,
    queries: list[tuple[int, int]] | None,
    sequences: Sequences,
    block_size: int,
    causal: bool,
    percent: int,
) -> int:
    """indices: `[B, T, n]` of one index head."""
    if queries is None:
        return 0
    chosen = [
        {block for block in indices[row, token].tolist() if 0 <= block * block_size <= last}
        for row, token, last in last_keys(queries, sequences, causal)
    ]
    return int(100 * len(set[int]().union(*chosen)) <= percent * sum(map(len, chosen)))


def last_keys(queries: list[tuple[int, int]], sequences: Sequences, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield row and token of each query, and the last key that it may read."""
    layout = sequences.layout()
    for row, token in queries:
        position, num_keys = int(layout.position[row, token]), int(layout.key_len[row, token])
        yield row, token, min(num_keys - 1, position) if causal else num_keys - 1


def assert_union(
    union: BlockUnion,
    tile: int,
    index_head: int,
    indices: Tensor,
    queries: list[tuple[int, int]],
    sequences: Sequences,
    block_size: int,
    causal: bool,
) -> None:
    """indices: `[B, T, n]` of one index head."""
    expected: dict[int, int] = {}
    whole = 2**30
    for bit, (row, token, last) in enumerate(last_keys(queries, sequences, causal)):
        for block in set(indices[row, token].tolist()):
            if 0 <= block * block_size <= last:
                expected[block] = expected.get(block, 0) | 1 << bit
        whole = min(whole, (last + 1) // block_size)
    num_blocks, num_whole = union.counts[tile, index_head, :2].tolist()
    blocks = union.blocks[tile, index_head, :num_blocks].tolist()
    query_bits = union.query_bits[tile, index_head, : num_blocks + 1].diff().tolist()
    assert (blocks, [bits % 2**64 for bits in query_bits]) == (
        sorted(expected),
        [expected[b] for b in sorted(expected)],
    )
    assert num_whole == sum(block < whole for block in expected)


def assert_flags(
    extents: Extents,
    device: torch.device,
    *,
    indices: Tensor | None = None,
    num_selected: int = 3,
    block_size: int = 3,
    block_t: int = 4,
    causal: bool = True,
    percent: int = 55,
    index_heads: int = 2,
) -> set[int]:
    """Return the flags of all tiles."""
    if indices is None:
        indices = make_indices(extents, index_heads, num_selected, block_size)
    sequences = make_sequences(extents, device)
    with poisoned_allocations():
        placement, nothing_found = make_layout(sequences), NOT_FOUND.to(device)
        union = build_unions(place(indices, device), placement, block_size, causal, block_t, percent, nothing_found)
    found = union.flags
    cpu = make_sequences(extents, torch.device('cpu'))
    tiles = tiles_by_definition(cpu, block_t)
    for tile, queries in tiles.items():
        for index_head in range(index_heads):
            assert_union(union, tile, index_head, indices[:, :, index_head], queries, cpu, block_size, causal)
    expected = {
        (tile, index_head): flag_by_definition(
            indices[:, :, index_head], tile_before(tile, tiles, cpu), cpu, block_size, causal, percent
        )
        for tile in tiles
        for index_head in range(index_heads)
    }
    assert {key: int(found[key]) for key in expected} == expected
    untouched = torch.ones(found.shape, dtype=torch.bool)
    for key in expected:
        untouched[key] = False
    assert is_junk(found.cpu()[untouched]).all()
    return set(expected.values())


EXTENTS = {
    'whole': whole(22, batch=2),
    'offset': Extents(2, 10, 40, {'q_offset': 21}, [40, 40]),
    'negative offset': Extents(1, 9, 20, {'q_offset': -4}, [20]),
    'row offsets': Extents(3, 6, 30, {'q_offset': row_integers([5, -2, 40])}, [30] * 3),
    'lengths': Extents(3, 9, 30, {'seqlens_k': row_integers([30, 9, 0])}, [30, 9, 0]),
    'packed': packed([0, 0, 7, 1, 12, 0], uncovered=5),
    'packed, other keys': Extents(
        1,
        14,
        50,
        {'cu_seqlens': cumulative([0, 5, 1, 6, 0]), 'cu_seqlens_k': cumulative([7, 13, 0, 20, 4])},
        [7, 13, 0, 20, 4],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)
def test_flags_wherever_queries_stand(extents: Extents, causal: bool, device: torch.device) -> None:
    assert assert_flags(extents, device, block_size=4, causal=causal, percent=65) == {0, 1}


@given(
    drawn_extents(max_seqlen=12),
    st.integers(1, 7),
    st.integers(1, 6),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.sampled_from([0, 30, 55, 80, 100]),
)
def test_random_flags(
    extents: Extents, block_size: int, num_selected: int, block_t: int, causal: bool, percent: int
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    sizes: dict[str, Any] = {'block_size': block_size, 'num_selected': num_selected, 'block_t': block_t}
    assert_flags(extents, device, **sizes, causal=causal, percent=percent)


@pytest.mark.skipif(not is_interpreted(), reason='gigabytes of memory that nothing touches')
def test_indices_far_apart() -> None:
    """The indices of one tile's queries are 2 ** 31 elements apart."""
    extents, stride = Extents(1, 5, 60, {'q_offset': 55}, [60]), 2**31 // 3 + 16
    indices = make_shared_selection(extents)
    memory = torch.empty(5 * stride, dtype=torch.int32)
    rows = memory.as_strided(indices.shape, (0, stride, 4, 1)).copy_(indices)
    place_of = make_layout(make_sequences(extents, torch.device('cpu')))
    expected = build_unions(indices, place_of, 4, True, 4, 60, NOT_FOUND).flags
    found = build_unions(rows, place_of, 4, True, 4, 60, NOT_FOUND).flags
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_threshold_of_the_union(dtype: torch.dtype, device: torch.device) -> None:
    """A union of 11 of 20 blocks, and of one more; repeated, future and invalid indices do not count."""
    rows = torch.full((1, 12, 1, 9), -1, dtype=dtype)
    junk = torch.tensor([2**31 - 1, -(2**31), 14], dtype=dtype)
    for tile, last in ((0, 8), (4, 11)):
        for t, blocks in enumerate(([0, 1, 2, 3, 4], [4, 3, 5, 6, 7], [7, 8, 9, 10, 6], [0, 2, 4, 6, last])):
            rows[0, tile + t, 0, :5] = torch.tensor(blocks, dtype=dtype)
            rows[0, tile + t, 0, 5] = rows[0, tile + t, 0, 1]
        rows[0, tile + 1, 0, 6:9] = junk
    extents = Extents(1, 12, 60, {'q_offset': 48}, [60])
    assert assert_flags(extents, device, indices=rows, index_heads=1, block_size=4) == {0, 1}


@pytest.mark.parametrize('num_selected', [16, 64])
def test_long_rows_and_tall_tiles(num_selected: int, device: torch.device) -> None:
    extents = Extents(1, 19, 300, {'q_offset': 200}, [300])
    indices = torch.randint(0, 90, (1, 19, 1, num_selected)).int()
    indices[:, :8] = indices[:, :1]
    for block_t in (2, 8):
        sizes: dict[str, Any] = {'index_heads': 1, 'block_size': 3, 'block_t': block_t}
        assert assert_flags(extents, device, indices=indices, **sizes) == {0, 1}


def make_shared_selection(extents: Extents, index_heads: int = 1, num_selected: int = 4) -> Tensor:
    """Return indices of 12 blocks: the first 2 of every 4 queries select the same ones, the others any."""
    indices = torch.rand(extents.batch, extents.seqlen_q, index_heads, 12).argsort(-1)[..., :num_selected].int()
    same = torch.arange(extents.seqlen_q) % 4 < 2
    indices[:, same] = indices[:, :1].clone()
    return indices


@pytest.mark.quick
@pytest.mark.parametrize('percent', [-1, 55, 100])
@pytest.mark.parametrize('group', [12, 16])
def test_no_some_and_all_tiles_take_the_union(
    group: int, percent: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', {'forward': percent, 'backward': percent})
    extents, heads = Extents(1, 9, 30, {'q_offset': 21}, [30]), Heads(2 * group, 2, 16, 24)
    indices = make_shared_selection(extents, 2)
    flags = assert_flags(extents, device, indices=indices, block_size=2, block_t=2, percent=percent)
    assert flags == ({0} if percent == -1 else {0, 1})  # the first tile of a sequence is 0
    tensors, grads = make_inputs(extents, heads, device, indices, scaled=True), make_grads(extents, heads, device)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=2, q_offset=21)


@pytest.mark.parametrize(('rows', 'rows_of_others'), [(16, 32), (32, 16)])
def test_a_group_of_several_tiles_per_query(
    rows: int, rows_of_others: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel by query stores gradients of factors per head tile, the kernel by union in one. rows: of a tile for
    groups of 17 to 32 heads.
    """
    table = plan.settings.DQ
    for name, block_m in (('DQ', rows_of_others), ('DQ_32', rows), ('UNION_DQ', 64)):
        monkeypatch.setattr(plan.settings, name, {key: row._replace(block_m=block_m) for key, row in table.items()})
    extents, heads = Extents(1, 5, 26, {'q_offset': 21}, [26]), Heads(20, 1, 16, 16)
    indices = make_shared_selection(extents)
    assert assert_flags(extents, device, indices=indices, block_size=2, block_t=2, index_heads=1) == {0, 1}
    tensors, grads = make_inputs(extents, heads, device, indices, scaled=True), make_grads(extents, heads, device)
    assert_close_to_eager(selected_attention, tensors, grads, block_size=2, q_offset=21)


def test_other_rows_and_later_queries_change_nothing(device: torch.device) -> None:
    """The selections of later queries change no bit, even within the tile."""
    extents = Extents(2, 8, 29, {'q_offset': 21}, [29, 29])
    indices = make_shared_selection(extents, num_selected=3)
    sizes: dict[str, Any] = {
        'block_size': 2,
        'block_t': 2,
        'index_heads': 1,
        'percent': plan.MAX_UNION_PERCENT['forward'],
    }
    assert assert_flags(extents, device, indices=indices, **sizes) == {0, 1}
    tensors, grads = make_inputs(extents, HEADS, device, indices, scaled=True), make_grads(extents, HEADS, device)
    settings: dict[str, Any] = {'block_size': 2, 'q_offset': 21}
    expected = run_triton(selected_attention, tensors, grads, **settings)
    assert_same_bits(run_triton(selected_attention, tensors, grads, **settings), expected)
    for row in range(2):
        own = slice(row, row + 1)
        own_tensors, own_grads = {name: t[own] for name, t in tensors.items()}, [grad[own] for grad in grads]
        alone = run_triton(selected_attention, own_tensors, own_grads, **settings)
        assert_same_bits({name: t[own] for name, t in expected.items()}, alone)
    for cut in (1, 4, 7):  # within a tile, or between two
        others = torch.arange(8, device=device) >= cut
        changed = dict(tensors, block_indices=tensors['block_indices'].clone())
        changed['block_indices'][:, others] = place(make_indices(extents, 1, 3, 2), device)[:, others]
        result = run_triton(selected_attention, changed, grads, **settings)
        own_lse = [t['out1'][:, :, ~others] for t in (result, expected)]
        assert torch.equal(*own_lse)
        for name in ('out0', 'grad of q', 'grad of block_scale'):
            assert torch.equal(result[name][:, ~others], expected[name][:, ~others]), name


def test_both_designs_agree_where_a_tile_may_take_either(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has the bits of a call in which all tiles take the union, or none does, as its flag says."""
    borders = {'cu_seqlens': cumulative([6, 0, 5]), 'cu_seqlens_k': cumulative([26, 5, 25])}
    extents = Extents(1, 13, 60, borders, [26, 5, 25])
    indices = make_shared_selection(extents, num_selected=3)
    assert assert_flags(extents, device, indices=indices, block_size=2, block_t=2, index_heads=1) == {0, 1}
    tensors, grads = make_inputs(extents, HEADS, device, indices), make_grads(extents, HEADS, device)
    settings: dict[str, Any] = {'block_size': 2, **place(extents.where, device)}
    results = {}
    for percent in (-1, 55, 100):
        monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', {'forward': percent, 'backward': percent})
        results[percent] = run_triton(selected_attention, tensors, grads, **settings)
    sequences = make_sequences(extents, torch.device('cpu'))
    tiles = tiles_by_definition(sequences, 2)
    for tile, queries in tiles.items():
        before = tile_before(tile, tiles, sequences)
        flag = flag_by_definition(indices[:, :, 0], before, sequences, 2, True, 55)
        tokens = [token for _, token in queries]
        expected = results[100 if flag else -1]
        for name in ('out0', 'grad of q'):
            assert torch.equal(results[55][name][:, tokens], expected[name][:, tokens]), name
        assert torch.equal(results[55]['out1'][..., tokens], expected['out1'][..., tokens])


@pytest.mark.parametrize(
    'extents', [whole(12, batch=2), packed([0, 0, 7, 1, 6, 0], uncovered=3)], ids=['rows', 'packed']
)
def test_unions_in_ranges_of_tiles(extents: Extents, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unions that are built in ranges of tiles give the same bits. The flag of a range's first tile comes from the
    range before.
    """
    indices = make_shared_selection(extents, 2)
    assert assert_flags(extents, device, indices=indices, block_size=2, block_t=2) == {0, 1}
    heads = Heads(24, 2, 16, 16)
    tensors, grads = make_inputs(extents, heads, device, indices), make_grads(extents, heads, device)
    settings: dict[str, Any] = {'block_size': 2, **place(extents.where, device)}
    expected = run_triton(selected_attention, tensors, grads, **settings)
    ranges = []

    def build(*args: Any, tiles: range, **settings: Any) -> block_union.BlockUnion:
        ranges.append(tiles)
        return build_unions(*args, tiles=tiles, **settings)

    monkeypatch.setattr(plan, 'build_unions', build)
    monkeypatch.setattr(block_union, 'MAX_INDICES', 3 * 2 * 8)  # of three tiles of two index heads
    assert_same_bits(run_triton(selected_attention, tensors, grads, **settings), expected)
    assert len(ranges) > 4
    assert all(len(tiles) <= 3 for tiles in ranges)


def test_flags_of_each_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query tiles of the forward and the backward kernel may differ in size, and so do their flags."""
    heights = []

    def build(*args: Any, **settings: Any) -> block_union.BlockUnion:
        heights.append(args[4])
        return build_unions(*args, **settings)

    monkeypatch.setattr(plan, 'build_unions', build)
    table = {key: row._replace(block_m=64) for key, row in plan.settings.UNION_FORWARD.items()}
    monkeypatch.setattr(plan.settings, 'UNION_FORWARD', table)
    extents = Extents(1, 5, 26, {'q_offset': 21}, [26])
    tensors = make_inputs(extents, HEADS, device, make_shared_selection(extents))
    settings: dict[str, Any] = {'block_size': 2, 'q_offset': 21}
    assert_close_to_eager(selected_attention, tensors, make_grads(extents, HEADS, device), **settings)
    assert heights == [4, 2]
