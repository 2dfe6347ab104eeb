"""Backend choice, resolved only here, from settings, device, dtype and shape, never from values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core import private

BACKENDS = ('auto', 'triton', 'flex', 'eager')
# The backends of an op, fastest first, each with a function that returns why it does not support the call, or None.
Candidates = Mapping[str, Callable[[], str | None]]


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a call, and the reason against every faster one.

    Attributes:
        name: 'triton', 'flex' or 'eager'.
        passed_over: the reason by name of each faster backend.
        ops: for a composition, the choice of each of its ops by name.
    """

    name: str
    passed_over: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, BackendChoice] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = [f'not {name}: {reason}' for name, reason in self.passed_over.items()]
        # flex has the attentions alone, so that eager serves the rest with it goes without saying.
        usual = ('flex', 'eager') if self.name == 'flex' else (self.name,)
        others = [f'{op} by {choice}' for op, choice in self.ops.items() if choice.name not in usual]
        return ', '.join([f'{self.name} ({"; ".join(reasons)})' if reasons else self.name, *others])


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f'backend is {backend!r}, but must be one of {", ".join(map(repr, BACKENDS))}')


def choose_backend(op: str, backend: str, device: torch.device, candidates: Candidates) -> BackendChoice:
    """Return the backend for one call of `op`: the first candidate that supports it, or the explicit one.

    'auto' takes eager on anything but a GPU, and triton on NVIDIA GPUs only. An explicit backend never falls back: it
    raises ValueError with the reason.
    """
    return choose_backends(backend, device, {op: candidates})[op]


def choose_backends(
    backend: str, device: torch.device, ops: Mapping[str, Candidates], flex_or_eager: bool = False
) -> dict[str, BackendChoice]:
    """Return the backend of each op of a composition, as `choose_backend` does for one.

    flex_or_eager: with backend='flex', ops without a flex backend run in eager.
    """
    check_backend(backend)
    choices = {}
    for op, candidates in ops.items():
        if backend == 'auto':
            choices[op] = _choose(op, device, candidates)
            continue
        name = 'eager' if flex_or_eager and backend == 'flex' and 'flex' not in candidates else backend
        reason = f'{op} has no {name} backend'
        if name in candidates:
            reason = transformed(name) or candidates[name]()
        if reason is not None:
            raise ValueError(f'backend {name!r} cannot serve this call of {op}: {reason}')
        choices[op] = BackendChoice(name)
    return choices


def _choose(op: str, device: torch.device, candidates: Candidates) -> BackendChoice:
    passed_over: dict[str, str] = {}
    for name, unsupported in candidates.items():
        reason = _left_out(name, device) or unsupported()
        if reason is None:
            return BackendChoice(name, passed_over)
        passed_over[name] = reason
    raise ValueError(
        f'no backend can serve this call of {op}: ' + '; '.join(f'{n}: {r}' for n, r in passed_over.items())
    )


def resolver(op: str, candidates: Callable[..., Candidates]) -> Callable[..., BackendChoice]:
    """Return the function that resolves the backend of `op`; its arguments, tensors first, are those of candidates."""

    def backend_of(*tensors: Tensor, backend: str = 'auto', **settings: Any) -> BackendChoice:
        return choose_backend(op, backend, tensors[0].device, candidates(*tensors, backend=backend, **settings))

    return backend_of


def serves() -> None:
    """Candidate function of a backend that supports every call."""


def without_gate(gate: object, unsupported: Callable[[], str | None] = serves) -> Callable[[], str | None]:
    """Return the candidate function of a backend without gates. unsupported: its candidate function for calls without a
    gate.
    """
    return unsupported if gate is None else lambda: 'gate is differentiated by the Triton kernels alone'


def slowest(choices: Mapping[str, BackendChoice], others: Mapping[str, BackendChoice]) -> BackendChoice:
    """Return one choice for a composition: the slowest backend of `choices` by op. It lists them and `others`."""
    slow, *rest = choices.values()
    for choice in rest:  # torch.compile takes no max with a key
        slow = choice if BACKENDS.index(choice.name) > BACKENDS.index(slow.name) else slow
    return BackendChoice(slow.name, slow.passed_over, {**choices, **others})


def _left_out(name: str, device: torch.device) -> str | None:
    """Return why 'auto' does not consider a backend, or None."""
    if name != 'eager' and device.type != 'cuda':
        return f'the tensors are on {device.type}'
    if name == 'triton' and torch.version.hip is not None:
        return 'its kernels are tried on NVIDIA GPUs alone'
    return transformed(name)


def transformed(name: str) -> str | None:
    """Return why a backend does not support torch.func, or None: opaque ops may drop tangents silently."""
    if name == 'eager' or torch.compiler.is_compiling():
        return None
    if private.is_transformed() or private.is_forward_ad():
        return 'torch.func transforms and forward-mode derivatives look into an op, and eager alone lets them'
    return None
