"""Launches of a decoding step. Grids and arguments depend on shapes alone, and scratch buffers persist, so a captured
CUDA graph of a step is valid for all later lengths of every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, row_block
from native_sparse_attention.ops._triton.support import MAX_TOKENS
from native_sparse_attention.ops._triton.varlen import last_dim_contiguous
from native_sparse_attention.ops.decoding.step import LayerSettings, Mlps, Storage, Tokens
from native_sparse_attention.ops.decoding.triton.append import NUM_ROLES, Angles, Variant, append_kernel
from native_sparse_attention.ops.decoding.triton.attend import TilesRead, attend_kernel, combine_kernel
from native_sparse_attention.ops.decoding.triton.choose import Selection, choose_kernel
from native_sparse_attention.ops.decoding.triton.compressed import ScratchSizes, compressed_kernel
from native_sparse_attention.ops.decoding.triton.launch_cache import LaunchCache
from native_sparse_attention.ops.decoding.triton.mlp import LinearSizes, linear_kernel
from native_sparse_attention.ops.decoding.triton.settings import (
    adds_to_next_block,
    attend_variant,
    launch_options,
    linear_tile,
    make_plan,
)
from native_sparse_attention.ops.decoding.triton.storage import (
    BlockSizes,
    HeadSizes,
    Lengths,
    Pages,
    Step,
    Strided,
    ring_of,
    strided,
)

# Scratch buffers by name and shape.
Workspace = dict[tuple[Any, ...], Tensor]
# Bytes of a compressed block that a program gathers at a time.
BLOCK_BYTES = 4096
# Most rows whose new blocks a program counts at a time.
ROWS_COUNTED = 128


def append(
    tokens: Tokens,
    storage: Storage,
    positions: tuple[Tensor | None, Tensor | None],
    freqs: Tensor | None,
    factor: float,
    settings: LayerSettings,
    is_mean: bool,
    fills_blocks: bool,
    workspace: Workspace,
    launches: LaunchCache,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Store new tokens in the cache.

    Returns q, rotated by freqs, and q_cmp, both in the dtype of the cache, and the K = ceil(T / d) blocks of keys and
    values that may be complete: `[B, K, H, l, D or DV]` with positions added; with is_mean their means `[B, K, H, D or
    DV]`. Those of values, or both, are None where the cache has no compressed values or keys.
    positions: `[H, l, D]`, `[H, l, DV]`, or None likewise. freqs: float32 `[F]`, for angles position / factor * freqs.
    fills_blocks: blocks that are not complete are 0, for networks that are called; otherwise they are undefined, and
    `compress` must follow, or `attend` with is_mean.
    """
    q, k, v, raw_k, raw_v, k_window, v_window, q_cmp = last_dim_contiguous(*tokens)
    batch, num_tokens, heads, head_dim = q.shape
    kv_heads, value_dim = k.shape[2], v.shape[3]
    block_size, stride = settings.compress_block_size, settings.compress_stride
    num_blocks = -(-num_tokens // stride)
    dtype, device = storage.k.dtype, q.device
    row_bytes = head_block(max(head_dim, value_dim)) * dtype.itemsize
    # Before the launch, since the next launch may overlap with it and waits only for its outputs.
    q_cmp = q_cmp.to(dtype)
    rotated = q.to(dtype) if freqs is None else _empty(workspace, 'q', q.shape, dtype, device)
    of_block = () if is_mean else (block_size,)
    blocks_k, blocks_v = (
        None if held is None else _empty(workspace, name, (batch, num_blocks, kv_heads, *of_block, dim), dtype, device)
        for name, held, dim in (('blocks_k', storage.k_cmp, head_dim), ('blocks_v', storage.v_cmp, value_dim))
    )
    launches.launch(
        append_kernel,
        (batch * kv_heads, NUM_ROLES),
        *(strided(t) for t in (q, k, v, k_window, v_window, raw_k, raw_v, rotated)),
        *(strided(t) for t in (storage.k, storage.v, storage.k_window, storage.v_window)),
        *(ring_of(storage.raw_k), ring_of(storage.raw_v)),
        *(strided(blocks_k), strided(blocks_v), *(None if p is None else p.contiguous() for p in positions)),
        *(Angles(None if freqs is None else freqs.contiguous(), factor), _lengths(storage)),
        _pages(storage.block_table, storage.k),
        step=Step(num_tokens, num_blocks, kv_heads),
        dims=_head_sizes(heads // kv_heads, head_dim, value_dim),
        variant=Variant(
            BlockSizes(block_size, stride, settings.selection_block_size),
            num_angles=0 if freqs is None else len(freqs),
            half=len(freqs) if freqs is not None and settings.is_half else 0,
            is_mean=is_mean,
            fills_blocks=fills_blocks,
            block_g=1 << (heads // kv_heads - 1).bit_length(),
            block_l=min(max(8, BLOCK_BYTES // row_bytes), 1 << (block_size - 1).bit_length()),
        ),
        **launch_options('append', device),
        device=device,
    )
    return rotated, q_cmp, blocks_k, blocks_v


def compress(
    blocks: tuple[Tensor, Tensor | None],
    mlps: Mlps,
    storage: Storage,
    num_tokens: int,
    settings: LayerSettings,
    workspace: Workspace,
    launches: LaunchCache,
) -> tuple[Tensor, Tensor | None]:
    """Return compressed keys and values `[B, K, H, D or DV]` of the complete ones of blocks `[B, K, H, l, D or DV]`,
    after `append`; the others are undefined. Those of values are None without compressed values.
    """
    batch, num_new, kv_heads, block_size = blocks[0].shape[:4]
    dtype, device = storage.k.dtype, storage.k.device
    num_weights = mlps.k.num_weights
    rows = batch * num_new * (kv_heads if num_weights == 1 else 1)
    step = Step(num_tokens, num_new, kv_heads)
    sizes = BlockSizes(block_size, settings.compress_stride, settings.selection_block_size)
    pair = (mlps.k, mlps.v) if mlps.v is not None else (mlps.k,)

    def apply(name: str, x: Any, layers: Any, means: Any, relu: bool) -> list[Tensor]:
        """Run a linear layer of keys and of values; x, means: blocks `[B, K, H, ...]` of each."""
        made = [_linear(*layer) for layer in layers]
        outs = [
            _empty(workspace, name + kind, (batch, num_new, kv_heads, of_layer.outputs), dtype, device)
            for kind, (_, _, of_layer) in zip(('_k', '_v'), made, strict=False)
        ]
        features, units = max(of_layer.outputs for _, _, of_layer in made), len(made) * num_weights
        is_row_major = all(weight.strides[2] == 1 for weight, _, _ in made)
        tile = linear_tile(device, dtype.itemsize, rows, features, units, is_row_major)
        arguments = [
            (strided(t), weight, bias, strided(out), strided(mean))
            for t, (weight, bias, _), out, mean in zip(x, made, outs, means, strict=True)
        ]
        launches.launch(
            linear_kernel,
            (-(-features // tile.features) * -(-rows // tile.rows), units),
            *(*arguments[0], *arguments[-1], _lengths(storage), batch),
            step=step,
            sizes=sizes,
            sizes_k=made[0][2],
            sizes_v=made[-1][2],
            OWN_WEIGHTS=num_weights > 1,
            RELU=relu,
            BLOCK_B=min(row_block(batch), ROWS_COUNTED),
            BLOCK_F=tile.features,
            BLOCK_I=tile.inputs,
            BLOCK_R=tile.rows,
            **launch_options('linear', device, tile.features * tile.rows) | {'num_stages': tile.num_stages},
            device=device,
        )
        return outs

    used = [b for b in blocks if b is not None]
    hidden = apply('hidden', used, [m[:2] for m in pair], [None] * len(pair), relu=True)
    means = used if mlps.adds_mean else [None] * len(pair)
    new_k, *new_v = apply('compressed', hidden, [m[2:] for m in pair], means, relu=False)
    return new_k, new_v[0] if new_v else None


def _linear(weight: Tensor, bias: Tensor) -> tuple[Strided, Strided, LinearSizes]:
    """Return weight and bias of a linear layer of `Mlp` with their strides by head, output and input, and its sizes."""
    if weight.dim() == 2:
        num_outputs, num_inputs = weight.shape
        strides, of_bias = (0, *weight.stride()), (0, bias.stride(0), 0)
    else:
        _, num_inputs, num_outputs = weight.shape
        of_head, of_input, of_output = weight.stride()
        strides, of_bias = (of_head, of_output, of_input), (bias.stride(1), bias.stride(3), 0)
    return Strided(weight, strides), Strided(bias, of_bias), LinearSizes(num_inputs, num_outputs)


def attend(
    q: Tensor,
    q_cmp: Tensor,
    new_k: Tensor | None,
    new_v: Tensor | None,
    gates: Tensor | None,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    storage: Storage,
    settings: LayerSettings,
    workspace: Workspace,
    dtype: torch.dtype,
    launches: LaunchCache,
) -> Tensor:
    """Return the gated attention output `[B, T, HQ, DV]` of the new tokens in dtype, after `append`.

    Stores the complete ones of the compressed blocks new_k, new_v `[B, K, H, D or DV]`, None in a cache without them,
    and advances the lengths. mem_kv: contiguous.
    """
    gates, new_k, new_v = last_dim_contiguous(gates, new_k, new_v)
    batch, num_tokens, heads, head_dim = q.shape
    kv_heads, value_dim = storage.v.shape[2:]
    index_heads = kv_heads if settings.share_group else heads
    device, itemsize = q.device, storage.k.element_size()
    plan = make_plan(
        *(device, itemsize, batch, num_tokens, heads, kv_heads, index_heads, max(head_dim, value_dim)),
        *(storage.capacity, settings.compress_block_size, settings.compress_stride, settings.selection_block_size),
        *(settings.num_selected, settings.window_size),
        *(settings.num_splits, settings.tiles_of_program),
    )
    step = Step(num_tokens, 0 if new_k is None else new_k.shape[1], kv_heads)
    sizes = BlockSizes(settings.compress_block_size, settings.compress_stride, settings.selection_block_size)
    scratch = ScratchSizes(plan.num_blocks, plan.num_tiles, plan.num_lists)
    num_recent = min(settings.num_recent, MAX_TOKENS)
    selection = Selection(settings.num_selected, settings.num_init, settings.num_local, num_recent)
    tiles_read = TilesRead(settings.window_size, plan.num_chosen, plan.num_reads)
    lengths = _lengths(storage)
    group = heads // kv_heads
    adds_to_next = adds_to_next_block(*sizes)
    rows, queries = batch * num_tokens * heads, batch * num_tokens * index_heads

    def empty(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _empty(workspace, name, shape, dtype, device)

    out_compressed = None if gates is None else empty('out_compressed', rows, plan.num_splits, value_dim)
    stats = empty('stats', rows, plan.num_splits, 2)
    sums, maxima = empty('sums', rows, plan.num_blocks, 2 if adds_to_next else 1), empty('maxima', rows, plan.num_tiles)
    parts = (queries, plan.num_programs, 1 if settings.merge_window else 2, heads // index_heads)
    out_parts, parts_stats = empty('out_parts', *parts, value_dim), empty('parts_stats', *parts, 2)
    best = empty('best', queries, 2, plan.num_lists, settings.num_selected, dtype=torch.int32)
    counts = _counts(workspace, (queries, plan.num_lists), device)
    chosen = empty('chosen', batch, num_tokens, index_heads, settings.num_selected, dtype=torch.int32)
    out = q.new_empty(batch, num_tokens, heads, value_dim, dtype=dtype)
    launches.give(out)
    mem_k, mem_v = (None, None) if mem_kv is None else mem_kv
    dims = _head_sizes(group, head_dim, value_dim)
    groups = {'GROUP': group, 'REPEATS': index_heads // kv_heads}

    block_s, block_p = (1 << (count - 1).bit_length() for count in (plan.num_splits, plan.num_programs))
    row_tiles, block_m = -(-num_tokens * group // plan.block_m), row_block(heads // index_heads)
    row_bytes = max(dims.block_d, dims.block_dv) * itemsize
    if storage.k_cmp is not None:
        launches.launch(
            compressed_kernel,
            (batch * kv_heads * row_tiles, plan.num_splits),
            *(strided(t) for t in (q_cmp, storage.k_cmp, storage.v_cmp, new_k, new_v)),
            *(mem_k, mem_v, lengths, out_compressed, stats, sums, maxima),
            *(_pages(storage.block_table_cmp, storage.k_cmp), scratch, settings.scale),
            step=step,
            sizes=sizes,
            dims=dims,
            NUM_MEM=0 if mem_k is None else mem_k.shape[1],
            ADDS_TO_NEXT=adds_to_next,
            BLOCK_M=plan.block_m,
            STEPS=plan.steps,
            BLOCK_J=plan.block_j,
            **launch_options('compressed', device, plan.block_m * dims.block_dv, row_bytes),
            device=device,
        )
    if settings.num_selected:
        block_g = min(16, 1 << (heads // index_heads - 1).bit_length())
        launches.launch(
            choose_kernel,
            (queries, plan.num_chunks),
            *(stats, sums, maxima, best, counts, chosen, lengths, plan.num_splits, scratch),
            step=step,
            sizes=sizes,
            selection=selection,
            **groups,
            ADDS_TO_NEXT=adds_to_next,
            TILE=plan.block_j,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            BLOCK_J=plan.chunk,
            FAN=plan.fan,
            BLOCK_C=1 << (min(plan.num_chunks, plan.fan) * settings.num_selected - 1).bit_length(),
            **launch_options('choose', device, 2 * block_g * plan.chunk),
            device=device,
        )
    variant = attend_variant(plan.of_program)
    launches.launch(
        attend_kernel,
        (queries, plan.num_programs),
        *(strided(t) for t in (q, storage.k, storage.v, storage.k_window, storage.v_window)),
        *(chosen, lengths, out_parts, parts_stats, _pages(storage.block_table, storage.k)),
        *(settings.scale, plan.of_program),
        step=step,
        sizes=sizes,
        selection=selection,
        tiles_read=tiles_read,
        dims=dims,
        REPEATS=groups['REPEATS'],
        MERGED=settings.merge_window,
        BLOCK_S=row_block(max(settings.num_selected, 1)),
        BLOCK_M=block_m,
        BLOCK_N=plan.block_n,
        **launch_options(variant, device, 2 * block_m * dims.block_dv, row_bytes),
        device=device,
    )
    launches.launch(
        combine_kernel,
        (rows,),
        *(strided(gates), out_compressed, stats, out_parts, parts_stats, out, lengths, storage.peaks),
        *(plan.num_splits, plan.num_programs),
        step=step,
        **groups,
        MERGED=settings.merge_window,
        OUTPUT_GATE=gates is not None and gates.shape[-1] == 2,
        BLOCK_S=block_s,
        BLOCK_P=block_p,
        VALUE_DIM=value_dim,
        BLOCK_DV=dims.block_dv,
        **launch_options('combine', device, (block_s + 2 * block_p) * dims.block_dv),
        device=device,
    )
    return out


def _head_sizes(group: int, head_dim: int, value_dim: int) -> HeadSizes:
    return HeadSizes(group, head_dim, value_dim, head_block(head_dim), head_block(value_dim))


def _lengths(storage: Storage) -> Lengths:
    return Lengths(storage.lengths, storage.capacity)


def _pages(table: Tensor | None, pool: Tensor) -> Pages:
    if table is None:
        return Pages(None, 0, 1, 0)
    return Pages(table, table.stride(0), pool.shape[1], pool.shape[0])


def _empty(workspace: Workspace, name: str, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a persistent scratch tensor with arbitrary content."""
    key = (name, *shape, dtype)
    if key not in workspace:
        with torch.inference_mode(False):
            workspace[key] = torch.empty(shape, dtype=dtype, device=device)
    return workspace[key]


def _counts(workspace: Workspace, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros `[queries, num_lists]`; every step leaves them zero."""
    key = ('counts', *shape, torch.int32)
    if key not in workspace:
        if device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            raise RuntimeError('a step of decoding is captured, but must have run once before on the same cache')
        _empty(workspace, 'counts', shape, torch.int32, device).zero_()
    return workspace[key]
