"""Products of weights with values in which the weights keep eleven bits at least.

In bfloat16 a weight has eight, and delta, which dkv needs of the output, would be as far off as the gradients of the
logits are when they are rounded. Weights in two factors, their upper bits and what these leave, take one more product
(`add_exact_product`). Where a block's values fit float16 they are converted once, before the forward, and weights are
rounded to float16: the same product as ever. The output is divided by the sum of the weights that met v then, the
rounded ones, so that values with a mean do not show how weights were rounded.
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

# Weights that meet converted values are in units of 2 ** -HEADROOM, so that small ones keep their bits too.
# Above them is room for what rounding does to references of logits of many millions.
HEADROOM = tl.constexpr(7.0)
# What flags say of a block: all of its keys and values are small; and it is whole, and the values fit float16.
IS_SMALL, FITS = tl.constexpr(1), tl.constexpr(2)
# The largest number of float16.
LARGEST = tl.constexpr(65504.0)
# An element fits if the conversion changes it by no more than so much of its token's largest.
ERROR = tl.constexpr(2.0**-17)
# Keys of a tile of the conversion.
BLOCK_N = 64


class HalfValues(NamedTuple):
    """One argument of kernels. half: float16 `[B, S, H, DV]`, contiguous and finite: the values. flags: int8 `[B * H,
    num_slots]`, FITS, IS_SMALL or 0 for every block slot (inverse_index.py).
    """

    half: Any
    flags: Any
    num_slots: int


def converts(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are converted."""
    return dtype == torch.bfloat16


def convert_values(k: Tensor, v: Tensor, place: SequenceLayout, block_size: int) -> HalfValues:
    num_slots = num_block_slots(place, block_size)
    pairs = k.shape[0] * k.shape[2]
    halves = HalfValues(
        torch.empty(v.shape, dtype=torch.float16, device=v.device),
        torch.empty(pairs, num_slots, dtype=torch.int8, device=v.device),
        num_slots,
    )
    launch(
        convert_kernel,
        (pairs * num_slots,),
        *(k, v, halves, k.stride(), v.stride(), halves.half.stride(), place, k.shape[2]),
        BLOCK_SIZE=block_size,
        HEAD_DIM=k.shape[3],
        VALUE_DIM=v.shape[3],
        BLOCK_N=min(BLOCK_N, row_block(block_size)),
        BLOCK_D=head_block(k.shape[3]),
        BLOCK_DV=head_block(v.shape[3]),
        num_warps=4,
        device=k.device,
    )
    return halves


@triton.jit
def convert_kernel(
    k_ptr,
    v_ptr,
    halves,
    k_strides,
    v_strides,
    half_strides,
    place,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One program per block slot of a pair."""
    pair, slot = tl.program_id(0) // halves.num_slots, tl.program_id(0) % halves.num_slots
    row, head = pair // kv_heads, (pair % kv_heads).to(tl.int64)
    sequence, first_key = find_block(slot, row, place, BLOCK_SIZE)
    key_start, _, num_keys, _ = load_sequence(sequence, place)
    # Of what no sequence covers there are no keys.
    last_key = tl.where(sequence < place.num_sequences, tl.minimum(first_key + BLOCK_SIZE, num_keys), first_key)
    row = row.to(tl.int64)
    k_ptr += row * k_strides[0] + head * k_strides[2]
    v_ptr += row * v_strides[0] + head * v_strides[2]
    half_ptr = halves.half + row * half_strides[0] + head * half_strides[2]
    fits = (last_key == first_key + BLOCK_SIZE).to(tl.int32)
    is_small = fits * 0 + 1
    for first in tl.range(first_key, last_key, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        mask = keys < last_key
        k = load_rows(k_ptr, key_start + keys, k_strides[1], mask, HEAD_DIM, BLOCK_D)
        v = load_rows(v_ptr, key_start + keys, v_strides[1], mask, VALUE_DIM, BLOCK_DV)
        x = v.to(tl.float32)
        half = tl.where(tl.abs(x) <= LARGEST, x, 0.0).to(tl.float16)
        largest = tl.max(tl.abs(x), 1)
        fitting = tl.abs(x - half.to(tl.float32)) <= (largest * ERROR)[:, None]
        fits &= (tl.min(tl.ravel(fitting.to(tl.int32)), 0) != 0).to(tl.int32)
        is_small &= (is_small_tile(k) & is_small_tile(v)).to(tl.int32)
        store_rows(half_ptr, key_start + keys, half_strides[1], half, mask, VALUE_DIM, BLOCK_DV)
    flag = tl.where(is_small != 0, tl.where(fits != 0, FITS, IS_SMALL), 0)
    tl.store(halves.flags + tl.program_id(0), flag.to(tl.int8))


@triton.jit
def find_flags(halves, pair, sequence, key_start, place, BLOCK_SIZE: tl.constexpr):
    """Where the flags of the blocks of a sequence begin."""
    first_slot = 0
    if place.cu_seqlens_k is not None:
        first_slot = key_start // BLOCK_SIZE + sequence
    return halves.flags + pair.to(tl.int64) * halves.num_slots + first_slot


@triton.jit
def add_exact_product(weights, v, total):
    """total + weights @ v, the weights in two factors."""
    upper = weights.to(v.dtype)
    total = tl.dot(upper, v, total, input_precision='ieee')
    return tl.dot((weights - upper.to(tl.float32)).to(v.dtype), v, total, input_precision='ieee')
