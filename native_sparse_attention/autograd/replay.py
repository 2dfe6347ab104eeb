"""Replay the calls of `nsa`: one autograd node, and the recorded allocations and launches, without their preparation.

Most of the host's time of `nsa` prepares launches that depend on shapes, strides, dtypes, alignment and settings alone.
A call whose properties have occurred often is recorded once (`ops/_triton/recorder`), on tensors that share the memory
of its arguments; it and later calls repeat the recorded launches, whose results have the same bits. Every call that
something else may see into (a transform, a mode, a subclass, other hooks of saved tensors) computes as without replay.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import dlpack

from native_sparse_attention.autograd.saved_rotary import PackRotated
from native_sparse_attention.core.building import is_building
from native_sparse_attention.core.plain import refuse_context_parallel
from native_sparse_attention.core.private_recording import find_recording
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops._triton import support
from native_sparse_attention.ops._triton.program import Program, execute, on_device

Function = TypeVar('Function', bound=Callable[..., Any])

# Devices whose calls are replayed. On CPUs arguments are checked by value, which a replay would omit.
DEVICE_TYPES = ('cuda',)
# Calls of the same properties before one is recorded: recording takes as long as dozens of calls.
MIN_CALLS = 32
# Largest size of q: the kernels of larger calls take longer than the host.
MAX_ELEMENTS = 2**27
# Entries of `_calls`; from then on, a new one replaces the oldest.
MAX_CALLS = 1024

# The program of a call by its properties, the number of such calls so far, or None for calls that cannot be recorded.
_calls: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_recording: Any = find_recording()
_PLAIN = frozenset((int, float, bool, str, type(None)))


def replayed(function: Function) -> Function:
    """Return the function, which takes tensors and plain values and returns one tensor, with its calls replayed."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _recording is None or is_building.get():
            return function(*args, **kwargs)
        tensors: list[Tensor] = []
        key = _properties(tensors, args, kwargs)
        if key is None:
            return function(*args, **kwargs)
        program = _calls.get(key, 0)
        if type(program) is int:
            program = _record_or_count(key, program, function, args, kwargs, tensors)
        if program is None or program.are_watched():
            return function(*args, **kwargs)
        refuse_context_parallel()
        return execute(program.device, _run, program, tensors)

    return cast(Function, call)


def _properties(tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return everything that the launches of a call depend on, and add its tensors to `tensors`; None for a call that
    is not replayed.
    """
    if not _recording.is_plain() or kwargs.get('backend') in ('flex', 'eager'):
        return None
    key: list[Any] = [*kwargs]
    try:
        q = _queries_of(args, kwargs)
        device_type = q.device.type
        if device_type not in DEVICE_TYPES or q.numel() > MAX_ELEMENTS or kwargs.get('dropout_p'):
            return None
        if torch.is_grad_enabled():
            hooks = _recording.hooks()
            if _recording.is_below_autograd() or (hooks and type(hooks[0]) is not PackRotated):
                return None
        _describe((*args, *kwargs.values()), q.device, key, tensors)
        ids = [*map(id, tensors)]
        if len({*ids}) < len(ids) and any(ids.count(id(t)) > 2 for t in tensors if t.requires_grad):
            return None  # autograd would add its gradients in another order
    except (AttributeError, TypeError, RuntimeError):  # neither tensors nor plain values, or no strides
        return None
    is_cast = torch.is_autocast_enabled(device_type)
    flags = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    return (*key, q.device, *flags, torch.get_default_dtype(), is_cast and torch.get_autocast_dtype(device_type))


def _queries_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get('q')


def _describe(values: Any, device: torch.device, key: list[Any], tensors: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            address = value.data_ptr()
            if value.device != device or value.is_neg() or not (address or 0 in value.shape):
                raise TypeError  # its memory does not hold its values, or there is none
            tensors.append(value)
            key += (value.shape, value.stride(), value.dtype, value.requires_grad, address % 16)
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is tuple or kind is list:
            key.append(len(value))
            _describe(value, device, key, tensors)
        elif value is not select_blocks:
            raise TypeError


def _run(program: Program, tensors: list[Tensor]) -> Tensor:
    if program.differentiable:
        return _Replay.apply(program, tensors, *(tensors[i] for i in program.differentiable))  # type: ignore[return-value]
    with torch.no_grad():
        return program.forward(*tensors)[0]


class _Replay(torch.autograd.Function):
    """A recorded program as one node. The tensors that have gradients are given a second time."""

    @staticmethod
    def forward(ctx: Any, program: Program, tensors: list[Tensor], *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.program = program
        out, saved = program.forward(*tensors)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, program = [*ctx.saved_tensors], ctx.program
        if dout is None:
            return None, None, *(None,) * len(program.differentiable)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None, None, *program.gradients(dout, saved)
        if not (_recording.is_plain() and _recording.is_plain_tensor(dout)):
            return None, None, *program.gradients(dout, saved)
        _recording.release(ctx)
        return None, None, *program.differentiate(dout, saved)


def _record_or_count(
    key: tuple[Any, ...],
    count: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> Any:
    """Count a call. Return its program if it has been made often enough, else None."""
    if len(_calls) >= MAX_CALLS and not count:
        _calls.popitem(last=False)
    _calls[key] = count + 1
    if count + 1 < MIN_CALLS:
        return None
    q, program = _queries_of(args, kwargs), None
    if q.is_cuda and on_device(q.device, torch.cuda.is_current_stream_capturing):
        return None
    _calls[key] = None  # unless recording succeeds; another thread does not record meanwhile
    try:
        if support.unsupported(q) is None and torch.version.hip is None:
            program = on_device(q.device, _record, function, args, kwargs, tensors)
    except Exception:
        return None  # the call itself raises what is wrong with it
    _calls[key] = program
    return program


def _record(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Record a call and its backward pass, which computes gradients of zeros here."""
    from native_sparse_attention.ops._triton.recorder import Recorder

    needed = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    leaves = [_own_storage(t).requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
    recorder, rest = Recorder(leaves), iter(leaves)
    args, values = _replace(args, rest), _replace(kwargs.values(), rest)
    # Saved tensors are then those of the call itself, whatever hooks surround it.
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t), recorder.recording():
        out = function(*args, **dict(zip(kwargs, values, strict=True)))
    if not out.requires_grad:
        return recorder.finish(out, None)
    dout = _own_storage(torch.zeros(out.shape, dtype=out.dtype, device=out.device))
    recorder.begin_backward(dout)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.autocast(out.device.type, enabled=False), recorder.recording():
        found = iter(torch.autograd.grad(out, wanted, dout, allow_unused=True))
    return recorder.finish(out, [next(found) if needs else None for needs in needed])


def _own_storage(t: Tensor) -> Tensor:
    """Return a tensor with the memory and strides of t and another storage, so that memory tells the inputs apart."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    flat = t.detach().as_strided((extent if math.prod(t.shape) else 0,), (1,))
    return dlpack.from_dlpack(dlpack.to_dlpack(flat)).as_strided(t.shape, t.stride())


def _replace(values: Any, tensors: Any) -> tuple[Any, ...]:
    """Return the values with the next tensors in place of theirs."""
    found = []
    for value in values:
        if isinstance(value, tuple | list):
            value = _replace(value, tensors)
        found.append(next(tensors) if isinstance(value, Tensor) else value)
    return tuple(found)
