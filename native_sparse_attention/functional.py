"""`nsa`: compressed attention, block selection, selected attention, window attention and gated sum, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import composition
from native_sparse_attention.autograd.recompute import SavedSelection
from native_sparse_attention.autograd.replay import replayed
from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.checks import shown
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops.block_selection import api as block_selection
from native_sparse_attention.ops.compressed_attention import api as compressed_attention
from native_sparse_attention.ops.gated_sum import api as gated_sum
from native_sparse_attention.ops.selected_attention import api as selected_attention
from native_sparse_attention.ops.window_attention import api as window_attention


@replayed
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
    num_recent: int = 0,
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
        k_cmp: `[B, C, H, D]` compressed keys without rotary embedding, or None where nothing reads them.
        v_cmp: `[B, C, H, DV]` compressed values. None as k_cmp, or together with gates in merged mode.
        gates: `[B, T, HQ, 3]` after the sigmoid, in the order compressed, selected, window. Or a triple of
            `[B, T, HQ]` and None, where None leaves a branch out. With merge_window: `[B, T, HQ, 1]`, the gate of the
            compressed branch; `[B, T, HQ, 2]`, with a second one, which multiplies the sum of both outputs; or None
            together with v_cmp, for block scores alone.
        merge_window: read selected blocks and window in one softmax, each key once, without a gate of its own. Excludes
            q_window, k_window and v_window.
        q_cmp: `[B, T, HQ, D]` queries without rotary embedding, of the compressed branch; default q.
        q_window: `[B, T, HQ, D]` queries of the window branch; default q.
        k_window: `[B, S, H, D]` keys of the window branch; default k. Given together with v_window.
        v_window: `[B, S, H, DV]` values of the window branch; default v.
        mem_kv: as in `compressed_attention`; the values are None where v_cmp is.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks, at most l.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        num_selected: n, blocks that a query reads, forced ones included; 0 switches the selected branch off. Required
            unless block_indices is given.
        window_size: (left, right), keys before and after the query's own; right is 0 where causal; -1 is unbounded.
        num_init: forced blocks at the start.
        num_local: forced blocks that end with the query's own.
        num_recent: as in `select_blocks`; with the size of the window, blocks are selected before the window.
        share_group: the heads of a group read the same blocks.
        use_diff_topk: scale the logits of selected blocks by `straight_through_scale`, which trains the block scores.
        block_indices: int32 `[B, T, H, n]` (`[B, T, HQ, n]` where heads select alone), an existing selection as
            `selected_attention` takes it. No blocks are selected then.
        block_counts: how many of the n blocks a query reads, an int or int32 `[B, T, H]` (`[B, T, HQ]`).
        q_offset: position of the first query, an int or `[B]`; default: queries end where the keys end.
        seqlens_k: int32 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences; B is 1.
        cu_seqlens_k: int32 `[N + 1]`, boundaries of the keys where they differ from those of the queries.
        segment_ids: as in `compressed_attention`.
        softcap: logits of all branches become softcap * tanh(logit / softcap).
        sinks: `[HQ]` or `[HQ, M]` logits of keys without values, in the window branch (or the merged softmax).
        sinks_cmp: the same for the compressed branch.
        dropout_p: probability with which the window branch (or the merged softmax) drops a weight.
        dropout_seed: an int or int64 `[1]`, as in `window_attention`.
        choose: function that selects the blocks. It is called as choose(q, k_cmp, lse, **settings) with the arguments
            of `select_blocks` but segment_ids. It may lack the backend, and arguments at their default; sizes, scale
            and seqlen_k are always given.
        backend: 'auto', 'triton', 'flex' (the three attentions; selection and sum run in eager) or 'eager'.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    if not callable(choose):
        raise ValueError(f'choose is {shown(choose)}, but must be a function')
    sizes = (compress_block_size, compress_stride, selection_block_size)
    inputs, ops = composition.prepare(
        *(q, k, v, k_cmp, v_cmp, gates),
        q_cmp=q_cmp,
        of_window={'q_window': q_window, 'k_window': k_window, 'v_window': v_window},
        mem_kv=mem_kv,
        sizes=sizes,
        selection=(num_selected, num_init, num_local, num_recent, share_group, block_counts),
        block_indices=block_indices,
        placed=(segment_ids, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale, softcap),
        window_size=window_size,
        sinks=sinks,
        sinks_cmp=sinks_cmp,
        dropout=(dropout_p, dropout_seed),
        merge_window=merge_window,
        use_diff_topk=use_diff_topk,
        backend=backend,
    )
    compressed, selected, window, mem_kv, stacked, branches, call, rules, window_size, modifiers, sinks_cmp = inputs
    is_known = choose is select_blocks or isinstance(choose, SavedSelection)
    # A custom selection may differentiate the log-sum-exp, too.
    gate_in_attention = is_known and not (use_diff_topk or merge_window) and composition.attentions_take_gates(q, ops)
    taken = [stacked[..., i] if gate_in_attention and branches[i] else None for i in range(3)]
    select = block_selection.select if choose is select_blocks else choose
    if branches.selected and block_indices is None and not is_known:
        select = block_selection.selector(choose, sizes, call, rules, backend)

    out_compressed = out_selected = out_window = lse = None
    if op := ops.get('compressed_attention'):
        out_compressed, lse = compressed_attention.attend(
            *compressed, mem_kv, sizes[:2], call, sinks_cmp, gate=taken[0], backend=op
        )
    if op := ops.get('window_attention'):
        out_window, _ = window_attention.attend(*window, window_size, call, modifiers, gate=taken[2], backend=op)
    if branches.selected:
        scored: tuple[Any, Any, Any] = (*compressed[:2], lse)
        if block_indices is None:
            block_indices = select(*scored, sizes, call, rules, ops['select_blocks'])
        elif block_counts is not None:
            block_indices, _ = selected_attention.keep_first(block_counts, block_indices, None)
        block_scale = None
        if op := ops.get('straight_through_scale'):
            block_scale = block_selection.score(*scored, block_indices, sizes, call, rules[1:4], backend=op)
        of_selected = (*selected, block_indices, block_scale, selection_block_size, call)
        op = ops['selected_attention']
        if merge_window:
            out_selected, _ = selected_attention.attend_merged(*of_selected, window_size, modifiers, backend=op)
        else:
            out_selected, _ = selected_attention.attend(*of_selected, gate=taken[1], backend=op, unit_scale=True)
    out_compressed = out_compressed if branches.compressed else None
    if merge_window:
        return _add_compressed(out_compressed, out_selected if branches.selected else out_window, stacked, ops)
    zeros = q.new_zeros(v.shape[-1]).expand(*q.shape[:3], -1)
    outs = (zeros if out is None else out for out in (out_compressed, out_selected, out_window))
    return gated_sum.add(stacked, *outs, gate_in_attention=gate_in_attention, backend=ops['gated_sum'])


def _add_compressed(compressed: Tensor | None, merged: Any, gates: Any, ops: Mapping[str, str]) -> Tensor:
    """Return merged `[B, T, HQ, DV]` plus the compressed output times its gate, or merged alone without that output.

    gates: `[B, T, HQ, 1]`, or `[B, T, HQ, 2]`, where the second gate multiplies the sum.
    """
    if compressed is None:
        return merged
    if gates.shape[-1] == 1:
        of_compressed, of_merged = gates, torch.ones_like(gates)
    else:
        # Without torch.promote_types, which a replayed call cannot contain.
        gates = gates.float() if gates.dtype.itemsize < 4 else gates
        of_compressed, of_merged = gates.split(1, -1)
        of_compressed = of_compressed * of_merged
    factors = concatenate((of_compressed, of_merged, torch.zeros_like(of_merged)), -1)
    nothing = merged.new_zeros(merged.shape[-1]).expand(merged.shape)
    return gated_sum.add(factors, compressed, merged, nothing, gate_in_attention=False, backend=ops['gated_sum'])
