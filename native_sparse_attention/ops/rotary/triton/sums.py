"""The readers of a tensor as outputs of one function of autograd, whose derivative is a registered PyTorch op."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.registered import OptionalTensor
from native_sparse_attention.ops.rotary.triton.kernels import sum_kernel

# Elements of a program's tile, and its warps: enough loads in flight, few enough registers.
TILE = 2048
NUM_WARPS = 4


def fan_out(
    x: Tensor, turned: Tensor, tables: tuple[Tensor, Tensor] | None, num_plain: int, num_turned: int
) -> tuple[Tensor, ...]:
    """turned: x turned by the tables, without a history."""
    return _FanOut.apply(x, turned, *(tables or (None, None)), num_plain, num_turned)  # type: ignore[return-value]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        turned: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        num_plain: int,
        num_turned: int,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.num_turned = num_turned
        return tuple(t.view_as(t) for t in [turned] * num_turned + [x] * num_plain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_turned, of_plain = (
            [grad for grad in some if grad is not None] for some in (grads[: ctx.num_turned], grads[ctx.num_turned :])
        )
        grad = _add(of_turned + of_plain, len(of_turned), cos, sin) if len(of_turned) + len(of_plain) > 0 else None
        return grad, *(None,) * 5


@torch.library.custom_op('native_sparse_attention::add_gradients', mutates_args=())
def _add(grads: list[Tensor], num_turned: int, cos: OptionalTensor, sin: OptionalTensor) -> Tensor:
    """The sum of gradients `[B, T, H, D]`, of which the first num_turned are turned back."""
    grads = [grad.contiguous() for grad in grads]
    out = torch.empty_like(grads[0])
    if out.numel() == 0:
        return out
    batch, seqlen, heads, head_dim = out.shape
    num_rows = batch * seqlen * heads
    num_turned = 0 if cos is None else num_turned
    cos, sin = (None if t is None or num_turned == 0 else t.expand(batch, -1, -1) for t in (cos, sin))
    block_d = max(2, int(triton.next_power_of_2(head_dim)))
    block_m = max(1, TILE // block_d)
    launch(
        sum_kernel,
        (-(-num_rows // block_m),),
        *(tuple(grads), cos, sin, out, *(None if t is None else t.stride() for t in (cos, sin))),
        *(num_rows, seqlen, heads),
        HEAD_DIM=head_dim,
        NUM_ANGLES=0 if cos is None else cos.shape[2],
        NUM_TURNED=num_turned,
        NUM_GRADS=len(grads),
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS,
        device=out.device,
    )
    return out


@_add.register_fake
def _(grads: list[Tensor], *_: Any) -> Tensor:
    return torch.empty_like(grads[0], memory_format=torch.contiguous_format)
