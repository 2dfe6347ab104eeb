"""`nsa`: compressed attention, block selection, selected attention, window attention and gated sum, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention.autograd.recompute import SavedSelection
from native_sparse_attention.core.backend import check_backend, slowest
from native_sparse_attention.core.checks import (
    check_all_block_sizes,
    check_block_counts,
    check_block_indices,
    check_flags,
    check_gate,
    check_not_negative,
    check_qkv,
    check_same_kind,
    check_tensors,
    check_window,
    checked_softcap,
    make_sequences,
    shown,
)
from native_sparse_attention.core.geometry import packed_block_starts
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.core.random import check_dropout
from native_sparse_attention.core.segments import make_borders
from native_sparse_attention.ops import (
    BackendChoice,
    compressed_attention,
    gated_sum,
    select_blocks,
    selected_attention,
    straight_through_scale,
    window_attention,
)
from native_sparse_attention.ops.block_selection.api import backend_of as choice_backend
from native_sparse_attention.ops.compressed_attention.api import backend_of as compressed_backend
from native_sparse_attention.ops.gated_sum.api import backend_of as sum_backend
from native_sparse_attention.ops.gated_sum.api import stack_gates
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.selected_attention.api import backend_of as selected_backend
from native_sparse_attention.ops.selected_attention.api import merged_backend_of as merged_backend
from native_sparse_attention.ops.window_attention.api import backend_of as window_backend


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    gates: Tensor | Sequence[Tensor | None] | None,
    *,
    merge_window: bool = False,
    q_cmp: Tensor | None = None,
    q_window: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    mem_kv: tuple[Tensor, Tensor | None] | None = None,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_selected: int | None = None,
    window_size: tuple[int, int],
    num_init: int = 1,
    num_local: int = 2,
    share_group: bool = True,
    use_diff_topk: bool = False,
    block_indices: Tensor | None = None,
    block_counts: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    choose: Callable[..., Tensor] = select_blocks,
    backend: str = 'auto',
) -> Tensor:
    """Compute Native Sparse Attention: the gated sum of three attentions (equation 5 of arXiv 2502.11089).

    The compressed branch reads k_cmp and v_cmp. Its weights score the selection blocks; the selected branch reads the
    best num_selected blocks of each query exactly. The window branch reads the keys around each query.

    Args:
        q: `[B, T, HQ, D]` queries with rotary embedding, for the selected and the window branch.
        k: `[B, S, H, D]` keys with rotary embedding.
        v: `[B, S, H, DV]` values.
        k_cmp: `[B, C, H, D]` compressed keys, made from keys without rotary embedding. None where neither the
            compressed branch nor block scores are computed.
        v_cmp: `[B, C, H, DV]` compressed values. None as k_cmp, or together with gates in merged mode.
        gates: `[B, T, HQ, 3]` after the sigmoid, in the order compressed, selected, window. Or a triple of
            `[B, T, HQ]` and None, where None leaves a branch out. With merge_window: `[B, T, HQ, 1]`, the gate of the
            compressed branch, or None together with v_cmp, for block scores alone.
        merge_window: read selected blocks and window in one softmax, each key once, without a gate. Excludes
            q_window, k_window and v_window.
        q_cmp: `[B, T, HQ, D]` queries without rotary embedding, for the compressed branch and the block scores;
            default q.
        q_window: `[B, T, HQ, D]` queries of the window branch; default q.
        k_window: `[B, S, H, D]` keys of the window branch; default k. Given together with v_window.
        v_window: `[B, S, H, DV]` values of the window branch; default v.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` of keys and values that every query sees in the compressed branch. The
            values are None where v_cmp is.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks, at most l.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        num_selected: n, blocks that a query reads, forced ones included; 0 switches the selected branch off. Required
            unless block_indices is given.
        window_size: (left, right), keys before and after the query's own; right is 0 where causal; -1 is unbounded.
        num_init: forced blocks at the start.
        num_local: forced blocks that end with the query's own.
        share_group: the heads of a group read the same blocks.
        use_diff_topk: multiply the logits of selected, not forced blocks by a factor of 1 whose gradient trains the
            block scores.
        block_indices: int32 `[B, T, H, n]` (`[B, T, HQ, n]` where heads select alone), an existing selection as
            `selected_attention` takes it. No blocks are selected then.
        block_counts: how many of the n blocks a query reads, an int or int32 `[B, T, H]` (`[B, T, HQ]`).
        q_offset: position of the first query, an int or `[B]`; default: queries end where the keys end.
        seqlens_k: int32 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences; B is 1.
        cu_seqlens_k: int32 `[N + 1]`, boundaries of the keys where they differ from those of the queries.
        segment_ids: int32 or int64 `[1, T]`; runs of equal ids are sequences, and negative ids are padding, which gives
            0. Replaces cu_seqlens, seqlens_k and q_offset. Read on the host once.
        softcap: logits of all branches become softcap * tanh(logit / softcap).
        sinks: `[HQ]` or `[HQ, M]` logits of keys without values, in the window branch (with merge_window in the merged
            softmax).
        sinks_cmp: the same for the compressed branch.
        dropout_p: probability with which the window branch (or the merged softmax) drops a weight.
        dropout_seed: an int or int64 `[1]`, as in `window_attention`.
        choose: function that selects the blocks, called like `select_blocks`.
        backend: 'auto', 'triton', 'flex' (the three attentions; selection and sum run in eager) or 'eager'.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    check_backend(backend)
    eager_in_flex = 'eager' if backend == 'flex' else backend
    check_flags(share_group=share_group, use_diff_topk=use_diff_topk)
    if not callable(choose):
        raise ValueError(f'choose is {shown(choose)}, but must be a function')
    check_qkv(q, k, v)
    check_flags(merge_window=merge_window)
    if merge_window:
        gates = check_merged(gates, q, mem_kv, sinks_cmp, q_window=q_window, k_window=k_window, v_window=v_window)
        if (v_cmp is None) != (gates is None):
            given, missing = ('v_cmp', 'gates') if gates is None else ('gates', 'v_cmp')
            raise ValueError(f'{missing} is None, but {given} is given: they must be None together')
        (has_compressed, has_selected), has_window = (gates is not None, True), False
    else:
        if gates is None:
            raise ValueError('gates is None, but must be given unless merge_window is set')
        gates, (has_compressed, has_selected, has_window) = stack_gates(gates, q)
    check_all_block_sizes(compress_block_size, compress_stride, selection_block_size)
    num_selected = _check_choice(q, k, has_selected, num_selected, block_indices)
    check_not_negative(num_init=num_init, num_local=num_local)
    if (k_window is None) != (v_window is None):
        raise ValueError('k_window and v_window must be given together or not at all')
    if merge_window and q_cmp is None:
        q, q_cmp = shared_input(q, 2, backend=eager_in_flex)
    elif q_cmp is None and q_window is None:
        q, q_cmp, q_window = shared_input(q, 3, backend=eager_in_flex)
    q_cmp = q if q_cmp is None else q_cmp
    q_window = q if q_window is None else q_window
    k_window, v_window = (k, v) if k_window is None or v_window is None else (k_window, v_window)
    window_size = check_window(window_size, causal)
    given = (('q_cmp', q_cmp, q), ('q_window', q_window, q), ('k_window', k_window, k), ('v_window', v_window, v))
    for name, tensor, like in given:
        check_tensors(**{name: tensor})
        if tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
        check_same_kind(q=q, **{name: tensor})
    has_selected = has_selected and num_selected > 0
    needs_scores = has_selected and (block_indices is None or use_diff_topk)
    if has_compressed or needs_scores:
        _check_compressed(q_cmp, k_cmp, v_cmp, v, scores_alone=merge_window and not has_compressed)
    if has_selected and block_counts is not None:
        kv_heads = k.shape[2] if share_group else q.shape[2]
        check_block_counts(block_counts, kv_heads if block_indices is None else block_indices.shape[2], q)
    softcap = checked_softcap(softcap)
    check_dropout(dropout_p, dropout_seed, q)
    sinks, sinks_cmp = reduce_sinks(sinks, q), reduce_sinks(sinks_cmp, q, 'sinks_cmp')
    places = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens, padding = make_borders(segment_ids, q, k, None, *places)
    if cu_seqlens is not None and padding is not None:
        # Padding then reaches neither outputs nor shared gradients, such as those of sinks.
        tokens = (q, k, v, q_cmp, q_window, k_window, v_window)
        q, k, v, q_cmp, q_window, k_window, v_window = (_zero_padding(t, padding) for t in tokens)
        gates = None if gates is None else _zero_padding(gates, padding)
        starts = packed_block_starts(cu_seqlens, q.shape[1], compress_block_size, compress_stride)
        k_cmp, v_cmp = (t if t is None else _zero_padding(t, padding[:, starts]) for t in (k_cmp, v_cmp))
    make_sequences(q, k.shape[1], q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    seqlen_k = k.shape[1] if cu_seqlens is None else None
    where: dict[str, Any] = {
        'q_offset': q_offset,
        'seqlens_k': seqlens_k,
        'causal': causal,
        'scale': scale,
        'cu_seqlens': cu_seqlens,
        'cu_seqlens_k': cu_seqlens_k,
        'softcap': softcap,
    }
    of_window: dict[str, Any] = {
        'window_size': window_size,
        'sinks': sinks,
        'dropout_p': dropout_p,
        'dropout_seed': dropout_seed,
    }

    # A custom selection may differentiate the log-sum-exp, too.
    needs_lse = use_diff_topk or not (choose is select_blocks or isinstance(choose, SavedSelection))
    branch_gates = [None, None, None]
    if not merge_window:
        assert gates is not None
        branch_gates = [
            gates[..., place] if is_read else None
            for place, is_read in enumerate((has_compressed, has_selected, has_window))
        ]
    gate_in_attention = not merge_window and _attentions_take_gates(
        q, k, v, branch_gates, num_selected, needs_lse, backend
    )
    gate_compressed, gate_selected, gate_window = branch_gates if gate_in_attention else (None, None, None)
    out_compressed = out_selected = out_window = lse = None
    if has_compressed or needs_scores:
        assert k_cmp is not None
        if v_cmp is None:
            v_cmp, mem_kv = _stand_ins(k_cmp, mem_kv)
        out_compressed, lse = compressed_attention(
            q_cmp,
            k_cmp,
            v_cmp,
            block_size=compress_block_size,
            stride=compress_stride,
            mem_kv=mem_kv,  # type: ignore[arg-type]
            seqlen_k=seqlen_k,
            sinks=sinks_cmp,
            gate=gate_compressed,
            backend=backend,
            **where,
        )
    if has_window:
        out_window, _ = window_attention(
            q_window, k_window, v_window, **of_window, gate=gate_window, backend=backend, **where
        )
    if has_selected:
        choice: dict[str, Any] = {
            'compress_block_size': compress_block_size,
            'compress_stride': compress_stride,
            'selection_block_size': selection_block_size,
            'seqlen_k': seqlen_k,
            'backend': eager_in_flex,
            **where,
        }
        if block_indices is None:
            block_indices = choose(
                q_cmp,
                k_cmp,
                lse,
                num_selected=num_selected,
                num_init=num_init,
                num_local=num_local,
                share_group=share_group,
                block_counts=block_counts,
                **choice,
            )
            block_counts = None
        block_scale = None
        if use_diff_topk:
            assert k_cmp is not None
            assert lse is not None
            block_scale = straight_through_scale(
                q_cmp, k_cmp, lse, block_indices, num_init=num_init, num_local=num_local, **choice
            )
        out_selected, _ = selected_attention(
            q,
            k,
            v,
            block_indices,
            block_size=selection_block_size,
            block_scale=block_scale,
            block_counts=block_counts,
            gate=gate_selected,
            backend=backend,
            **({**of_window, 'unit_scale': use_diff_topk} if merge_window else {}),
            **where,
        )
    elif merge_window:
        out_selected, _ = window_attention(q, k, v, **of_window, backend=backend, **where)
    outs = (out_compressed if has_compressed else None, out_selected, out_window)
    if merge_window:
        assert out_selected is not None
        return _add_compressed(outs[0], out_selected, gates, eager_in_flex)
    assert gates is not None
    compressed, selected, window = (_or_zeros(out, q, v) for out in outs)
    return gated_sum(gates, compressed, selected, window, gate_in_attention=gate_in_attention, backend=eager_in_flex)


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Tensor | Sequence[Tensor | None] | None = None,
    num_selected: int = 1,
    share_group: bool = True,
    use_diff_topk: bool = False,
    block_indices: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_cmp: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = True,
    merge_window: bool = False,
    compressed_output: bool = True,
    backend: str = 'auto',
) -> BackendChoice:
    """Return the backend that `nsa` would take, with the backend of each op in `ops`.

    Where the three attentions have different backends, the slowest one is returned.

    Args:
        gates: as in `nsa`; None stands for all branches.
        compressed_output: False where the compressed branch of merged attention computes block scores alone.
    """
    has_compressed, has_selected, has_window = (
        (True, True, True) if gates is None or isinstance(gates, Tensor) else (gate is not None for gate in gates)
    )
    has_compressed = has_compressed and compressed_output
    num_selected = num_selected if block_indices is None else block_indices.shape[3]
    has_selected = has_selected and num_selected > 0
    eager_in_flex = 'eager' if backend == 'flex' else backend
    attentions: dict[str, BackendChoice] = {}
    if has_compressed or (has_selected and (block_indices is None or use_diff_topk)):
        modifiers = Modifiers(softcap, sinks_cmp)
        attentions['compressed_attention'] = compressed_backend(q, k, v, modifiers=modifiers, backend=backend)
    if merge_window:
        has_window = num_selected == 0
    if has_window:
        modifiers = Modifiers(softcap, sinks, dropout_p=dropout_p)
        attentions['window_attention'] = window_backend(q, k, v, modifiers=modifiers, backend=backend)
    # Gates of several dtypes are stacked in the widest of them.
    all_gates = [gates] if isinstance(gates, Tensor) else [gate for gate in gates or () if gate is not None]
    widest = next((gate for gate in all_gates if gate.dtype == torch.float64), q)
    others = {}
    if has_compressed or not merge_window:
        others['gated_sum'] = sum_backend(widest, v, backend=eager_in_flex)
    if has_selected:
        block_scale = q[:, :, : k.shape[2], :1] if use_diff_topk else None
        settings: dict[str, Any] = {'block_scale': block_scale, 'num_selected': num_selected, 'backend': backend}
        if merge_window:
            choice_of_selected = merged_backend(
                q, k, v, causal=causal, unit_scale=True, dropout_p=dropout_p, **settings
            )
        else:
            choice_of_selected = selected_backend(q, k, v, **settings)
        attentions['selected_attention'] = choice_of_selected
        group_size = q.shape[2] // k.shape[2] if share_group else 1
        choice = {'num_selected': num_selected, 'backend': eager_in_flex}
        if block_indices is None:
            others['select_blocks'] = choice_backend('select_blocks', q, k, group_size=group_size, **choice)
        if use_diff_topk:
            others['straight_through_scale'] = choice_backend('straight_through_scale', q, k, **choice)
    return slowest(attentions or others, others)


def _attentions_take_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Sequence[Tensor | None],
    num_selected: int,
    needs_lse: bool,
    backend: str,
) -> bool:
    """Return whether the attentions apply the gradient of their gates themselves, so that the sum has no backward.

    The kernels can do this where log-sum-exps have no gradients. In float16, products of small gates and weights would
    lose bits.
    """
    if not torch.is_grad_enabled() or needs_lse or q.dtype == torch.float16 or backend not in ('auto', 'triton'):
        return False
    choices = backend_of(q, k, v, gates=gates, num_selected=num_selected, backend=backend).ops
    served = [op for op, choice in choices.items() if choice.name == 'triton']
    has_attention = any(op.endswith('_attention') for op in served)  # without one, no attention receives the gates
    return has_attention and all(op in served for op in choices if op != 'select_blocks')


def check_merged(
    gates: Tensor | Sequence[Tensor | None] | None,
    q: Tensor,
    mem_kv: tuple[Tensor, Tensor | None] | None,
    sinks_cmp: Tensor | None,
    **of_window: Tensor | None,
) -> Tensor | None:
    """Return the gate `[B, T, HQ, 1]` of the compressed branch of merged attention, or None for its scores alone.

    Raises ValueError for a gate of another shape, for queries, keys or values of a window branch, and, where gates is
    None, for memory values and compressed sinks.
    """
    for name, tensor in of_window.items():
        if tensor is not None:
            raise ValueError(f'{name} is given, but must be None where merge_window is set')
    if gates is not None:
        check_tensors(gates=gates)
        assert isinstance(gates, Tensor)
        check_gate('gates', gates, (*q.shape[:3], 1), '(B, T, HQ, 1)', q)
        return gates
    if mem_kv is not None:
        if not isinstance(mem_kv, tuple | list) or len(mem_kv) != 2:
            raise ValueError(
                f'mem_kv is a {type(mem_kv).__name__}, but must be a pair (keys, None) where gates is None'
            )
        check_tensors(**{'mem_kv[0]': mem_kv[0]})
    for name, tensor in (('mem_kv[1]', None if mem_kv is None else mem_kv[1]), ('sinks_cmp', sinks_cmp)):
        if tensor is not None:
            raise ValueError(f'{name} is given, but must be None where gates is: only block scores are computed')
    return None


def _stand_ins(
    k_cmp: Tensor, mem_kv: tuple[Tensor, Tensor | None] | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return narrow values for a call of compressed attention of which only the log-sum-exp is used."""
    columns = slice(min(16, k_cmp.shape[-1]))
    values = k_cmp.detach()[..., columns]
    return values, None if mem_kv is None else (mem_kv[0], mem_kv[0].detach()[..., columns])


def _add_compressed(compressed: Tensor | None, merged: Tensor, gate: Tensor | None, backend: str) -> Tensor:
    """Return merged `[B, T, HQ, DV]` plus gate `[B, T, HQ, 1]` times the compressed output."""
    if compressed is None or gate is None:
        return merged
    ones, zeros = torch.ones_like(gate), torch.zeros_like(gate)
    nothing = merged.new_zeros(merged.shape[-1]).expand(merged.shape)
    return gated_sum(torch.cat((gate, ones, zeros), -1), compressed, merged, nothing, backend=backend)


def _zero_padding(x: Tensor, padding: Tensor) -> Tensor:
    """Return x `[1, N, heads, ...]` with 0 where padding `[1, M]` is True; M may differ from N."""
    count = x.shape[1]
    padding = F.pad(padding[:, :count], (0, max(0, count - padding.shape[1])))
    return x.masked_fill(padding[..., None, None], 0)


def _or_zeros(out: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """Return the output of a branch, or zeros where the branch is left out."""
    return q.new_zeros(v.shape[-1]).expand(*q.shape[:3], -1) if out is None else out


def _check_choice(
    q: Tensor, k: Tensor, has_selected: bool, num_selected: int | None, block_indices: Tensor | None
) -> int:
    """Return n, from num_selected or from the shape of block_indices."""
    if block_indices is None:
        if num_selected is None and has_selected:
            raise ValueError('num_selected is None, but must be given where no block_indices are')
        num_selected = 0 if num_selected is None else num_selected
        check_not_negative(num_selected=num_selected)
        return num_selected
    check_block_indices(block_indices, q, k)
    count = block_indices.shape[3]
    if num_selected not in (None, count):
        raise ValueError(
            f'num_selected is {num_selected}, but must be {count} or None: block_indices has {count} blocks'
        )
    return count


def _check_compressed(
    q_cmp: Tensor, k_cmp: Tensor | None, v_cmp: Tensor | None, v: Tensor, *, scores_alone: bool
) -> None:
    if scores_alone and k_cmp is not None:
        check_qkv(q_cmp, k_cmp, k_cmp, 'k_cmp', 'k_cmp')
        return
    if k_cmp is None or v_cmp is None:
        name = 'k_cmp' if k_cmp is None else 'v_cmp'
        raise ValueError(f'{name} is None, but must be given for the compressed branch and for the scores of blocks')
    check_qkv(q_cmp, k_cmp, v_cmp, 'k_cmp', 'v_cmp')
    if v_cmp.shape[-1] != v.shape[-1]:
        raise ValueError(f'v_cmp has head size {v_cmp.shape[-1]}, but v has {v.shape[-1]}')
