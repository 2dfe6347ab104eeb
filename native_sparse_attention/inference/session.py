"""State of the decoding kernels beside a cache: scratch buffers and recorded launches, none of which is data."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

# Steps of different shapes, strides or settings whose launches are kept.
MAX_LAUNCHES = 16


class Recent(OrderedDict[tuple[Any, ...], Any]):
    """The MAX_LAUNCHES entries that were used last."""

    # Key and entry of the newest. The next step mostly has the same key, and a comparison is faster than two hashes.
    _newest: tuple[Any, Any] = (None, None)

    def find(self, key: tuple[Any, ...]) -> Any:
        """Return the entry, which thereby becomes the newest, or None."""
        newest, entry = self._newest
        if key == newest:
            return entry
        entry = self.get(key)
        if entry is not None:
            self.record(key, entry)
        return entry

    def record(self, key: tuple[Any, ...], entry: Any) -> None:
        self[key] = entry
        self.move_to_end(key)
        self._newest = key, entry
        while len(self) > MAX_LAUNCHES:
            self.popitem(last=False)

    def clear(self) -> None:
        super().clear()
        self._newest = (None, None)


class Session:
    """State that consecutive decoding steps on one cache share. A copied or unpickled cache has an empty session.

    Attributes:
        workspace: scratch buffers of the kernels by name, shape and dtype; one launch leaves results there for the
            next one.
        launches: recorded launches of a step, by everything that they depend on; `nsa_decode` replays them.
        checked_networks: networks φ that were run on zeros before a cache was written, with number of blocks and dtype.
    """

    def __init__(self) -> None:
        self.workspace: dict[tuple[Any, ...], Tensor] = {}
        self.launches = Recent()
        self.checked_networks = Recent()

    def clear_launches(self) -> None:
        """Drop what depends on the capacity of the cache or on the addresses of its tensors."""
        self.workspace.clear()
        self.launches.clear()

    def __reduce__(self) -> tuple[type[Session], tuple[()]]:
        return Session, ()  # launches hold addresses, and networks are known by identity
