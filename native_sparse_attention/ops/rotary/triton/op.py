"""The rotary embedding as a registered PyTorch op; its derivative is the op itself with negative angles."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.registered import register_derivative
from native_sparse_attention.ops.rotary.triton.kernels import rotary_kernel

# Elements of a program's tile, and warps: enough loads in flight, and few enough registers.
TILE = 2048
NUM_WARPS = 4


def rotary(x: Tensor, cos: Tensor, sin: Tensor, is_half: bool) -> Tensor:
    return _rotate(x, cos, sin, inverse=False, is_half=is_half)


def tile_of(head_dim: int) -> tuple[int, int]:
    """Return rows and columns of a program's tile."""
    block_d = max(2, int(triton.next_power_of_2(head_dim)))
    return max(1, TILE // block_d), block_d


@torch.library.custom_op('native_sparse_attention::rotary', mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, is_half: bool) -> Tensor:
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    batch, seqlen, heads, head_dim = x.shape
    num_rows = batch * seqlen * heads
    cos, sin = (t.expand(batch, -1, -1) for t in (cos, sin))
    block_m, block_d = tile_of(head_dim)
    launch(
        rotary_kernel,
        (-(-num_rows // block_m),),
        *(x, cos, sin, out, x.stride(), cos.stride(), sin.stride(), out.stride()),
        *(num_rows, seqlen, heads),
        HEAD_DIM=head_dim,
        NUM_ANGLES=cos.shape[2],
        HALF=cos.shape[2] if is_half else 0,
        INVERSE=inverse,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS,
        device=x.device,
    )
    return out


@_rotate.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    _, cos, sin, ctx.inverse, ctx.is_half = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    needs_dx = dout is not None and ctx.needs_input_grad[0]
    return _rotate(dout, cos, sin, not ctx.inverse, ctx.is_half) if needs_dx else None, *(None,) * 4


register_derivative(_rotate, _differentiate, _save)
