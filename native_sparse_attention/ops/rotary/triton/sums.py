"""A shared input: several outputs of one autograd function, whose gradients are added by a registered PyTorch op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.registered import OptionalTensor, register_derivative
from native_sparse_attention.ops._triton.support import MAX_READERS
from native_sparse_attention.ops.rotary.triton.kernels import sum_kernel
from native_sparse_attention.ops.rotary.triton.op import NUM_WARPS, rotary, tile_of


def shared_input(
    x: Tensor, rotated: Tensor, tables: tuple[Tensor, Tensor] | None, num_plain: int, num_rotated: int, is_half: bool
) -> tuple[Tensor, ...]:
    """rotated: x rotated by the tables, detached."""
    return _SharedInput.apply(x, rotated, *(tables or (None, None)), num_plain, num_rotated, is_half)  # type: ignore[return-value]


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rotated: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        num_plain: int,
        num_rotated: int,
        is_half: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.num_rotated, ctx.is_half = 0 if cos is None else num_rotated, is_half
        return tuple(t.view_as(t) for t in [rotated] * num_rotated + [x] * num_plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        given = [grad for grad in grads if grad is not None]
        num_rotated = len([grad for grad in grads[: ctx.num_rotated] if grad is not None])
        match len(given):
            case 0:
                total = None
            case 1 if num_rotated == 0:
                total = given[0]
            case _:
                padded = [*given, *(None,) * (MAX_READERS - len(given))]
                total = _add(*padded, num_rotated, cos, sin, ctx.is_half)
        return total, *(None,) * 6


@torch.library.custom_op('native_sparse_attention::add_gradients', mutates_args=())
def _add(
    first: Tensor,
    second: OptionalTensor,
    third: OptionalTensor,
    fourth: OptionalTensor,
    fifth: OptionalTensor,
    num_rotated: int,
    cos: OptionalTensor,
    sin: OptionalTensor,
    is_half: bool,
) -> Tensor:
    """Return the sum of gradients `[B, T, H, D]`, of which the first num_rotated are rotated back. Absent gradients
    (None) come last.
    """
    grads = tuple(grad.contiguous() for grad in (first, second, third, fourth, fifth) if grad is not None)
    out = torch.empty_like(grads[0])
    if out.numel() == 0:
        return out
    batch, seqlen, heads, head_dim = out.shape
    num_rows = batch * seqlen * heads
    cos, sin = (None if t is None or num_rotated == 0 else t.expand(batch, -1, -1) for t in (cos, sin))
    block_m, block_d = tile_of(head_dim)
    launch(
        sum_kernel,
        (-(-num_rows // block_m),),
        *(grads, cos, sin, out, *(None if t is None else t.stride() for t in (cos, sin))),
        *(num_rows, seqlen, heads),
        HEAD_DIM=head_dim,
        NUM_ANGLES=0 if cos is None else cos.shape[2],
        HALF=0 if cos is None or not is_half else cos.shape[2],
        NUM_ROTATED=num_rotated,
        NUM_GRADS=len(grads),
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS,
        device=out.device,
    )
    return out


@_add.register_fake
def _(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    *grads, ctx.num_rotated, cos, sin, ctx.is_half = inputs
    ctx.num_grads = len([grad for grad in grads if grad is not None])
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    rotated = None if dout is None or ctx.num_rotated == 0 else rotary(dout, cos, sin, ctx.is_half)
    of_plain = [dout] * (ctx.num_grads - ctx.num_rotated)
    return *[rotated] * ctx.num_rotated, *of_plain, *(None,) * (MAX_READERS - ctx.num_grads + 4)


register_derivative(_add, _differentiate, _save)
