"""Record the operations and kernel launches of a call, forward and backward, as a program that repeats them.

A program is Python code without branches: allocations, launches with addresses in place of tensors, and the few other
operations of PyTorch. It depends on the shapes, strides, dtypes and alignment of the inputs, not on their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.core.private_recording import find_recording
from native_sparse_attention.ops._triton import launch as launches
from native_sparse_attention.ops._triton.program import MAX_SAVED, Program

aten = torch.ops.aten
# Operations that return uninitialised memory.
_EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
# Operations whose results depend on values on the device, or on a random generator, or that change what a tensor is.
_REFUSED = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
}  # fmt: skip
private: Any = find_recording()


class Step(NamedTuple):
    """A line of a program. text: an expression. reads: tensors, and `*name` for the address of a tensor. writes: names
    of the results; None is a result that nothing reads. is_kept: it also changes memory.
    """

    text: str
    reads: list[str]
    writes: list[str | None]
    is_kept: bool


class Recorder(private.mode if private else object):  # type: ignore[misc]
    """A dispatch mode that records what runs inside it. Raises RuntimeError for what a program cannot repeat.

    inputs: tensors with different storages, which the recorded code takes.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = inputs[0].device
        self.steps: list[Step] = []
        self.num_launches = 0
        self.constants: dict[str, Any] = {
            'empty_strided': torch.empty_strided,
            'as_recorded': _as_recorded,
            'describe': launches.make_descriptor,
            'driver': launches.launcher.driver,  # type: ignore[union-attr]
            'kernels': [],  # Triton 3.8 unloads a kernel when it is collected
        }
        # The name of a tensor by storage, address and layout; and of the first tensor of a storage, with its address.
        self._names: dict[tuple[Any, ...], str] = {}
        self._roots: dict[int, tuple[str, int]] = {}
        self._held: list[Any] = []  # keeps the ids of storages from being reused
        self.inputs = [self._define(t) for t in inputs]
        self._layouts = {
            name: (t.shape, t.stride(), t.data_ptr() % 16 == 0) for name, t in zip(self.inputs, inputs, strict=True)
        }

    def begin_backward(self, dout: Tensor) -> None:
        self.num_forward, self.dout = len(self.steps), self._define(dout)

    @contextmanager
    def recording(self) -> Iterator[None]:
        launches.recorders.append(self.record_launch)
        try:
            with self:
                yield
        finally:
            launches.recorders.remove(self.record_launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == 'native_sparse_attention':
            with self:  # also what the op does inside
                return private.function_of(func)(*args, **kwargs)
        if func.namespace != 'aten' or not _REFUSED.isdisjoint(func.tags):
            raise RuntimeError(f'{func} cannot be repeated')
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, tuple | list) or not all(isinstance(t, Tensor) for t in results):
            raise RuntimeError(f'{func} returns {type(result).__name__}, which may depend on values')
        if any(t.device != self.device for t in results):
            raise RuntimeError(f'{func} copies to another device, where values may be read')
        reads: list[str] = []
        if func in _EMPTY:
            text = self._allocation(result)
        else:
            values = [self._operand(value, reads) for value in args]
            values += [f'{key}={self._operand(value, reads)}' for key, value in kwargs.items()]
            text = f'{self._constant(func)}({", ".join(values)})'
        text += '[0]' if results is result and len(results) == 1 else ''
        known = [self._key(t) in self._names for t in results]
        names: list[str | None] = [None if old else self._define(t) for t, old in zip(results, known, strict=True)]
        if private.is_mutable(func) or not all(known):
            self.steps.append(Step(text, reads, names, private.is_mutable(func)))
        return result

    def record_launch(self, known: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Record a launch of this thread. known: the compiled kernel, or None where Triton alone can launch it."""
        if private.innermost_mode() is not self:
            return
        if known is None:
            raise RuntimeError('a kernel is launched by Triton alone')
        run, function, metadata, constants = known.launch
        reads: list[str] = []
        leading = [*map(str, (*grid, 1, 1)[:3]), 'stream', *map(self._constant, (function, metadata)), *['None'] * 3]
        values = [self._value(arg, reads) for arg in args] + [self._value(value, reads) for value in constants]
        text = f'{self._constant(run)}({", ".join((*leading, *values))})'
        self.constants['kernels'].append(known)
        self.steps.append(Step(text, reads, [], is_kept=True))
        self.num_launches += 1

    def finish(self, out: Tensor, grads: Sequence[Tensor | None] | None) -> Program:
        """Return the program. grads: of the inputs, or None for a call without a backward pass."""
        if not self.num_launches:
            raise RuntimeError('nothing was launched')
        result, returned = self._name(out), [None if t is None else self._name(t) for t in grads or ()]
        if self._roots[private.storage_id(out)][0] in self.inputs:
            raise RuntimeError('the output shares the memory of an input')
        split = len(self.steps) if grads is None else self.num_forward
        gradients = [name for name in returned if name is not None]
        backward, needed = _used(self.steps[split:], gradients)
        defined = {*self.inputs, *(name for step in self.steps[:split] for name in step.writes)}
        saved = sorted(needed & defined)
        if len(saved) > MAX_SAVED:
            raise RuntimeError(f'the backward pass reads {len(saved)} tensors')
        forward, _ = _used(self.steps[:split], [result, *saved])
        head = f'    stream = driver.active.get_current_stream({self.device.index})'
        lines = [f'def forward({", ".join(self.inputs)}):', head]
        source = _render(lines, forward, (), f'{result}, {_tuple(saved)}')
        differentiable = tuple(i for i, name in enumerate(returned) if name is not None)
        if differentiable:
            lines = [f'def backward({self.dout}, saved):', f'    {_tuple(saved)} = saved', '    saved.clear()', head]
            lines += [
                f'    {name} = as_recorded({name}, {self._constant(self._layouts[name])})'
                for name in saved
                if name in self.inputs
            ]
            source += _render(lines, backward, saved, _tuple(gradients))
        functions = dict(self.constants)
        exec(compile(source, '<recorded nsa>', 'exec'), functions)
        passes = functions['forward'], functions.get('backward')
        layouts = tuple((t.shape, t.stride(), t.dtype) for t in grads or () if t is not None)
        return Program(self.device, *passes, differentiable, layouts, launches.are_watched, source)

    def _key(self, t: Tensor) -> tuple[Any, ...]:
        return private.storage_id(t), t.data_ptr(), t.shape, t.stride(), t.dtype

    def _define(self, t: Tensor) -> str:
        name = f't{len(self._names)}'
        self._names[self._key(t)] = name
        storage = private.storage_id(t)
        if storage not in self._roots:
            self._roots[storage] = name, t.data_ptr()
            self._held.append(private.hold_id(t))
        return name

    def _name(self, t: Tensor) -> str:
        name = self._names.get(self._key(t))
        if name is None:
            raise RuntimeError('a tensor of unknown origin is read')
        return name

    def _allocation(self, t: Tensor) -> str:
        device = self._constant(t.device)
        return f'empty_strided({tuple(t.shape)}, {t.stride()}, dtype={self._constant(t.dtype)}, device={device})'

    def _operand(self, value: Any, reads: list[str]) -> str:
        """Return the text of an argument of an operation of PyTorch."""
        if isinstance(value, Tensor):
            reads.append(self._name(value))
            return reads[-1]
        if isinstance(value, list | tuple):
            return f'[{", ".join(self._operand(item, reads) for item in value)}]'
        return self._constant(value)

    def _value(self, arg: Any, reads: list[str]) -> str:
        """Return the text of an argument of a launch, with an address in place of a tensor."""
        if isinstance(arg, Tensor):
            root = self._roots.get(private.storage_id(arg))
            if root is None:
                raise RuntimeError('a kernel reads a tensor of unknown origin')
            reads.append(f'*{root[0]}')
            offset = arg.data_ptr() - root[1]
            return f'{root[0]}_ptr + {offset}' if offset else f'{root[0]}_ptr'
        if isinstance(arg, TensorDescriptor):
            reads.append(self._name(arg.base))
            layout = {name: value for name, value in vars(arg).items() if name != 'base'}
            return f'describe({reads[-1]}, {self._constant(layout)})'
        if isinstance(arg, tuple):
            return _tuple(self._value(item, reads) for item in arg)
        return self._constant(arg)

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f'c{len(self.constants)}'
        self.constants[name] = value
        return name


def _tuple(items: Iterable[str]) -> str:
    return f'({"".join(f"{item}, " for item in items)})'


def _used(steps: list[Step], results: Iterable[str]) -> tuple[list[Step], set[str]]:
    """Return the steps that change memory or that results depend on, and all names that they and the results read."""
    needed, used = {*results}, []
    for step in reversed(steps):
        if step.is_kept or not needed.isdisjoint(step.writes):
            writes = [name if name in needed else None for name in step.writes]
            needed.update(name.lstrip('*') for name in step.reads)
            used.append(step._replace(writes=writes))
    return used[::-1], needed


def _render(lines: list[str], steps: list[Step], own: Iterable[str], result: str) -> str:
    """Return the source of a function. lines: its first ones. own: tensors that no caller holds.

    Memory is released after its last use, since later launches run after it.
    """
    last = {read.lstrip('*'): number for number, step in enumerate(steps) for read in step.reads}
    returned = set(result.replace(',', ' ').replace('(', ' ').replace(')', ' ').split())
    own, addressed = {*own}, set()
    for number, step in enumerate(steps):
        for read in step.reads:
            if read.startswith('*') and read not in addressed:
                addressed.add(read)
                lines.append(f'    {read[1:]}_ptr = {read[1:]}.data_ptr()')
        writes = [write or '_' for write in step.writes]
        lines.append(f'    {", ".join(writes)} = {step.text}' if any(step.writes) else f'    {step.text}')
        own.update(write for write in step.writes if write)
        ended = {read.lstrip('*') for read in step.reads} & own - returned
        lines += [f'    del {read}' for read in sorted(ended) if last[read] == number]
        lines += ['    del _'] * (any(step.writes) and None in step.writes)
    return '\n'.join([*lines, f'    return {result}', '', ''])


def _as_recorded(t: Tensor, layout: tuple[torch.Size, tuple[int, ...], bool]) -> Tensor:
    """Return a saved input, as a copy if it does not have the recorded layout: its `data` may be another tensor than in
    the forward pass, as sharding and offload replace it. layout: shape, strides, whether it is aligned to 16 bytes.
    """
    shape, strides, is_aligned = layout
    if t.shape == shape and t.stride() == strides and not (is_aligned and t.data_ptr() % 16):
        return t
    return torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device).copy_(t)
