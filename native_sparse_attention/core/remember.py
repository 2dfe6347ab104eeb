"""Remember the results of checks, which cost the host more than short kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from native_sparse_attention.core import private

Result = TypeVar('Result')
# Device types whose calls are remembered and replayed; elsewhere checks also read values, and nothing is launched.
DEVICES = {'cuda'}
# Results by function and arguments; cleared at MAX_RESULTS entries.
_RESULTS: dict[Any, Any] = {}
MAX_RESULTS = 2048
_MISSING = object()
_NUMBERS = frozenset((bool, int, float, str))
_TENSORS = frozenset((Tensor, nn.Parameter))


def remembered(
    stored: Callable[[Result], Result],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator of a function of the properties of tensors and of settings, whose results are remembered.

    The first argument is a tensor. The function must not read values or addresses of tensors; beside its arguments it
    may depend on the gradient mode. Errors are not remembered. Calls that torch.compile or torch.func transform, and
    arguments of other types, run the function. stored: returns the result as later calls get it, without tensors.
    """
    return lambda function: _remember(function, stored)


def _remember(function: Callable[..., Result], stored: Callable[[Result], Result]) -> Callable[..., Result]:
    @wraps(function)
    def call(*args: Any) -> Result:
        if torch.compiler.is_compiling() or type(args[0]) not in _TENSORS or args[0].device.type not in DEVICES:
            return function(*args)
        if private.is_transformed() or private.is_forward_ad():
            return function(*args)
        try:
            key = (function, torch.is_grad_enabled(), *_properties(args))
        except TypeError:
            return function(*args)
        result = _RESULTS.get(key, _MISSING)
        if result is _MISSING:
            result = function(*args)
            if len(_RESULTS) >= MAX_RESULTS:
                _RESULTS.clear()
            _RESULTS[key] = stored(result)
        return result

    return call


def _properties(args: Any) -> list[Any]:
    """Return a key of the arguments. Types are part of it, since 1, 1.0 and True are equal.

    Raises TypeError for an argument of another type.
    """
    key: list[Any] = []
    for arg in args:
        kind = type(arg)
        if arg is None:
            key.append(None)
        elif kind in _NUMBERS:
            key += (kind, arg)
        elif kind in _TENSORS:
            key += (arg.shape, arg.dtype, arg.device, arg.requires_grad)
        elif kind is tuple or kind is list:
            key += (kind, len(arg), *_properties(arg))
        else:
            raise TypeError(kind)
    return key


def forget() -> None:
    """Forget all results: what functions take as constant may have changed."""
    _RESULTS.clear()
