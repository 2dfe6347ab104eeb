"""Bounds of the selected branch on a GPU: the rate of a copy, and of gathering each query's own K/V tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.peers import Problem
from benchmarks.timing import measure
from native_sparse_attention.ops.selected_attention.triton.loops.block_loop import CONCURRENT_QUERIES

COPIED_BYTES = {'cuda': 2**30, 'cpu': 2**20}
TURN = CONCURRENT_QUERIES.value
# num_warps, num_stages, and the number of queries after which the first block repeats; the fastest launch counts.
LAUNCHES = [(warps, stages, turn) for warps in (1, 2, 4) for stages in (1, 2, 3) for turn in (1, TURN)]


def make_copy(problem: Problem) -> tuple[Callable[[], Tensor], int]:
    """Return a copy, and the bytes that it reads and writes."""
    device = problem.q.device
    source = torch.zeros(COPIED_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def make_gather(problem: Problem) -> tuple[Callable[[], Tensor], int]:
    """Return a kernel that only reads the selected keys and values of every query and KV head, and their bytes.

    A program per query must read that much, from the L2 cache if it holds the sequence. Queries read their blocks in
    ascending order or rotated as the op reads them; results of commits before 8f3f54f have ascending order only.
    """
    # XOR of words takes the fewest instructions.
    k, v = (t.contiguous().view(torch.int32) for t in (problem.k, problem.v))
    if k.shape != v.shape:
        raise ValueError('keys and values must be of one size')
    count, length, kv_heads, words = k.shape
    blocks = problem.blocks.contiguous()
    out = torch.empty_like(k)

    sizes = {'NUM_SELECTED': blocks.shape[3], 'BLOCK_SIZE': problem.block_size, 'WORDS': words}

    def gather(num_warps: int, num_stages: int, turn: int) -> Tensor:
        meta: dict[str, Any] = {**sizes, 'NUM_STAGES': num_stages, 'TURN': turn, 'num_warps': num_warps}
        gather_kernel[(count * length, kv_heads)](k, v, blocks, out, length, kv_heads, **meta)
        return out

    device = k.device.type
    launches = LAUNCHES if device == 'cuda' else LAUNCHES[:1]
    fastest = min(launches, key=lambda launch: measure(lambda: gather(*launch), device, 0.02).median)
    bytes_of_block = 2 * problem.block_size * words * k.element_size()
    return lambda: gather(*fastest), int((blocks >= 0).sum()) * bytes_of_block


@triton.jit
def gather_kernel(
    k_ptr,
    v_ptr,
    blocks_ptr,
    out_ptr,
    length,
    kv_heads,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TURN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * kv_heads + head
    first = token // length * length
    keys = tl.arange(0, BLOCK_SIZE)
    words = tl.arange(0, WORDS)
    total = tl.zeros([BLOCK_SIZE, WORDS], tl.int32)
    start = (NUM_SELECTED * (token % length % TURN) // TURN).to(tl.int32)
    for i in tl.range(0, NUM_SELECTED, num_stages=NUM_STAGES):
        block = tl.load(blocks_ptr + row * NUM_SELECTED + (start + i) % NUM_SELECTED)
        key = block * BLOCK_SIZE + keys
        # The last block of a sequence may be cut.
        mask = ((key >= 0) & (key < length))[:, None]
        offsets = ((first + key) * kv_heads + head)[:, None] * WORDS + words[None, :]
        # [BLOCK_SIZE, WORDS]
        total ^= tl.load(k_ptr + offsets, mask=mask, other=0) ^ tl.load(v_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + row * WORDS + words, tl.xor_sum(total, 0))
