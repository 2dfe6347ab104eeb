"""Products of weights and values in which the weights keep at least 11 bits of mantissa.

The forward pass needs them where the kernel for dk and dv runs before the one for dq (dlogits/): it takes delta from
the output. With bfloat16 weights (8 bits) the error of delta would be as large as the rounding of the logit gradients.
There are two ways. `add_exact_product` splits the weights into their upper bits and a remainder, at the cost of a
second product. Where the values of a block fit float16, they are converted once before the forward pass and the weights
are rounded to float16: one product, as usual. The output is then divided by the sum of the rounded weights, so that the
rounding of the weights does not show in values with a nonzero mean.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.finite import is_small_tile
from native_sparse_attention.ops._triton.inverse_index import find_block, num_block_slots
from native_sparse_attention.ops._triton.launch import head_block, launch, row_block
from native_sparse_attention.ops._triton.tiles import load_rows, store_rows
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import load_sequence

# Float16 weights are in units of 2 ** -HEADROOM, so that small weights keep their bits. The range above them absorbs
# the rounding of references of very large logits.
HEADROOM = tl.constexpr(7.0)
# Flags of a block. IS_SMALL: all keys and values are small. FITS: also, the block is complete and fits float16.
IS_SMALL, FITS = tl.constexpr(1), tl.constexpr(2)
# The largest number of float16.
LARGEST = tl.constexpr(65504.0)
# An element fits if the conversion changes it by at most this fraction of its token's largest element.
ERROR = tl.constexpr(2.0**-17)
# Keys per tile of the conversion.
BLOCK_N = 64


class Fp16Values(NamedTuple):
    """Values in float16, as a kernel argument.

    data: float16 `[B, S, H, DV]`, contiguous and finite. flags: int8 `[B * H, num_slots]`: FITS, IS_SMALL or 0 for
    every block slot (inverse_index.py).
    """

    data: Any
    flags: Any
    num_slots: int


def converts_values(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are converted to float16."""
    return dtype == torch.bfloat16


def convert_values(k: Tensor, v: Tensor, layout: SequenceLayout, block_size: int) -> Fp16Values:
    """Convert v `[B, S, H, DV]` to float16 and classify every block of k and v."""
    num_slots = num_block_slots(layout, block_size)
    pairs = k.shape[0] * k.shape[2]
    converted = Fp16Values(
        torch.empty(v.shape, dtype=torch.float16, device=v.device),
        torch.empty(pairs, num_slots, dtype=torch.int8, device=v.device),
        num_slots,
    )
    launch(
        convert_kernel,
        (pairs * num_slots,),
        *(k, v, converted, k.stride(), v.stride(), converted.data.stride(), layout, k.shape[2]),
        BLOCK_SIZE=block_size,
        HEAD_DIM=k.shape[3],
        VALUE_DIM=v.shape[3],
        BLOCK_N=min(BLOCK_N, row_block(block_size)),
        BLOCK_D=head_block(k.shape[3]),
        BLOCK_DV=head_block(v.shape[3]),
        num_warps=4,
        device=k.device,
    )
    return converted


@triton.jit
def convert_kernel(
    k_ptr,
    v_ptr,
    fp16_values,
    k_strides,
    v_strides,
    fp16_strides,
    layout,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Convert one block, and store its flag. One program per pair and block slot."""
    pair, slot = tl.program_id(0) // fp16_values.num_slots, tl.program_id(0) % fp16_values.num_slots
    row, head = pair // kv_heads, (pair % kv_heads).to(tl.int64)
    sequence, first_key = find_block(slot, row, layout, BLOCK_SIZE)
    key_start, _, num_keys, _ = load_sequence(sequence, layout)
    # A slot that no sequence covers has no keys.
    last_key = tl.where(sequence < layout.num_sequences, tl.minimum(first_key + BLOCK_SIZE, num_keys), first_key)
    row = row.to(tl.int64)
    k_ptr += row * k_strides[0] + head * k_strides[2]
    v_ptr += row * v_strides[0] + head * v_strides[2]
    fp16_ptr = fp16_values.data + row * fp16_strides[0] + head * fp16_strides[2]
    fits = (last_key == first_key + BLOCK_SIZE).to(tl.int32)
    is_small = fits * 0 + 1
    for first in tl.range(first_key, last_key, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        mask = keys < last_key
        k = load_rows(k_ptr, key_start + keys, k_strides[1], mask, HEAD_DIM, BLOCK_D)
        v = load_rows(v_ptr, key_start + keys, v_strides[1], mask, VALUE_DIM, BLOCK_DV)
        x = v.to(tl.float32)
        rounded = tl.where(tl.abs(x) <= LARGEST, x, 0.0).to(tl.float16)
        largest = tl.max(tl.abs(x), 1)
        is_close = tl.abs(x - rounded.to(tl.float32)) <= (largest * ERROR)[:, None]
        fits &= (tl.min(tl.ravel(is_close.to(tl.int32)), 0) != 0).to(tl.int32)
        is_small &= (is_small_tile(k) & is_small_tile(v)).to(tl.int32)
        store_rows(fp16_ptr, key_start + keys, fp16_strides[1], rounded, mask, VALUE_DIM, BLOCK_DV)
    flag = tl.where(is_small != 0, tl.where(fits != 0, FITS, IS_SMALL), 0)
    tl.store(fp16_values.flags + tl.program_id(0), flag.to(tl.int8))


@triton.jit
def find_flags(fp16_values, pair, sequence, key_start, layout, BLOCK_SIZE: tl.constexpr):
    """Return the pointer to the flag of a sequence's first block."""
    first_slot = 0
    if layout.cu_seqlens_k is not None:
        first_slot = key_start // BLOCK_SIZE + sequence
    return fp16_values.flags + pair.to(tl.int64) * fp16_values.num_slots + first_slot


@triton.jit
def add_exact_product(weights, v, total):
    """Return total + weights @ v, with the float32 weights split into two factors of v's dtype."""
    upper = weights.to(v.dtype)
    total = tl.dot(upper, v, total, input_precision='ieee')
    return tl.dot((weights - upper.to(tl.float32)).to(v.dtype), v, total, input_precision='ieee')
