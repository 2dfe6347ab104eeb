"""Chunks of the CSR index from blocks to queries."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    BlockToQuery,
    count_programs,
    find_chunk,
)


@triton.jit
def chunk_kernel(csr, indices_ptr, found_ptr, CHUNK: tl.constexpr, SCAN: tl.constexpr):
    index = tl.load(indices_ptr + tl.program_id(0))
    pair, slot, first_entry, begin, length = find_chunk(index, csr, CHUNK, SCAN)
    found_ptr += tl.program_id(0) * 5
    tl.store(found_ptr, pair)
    tl.store(found_ptr + 1, slot)
    tl.store(found_ptr + 2, first_entry)
    tl.store(found_ptr + 3, begin)
    tl.store(found_ptr + 4, length)


def find(csr: BlockToQuery, indices: Tensor, chunk: int, scan: bool) -> list[list[int]]:
    """Return pair, slot, first entry, begin and length of each chunk."""
    indices = indices.to(csr.starts.device)
    found = torch.full((len(indices), 5), -1, dtype=torch.int32, device=indices.device)
    launch(chunk_kernel, (len(indices),), csr, indices, found, CHUNK=chunk, SCAN=scan, device=found.device)
    return found.tolist()


@pytest.mark.quick
@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize(
    ('pairs', 'num_slots', 'chunk', 'longest'), [(2, 1, 64, 200), (2, 7, 1, 3), (2, 7, 48, 500), (1, 530, 64, 20)]
)
def test_chunks_of_csr_rows(
    pairs: int, num_slots: int, chunk: int, longest: int, scan: bool, device: torch.device
) -> None:
    """Every entry is in one chunk of its slot, in order, entries without a block included. Some slots are empty, and
    one is long.
    """
    lengths = torch.randint(longest, (pairs, num_slots + 1)) * (torch.rand(pairs, num_slots + 1) < 0.7)
    lengths[:, num_slots // 2] = 5 * longest
    num_entries = int(lengths.sum(1).max())
    lengths[:, -1] += num_entries - lengths.sum(1)
    starts = torch.nn.functional.pad(lengths[:, :-1].cumsum(1), (1, 0)).int().contiguous()
    num_programs = count_programs(num_entries, num_slots, chunk)
    of_device = starts.to(device)
    csr = BlockToQuery(of_device, of_device, num_entries, num_slots, num_programs, 0, pairs, 0)
    indices = torch.arange(pairs * num_programs, dtype=torch.int32)
    chunks: dict[tuple[int, int], list[int]] = {}
    for pair, slot, first_entry, begin, length in find(csr, indices, chunk, scan):
        assert begin == starts[pair, slot]
        assert length == lengths[pair, slot]
        if first_entry < length:
            chunks.setdefault((pair, slot), []).append(first_entry)
    for pair, of_pair in enumerate(lengths.tolist()):
        for slot, length in enumerate(of_pair):
            assert chunks.pop((pair, slot), []) == list(range(0, length, chunk))
    assert not chunks


@pytest.mark.parametrize('scan', [False, True])
def test_some_chunks_of_many_csr_rows(scan: bool, device: torch.device) -> None:
    """More slots than two scans cover."""
    num_slots, chunk = 2**18 + 3, 8
    lengths = torch.randint(20, (num_slots,)) * (torch.rand(num_slots) < 0.3)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    num_entries = int(starts[-1])
    num_programs = count_programs(num_entries, num_slots, chunk)
    of_device = starts[None].to(device)
    csr = BlockToQuery(of_device, of_device, num_entries, num_slots, num_programs, 0, 1, 0)
    firsts = starts // chunk + torch.arange(num_slots + 1)  # the first chunk of each CSR row
    picked = torch.randint(num_slots, (20,))
    indices = torch.cat([firsts[picked], firsts[picked + 1] - 1, torch.randint(num_programs, (20,))]).int()
    slots = torch.searchsorted(firsts, indices, right=True) - 1
    for (_, slot, first_entry, begin, _), expected, index in zip(
        find(csr, indices, chunk, scan), slots.tolist(), indices.tolist(), strict=True
    ):
        assert (slot, begin) == (expected, starts[expected])
        assert first_entry == (index - firsts[expected]) * chunk
