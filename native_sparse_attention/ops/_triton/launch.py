"""Launches, and the settings that they take from the committed tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.core import private

launcher = private.find_launcher()
make_descriptor = private.find_describer()
# Whether every launch must go through Triton: where it calls a hook (of a profiler, say), or launches in a way that is
# not known.
are_watched: Callable[[], bool] = (lambda: True) if launcher is None else launcher.is_watched

# Shared memory that a program may have, in bytes, by architecture.
SHARED_MEMORY = {'sm80': 166912, 'sm86': 101376, 'sm90': 232448, 'sm100': 232448, 'sm120': 101376}
# Architectures with a tensor memory accelerator that kernels make use of.
WITH_TILES = ('sm90', 'sm100')
# Whose settings an architecture takes where the table has none of its own.
LIKE = {'sm90': 'sm80', 'sm100': 'sm90', 'sm86': 'sm86', 'sm120': 'sm86', 'sm80': 'sm80'}


class Settings(NamedTuple):
    """How a kernel is launched: rows and columns of its tile, warps of a program, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, bytes of an element, largest head size that fits) -> settings
Table = Mapping[tuple[str, int, int], Settings]


def settings_of(table: Table, q: Tensor, *others: Tensor) -> Settings:
    """The entry for the GPU, the dtype and the largest head size of the tensors."""
    head_dim = q.shape[-1]
    for tensor in others:
        head_dim = max(head_dim, tensor.shape[-1])
    return find_settings(table, architecture_of(q.device), q.element_size(), head_block(head_dim))


def find_settings(table: Table, architecture: str, itemsize: int, block_d: int) -> Settings:
    """The entry of the smallest head size that holds `block_d`, of the architecture or of the one that it is like."""
    while (architecture, itemsize, block_d) not in table:
        sizes = [d for a, size, d in table if a == architecture and size == itemsize and d >= block_d]
        if sizes:
            return table[architecture, itemsize, min(sizes)]
        if LIKE[architecture] == architecture:
            raise KeyError(f'no launch settings for {architecture}, {itemsize} bytes, head size {block_d}')
        architecture = LIKE[architecture]
    return table[architecture, itemsize, block_d]


@cache
def architecture_of(device: torch.device) -> str:
    """The row of the tables that the device of a tensor takes; the interpreter takes that of the smallest GPU."""
    if device.type != 'cuda':
        return 'sm86'
    capability = torch.cuda.get_device_capability(device)
    known = {(8, 0): 'sm80', (8, 7): 'sm80', (9, 0): 'sm90', (10, 0): 'sm100', (10, 3): 'sm100'}
    return known.get(capability, 'sm86' if capability[0] == 8 else 'sm120')


def is_hopper(device: torch.device) -> bool:
    return architecture_of(device) == 'sm90'


def head_block(head_dim: int) -> int:
    """The power of two that a tile holds of a head.

    At least 64: on Hopper, Triton 3.6 gets products wrong whose operand has rows of 64 bytes in shared memory (seen
    with head sizes of 24 and 32 beside 40: wrong outputs and illegal addresses).
    """
    return max(64, 1 << (head_dim - 1).bit_length())


def row_block(rows: int) -> int:
    """The power of two that holds so many rows of a tile, at least what tl.dot multiplies."""
    return max(16, 1 << (rows - 1).bit_length())


def describe_tiles(tensor: Tensor, rows: int, size: int) -> TensorDescriptor | None:
    """What the tensor memory accelerator fetches tiles `[1, rows, 1, size]` of `[B, S, H, D]` by, zeros beyond it; None
    where the GPU has none or cannot reach the tensor by it.
    """
    return _describe(tensor, (1, rows, 1, size))


def describe_rows(tensor: Tensor, rows: int, size: int) -> TensorDescriptor | None:
    """The same for tiles `[rows, size]` of all rows `[..., D]` of a contiguous tensor. As the first factor of a product
    such a tile may stay in shared memory; others, which are reshaped, Triton loads into registers.
    """
    return _describe(tensor.view(-1, tensor.shape[-1]), (rows, size))


def _describe(tensor: Tensor, block_shape: tuple[int, ...]) -> TensorDescriptor | None:
    if architecture_of(tensor.device) not in WITH_TILES or tensor.data_ptr() % 16:
        return None
    layout = _lay_out_tiles(tensor.shape, tensor.stride(), tensor.element_size(), block_shape)
    if layout is None:
        return None
    return make_descriptor(tensor, layout)


@lru_cache(maxsize=1024)
def _lay_out_tiles(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block_shape: tuple[int, ...]
) -> dict[str, list[int]] | None:
    """What a descriptor says of a tensor besides where it is, or None where it cannot."""
    fits = all(0 < size < 2**31 for size in shape)
    if not fits or strides[-1] != 1 or any(stride <= 0 or stride * itemsize % 16 for stride in strides[:-1]):
        return None
    return {'shape': [*shape], 'strides': [*strides], 'block_shape': [*block_shape]}


def is_wide(*tensors: Tensor | None) -> bool:
    """Whether elements of one row of the batch lie more than int32 counts apart, so that offsets are int64."""
    return any(t is not None and _is_wide(t.shape, t.stride()) for t in tensors)


@lru_cache(maxsize=1024)
def _is_wide(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return sum((size - 1) * abs(stride) for size, stride in zip(shape[1:], strides[1:], strict=True)) >= 2**31


class Kept(NamedTuple):
    """A compiled kernel, as `launch` returns it, how it is launched again, and the kernel that it was compiled from."""

    kernel: Any
    compiled: Any
    launch: private.CompiledLaunch


# Compiled kernels by the looks of what they were launched with, until there are too many of them.
_KEPT: dict[tuple[Any, ...], Kept] = {}
MAX_KEPT = 4096
_NUMBERS = frozenset((int, type(None), float, bool))


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> Any:
    """kernel[grid](*args, **meta) on the GPU of the tensors, whichever is current; nothing for an empty grid. Returns
    what Triton does: the compiled kernel.

    Which of its compiled kernels a launch takes Triton finds out by binding the arguments and looking at each of them.
    All that it looks at are types and values of what is not a tensor, and of a tensor the dtype and whether its address
    is a multiple of 16. So it is asked once for each of those. An argument that is no tensor must have the same type in
    every launch of a kernel, as 1, 1.0 and True look the same here.

    A product and a sum become one operation only where a kernel says tl.fma. Left to the compiler, that differs between
    specialisations of a kernel, and a sequence would have other bits packed than alone.
    """
    if 0 in grid:
        return None
    if device.type == 'cuda' and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, device=device, **meta)
    if are_watched() or launcher is None:
        return kernel[grid](*args, enable_fp_fusion=False, **meta)
    values, looks = _look_at(args)
    key = (id(kernel), device, looks, *meta, *meta.values())
    kept = _KEPT.get(key)
    if kept is None:
        compiled = kernel[grid](*args, enable_fp_fusion=False, **meta)
        if launcher.is_compiled(compiled):
            if len(_KEPT) == MAX_KEPT:
                _KEPT.clear()
            _KEPT[key] = Kept(kernel, compiled, launcher.keep(kernel, compiled, len(args), meta))
        return compiled
    launcher.start(kept.launch, grid, device, values)
    return kept.compiled


def _look_at(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments with addresses for tensors, and with what Triton looks at."""
    values, looks = [*args], [*args]
    for place, arg in enumerate(args):
        kind = type(arg)
        if kind in _NUMBERS or (kind is tuple and type(arg[0]) is int):  # strides
            continue
        if isinstance(arg, Tensor):
            values[place] = address = arg.data_ptr()
            looks[place] = (arg.dtype, address % 16 == 0)
        elif kind is TensorDescriptor:
            looks[place] = (arg.base.dtype, *arg.block_shape)
        elif not _NUMBERS.issuperset(map(type, arg)):
            values[place], looks[place] = _look_at(arg)
    return tuple(values), tuple(looks)
