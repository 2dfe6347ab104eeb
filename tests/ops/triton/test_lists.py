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
def chunk_kernel(lists, found_ptr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):
    pair, slot, first_entry, begin, length = find_chunk(tl.program_id(0), lists, CHUNK, AT_ONCE)
    found_ptr += tl.program_id(0) * 5
    tl.store(found_ptr, pair)
    tl.store(found_ptr + 1, slot)
    tl.store(found_ptr + 2, first_entry)
    tl.store(found_ptr + 3, begin)
    tl.store(found_ptr + 4, length)


@pytest.mark.parametrize('at_once', [False, True])
@pytest.mark.parametrize(
    ('pairs', 'num_slots', 'chunk', 'longest'), [(2, 1, 64, 200), (2, 7, 1, 3), (2, 7, 48, 500), (1, 530, 64, 20)]
)
def test_chunks_of_lists(
    pairs: int, num_slots: int, chunk: int, longest: int, at_once: bool, device: torch.device
) -> None:
    """Every entry is in one chunk of its list, in order, also those that chose nothing. Some lists are empty, and one
    is long.
    """
    lengths = torch.randint(longest, (pairs, num_slots + 1)) * (torch.rand(pairs, num_slots + 1) < 0.7)
    lengths[:, num_slots // 2] = 5 * longest
    num_entries = int(lengths.sum(1).max())
    lengths[:, -1] += num_entries - lengths.sum(1)
    starts = torch.nn.functional.pad(lengths[:, :-1].cumsum(1), (1, 0)).int().contiguous()
    num_programs = count_programs(num_entries, num_slots, chunk)
    found = torch.full((pairs * num_programs, 5), -1, dtype=torch.int32, device=device)
    of_device = starts.to(device)
    lists = Lists(of_device, of_device, num_entries, num_slots, num_programs, 0, pairs, 0)
    launch(chunk_kernel, (pairs * num_programs,), lists, found, CHUNK=chunk, AT_ONCE=at_once, device=found.device)
    chunks: dict[tuple[int, int], list[int]] = {}
    for pair, slot, first_entry, begin, length in found.tolist():
        assert begin == starts[pair, slot]
        assert length == lengths[pair, slot]
        if first_entry < length:
            chunks.setdefault((pair, slot), []).append(first_entry)
    for pair, of_pair in enumerate(lengths.tolist()):
        for slot, length in enumerate(of_pair):
            assert chunks.pop((pair, slot), []) == list(range(0, length, chunk))
    assert not chunks
