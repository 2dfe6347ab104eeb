"""Which backend serves a call: resolved here and nowhere else, from settings, device, dtype and shape, never from
values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

BACKENDS = ('auto', 'triton', 'flex', 'eager')


@dataclass(frozen=True)
class BackendChoice:
    """The backend that serves a call, and for every faster one the reason why it does not."""

    name: str
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = '; '.join(f'not {name}: {reason}' for name, reason in self.passed_over.items())
        return f'{self.name} ({reasons})' if reasons else self.name


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f'backend is {backend!r}, but must be one of {", ".join(map(repr, BACKENDS))}')


def choose_backend(
    op: str, backend: str, device: torch.device, candidates: Mapping[str, Callable[[], str | None]]
) -> BackendChoice:
    """The backend for one call of `op`.

    candidates: the backends that the op has, fastest first, each with a function that says why it cannot serve this
    call, or None where it can. 'auto' takes the first that can, and on anything but a GPU eager; an explicit backend
    never falls back, it raises ValueError with the reason.
    """
    check_backend(backend)
    if backend != 'auto':
        reason = candidates[backend]() if backend in candidates else f'{op} has no {backend} backend'
        if reason is not None:
            raise ValueError(f'backend {backend!r} cannot serve this call of {op}: {reason}')
        return BackendChoice(backend)
    passed_over: dict[str, str] = {}
    for name, unsupported in candidates.items():
        reason = f'the tensors are on {device.type}' if name != 'eager' and device.type != 'cuda' else unsupported()
        if reason is None:
            return BackendChoice(name, passed_over)
        passed_over[name] = reason
    raise ValueError(
        f'no backend can serve this call of {op}: ' + '; '.join(f'{n}: {r}' for n, r in passed_over.items())
    )


def serves() -> None:
    """The candidate function of a backend that serves every call."""


def slowest(choices: Iterable[BackendChoice]) -> BackendChoice:
    """Of the choices made for the ops of a composition the one whose backend is slowest."""
    return max(choices, key=lambda choice: BACKENDS.index(choice.name))
