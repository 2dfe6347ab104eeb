"""How the lists of those who chose a block are cut into chunks."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops.selected_attention.triton.lists import Lists, count_programs, find_chunk


@triton.jit
def chunk_kernel(lists, found_ptr, CHUNK: tl.constexpr):
    pair, slot, number, first, begin, num_entries, length = find_chunk(tl.program_id(0), lists, CHUNK)
    found_ptr += tl.program_id(0) * 7
    tl.store(found_ptr, pair)
    tl.store(found_ptr + 1, slot)
    tl.store(found_ptr + 2, number)
    tl.store(found_ptr + 3, first)
    tl.store(found_ptr + 4, begin)
    tl.store(found_ptr + 5, num_entries)
    tl.store(found_ptr + 6, length)


@pytest.mark.parametrize(
    ('num_slots', 'chunk', 'longest'), [(1, 64, 200), (7, 1, 3), (7, 48, 500), (512, 64, 90), (1200, 64, 20)]
)
def test_chunks_of_lists(num_slots: int, chunk: int, longest: int, device: torch.device) -> None:
    """Every entry is in one chunk of its list, in order, also those that chose nothing; chunks of a list are as long as
    each other, but for whole tiles. Some lists are empty, and one is long.
    """
    lengths = torch.randint(longest, (2, num_slots + 1)) * (torch.rand(2, num_slots + 1) < 0.7)
    lengths[:, num_slots // 2] = 5 * longest
    num_entries = int(lengths.sum(1).max())
    lengths[:, -1] += num_entries - lengths.sum(1)
    starts = torch.nn.functional.pad(lengths[:, :-1].cumsum(1), (1, 0)).int().contiguous().to(device)
    num_programs = count_programs(num_entries, num_slots, chunk)
    found = torch.full((2 * num_programs, 7), -1, dtype=torch.int32, device=device)
    lists = Lists(starts, starts, num_entries, num_slots, num_programs, 0, 2, 0)
    launch(chunk_kernel, (2 * num_programs,), lists, found, CHUNK=chunk, device=device)
    chunks: dict[tuple[int, int], list[list[int]]] = {}
    for pair, slot, number, first, begin, size, length in found.tolist():
        assert (begin, length) == (starts[pair, slot], lengths[pair, slot])
        if size > 0:
            chunks.setdefault((pair, slot), []).append([number, first, size])
    for pair, of_pair in enumerate(lengths.tolist()):
        for slot, length in enumerate(of_pair):
            of_list = chunks.pop((pair, slot), [])
            assert len(of_list) == -(-length // chunk)
            end, most = int(starts[pair, slot]), -(-length // max(len(of_list), 1)) + 31
            for place, (number, first, size) in enumerate(of_list):
                assert (number, first) == (place, end)
                assert size <= min(chunk, most)
                assert size == of_list[0][2] or place == len(of_list) - 1
                end += size
            assert end == starts[pair, slot] + length
    assert not chunks
