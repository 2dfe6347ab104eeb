"""In which order a query of a program of its own goes through its blocks."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.selected_attention.triton import op
from native_sparse_attention.ops.selected_attention.triton.choice import QUERIES_TOGETHER, find_whole_blocks
from tests.ops.triton.harness import assert_close_to_eager, assert_same_bits, make_grads, run_triton
from tests.ops.triton.selected_attention_problems import make_indices, make_inputs
from tests.problems import Extents, Heads

HEADS = Heads(2, 1, 16, 16)
TOGETHER = QUERIES_TOGETHER.value
BLOCK = 16


@pytest.fixture(autouse=True)
def per_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, 'choose_design', lambda *_, **__: 'query')


@triton.jit
def slots_kernel(choice_ptr, found_ptr, readable, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr):
    slots = tl.arange(0, BLOCK_S)
    choice = tl.load(choice_ptr + slots, mask=slots < SIZE, other=-1)
    found = find_whole_blocks(choice, readable, SIZE, BLOCK_SIZE, BLOCK_S)
    for i in tl.static_range(4):
        tl.store(found_ptr + i, found[i])


@pytest.mark.parametrize(
    ('choice', 'readable', 'expected'),
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
def test_where_a_query_begins(
    choice: list[int], readable: int, expected: tuple[int, ...], device: torch.device
) -> None:
    found = torch.full((4,), -1, dtype=torch.int32, device=device)
    choices = torch.tensor(choice, dtype=torch.int32, device=device)
    slots_kernel[(1,)](choices, found, readable, SIZE=len(choice), BLOCK_SIZE=BLOCK, BLOCK_S=8)  # pyright: ignore[reportArgumentType]
    assert tuple(found.tolist()) == expected


def make_problem(
    seqlen: int, offset: int, device: torch.device, *, scaled: bool = False
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Any]]:
    extents = Extents(1, seqlen, offset + seqlen, {'q_offset': offset}, [offset + seqlen])
    indices = make_indices(extents, 1, 6, BLOCK)
    tensors = make_inputs(extents, HEADS, device, indices, dtype=torch.float16, scaled=scaled)
    return tensors, make_grads(extents, HEADS, device), {'block_size': BLOCK, 'q_offset': offset}


@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize('offset', [TOGETHER // 2, TOGETHER - 8])
def test_queries_begin_anywhere(offset: int, scaled: bool, device: torch.device) -> None:
    tensors, grads, settings = make_problem(12, offset, device, scaled=scaled)
    assert_close_to_eager(selected_attention, tensors, grads, **settings)


def test_the_order_is_that_of_the_position(device: torch.device) -> None:
    """The same bits in chunks, of which each is a call."""
    tensors, grads, settings = make_problem(12, TOGETHER // 2, device)
    whole = run_triton(selected_attention, tensors, grads, **settings)
    for chunk in (slice(0, 5), slice(5, 12)):
        part = {name: t[:, chunk] if name in ('q', 'block_indices') else t for name, t in tensors.items()}
        grads_of_part = [grads[0][:, chunk], grads[1][:, :, chunk]]
        offset = settings['q_offset'] + chunk.start
        found = run_triton(selected_attention, part, grads_of_part, **settings | {'q_offset': offset})
        expected = {'out0': whole['out0'][:, chunk], 'out1': whole['out1'][:, :, chunk]}
        expected['grad of q'] = whole['grad of q'][:, chunk]
        assert_same_bits({name: found[name] for name in expected}, expected)
