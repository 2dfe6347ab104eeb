"""Selected blocks and window in one softmax, as a registered PyTorch op.

A causal query at position t reads its window, the keys after t - W, and the keys of its selected blocks up to t - W:
two disjoint sets. The second is selected attention of queries that stand W positions earlier, so both parts are
computed by the kernels of the two branches and combined by their log-sum-exps. The weight of a part in the combination
acts like a gate on its output; in the backward pass each part also receives the gradient of its log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops._triton.interval import op as interval
from native_sparse_attention.ops._triton.interval.keys import differentiate_keys
from native_sparse_attention.ops._triton.launch import head_block, launch_rows
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_gradients, register_op, saved_inputs
from native_sparse_attention.ops._triton.support import MAX_TOKENS
from native_sparse_attention.ops._triton.varlen import flatten, last_dim_contiguous, make_layout, unflatten
from native_sparse_attention.ops.selected_attention.triton import op as selected
from native_sparse_attention.ops.selected_attention.triton.arguments import make_arguments
from native_sparse_attention.ops.selected_attention.triton.merged.combine import combine_kernel, split_kernel
from native_sparse_attention.ops.selected_attention.triton.merged.dscale import differentiate_scale


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    call: Call,
    window: tuple[int, int],
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`. block_scale: None or all ones."""
    left, right = window
    assert call.causal
    assert right == 0
    left = MAX_TOKENS if left < 0 else min(left, MAX_TOKENS)  # a larger window leaves no keys to the selected part
    inputs = (q, k, v, block_scale, modifiers.sinks)
    save_difference = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    options = (left, block_size, call.scale, modifiers.softcap, not torch.compiler.is_compiling(), save_difference)
    return _forward(q, k, v, block_indices, block_scale, modifiers.sinks, *flatten(call.sequences), *options)[:2]


# Arguments of the op, and of its backward op after what the forward pass returned.
_INPUTS = (
    f'Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? block_scale, Tensor? sinks, {SEQUENCES}, '
    'SymInt left, SymInt block_size, float scale, float? softcap, bool save_index, bool save_difference'
)


@register_op('merged_attention', _INPUTS, 8)
def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """Return the output, its log-sum-exp, and what the backward pass takes.

    That is the log-sum-exps of the window and of the selected part `[B, HQ, T]`, the difference of their outputs
    `[B, T, HQ, DV]` with its units `[B, HQ, T]` (empty unless save_difference), and the inverse index of the selected
    part (`selected.attend`). The gradients of the log-sum-exps need more bits of the difference than bfloat16 has.
    """
    (q, k, v, block_indices, _, sinks), flat = inputs[:6], inputs[6:12]
    left, block_size, scale, softcap, save_index, save_difference = inputs[12:]
    window = interval.prepare_window(q, k, v, flat, left, softcap, sinks)
    out_window, lse_window = interval.attend(window, scale, torch.float32)
    far = _before_window(unflatten(q, flat), left)
    arguments = make_arguments(
        (q, k, v, block_indices, None), far, block_size, causal=True, scale=scale, softcap=softcap
    )
    out_selected, lse_selected, _, entries, starts = selected.attend(
        arguments, None, save_index=save_index, save_low_bits=False, out_dtype=torch.float32
    )
    out, lse = q.new_empty(out_window.shape), torch.empty_like(lse_window)
    difference, units = _allocate_difference(q, out.shape, lse, save_difference)
    launch_rows(
        combine_kernel,
        out,
        *(out_window, out_selected, lse_window, lse_selected, out, lse),
        *((difference, units) if save_difference else (None, None)),
        block_dv=head_block(out.shape[3]),
    )
    return out, lse, lse_window, lse_selected, difference, units, entries, starts


@register_op(
    'merged_attention_backward',
    'Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor lse_window, Tensor lse_selected, Tensor difference, '
    f'Tensor units, Tensor entries, Tensor starts, {_INPUTS}, bool needs_dkv, bool needs_dscale, bool needs_dsinks',
    5,
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, block_scale and sinks. Gradients that are not needed are empty, except dq."""
    dout, dlse, out, lse, lse_window, lse_selected, difference, units, entries, starts, *inputs = arguments
    (q, k, v, block_indices, block_scale, sinks), flat = inputs[:6], inputs[6:12]
    left, block_size, scale, softcap, _, _, needs_dkv, needs_dscale, needs_dsinks = inputs[12:]
    (dout,) = last_dim_contiguous(dout)
    outs = [out.new_empty(out.shape) for _ in range(2)]
    weights = [lse.new_empty(out.shape[:3]) for _ in range(2)]
    dlses = [torch.empty_like(lse) for _ in range(2)]
    strides = (dout.stride(), None if dlse is None else dlse.stride())
    rows = (out, difference, units, dout, lse_window, lse_selected, lse, dlse, *outs, *weights, *dlses)
    launch_rows(split_kernel, out, *rows, *strides, block_dv=head_block(out.shape[3]))
    empty = q.new_empty(0)

    window = interval.prepare_window(q, k, v, flat, left, softcap, sinks)
    rows = (outs[0], lse_window, dout, dlses[0], weights[0])
    dq, numbers = interval.differentiate_queries(window, scale, *rows, torch.float32)
    dk = dv = dscale = dsinks = empty
    if needs_dkv:
        keys, layout, marks = window[3:]
        tensors = (*window[:3], dout, numbers)
        dk, dv, _, _ = differentiate_keys(tensors, layout, keys, scale, marks, torch.float32)

    saved = (outs[1], lse_selected, empty, entries, starts)
    far = _before_window(unflatten(q, flat), left)
    arguments = make_arguments(
        (q, k, v, block_indices, None), far, block_size, causal=True, scale=scale, softcap=softcap
    )
    grads = selected.differentiate(
        *(arguments, dout, dlses[1], *saved, weights[1], None),
        save_low_bits=False,
        needs_dkv=needs_dkv,
        needs_dscale=False,
        grad_dtype=torch.float32,
    )
    far_dq, far_dk, far_dv, _, far_delta = grads
    dq = _sum(dq, far_dq, q)
    if needs_dscale or needs_dsinks:
        # The sum of p * dp over all keys. Each part has the sum over its own keys, minus its dlse.
        deltas = numbers[:, :, 1] + dlses[0], far_delta.transpose(1, 2) + dlses[1]
        shares = ((t - lse).exp().masked_fill(t == -torch.inf, 0) for t in (lse_window, lse_selected))
        of_window, of_selected = (delta * share for delta, share in zip(deltas, shares, strict=True))
        delta = of_window + of_selected if dlse is None else of_window + of_selected - dlse
        if needs_dscale and block_scale is not None:
            arguments = arguments._replace(layout=make_layout(unflatten(q, flat)))
            dscale = differentiate_scale(arguments, lse, delta, dout).to(block_scale.dtype)
        if needs_dsinks and sinks is not None:
            dsinks = interval.differentiate_sinks(sinks, lse, delta)
    if needs_dkv:
        dk, dv = _sum(dk, far_dk, k), _sum(dv, far_dv, v)
    return dq, dk, dv, dscale, dsinks


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    lses = [q.new_empty(batch, heads, seqlen, dtype=torch.float32) for _ in range(3)]
    return out, *lses, *_allocate_difference(q, out.shape, lses[0], rest[-1]), *selected.no_index(q)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    (q, k, v, _, block_scale, sinks), (needs_dkv, needs_dscale, needs_dsinks) = arguments[10:16], arguments[-3:]
    dkv = [q.new_empty(t.shape if needs_dkv else 0) for t in (k, v)]
    others = ((block_scale, needs_dscale), (sinks, needs_dsinks))
    others = [t.new_empty(t.shape) if needed and t is not None else q.new_empty(0) for t, needed in others]
    return q.new_empty(q.shape), *dkv, *others


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    outputs, inputs = saved_inputs(ctx)
    if dout is None:
        dout = torch.zeros_like(outputs[0])
    needed = ctx.needs_input_grad
    dq, dk, dv, *others = _backward(dout, dlse, *outputs, *inputs, needed[1] or needed[2], *needed[4:6])
    grads = zip((dq, dk, dv, None, *others), needed[:6], strict=True)
    return *(grad if needs else None for grad, needs in grads), *(None,) * (len(inputs) - 6)


register_gradients(_forward, _backward, _differentiate)


def _allocate_difference(q: Tensor, shape: torch.Size, lse: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    """Allocate the difference of the outputs and its units, both empty if it is not needed."""
    dtype = torch.float16 if q.element_size() == 2 else torch.float32
    return q.new_empty(shape if needed else 0, dtype=dtype), lse.new_empty(lse.shape if needed else 0)


def _sum(grad: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """Add two float32 gradients of a tensor and round the sum to its dtype, in one pass."""
    return torch.add(grad, other, out=like.new_empty(grad.shape))


def _before_window(sequences: Sequences, left: int) -> Sequences:
    """Return the sequences with every query W = left + 1 positions earlier."""
    offset = sequences.q_offset
    if offset is None:
        if sequences.cu_seqlens is not None and sequences.cu_seqlens_k is not None:
            offset = sequences.cu_seqlens_k.diff() - sequences.cu_seqlens.diff()
        elif sequences.seqlens_k is not None:
            offset = sequences.seqlens_k - sequences.seqlen_q
        else:
            offset = sequences.seqlen_k - sequences.seqlen_q
    return sequences._replace(q_offset=offset - (left + 1))
