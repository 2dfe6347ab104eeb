"""Triton's interpreter without its repeated work, which takes longer than the arithmetic on small tiles.

For every value of a kernel it checks the shape, writes the name of the type and wraps each length; for every function
that a kernel calls it patches the language again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Patch the language once per launch. Let block types of equal element type and shape share their attributes, and
    so tensors of the same type.
    """
    patched: set[Any] = set()
    launch, patch_language = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    @cache
    def languages_of(function: Any) -> set[Any]:
        return {module for module in function.__globals__.values() if module is tl or module is tl.core}

    def patch_once(function: Any) -> Any:
        languages = languages_of(function)
        if languages <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages)
        return patch_language(function)

    patch.setattr(interpreter.GridExecutor, '__call__', launch_anew)
    patch.setattr(interpreter, '_patch_lang', patch_once)
    patch.setattr(tl.block_type, '__init__', _init_block_type(tl.block_type.__init__))
    patch.setattr(tl.tensor, '__init__', _init_tensor(tl.tensor.__init__))
    patch.setattr(TritonSemantic, 'broadcast_impl_value', _broadcast(TritonSemantic.broadcast_impl_value))


def _init_block_type(init: Callable[..., None]) -> Callable[..., None]:
    made: dict[Any, dict[str, Any]] = {}

    @wraps(init)
    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = tuple(shape)
        if not all(type(length) is int for length in lengths):
            init(self, element_ty, shape)
            return
        key = element_ty.name, lengths
        if key not in made:
            init(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__ = made[key]

    return init_once


def _init_tensor(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_once(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get('of_tensors')
        if attributes is None:
            init(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != 'handle'}
        else:
            self.__dict__.update(attributes, handle=handle)

    return init_once


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_others
