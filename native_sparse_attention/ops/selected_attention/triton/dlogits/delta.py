"""Delta of every row, the sum of p * dp over its keys, computed before dq from the output with all of its bits.

The output is rounded. In rows where one weight is close to 1, the gradients of logits are so much smaller than delta
that the rounding would dominate them. So the forward pass saves the low bits that rounding drops, 16 per element.
Together they give the output with all bits of float32 but the last.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, launch
from native_sparse_attention.ops._triton.tiles import load_rows

# Tokens per program.
BLOCK_T = 32


@triton.jit
def split_low_bits(x, DTYPE: tl.constexpr):
    """Return float32 numbers to be rounded to a half type, and the low bits that rounding drops, as int16.

    For bfloat16 they are the lower half of the bits, which is added to the rounded number; for float16 the difference
    times 2 ** 11, in float16.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        # The last bit is set where a number may be halfway between two bfloat16 numbers, so that rounding is unique.
        bits = x.to(tl.int32, bitcast=True)
        bits |= (bits >> 15) & 1
        x, low = bits.to(tl.float32, bitcast=True), bits.to(tl.int16)
    else:
        remainder = (x - x.to(DTYPE).to(tl.float32)) * 2048.0
        remainder = tl.where(remainder - remainder == 0, remainder, 0.0)  # 0 if the output is not finite
        low = remainder.to(tl.float16).to(tl.int16, bitcast=True)
    return x, low


@triton.jit
def add_low_bits(rounded, low):
    """Return the float32 numbers before rounding."""
    x = rounded.to(tl.float32)
    if rounded.dtype == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        x += low.to(tl.float16, bitcast=True).to(tl.float32) * 0.00048828125
    return x


def find_delta(
    out: Tensor, low_bits: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return lse minus log(gate) (`Gates`), and delta minus the gradient of lse: float32 `[B, HQ, T]`.

    Both are views of one tensor in which the heads of a token are adjacent, since dkv loads them together.

    Args:
        out, dout: `[B, T, HQ, DV]`.
        low_bits: int16, contiguous, from `split_low_bits`.
        lse, dlse: float32 `[B, HQ, T]`; dlse may be None.
        gate: `[B, T, HQ]`, or None.
    """
    batch, seqlen, heads, value_dim = out.shape
    numbers = lse.new_empty(batch, seqlen, heads, 2)
    launch(
        delta_kernel,
        (batch * -(-seqlen // BLOCK_T) * heads,),
        *(out, low_bits, dout, lse, dlse, gate, numbers, out.stride(), dout.stride()),
        *(None if t is None else t.stride() for t in (dlse, gate)),
        *(seqlen, heads),
        VALUE_DIM=value_dim,
        BLOCK_T=BLOCK_T,
        BLOCK_DV=head_block(value_dim),
        num_warps=4,
        device=out.device,
    )
    lse, delta = numbers.transpose(1, 2).unbind(3)
    return lse, delta


@triton.jit
def delta_kernel(
    out_ptr,
    low_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    gate_ptr,
    numbers_ptr,
    out_strides,
    dout_strides,
    dlse_strides,
    gate_strides,
    seqlen,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Store lse and delta in numbers `[B, T, HQ, 2]`. One program per tile of tokens and head."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tl.program_id(0) // heads
    row = (tile // tl.cdiv(seqlen, BLOCK_T)).to(tl.int64)
    tokens = (tile % tl.cdiv(seqlen, BLOCK_T) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    mask = tokens < seqlen
    out_ptr += row * out_strides[0] + head * out_strides[2]
    dout_ptr += row * dout_strides[0] + head * dout_strides[2]
    low_ptr += (row * seqlen * heads + head) * VALUE_DIM
    out = load_rows(out_ptr, tokens, out_strides[1], mask, VALUE_DIM, BLOCK_DV)
    low = load_rows(low_ptr, tokens, heads * VALUE_DIM, mask, VALUE_DIM, BLOCK_DV)
    dout = load_rows(dout_ptr, tokens, dout_strides[1], mask, VALUE_DIM, BLOCK_DV)
    delta = tl.sum(add_low_bits(out, low) * dout.to(tl.float32), 1)
    lse = tl.load(lse_ptr + (row * heads + head) * seqlen + tokens, mask=mask, other=0.0)
    if dlse_ptr is not None:
        dlse_ptr += row * dlse_strides[0] + head * dlse_strides[1]
        dlse = tl.load(dlse_ptr + tokens * dlse_strides[2], mask=mask, other=0.0)
        # The log-sum-exp of an empty row has no gradient; logaddexp of two of them returns NaN.
        delta -= tl.where(lse == float('-inf'), 0.0, dlse)
    if gate_ptr is not None:
        gate_ptr += row * gate_strides[0] + head * gate_strides[2]
        lse -= tl.log(tl.load(gate_ptr + tokens * gate_strides[1], mask=mask, other=1.0).to(tl.float32))
    numbers_ptr += 2 * ((row * seqlen + tokens) * heads + head)
    tl.store(numbers_ptr, lse, mask=mask)
    tl.store(numbers_ptr + 1, delta, mask=mask)
