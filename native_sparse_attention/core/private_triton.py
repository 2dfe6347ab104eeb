"""Private interfaces of Triton. Each use has a feature test and a fallback, as in `core.private`.

Importing this file does not import triton: the functions import it when they are called.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.private import first, require


class CompiledLaunch(NamedTuple):
    """A compiled kernel: its launcher, what that takes before the values, and the constants, its last values."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class RecordedLaunch(NamedTuple):
    """A launch: arguments[FIRST_VALUE:] are the values, in the order of the kernel.

    compiled: kept alive, because Triton 3.8 unloads a kernel when it is collected.
    """

    run: Any
    arguments: list[Any]
    compiled: Any


# Positions in the arguments of a launcher: the stream, and the first value.
_STREAM, FIRST_VALUE = 3, 9


class Launcher:
    """Starts compiled kernels without the work that Triton does per launch: to bind the arguments, to look at each of
    them, and to find the compiled kernel.

    A launcher of Triton takes (*grid, stream, function, metadata, launch metadata, two hooks, *values), where values
    has an address (int) for a tensor and includes the constants.
    """

    def __init__(self) -> None:
        from triton import knobs
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler import CompiledKernel
        from triton.runtime import JITFunction, driver

        # Triton's own launch, by its source.
        source = ' '.join(inspect.getsource(JITFunction.run).split())
        require(all(statement in source for statement in _LAUNCH))
        # Kernels are specialised by the address of a tensor, and by nothing else of it but the dtype.
        for address, expected in ((32, 'D'), (4, '')):
            tensor: Any = SimpleNamespace(data_ptr=lambda address=address: address)
            require(CUDABackend.get_tensor_specialization(tensor, align=True) == expected)
        self.knobs, self._compiled = knobs.runtime, CompiledKernel
        self.driver: Any = driver
        self.is_watched()

    def is_watched(self) -> bool:
        """Whether a hook, of a profiler say, must be called for every launch."""
        knobs = self.knobs
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        return bool(getattr(enter, 'calls', enter) or getattr(leave, 'calls', leave))

    def is_compiled(self, launched: Any) -> bool:
        """Whether the result of kernel[grid](...) can be launched again: nothing interpreted, and not on AMD GPUs,
        where kernels depend on the sizes of storages too.
        """
        return isinstance(launched, self._compiled) and torch.version.hip is None

    def keep(self, kernel: Any, compiled: Any, count: int, meta: Mapping[str, Any]) -> CompiledLaunch:
        """The compiled kernel of kernel[grid](*args, **meta) with `count` args."""
        constants = tuple(meta[name] for name in kernel.arg_names[count:])
        return CompiledLaunch(compiled.run, compiled.function, compiled.packed_metadata, constants)

    def record(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]
    ) -> RecordedLaunch:
        """The launch of kernel[grid](*args, **meta), with tensors among its values that the caller replaces."""
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **{name: value for name, value in meta.items() if name in signature.parameters})
        bound.apply_defaults()
        x, y, z = (*grid, 1, 1)[:3]
        leading = (x, y, z, None, compiled.function, compiled.packed_metadata, None, None, None)
        return RecordedLaunch(compiled.run, [*leading, *bound.arguments.values()], compiled)

    def start(self, kept: CompiledLaunch, grid: tuple[int, ...], device: torch.device, values: Iterable[Any]) -> None:
        """Launch on the current stream of the device, which is the current one."""
        run, function, metadata, constants = kept
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.driver.active.get_current_stream(device.index)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *constants)

    def replay(self, launches: Iterable[RecordedLaunch], device: torch.device) -> None:
        """Make the launches again, on the current stream of the device."""
        active = self.driver.active
        if device.index != active.get_current_device():
            with torch.cuda.device(device):
                return self.replay(launches, device)
        stream = active.get_current_stream(device.index)
        for run, arguments, _ in launches:
            arguments[_STREAM] = stream
            run(*arguments)
        return None


# In the source of JITFunction.run, with single spaces.
_LAUNCH = (
    'device = driver.active.get_current_device()',
    'stream = driver.active.get_current_stream(device)',
    'kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, '
    'knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())',
)


def find_launcher() -> Launcher | None:
    """None where Triton does not launch in the way that `Launcher` knows: then every launch goes through Triton."""
    return first(Launcher, lambda: None)


def find_describer() -> Callable[[Tensor, Mapping[str, list[int]]], Any]:
    """The function that makes a TensorDescriptor of a tensor, given its shape, strides and block_shape.

    They have been checked, so where nothing else happens in its constructor, the constructor is not called.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    def describe(tensor: Any, layout: Mapping[str, list[int]]) -> TensorDescriptor:
        return TensorDescriptor(tensor, layout['shape'], layout['strides'], layout['block_shape'])

    def describe_unchecked(tensor: Any, layout: Mapping[str, list[int]]) -> TensorDescriptor:
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__.update(layout, base=tensor)
        return descriptor

    def known() -> Callable[..., TensorDescriptor]:
        tensor = SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 0)
        layout = {'shape': [4, 16], 'strides': [16, 1], 'block_shape': [2, 16]}
        names = [field.name for field in dataclasses.fields(TensorDescriptor)]
        fast, checked = describe_unchecked(tensor, layout), describe(tensor, layout)
        require(vars(checked).keys() == set(names))
        require(all(getattr(fast, name) == getattr(checked, name) for name in names))
        return describe_unchecked

    return first(known, lambda: describe)


def find_launcher_builder() -> Callable[[Any], None]:
    """The function that compiles the C code which launches a compiled kernel.

    Triton 3.6 compiles it when a kernel is first launched, in 0.2 to 0.3 s for each signature, and keeps the library in
    its cache on disk. Newer versions have one launcher for all signatures. The fallback leaves it to the first launch.
    """

    def known() -> Callable[[Any], None]:
        from triton.compiler import CompiledKernel
        from triton.runtime import driver

        statement = 'driver.active.launcher_cls(self.src, self.metadata)'
        require(statement in inspect.getsource(CompiledKernel._init_handles))

        def build(kernel: Any) -> None:
            active: Any = driver.active
            active.launcher_cls(kernel.src, kernel.metadata)

        return build

    return first(known, lambda: lambda kernel: None)
