"""Selected attention as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.ops._triton.inverse_index import InverseIndex
from native_sparse_attention.ops._triton.launch import exceeds_int32, is_hopper, launch, row_block
from native_sparse_attention.ops._triton.registered import SEQUENCES, register_gradients, register_op, saved_inputs
from native_sparse_attention.ops._triton.varlen import flatten, last_dim_contiguous, unflatten
from native_sparse_attention.ops.selected_attention.triton import plan, settings
from native_sparse_attention.ops.selected_attention.triton.arguments import (
    Arguments,
    BackwardTensors,
    ForwardTensors,
    make_arguments,
    stride_of,
    strides_of,
)
from native_sparse_attention.ops.selected_attention.triton.by_block.backward import BlockQueryGradients
from native_sparse_attention.ops.selected_attention.triton.by_block.forward import attend_by_block
from native_sparse_attention.ops.selected_attention.triton.by_query.backward import dq_kernel
from native_sparse_attention.ops.selected_attention.triton.by_query.forward import forward_kernel
from native_sparse_attention.ops.selected_attention.triton.by_union.backward import union_dq_kernel
from native_sparse_attention.ops.selected_attention.triton.by_union.forward import union_forward_kernel
from native_sparse_attention.ops.selected_attention.triton.dkv.launch import differentiate_keys, fold_gate
from native_sparse_attention.ops.selected_attention.triton.dlogits.dq import differentiate_by_dlogits
from native_sparse_attention.ops.selected_attention.triton.dlogits.storage import stores_dlogits
from native_sparse_attention.ops.selected_attention.triton.fp16_values import convert_values, converts_values


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    call: Call,
    gate: Tensor | None = None,
    design: str | None = None,
    unit_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`.

    gate: `[B, T, HQ]`, if the output's incoming gradient is that of gate * output; the log-sum-exp has no gradient
    then. design: one of `plan.DESIGNS` for forward and backward pass, None for the choice by shape. unit_scale:
    block_scale is 1 everywhere, so block-major kernels do not load it.

    Raises:
        ValueError: if there is no such design.
    """
    if design is not None and design not in plan.DESIGNS:
        raise ValueError(f'design is {design!r}, but must be one of {", ".join(plan.DESIGNS)}')
    arguments = (q, k, v, block_indices, block_scale, gate, *flatten(call.sequences), block_size, *call[1:])
    save_low_bits = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    save_low_bits = save_low_bits and stores_dlogits(
        q, k, v, block_indices, block_scale, block_size, plan.count_packed(call.sequences.cu_seqlens)
    )
    # The compiler need not know the size of the inverse index.
    save_index = not torch.compiler.is_compiling()
    out, lse, _, _, _ = _forward(*arguments, unit_scale, design, save_index, save_low_bits)
    return out, lse if gate is None else lse.detach()


# Arguments of the op, and of its backward op after what the forward pass returned.
_INPUTS = (
    f'Tensor q, Tensor k, Tensor v, Tensor block_indices, Tensor? block_scale, Tensor? gate, {SEQUENCES}, '
    'SymInt block_size, bool causal, float scale, float? softcap, bool unit_scale, str? design, bool save_index, '
    'bool save_low_bits'
)


@register_op('selected_attention', _INPUTS, 5)
def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp, and what else the backward pass takes.

    That is the low bits of the output (`split_low_bits`), empty unless save_low_bits; and entries and starts of an
    `InverseIndex`, empty unless save_index, if the design needs none, and if the index is too large to be saved.
    """
    unit_scale, design, save_index, save_low_bits = inputs[-4:]
    return attend(_arguments_of(*inputs), design, save_index, save_low_bits, inputs[0].dtype, unit_scale)


def _arguments_of(q: Tensor, *inputs: Any) -> Arguments:
    k, v, block_indices, block_scale, _, *flat = inputs[:11]
    return make_arguments((q, k, v, block_indices, block_scale), unflatten(q, flat), *inputs[11:15])


def attend(
    arguments: Arguments,
    design: str | None,
    save_index: bool,
    save_low_bits: bool,
    out_dtype: torch.dtype,
    unit_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the registered op returns, with the output in out_dtype."""
    q, k, v, block_indices, block_scale, layout, block_size, _, scale, softcap = arguments
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3], dtype=out_dtype)
    lse = q.new_empty(batch, heads, seqlen, dtype=torch.float32)
    low_bits = q.new_empty(out.shape if save_low_bits else 0, dtype=torch.int16)
    if design is None:
        packed = plan.count_packed(layout.cu_seqlens)
        design = plan.choose_design(q, k, v, block_indices, block_size, num_packed=packed)
    if design in ('block', 'fused'):
        index = attend_by_block(arguments._replace(block_scale=None) if unit_scale else arguments, out, lse)
        entries, starts = index if save_index and index is not None else no_index(q)
        return out, lse, low_bits, entries, starts
    converted = convert_values(k, v, layout, block_size) if save_low_bits and converts_values(v.dtype) else None
    fp16 = None if converted is None else converted.data
    tensors = ForwardTensors(q, k, v, block_indices, block_scale, out, lse, low_bits if save_low_bits else None)
    strides = strides_of(q=q, k=k, v=v, indices=block_indices, factors=block_scale, out=out)
    launches = plan.plan_launches(
        design,
        (union_forward_kernel, settings.UNION_FORWARD),
        (forward_kernel, (settings.FORWARD, settings.FORWARD_32, settings.FORWARD_64)),
        arguments,
        max_percent=plan.MAX_UNION_PERCENT['forward'],
        fp16_values=converted,
    )
    for kernel, grid, union, chosen in launches:
        options: dict[str, Any] = {'NEGATIVE_SCALE': scale < 0} if kernel is union_forward_kernel else {}
        fp16_tiles = None if fp16 is None else plan.describe_key_tiles(k, fp16, chosen)[1]
        if exceeds_int32(fp16):
            chosen = chosen._replace(tile=chosen.tile._replace(int64_offsets=True))
        launch(
            kernel,
            grid,
            *(tensors, strides, *plan.describe_key_tiles(k, v, chosen), fp16_tiles, converted, stride_of(fp16)),
            *(layout, union, scale, softcap),
            **chosen._asdict(),
            SUM_BY_PRODUCT=is_hopper(q.device),  # where a product with 8 columns is cheaper than sums
            **options,
            device=q.device,
        )
        del union
    return out, lse, low_bits, *no_index(q)


def no_index(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty entries and starts of an `InverseIndex`."""
    return q.new_empty(0, dtype=torch.int32), q.new_empty(0, dtype=torch.int32)


@register_op(
    'selected_attention_backward',
    'Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor low_bits, Tensor entries, Tensor starts, '
    f'{_INPUTS}, bool needs_dkv, bool needs_dscale',
    5,
)
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, block_scale and gate. Gradients that are not needed are empty, except dq.

    low_bits, entries, starts: from the forward pass. dlse and block_scale are None beside a gate.
    """
    dout, dlse, out, lse, low_bits, entries, starts, *inputs, needs_dkv, needs_dscale = arguments
    q, gate, (unit_scale, design, _, save_low_bits) = inputs[0], inputs[5], inputs[-4:]
    rows, needed = (dout, dlse, out, lse, low_bits, entries, starts, gate), (needs_dkv, needs_dscale)
    return differentiate(_arguments_of(*inputs), *rows, design, save_low_bits, *needed, q.dtype, unit_scale)


def differentiate(
    arguments: Arguments,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    low_bits: Tensor,
    entries: Tensor,
    starts: Tensor,
    gate: Tensor | None,
    design: str | None,
    save_low_bits: bool,
    needs_dkv: bool,
    needs_dscale: bool,
    grad_dtype: torch.dtype,
    unit_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the registered op returns, with dq, dk and dv in grad_dtype, the dtype of q with save_low_bits.

    dlse beside a gate is, like dout, before the gate.
    """
    q, k, v, block_indices, block_scale, layout, block_size, *_ = arguments
    dout, out = last_dim_contiguous(dout, out)
    empty = q.new_empty(0)
    if save_low_bits:
        dq, dk, dv, delta = differentiate_by_dlogits(arguments, dout, dlse, out, lse, low_bits, gate)
        return dq, *((dk, dv) if needs_dkv else (empty, empty)), empty, _gate_gradient(gate, delta)
    if design is None:
        packed = plan.count_packed(layout.cu_seqlens)
        design = plan.choose_design(q, k, v, block_indices, block_size, backward=True, num_packed=packed)
    if design in ('block', 'fused'):
        arguments = arguments._replace(block_scale=None) if unit_scale else arguments
        rows = (lse, dout, dlse, gate)
        queries = BlockQueryGradients(arguments, *rows, needs_dscale, grad_dtype, design == 'fused')
        index = InverseIndex(entries, starts) if starts.numel() else None
        lse, gates = fold_gate(lse, gate)
        dk, dv = differentiate_keys(arguments, lse, queries.delta, dout, queries, index, gates, grad_dtype)
        dscale = empty
        if queries.dfactors is not None and block_scale is not None:
            dfactors = queries.dfactors.unflatten(0, (q.shape[0], k.shape[2])).transpose(1, 2)
            dscale = dfactors.reshape(block_scale.shape).to(block_scale.dtype).contiguous()
        dkv = (dk, dv) if needs_dkv else (empty, empty)
        return queries.dq, *dkv, dscale, _gate_gradient(gate, queries.delta)
    dq, delta, dfactors = _differentiate_queries(
        arguments, dout, dlse, out, lse, gate, design, needs_dscale, grad_dtype
    )
    dscale, dk, dv = empty, empty, empty
    if dfactors is not None and block_scale is not None:
        dscale = (dfactors[0] if len(dfactors) == 1 else dfactors.sum(0)).to(block_scale.dtype)
    if needs_dkv:
        lse, gates = fold_gate(lse, gate)
        dk, dv = differentiate_keys(arguments, lse, delta, dout, gates=gates, grad_dtype=grad_dtype)
    return dq, dk, dv, dscale, _gate_gradient(gate, delta)


def _differentiate_queries(
    arguments: Arguments,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    gate: Tensor | None,
    design: str,
    needs_dscale: bool,
    grad_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dq, delta `[B, HQ, T]` and the gradients of the factors `[head tiles, B, T, HI, n]`, by query or union."""
    q, k, v, block_indices, block_scale, layout, _, _, scale, softcap = arguments
    dq = q.new_empty(q.shape, dtype=grad_dtype)
    delta = torch.empty_like(lse)
    tables = settings.DQ, settings.DQ_32, settings.DQ_64
    dfactors = None
    if needs_dscale:
        group = q.shape[2] // max(block_indices.shape[2], 1)
        rows = min(settings.settings_of_group(tables, group, q, v).block_m, row_block(group))
        # The kernel by union holds all heads of a group, and stores its sums in the first head tile.
        head_tiles = 1 if design == 'union' else -(-group // rows)
        allocate = torch.zeros if design == 'mixed' and head_tiles > 1 else torch.empty
        dfactors = allocate(head_tiles, *block_indices.shape, dtype=torch.float32, device=q.device)
    tensors = BackwardTensors(
        *(q, k, v, block_indices, block_scale, out, lse, dout, dlse, gate, dq, delta), dfactors=dfactors
    )
    inputs = {'q': q, 'k': k, 'v': v, 'indices': block_indices, 'factors': block_scale, 'gate': gate}
    strides = strides_of(**inputs, out=out, dout=dout, dlse=dlse, dq=dq)
    launches = plan.plan_launches(
        design,
        (union_dq_kernel, settings.UNION_DQ),
        (dq_kernel, tables),
        arguments,
        max_percent=plan.MAX_UNION_PERCENT['backward'],
    )
    for kernel, grid, union, chosen in launches:
        launch(
            kernel,
            grid,
            *(tensors, strides, *plan.describe_key_tiles(k, v, chosen), layout, union, scale, softcap),
            **chosen._asdict(),
            device=q.device,
        )
        del union
    return dq, delta, dfactors


def _gate_gradient(gate: Tensor | None, delta: Tensor) -> Tensor:
    """Return delta `[B, HQ, T]` (dout * output, where the log-sum-exp has no gradient) as the gradient of the gate."""
    return delta.new_empty(0) if gate is None else delta.transpose(1, 2).to(gate.dtype).contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3])
    low_bits = q.new_empty(out.shape if rest[-1] else 0, dtype=torch.int16)
    return out, q.new_empty(batch, heads, seqlen, dtype=torch.float32), low_bits, *no_index(q)


@_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    lse, (q, k, v, _, block_scale, gate), rest = arguments[3], arguments[7:13], arguments[13:]
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


register_gradients(_forward, _backward, _differentiate)
