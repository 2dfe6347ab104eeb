"""Registered PyTorch ops: schemas, derivatives without second ones, and saved inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import CustomOpDef

from native_sparse_attention.core import private

# PyTorch infers the schema of an op from annotations of this form.
OptionalTensor = Optional[Tensor]  # noqa: UP045
# The sequences of a call in the schema of an op, in the order of `varlen.flatten`.
SEQUENCES = (
    'SymInt seqlen_k, SymInt? q_offset, Tensor? q_offsets, Tensor? seqlens_k, Tensor? cu_seqlens, Tensor? cu_seqlens_k'
)
# Placeholder of a tensor that PyTorch saves.
_SAVED = object()


def register_op(name: str, arguments: str, num_outputs: int = 1) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that registers an op that returns tensors. arguments: as PyTorch's schemas write them, so that
    a backward op, which takes all arguments of its forward op, need not repeat them.
    """
    outputs = 'Tensor' if num_outputs == 1 else f'({", ".join(["Tensor"] * num_outputs)})'
    schema = f'({arguments}) -> {outputs}'
    return torch.library.custom_op(f'native_sparse_attention::{name}', mutates_args=(), schema=schema)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...] = ()) -> None:
    """Save the inputs of a forward pass, and the outputs that the backward pass reads, for `saved_inputs`."""
    ctx.set_materialize_grads(False)
    ctx.num_outputs = len(output)
    ctx.others = [_SAVED if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*output, *(value for value in inputs if isinstance(value, Tensor)))


def saved_inputs(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the outputs and the inputs given to `save_inputs`."""
    saved = ctx.saved_tensors  # read once, as checkpointing requires
    tensors = iter(saved[ctx.num_outputs :])
    inputs = [next(tensors) if other is _SAVED else other for other in ctx.others]
    return list(saved[: ctx.num_outputs]), inputs


def register_derivative(op: CustomOpDef, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Apply op.register_autograd(backward, setup_context=save), for an op without default values; faster on CPUs and
    GPUs.
    """
    op.register_autograd(backward, setup_context=save)
    private.register_derivative(op, backward, save)


def register_gradients(
    op: CustomOpDef,
    backward: CustomOpDef,
    differentiate: Callable[..., Any],
    save: Callable[..., None] = save_inputs,
) -> None:
    """Register `differentiate`, which calls the op `backward`, as the derivative of op; `backward` has none."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f'{private.qualified_name(backward)} has no second derivative: use backend="eager" for double backward'
        )

    register_derivative(op, differentiate, save)
    register_derivative(backward, refuse, lambda ctx, inputs, output: None)
