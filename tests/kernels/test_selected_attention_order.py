"""Order of the blocks in the kernels by query."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.selected_attention.triton.loops import block_loop
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import CONCURRENT_QUERIES, find_full_blocks
from tests.support.harness import assert_close_to_eager, assert_same_bits, make_grads, place, run_triton
from tests.support.problems import Extents, Heads, packed
from tests.support.selected_attention_problems import INT32, make_indices, make_inputs, with_design

HEADS = Heads(2, 1, 16, 16)
TOGETHER = CONCURRENT_QUERIES.value
BLOCK = 16
attend = with_design('query')


@triton.jit
def slots_kernel(choice_ptr, found_ptr, readable, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    slots = tl.arange(0, BLOCK_S)
    selection = tl.load(choice_ptr + slots, mask=slots < SIZE, other=-1)
    found = find_full_blocks(selection, readable, SIZE, BLOCK_SIZE, BLOCK_S)
    for i in tl.static_range(4):
        tl.store(found_ptr + i, found[i])


@pytest.mark.quick
@pytest.mark.parametrize(
    ('row', 'readable', 'expected'),
    [
        # Blocks 0 to 9 and the first 8 keys of block 10, from block 2 on.
        ([0, 3, 5, 9, 10, -1], 168, (4, 1, 4, 8)),
        ([0, 3, 5, 9, -1, -1], 168, (4, 1, 6, 0)),
        # 72 blocks, half way; 96, at the beginning.
        ([0, 20, 40, 71], 3 * TOGETHER // 2, (4, 2, 4, 0)),
        ([0, 50, 95], 2 * TOGETHER, (3, 0, 3, 0)),
        # 95, from block 93 on.
        ([0, 93, 94, -1], 2 * TOGETHER - 16, (3, 1, 4, 0)),
        # Behind all of them: from the first one on again.
        ([0, 1, 2, -1], 2 * TOGETHER - 16, (3, 3, 4, 0)),
        ([90, 2, 80, -7, 94], 2 * TOGETHER - 16, (5, 4, 5, 0)),
        ([-1, -1], 2 * TOGETHER - 16, (0, 0, 2, 0)),
    ],
)
def test_plan_of_the_loops(row: list[int], readable: int, expected: tuple[int, ...], device: torch.device) -> None:
    found = torch.full((4,), -1, dtype=torch.int32, device=device)
    indices = torch.tensor(row, dtype=torch.int32, device=device)
    slots_kernel[(1,)](indices, found, readable, SIZE=len(row), BLOCK_SIZE=BLOCK, BLOCK_S=8)  # pyright: ignore[reportArgumentType]
    assert tuple(found.tolist()) == expected


def make_problem(
    extents: Extents, device: torch.device, block_size: int = BLOCK, *, scaled: bool = False
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Any]]:
    indices = make_indices(extents, 1, 6, block_size)
    tensors = make_inputs(extents, HEADS, device, indices, dtype=torch.float16, scaled=scaled)
    return tensors, make_grads(extents, HEADS, device), {'block_size': block_size, **place(extents.where, device)}


def at_offset(seqlen: int, offset: int) -> Extents:
    return Extents(1, seqlen, offset + seqlen, {'q_offset': offset}, [offset + seqlen])


def of_tokens(result: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    return {
        'out0': result['out0'][:, tokens],
        'out1': result['out1'][:, :, tokens],
        'grad of q': result['grad of q'][:, tokens],
    }


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let few queries start at different blocks, in the interpreter; compiled kernels keep the constant."""
    if not is_interpreted():
        return TOGETHER
    monkeypatch.setattr(block_loop, 'CONCURRENT_QUERIES', tl.constexpr(7))
    return 7


@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize(('offset', 'block_size'), [(TOGETHER // 2, BLOCK), (TOGETHER - 8, BLOCK), (1400, 128)])
def test_queries_start_anywhere(offset: int, block_size: int, scaled: bool, device: torch.device) -> None:
    """Blocks of one key tile and of two."""
    tensors, grads, settings = make_problem(at_offset(12, offset), device, block_size, scaled=scaled)
    assert_close_to_eager(attend, tensors, grads, **settings)


def test_the_order_follows_the_position(soon: int, device: torch.device) -> None:
    """Chunked calls give the same bits."""
    offset = TOGETHER - 8
    tensors, grads, settings = make_problem(at_offset(12, offset), device)
    assert len({(offset + i) // BLOCK * ((offset + i) % soon) // soon for i in range(1, 13)}) > 1
    whole = run_triton(attend, tensors, grads, **settings)
    for chunk in (slice(0, 5), slice(5, 12)):
        part = {name: t[:, chunk] if name in ('q', 'block_indices') else t for name, t in tensors.items()}
        grads_of_part = [grads[0][:, chunk], grads[1][:, :, chunk]]
        found = run_triton(attend, part, grads_of_part, **settings | {'q_offset': offset + chunk.start})
        assert_same_bits(of_tokens(found, slice(None)), of_tokens(whole, chunk))


@pytest.mark.usefixtures('soon')
def test_packed_sequences_keep_their_order(device: torch.device) -> None:
    tensors, grads, settings = make_problem(packed([37, 90]), device)
    together = run_triton(attend, tensors, grads, **settings)
    last = slice(37, 127)
    alone = {name: t[:, last] for name, t in tensors.items()}
    found = run_triton(attend, alone, [grads[0][:, last], grads[1][:, :, last]], block_size=BLOCK)
    assert_same_bits(of_tokens(found, slice(None)), of_tokens(together, last))


@pytest.mark.usefixtures('soon')
def test_invalid_indices_change_no_bit(device: torch.device) -> None:
    """Invalid indices may have any value and any place in the row."""
    tensors, grads, settings = make_problem(at_offset(7, 200), device)
    results = []
    for row in ([1, 5, 9, 11, -1, -1], [-1, 1, 5, INT32.max, 9, 11], [1, INT32.min, 5, 10**6, 9, 11]):
        rows = torch.tensor(row, dtype=torch.int32, device=device).expand(1, 7, 1, 6).contiguous()
        results.append(run_triton(attend, tensors | {'block_indices': rows}, grads, **settings))
    for result in results[1:]:
        assert_same_bits(result, results[0])
