"""Selected attention as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._triton.inverse_index import InverseIndex
from native_sparse_attention.ops._triton.launch import is_hopper, is_wide, launch, row_block
from native_sparse_attention.ops._triton.registered import (
    OptionalFloat,
    OptionalInt,
    OptionalTensor,
    refuse_double_backward,
    register_derivative,
    save_inputs,
    saved_inputs,
)
from native_sparse_attention.ops._triton.varlen import flatten, last_dim_contiguous, make_layout, unflatten
from native_sparse_attention.ops.selected_attention.triton import plan, settings
from native_sparse_attention.ops.selected_attention.triton.by_block.backward import MemberGradients
from native_sparse_attention.ops.selected_attention.triton.by_block.forward import attend_by_block
from native_sparse_attention.ops.selected_attention.triton.by_query.backward import dq_kernel
from native_sparse_attention.ops.selected_attention.triton.by_query.forward import forward_kernel
from native_sparse_attention.ops.selected_attention.triton.by_union.backward import neighbours_dq_kernel
from native_sparse_attention.ops.selected_attention.triton.by_union.forward import neighbours_forward_kernel
from native_sparse_attention.ops.selected_attention.triton.dkv.launch import differentiate_keys, fold_gate
from native_sparse_attention.ops.selected_attention.triton.dlogits.dq import differentiate_by_dlogits
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import passes_dlogits
from native_sparse_attention.ops.selected_attention.triton.fp16_values import convert_values, converts


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    sequences: Sequences,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """gate: `[B, T, HQ]`, if the gradient that the output will receive is that of gate * output; the log-sum-exp has
    none then.
    """
    arguments = (q, k, v, block_indices, block_scale, gate, *flatten(sequences), block_size, causal, scale, softcap)
    keeps_low = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    keeps_low = keeps_low and passes_dlogits(
        q, k, v, block_indices, block_scale, block_size, plan.count_packed(sequences.cu_seqlens)
    )
    # How long lists are is more than the compiler should have to know.
    out, lse, _, _, _ = _forward(*arguments, not torch.compiler.is_compiling(), keeps_low)
    return out, lse if gate is None else lse.detach()


@torch.library.custom_op('native_sparse_attention::selected_attention', mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: OptionalTensor,
    gate: OptionalTensor,
    seqlen_k: int,
    q_offset: OptionalInt,
    q_offsets: OptionalTensor,
    seqlens_k: OptionalTensor,
    cu_seqlens: OptionalTensor,
    cu_seqlens_k: OptionalTensor,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: OptionalFloat,
    keeps_lists: bool,
    keeps_low: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp, and what the backward takes besides: what rounding leaves out of the output
    (`split_low_bits`), empty where not keeps_low; entries and starts of an `InverseIndex`, empty where there are none,
    where there are too many, and where not keeps_lists.
    """
    sequences = unflatten(q, (seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k))
    settled = (block_size, causal, scale, softcap)
    return attend(q, k, v, block_indices, block_scale, sequences, *settled, keeps_lists, keeps_low, q.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    sequences: Sequences,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    keeps_lists: bool,
    keeps_low: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the registered op returns, with the output in out_dtype."""
    q, k, v, block_indices, block_scale = last_dim_contiguous(q, k, v, block_indices, block_scale)
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3], dtype=out_dtype)
    lse = q.new_empty(batch, heads, seqlen, dtype=torch.float32)
    low = q.new_empty(out.shape if keeps_low else 0, dtype=torch.int16)
    place = make_layout(sequences)
    packed = plan.count_packed(sequences.cu_seqlens)
    design = plan.choose_design(q, k, v, block_indices, block_size, num_packed=packed)
    if design == 'block':
        chosen, settled = (q, k, v, block_indices, block_scale), (place, block_size, causal, scale, softcap)
        index = attend_by_block(*chosen, out, lse, *settled)
        entries, starts = index if keeps_lists and index is not None else no_lists(q)
        return out, lse, low, entries, starts
    tables = settings.FORWARD, settings.FORWARD_32, settings.FORWARD_64
    kernels = (neighbours_forward_kernel, settings.NEIGHBOURS_FORWARD), (forward_kernel, tables)
    percent = plan.MAX_UNION_PERCENT['forward']
    halves = convert_values(k, v, place, block_size) if keeps_low and converts(v.dtype) else None
    half = None if halves is None else halves.half
    inputs = (q, k, v, block_indices, place, block_size, causal)
    launches = plan.plan_launches(design, *kernels, *inputs, max_percent=percent, halves=halves)
    for kernel, grid, sharing, meta in launches:
        meta['ONES'] = is_hopper(q.device)  # where a product of eight columns is cheaper than sums
        meta['INT64_OFFSETS'] = meta['INT64_OFFSETS'] or is_wide(half)
        if kernel is neighbours_forward_kernel:
            meta['NEGATIVE'] = scale < 0
        launch(
            kernel,
            grid,
            *(
                q,
                k,
                v,
                *plan.describe_key_tiles(k, v, meta),
                None if half is None else plan.describe_key_tiles(k, half, meta)[1],
            ),
            *(block_indices, block_scale, out, lse, low if keeps_low else None),
            *(q.stride(), k.stride(), v.stride(), _strides(half), block_indices.stride(), _strides(block_scale)),
            *(out.stride(), halves, place, sharing, scale, softcap),
            **meta,
            device=q.device,
        )
        del sharing
    return out, lse, low, *no_lists(q)


def no_lists(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(0, dtype=torch.int32), q.new_empty(0, dtype=torch.int32)


@torch.library.custom_op('native_sparse_attention::selected_attention_backward', mutates_args=())
def _backward(
    dout: Tensor,
    dlse: OptionalTensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    entries: Tensor,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: OptionalTensor,
    gate: OptionalTensor,
    seqlen_k: int,
    q_offset: OptionalInt,
    q_offsets: OptionalTensor,
    seqlens_k: OptionalTensor,
    cu_seqlens: OptionalTensor,
    cu_seqlens_k: OptionalTensor,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: OptionalFloat,
    keeps_lists: bool,
    keeps_low: bool,
    needs_dkv: bool,
    needs_dscale: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, block_scale and gate; those that are not needed are empty, but for the first. low, entries,
    starts: from the forward. dlse, block_scale: None beside a gate.
    """
    sequences = unflatten(q, (seqlen_k, q_offset, q_offsets, seqlens_k, cu_seqlens, cu_seqlens_k))
    kept, inputs = (out, lse, low, entries, starts), (q, k, v, block_indices, block_scale, gate, sequences)
    settled = (block_size, causal, scale, softcap)
    return differentiate(dout, dlse, *kept, *inputs, *settled, keeps_low, needs_dkv, needs_dscale, q.dtype)


def differentiate(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    entries: Tensor,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    gate: Tensor | None,
    sequences: Sequences,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    keeps_low: bool,
    needs_dkv: bool,
    needs_dscale: bool,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the registered op returns, with dq, dk and dv in grad_dtype, which is that of q where keeps_low is set. dlse
    beside a gate is before the gate, as dout is.
    """
    q, k, v, block_indices, block_scale = last_dim_contiguous(q, k, v, block_indices, block_scale)
    dout, out = last_dim_contiguous(dout, out)
    place = make_layout(sequences)
    packed = plan.count_packed(sequences.cu_seqlens)
    if keeps_low:
        inputs, settled = (q, k, v, block_indices, place), (block_size, causal, scale, softcap)
        dq, dk, dv, delta = differentiate_by_dlogits(dout, dlse, out, lse, low, *inputs, *settled, gate)
        dkv = (dk, dv) if needs_dkv else (q.new_empty(0), q.new_empty(0))
        return dq, *dkv, q.new_empty(0), _gradient_of_gate(gate, delta)
    design = plan.choose_design(q, k, v, block_indices, block_size, backward=True, num_packed=packed)
    if design == 'block':
        chosen, settled = (q, k, v, block_indices, block_scale, lse), (place, block_size, causal, scale, softcap)
        members = MemberGradients(*chosen, dout, dlse, gate, *settled, needs_dscale, grad_dtype)
        index = InverseIndex(entries, starts) if starts.numel() else None
        lse, gates = fold_gate(lse, gate)
        chosen = (q, k, v, block_indices, block_scale, lse)
        more = (members, index, gates, grad_dtype)
        dk, dv = differentiate_keys(*chosen, members.delta, dout, *settled, *more)
        dscale = q.new_empty(0)
        if members.dfactors is not None and block_scale is not None:
            dfactors = members.dfactors.unflatten(0, (q.shape[0], k.shape[2])).transpose(1, 2)
            dscale = dfactors.reshape(block_scale.shape).to(block_scale.dtype).contiguous()
        dkv = (dk, dv) if needs_dkv else (q.new_empty(0), q.new_empty(0))
        return members.dq, *dkv, dscale, _gradient_of_gate(gate, members.delta)
    dq = q.new_empty(q.shape, dtype=grad_dtype)
    delta = torch.empty_like(lse)
    tables = settings.DQ, settings.DQ_32, settings.DQ_64
    kernels = (neighbours_dq_kernel, settings.NEIGHBOURS_DQ), (dq_kernel, tables)
    percent = plan.MAX_UNION_PERCENT['backward']
    launches = plan.plan_launches(
        design, *kernels, q, k, v, block_indices, place, block_size, causal, max_percent=percent
    )
    dfactors = None
    if needs_dscale:
        group = q.shape[2] // max(block_indices.shape[2], 1)
        rows = min(settings.settings_of_group(tables, group, q, v).block_m, row_block(group))
        # A tile of neighbours has all heads of a group, and leaves its sums in the first part.
        parts = 1 if design == 'neighbours' else -(-group // rows)
        allocate = torch.zeros if design == 'mixed' and parts > 1 else torch.empty
        dfactors = allocate(parts, *block_indices.shape, dtype=torch.float32, device=q.device)
    for kernel, grid, sharing, meta in launches:
        launch(
            kernel,
            grid,
            *(q, k, v, *plan.describe_key_tiles(k, v, meta), block_indices, block_scale, out, lse, dout, dlse, gate),
            *(dq, delta, dfactors),
            *(q.stride(), k.stride(), v.stride(), block_indices.stride(), _strides(block_scale)),
            *(out.stride(), dout.stride(), _strides(dlse), _strides(gate), dq.stride()),
            *(place, sharing, scale, softcap),
            **meta,
            device=q.device,
        )
        del sharing
    if dfactors is None or block_scale is None:
        dscale = q.new_empty(0)
    else:
        dscale = (dfactors[0] if len(dfactors) == 1 else dfactors.sum(0)).to(block_scale.dtype)
    dk, dv = q.new_empty(0), q.new_empty(0)
    if needs_dkv:
        inputs, settled = (q, k, v, block_indices, block_scale), (place, block_size, causal, scale, softcap)
        lse, gates = fold_gate(lse, gate)
        sums = (lse, delta, dout)
        dk, dv = differentiate_keys(*inputs, *sums, *settled, gates=gates, grad_dtype=grad_dtype)
    return dq, dk, dv, dscale, _gradient_of_gate(gate, delta)


def _gradient_of_gate(gate: Tensor | None, delta: Tensor) -> Tensor:
    """delta `[B, HQ, T]`, which is dout * output where the log-sum-exp has no gradient; empty without a gate."""
    return delta.new_empty(0) if gate is None else delta.transpose(1, 2).to(gate.dtype).contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    low = q.new_empty(out.shape if rest[-1] else 0, dtype=torch.int16)
    return out, q.new_empty(batch, heads, seqlen, dtype=torch.float32), low, *no_lists(q)


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    low: Tensor,
    entries: Tensor,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    gate: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    dk, dv = (k.new_empty(k.shape), v.new_empty(v.shape)) if rest[-2] else (q.new_empty(0), q.new_empty(0))
    dscale = q.new_empty(0)
    if rest[-1] and block_scale is not None:
        dscale = block_scale.new_empty(block_scale.shape)
    dgate = lse.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return q.new_empty(q.shape), dk, dv, dscale, dgate


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    (out, *others), inputs = saved_inputs(ctx)
    if dout is None:
        dout = torch.zeros_like(out)
    needed = ctx.needs_input_grad[:6]
    dq, dk, dv, dscale, dgate = _backward(dout, dlse, out, *others, *inputs, needed[1] or needed[2], needed[4])
    grads = zip((dq, dk, dv, None, dscale, dgate), needed, strict=True)
    return *(grad if needs else None for grad, needs in grads), *(None,) * (len(inputs) - 6)


register_derivative(_forward, _differentiate, save_inputs)
refuse_double_backward(_backward)


def _strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()
