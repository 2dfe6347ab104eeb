"""What the ops registered with PyTorch share: names for their schemas, inputs kept for the backward, no second one."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

# The schema of an op is read off its annotations, which must be of this form.
OptionalTensor = Optional[Tensor]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...] = ()) -> None:
    """Keeps the inputs of a forward, and its outputs where the backward reads them, for `saved_inputs`."""
    ctx.set_materialize_grads(False)
    ctx.num_outputs = len(output)
    ctx.tensors = [isinstance(value, Tensor) for value in inputs]
    ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
    ctx.save_for_backward(*output, *(value for value in inputs if isinstance(value, Tensor)))


def saved_inputs(ctx: Any) -> tuple[list[Tensor], list[Any]]:
    """The outputs and the inputs that `save_inputs` was given."""
    saved, others = iter(ctx.saved_tensors), iter(ctx.others)  # read once, as checkpointing wants it
    outputs = [next(saved) for _ in range(ctx.num_outputs)]
    return outputs, [next(saved) if is_tensor else next(others) for is_tensor in ctx.tensors]


def refuse_double_backward(op: Any) -> None:
    """Makes a second derivative through the registered backward op an error that says what to do."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(f'{op._qualname} has no second derivative: use backend="eager" for double backward')

    op.register_autograd(refuse)
