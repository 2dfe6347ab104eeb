"""The gated sum as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch_rows
from native_sparse_attention.ops._triton.registered import register_gradients
from native_sparse_attention.ops.gated_sum.triton.kernels import backward_kernel, forward_kernel


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
    launch_rows(forward_kernel, out, *tensors, *(t.stride() for t in tensors), block_dv=_block(out))
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
    launch_rows(
        backward_kernel,
        dout,
        *(dout, *inputs),
        *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)),
        *(t.stride() for t in (dout, *inputs)),
        *(grads[0].stride() if needs[0] else None, branch_strides),
        block_dv=_block(dout),
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


register_gradients(_forward, _backward, _differentiate, _save)


def _block(out: Tensor) -> int:
    return int(triton.next_power_of_2(out.shape[-1]))
