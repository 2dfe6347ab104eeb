"""The gated sum as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.registered import refuse_double_backward, register_derivative
from native_sparse_attention.ops.gated_sum.triton.kernels import backward_kernel, forward_kernel

# Elements of a program's tile per branch, and warps: enough loads in flight, and few enough registers.
TILE = 2048
NUM_WARPS = 4


def gated_sum(
    gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor, gate_in_attention: bool = False
) -> Tensor:
    """gate_in_attention: each attention output receives the gradient of the sum unchanged."""
    return _forward(
        gates.detach() if gate_in_attention else gates, out_compressed, out_selected, out_window, gate_in_attention
    )


@torch.library.custom_op('native_sparse_attention::gated_sum', mutates_args=())
def _forward(
    gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor, gate_in_attention: bool
) -> Tensor:
    out = out_compressed.new_empty(out_compressed.shape)
    tensors = (gates, out_compressed, out_selected, out_window, out)
    _launch(forward_kernel, out, *tensors, *(t.stride() for t in tensors))
    return out


@torch.library.custom_op('native_sparse_attention::gated_sum_backward', mutates_args=())
def _backward(
    dout: Tensor, gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the gates and of the branches, empty where they are not needed."""
    inputs = (gates, out_compressed, out_selected, out_window)
    grads = [t.new_empty(t.shape if needed else 0) for t, needed in zip(inputs, needs, strict=True)]
    if dout.numel() == 0:
        grads[0].zero_()
    branch_strides = next((grad.stride() for grad, needed in zip(grads[1:], needs[1:], strict=True) if needed), None)
    _launch(
        backward_kernel,
        dout,
        *(dout, *inputs),
        *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)),
        *(t.stride() for t in (dout, *inputs)),
        *(grads[0].stride() if needs[0] else None, branch_strides),
    )
    return grads[0], grads[1], grads[2], grads[3]


@_forward.register_fake
def _(gates: Tensor, out_compressed: Tensor, *_: Any) -> Tensor:
    return out_compressed.new_empty(out_compressed.shape)


@_backward.register_fake
def _(dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, needs = rest
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in zip(inputs, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.gate_in_attention = inputs
    ctx.save_for_backward(*(() if ctx.gate_in_attention else tensors))


def _differentiate(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:4])
    if dout is None:
        return (None,) * 5
    grads = (None, dout, dout, dout) if ctx.gate_in_attention else _backward(dout, *ctx.saved_tensors, needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None


register_derivative(_forward, _differentiate, _save)
refuse_double_backward(_backward)


def _launch(kernel: Any, out: Tensor, *args: Any) -> None:
    """Launch a kernel over the rows of `out`, or of a tensor of its shape."""
    if out.numel() == 0:
        return
    *_, seqlen, heads, value_dim = out.shape
    num_rows = out.numel() // value_dim
    block_dv = int(triton.next_power_of_2(value_dim))
    block_m = max(1, TILE // block_dv)
    launch(
        kernel,
        (-(-num_rows // block_m),),
        *args,
        *(num_rows, seqlen, heads),
        VALUE_DIM=value_dim,
        BLOCK_M=block_m,
        BLOCK_DV=block_dv,
        num_warps=NUM_WARPS,
        device=out.device,
    )
