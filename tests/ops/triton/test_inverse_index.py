"""Block indices turned round against their definition."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.geometry import Sequences
from native_sparse_attention.ops._triton import inverse_index
from native_sparse_attention.ops._triton.inverse_index import group_pairs, make_inverse_index, num_block_slots
from native_sparse_attention.ops._triton.placement import make_placement
from tests.ops.triton.harness import place
from tests.problems import Extents, cumulative, drawn_extents, packed, row_integers

INT32 = torch.iinfo(torch.int32)
JUNK = (-1, -2, INT32.min, INT32.max, 10**6)
Lists = dict[int, list[int]]


def make_indices(extents: Extents, choosers: int, num_selected: int, block_size: int, dtype: torch.dtype) -> Tensor:
    shape = (extents.batch, extents.seqlen_q, choosers, num_selected)
    indices = torch.randint(-1, extents.seqlen_k // block_size + 2, shape)
    junk = torch.tensor(JUNK)[torch.randint(0, len(JUNK), shape)]
    return torch.where(torch.rand(shape) < 0.2, junk, indices).to(dtype)


def make_sequences(extents: Extents, device: torch.device) -> Sequences:
    where = place(extents.where, device)
    cu_seqlens = where.get('cu_seqlens')
    borders = (cu_seqlens, where.get('cu_seqlens_k', cu_seqlens))
    sizes = (extents.batch, extents.seqlen_q, extents.seqlen_k)
    return Sequences(*sizes, device, where.get('q_offset'), where.get('seqlens_k'), *borders)


def lists_of_pair(
    rows: Tensor, row: int, sequences: Sequences, block_size: int, causal: bool, unique: bool, tokens: range
) -> Lists:
    """By definition, for the rows of indices `[T, R, n]` of one pair."""
    layout = sequences.layout()
    lists: Lists = defaultdict(list)
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
) -> None:
    sequences = make_sequences(extents, device)
    indices = place(make_indices(extents, kv_heads * repeats, num_selected, block_size, dtype), device)
    placement = make_placement(sequences)
    num_slots = num_block_slots(placement, block_size)
    groups = group_pairs(indices, kv_heads, num_slots)
    assert [pair for group in groups for pair in group] == list(range(extents.batch * kv_heads))
    sizes = {'kv_heads': kv_heads, 'block_size': block_size}
    asked = range(extents.seqlen_q) if tokens is None else tokens
    for pairs in groups:
        index = make_inverse_index(indices, placement, pairs, **sizes, causal=causal, unique=unique, tokens=tokens)
        assert index.entries.shape == (len(pairs), len(asked) * repeats * num_selected)
        assert index.starts.shape == (len(pairs), num_slots + 1)
        assert index.entries.dtype == index.starts.dtype == torch.int32
        for pair, entries, starts in zip(pairs, index.entries, index.starts.tolist(), strict=True):
            row, head = divmod(pair, kv_heads)
            own = indices[row, :, head * repeats : (head + 1) * repeats]
            found = {s: entries[starts[s] : starts[s + 1]].tolist() for s in range(num_slots)}
            found = {slot: entries for slot, entries in found.items() if entries}
            assert found == lists_of_pair(own, row, sequences, block_size, causal, unique, asked)
            # Every entry stands somewhere once, so that none of them leads out of memory.
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
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    sizes = {'kv_heads': kv_heads, 'repeats': repeats, 'num_selected': num_selected, 'block_size': block_size}
    tokens = None if part is None else range(*sorted(round(share * extents.seqlen_q) for share in part))
    check(extents, device, **sizes, causal=causal, unique=unique, dtype=dtype, tokens=tokens)


@pytest.mark.parametrize('unique', [True, False])
@pytest.mark.parametrize(
    'extents',
    [
        Extents(2, 300, 300, {}, [300, 300]),
        Extents(
            3, 17, 40, {'q_offset': row_integers([5, -9, 30]), 'seqlens_k': row_integers([40, 0, 33])}, [40, 0, 33]
        ),
        packed([0, 0, 17, 1, 200, 0], uncovered=9),
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
def test_tiles_of_tokens(extents: Extents, unique: bool, device: torch.device) -> None:
    check(extents, device, repeats=2, unique=unique, num_selected=9)


@pytest.mark.parametrize('tokens', [range(37), range(100, 211), range(216, 236), range(50, 50)], ids=str)
@pytest.mark.parametrize(
    'extents', [Extents(2, 236, 236, {}, [236] * 2), packed([0, 101, 0, 109, 17], uncovered=9)], ids=['whole', 'packed']
)
def test_tokens_of_a_range(extents: Extents, tokens: range, device: torch.device) -> None:
    check(extents, device, repeats=2, num_selected=9, tokens=tokens)


@pytest.mark.parametrize('most', [150, 17], ids=['groups of pairs', 'parts of a pair'])
def test_pairs_in_groups(most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_index, 'MAX_ENTRIES', most)
    check(Extents(3, 12, 12, {}, [12] * 3), device)


def test_a_pair_does_not_depend_on_its_group(device: torch.device) -> None:
    extents = Extents(2, 20, 20, {}, [20, 20])
    indices = make_indices(extents, 2, 4, 3, torch.int32).to(device)
    placement = make_placement(make_sequences(extents, device))
    together = make_inverse_index(indices, placement, range(4), kv_heads=2, block_size=3, causal=True, unique=True)
    for pair in range(4):
        alone = make_inverse_index(
            indices, placement, range(pair, pair + 1), kv_heads=2, block_size=3, causal=True, unique=True
        )
        assert alone.entries[0].equal(together.entries[pair])
        assert alone.starts[0].equal(together.starts[pair])


def test_junk_in_borders_stays_inside_the_lists(device: torch.device) -> None:
    extents = Extents(1, 20, 20, {}, [20])
    indices = make_indices(extents, 1, 4, 3, torch.int32).to(device)
    for borders in ([0, 15, 5, 20], [0, 3, 500, INT32.max], [INT32.min, -5, 3, 20], [9, 9, 10, 12]):
        cu_seqlens = row_integers(borders).to(device)
        sequences = Sequences(1, 20, 20, device, None, None, cu_seqlens, cu_seqlens)
        index = make_inverse_index(
            indices, make_placement(sequences), range(1), kv_heads=1, block_size=3, causal=True, unique=True
        )
        assert index.entries[0].sort().values.tolist() == list(range(80))
        assert (index.starts.diff() >= 0).all()
        assert index.starts.min() == 0
        assert index.starts.max() <= 80
