"""Triton's interpreter without its repeated work, which takes longer than the arithmetic on small tiles.

For every value of a kernel it checks the shape, writes the name of the type and wraps each length; for every operation
it finds out how operands of these types are converted; for every function that a kernel calls it patches the language
again. Operators of tensors go through four functions, though numpy does what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.support.fast_functions import TENSOR, fast_functions, make_tensor

UNKNOWN, UNCHANGED = object(), object()
REVERSED = {'__radd__', '__rsub__', '__rmul__'}
OVERFLOWING = REVERSED | {'__add__', '__sub__', '__mul__'}
COMPARISONS = {'__lt__', '__le__', '__gt__', '__ge__', '__eq__', '__ne__'}
OPERATORS = OVERFLOWING | COMPARISONS | {'__and__', '__or__', '__floordiv__', '__mod__', '__truediv__'}


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Patch the language once per launch, and its functions without the wrappers that look for an argument. Let block
    types of equal element type and shape share their attributes, and so tensors of the same type. Convert operands as
    the first ones of their types.
    """
    patched: set[Any] = set()
    ready: dict[Any, Callable[..., Any]] = {}
    replacements: dict[frozenset[Any], list[Any]] = {}
    launch, patch_language = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        ready.clear()
        launch(self, *args, **kwargs)

    def call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in ready:
            patch_once(self.fn)
            ready[self.fn] = self.rewrite()
        try:
            return ready[self.fn](*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    @cache
    def languages_of(function: Any) -> set[Any]:
        return {module for module in function.__globals__.values() if module is tl or module is tl.core}

    def patch_once(function: Any) -> Any:
        languages = languages_of(function)
        if languages <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages)
        key = frozenset(languages)
        if key not in replacements:
            scope = patch_language(function)
            replacements[key] = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for replacement in replacements[key]:
            scope.set_attr(*replacement)
        return scope

    semantic = TritonSemantic
    for owner, name, value in (
        (interpreter.GridExecutor, '__call__', launch_anew),
        (interpreter, '_patch_lang', patch_once),
        (interpreter, '_patch_attr', _patch_attr),
        (TensorHandle, '__init__', _init_handle(TensorHandle.__post_init__)),
        (tl.core, '_unwrap_if_constexpr', _unwrap_others(tl.core._unwrap_if_constexpr)),
        (tl.dtype, '__eq__', _equal_others(tl.dtype.__eq__)),
        (tl.block_type, '__init__', _init_block_type(tl.block_type.__init__)),
        (tl.tensor, '__init__', _init_tensor(tl.tensor.__init__)),
        (semantic, 'binary_op_type_checking_impl', _convert_as_before(semantic.binary_op_type_checking_impl, False)),
        (semantic, 'broadcast_impl_value', _convert_as_before(semantic.broadcast_impl_value, True)),
        (semantic, 'cast', _cast_others(semantic.cast)),
        (interpreter.InterpretedFunction, '__call__', call_patched),
        *fast_functions(),
    ):
        patch.setattr(owner, name, value)


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give a function of the language its last argument, as Triton's function of this name does."""
    function, semantic = getattr(member, '__wrapped__', member), interpreter.interpreter_semantic
    if owner is TENSOR and name in OPERATORS:
        scope.set_attr(owner, name, _operate_as_before(function, name))
        return
    if owner is TENSOR and name == '__getitem__':
        scope.set_attr(owner, name, _index_as_before(function))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs['_semantic'] = semantic
        return function(*args, **kwargs)

    # Functions of a class are bound to their tensors, those of a module need no function of Python in between.
    scope.set_attr(owner, name, call if isinstance(owner, type) else partial(function, _semantic=semantic))


def _operate_as_before(function: Callable[..., Any], name: str) -> Callable[[Any, Any], Any]:
    """Return an operator of two tensors, or of a tensor and a number, that remembers by their types which function of
    numpy is applied to which element types. numpy broadcasts the operands.
    """
    plans: dict[Any, Any] = {}
    semantic: Any = interpreter.interpreter_semantic
    check = getattr(semantic, name.strip('_').removeprefix('r')) if name in OVERFLOWING else None
    is_reversed = name in REVERSED

    def operate(self: Any, other: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        key = self.type.name, other.type.name if type(other) is TENSOR else (type(other), other)
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            plan = plans[key] = _make_plan(function, name, self, other)
        if plan is None:
            return function(self, other, _semantic=semantic)
        apply, number, types, dtype, result_type, is_checked = plan
        lhs, rhs = self, other if number is None else number
        if is_reversed:
            lhs, rhs = rhs, lhs
        if is_checked:
            semantic.binary_op_sanitize_overflow_impl(lhs, rhs, check)
        lhs, rhs = lhs.handle.data, rhs.handle.data
        if types:
            lhs, rhs = lhs.astype(types[0]), rhs.astype(types[1])
        return make_tensor(apply(lhs, rhs), dtype, result_type)

    return operate


def _make_plan(function: Callable[..., Any], name: str, tensor: Any, other: Any) -> Any:
    """Return the function of numpy that an operator applies, a number as a tensor, element types that operands are
    converted to, the element type and the type of the result, and whether overflow is checked; None if it does
    anything else.
    """
    calls: list[Any] = []
    binary_op, addptr = InterpreterBuilder.binary_op, InterpreterBuilder.create_addptr
    idiv = InterpreterBuilder.create_idiv

    def note_operation(builder: Any, lhs: Any, rhs: Any, ufunc: Any) -> Any:
        calls.append((lhs, rhs, ufunc, binary_op(builder, lhs, rhs, ufunc)))
        return calls[-1][3]

    def note_offset(builder: Any, ptr: Any, offset: Any) -> Any:
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        calls.append((ptr, offset, lambda p, o: p + width * o.astype(np.uint64), addptr(builder, ptr, offset)))
        return calls[-1][3]

    def note_division(builder: Any, lhs: Any, rhs: Any) -> Any:
        calls.append((lhs, rhs, lambda a, b: (a - np.fmod(a, b)) // b, idiv(builder, lhs, rhs)))
        return calls[-1][3]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, 'binary_op', note_operation)
        patch.setattr(InterpreterBuilder, 'create_idiv', note_division)
        patch.setattr(InterpreterBuilder, 'create_addptr', note_offset)
        patch.setattr(TritonSemantic, 'binary_op_sanitize_overflow_impl', lambda *_: None)
        result = function(tensor, other, _semantic=interpreter.interpreter_semantic)
    if len(calls) != 1 or result.handle is not calls[0][3]:
        return None
    lhs, rhs, apply, _ = calls[0]
    given = [other, tensor] if name in REVERSED else [tensor, other]
    is_offset = lhs.dtype.is_ptr()
    if is_offset and not tensor.dtype.is_ptr():
        return None  # the operands change places
    number = None if type(other) is TENSOR else TENSOR(lhs if name in REVERSED else rhs, tensor.type)
    pairs = [(operand, value) for operand, value in zip((lhs, rhs), given, strict=True) if type(value) is TENSOR]
    types = [(operand.data.dtype, value.handle.data.dtype) for operand, value in pairs]
    if is_offset or all(into == given for into, given in types):
        is_checked = not is_offset and name in OVERFLOWING and tensor.dtype.is_int()
        return apply, number, None, lhs.dtype.scalar, result.type, is_checked
    if number is None and all(into == np.int64 and given.kind == 'i' for into, given in types):
        return apply, None, (np.int64, np.int64), lhs.dtype.scalar, result.type, False
    return None


def _index_as_before(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Remember the type of a tensor that gets more dimensions."""
    types: dict[Any, Any] = {}
    everything = slice(None)

    def index(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple:
            return function(self, slices, _semantic=interpreter.interpreter_semantic)
        key = self.type.name, *[None if s is None else type(s) is slice and s == everything for s in slices]
        if key in types:
            return make_tensor(self.handle.data[slices], *types[key])
        result = function(self, slices, _semantic=interpreter.interpreter_semantic)
        if self.type.is_block() and False not in key:
            types[key] = result.handle.dtype, result.type
        return result

    return index


def _init_handle(check: Callable[[Any], None]) -> Callable[..., None]:
    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        # Every type but a pointer has a width.
        if data.itemsize > 1 and data.itemsize * 8 > getattr(dtype, 'primitive_bitwidth', 64):
            check(self)

    return init


def _unwrap_others(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, float, bool, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}
    return lambda value: value if type(value) in plain else unwrap(value)


def _equal_others(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _init_block_type(init: Callable[..., None]) -> Callable[..., None]:
    made: dict[Any, dict[str, Any]] = {}

    @wraps(init)
    def init_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if key not in made:
            init(self, element_ty, shape)
            if not all(type(length) is int for length in shape):
                return
            made[key] = self.__dict__
        self.__dict__ = made[key]

    return init_once


def _init_tensor(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_once(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get('of_tensors')
        if attributes is None:
            init(self, handle, type)
            assert self.__dict__.keys() == {'handle', 'type', 'shape', 'numel', 'dtype'}
            type.of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = attributes

    return init_once


def _convert_as_before(convert: Callable[..., Any], expands: bool) -> Callable[..., Any]:
    """Remember, by the types of two operands and by the value of a number, how `convert` converts them: not at all, to
    another shape, or a number to a tensor. `convert` is called again where element types change.

    expands: also the data gets the other shape; else numpy broadcasts it when the operation is applied.
    """
    plans: dict[Any, Any] = {}

    def make_plan(operand: Any, result: Any) -> Any:
        into = result.type
        if result is operand:
            return lambda _, operand: operand
        if type(operand) is not TENSOR:
            return lambda *_: tl.tensor(result.handle, into)
        if into.scalar != operand.type.scalar:
            return None
        if not expands:
            return lambda _, operand: tl.tensor(operand.handle, into)
        if operand.type.is_block():
            return lambda builder, operand: tl.tensor(builder.create_broadcast(operand.handle, into.shape), into)
        return lambda builder, operand: tl.tensor(builder.create_splat(into, operand.handle), into)

    @wraps(convert)
    def convert_as_before(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        key = (
            lhs.type.name if type(lhs) is TENSOR else (type(lhs), lhs),
            rhs.type.name if type(rhs) is TENSOR else (type(rhs), rhs),
            flags,
            *named.items(),
        )
        plan = plans.get(key, UNKNOWN)
        if plan is UNCHANGED:
            return lhs, rhs
        if plan is UNKNOWN:
            results = convert(self, lhs, rhs, *flags, **named)
            plans[key] = make_plan(lhs, results[0]), make_plan(rhs, results[1])
            if results[0] is lhs and results[1] is rhs:
                plans[key] = UNCHANGED
            return results
        if None in plan:
            return convert(self, lhs, rhs, *flags, **named)
        return plan[0](self.builder, lhs), plan[1](self.builder, rhs)

    return convert_as_before


def _cast_others(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Remember which casts convert the data once, but for types that numpy does not have."""
    plans: dict[Any, Any] = {}

    def make_plan(self: Any, value: Any, type: Any) -> Any:
        results, cast_impl = [], InterpreterBuilder.cast_impl

        def note(builder: Any, handle: Any, into: Any) -> Any:
            results.append(cast_impl(builder, handle, into))
            return results[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpreterBuilder, 'cast_impl', note)
            result = cast(self, value, type)
        is_one = len(results) == 1 and result.handle is results[0]
        is_known = not any(word in f'{value.type} {type}' for word in ('bf16', 'fp8'))
        return (result.handle.data.dtype, result.handle.dtype, result.type) if is_one and is_known else None

    def cast_others(self: Any, value: Any, type: Any, rounding: Any = None) -> Any:
        if value.type.scalar is type.scalar:
            return value
        if rounding is not None:
            return cast(self, value, type, rounding)
        key = value.type.name, type.name
        if key not in plans:
            plans[key] = make_plan(self, value, type)
        if plans[key] is None:
            return cast(self, value, type)
        data_dtype, dtype, into = plans[key]
        return make_tensor(value.handle.data.astype(data_dtype), dtype, into)

    return cast_others
