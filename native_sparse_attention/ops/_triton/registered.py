"""Registered PyTorch ops: schemas, derivatives without second ones, and saved inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from native_sparse_attention.core import private
from native_sparse_attention.ops._triton.replay import replayed

# The sequences of a call in the schema of an op, in the order of `varlen.flatten`.
SEQUENCES = (
    'SymInt seqlen_k, SymInt? q_offset, Tensor? q_offsets, Tensor? seqlens_k, Tensor? cu_seqlens, Tensor? cu_seqlens_k'
)
# Functions that are called like an op, or None (`private.find_direct_call`).
_RUN: dict[Any, Callable[..., Any] | None] = {}
# Placeholder of a tensor that PyTorch saves.
_SAVED = object()


def register_op(name: str, arguments: str, num_outputs: int = 1) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that registers an op that returns tensors. arguments: as PyTorch's schemas write them, so that
    a backward op, which takes all arguments of its forward op, need not repeat them.
    """
    outputs = 'Tensor' if num_outputs == 1 else f'({", ".join(["Tensor"] * num_outputs)})'
    schema = f'({arguments}) -> {outputs}'
    register = torch.library.custom_op(f'native_sparse_attention::{name}', mutates_args=(), schema=schema)
    return lambda function: register(replayed(function))


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...] = ()) -> None:
    """Save the inputs of a forward pass, and the outputs that the backward pass reads, for `saved_inputs`."""
    ctx.set_materialize_grads(False)
    ctx.num_outputs = len(output)
    ctx.others = [value if type(value) in private.CONSTANTS else _SAVED for value in inputs]
    ctx.save_for_backward(*output, *private.tensors_in(inputs))


def saved_inputs(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """Return the outputs and the inputs given to `save_inputs`."""
    saved = ctx.saved_tensors  # read once, as checkpointing requires
    tensors = iter(saved[ctx.num_outputs :])
    inputs = [next(tensors) if other is _SAVED else other for other in ctx.others]
    return list(saved[: ctx.num_outputs]), inputs


def run_op(op: Any, *inputs: Any) -> Any:
    """Call a registered op, without PyTorch's dispatcher where only plain tensors, autograd and autocast take part."""
    run = None if torch.compiler.is_compiling() else _RUN.get(op)
    return op(*inputs) if run is None else run(*inputs)


def register_derivative(op: CustomOpDef, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Apply op.register_autograd(backward, setup_context=save), for an op without default values."""
    op.register_autograd(backward, setup_context=save)
    _RUN[op] = private.find_direct_call(op, backward, save)


def register_without_derivative(op: CustomOpDef, reason: str) -> None:
    """Register a derivative that raises RuntimeError."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(f'{private.qualified_name(op)} has no {reason}')

    register_derivative(op, refuse, lambda ctx, inputs, output: None)


def register_gradients(
    op: CustomOpDef,
    backward: CustomOpDef,
    differentiate: Callable[..., Any],
    save: Callable[..., None] = save_inputs,
) -> None:
    """Register `differentiate`, which calls the op `backward`, as the derivative of op; `backward` has none."""
    register_derivative(op, differentiate, save)
    register_without_derivative(backward, 'second derivative: use backend="eager" for double backward')
