"""The launches of a step made again, without what a launch by Triton costs the host: the arguments bound, their types
and divisors found, and the compiled kernel looked up by them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from native_sparse_attention.ops._triton.launch import are_watched, launch


class Prepared(NamedTuple):
    """A launch: what Triton calls with (*grid, stream, function, metadata, launch metadata, two hooks, *values).

    values: the arguments of the kernel, constants among them, with addresses for tensors.
    """

    run: Any
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    values: list[Any]


class Place(NamedTuple):
    """Where an address goes among the values of a launch, and what follows it in a tuple (None: it is in none)."""

    values: list[Any]
    position: int
    rest: tuple[Any, ...] | None


class Launches:
    """The launches of one step, of which no tensor of the caller is kept: `launch` makes them, and `again` makes them
    for other tensors that look the same.

    What they depend on are the tensors `given`, which are others in every step, by their looks; those that are `owned`,
    by their addresses too; the workspace, which stays; and numbers. A launch of anything else (a copy of an argument,
    say, which must be made anew), or whose tensors cannot be told apart, leaves them not `is_complete`: then a step is
    not to be repeated. So does a kernel that Triton interprets.

    Attributes:
        blocks: what the first launch leaves for φ.
    """

    are_watched = staticmethod(are_watched)

    def __init__(
        self, given: Sequence[Tensor | None], owned: Sequence[Tensor | None], workspace: dict[Any, Tensor]
    ) -> None:
        # On AMD GPUs kernels depend on the sizes of storages too.
        self.is_complete = torch.version.hip is None
        self.blocks: list[Tensor] = []
        self._prepared: list[Prepared] = []
        self._device = torch.device('cpu')
        self._workspace = workspace
        self._held: list[Tensor] = []
        # The index of a tensor that is given, by its id in Python; and for each index the places and the address.
        self._given: dict[int, int] = {}
        self._places: list[list[Place]] = []
        self._addresses: list[int] = []
        self._owned = {id(t) for t in owned if t is not None}
        self.give(*given)

    def give(self, *tensors: Tensor | None) -> None:
        """More tensors that are others in every step: their addresses go to `again` in this order."""
        for tensor in tensors:
            if tensor is not None:
                self.is_complete = self.is_complete and id(tensor) not in self._given
                self._given[id(tensor)] = len(self._places)
            self._places.append([])
            self._addresses.append(0)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
        """What `launch` of ops/_triton does, and keeps what `again` needs."""
        compiled = launch(kernel, grid, *args, device=device, **meta)
        self.is_complete = self.is_complete and isinstance(compiled, CompiledKernel)
        if not self.is_complete:
            return
        self._device = device
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(*args, **{name: value for name, value in meta.items() if name in signature.parameters})
        bound.apply_defaults()
        values: list[Any] = list(bound.arguments.values())
        for position, value in enumerate(values):
            # In a tuple the tensor comes first, and numbers after it.
            first, *rest = value if isinstance(value, tuple) else (value,)
            follows = tuple(rest) if isinstance(value, tuple) else None
            if isinstance(first, Tensor):
                values[position] = first.data_ptr() if follows is None else (first.data_ptr(), *follows)
            if isinstance(first, Tensor) and id(first) in self._given:
                index = self._given[id(first)]
                self._places[index].append(Place(values, position, follows))
                self._addresses[index] = first.data_ptr()
            elif isinstance(first, Tensor):
                self.is_complete = self.is_complete and self._stays(first)
            self.is_complete = self.is_complete and not any(isinstance(item, Tensor) for item in rest)
        x, y, z = (*grid, 1, 1)[:3]
        self._prepared.append(Prepared(compiled.run, (x, y, z), compiled.function, compiled.packed_metadata, values))

    def again(self, addresses: list[int], start: int = 0, stop: int | None = None) -> None:
        """The launches from start to stop, on the current stream, for given tensors at these addresses (0: None)."""
        active: Any = driver.active
        if self._device.index != active.get_current_device():
            with torch.cuda.device(self._device):
                return self.again(addresses, start, stop)
        stream = active.get_current_stream(self._device.index)
        for index, address in enumerate(addresses):
            if address != self._addresses[index]:
                self._addresses[index] = address
                for values, position, rest in self._places[index]:
                    values[position] = address if rest is None else (address, *rest)
        for run, (x, y, z), function, metadata, values in self._prepared[start:stop]:
            run(x, y, z, stream, function, metadata, None, None, None, *values)
        return None

    def _stays(self, tensor: Tensor) -> bool:
        if id(tensor) in self._owned:
            return True
        is_workspace = any(tensor is t for t in self._workspace.values())
        if is_workspace:
            self._held.append(tensor)  # so that its address stays its own
        return is_workspace
