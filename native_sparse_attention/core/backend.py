"""Backend choice, resolved only here, from settings, device, dtype and shape, never from values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from native_sparse_attention.core import private

BACKENDS = ('auto', 'triton', 'flex', 'eager')


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


def choose_backend(
    op: str, backend: str, device: torch.device, candidates: Mapping[str, Callable[[], str | None]]
) -> BackendChoice:
    """The backend for one call of `op`.

    candidates: the backends that the op has, fastest first, each with a function that says why it cannot serve this
    call, or None where it can. 'auto' takes the first that can, on anything but a GPU eager, and triton on NVIDIA
    GPUs only; an explicit backend never falls back, it raises ValueError with the reason.
    """
    check_backend(backend)
    if backend != 'auto':
        reason = f'{op} has no {backend} backend'
        if backend in candidates:
            reason = transformed(backend) or candidates[backend]()
        if reason is not None:
            raise ValueError(f'backend {backend!r} cannot serve this call of {op}: {reason}')
        return BackendChoice(backend)
    passed_over: dict[str, str] = {}
    for name, unsupported in candidates.items():
        reason = _left_out(name, device) or unsupported()
        if reason is None:
            return BackendChoice(name, passed_over)
        passed_over[name] = reason
    raise ValueError(
        f'no backend can serve this call of {op}: ' + '; '.join(f'{n}: {r}' for n, r in passed_over.items())
    )


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
