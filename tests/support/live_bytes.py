"""Bytes of the tensors that exist, and of copies, in a piece of code."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_COPIES = ('cat', 'clone', 'copy_')


class LiveBytes(TorchDispatchMode):
    """Count the memory of the given tensors and of those that operations return, of this thread.

    Attributes:
        live: bytes that exist now.
        peak: most bytes that existed at a time.
        copied: bytes written by concatenations, clones and copies.
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.live = self.peak = self.copied = 0
        self._sizes: dict[int, int] = {}
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        if func.overloadpacket.__name__ in _COPIES:
            self.copied += out.numel() * out.element_size()
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
