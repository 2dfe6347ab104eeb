"""RMSNorm followed by rotary embedding as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import launch
from native_sparse_attention.ops._triton.registered import OptionalTensor, register_gradients
from native_sparse_attention.ops._triton.support import MAX_READERS
from native_sparse_attention.ops.rotary.triton.norm_kernels import norm_rotary_backward_kernel, norm_rotary_kernel
from native_sparse_attention.ops.rotary.triton.op import NUM_WARPS, tile_of

# Programs of the backward kernel, and so rows of partial sums of the weight's gradient: enough for every GPU.
MAX_PROGRAMS = 2048

Tables = tuple[Tensor, Tensor]


def norm_rotary(
    x: Tensor, weight: Tensor, tables: Tables | None, eps: float, num_plain: int, num_rotated: int, is_half: bool
) -> tuple[Tensor, ...]:
    """Return num_rotated outputs of x, normalised and rotated, then num_plain outputs without the rotation."""
    cos, sin = tables or (None, None)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    # Autograd would add the gradients of several readers of an output in memory.
    shares = needs_grad and not torch.compiler.is_compiling() and num_plain + num_rotated <= MAX_READERS
    inputs = (x.detach(), weight.detach()) if shares else (x, weight)
    rotated, plain = _forward(*inputs, cos, sin, eps, is_half, num_rotated > 0, num_plain > 0)
    if not shares:
        return (rotated,) * num_rotated + (plain,) * num_plain
    outputs = _SharedNorm.apply(x, weight, rotated, plain, cos, sin, eps, num_plain, num_rotated, is_half)
    return outputs  # type: ignore[return-value]


class _SharedNorm(torch.autograd.Function):
    """The outputs of `norm_rotary` for several readers, whose gradients are added by the backward kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rotated: Tensor,
        plain: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        num_plain: int,
        num_rotated: int,
        is_half: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.num_rotated, ctx.is_half = eps, num_rotated, is_half
        return tuple(t.view_as(t) for t in [rotated] * num_rotated + [plain] * num_plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rotated, plain = grads[: ctx.num_rotated], grads[ctx.num_rotated :]
        return *_differentiate_readers(ctx, rotated, plain), *(None,) * 8


@torch.library.custom_op('native_sparse_attention::norm_rotary', mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    cos: OptionalTensor,
    sin: OptionalTensor,
    eps: float,
    is_half: bool,
    needs_rotated: bool,
    needs_plain: bool,
) -> tuple[Tensor, Tensor]:
    """Return the rotated and the plain output, empty where they are not needed."""
    rotated, plain = _outputs(x, needs_rotated, needs_plain)
    if x.numel() == 0:
        return rotated, plain
    block_m, _ = tile_of(x.shape[3])
    num_rows = x.numel() // x.shape[3]
    tables, constants = _geometry(x, cos if needs_rotated else None, sin if needs_rotated else None, is_half)
    launch(
        norm_rotary_kernel,
        (-(-num_rows // block_m),),
        *(x, weight.contiguous(), *tables, rotated if needs_rotated else None, plain if needs_plain else None),
        *(x.stride(), *(None if t is None else t.stride() for t in tables)),
        *(float(eps), num_rows, *x.shape[1:3]),
        **constants,
        device=x.device,
    )
    return rotated, plain


@torch.library.custom_op('native_sparse_attention::norm_rotary_backward', mutates_args=())
def _backward(
    first: Tensor,
    second: OptionalTensor,
    third: OptionalTensor,
    fourth: OptionalTensor,
    fifth: OptionalTensor,
    num_rotated: int,
    x: Tensor,
    weight: Tensor,
    cos: OptionalTensor,
    sin: OptionalTensor,
    eps: float,
    is_half: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, empty where they are not needed, of gradients `[B, T, H, D]` of outputs, of
    which the first num_rotated are rotated back. Absent gradients (None) come last.
    """
    dx, dweight = _gradients(x, weight, needs)
    if x.numel() == 0:
        return dx, dweight.zero_()
    grads = tuple(grad for grad in (first, second, third, fourth, fifth) if grad is not None)
    block_m, _ = tile_of(x.shape[3])
    num_rows = x.numel() // x.shape[3]
    # The division into programs depends on the shape alone, and with it the order of the sums.
    all_tiles = -(-num_rows // block_m)
    num_tiles = -(-all_tiles // MAX_PROGRAMS)
    num_programs = -(-all_tiles // num_tiles)
    partials = x.new_empty(num_programs, x.shape[3], dtype=torch.float32) if needs[1] else None
    tables, constants = _geometry(x, cos if num_rotated else None, sin if num_rotated else None, is_half)
    launch(
        norm_rotary_backward_kernel,
        (num_programs,),
        *(grads, x, weight.contiguous(), *tables, dx if needs[0] else None, partials),
        *(tuple(grad.stride() for grad in grads), x.stride(), *(None if t is None else t.stride() for t in tables)),
        *(float(eps), num_rows, *x.shape[1:3], num_tiles),
        **constants,
        NUM_ROTATED=num_rotated,
        NUM_GRADS=len(grads),
        device=x.device,
    )
    return dx, dweight if partials is None else partials.sum(0).to(weight.dtype)


def _geometry(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, is_half: bool
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Return the tables of all rows of the batch, and the constants of both kernels."""
    num_angles = 0 if cos is None else cos.shape[2]
    block_m, block_d = tile_of(x.shape[3])
    constants = {'HEAD_DIM': x.shape[3], 'NUM_ANGLES': num_angles, 'HALF': num_angles if is_half else 0}
    constants |= {'BLOCK_M': block_m, 'BLOCK_D': block_d, 'num_warps': NUM_WARPS}
    return [None if t is None else t.expand(x.shape[0], -1, -1) for t in (cos, sin)], constants


def _outputs(x: Tensor, *needs: bool) -> tuple[Tensor, Tensor]:
    rotated, plain = (x.new_empty(x.shape if needed else 0) for needed in needs)
    return rotated, plain


def _gradients(x: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs[0] else 0), weight.new_empty(weight.shape if needs[1] else 0)


@_forward.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(x, *rest[-2:])


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    *_, x, weight, _, _, _, _, needs = inputs
    return _gradients(x, weight, needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.eps, ctx.is_half, ctx.needs_rotated, ctx.needs_plain = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, drotated: Tensor | None, dplain: Tensor | None) -> tuple[Tensor | None, ...]:
    # An output that is not needed is empty, and may receive an empty gradient.
    drotated, dplain = drotated if ctx.needs_rotated else None, dplain if ctx.needs_plain else None
    return *_differentiate_readers(ctx, (drotated,), (dplain,)), *(None,) * 6


def _differentiate_readers(ctx: Any, *readers: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight of those of the rotated and of the plain outputs."""
    rotated, plain = ([grad for grad in grads if grad is not None] for grads in readers)
    x, weight, cos, sin = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:2])
    if not (rotated or plain) or not any(needs):
        return None, None
    padded = [*rotated, *plain, *(None,) * (MAX_READERS - len(rotated) - len(plain))]
    dx, dweight = _backward(*padded, len(rotated), x, weight, cos, sin, ctx.eps, ctx.is_half, needs)
    return dx if needs[0] else None, dweight if needs[1] else None


register_gradients(_forward, _backward, _differentiate, _save)
