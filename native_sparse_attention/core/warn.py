"""Warnings that point at the line of the user."""

from __future__ import annotations

import inspect
import warnings

import torch

# Modules whose lines a warning passes over.
_PASSED_OVER = ('native_sparse_attention', 'torch')


def warn_user(message: str, owner: object, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that constructs or calls `owner`: not inside this package or PyTorch, and not in a method of
    owner, such as the constructor of a subclass. Traced code has no such line and gives no warning.
    """
    if torch.compiler.is_compiling():
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        code, package = frame.f_code, frame.f_globals.get('__name__', '').partition('.')[0]
        methods = (vars(cls).get(code.co_name) for cls in type(owner).__mro__)
        if package not in _PASSED_OVER and all(getattr(method, '__code__', None) is not code for method in methods):
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
