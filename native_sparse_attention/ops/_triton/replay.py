"""Replay an op: a call like an earlier one repeats its allocations, operations and launches without its Python code.

The function of a registered op finds sizes, settings and descriptors from shapes, strides, dtypes and settings. With
few tokens that takes longer than its kernels. Calls that agree in these do the same, so the second call of a kind is
recorded and later ones replay the record. A first call is not recorded, since its lengths may never come again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.core import private, remember
from native_sparse_attention.ops._triton.launch import (
    CompiledKernel,
    are_watched,
    is_current,
    launcher,
    make_descriptor,
    recorders,
)

# Records of all ops; cleared at MAX_RECORDS entries. A call of more than MAX_STEPS steps does not wait for its host.
MAX_RECORDS, MAX_STEPS = 2048, 256
# By the properties of a call: its record, or None where it cannot be replayed, or SEEN after a first call.
_RECORDS: dict[tuple[Any, ...], Record | str | None] = {}
SEEN = 'seen'
# Functions of PyTorch that allocate a tensor and write nothing.
_ALLOCATIONS = {'empty', 'empty_strided', 'empty_like', 'new_empty', 'new_empty_strided'}
_Layout = tuple[torch.Size, tuple[int, ...]]
# A step takes the tensors of all slots, and their addresses.
_Step = Callable[[list[Any], list[int]], None]


_observer = cache(private.find_observer)


class Place(NamedTuple):
    """A tensor among values: that of a slot, from `offset` on (bytes in a launch, elements in an operation).

    layout: of a view, shape and strides; of a tensor descriptor, its constructor's arguments; or None.
    """

    index: int
    slot: int
    offset: int
    layout: Any


class Values(NamedTuple):
    """Arguments of a launch or an operation, outputs, or a tuple among them, with tensors and tuples left out.

    whole: index and slot of each tensor that is that of its slot.
    """

    fixed: list[Any]
    whole: list[tuple[int, int]]
    places: list[Place]
    tuples: list[tuple[int, Values]]

    def fill(self, make: Callable[[Any, int, Any], Any], slots: list[Any]) -> list[Any]:
        """Return the values, with the items of slots; for each `Place` make(item, offset, layout)."""
        fixed, whole, places, tuples = self
        filled = fixed.copy()
        for index, slot in whole:
            filled[index] = slots[slot]
        for index, slot, offset, layout in places:
            filled[index] = make(slots[slot], offset, layout)
        for index, inner in tuples:
            filled[index] = tuple(inner.fill(make, slots))
        return filled


class Address:
    """Stands in for the tensor of a descriptor, of which launchers read the address alone."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


class Slot(NamedTuple):
    """A tensor with memory of its own, as recorded: an input, an allocation, or a result of an operation."""

    address: int
    dtype: torch.dtype
    layout: _Layout


class Record(NamedTuple):
    """Steps, each with the slots that nothing reads after it, and the outputs: one, or a tuple."""

    steps: list[tuple[_Step, tuple[int, ...]]]
    num_slots: int
    outputs: Values

    def replay(self, inputs: list[Tensor]) -> Any:
        others = self.num_slots - len(inputs)
        slots: list[Any] = [*inputs, *[None] * others]
        addresses = [*(t.data_ptr() for t in inputs), *[0] * others]
        for step, unused in self.steps:
            step(slots, addresses)
            if unused:
                for slot in unused:
                    slots[slot] = None
        (outputs,) = self.outputs.fill(_view, slots)
        return outputs


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a registered op, with replays. It must read no tensor on the host."""

    @wraps(function)
    def call(*inputs: Any) -> Any:
        tensors = private.tensors_in(inputs)
        device = tensors[0].device
        if device.type not in remember.DEVICES or launcher is None or are_watched() or private.may_be_dispatched():
            return function(*inputs)
        key: tuple[Any, ...] = (
            function,
            device,
            *(x if type(x) in private.CONSTANTS else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in inputs),
        )
        ids = [*map(id, tensors)]
        if len({*ids}) < len(ids):
            key += tuple(map(ids.index, ids))  # which inputs are one tensor
        found = _RECORDS.get(key, '')
        if isinstance(found, Record):
            with nullcontext() if is_current(device) else torch.cuda.device(device):
                return found.replay(tensors)
        if found is None:
            return function(*inputs)
        if len(_RECORDS) >= MAX_RECORDS:
            _RECORDS.clear()
        if found != SEEN:
            _RECORDS[key] = SEEN
            return function(*inputs)
        recorder = Recorder(tensors)
        outputs = recorder.run(function, inputs)
        _RECORDS[key] = recorder.finish(outputs)
        return outputs

    return call


def forget() -> None:
    """Forget all records: settings that calls do not take as arguments may have changed."""
    _RECORDS.clear()


class Recorder:
    """Records the steps of a call. It keeps no tensor alive."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.is_complete = True
        # Each step with the slots that it reads or writes.
        self._steps: list[tuple[_Step, list[int]]] = []
        self._slots: list[Slot] = []
        self._slot_of: Any = WeakTensorKeyDictionary()
        for tensor in inputs:
            self._add_slot(tensor)
        self._num_inputs, self._device = len(self._slots), inputs[0].device

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        observe = _observer()
        if observe is None:
            self.is_complete = False
            return function(*inputs)
        recorders.active = self
        try:
            with observe(self._observe):
                return function(*inputs)
        finally:
            recorders.active = None

    def finish(self, outputs: Any) -> Record | None:
        used: list[int] = []
        described = self._describe((outputs,), used)
        if not self.is_complete or len(self._steps) > MAX_STEPS or min(used, default=0) < self._num_inputs:
            return None
        needed, steps = {*used, *range(self._num_inputs)}, []
        for step, slots in reversed(self._steps):
            steps.append((step, tuple({*slots} - needed)))
            needed.update(slots)
        return Record(steps[::-1], len(self._slots), described)

    def add_launch(self, known: CompiledKernel | None, grid: tuple[int, ...], args: Any, device: torch.device) -> None:
        """Record a launch by `launch`; known: None where Triton has to launch it."""
        if known is None:
            self.is_complete = False
            return
        slots: list[int] = []
        values = self._describe(args, slots, in_bytes=True)
        self._steps.append((partial(_launch, known, grid, device, values), slots))

    def _add_slot(self, tensor: Tensor) -> int:
        self._slot_of[tensor] = len(self._slots)
        self._slots.append(Slot(tensor.data_ptr(), tensor.dtype, (tensor.shape, tensor.stride())))
        return len(self._slots) - 1

    def _observe(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of PyTorch, and record it."""
        recorders.active = None
        try:
            result = function(*args, **kwargs)
        finally:
            recorders.active = self
        name = str(function).split('.')[1]
        inputs = [*_tensors_in(args), *_tensors_in([*kwargs.values()])]
        results = [*_tensors_in(result)]
        is_known = all(t in self._slot_of for t in inputs) and bool(results)
        self.is_complete = self.is_complete and is_known
        if not self.is_complete:
            return result
        if name in _ALLOCATIONS and result.device == self._device:
            slot = self._add_slot(result)
            self._steps.append((partial(_allocate, slot, *self._slots[slot].layout, result.dtype), [slot]))
            return result
        memory = {t.untyped_storage().data_ptr(): self._slot_of[t] for t in reversed(inputs)}
        memory.pop(0, None)  # empty tensors
        is_written = name.endswith('_') or 'out' in kwargs
        if not is_written and all(t.untyped_storage().data_ptr() in memory for t in results):
            for view in results:
                if view not in self._slot_of:
                    self._slot_of[view] = memory[view.untyped_storage().data_ptr()]
            return result
        used: list[int] = []
        described, keywords = self._describe(args, used), self._describe(kwargs.values(), used)
        new = [] if is_written else [self._add_slot(t) for t in results]
        self._steps.append((partial(_operate, function, described, [*kwargs], keywords, new), [*used, *new]))
        return result

    def _describe(self, args: Iterable[Any], used: list[int], *, in_bytes: bool = False) -> Values:
        """Return the arguments of a launch (in_bytes) or an operation, and append their slots to `used`."""
        values = Values([*args], [], [], [])
        for index, arg in enumerate(values.fixed):
            if isinstance(arg, list | tuple):
                inner = self._describe(arg, used, in_bytes=in_bytes)
                if inner.whole or inner.places or inner.tuples:
                    values.fixed[index] = None
                    values.tuples.append((index, inner))
                continue
            tensor = arg.base if isinstance(arg, TensorDescriptor) else arg
            if not isinstance(tensor, Tensor):
                continue
            slot = self._slot_of.get(tensor, 0)
            self.is_complete = self.is_complete and tensor in self._slot_of
            used.append(slot)
            address, dtype, whole = self._slots[slot]
            offset, layout = tensor.data_ptr() - address, None
            if tensor is not arg:
                layout = {'shape': arg.shape, 'strides': arg.strides, 'block_shape': arg.block_shape}
            elif not in_bytes:
                self.is_complete = self.is_complete and tensor.dtype == dtype
                layout = None if (tensor.shape, tensor.stride()) == whole else (tensor.shape, tensor.stride())
                offset //= tensor.element_size()
            values.fixed[index] = None
            if offset == 0 and layout is None:
                values.whole.append((index, slot))
            else:
                values.places.append(Place(index, slot, offset, layout))
        return values


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _allocate(
    slot: int, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, slots: list[Any], addresses: list[int]
) -> None:
    slots[slot] = tensor = slots[0].new_empty_strided(shape, strides, dtype=dtype)
    addresses[slot] = tensor.data_ptr()


def _operate(
    function: Any,
    args: Values,
    names: list[str],
    kwargs: Values,
    new: list[int],
    slots: list[Any],
    addresses: list[int],
) -> None:
    result = function(*args.fill(_view, slots), **dict(zip(names, kwargs.fill(_view, slots), strict=True)))
    for slot, tensor in zip(new, _tensors_in(result), strict=False):
        slots[slot], addresses[slot] = tensor, tensor.data_ptr()


def _launch(
    known: CompiledKernel, grid: tuple[int, ...], device: torch.device, values: Values, _: Any, addresses: list[int]
) -> None:
    assert launcher is not None
    launcher.start(known.launch, grid, device, values.fill(_point, addresses))


def _point(address: int, offset: int, layout: dict[str, list[int]] | None) -> Any:
    return address + offset if layout is None else make_descriptor(Address(address + offset), layout)  # type: ignore[arg-type]


def _view(tensor: Tensor, offset: int, layout: _Layout) -> Tensor:
    return tensor.as_strided(*layout, tensor.storage_offset() + offset)
