"""When the Triton backends serve a call. Imports no triton, so that asking costs nothing where it is not installed."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Looked up once, as torch.compile warns of functions that remember what they returned.
IS_INSTALLED = importlib.util.find_spec('triton') is not None
# Offsets of tokens are int32 in the kernels; elements are counted in int64.
MAX_TOKENS = 2**30
# Gradients that are added at once.
MAX_READERS = 5
# Heads lie on the second axis of a grid.
MAX_HEADS = 65535
# Blocks that the queries of a kv head choose, which the lists of those who chose a block count in int32.
MAX_CHOICES = 2**30


def unsupported(q: Tensor, *others: Tensor, name: str = 'q') -> str | None:
    """Why the kernels cannot serve a call, or None where they can. others: k and v. name: what q is called there."""
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


def too_many_choices(q: Tensor, k: Tensor, num_selected: int) -> str | None:
    """Why the lists of those who chose a block cannot be made, or None where they can."""
    choices = q.shape[1] * (q.shape[2] // k.shape[2]) * num_selected
    if choices > MAX_CHOICES:
        return f'up to {choices} blocks are chosen per kv head, but its kernels count up to {MAX_CHOICES}'
    return None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPUs: TRITON_INTERPRET=1, as Triton reads it."""
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
    # torch.compile knows the properties as a constant, and warns of functions that remember what they returned.
    capability = (_find_capability if torch.compiler.is_compiling() else _capability)(device)
    if capability < MIN_CAPABILITY:
        return f'the GPU has compute capability {capability}, but its kernels need at least {MIN_CAPABILITY}'
    return None


def _find_capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


_capability = cache(_find_capability)
