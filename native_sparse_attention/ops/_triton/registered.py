"""What the ops registered with PyTorch share: names for their schemas, derivatives, no second ones, and inputs kept for
the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import CustomOpDef, Library

# The schema of an op is read off its annotations, which must be of this form.
OptionalTensor = Optional[Tensor]  # noqa: UP045
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
# Of a call that PyTorch takes from autograd to a CPU or GPU without a stop.
_PLAIN_KEYS = 0
for _key in ('CPU', 'CUDA', 'AutogradCPU', 'AutogradCUDA', 'ADInplaceOrView', 'AutocastCPU', 'AutocastCUDA'):
    _PLAIN_KEYS |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key)).raw_repr()
# Stands for an input that PyTorch keeps.
_SAVED = object()
_LIBRARY = Library('native_sparse_attention', 'FRAGMENT')


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
    """What op.register_autograd(backward, setup_context=save) does, for an op without default values.

    PyTorch reads the whole schema anew for each argument, to fill in defaults before `save`, which an op of many
    arguments pays in every call. Tensors on CPUs and GPUs come here instead, and from here to the function of the op,
    not by way of a search for results that are inputs, which the tests make; at once where nobody else, as a mode or a
    tensor that stands for others, has a part in the call.
    """
    op.register_autograd(backward, setup_context=save)
    function = torch._disable_dynamo(op._init_fn)
    call = _make_differentiable(op, op._opoverload, backward, save, lambda derivative: derivative.apply)
    call_plain = _make_differentiable(op, function, backward, save, _plain_apply)

    def choose(keys: Any, *inputs: Any) -> Any:
        is_plain = not keys.raw_repr() & ~_PLAIN_KEYS and not torch._C._are_functorch_transforms_active()
        return (call_plain if is_plain else call)(*inputs)

    for device in ('CPU', 'CUDA'):
        _LIBRARY.impl(op._name, choose, f'Autograd{device}', with_keyset=True)
        _LIBRARY.impl(op._name, function, device)


def _plain_apply(derivative: Any) -> Callable[..., Any]:
    """What `apply` comes down to without transforms, which it looks for and what they left behind."""
    parent: Any = super(torch.autograd.Function, derivative)
    return parent.apply


def _make_differentiable(
    op: CustomOpDef,
    function: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None],
    apply_of: Callable[[Any], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function with a derivative, which is recorded by what apply_of gives for a class of torch.autograd."""

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return function(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {'forward': staticmethod(forward), 'backward': staticmethod(backward)}
    apply = apply_of(type(op._name, (torch.autograd.Function,), methods))

    def call(*inputs: Any) -> Any:
        needs_graph = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
        return (apply if needs_graph else below)(*inputs)

    return call


def refuse_double_backward(op: CustomOpDef) -> None:
    """Makes a second derivative through the registered backward op an error that says what to do."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(f'{op._qualname} has no second derivative: use backend="eager" for double backward')

    register_derivative(op, refuse, lambda ctx, inputs, output: None)
