"""The launches of a step made again, without what a launch by Triton costs the host: the arguments bound, their types
and divisors found, and the compiled kernel looked up by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.private import FIRST_VALUE, RecordedLaunch
from native_sparse_attention.ops._triton.launch import are_watched, launch, launcher


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
        self.is_complete = launcher is not None
        self.blocks: list[Tensor] = []
        self._recorded: list[RecordedLaunch] = []
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
        self.is_complete = self.is_complete and launcher is not None and launcher.is_compiled(compiled)
        if not self.is_complete or launcher is None:
            return
        self._device = device
        recorded = launcher.record(kernel, compiled, grid, args, meta)
        values = recorded.arguments
        for position, value in enumerate(values[FIRST_VALUE:], FIRST_VALUE):
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
        self._recorded.append(recorded)

    def again(self, addresses: list[int], start: int = 0, stop: int | None = None) -> None:
        """The launches from start to stop, on the current stream, for given tensors at these addresses (0: None)."""
        for index, address in enumerate(addresses):
            if address != self._addresses[index]:
                self._addresses[index] = address
                for values, position, rest in self._places[index]:
                    values[position] = address if rest is None else (address, *rest)
        assert launcher is not None
        launcher.replay(self._recorded[start:stop], self._device)

    def _stays(self, tensor: Tensor) -> bool:
        if id(tensor) in self._owned:
            return True
        is_workspace = any(tensor is t for t in self._workspace.values())
        if is_workspace:
            self._held.append(tensor)  # so that its address stays its own
        return is_workspace
