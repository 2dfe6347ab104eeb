"""Cached launches of a decoding step, replayed without Triton's host overhead: binding the arguments, inspecting them,
and looking up the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core.private_triton import FIRST_VALUE, RecordedLaunch
from native_sparse_attention.ops._triton.launch import are_watched, launch, launcher


class AddressSlot(NamedTuple):
    """Position of an address among the values of a launch, and the rest of its tuple (None: it is not in a tuple)."""

    values: list[Any]
    position: int
    rest: tuple[Any, ...] | None


class LaunchCache:
    """The launches of one step: `launch` launches and records them, `replay` launches them again for other tensors with
    the same shapes, strides, dtypes and alignment. No tensor of the caller is kept.

    The launches depend on the properties of the `given` tensors, which differ in every step; on the addresses of the
    `owned` tensors; on the workspace, which persists; and on numbers. They are not `is_complete`, and must not be
    replayed, if a launch used any other tensor (a copy of an argument, say), if its tensors cannot be told apart, or if
    Triton interprets the kernel.

    Attributes:
        blocks: the compressed blocks that the first launch leaves for networks that are called; else empty.
    """

    are_watched = staticmethod(are_watched)

    def __init__(
        self, given: Sequence[Tensor | None], owned: Sequence[Tensor | None], workspace: dict[Any, Tensor]
    ) -> None:
        self.is_complete = launcher is not None
        self.blocks: list[Tensor | None] = []
        self._recorded: list[RecordedLaunch] = []
        self._device = torch.device('cpu')
        self._workspace = workspace
        self._held: list[Tensor] = []
        # The index of a given tensor by its Python id; for each index its slots and its address.
        self._given: dict[int, int] = {}
        self._slots: list[list[AddressSlot]] = []
        self._addresses: list[int] = []
        self._owned = {id(t) for t in owned if t is not None}
        self.give(*given)

    def give(self, *tensors: Tensor | None) -> None:
        """Add tensors that differ in every step; `replay` takes their addresses in this order."""
        for tensor in tensors:
            if tensor is not None:
                self.is_complete = self.is_complete and id(tensor) not in self._given
                self._given[id(tensor)] = len(self._slots)
            self._slots.append([])
            self._addresses.append(0)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
        """Launch a kernel as `launch` of ops/_triton does, and record it for `replay`."""
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
                self._slots[index].append(AddressSlot(values, position, follows))
                self._addresses[index] = first.data_ptr()
            elif isinstance(first, Tensor):
                self.is_complete = self.is_complete and self._stays(first)
            self.is_complete = self.is_complete and not any(isinstance(item, Tensor) for item in rest)
        self._recorded.append(recorded)

    def replay(self, addresses: list[int], start: int = 0, stop: int | None = None) -> None:
        """Replay the launches start ... stop on the current stream. addresses: of all given tensors, 0 for None."""
        for index, address in enumerate(addresses):
            if address != self._addresses[index]:
                self._addresses[index] = address
                for values, position, rest in self._slots[index]:
                    values[position] = address if rest is None else (address, *rest)
        assert launcher is not None
        launcher.replay(self._recorded[start:stop], self._device)

    def _stays(self, tensor: Tensor) -> bool:
        if id(tensor) in self._owned:
            return True
        is_workspace = any(tensor is t for t in self._workspace.values())
        if is_workspace:
            self._held.append(tensor)  # keeps its address from being reused
        return is_workspace
