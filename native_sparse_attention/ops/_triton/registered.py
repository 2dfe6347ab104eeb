"""Registered PyTorch ops: schema types, derivatives without second ones, and saved inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor
from torch.library import CustomOpDef

from native_sparse_attention.core import private

# PyTorch infers the schema of an op from annotations of this form.
OptionalTensor = Optional[Tensor]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
OptionalStr = Optional[str]  # noqa: UP045
# Placeholder of a tensor that PyTorch saves.
_SAVED = object()


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


def refuse_double_backward(op: CustomOpDef) -> None:
    """Make a second derivative through the registered backward op raise an error that names the remedy."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f'{private.qualified_name(op)} has no second derivative: use backend="eager" for double backward'
        )

    register_derivative(op, refuse, lambda ctx, inputs, output: None)
