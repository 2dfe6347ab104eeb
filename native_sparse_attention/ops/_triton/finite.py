"""Check whether tensors hold non-finite values, or values so large that their products may overflow, so that kernels
need not check every tile that they multiply.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, launch
from native_sparse_attention.ops._triton.tiles import load_rows

# Tokens per tile, and the largest number of programs per head: `is_small` reads one result of each.
BLOCK_T, MAX_RESULTS = 128, tl.constexpr(256)
# A product of two rows of up to 2 ** 9 elements below this is finite in float32.
LARGE = tl.constexpr(2.0**59)


def find_large(k: Tensor, v: Tensor) -> Tensor:
    """Return int8 `[B, H, chunks]` for k and v `[B, S, H, D and DV]`: 1 where a chunk of tokens is not small in a head
    (`is_small_tile`).
    """
    batch, seqlen, heads, head_dim = k.shape
    step = BLOCK_T * max(1, -(-seqlen // (BLOCK_T * MAX_RESULTS.value)))
    chunks = -(-seqlen // step)
    found = torch.empty(batch, heads, chunks, dtype=torch.int8, device=k.device)
    launch(
        finite_kernel,
        (batch * heads * chunks,),
        *(k, v, found, k.stride(), v.stride(), heads, chunks, seqlen, step),
        HEAD_DIM=head_dim,
        VALUE_DIM=v.shape[3],
        BLOCK_T=BLOCK_T,
        BLOCK_D=head_block(head_dim),
        BLOCK_DV=head_block(v.shape[3]),
        num_warps=4,
        device=k.device,
    )
    return found


@triton.jit
def finite_kernel(
    k_ptr,
    v_ptr,
    found_ptr,
    k_strides,
    v_strides,
    heads,
    chunks,
    seqlen,
    step,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    chunk, pair = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    row, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    k_ptr += row * k_strides[0] + head * k_strides[2]
    v_ptr += row * v_strides[0] + head * v_strides[2]
    found = 0
    for first in tl.range(chunk * step, tl.minimum((chunk + 1) * step, seqlen), BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        k = load_rows(k_ptr, tokens, k_strides[1], tokens < seqlen, HEAD_DIM, BLOCK_D)
        v = load_rows(v_ptr, tokens, v_strides[1], tokens < seqlen, VALUE_DIM, BLOCK_DV)
        found = tl.where(is_small_tile(k) & is_small_tile(v), found, 1)
    tl.store(found_ptr + tl.program_id(0), tl.cast(found, tl.int8))


@triton.jit
def is_small_tile(x):
    """Return whether the absolute values of x add up to less than LARGE.

    This takes one addition per element; a comparison of each element costs several times that.
    """
    # Reduced as a vector: Triton 3.7 fails to compile a reduction of one dimension after the other for Blackwell.
    return tl.sum(tl.ravel(tl.abs(x.to(tl.float32))), 0) < LARGE


@triton.jit
def is_small(found_ptr, pair, num_chunks):
    """Return whether a whole head of a row is small, by `find_large`. pair: row * H + head."""
    chunks = tl.arange(0, MAX_RESULTS)
    found = tl.load(found_ptr + pair * num_chunks + chunks, mask=chunks < num_chunks, other=0)
    return tl.max(found.to(tl.int32), 0) == 0
