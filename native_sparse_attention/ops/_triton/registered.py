"""What the ops registered with PyTorch share: names for their schemas, derivatives, no second ones, and inputs kept for
the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor
from torch.library import CustomOpDef

from native_sparse_attention.core import private

# The schema of an op is read off its annotations, which must be of this form.
OptionalTensor = Optional[Tensor]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
# Stands for an input that PyTorch keeps.
_SAVED = object()


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...] = ()) -> None:
    """Keeps the inputs of a forward, and its outputs where the backward reads them, for `saved_inputs`."""
    ctx.set_materialize_grads(False)
    ctx.num_outputs = len(output)
    ctx.others = [_SAVED if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*output, *(value for value in inputs if isinstance(value, Tensor)))


def saved_inputs(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """The outputs and the inputs that `save_inputs` was given."""
    saved = ctx.saved_tensors  # read once, as checkpointing wants it
    tensors = iter(saved[ctx.num_outputs :])
    inputs = [next(tensors) if other is _SAVED else other for other in ctx.others]
    return list(saved[: ctx.num_outputs]), inputs


def register_derivative(op: CustomOpDef, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """op.register_autograd(backward, setup_context=save) for an op without default values; faster on CPUs and GPUs."""
    op.register_autograd(backward, setup_context=save)
    private.register_derivative(op, backward, save)


def refuse_double_backward(op: CustomOpDef) -> None:
    """Makes a second derivative through the registered backward op an error that says what to do."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f'{private.qualified_name(op)} has no second derivative: use backend="eager" for double backward'
        )

    register_derivative(op, refuse, lambda ctx, inputs, output: None)
