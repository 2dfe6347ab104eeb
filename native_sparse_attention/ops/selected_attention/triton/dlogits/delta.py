"""What dkv needs of a row where it comes before dq: delta, the sum of p * dp over its keys, from an exact output.

The output is rounded, and in rows that one weight takes nearly all of, gradients of logits are so much smaller than
delta that the rounding is what one would see of them. So the forward keeps what rounding leaves out, 16 bits of an
element, and with them the output has all bits of float32 but the last.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, launch
from native_sparse_attention.ops._triton.tiles import load_rows

# Tokens of a program.
BLOCK_T = 32


@triton.jit
def split_low_bits(x, DTYPE: tl.constexpr):
    """Float32 numbers, to be rounded to a half type, and what that leaves out of them, as int16: of bfloat16 the lower
    half of the bits, as what is to be added to the rounded ones; of float16 the difference, 2 ** 11 as large, in
    float16.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        # The last bit is set where numbers may be halfway between two others, which could have been rounded to either.
        bits = x.to(tl.int32, bitcast=True)
        bits |= (bits >> 15) & 1
        x, low = bits.to(tl.float32, bitcast=True), bits.to(tl.int16)
    else:
        left = (x - x.to(DTYPE).to(tl.float32)) * 2048.0
        left = tl.where(left - left == 0, left, 0.0)  # where the output is not finite
        low = left.to(tl.float16).to(tl.int16, bitcast=True)
    return x, low


@triton.jit
def add_low_bits(rounded, low):
    """The float32 numbers that were rounded."""
    x = rounded.to(tl.float32)
    if rounded.dtype == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        x += low.to(tl.float16, bitcast=True).to(tl.float32) * 0.00048828125
    return x


def find_delta(
    out: Tensor, low: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    """lse, less by the logarithm of the gate `[B, T, HQ]` if there is one (`Gates`), and delta of every row less the
    gradient of its log-sum-exp: float32 `[B, HQ, T]` like dlse. They are views of one tensor in which the heads of a
    token lie side by side, since dkv fetches them together.

    out, dout: `[B, T, HQ, DV]`; low: int16, contiguous, from `split_low_bits`.
    """
    batch, seqlen, heads, value_dim = out.shape
    pairs = lse.new_empty(batch, seqlen, heads, 2)
    launch(
        delta_kernel,
        (batch * -(-seqlen // BLOCK_T) * heads,),
        *(out, low, dout, lse, dlse, gate, pairs, out.stride(), dout.stride()),
        *(None if t is None else t.stride() for t in (dlse, gate)),
        *(seqlen, heads),
        VALUE_DIM=value_dim,
        BLOCK_T=BLOCK_T,
        BLOCK_DV=head_block(value_dim),
        num_warps=4,
        device=out.device,
    )
    lse, delta = pairs.transpose(1, 2).unbind(3)
    return lse, delta


@triton.jit
def delta_kernel(
    out_ptr,
    low_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    gate_ptr,
    pairs_ptr,
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
    """One program per tile of tokens and head. pairs: `[B, T, HQ, 2]`, lse and delta."""
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
        # A log-sum-exp of nothing has no gradient; logaddexp of two such gives NaN.
        delta -= tl.where(lse == float('-inf'), 0.0, dlse)
    if gate_ptr is not None:
        gate_ptr += row * gate_strides[0] + head * gate_strides[2]
        lse -= tl.log(tl.load(gate_ptr + tokens * gate_strides[1], mask=mask, other=1.0).to(tl.float32))
    pairs_ptr += 2 * ((row * seqlen + tokens) * heads + head)
    tl.store(pairs_ptr, lse, mask=mask)
    tl.store(pairs_ptr + 1, delta, mask=mask)
