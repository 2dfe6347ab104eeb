"""`chosen_scores` and `straight_through_scale` as one registered PyTorch op, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.geometry import max_length_of_compressed, overlapping_blocks
from native_sparse_attention.ops._triton import varlen
from native_sparse_attention.ops._triton.inverse_index import group_pairs, make_inverse_index, num_block_slots
from native_sparse_attention.ops._triton.launch import (
    Settings,
    exceeds_int32,
    head_block,
    launch,
    row_block,
    settings_of,
)
from native_sparse_attention.ops._triton.registered import (
    SEQUENCES,
    register_gradients,
    register_op,
    save_inputs,
    saved_inputs,
)
from native_sparse_attention.ops.block_selection.triton import scores_settings
from native_sparse_attention.ops.block_selection.triton.scores_backward import (
    IndexRange,
    combine_kernel,
    partial_kernel,
)
from native_sparse_attention.ops.block_selection.triton.scores_forward import dq_kernel, forward_kernel
from native_sparse_attention.ops.block_selection.triton.scores_tiles import Meta, Sizes
from native_sparse_attention.ops.block_selection.triton.settings import settings_of_group

# Queries times heads per program in the gradient of compressed keys, by bytes of an element. float32 sums are shorter
# and so more exact.
CHUNK_ROWS = {2: 4096, 4: 512}
# Bytes of the partial sums.
WORKSPACE = 2**28


def chosen_scores(
    q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, sizes: tuple[int, int, int], call: Call
) -> Tensor:
    flat = varlen.flatten(call.sequences)
    return _forward(q, k_cmp, lse, block_indices, *flat, *sizes, *call[1:], 0, 0, 0, straight_through=False)


def straight_through_scale(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    sizes: tuple[int, int, int],
    call: Call,
    forced: tuple[int, int, int],
) -> Tensor:
    flat = varlen.flatten(call.sequences)
    return _forward(q, k_cmp, lse, block_indices, *flat, *sizes, *call[1:], *forced, straight_through=True)


# Arguments of the op without its last one, and of its backward op after the gradient.
_INPUTS = (
    f'Tensor q, Tensor k_cmp, Tensor lse, Tensor block_indices, {SEQUENCES}, SymInt block_size, SymInt stride, '
    'SymInt selection_block_size, bool causal, float scale, float? softcap, SymInt num_init, SymInt num_local, '
    'SymInt num_recent'
)


@register_op('chosen_scores', f'{_INPUTS}, bool straight_through')
def _forward(q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, *rest: Any) -> Tensor:
    """straight_through: return 1 in place of the scores, with the gradients of blocks that are not forced."""
    flat, (block_size, stride, selection_block_size) = rest[:6], rest[6:9]
    causal, scale, softcap, *_, straight_through = rest[9:]
    if straight_through:
        return torch.ones(block_indices.shape, dtype=torch.float32, device=q.device)
    q, k_cmp, block_indices = varlen.last_dim_contiguous(q, k_cmp, block_indices)
    layout, sizes = _layout(q, k_cmp, flat, block_size, stride)
    out = q.new_empty(block_indices.shape, dtype=torch.float32)
    if out.numel() == 0 or k_cmp.shape[1] == 0:
        return out.zero_()
    meta = _meta(q, k_cmp, block_indices, block_size, stride, selection_block_size, causal)
    tile = _query_tile(settings_of(scores_settings.FORWARD, q), meta)
    tile |= _split_columns(tile.pop('BLOCK_N'), meta)
    launch(
        forward_kernel,
        (varlen.num_tiles(layout, q.shape[1], 1), block_indices.shape[2]),
        *(q, k_cmp, lse, block_indices, out),
        *(q.stride(), k_cmp.stride(), lse.stride(), block_indices.stride(), out.stride()),
        *(layout, sizes, scale, softcap),
        meta=meta,
        **tile,
        INT64_OFFSETS=exceeds_int32(k_cmp),
        device=q.device,
    )
    return out


@register_op('chosen_scores_backward', f'Tensor dout, {_INPUTS}, bool needs_dq, bool needs_dk', 3)
def _backward(
    dout: Tensor, q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k_cmp and lse; those of q and lse are empty unless needs_dq, that of k_cmp unless
    needs_dk. Scores of blocks forced by num_init and num_local have no gradient.
    """
    flat, (block_size, stride, selection_block_size) = rest[:6], rest[6:9]
    causal, scale, softcap, num_init, num_local, num_recent, needs_dq, needs_dk = rest[9:]
    q, k_cmp, block_indices = varlen.last_dim_contiguous(q, k_cmp, block_indices)
    layout, sizes = _layout(q, k_cmp, flat, block_size, stride)
    sizes = sizes._replace(num_init=num_init, num_local=num_local, num_recent=num_recent)
    dq, dk, dlse = (
        t.new_empty(t.shape if needed else 0) for t, needed in ((q, needs_dq), (k_cmp, needs_dk), (lse, needs_dq))
    )
    if dout.numel() == 0 or k_cmp.shape[1] == 0 or layout.seqlen_k == 0:
        return dq.zero_(), dk.zero_(), dlse.zero_()
    meta = _meta(q, k_cmp, block_indices, block_size, stride, selection_block_size, causal)
    if needs_dq:
        tile = _query_tile(settings_of_group(scores_settings.DQ_SMALL, scores_settings.DQ, meta.group, q), meta)
        tiles_of_group = -(-meta.group // tile['BLOCK_G'])
        tensors = (q, k_cmp, lse, block_indices, dout, dq, dlse)
        launch(
            dq_kernel,
            (varlen.num_tiles(layout, q.shape[1], 1), block_indices.shape[2] * tiles_of_group),
            *tensors,
            *(t.stride() for t in tensors),
            *(layout, sizes, scale, softcap),
            meta=meta,
            **tile,
            INT64_OFFSETS=exceeds_int32(k_cmp),
            device=q.device,
        )
    if needs_dk:
        _add_queries(dout, q, k_cmp, lse, block_indices, dk.zero_(), layout, sizes, scale, softcap, meta)
    return dq, dk, dlse


def _add_queries(
    dout: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    dk: Tensor,
    layout: varlen.SequenceLayout,
    sizes: Sizes,
    scale: float,
    softcap: float | None,
    meta: Meta,
) -> None:
    """Add the gradient of compressed keys into dk, which is 0 before.

    Runs for some pairs at a time, and for some selection blocks at a time where the partial sums of one pair exceed the
    workspace. Neither changes the order of the sums.
    """
    of_group = settings_of_group(scores_settings.DK_SMALL, scores_settings.DK, meta.group, q)
    block_m, block_c, num_warps, num_stages = of_group
    selection_block, per_selection = meta.selection_block, meta.per_selection
    num_offsets = per_selection - meta.first_offset
    head_dim, kv_heads = k_cmp.shape[2:][::-1]
    num_slots = num_block_slots(layout, selection_block)
    num_entries = q.shape[1] * meta.repeats * meta.num_selected
    chunk_bytes = num_offsets * head_dim * 4
    chunk = max(1, CHUNK_ROWS[q.element_size()] // meta.group)
    while num_entries // chunk * chunk_bytes > WORKSPACE:
        chunk *= 2
    reach = (num_offsets - 1) // per_selection
    in_range = min(num_slots, max(1, WORKSPACE // chunk_bytes))
    num_chunks = num_entries // chunk + in_range + reach + 1
    most = max(1, 2 * WORKSPACE // (num_chunks * chunk_bytes))
    constants: dict[str, Any] = {'meta': meta, 'CHUNK': chunk, 'BLOCK_D': head_block(head_dim)}
    constants |= {'num_warps': num_warps, 'device': q.device}
    for pairs in group_pairs(block_indices, kv_heads, num_slots, most):
        entries, starts = make_inverse_index(
            block_indices,
            layout,
            pairs,
            kv_heads=kv_heads,
            block_size=selection_block,
            causal=meta.causal,
            unique=False,
        )
        partial = q.new_empty(len(pairs), num_chunks, num_offsets, head_dim, dtype=torch.float32)
        for first_slot in range(0, num_slots, in_range):
            stop = min(first_slot + in_range, num_slots)
            last_slot = min(stop + reach, num_slots)
            index_range = IndexRange(
                pairs.start, kv_heads, num_entries, num_slots, first_slot, last_slot, num_chunks, stop - first_slot
            )
            tensors = (q, k_cmp, lse, dout)
            launch(
                partial_kernel,
                (len(pairs) * num_chunks, -(-num_offsets // block_c)),
                *(*tensors, entries, starts, partial),
                *(*(t.stride() for t in tensors), partial.stride()),
                *(layout, sizes, index_range, scale, softcap),
                **constants,
                BLOCK_M=block_m,
                BLOCK_O=block_c,
                num_stages=num_stages,
            )
            launch(
                combine_kernel,
                (len(pairs) * (stop - first_slot), -(-per_selection // block_c)),
                *(starts, partial, dk, partial.stride(), dk.stride()),
                *(layout, sizes, index_range, scale),
                **constants,
                BLOCK_C=block_c,
            )
        del entries, starts, partial  # before the next group allocates its own


@_forward.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, *_: Any) -> Tensor:
    return q.new_empty(block_indices.shape, dtype=torch.float32)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k_cmp: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs_dq, needs_dk = rest[-2:]
    dq, dk, dlse = (
        t.new_empty(t.shape if needed else 0) for t, needed in ((q, needs_dq), (k_cmp, needs_dk), (lse, needs_dq))
    )
    return dq, dk, dlse


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    save_inputs(ctx, inputs)


def _differentiate(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * len(ctx.others)
    _, inputs = saved_inputs(ctx)
    needs_dq, needs_dk, needs_dlse = ctx.needs_input_grad[:3]
    dq, dk, dlse = _backward(dout, *inputs[:-1], needs_dq or needs_dlse, needs_dk)
    grads = (dq if needs_dq else None, dk if needs_dk else None, dlse if needs_dlse else None)
    return *grads, *(None,) * (len(inputs) - 3)


register_gradients(_forward, _backward, _differentiate, _save)


def _layout(q: Tensor, k_cmp: Tensor, flat: Any, block_size: int, stride: int) -> tuple[varlen.SequenceLayout, Sizes]:
    """Return the layout and sizes of a call. Tokens behind the last complete compressed block do not matter, so the
    number of tokens is bounded by the compressed blocks.
    """
    layout = varlen.make_layout(varlen.unflatten(q, flat), block_size, stride)
    num_compressed = k_cmp.shape[1]
    longest = max_length_of_compressed(num_compressed, block_size, stride)
    if layout.cu_seqlens_k is not None:
        longest += (layout.num_sequences - 1) * (block_size - 1)
    return layout._replace(seqlen_k=min(layout.seqlen_k, longest)), Sizes(block_size, stride, num_compressed)


def _meta(
    q: Tensor, k_cmp: Tensor, block_indices: Tensor, block_size: int, stride: int, selection_block: int, causal: bool
) -> Meta:
    index_heads, num_selected = block_indices.shape[2:]
    offsets = overlapping_blocks(block_size, stride, selection_block)
    heads = (q.shape[2] // index_heads, index_heads // k_cmp.shape[2])
    return Meta(causal, *heads, num_selected, selection_block, offsets.stop, offsets.start, q.shape[3])


def _query_tile(settings: Settings, meta: Meta) -> dict[str, int]:
    """Return the tile of a query's kernel: heads of a group by (selected block, overlapping compressed block)."""
    block_m, block_n, num_warps, num_stages = settings
    return {
        'BLOCK_G': min(block_m, row_block(meta.group)),
        'BLOCK_N': block_n,
        'BLOCK_D': head_block(meta.head_dim),
        'num_warps': num_warps,
        'num_stages': num_stages,
    }


def _split_columns(block_n: int, meta: Meta) -> dict[str, int]:
    """Return the columns as slots times offsets; the columns of a slot are summed."""
    num_offsets = meta.per_selection - meta.first_offset
    block_o = min(block_n, 1 << (num_offsets - 1).bit_length())
    return {'BLOCK_S': block_n // block_o, 'BLOCK_O': block_o}
