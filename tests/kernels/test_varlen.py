"""The tiles that kernels locate, against a list built in Python."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences, num_compressed_blocks
from native_sparse_attention.ops._triton.varlen import (
    count_blocks,
    find_tile,
    flatten,
    last_dim_contiguous,
    load_extent,
    load_num_keys,
    load_position,
    make_layout,
    num_tiles,
    unflatten,
)
from tests.support.harness import fewer_examples
from tests.support.problems import Extents, cumulative, drawn_extents, row_integers

TILE = 4


@triton.jit
def _tiles_kernel(out_ptr, place, TILE: tl.constexpr):
    """Store for every tile: sequence, row, first token on the axis, tokens, keys, position of the first token."""
    index = tl.program_id(0)
    sequence, first = find_tile(index, place.cu_seqlens, place.seqlen_q, place.num_sequences, TILE)
    row, start, length = load_extent(place.cu_seqlens, sequence, place.seqlen_q, place.num_sequences)
    num_keys = load_num_keys(place, sequence)
    position = load_position(place, sequence, length, num_keys)
    out_ptr += index * 6
    tl.store(out_ptr, sequence)
    tl.store(out_ptr + 1, row)
    tl.store(out_ptr + 2, start + first)
    tl.store(out_ptr + 3, tl.minimum(length - first, TILE))
    tl.store(out_ptr + 4, num_keys)
    tl.store(out_ptr + 5, position + first)


@triton.jit
def _count_kernel(out_ptr, num_tokens, block_size, stride):
    tl.store(out_ptr, count_blocks(num_tokens, block_size, stride))


def sequences_of(extents: Extents, device: torch.device) -> Sequences:
    where = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in extents.where.items()}
    if 'cu_seqlens' in where:
        where.setdefault('cu_seqlens_k', where['cu_seqlens'])
    return Sequences(extents.batch, extents.seqlen_q, extents.seqlen_k, device, **where)


def visited_tiles(sequences: Sequences) -> list[list[int]]:
    """Return what a kernel locates in the tiles that have tokens."""
    place = make_layout(sequences)
    tiles = num_tiles(place, sequences.seqlen_q, TILE)
    out = torch.full((max(tiles, 1), 6), -1, dtype=torch.int32, device=sequences.device)
    kernel: Any = _tiles_kernel
    if tiles:
        kernel[(tiles,)](out, place, TILE=TILE)
    return [tile for tile in out.tolist() if tile[3] > 0]


@pytest.mark.quick
@fewer_examples(2)
@given(drawn_extents())
def test_tiles_cover_every_query_once(extents: Extents) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    sequences = sequences_of(extents, device)
    layout = sequences.layout()
    seen = torch.zeros(extents.batch, extents.seqlen_q, dtype=torch.int32)
    for sequence, row, first, length, num_keys, position in visited_tiles(sequences):
        tokens = slice(first, first + length)
        seen[row, tokens] += 1
        covered = layout.covered[row, tokens]
        assert covered.all() or not covered.any()
        assert layout.key_len[row, tokens].eq(num_keys).all()
        if covered.any():
            assert layout.position[row, tokens].tolist() == list(range(position, position + length))
            assert sequence < make_layout(sequences).num_sequences
    assert seen.eq(1).all()


def test_a_sequence_begins_a_tile(device: torch.device) -> None:
    where = {'cu_seqlens': cumulative([5, 0, 1, 9])}
    tiles = visited_tiles(sequences_of(Extents(1, 17, 17, where, [5, 0, 1, 9]), device))
    found = [(sequence, first, length) for sequence, _, first, length, _, _ in tiles]
    assert found == [(0, 0, 4), (0, 4, 1), (2, 5, 1), (3, 6, 4), (3, 10, 4), (3, 14, 1), (4, 15, 2)]


@pytest.mark.quick
@pytest.mark.parametrize(
    'borders', [[7, 3, 9], [0, 100, 3], [-5, 4, 8], [2**31 - 1, 0, 5], [-(2**31), 2, 9], [9, 9, 9], [3, 5, 9]]
)
def test_borders_of_any_content_stay_inside(borders: list[int], device: torch.device) -> None:
    where = {'cu_seqlens': row_integers(borders)}
    for _, _, first, length, num_keys, _ in visited_tiles(sequences_of(Extents(1, 9, 9, where, []), device)):
        assert first >= 0
        assert first + length <= 9
        assert 0 <= num_keys <= 9


@pytest.mark.parametrize('offset', [2**40, -(2**40), 2**31 - 1])
@pytest.mark.parametrize('per_row', [True, False])
def test_offsets_fit_int32(per_row: bool, offset: int, device: torch.device) -> None:
    where = {'q_offset': torch.tensor([offset]) if per_row else offset}
    ((*_, position),) = visited_tiles(sequences_of(Extents(1, 3, 3, where, [3]), device))
    assert position == (2**30 if offset > 0 else -(2**30))


@pytest.mark.parametrize(('block_size', 'stride'), [(1, 1), (4, 2), (5, 5), (32, 16)])
def test_blocks_are_counted_as_in_geometry(block_size: int, stride: int, device: torch.device) -> None:
    kernel: Any = _count_kernel
    for tokens in (0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + stride):
        out = torch.zeros(1, dtype=torch.int32, device=device)
        kernel[(1,)](out, tokens, block_size, stride)
        assert out.item() == num_compressed_blocks(tokens, block_size, stride)


@given(drawn_extents())
def test_sequences_travel_flat(extents: Extents) -> None:
    sequences = sequences_of(extents, torch.device('cpu'))
    q = torch.empty(extents.batch, extents.seqlen_q, 1, 1)
    assert unflatten(q, flatten(sequences)) == sequences


def test_the_last_dimension_is_copied_only_where_it_must_be() -> None:
    contiguous, spread, narrow = torch.zeros(3, 4), torch.zeros(4, 3).T, torch.zeros(3, 2)[:, :1]
    results = last_dim_contiguous(contiguous, spread, narrow, None)
    assert results[0] is contiguous
    assert results[1].stride(-1) == 1
    assert results[2] is narrow
    assert results[3] is None
