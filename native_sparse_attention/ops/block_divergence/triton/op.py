"""`block_divergence` as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import QueryLayout, overlapping_blocks
from native_sparse_attention.ops._triton.launch import exceeds_int32, head_block, launch, settings_of
from native_sparse_attention.ops._triton.registered import register_gradients, register_op, save_inputs, saved_inputs
from native_sparse_attention.ops._triton.varlen import last_dim_contiguous
from native_sparse_attention.ops.block_divergence.triton import settings
from native_sparse_attention.ops.block_divergence.triton.backward import dk_kernel, dq_kernel
from native_sparse_attention.ops.block_divergence.triton.forward import block_lse_kernel, divergence_kernel, mean_kernel
from native_sparse_attention.ops.block_divergence.triton.tiles import DrawnQueries, Meta, Sizes

# Bytes of the log-sum-exp of blocks by head; more queries take several passes.
WORKSPACE = 2**28
# Heads times blocks of a tile of `divergence_kernel`, the most blocks of one, and parts of the blocks of one.
ROW_TILE, ROW_BLOCKS, ROW_PARTS = 4096, 512, 16
# Rows of a step of `mean_kernel`.
MEAN_ROWS = 2048


def block_divergence(
    q_cmp: Tensor,
    k_cmp: Tensor,
    mass: Tensor,
    rows: Tensor,
    layouts: tuple[QueryLayout, QueryLayout],
    compress: tuple[int, int],
    rules: MassRules,
    call: Call,
) -> Tensor:
    tokens, compressed = layouts
    drawn = (rows, tokens.position, tokens.key_len, compressed.key_start, compressed.key_len)
    left, right = rules.window_size or (None, None)
    sizes = (*compress, rules.block_size, left, right)
    loss, *_ = _forward(q_cmp, k_cmp, mass, *drawn, *sizes, rules.share_group, *call[1:])
    return loss


_INPUTS = (
    'Tensor q, Tensor k_cmp, Tensor mass, Tensor rows, Tensor position, Tensor key_len, Tensor first_compressed, '
    'Tensor num_compressed, SymInt block_size, SymInt stride, SymInt selection_block_size, SymInt? left, '
    'SymInt? right, bool share_group, bool causal, float scale, float? softcap'
)


@register_op('block_divergence', _INPUTS, 5)
def _forward(q: Tensor, k_cmp: Tensor, mass: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the loss, the weight of a row in it, and what `divergence_kernel` saves: dscores, lse and delta."""
    loss, weight, dscores, lse, delta = outputs = _allocate(q, k_cmp, mass)
    batch, num_queries, index_heads, num_blocks = mass.shape
    if mass.numel() == 0 or k_cmp.shape[1] == 0:
        return tuple(t.zero_() for t in outputs)
    q, k_cmp = last_dim_contiguous(q, k_cmp)
    drawn, sizes, (scale, softcap), meta = _prepare(q, k_cmp, mass, rest)
    heads, kv_heads = q.shape[2], k_cmp.shape[2]
    group = heads // index_heads
    block_m, block_j, num_warps, num_stages = settings_of(settings.FORWARD, q)
    num_parts = -(-num_blocks // block_j)
    block_g = 1 << (group - 1).bit_length()
    divergence = torch.empty_like(mass[..., 0], memory_format=torch.contiguous_format)
    step = min(num_queries, max(1, WORKSPACE // (4 * batch * heads * num_blocks)))
    block_lse = q.new_empty(batch * step * heads * num_blocks, dtype=torch.float32)
    part_lse = q.new_empty(batch * step * heads * num_parts, dtype=torch.float32)
    for first in range(0, num_queries, step):
        stop = min(num_queries, first + step)
        sizes = sizes._replace(first_query=first, stop_query=stop)
        tiles = -(-(stop - first) * meta.group // block_m)
        launch(
            block_lse_kernel,
            (batch * tiles * num_parts, kv_heads),
            *(q, k_cmp, drawn, block_lse, part_lse, q.stride(), k_cmp.stride(), sizes, scale, softcap),
            meta=meta,
            BLOCK_M=block_m,
            BLOCK_J=block_j,
            BLOCK_D=head_block(q.shape[3]),
            num_warps=num_warps,
            num_stages=num_stages,
            device=q.device,
        )
        launch(
            divergence_kernel,
            (batch * (stop - first), index_heads),
            *(block_lse, part_lse, mass, drawn, divergence, dscores, lse, delta, mass.stride(), sizes, num_parts),
            meta=meta._replace(group=group),
            BLOCK_G=block_g,
            BLOCK_J=min(ROW_BLOCKS, max(16, ROW_TILE // block_g), 1 << (num_blocks - 1).bit_length()),
            BLOCK_P=ROW_PARTS,
            num_warps=4,
            device=q.device,
        )
    launch(
        mean_kernel,
        (1,),
        *(divergence, loss, weight, divergence.numel()),
        BLOCK=MEAN_ROWS,
        num_warps=8,
        device=q.device,
    )
    return outputs


@register_op(
    'block_divergence_backward',
    f'Tensor dloss, Tensor weight, Tensor dscores, Tensor lse, Tensor delta, {_INPUTS}, bool needs_dq, bool needs_dk',
    2,
)
def _backward(dloss: Tensor, weight: Tensor, dscores: Tensor, lse: Tensor, delta: Tensor, *rest: Any) -> Any:
    """Return the gradients of q and k_cmp, empty where they are not needed."""
    q, k_cmp, mass, *inputs, needs_dq, needs_dk = rest
    # Queries that are not drawn have no gradient.
    dq, dk = (t.new_zeros(t.shape if needed else 0) for t, needed in ((q, needs_dq), (k_cmp, needs_dk)))
    if mass.numel() == 0 or k_cmp.shape[1] == 0:
        return dq, dk
    q, k_cmp = last_dim_contiguous(q, k_cmp)
    drawn, sizes, (scale, softcap), meta = _prepare(q, k_cmp, mass, inputs)
    batch, num_queries, index_heads, _ = mass.shape
    kv_heads = k_cmp.shape[2]
    for kernel, table, grad in ((dq_kernel, settings.DQ, dq), (dk_kernel, settings.DK, dk)):
        if grad.numel() == 0:
            continue
        block_m, block_n, num_warps, num_stages = settings_of(table, q)
        if kernel is dq_kernel:
            tiles = -(-num_queries * meta.group // block_m)
        else:
            tiles = -(-k_cmp.shape[1] // (block_n * meta.per_selection)) * meta.per_selection
        launch(
            kernel,
            (batch * tiles, kv_heads),
            *(q, k_cmp, drawn, (dscores, lse, delta, dloss, weight), grad),
            *(q.stride(), k_cmp.stride(), grad.stride(), sizes, scale, softcap),
            meta=meta,
            SHARE_GROUP=index_heads == kv_heads,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=head_block(q.shape[3]),
            num_warps=num_warps,
            num_stages=num_stages,
            device=q.device,
        )
    return dq, dk


def _prepare(
    q: Tensor, k_cmp: Tensor, mass: Tensor, rest: Sequence[Any]
) -> tuple[DrawnQueries, Sizes, tuple[float, float | None], Meta]:
    """Return the drawn queries, the sizes of a launch for all of them, scale and soft cap, and the constants."""
    block_size, stride, selection_block_size, left, right, _, causal, *logits = rest[5:]
    offsets = overlapping_blocks(block_size, stride, selection_block_size)
    meta = Meta(
        *(block_size, stride, selection_block_size, offsets.stop, offsets.start, -(offsets.start // offsets.stop)),
        causal=causal,
        group=q.shape[2] // k_cmp.shape[2],
        head_dim=q.shape[3],
        int64_offsets=exceeds_int32(k_cmp),
    )
    num_queries, num_blocks = mass.shape[1], mass.shape[3]
    sizes = Sizes(num_queries, k_cmp.shape[1], num_blocks, 0, num_queries, left, right)
    return DrawnQueries(*(t.contiguous() for t in rest[:5])), sizes, (logits[0], logits[1]), meta


def _allocate(q: Tensor, k_cmp: Tensor, mass: Tensor) -> tuple[Tensor, ...]:
    by_head = (*mass.shape[:2], q.shape[2])
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in ((), (), mass.shape, by_head, by_head))


@_forward.register_fake
def _(q: Tensor, k_cmp: Tensor, mass: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _allocate(q, k_cmp, mass)


@_backward.register_fake
def _(*rest: Any) -> tuple[Tensor, ...]:
    q, k_cmp, *_, needs_dq, needs_dk = rest[5:]
    return tuple(t.new_empty(t.shape if needed else 0) for t, needed in ((q, needs_dq), (k_cmp, needs_dk)))


def _differentiate(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    if dloss is None:
        return (None,) * len(ctx.others)
    outputs, inputs = saved_inputs(ctx)
    grads = _backward(dloss, *outputs[1:], *inputs, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *(None,) * (len(inputs) - 2)


register_gradients(_forward, _backward, _differentiate, save_inputs)
