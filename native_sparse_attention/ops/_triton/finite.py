"""Whether tensors hold what is not finite, so that kernels need not look at every tile that they multiply."""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, launch
from native_sparse_attention.ops._triton.tiles import load_rows

# Tokens of a program, and the most results that one is asked for at once.
BLOCK_T, MAX_RESULTS = 128, 4096


def find_infinite(x: Tensor) -> Tensor:
    """int8 `[B, H, chunks]` for x `[B, S, H, D]`: 1 where one of a chunk of tokens is not finite in a head."""
    batch, seqlen, heads, head_dim = x.shape
    step = BLOCK_T * max(1, -(-seqlen // (BLOCK_T * MAX_RESULTS)))
    chunks = -(-seqlen // step)
    found = torch.empty(batch, heads, chunks, dtype=torch.int8, device=x.device)
    launch(
        finite_kernel,
        (batch * heads * chunks,),
        *(x, found, x.stride(), heads, chunks, seqlen, step),
        HEAD_DIM=head_dim,
        BLOCK_T=BLOCK_T,
        BLOCK_D=head_block(head_dim),
        num_warps=4,
        device=x.device,
    )
    return found


@triton.jit
def finite_kernel(
    x_ptr,
    found_ptr,
    strides,
    heads,
    chunks,
    seqlen,
    step,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    chunk, pair = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    x_ptr += (pair // heads).to(tl.int64) * strides[0] + (pair % heads).to(tl.int64) * strides[2]
    found = 0
    for first in tl.range(chunk * step, tl.minimum((chunk + 1) * step, seqlen), BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        x = load_rows(x_ptr, tokens, strides[1], tokens < seqlen, HEAD_DIM, BLOCK_D).to(tl.float32)
        found = tl.maximum(found, tl.max(tl.max((x - x != 0).to(tl.int32), 1), 0))
    tl.store(found_ptr + tl.program_id(0), tl.cast(found, tl.int8))


@triton.jit
def is_finite(found_ptr, pair, num_chunks):
    """Whether all of a head of a row is. pair: row * H + head."""
    found = tl.zeros([256], tl.int32)
    for first in tl.range(0, num_chunks, 256):
        chunks = first + tl.arange(0, 256)
        found |= tl.load(found_ptr + pair * num_chunks + chunks, mask=chunks < num_chunks, other=0).to(tl.int32)
    return tl.max(found, 0) == 0
