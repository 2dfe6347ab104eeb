"""Interval attention as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.ops._triton import varlen
from native_sparse_attention.ops._triton.interval import settings
from native_sparse_attention.ops._triton.interval.backward import dq_kernel
from native_sparse_attention.ops._triton.interval.bias_gradient import dbias_kernel
from native_sparse_attention.ops._triton.interval.forward import forward_kernel
from native_sparse_attention.ops._triton.interval.keys import Tensors, differentiate_keys, make_tile
from native_sparse_attention.ops._triton.interval.modifiers import (
    KernelModifiers,
    make_kernel_modifiers,
    settings_of_forward,
)
from native_sparse_attention.ops._triton.interval.tiles import Interval
from native_sparse_attention.ops._triton.launch import describe_tiles, head_block, launch, settings_of
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_gradients, register_op, saved_inputs
from native_sparse_attention.ops._triton.support import MAX_TOKENS

# q, k, v, interval, layout and kernel_modifiers, as `_prepare` makes them for the kernels.
Inputs = tuple[Tensor, Tensor, Tensor, Interval, varlen.SequenceLayout, KernelModifiers]
# Elements of the log-sum-exp per step of `differentiate_sinks`.
SINK_ELEMENTS = 2**24


def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sequences: Sequences,
    left: int | None,
    reach: int | None,
    scale: float,
    block_size: int = 1,
    stride: int = 1,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the query at position t over the keys from t - left on with key * stride + reach <= t.

    q: `[B, T, HQ, D]`. k, v: `[B, C, H, D and DV]`, compressed blocks of block_size and stride (1 and 1: tokens).
    mem_kv: key/value pairs that every query reads, `[H, M, D and DV]`. left, reach: None is unbounded. Modifiers of
    single keys (all but softcap and sinks) require tokens without memory pairs. gate: `[B, T, HQ]`, if the incoming
    gradient of the output will be that of gate * output; the log-sum-exp has no gradient then. Returns the output `[B,
    T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`.
    """
    assert mem_kv is None or left is None, 'query_range knows no memory beside a window'
    mem_k, mem_v = (None, None) if mem_kv is None else mem_kv
    out, lse = _forward(
        *(q, k, v, mem_k, mem_v, modifiers.sinks, modifiers.bias, gate),
        *(*varlen.flatten(sequences), left, reach, block_size, stride, scale),
        *(modifiers.softcap, modifiers.query_segments, modifiers.key_segments, modifiers.attn_mask),
        *(modifiers.dropout_p, modifiers.dropout_seed),
    )
    return out, lse if gate is None else lse.detach()


# Arguments of the op, and of its backward op after what the forward pass returned.
_INPUTS = (
    'Tensor q, Tensor k, Tensor v, Tensor? mem_k, Tensor? mem_v, Tensor? sinks, Tensor? bias, Tensor? gate, '
    f'{SEQUENCES}, SymInt? left, SymInt? reach, SymInt block_size, SymInt stride, float scale, float? softcap, '
    'Tensor? query_segments, Tensor? key_segments, Tensor? attn_mask, float dropout_p, Tensor? dropout_seed'
)


@register_op('interval_attention', _INPUTS, 2)
def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, *_, scale = inputs[:19]
    return attend(_unpack(inputs), scale, q.dtype)


def _unpack(inputs: tuple[Any, ...]) -> Inputs:
    q, k, v, mem_k, mem_v, sinks, bias, _ = inputs[:8]
    (left, reach, block_size, stride, _), (softcap, query_segments, key_segments, *others) = inputs[14:19], inputs[19:]
    modifiers = (softcap, sinks, query_segments, key_segments, bias, *others)
    return _prepare(q, k, v, mem_k, mem_v, inputs[8:14], left, reach, block_size, stride, modifiers)


def attend(inputs: Inputs, scale: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, HQ, DV]` in out_dtype and the log-sum-exp `[B, HQ, T]`."""
    q, k, v, interval, layout, kernel_modifiers = inputs
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3], dtype=out_dtype)
    lse = q.new_empty(batch, heads, seqlen, dtype=torch.float32)
    block_m, block_n, num_warps, num_stages = settings_of_forward(q, v, kernel_modifiers)
    packed = _count_packed(heads // k.shape[2], block_m)
    launch(
        forward_kernel,
        (varlen.num_tiles(layout, seqlen, block_m // packed), heads // packed),
        *(q, k, v, out, lse, *_describe_keys(k, v, layout, interval, block_n)),
        *(q.stride(), k.stride(), v.stride(), out.stride()),
        *(layout, interval, scale, kernel_modifiers),
        NEGATIVE=scale < 0 and not kernel_modifiers.change_logits,
        GROUP=heads // k.shape[2],
        HEADS=packed,
        tile=make_tile(q, v, block_m, block_n, k, v),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
        **settings.limit_registers(q, num_warps),
    )
    return out, lse


@register_op(
    'interval_attention_backward',
    'Tensor dout, Tensor? dlse, Tensor out, Tensor lse, '
    f'{_INPUTS}, bool needs_dkv, bool needs_dsinks, bool needs_dbias',
    8,
)
def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, mem_k, mem_v, sinks, bias and gate. Gradients that are not needed are empty,
    except that of q. dlse: None with a gate.
    """
    *packed, needs_dkv, needs_dsinks, needs_dbias = rest
    q, *_, sinks, bias, gate = packed[:8]
    inputs, scale = _unpack(tuple(packed)), packed[18]
    dout, out = varlen.last_dim_contiguous(dout, out)
    dq, row_stats = differentiate_queries(inputs, scale, out, lse, dout, dlse, gate, q.dtype)
    q, k, v, interval, layout, kernel_modifiers = inputs
    tensors = (q, k, v, dout, row_stats)
    dk = dv = dmem_k = dmem_v = dsinks = dbias = dgate = None
    if needs_dkv:
        dk, dv, dmem_k, dmem_v = differentiate_keys(tensors, layout, interval, scale, kernel_modifiers, k.dtype)
    if needs_dsinks and sinks is not None:
        delta = row_stats[:, :, 1]
        dsinks = differentiate_sinks(sinks, lse, delta if gate is None else delta * gate.transpose(1, 2))
    if needs_dbias and bias is not None:
        dbias = _differentiate_bias(bias, tensors, layout, interval, scale, kernel_modifiers)
    if gate is not None:
        # The sum of p * dp is dout * output.
        dgate = row_stats[:, :, 1].transpose(1, 2).to(gate.dtype).contiguous()
    dk, dv, dmem_k, dmem_v, dsinks, dbias, dgate = (
        q.new_empty(0) if grad is None else grad for grad in (dk, dv, dmem_k, dmem_v, dsinks, dbias, dgate)
    )
    return dq, dk, dv, dmem_k, dmem_v, dsinks, dbias, dgate


def differentiate_queries(
    inputs: Inputs,
    scale: float,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gate: Tensor | None,
    dq_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return dq in dq_dtype, and the row statistics of `dq_kernel`, float32 `[B, HQ, 2 or 3, T]`, for
    `differentiate_keys`. The second of them is delta, the sum of p * dp minus dlse.

    gate: `[B, T, HQ]`, a factor of dout, or None. dlse: `[B, HQ, T]`, without that factor.
    """
    q, k, v, interval, layout, kernel_modifiers = inputs
    seqlen, heads = q.shape[1:3]
    kv_heads = v.shape[2]
    dq = q.new_empty(q.shape, dtype=dq_dtype)
    row_stats = lse.new_empty(*lse.shape[:2], 2 if gate is None else 3, lse.shape[2])  # for dkv_kernel
    table = settings.DQ if interval.left is None else settings.DQ_WINDOW
    block_m, block_n, num_warps, num_stages = settings_of(table, q, v)
    packed = _count_packed(heads // kv_heads, block_m)
    launch(
        dq_kernel,
        (varlen.num_tiles(layout, seqlen, block_m // packed), heads // packed),
        *(q, k, v, out, lse, dout, dlse, gate, dq, row_stats, *_describe_keys(k, v, layout, interval, block_n)),
        *(q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()),
        *(None if t is None else t.stride() for t in (dlse, gate)),
        dq.stride(),
        *(layout, interval, scale, kernel_modifiers),
        GROUP=heads // kv_heads,
        HEADS=packed,
        tile=make_tile(q, v, block_m, block_n, k, v),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    return dq, row_stats


def differentiate_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks. A sink is a key with value 0, so its logit has the gradient -p * delta.

    The sum is in float64, over some queries at a time to bound the memory.
    """
    batch, heads, _ = lse.shape
    sums = torch.zeros(heads, dtype=torch.float64, device=lse.device)
    for pair in zip(*(t.split(max(1, SINK_ELEMENTS // max(1, batch * heads)), 2) for t in (lse, delta)), strict=True):
        of_queries, deltas = pair
        weights = (sinks.double()[:, None] - of_queries).exp().masked_fill(of_queries == -torch.inf, 0)
        sums -= (weights * deltas).sum((0, 2))
    return sums.to(sinks.dtype)


def _differentiate_bias(
    bias: Tensor,
    tensors: Tensors,
    layout: varlen.SequenceLayout,
    interval: Interval,
    scale: float,
    kernel_modifiers: KernelModifiers,
) -> Tensor:
    q, k, v, dout, row_stats = tensors
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    block_m, block_n, num_warps, num_stages = settings_of(settings.DQ, q, v)
    block_n = min(block_n, 32)  # pointers of all four operands take registers
    tiles = -(-bias.shape[2] // block_m) * -(-bias.shape[3] // block_n)
    launch(
        dbias_kernel,
        (tiles * bias.shape[0] * bias.shape[1],),
        *(q, k, v, row_stats, dout, dbias),
        *(q.stride(), k.stride(), v.stride(), dout.stride(), dbias.stride()),
        *(layout, interval, scale, kernel_modifiers, (q.shape[0], q.shape[2], *bias.shape[:2])),
        NUM_STATS=row_stats.shape[2],
        GROUP=q.shape[2] // k.shape[2],
        tile=make_tile(q, v, block_m, block_n, q, k, v, dout),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    return dbias


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    return out, q.new_empty(batch, heads, seqlen, dtype=torch.float32)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, mem_k, _, sinks, bias, gate = arguments[4:12]
    needs_dkv, needs_dsinks, needs_dbias = arguments[-3:]
    num_memory = 0 if mem_k is None else mem_k.shape[1]
    shapes = [k.shape, v.shape, *((k.shape[2], num_memory, t.shape[3]) for t in (k, v))]
    dkv = [q.new_empty(shape if needs_dkv else 0) for shape in shapes]
    dsinks = sinks.new_empty(sinks.shape) if needs_dsinks and sinks is not None else q.new_empty(0)
    dbias = bias.new_empty(bias.shape) if needs_dbias and bias is not None else q.new_empty(0)
    dgate = q.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return q.new_empty(q.shape), *dkv, dsinks, dbias, dgate


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    (out, lse), inputs = saved_inputs(ctx)
    if dout is None:
        dout = torch.zeros_like(out)
    needed = ctx.needs_input_grad[:8]
    grads = _backward(dout, dlse, out, lse, *inputs, any(needed[1:5]), *needed[5:7])
    grads = [grad if needs else None for grad, needs in zip(grads, needed, strict=True)]
    return *grads, *(None,) * (len(inputs) - 8)


register_gradients(_forward, _backward, _differentiate)


def prepare_window(
    q: Tensor, k: Tensor, v: Tensor, flat: Any, left: int, softcap: float | None, sinks: Tensor | None
) -> Inputs:
    """Return the inputs of `attend` for the causal window of `left` keys before the query's own. flat: the sequences
    (`flatten`).
    """
    bound = left if left < MAX_TOKENS else None
    return _prepare(q, k, v, None, None, flat, bound, 0, 1, 1, (softcap, sinks))


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    flat: Any,
    left: int | None,
    reach: int | None,
    block_size: int,
    stride: int,
    modifiers: Any,
) -> Inputs:
    """Return the inputs of the kernels. Memory pairs are placed before the other keys of every row."""
    num_memory, num_keys = None, k.shape[1]
    if mem_k is not None and mem_v is not None and mem_k.shape[1]:
        num_memory = mem_k.shape[1]
        k, v = (
            concatenate((memory.transpose(0, 1).expand(t.shape[0], -1, -1, -1), t), 1)
            for memory, t in ((mem_k, k), (mem_v, v))
        )
    layout = varlen.make_layout(varlen.unflatten(q, flat), block_size, stride)
    interval = Interval(left, reach, block_size, stride, num_memory, num_keys)
    kernel_modifiers = make_kernel_modifiers(Modifiers(*modifiers), q.shape[0], q.shape[2])
    q, k, v = varlen.last_dim_contiguous(q, k, v)
    return q, k, v, interval, layout, kernel_modifiers


def _describe_keys(k: Tensor, v: Tensor, layout: varlen.SequenceLayout, interval: Interval, block_n: int) -> Any:
    """Return tensor descriptors for fully visible key tiles, or None. They bring no gain in float32, and in packed
    sequences other keys lie between the memory pairs and a sequence's keys.
    """
    if k.element_size() == 4 or (interval.num_memory is not None and layout.cu_blocks is not None):
        return None, None
    return (describe_tiles(t, block_n, head_block(t.shape[3])) for t in (k, v))


def _count_packed(group: int, block_m: int) -> int:
    """Return the heads of a group that share a tile, a power of two: the more heads, the fewer keys the tile's queries
    read in total.
    """
    return min(group & -group, block_m)
