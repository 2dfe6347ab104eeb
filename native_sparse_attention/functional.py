"""The composition: compress -> attend -> choose -> attend -> window -> gate. The one file that knows the order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from native_sparse_attention.ops import (
    BackendChoice,
    compressed_attention,
    gated_sum,
    select_blocks,
    selected_attention,
    straight_through_scale,
    window_attention,
)
from native_sparse_attention.ops._checks import (
    check_block_sizes,
    check_not_negative,
    check_qkv,
)
from native_sparse_attention.ops.backend import check_backend, slowest
from native_sparse_attention.ops.block_selection.api import backend_of as choice_backend
from native_sparse_attention.ops.compressed_attention.api import backend_of as compressed_backend
from native_sparse_attention.ops.gated_sum.api import backend_of as sum_backend
from native_sparse_attention.ops.gated_sum.api import check_gates
from native_sparse_attention.ops.selected_attention.api import backend_of as selected_backend
from native_sparse_attention.ops.window_attention.api import backend_of as window_backend
from native_sparse_attention.ops.window_attention.api import check_window


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    gates: Tensor,
    *,
    q_cmp: Tensor | None = None,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_selected: int,
    window_size: tuple[int, int],
    num_init: int = 1,
    num_local: int = 2,
    share_group: bool = True,
    use_diff_topk: bool = False,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    choose: Callable[..., Tensor] = select_blocks,
    backend: str = 'auto',
) -> Tensor:
    """Native Sparse Attention (equation 5 of arXiv 2502.11089): the gated sum of compressed, selected and window
    attention.

    Args:
        q: `[B, T, HQ, D]`, k: `[B, S, H, D]`, v: `[B, S, H, DV]`, after rotary: what the selected and the window branch
            read.
        k_cmp: `[B, C, H, D]`, v_cmp: `[B, C, H, DV]`: compressed keys and values, made of keys before rotary.
        gates: `[B, T, HQ, 3]` after the sigmoid, in the order compressed, selected, window.
        q_cmp: `[B, T, HQ, D]` before rotary, for the compressed branch and the block scores; default q.
        k_window, v_window: keys and values of the window branch; default k, v.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` that every query sees in the compressed branch.
        compress_block_size, compress_stride, selection_block_size: l, d, l' in tokens; l' is a multiple of d, d at most
            l.
        num_selected: n, the blocks that a query reads, forced ones included; 0 switches the branch off (its part of the
            sum is 0).
        window_size: (left, right), keys before and after the query's own; causal: (left, 0).
        num_init, num_local: forced blocks at the start, and those that end with the query's own.
        share_group: the heads of a group read the same blocks.
        use_diff_topk: logits of chosen, not forced blocks carry a factor of 1 whose gradient teaches the compressed
            branch to choose.
        q_offset, seqlens_k, causal, scale, cu_seqlens, cu_seqlens_k: as in the ops.
        choose: chooses the blocks, called as `select_blocks` is.
        backend: 'auto', 'triton', 'flex' (the three attentions; choice and sum are eager) or 'eager'; `backend_of`
            says what 'auto' takes.

    Returns:
        `[B, T, HQ, DV]` in the dtype of q.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_backend(backend)
    check_gates(gates, q)
    check_block_sizes(compress_block_size, compress_stride, selection_block_size)
    check_not_negative(num_selected=num_selected, num_init=num_init, num_local=num_local)
    if (k_window is None) != (v_window is None):
        raise ValueError('k_window and v_window must be given together or not at all')
    q_cmp = q if q_cmp is None else q_cmp
    k_window, v_window = (k, v) if k_window is None or v_window is None else (k_window, v_window)
    check_qkv(q, k, v)
    check_window(window_size, causal)
    for name, tensor, like in (('q_cmp', q_cmp, q), ('k_window', k_window, k), ('v_window', v_window, v)):
        if tensor.shape != like.shape:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have {tuple(like.shape)}')
    check_qkv(q_cmp, k_cmp, v_cmp, 'k_cmp', 'v_cmp')
    if v_cmp.shape[-1] != v.shape[-1]:
        raise ValueError(f'v_cmp has head size {v_cmp.shape[-1]}, but v has {v.shape[-1]}')
    seqlen_k = k.shape[1] if cu_seqlens is None else None
    where: dict[str, Any] = {
        'q_offset': q_offset,
        'seqlens_k': seqlens_k,
        'causal': causal,
        'scale': scale,
        'cu_seqlens': cu_seqlens,
        'cu_seqlens_k': cu_seqlens_k,
    }
    eager_in_flex = 'eager' if backend == 'flex' else backend

    out_compressed, lse = compressed_attention(
        q_cmp,
        k_cmp,
        v_cmp,
        block_size=compress_block_size,
        stride=compress_stride,
        mem_kv=mem_kv,
        seqlen_k=seqlen_k,
        backend=backend,
        **where,
    )
    out_window, _ = window_attention(q, k_window, v_window, window_size=window_size, backend=backend, **where)
    if num_selected == 0:
        return gated_sum(gates, out_compressed, torch.zeros_like(out_window), out_window, backend=eager_in_flex)

    choice: dict[str, Any] = {
        'compress_block_size': compress_block_size,
        'compress_stride': compress_stride,
        'selection_block_size': selection_block_size,
        'seqlen_k': seqlen_k,
        'backend': eager_in_flex,
        **where,
    }
    block_indices = choose(
        q_cmp,
        k_cmp,
        lse,
        num_selected=num_selected,
        num_init=num_init,
        num_local=num_local,
        share_group=share_group,
        **choice,
    )
    block_scale = None
    if use_diff_topk:
        block_scale = straight_through_scale(
            q_cmp, k_cmp, lse, block_indices, num_init=num_init, num_local=num_local, **choice
        )
    out_selected, _ = selected_attention(
        q, k, v, block_indices, block_size=selection_block_size, block_scale=block_scale, backend=backend, **where
    )
    return gated_sum(gates, out_compressed, out_selected, out_window, backend=eager_in_flex)


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_selected: int = 1,
    share_group: bool = True,
    use_diff_topk: bool = False,
    backend: str = 'auto',
) -> BackendChoice:
    """The backend that `nsa` would take, and in `ops` that of every op.

    It is that of the three attentions; where they differ, the slowest of them.
    """
    attentions = {
        'compressed_attention': compressed_backend(q, k, v, backend=backend),
        'window_attention': window_backend(q, k, v, backend=backend),
    }
    eager_in_flex = 'eager' if backend == 'flex' else backend
    others = {'gated_sum': sum_backend(q, v, backend=eager_in_flex)}
    if num_selected:
        block_scale = q[:, :, : k.shape[2], :1] if use_diff_topk else None
        attentions['selected_attention'] = selected_backend(
            q, k, v, block_scale=block_scale, num_selected=num_selected, backend=backend
        )
        group_size = q.shape[2] // k.shape[2] if share_group else 1
        others['select_blocks'] = choice_backend(
            'select_blocks', q, k, group_size=group_size, num_selected=num_selected, backend=eager_in_flex
        )
        if use_diff_topk:
            others['straight_through_scale'] = choice_backend(
                'straight_through_scale', q, k, num_selected=num_selected, backend=eager_in_flex
            )
    return slowest(attentions, others)


def made_again(attend: Callable[[Callable[..., Tensor]], Tensor]) -> Tensor:
    """attend(choose), of which the backward pass keeps what attend refers to and the blocks that queries chose, and
    makes everything else once more.

    attend: `nsa` with the given `choose`, and what is to be made again before it; without random numbers.
    """
    if not torch.compiler.is_compiling():
        return checkpoint(attend, _KeptChoice(), use_reentrant=False, preserve_rng_state=False)
    # What is traced must not change what lies outside it, so that the kernel's choice is kept as the result of an op.
    contexts = partial(create_selective_checkpoint_contexts, _keep_choice)
    return checkpoint(attend, select_blocks, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _KeptChoice:
    """`select_blocks` in the first call, and what that gave in every later one."""

    def __init__(self) -> None:
        self.block_indices: Tensor | None = None

    @torch.no_grad()
    def __call__(self, *args: Any, **settings: Any) -> Tensor:
        if self.block_indices is None:
            self.block_indices = select_blocks(*args, **settings)
        return self.block_indices


def _keep_choice(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_choice = str(op) == 'native_sparse_attention.select_blocks.default'
    return CheckpointPolicy.MUST_SAVE if is_choice else CheckpointPolicy.PREFER_RECOMPUTE
