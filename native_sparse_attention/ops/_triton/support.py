"""Conditions under which the Triton backends support a call. Imports no triton, so the check works without it."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Looked up once at import: torch.compile warns of cached functions.
IS_INSTALLED = importlib.util.find_spec('triton') is not None
# Offsets of tokens are int32 in the kernels; elements are counted in int64.
MAX_TOKENS = 2**30
# Gradients that `shared_input` adds in one kernel.
MAX_READERS = 5
# The second grid axis counts heads.
MAX_HEADS = 65535
# Selected blocks per KV head, which the CSR index from blocks to queries counts in int32.
MAX_SELECTED_PER_HEAD = 2**30


def unsupported(q: Tensor, *others: Tensor, name: str = 'q') -> str | None:
    """Return the reason why the kernels do not support a call, or None. others: k and v. name: name of q in the
    message.
    """
    reason = _unsupported_device(q.device)
    if reason is not None:
        return reason
    if q.dtype not in DTYPES:
        return f'{name} has dtype {q.dtype}, but its kernels compute in float32'
    head_dim = max(t.shape[-1] for t in (q, *others))
    if head_dim > MAX_HEAD_DIM:
        return f'the head size is {head_dim}, but its kernels fit head sizes up to {MAX_HEAD_DIM}'
    heads = q.shape[2]
    if heads > MAX_HEADS:
        return f'{name} has {heads} heads, but its kernels take up to {MAX_HEADS}'
    tokens = max(t.shape[1] for t in (q, *others))
    if tokens > MAX_TOKENS:
        return f'a row has {tokens} tokens, but its kernels count up to {MAX_TOKENS}'
    return None


def too_many_selected(q: Tensor, k: Tensor, num_selected: int) -> str | None:
    """Return the reason why the CSR index from blocks to queries cannot be built, or None."""
    count = q.shape[1] * (q.shape[2] // k.shape[2]) * num_selected
    if count > MAX_SELECTED_PER_HEAD:
        return f'up to {count} blocks are selected per KV head, but its kernels count up to {MAX_SELECTED_PER_HEAD}'
    return None


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPUs: TRITON_INTERPRET=1, as Triton reads it."""
    return os.environ.get('TRITON_INTERPRET', '').lower() in ('1', 'true', 'yes', 'on', 'y')


def _unsupported_device(device: torch.device) -> str | None:
    if not IS_INSTALLED:
        return 'triton is not installed'
    if is_interpreted():
        return None
    if device.type != 'cuda':
        return f'the tensors are on {device.type}, but its kernels run on GPUs (on CPUs with TRITON_INTERPRET=1)'
    if torch.version.hip is not None:
        return None
    # torch.compile treats the properties as constants, and warns of cached functions.
    capability = (_find_capability if torch.compiler.is_compiling() else _capability)(device)
    if capability < MIN_CAPABILITY:
        return f'the GPU has compute capability {capability}, but its kernels need at least {MIN_CAPABILITY}'
    return None


def _find_capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


_capability = cache(_find_capability)
