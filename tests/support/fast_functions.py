"""Functions of Triton's language, and what they call, without what the interpreter repeats for every value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

TENSOR: Any = tl.tensor
# Element types that numpy converts as Triton does.
PLAIN = {'fp16', 'fp32', 'fp64', 'int32', 'int64'}
new = object.__new__


def fast_functions() -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of functions, with owner and name."""
    semantic = TritonSemantic
    yield tl.tuple, '__getitem__', _get_item(tl.tuple.__getitem__)
    yield semantic, 'to_tensor', _convert_numbers_once(semantic.to_tensor)
    yield semantic, 'arange', _arange_once(semantic.arange)
    yield semantic, 'full', _full_once(semantic.full)
    yield semantic, 'where', _where_as_before(semantic.where)
    yield semantic, 'load', _load_as_before(semantic.load)
    yield semantic, 'dot', _dot_as_before(semantic.dot)
    yield TensorHandle, 'get_element_ty', _element_type
    yield ReduceOps, 'sum', _sum
    yield ReduceOps, 'min_max', _min_max(ReduceOps.min_max)
    yield InterpreterBuilder, 'create_expand_dims', _expand_dims
    yield InterpreterBuilder, 'create_broadcast', _broadcast
    yield InterpreterBuilder, 'create_splat', _splat(InterpreterBuilder.create_splat)
    yield interpreter, '_get_np_dtype', _numpy_dtype_once(interpreter._get_np_dtype)


def make_tensor(data: Any, dtype: Any, type: Any) -> Any:
    """Return a tensor of a type that tensors have had before, whose data is no wider than its element type."""
    handle, tensor = new(TensorHandle), new(TENSOR)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.handle, tensor.type = handle, type
    tensor.shape, tensor.numel, tensor.dtype = type.of_tensors
    return tensor


def _convert_numbers_once(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same tensor for the same number. Operators never write into their operands."""
    constants: dict[Any, Any] = {}

    @wraps(convert)
    def convert_once(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is TENSOR:
            return value
        if kind is tl.constexpr:
            value, kind = value.value, type(value.value)
        if kind is not int and kind is not float and kind is not bool:
            return convert(self, value, check_type)
        key = kind, value
        found = constants.get(key)
        if found is None:
            found = constants[key] = convert(self, value, check_type)
        return found

    return convert_once


def _arange_once(arange: Callable[..., Any]) -> Callable[..., Any]:
    ranges: dict[Any, Any] = {}

    @wraps(arange)
    def arange_once(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            ranges[start, end] = arange(self, start, end)
        return ranges[start, end]

    return arange_once


def _numpy_dtype_once(describe: Callable[[Any], Any]) -> Callable[[Any], Any]:
    dtypes: dict[str, Any] = {}

    @wraps(describe)
    def describe_once(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = np.dtype(describe(dtype))
        return dtypes[dtype.name]

    return describe_once


def _sum(self: Any, value: Any) -> Any:
    return self.to_tensor(np.add.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims), value.dtype)


def _min_max(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce as numpy's functions that ignore NaN do, without their warning of rows that are NaN alone."""
    functions = {np.nanmax: np.fmax, np.nanmin: np.fmin}

    @wraps(reduce)
    def reduce_fast(self: Any, value: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if idx_reduce_op is not None:
            return reduce(self, value, val_reduce_op, idx_reduce_op)
        value = value[0] if isinstance(value, tuple) else value
        result = functions[val_reduce_op].reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(result, value.dtype)

    return reduce_fast


def _get_item(get: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, index: self.values[index] if type(index) is int else get(self, index)


def _element_type(self: Any) -> Any:
    dtype = self.dtype
    while type(dtype) is not tl.dtype and hasattr(dtype, 'element_ty'):
        dtype = dtype.element_ty
    return dtype


def _full_once(full: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same tensor for the same number, shape and type."""
    constants: dict[Any, Any] = {}

    @wraps(full)
    def full_once(self: Any, shape: Any, value: Any, dtype: Any) -> Any:
        if type(value) is TENSOR:
            return full(self, shape, value, dtype)
        key = tuple(shape), type(value), value, dtype.name
        if key not in constants:
            constants[key] = full(self, shape, value, dtype)
        return constants[key]

    return full_once


def _calls_of(name: str, function: Callable[..., Any], *args: Any) -> tuple[Any, list[Any]]:
    """Return the result of a function and the arguments and results with which it calls one of the builder."""
    calls: list[Any] = []
    build = getattr(InterpreterBuilder, name)

    def note(builder: Any, *given: Any) -> Any:
        calls.append((*given, build(builder, *given)))
        return calls[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, name, note)
        return function(*args), calls


def _where_as_before(where: Callable[..., Any]) -> Callable[..., Any]:
    """Remember by the types of three operands, and the values of numbers, the type of the result. Only where no element
    type changes: numpy broadcasts the operands.
    """
    plans: dict[Any, Any] = {}

    @wraps(where)
    def where_as_before(self: Any, condition: Any, x: Any, y: Any) -> Any:
        key = (
            condition.type.name,
            x.type.name if type(x) is TENSOR else (type(x), x),
            y.type.name if type(y) is TENSOR else (type(y), y),
        )
        if key not in plans:
            result, calls = _calls_of('ternary_op', where, self, condition, x, y)
            pairs = list(zip((condition, x, y), calls[0][:3], strict=True))
            is_plain = len(calls) == 1 and result.handle is calls[0][-1]
            is_plain &= result.handle.data.dtype == pairs[2][1].data.dtype
            is_plain &= all(t.handle.data.dtype == used.data.dtype for t, used in pairs if type(t) is TENSOR)
            numbers = [None if type(t) is TENSOR else used.data for t, used in pairs[1:]]
            plans[key] = (*numbers, result.handle.dtype, result.type) if is_plain else None
            return result
        if plans[key] is None:
            return where(self, condition, x, y)
        x_number, y_number, dtype, into = plans[key]
        x = x.handle.data if x_number is None else x_number
        y = y.handle.data if y_number is None else y_number
        return make_tensor(np.where(condition.handle.data, x, y), dtype, into)

    return where_as_before


def _load_as_before(load: Callable[..., Any]) -> Callable[..., Any]:
    """Remember by their types which loads read a tile through a mask, with another value elsewhere."""
    plans: dict[Any, Any] = {}

    @wraps(load)
    def load_as_before(self: Any, ptr: Any, mask: Any, other: Any, *options: Any) -> Any:
        if mask is None or other is None or not ptr.type.is_block():
            return load(self, ptr, mask, other, *options)
        key = ptr.type.name, mask.type.name, other.type.name, *options
        if key not in plans:
            result = load(self, ptr, mask, other, *options)
            elements = ptr.type.scalar.element_ty, other.type.scalar
            is_plain = mask.type.scalar is tl.int1 and {dtype.name for dtype in elements} <= PLAIN
            is_whole = result.handle.data.shape == ptr.handle.data.shape
            plans[key] = (result.handle.data.dtype, elements[0], result.type) if is_plain and is_whole else None
            return result
        if plans[key] is None:
            return load(self, ptr, mask, other, *options)
        data_dtype, dtype, into = plans[key]
        ptr, mask, other = ptr.handle, mask.handle, other.handle.data
        shape = ptr.data.shape
        if mask.data.shape != shape:
            mask = TensorHandle(_filled(shape, mask.data, mask.data.dtype), mask.dtype)
        other = TensorHandle(_filled(shape, other, data_dtype), dtype)
        return TENSOR(self.builder.create_masked_load(ptr, mask, other, None, None, False), into)

    return load_as_before


def _dot_as_before(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Remember by the types of factors and sum how they are multiplied, unless element types change."""
    plans: dict[Any, Any] = {}

    @wraps(dot)
    def dot_as_before(self: Any, lhs: Any, rhs: Any, acc: Any, *options: Any) -> Any:
        key = lhs.type.name, rhs.type.name, acc if acc is None else acc.type.name, *map(str, options)
        if key not in plans:
            result, calls = _calls_of('create_dot', dot, self, lhs, rhs, acc, *options)
            a, b, total, *settings, product = calls[0]
            kept = a is lhs.handle and b is rhs.handle and (acc is None or total is acc.handle)
            plans[key] = (total, settings, result.type) if kept and result.handle is product else None
            return result
        if plans[key] is None:
            return dot(self, lhs, rhs, acc, *options)
        total, settings, into = plans[key]
        total = total if acc is None else acc.handle
        return TENSOR(self.builder.create_dot(lhs.handle, rhs.handle, total, *settings), into)

    return dot_as_before


def _expand_dims(self: Any, handle: Any, axis: int) -> Any:
    return TensorHandle(handle.data[(*[slice(None)] * axis, None)], handle.dtype.scalar)


def _broadcast(self: Any, handle: Any, shape: Any) -> Any:
    return TensorHandle(_filled(shape, handle.data, handle.data.dtype), handle.dtype.scalar)


def _splat(splat: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(splat)
    def splat_scalar(self: Any, ret_ty: Any, arg: Any) -> Any:
        if isinstance(arg.dtype, tl.block_type):
            return splat(self, ret_ty, arg)
        return TensorHandle(_filled(ret_ty.shape, arg.data, interpreter._get_np_dtype(arg.dtype)), arg.dtype.scalar)

    return splat_scalar


def _filled(shape: Any, data: Any, dtype: Any) -> Any:
    array = np.empty(shape, dtype)
    array[...] = data
    return array
