"""Selected attention as registered PyTorch ops, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._triton.finite import find_large
from native_sparse_attention.ops._triton.inverse_index import InverseIndex
from native_sparse_attention.ops._triton.launch import (
    Table,
    head_block,
    is_hopper,
    is_wide,
    launch,
    row_block,
    settings_of,
)
from native_sparse_attention.ops._triton.registered import (
    OptionalFloat,
    OptionalInt,
    OptionalTensor,
    refuse_double_backward,
    register_derivative,
    save_inputs,
    saved_inputs,
)
from native_sparse_attention.ops._triton.varlen import (
    SequenceLayout,
    flatten,
    last_dim_contiguous,
    make_layout,
    unflatten,
)
from native_sparse_attention.ops.selected_attention.triton import keys, settings
from native_sparse_attention.ops.selected_attention.triton.backward import dq_kernel
from native_sparse_attention.ops.selected_attention.triton.block_union import (
    MAX_MEMBERS,
    MAX_UNION_PERCENT,
    NOTHING_SHARED,
    Sharing,
    find_sharing,
    union_size,
    union_tiles,
)
from native_sparse_attention.ops.selected_attention.triton.by_block import attend_by_block
from native_sparse_attention.ops.selected_attention.triton.by_block_backward import MemberGradients
from native_sparse_attention.ops.selected_attention.triton.constants import describe_key_tiles, find_constants
from native_sparse_attention.ops.selected_attention.triton.dlogits import passes_dlogits
from native_sparse_attention.ops.selected_attention.triton.forward import forward_kernel
from native_sparse_attention.ops.selected_attention.triton.fp16_values import HalfValues, convert_values, converts
from native_sparse_attention.ops.selected_attention.triton.neighbours import neighbours_forward_kernel
from native_sparse_attention.ops.selected_attention.triton.neighbours_backward import neighbours_dq_kernel
from native_sparse_attention.ops.selected_attention.triton.query_gradients import differentiate_by_dlogits

DESIGNS = ('query', 'neighbours', 'block', 'mixed')
# The largest group that leaves a tile of one query empty, and the most indices of a row that neighbours share.
SMALL_GROUP, MAX_SHARED_CHOICE = 8, 64
# Fewer queries than this do not pay for finding out which of them share.
MIN_SEQLEN_MIXED = 256
# Neighbours share where there are at most so many times as many blocks as each of them chooses.
MEETING = 4
# Forward, in half types, tiles of a large group share whatever was chosen where they have two queries of up to
# LARGE_HEAD elements a head, and those of more queries at LARGE_HEAD alone (smaller heads do not gain), where blocks
# are at most so many times as many as each query chooses. Measured on an H200.
MEETING_LARGE, LARGE_HEAD = 8, 128
# Fewer queries than this do not pay for the lists of those who chose a block.
MIN_SEQLEN_BY_BLOCK = 1024


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
        q, k, v, block_indices, block_scale, block_size, _count_packed(sequences.cu_seqlens)
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
    packed = _count_packed(sequences.cu_seqlens)
    design = choose_design(q, k, v, block_indices, block_size, num_packed=packed)
    if design == 'block':
        chosen, settled = (q, k, v, block_indices, block_scale), (place, block_size, causal, scale, softcap)
        index = attend_by_block(*chosen, out, lse, *settled)
        entries, starts = index if keeps_lists and index is not None else no_lists(q)
        return out, lse, low, entries, starts
    tables = settings.FORWARD, settings.FORWARD_32, settings.FORWARD_64
    kernels = (neighbours_forward_kernel, settings.NEIGHBOURS_FORWARD), (forward_kernel, tables)
    percent = MAX_UNION_PERCENT['forward']
    halves = convert_values(k, v, place, block_size) if keeps_low and converts(v.dtype) else None
    half = None if halves is None else halves.half
    inputs = (q, k, v, block_indices, place, block_size, causal)
    launches = _plan(design, *kernels, *inputs, max_percent=percent, halves=halves)
    for kernel, grid, sharing, meta in launches:
        meta['ONES'] = is_hopper(q.device)  # where a product of eight columns is cheaper than sums
        meta['INT64_OFFSETS'] = meta['INT64_OFFSETS'] or is_wide(half)
        if kernel is neighbours_forward_kernel:
            meta['NEGATIVE'] = scale < 0
        launch(
            kernel,
            grid,
            *(q, k, v, *describe_key_tiles(k, v, meta), None if half is None else describe_key_tiles(k, half, meta)[1]),
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
    packed = _count_packed(sequences.cu_seqlens)
    if keeps_low:
        inputs, settled = (q, k, v, block_indices, place), (block_size, causal, scale, softcap)
        dq, dk, dv, delta = differentiate_by_dlogits(dout, dlse, out, lse, low, *inputs, *settled, gate)
        dkv = (dk, dv) if needs_dkv else (q.new_empty(0), q.new_empty(0))
        return dq, *dkv, q.new_empty(0), _gradient_of_gate(gate, delta)
    design = choose_design(q, k, v, block_indices, block_size, backward=True, num_packed=packed)
    if design == 'block':
        chosen, settled = (q, k, v, block_indices, block_scale, lse), (place, block_size, causal, scale, softcap)
        members = MemberGradients(*chosen, dout, dlse, gate, *settled, needs_dscale, grad_dtype)
        index = InverseIndex(entries, starts) if starts.numel() else None
        lse, gates = keys.fold_gate(lse, gate)
        chosen = (q, k, v, block_indices, block_scale, lse)
        more = (members, index, gates, grad_dtype)
        dk, dv = keys.differentiate_keys(*chosen, members.delta, dout, *settled, *more)
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
    percent = MAX_UNION_PERCENT['backward']
    launches = _plan(design, *kernels, q, k, v, block_indices, place, block_size, causal, max_percent=percent)
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
            *(q, k, v, *describe_key_tiles(k, v, meta), block_indices, block_scale, out, lse, dout, dlse, gate),
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
        lse, gates = keys.fold_gate(lse, gate)
        sums = (lse, delta, dout)
        dk, dv = keys.differentiate_keys(*inputs, *sums, *settled, gates=gates, grad_dtype=grad_dtype)
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


def choose_design(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    *,
    backward: bool = False,
    num_packed: int = 0,
) -> str:
    """What a program has, one of DESIGNS, by shape alone: what choices overlap by lies on the device. num_packed: the
    sequences that `cu_seqlens` names.

    'query': a query with the heads of its group, which fill a tile where the group is large. 'neighbours': queries that
    go through their blocks together, where there are so few blocks that the choices of many must meet, whatever they
    are, or, forward in half types, a large group leaves room for but two of them in a tile. 'block': a block and those
    who chose it, whatever there are of both. 'mixed': large groups, whose neighbours go together where they share
    enough, which the device says of every tile.
    """
    index_heads, num_selected = block_indices.shape[2:]
    group = q.shape[2] // index_heads
    if num_selected == 0 or k.shape[1] == 0:
        return 'query'
    if group > SMALL_GROUP:
        return _choose_for_large_group(q, k, v, block_indices, block_size, backward, num_packed)
    num_blocks = -(-k.shape[1] // block_size)
    if num_selected <= MAX_SHARED_CHOICE and num_blocks <= MEETING * num_selected:
        return 'neighbours'
    if q.shape[1] < MIN_SEQLEN_BY_BLOCK:
        return 'query'
    # Float32 sums of the gradients of one kv head must fit into the workspace.
    if backward and 4 * k.shape[1] * (k.shape[3] + v.shape[3]) > keys.WORKSPACE:
        return 'query'
    table = settings.BLOCK_DQ if backward else settings.BLOCK
    largest = settings_of(table, q, v).block_n
    return 'block' if row_block(min(block_size, k.shape[1])) <= largest else 'query'


def _choose_for_large_group(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, backward: bool, num_packed: int
) -> str:
    group, num_selected = q.shape[2] // block_indices.shape[2], block_indices.shape[3]
    tile = settings_of(settings.NEIGHBOURS_DQ if backward else settings.NEIGHBOURS_FORWARD, q, v).block_m
    # Queries that all chose the same still read one block together for each that one of them would read.
    block_t = tile // group_block(group)
    shares = MAX_UNION_PERCENT['backward' if backward else 'forward'] * block_t >= 100
    shares = shares and num_selected <= MAX_SHARED_CHOICE
    # Block numbers and places in a union stand in one integer.
    shares = shares and (k.shape[1] // block_size + 2) * union_size(num_selected, block_t) <= 2**30
    if not shares or q.shape[1] < MIN_SEQLEN_MIXED:
        return 'query'
    if backward or q.element_size() != 2:
        return 'mixed'
    head = head_block(max(q.shape[3], v.shape[3]))
    is_few = -(-k.shape[1] // block_size) <= MEETING_LARGE * num_selected * max(1, num_packed)
    is_better = (block_t == 2 and head <= LARGE_HEAD) or (is_few and head == LARGE_HEAD)
    return 'neighbours' if is_better else 'mixed'


def _count_packed(cu_seqlens: Tensor | None) -> int:
    return 0 if cu_seqlens is None else len(cu_seqlens) - 1


def group_block(group: int) -> int:
    """Rows that a tile of neighbours has for each of its queries."""
    return 1 << (group - 1).bit_length()


def _plan(
    design: str,
    per_tile: tuple[Any, Table],
    per_query: tuple[Any, settings.GroupTables],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    *,
    max_percent: int,
    halves: HalfValues | None = None,
) -> Iterator[tuple[Any, tuple[int, int], Sharing, dict[str, Any]]]:
    """Kernels with their grids, what they share or leave to each other, and constants, one after the other, so that
    what a launch needs is there for no longer. per_tile, per_query: kernel and table, or tables. halves: converted
    values, where what is large is known of every block.
    """
    sharing, rest = NOTHING_SHARED, (q, k, v, block_indices, block_size, causal)
    if design != 'query':
        meta = find_constants(settings_of(per_tile[1], q, v), *rest)
        meta['BLOCK_G'] = group_block(meta['GROUP'])
        meta['BLOCK_M'] = min(meta['BLOCK_M'], MAX_MEMBERS * meta['BLOCK_G'])
        block_t = meta['BLOCK_M'] // meta['BLOCK_G']
        meta['UNION'] = union_size(block_indices.shape[3], block_t)
        large = None if halves is not None else find_large(k, v)
        unions = (block_indices, place, meta['BLOCK_SIZE'], causal, block_t)
        percent = max_percent if design == 'mixed' else None
        for tiles in union_tiles(block_indices, place, block_t):
            flags, sharing = sharing.flags, NOTHING_SHARED  # the unions before these need not be there any more
            sharing = find_sharing(*unions, percent, large, tiles, halves, flags)
            yield per_tile[0], sharing.counts.shape[:2], sharing, meta
    if design != 'neighbours':
        grid, meta = _launch_per_query(per_query[1], *rest)
        yield per_query[0], grid, sharing, meta


def _launch_per_query(
    tables: settings.GroupTables,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    causal: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and constants of the kernels that have a program per query and tile of the heads that share its choice."""
    tile = settings.settings_of_group(tables, q.shape[2] // block_indices.shape[2], q, v)
    meta = find_constants(tile, q, k, v, block_indices, block_size, causal)
    meta['BLOCK_M'] = min(meta['BLOCK_M'], row_block(meta['GROUP']))
    batch, seqlen = q.shape[:2]
    return (batch * seqlen, block_indices.shape[2] * -(-meta['GROUP'] // meta['BLOCK_M'])), meta


def _strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()
