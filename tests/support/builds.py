"""Compile the kernels of every op for a GPU that need not exist, and print one line of JSON per kernel.

    python -m tests.support.builds sm90 bfloat16 128
    python -m tests.support.builds sm90 float32 64 kinds select_blocks,rotary      ops by parts of their names

Public ops run forward and backward on small CPU tensors; every kernel launch compiles the kernel for its arguments
instead. This needs a process of its own, because Triton's interpreter cannot be switched off again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.pop('TRITON_INTERPRET', None)

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP, MeanPool, MeanResidualMLP, SingleProjection
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    gated_sum,
    rotary,
    select_blocks,
    selected_attention,
    straight_through_scale,
    window_attention,
)
from native_sparse_attention.ops._triton import inverse_index, launch, support
from native_sparse_attention.ops._triton.interval.modifiers import KernelModifiers
from native_sparse_attention.ops._triton.varlen import make_layout
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.ops.decoding.triton import launch_cache
from native_sparse_attention.ops.rotary import norm_rotary, shared_input
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton import settings as selected_settings
from native_sparse_attention.ops.selected_attention.triton.dkv.kernels import Gates
from native_sparse_attention.ops.selected_attention.triton.dlogits import storage as dlogits
from tests.support.layouts import find_reductions

SEQLEN = 96
BLOCK, STRIDE, SELECTION_BLOCK = 32, 16, 64
SIZES: dict[str, Any] = {
    'compress_block_size': BLOCK,
    'compress_stride': STRIDE,
    'selection_block_size': SELECTION_BLOCK,
}
PACKED: dict[str, Any] = {'cu_seqlens': torch.tensor([0, 40, SEQLEN], dtype=torch.int32)}


class NoGpu:
    """Triton driver of a GPU that does not exist. Kernels are cached by device, so every architecture has its own
    number.
    """

    launcher_cls = staticmethod(lambda *_: None)

    def __init__(self, architecture: str) -> None:
        self.capability = int(architecture.removeprefix('sm'))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device('cpu')


def make(dtype: torch.dtype, head_dim: int, kv_heads: int = 2, group: int = 4, keys: int = SEQLEN) -> list[Tensor]:
    shapes = ((SEQLEN, kv_heads * group), (keys, kv_heads), (keys, kv_heads))
    return [torch.zeros(1, *shape, head_dim, dtype=dtype, requires_grad=True) for shape in shapes]


def differentiate(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])


def make_gate(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[:3], requires_grad=True)


def build_window(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = make(dtype, head_dim)
    differentiate(*window_attention(q, k, v, window_size=(31, 0), backend='triton'))
    differentiate(window_attention(q, k, v, window_size=(-1, -1), causal=False, **PACKED, backend='triton')[0])
    window_attention(q[:, :1], k, v, window_size=(31, 0), backend='triton')
    differentiate(window_attention(q, k, v, window_size=(31, 0), gate=make_gate(q), backend='triton')[0])
    differentiate(window_attention(q, k, v, window_size=(-1, 0), gate=make_gate(q), **PACKED, backend='triton')[0])


def build_features(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = make(dtype, head_dim)
    sinks, bias = torch.zeros(8, requires_grad=True), torch.zeros(1, 1, SEQLEN, SEQLEN, requires_grad=True)
    ids = torch.zeros(1, SEQLEN, dtype=torch.int32)
    features: dict[str, Any] = {
        'segment_ids': ids, 'bias': bias, 'attn_mask': ids[:, None, None].expand(1, 1, SEQLEN, SEQLEN) == 0,
        'softcap': 20.0, 'sinks': sinks, 'dropout_p': 0.1, 'dropout_seed': 1,
    }  # fmt: skip
    differentiate(*window_attention(q, k, v, window_size=(31, 0), **features, **PACKED, backend='triton'))
    for names in (('softcap',), ('sinks',), ('segment_ids', 'attn_mask'), ('bias',), ('dropout_p', 'dropout_seed')):
        some = {name: features[name] for name in names}
        differentiate(*window_attention(q, k, v, window_size=(31, 0), **some, backend='triton'))
        if names in (('softcap',), ('bias',), ('dropout_p', 'dropout_seed')):
            gated: dict[str, Any] = {**some, 'gate': make_gate(q)}
            differentiate(window_attention(q, k, v, window_size=(31, 0), **gated, backend='triton')[0])
    q, k, v = make(dtype, head_dim, keys=(SEQLEN - BLOCK) // STRIDE + 1)
    memory = torch.zeros(2, 1, head_dim, dtype=dtype, requires_grad=True)
    settings: dict[str, Any] = {'block_size': BLOCK, 'stride': STRIDE, 'mem_kv': (memory, memory)}
    differentiate(*compressed_attention(q, k, v, **settings, softcap=20.0, sinks=sinks, backend='triton'))


def build_compressed(dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = make(dtype, head_dim, keys=(SEQLEN - BLOCK) // STRIDE + 1)
    mem_kv = tuple(torch.zeros(2, 1, head_dim, dtype=dtype, requires_grad=True) for _ in range(2))
    settings: dict[str, Any] = {'block_size': BLOCK, 'stride': STRIDE, 'mem_kv': mem_kv}
    differentiate(*compressed_attention(q, k, v, **settings, **PACKED, backend='triton'))
    differentiate(*compressed_attention(q, k, v, **settings, backend='triton'))
    compressed_attention(q[:, :1], k, v, block_size=BLOCK, stride=STRIDE, seqlen_k=SEQLEN, backend='triton')
    differentiate(compressed_attention(q, k, v, **settings, gate=make_gate(q), backend='triton')[0])
    settings['mem_kv'] = None
    differentiate(compressed_attention(q, k, v, **settings, gate=make_gate(q), backend='triton')[0])


def build_choice(dtype: torch.dtype, head_dim: int) -> None:
    for group, share_group in ((16, True), (4, False)):
        q, k, _ = make(dtype, head_dim, group=group, keys=(SEQLEN - BLOCK) // STRIDE + 1)
        lse = torch.zeros(1, q.shape[2], SEQLEN, requires_grad=True)
        indices = select_blocks(q, k, lse, num_selected=16, share_group=share_group, **SIZES, backend='triton')
        indices = torch.zeros_like(indices)
        chosen_scores(q, k, lse, indices, **SIZES, backend='triton')
        differentiate(straight_through_scale(q, k, lse, indices, num_init=1, num_local=2, **SIZES, backend='triton'))
    features: dict[str, Any] = {**SIZES, 'softcap': 20.0, 'backend': 'triton'}
    counts = torch.zeros(indices.shape[:3], dtype=torch.int32)
    select_blocks(q, k, lse, num_selected=16, share_group=False, block_counts=counts, **features)
    differentiate(chosen_scores(q, k, lse, indices, **features))
    for group in (4, 8):  # of blocks that reach beyond the next
        q, k, _ = make(dtype, head_dim, group=group, keys=(SEQLEN - 64) // 16 + 1)
        lse, far = torch.zeros(1, q.shape[2], SEQLEN), {**SIZES, 'compress_block_size': 64, 'selection_block_size': 32}
        select_blocks(q, k, lse, num_selected=16, **far, backend='triton')


def build_selected(dtype: torch.dtype, head_dim: int) -> None:
    for group, index_heads, scaled in ((4, 8, True), (16, 2, False)):
        q, k, v = make(dtype, head_dim, group=group)
        indices = torch.zeros(1, SEQLEN, index_heads, 16, dtype=torch.int32)
        block_scale = torch.ones(indices.shape, requires_grad=True) if scaled else None
        settings: dict[str, Any] = {'block_size': SELECTION_BLOCK, 'block_scale': block_scale}
        differentiate(*selected_attention(q, k, v, indices, **settings, backend='triton'))
    options: dict[str, Any] = {'block_size': SELECTION_BLOCK, '_design': 'query', 'backend': 'triton'}
    for group in (32, 64):  # which have settings of their own
        q, k, v = make(dtype, head_dim, kv_heads=1, group=group)
        indices = torch.zeros(1, SEQLEN, 1, 16, dtype=torch.int32)
        differentiate(*selected_attention(q, k, v, indices, **options))
        with mock.patch.multiple(dlogits, MIN_TOKENS=1, MIN_BLOCK_RATIO=0):
            differentiate(*selected_attention(q, k, v, indices, **options))
    options['_design'] = 'mixed'
    q, k, v = make(dtype, head_dim, group=16)
    indices = torch.zeros(1, SEQLEN, 2, 16, dtype=torch.int32)
    differentiate(*selected_attention(q, k, v, indices, **options))
    selected_attention(q, k, v, indices, **options, **PACKED)
    with mock.patch.multiple(dlogits, MIN_TOKENS=1, MIN_BLOCK_RATIO=0):
        differentiate(*selected_attention(q, k, v, indices, **options))
        differentiate_gated(q, k, v, indices, **options)
    differentiate_gated(q, k, v, indices, **options)
    options['_design'] = 'block'
    q, k, v = make(dtype, head_dim)
    indices = torch.zeros(1, SEQLEN, 2, 16, dtype=torch.int32)
    served = launch.settings_of(selected_settings.BLOCK_DQ, q, v).block_n
    for block_size in dict.fromkeys((min(64, served), 16, served)):
        options['block_size'] = block_size
        differentiate(*selected_attention(q, k, v, indices, **options))
    for design in ('query', 'union', 'block', 'fused'):
        options['_design'], options['block_size'] = design, min(SELECTION_BLOCK, served)
        block_scale = None if design in ('block', 'fused') else torch.ones(indices.shape, requires_grad=True)
        differentiate(*selected_attention(q, k, v, indices, block_scale=block_scale, softcap=30.0, **options))
        for softcap in (None, 30.0):
            differentiate_gated(q, k, v, indices, softcap=softcap, **options)
    merged: dict[str, Any] = {'block_size': options['block_size'], 'window_size': (31, 0), 'unit_scale': True}
    block_scale = torch.ones(indices.shape, requires_grad=True)
    differentiate(*selected_attention(q, k, v, indices, block_scale=block_scale, **merged, backend='triton'))
    options['_design'] = 'fused'
    differentiate(*selected_attention(q, k, v, indices, block_scale=block_scale, **options))
    with mock.patch.multiple(plan, MAX_GROUP_FACTORS=8, MIN_SEQLEN_BY_BLOCK=0):
        differentiate(*selected_attention(q, k, v, indices, block_scale=block_scale, **merged, backend='triton'))


def differentiate_gated(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, **options: Any) -> None:
    differentiate(selected_attention(q, k, v, indices, gate=make_gate(q), **options)[0])


def build_inverse_index(dtype: torch.dtype, head_dim: int) -> None:
    num_selected = 16
    seqlen = inverse_index.MIN_COUNTED // num_selected
    indices = torch.zeros(1, seqlen, 2, num_selected, dtype=torch.int32)
    packed = torch.tensor([0, 40, seqlen], dtype=torch.int32)
    tiles = (inverse_index.SHORT_TILE, *inverse_index.TILES)
    for tile, borders in (*((tile, None) for tile in tiles), (tiles[1], packed)):
        seqlen_k = SELECTION_BLOCK * (2**tile.log_size - 3)
        sequences = Sequences(1, seqlen, seqlen_k, indices.device, None, None, borders, borders)
        sizes: dict[str, Any] = {'kv_heads': 2, 'block_size': SELECTION_BLOCK, 'causal': True, 'unique': True}
        inverse_index.make_inverse_index(indices, make_layout(sequences), range(2), **sizes)


def build_mass(dtype: torch.dtype, head_dim: int) -> None:
    cases: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (4, SELECTION_BLOCK, {'window_size': (31, 0)}),
        (16, 16, {'window_size': (31, 0), 'softcap': 20.0, 'share_group': False}),
        (3, 200, {'causal': False, **PACKED}),
    )
    for group, block_size, settings in cases:
        q, k, _ = make(dtype, head_dim, group=group)
        block_mass(q, k, block_size=block_size, **settings, backend='triton')


def build_divergence(dtype: torch.dtype, head_dim: int) -> None:
    cases: tuple[tuple[int, dict[str, Any]], ...] = (
        (4, {**SIZES, 'window_size': (31, 0)}),
        (16, {**SIZES, 'selection_block_size': 16, 'window_size': (31, 0), 'softcap': 20.0, 'share_group': False}),
        (3, {**SIZES, 'selection_block_size': 48, 'causal': False, **PACKED}),
    )
    for group, settings in cases:
        q, k, _ = make(dtype, head_dim, group=group)
        k_cmp = torch.zeros(1, (SEQLEN - BLOCK) // STRIDE + 1, *k.shape[2:], dtype=dtype, requires_grad=True)
        differentiate(block_score_loss(q, k, q, k_cmp, **settings, seed=0, backend='triton'))


def build_gated_sum(dtype: torch.dtype, head_dim: int) -> None:
    outs = [torch.zeros(1, SEQLEN, 4, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    gates = torch.zeros(1, SEQLEN, 4, 3, requires_grad=True)
    differentiate(gated_sum(gates, *outs, backend='triton'))


def build_rotary(dtype: torch.dtype, head_dim: int) -> None:
    x, _, _ = make(dtype, head_dim)
    tables = torch.zeros(1, SEQLEN, head_dim // 2)
    differentiate(rotary(x, tables, tables, backend='triton'))
    differentiate(*shared_input(x, 1, 2, (tables, tables), backend='triton'))
    differentiate(*shared_input(x, 3, backend='triton'))
    for weight_dtype, num_plain, num_rotated in ((dtype, 1, 2), (torch.float32, 1, 1), (torch.float32, 1, 0)):
        weight = torch.zeros(head_dim, dtype=weight_dtype, requires_grad=True)
        for layout in ('interleaved', 'half'):
            settings: dict[str, Any] = {'eps': 1e-6, 'layout': layout, 'backend': 'triton'}
            differentiate(*norm_rotary(x, weight, num_plain, num_rotated, (tables, tables), **settings))


@torch.no_grad()
def build_decoding(dtype: torch.dtype, head_dim: int) -> None:
    mean, linear = MeanPool(), SingleProjection(head_dim, BLOCK).to(dtype)
    mlp, mean_and_mlp = (make(head_dim, BLOCK).to(dtype) for make in (CompressMLP, MeanResidualMLP))
    grouped = GroupedMLP(head_dim, BLOCK, 2).to(dtype)
    cases = (
        (1, mean, 3),
        (5, linear, 3),
        (1, mean, 1),
        (5, linear, 0),
        (1, mlp, 3),
        (1, mean_and_mlp, 0),
        (1, grouped, 3),
        (1, mean, 2),
    )
    for num_tokens, network, num_gates in cases:
        q, k, v = (t[:, :num_tokens] for t in make(dtype, head_dim, group=16))
        sizes: dict[str, Any] = {'kv_heads': 2, 'head_dim': head_dim, 'value_dim': head_dim, 'dtype': dtype}
        cache = LayerCache(1, 4 * SEQLEN, compress=(BLOCK, STRIDE), has_raw_k=True, has_v_cmp=num_gates > 0, **sizes)
        positions, memory = (torch.zeros(2, length, head_dim, dtype=dtype) for length in (BLOCK, 1))
        gates = torch.zeros(1, num_tokens, 32, num_gates) if num_gates else None
        nsa_decode(
            *(q, k, v, gates, cache),
            merge_window=num_gates < 3,
            networks=(network, network if num_gates else None),
            positions=(positions, positions if num_gates else None),
            freqs=torch.zeros(head_dim // 2),
            mem_kv=None if network is linear else (memory, memory if num_gates else None),
            selection_block_size=SELECTION_BLOCK,
            num_selected=16,
            window_size=100,
            backend='triton',
        )


# Every op with a Triton backend has an entry, and so has code that runs only for large problems.
OPS: dict[str, Callable[[torch.dtype, int], None]] = {
    'window_attention': build_window,
    'compressed_attention': build_compressed,
    'features of both': build_features,
    'select_blocks and chosen_scores': build_choice,
    'block_mass': build_mass,
    'block_divergence': build_divergence,
    'selected_attention': build_selected,
    'gated_sum': build_gated_sum,
    'rotary': build_rotary,
    'decoding': build_decoding,
    'CSR index from blocks to queries': build_inverse_index,
}


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = run_jit(self, *args, grid=grid, warmup=True, **kwargs)
    spilled = [int(size) for size in re.findall(r'(\d+) bytes spill stores', log.getvalue())]
    if log.getvalue():  # compiled just now
        name = f'{self.fn.__module__.removeprefix("native_sparse_attention.ops.")}.{self.fn.__name__}'
        report = {'kernel': name, 'shared': kernel.metadata.shared, 'spilled': max(spilled, default=0)}
        reductions = [r for r in find_reductions(kernel.asm['ttgir']) if r.is_linear]
        report['linear'] = len(reductions)
        report['scattered'] = [r.operand for r in reductions if r.is_scattered]
        report['is_gated'] = is_gated(self, args, kwargs)
        report['is_marked'] = any(isinstance(arg, KernelModifiers) and arg.first_row is not None for arg in args)
        print(json.dumps(report), flush=True)
    return kernel


def compile_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile only the first variant of a kernel, but both of two halves, and kernels with gates or modifiers also with
    all of them.
    """
    is_marked = any(isinstance(arg, KernelModifiers) and all(v is not None for v in arg) for arg in args)
    kind = (self, kwargs.get('COMPUTE_DQ'), is_marked, is_gated(self, args, kwargs))
    return compile_new(kind, self, *args, **kwargs)


def compile_kinds(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a kernel once per kind of arguments: variants that differ in numbers alone are compiled once."""
    kind = (self, kind_of(args), kind_of(kwargs), is_gated(self, args, kwargs))
    return compile_new(kind, self, *args, **kwargs)


def is_gated(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a kernel has gates, or row statistics with a gate."""
    given = [arg for name, arg in zip(kernel.arg_names, args, strict=False) if name in ('gate_ptr', 'gates')]
    bundled = [getattr(arg, name, None) for arg in args for name in ('gate', 'gates') if isinstance(arg, tuple)]
    given += [arg for arg in bundled if isinstance(arg, (Tensor, Gates))]
    return any(arg is not None for arg in given) or kwargs.get('NUM_STATS') == 3


def compile_new(kind: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kind in compiled:
        return None
    compiled.add(kind)
    return compile_only(self, *args, **kwargs)


def kind_of(argument: Any) -> Any:
    """Return the properties of an argument that change a kernel's code beyond its numbers."""
    match argument:
        case dict():
            # The number of warps separates groups with settings of their own.
            kinds = {name: kind_of(value) for name, value in argument.items() if name not in OPTIONS}
            return argument.get('num_warps'), *kinds.items()
        case tuple():
            return tuple(map(kind_of, argument))
        case Tensor():
            return argument.dtype
        case bool() | None:
            return argument
        case int() | float():
            return argument > 0
        case _:
            return type(argument)


OPTIONS = ('grid', 'num_warps', 'num_stages', 'num_ctas', 'maxnreg')
run_jit: Any = JITFunction.run
compiled: set[Any] = set()


def zeros(*args: Any, **kwargs: Any) -> Tensor:
    """Return zeros where an op allocates: nothing is computed, but results may be used as indices."""
    return empty(*args, **kwargs).zero_()


empty = torch.empty


def main(architecture: str, dtype: str, head_dim: str, variants: str = 'all', parts: str = '') -> None:
    no_gpu: Any = NoGpu(architecture)
    driver.set_active(no_gpu)
    knobs.nvidia.dump_ptxas_log = True
    run = {'one': compile_once, 'kinds': compile_kinds, 'all': compile_only}[variants]
    for owner, name, value in (
        (JITFunction, 'run', run),
        (launch, 'architecture_of', lambda _: architecture),
        (launch, 'are_watched', lambda: True),  # every launch asks Triton
        (launch_cache, 'launcher', None),  # recorded kernels are loaded, too
        (support, '_unsupported_device', lambda _: None),
        (torch, 'empty', zeros),
        (torch, 'empty_like', torch.zeros_like),
        (Tensor, 'new_empty', Tensor.new_zeros),
    ):
        setattr(owner, name, value)
    unknown = [part for part in parts.split(',') if not any(part in op for op in OPS)]
    assert not unknown, f'no op is named {unknown}'
    for op, build in OPS.items():
        if any(part in op for part in parts.split(',')):
            build(getattr(torch, dtype), int(head_dim))


if __name__ == '__main__':
    main(*sys.argv[1:])
