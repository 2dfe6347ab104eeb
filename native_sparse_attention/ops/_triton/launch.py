"""Kernel launches, and their settings from the committed tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.core import private_triton
from native_sparse_attention.core.building import is_building

launcher = private_triton.find_launcher()
make_descriptor = private_triton.find_describer()
# Whether every launch must go through Triton: it calls a hook (of a profiler, say), or its launch interface is unknown.
are_watched: Callable[[], bool] = (lambda: True) if launcher is None else launcher.is_watched

# Shared memory per program in bytes, by architecture.
SHARED_MEMORY = {'sm80': 166912, 'sm86': 101376, 'sm90': 232448, 'sm100': 232448, 'sm120': 101376}
# Architectures whose tensor memory accelerator the kernels use.
WITH_TILES = ('sm90', 'sm100')
# Architecture whose settings stand in for missing ones.
LIKE = {'sm90': 'sm80', 'sm100': 'sm90', 'sm86': 'sm86', 'sm120': 'sm86', 'sm80': 'sm80'}


# Elements of a tile of `launch_rows`: enough loads in flight, and few enough registers.
ROWS_TILE = 2048


class Settings(NamedTuple):
    """Launch settings of a kernel: rows and columns of its tile, warps per program, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, bytes of an element, largest head size that fits) -> settings
Table = dict[tuple[str, int, int], Settings]
# Head sizes of the columns of `read_table`.
HEAD_SIZES = (64, 128, 256)


def read_table(text: str) -> Table:
    """Read lines `architecture bytes: settings | settings | settings`, one for each of HEAD_SIZES, `-` for none."""
    table: Table = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, cells = line.split(':')
        architecture, itemsize = key.split()
        for head_size, cell in zip(HEAD_SIZES, cells.split('|'), strict=True):
            if cell.strip() != '-':
                table[architecture, int(itemsize), head_size] = Settings(*map(int, cell.split()))
    return table


def settings_of(table: Table, q: Tensor, *others: Tensor) -> Settings:
    """Return the settings for the GPU, the dtype and the largest head size of the tensors."""
    head_dim = q.shape[-1]
    for tensor in others:
        head_dim = max(head_dim, tensor.shape[-1])
    return find_settings(table, architecture_of(q.device), q.element_size(), head_block(head_dim))


def settings_of_first(special: Table, table: Table, q: Tensor, *others: Tensor) -> Settings:
    """Return the settings from a special table, or from the general one where the special one has no row."""
    with suppress(KeyError):
        return settings_of(special, q, *others)
    return settings_of(table, q, *others)


def find_settings(table: Table, architecture: str, itemsize: int, block_d: int) -> Settings:
    """Return the settings of the smallest head size that holds `block_d`, of this architecture or of
    the one in LIKE.
    """
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
    """Return the row of the tables for a device; the interpreter uses that of the smallest GPU."""
    if device.type != 'cuda':
        return 'sm86'
    capability = torch.cuda.get_device_capability(device)
    known = {(8, 0): 'sm80', (8, 7): 'sm80', (9, 0): 'sm90', (10, 0): 'sm100', (10, 3): 'sm100'}
    return known.get(capability, 'sm86' if capability[0] == 8 else 'sm120')


def is_hopper(device: torch.device) -> bool:
    return architecture_of(device) == 'sm90'


def head_block(head_dim: int) -> int:
    """Return the padded head size of a tile, a power of two.

    At least 64: on Hopper, Triton 3.6 computes wrong products for operands with rows of 64 bytes in shared memory (seen
    with head sizes of 24 and 32 beside 40: wrong outputs and illegal addresses).
    """
    return max(64, 1 << (head_dim - 1).bit_length())


def row_block(rows: int) -> int:
    """Return the padded number of rows of a tile, a power of two and at least the minimum of tl.dot."""
    return max(16, 1 << (rows - 1).bit_length())


def describe_tiles(tensor: Tensor, rows: int, size: int) -> TensorDescriptor | None:
    """Return the tensor descriptor (TMA) for tiles `[1, rows, 1, size]` of `[B, S, H, D]`, padded with zeros; None if
    the GPU has no tensor memory accelerator or it cannot address the tensor.
    """
    return _describe(tensor, (1, rows, 1, size))


def describe_rows(tensor: Tensor, rows: int, size: int) -> TensorDescriptor | None:
    """Return the tensor descriptor for tiles `[rows, size]` of all rows `[..., D]` of a contiguous tensor, or None as
    above.

    As the first operand of a product such a tile may stay in shared memory; tiles that are reshaped are loaded to
    registers.
    """
    return _describe(tensor.view(-1, tensor.shape[-1]), (rows, size))


def _describe(tensor: Tensor, block_shape: tuple[int, ...]) -> TensorDescriptor | None:
    if architecture_of(tensor.device) not in WITH_TILES or tensor.data_ptr() % 16:
        return None
    layout = _make_descriptor_layout(tensor.shape, tensor.stride(), tensor.element_size(), block_shape)
    if layout is None:
        return None
    return make_descriptor(tensor, layout)


@lru_cache(maxsize=1024)
def _make_descriptor_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block_shape: tuple[int, ...]
) -> dict[str, list[int]] | None:
    """Return shape, strides and block shape of a descriptor, or None if a descriptor cannot express them."""
    fits = all(0 < size < 2**31 for size in shape)
    if not fits or strides[-1] != 1 or any(stride <= 0 or stride * itemsize % 16 for stride in strides[:-1]):
        return None
    return {'shape': [*shape], 'strides': [*strides], 'block_shape': [*block_shape]}


def exceeds_int32(*tensors: Tensor | None) -> bool:
    """Return whether element offsets within one batch row may exceed int32, so that kernels need int64 offsets."""
    return any(t is not None and _exceeds_int32(t.shape, t.stride()) for t in tensors)


@lru_cache(maxsize=1024)
def _exceeds_int32(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return sum((size - 1) * abs(stride) for size, stride in zip(shape[1:], strides[1:], strict=True)) >= 2**31


class CompiledKernel(NamedTuple):
    """A compiled kernel: the jit function, the result of its launch, and the record for launching it again."""

    kernel: Any
    compiled: Any
    launch: private_triton.CompiledLaunch


# Compiled kernels by the properties of their arguments. From MAX_COMPILED entries on, a new one replaces the oldest.
_COMPILED: OrderedDict[tuple[Any, ...], CompiledKernel] = OrderedDict()
MAX_COMPILED = 4096
_NUMBERS = frozenset((int, type(None), float, bool))
# Functions that record the launches of a call (`recorder`): (compiled kernel or None, grid, args).
recorders: list[Callable[[CompiledKernel | None, tuple[int, ...], tuple[Any, ...]], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> Any:
    """Launch kernel[grid](*args, **meta) on the GPU of the tensors, which need not be current. Returns the compiled
    kernel; an empty grid launches nothing and returns None. Inside `build_kernels` the kernel is compiled, nothing is
    launched and None is returned.

    Triton finds the compiled kernel by binding and inspecting all arguments. It specialises on types and values of
    arguments that are not tensors, and on dtype and 16-byte alignment of tensors. Triton is called once for each
    combination of these; further launches use the cached kernel. An argument that is not a tensor must have the
    same type in every launch of a kernel, since 1, 1.0 and True are equal keys.

    FP fusion is off: a product and a sum are fused only by an explicit tl.fma. Left to the compiler, fusion differs
    between specialisations, and a packed sequence would differ in bits from the same sequence alone.
    """
    if 0 in grid:
        return None
    if device.type == 'cuda' and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, device=device, **meta)
    if is_building.get():
        kernel.warmup(*args, grid=grid, enable_fp_fusion=False, **meta)
        return None
    if are_watched() or launcher is None:
        for record in tuple(recorders):
            record(None, grid, args)
        return kernel[grid](*args, enable_fp_fusion=False, **meta)
    values, keys = _specialize(args)
    key = (id(kernel), device, keys, *meta, *meta.values())
    known = _COMPILED.get(key)
    if known is None:
        compiled = kernel[grid](*args, enable_fp_fusion=False, **meta)
        if launcher.is_compiled(compiled):
            if len(_COMPILED) >= MAX_COMPILED:
                _COMPILED.popitem(last=False)
            known = _COMPILED[key] = CompiledKernel(kernel, compiled, launcher.keep(kernel, compiled, len(args), meta))
    else:
        launcher.start(known.launch, grid, device, values)
        compiled = known.compiled
    for record in tuple(recorders):  # another thread may remove its own meanwhile
        record(known, grid, args)
    return compiled


def launch_rows(kernel: Any, out: Tensor, *args: Any, block_dv: int) -> None:
    """Launch one program per tile of rows of `out [B, T, HQ, DV]`, or of a tensor of its shape."""
    _, seqlen, heads, value_dim = out.shape
    if out.numel():
        num_rows, block_m = out.numel() // value_dim, max(1, ROWS_TILE // block_dv)
        launch(
            kernel,
            (-(-num_rows // block_m),),
            *(*args, num_rows, seqlen, heads),
            VALUE_DIM=value_dim,
            BLOCK_M=block_m,
            BLOCK_DV=block_dv,
            num_warps=4,
            device=out.device,
        )


def _specialize(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments with addresses in place of tensors, and the properties that Triton specialises on."""
    values, keys = [*args], [*args]
    for index, arg in enumerate(args):
        kind = type(arg)
        if kind in _NUMBERS or (kind is tuple and type(arg[0]) is int):  # strides
            continue
        if isinstance(arg, Tensor):
            values[index] = address = arg.data_ptr()
            keys[index] = (arg.dtype, address % 16 == 0)
        elif kind is TensorDescriptor:
            keys[index] = (arg.base.dtype, *arg.block_shape)
        elif not _NUMBERS.issuperset(map(type, arg)):
            values[index], keys[index] = _specialize(arg)
    return tuple(values), tuple(keys)
