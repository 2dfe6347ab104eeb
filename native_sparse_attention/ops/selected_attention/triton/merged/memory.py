"""Regions of compressed blocks and memory pairs (or sinks) in one softmax, as a registered PyTorch op.

The memory pairs are interval attention without other keys, the regions selected attention over compressed keys; their
float32 outputs are combined by the log-sum-exps (`parts`), so that the output is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.ops._triton.interval import op as interval
from native_sparse_attention.ops._triton.interval.keys import differentiate_keys
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_gradients, register_op, saved_inputs
from native_sparse_attention.ops._triton.varlen import flatten, unflatten
from native_sparse_attention.ops.selected_attention.triton import op as selected
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, make_arguments
from native_sparse_attention.ops.selected_attention.triton.merged import parts


def attend_with_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    block_size: int,
    call: Call,
    compress: tuple[int, int],
    design: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`.

    k, v: `[B, C, H, D and DV]` compressed blocks of (l, d) = compress, which the sequences count
    (`Sequences.of_compressed`). block_size: m, compressed blocks of a region. mem_kv: `[H, M, D and DV]`, read by every
    query. sinks: `[HQ]` or None.
    """
    mem_k, mem_v = (None, None) if mem_kv is None else mem_kv
    inputs = (q, k, v, mem_k, mem_v, sinks)
    save_difference = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    options = (block_size, *call[1:], *compress, design, not torch.compiler.is_compiling(), save_difference)
    return _forward(q, k, v, block_indices, mem_k, mem_v, sinks, *flatten(call.sequences), *options)[:2]


# Arguments of the op, and of its backward op after what the forward pass returned.
_INPUTS = (
    'Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? mem_k, Tensor? mem_v, Tensor? sinks, '
    f'{SEQUENCES}, SymInt block_size, bool causal, float scale, float? softcap, SymInt compress_size, '
    'SymInt compress_stride, str? design, bool save_index, bool save_difference'
)


@register_op('attention_with_memory', _INPUTS, 8)
def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """Return the output, its log-sum-exp, and what the backward pass takes.

    That is the log-sum-exps of the memory pairs and of the regions `[B, HQ, T]`, the difference of their outputs with
    its units (`parts.combine`), and the inverse index of the regions (`selected.attend`).
    """
    q, (scale, design, save_index, save_difference) = inputs[0], (inputs[15], *inputs[19:])
    of_memory = interval.attend(_of_memory(*inputs), scale, torch.float32)
    arguments = _of_regions(*inputs)
    out_regions, lse_regions, _, *index = selected.attend(arguments, design, save_index, False, torch.float32)
    out, lse, *difference = parts.combine(q, of_memory, (out_regions, lse_regions), save_difference)
    return out, lse, of_memory[1], lse_regions, *difference, *index


def _of_memory(q: Tensor, *inputs: Any) -> interval.Inputs:
    """Return the inputs of interval attention over the memory pairs alone."""
    k, v, _, mem_k, mem_v, sinks, *flat = inputs[:12]
    sequences = unflatten(q, flat)._replace(seqlen_k=0, seqlens_k=None)
    if sequences.cu_seqlens_k is not None:
        sequences = sequences._replace(cu_seqlens_k=torch.zeros_like(sequences.cu_seqlens_k))
    softcap = inputs[15]
    return interval.prepare_memory(q, k[:, :0], v[:, :0], mem_k, mem_v, flatten(sequences), softcap, sinks)


def _of_regions(q: Tensor, *inputs: Any) -> Arguments:
    """Return the arguments of selected attention over the regions."""
    k, v, block_indices, *_ = inputs
    block_size, causal, scale, softcap, *compress = inputs[12:18]
    settings = (block_size, causal, scale, softcap, (compress[0], compress[1]))
    return make_arguments((q, k, v, block_indices, None), unflatten(q, inputs[6:12]), *settings)


@register_op(
    'attention_with_memory_backward',
    'Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor lse_memory, Tensor lse_regions, Tensor difference, '
    f'Tensor units, Tensor entries, Tensor starts, {_INPUTS}, bool needs_dkv, bool needs_memory, bool needs_dsinks',
    6,
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, mem_k, mem_v and sinks. Gradients that are not needed are empty, except dq."""
    dout, dlse, out, lse, lse_memory, lse_regions, difference, units, entries, starts, *inputs = arguments
    (q, k, v), mem_k, sinks, scale, design = inputs[:3], inputs[4], inputs[6], inputs[15], inputs[19]
    needs_dkv, needs_memory, needs_dsinks = inputs[22:]
    inputs, lses = inputs[:22], [lse_memory, lse_regions]
    dout, outs, weights, dlses = parts.split(dout, dlse, out, lse, lses, difference, units)
    dk = dv = dmem_k = dmem_v = dsinks = empty = q.new_empty(0)

    memory = _of_memory(*inputs)
    rows = (outs[0], lse_memory, dout, dlses[0], weights[0])
    dq, numbers = interval.differentiate_queries(memory, scale, *rows, torch.float32)
    if needs_memory and mem_k is not None:
        keys, layout, modifiers = memory[3:]
        tensors = (*memory[:3], dout, numbers)
        _, _, dmem_k, dmem_v = differentiate_keys(tensors, layout, keys, scale, modifiers, torch.float32)

    saved, grad_dtype = (outs[1], lse_regions, empty, entries, starts), torch.float32
    of_regions = selected.differentiate(
        _of_regions(*inputs), dout, dlses[1], *saved, weights[1], design, False, needs_dkv, False, grad_dtype
    )
    dq = parts.add_gradients(dq, of_regions[0], q)
    if needs_dkv:
        dk, dv = of_regions[1].to(k.dtype), of_regions[2].to(v.dtype)
    if needs_dsinks and sinks is not None:
        delta = parts.join_deltas((numbers[:, :, 1], of_regions[4].transpose(1, 2)), dlses, lse, lses, dlse)
        dsinks = interval.differentiate_sinks(sinks, lse, delta)
    return dq, dk, dv, dmem_k, dmem_v, dsinks


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    lses = [q.new_empty(batch, heads, seqlen, dtype=torch.float32) for _ in range(3)]
    return out, *lses, *parts.allocate_difference(q, out.shape, lses[0], rest[-1]), *selected.no_index(q)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    (q, k, v, _, mem_k, mem_v, sinks), needed = arguments[10:17], arguments[-3:]
    pairs = ((k, needed[0]), (v, needed[0]), (mem_k, needed[1]), (mem_v, needed[1]), (sinks, needed[2]))
    grads = [t.new_empty(t.shape) if needs and t is not None else q.new_empty(0) for t, needs in pairs]
    return q.new_empty(q.shape), *grads


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    outputs, inputs = saved_inputs(ctx)
    if dout is None:
        dout = torch.zeros_like(outputs[0])
    needed = ctx.needs_input_grad[:7]
    needs = (needed[1] or needed[2], needed[4] or needed[5], needed[6])
    dq, dk, dv, *others = _backward(dout, dlse, *outputs, *inputs, *needs)
    grads = zip((dq, dk, dv, None, *others), needed, strict=True)
    return *(grad if needs else None for grad, needs in grads), *(None,) * (len(inputs) - 7)


register_gradients(_forward, _backward, _differentiate)
