"""Which blocks every query reads exactly: block scores (equation 9 of the paper), summed over a group (10), and the
choice (11)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, serves
from native_sparse_attention.core.checks import (
    check_all_block_sizes,
    check_block_counts,
    check_block_indices,
    check_flags,
    check_lse,
    check_not_negative,
    check_qk,
    checked_softcap,
    logit_scale,
    make_compressed_sequences,
)
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.segments import make_borders
from native_sparse_attention.ops._triton import support

# What a tile of the Triton kernel holds: heads that choose together, blocks of a row.
MAX_GROUP = 64
MAX_SELECTED = 512


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_selected: int,
    num_init: int = 1,
    num_local: int = 2,
    seqlen_k: int | None = None,
    share_group: bool = True,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    block_counts: int | Tensor | None = None,
    backend: str = 'auto',
) -> Tensor:
    """The `num_selected` blocks that each query reads.

    With p[c] the compressed attention weights, the score of selection block j is the sum over c of p[c] times the
    tokens that compressed block c and selection block j share, over the stride. Scores of the heads of a group are
    added. Forced blocks (the first `num_init`, and the `num_local` that end with the query's own) count towards
    `num_selected`: the own block is taken first, then the initial ones, then the other local ones, nearer first. The
    rest goes to the highest scores, of equal ones to the lower block. Only blocks whose first token is visible are
    chosen (not causal: all).

    Args:
        q: `[B, T, HQ, D]`, before rotary. k_cmp: `[B, C, H, D]`. lse: `[B, HQ, T]` of `compressed_attention` on the
            same inputs.
        compress_block_size, compress_stride, selection_block_size: tokens; the last is a multiple of the stride.
        num_selected: n, forced blocks included.
        num_init, num_local: forced blocks. Not causal: local means the own block and num_local - 1 on either side.
        share_group: the G heads of a group read the same blocks; else each head chooses for itself.
        seqlen_k, q_offset, seqlens_k, scale, cu_seqlens, cu_seqlens_k: as `compressed_attention` takes them.
        segment_ids, softcap: as `compressed_attention` takes them; lse must come of the same. Padding chooses nothing.
        block_counts: how many of the n blocks a query takes, an int or integers `[B, T, H]` (`[B, T, HQ]` where heads
            choose alone); less than 0 counts as 0, more than n as n.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        int32 `[B, T, H, n]` (`[B, T, HQ, n]` where heads choose alone), ascending, padded at the end with -1. No
        gradient.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_qk(q, k_cmp, 'k_cmp')
    check_lse(lse, q)
    check_flags(causal=causal, share_group=share_group)
    check_all_block_sizes(compress_block_size, compress_stride, selection_block_size)
    check_not_negative(num_selected=num_selected, num_init=num_init, num_local=num_local)
    softcap = checked_softcap(softcap)
    counts, num_kept = _check_counts(block_counts, q, k_cmp, num_selected, share_group)
    where = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens, padding = make_borders(segment_ids, q, None, seqlen_k, *where)
    sequences = make_compressed_sequences(
        q, k_cmp, compress_block_size, compress_stride, seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k
    )
    scale = logit_scale(q, scale)
    sizes = (compress_block_size, compress_stride, selection_block_size)
    choice = (num_kept, num_init, num_local, share_group)
    arguments = (q, k_cmp, lse, sequences, sizes, *choice, causal, scale, softcap, counts)
    group_size = q.shape[2] // k_cmp.shape[2] if share_group else 1
    limits = {'group_size': group_size, 'num_selected': num_selected}
    match backend_of('select_blocks', q, k_cmp, **limits, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.block_selection import triton

            chosen = triton.select_blocks(*arguments)
        case _:
            from native_sparse_attention.ops.block_selection import eager

            chosen = eager.select_blocks(*arguments)
    if num_kept < num_selected:
        chosen = torch.nn.functional.pad(chosen, (0, num_selected - num_kept), value=-1)
    return _without_padding(chosen, padding)


def chosen_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    seqlen_k: int | None = None,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    backend: str = 'auto',
) -> Tensor:
    """Scores of chosen blocks alone, differentiable: what makes the choice learnable, with memory linear in T.

    The score is that of `select_blocks` times compress_stride / (compress_block_size * G), G = 1 where heads choose
    alone, so that it lies in [0, selection_block_size / compress_block_size].

    Args:
        q, k_cmp, lse and the settings: as `select_blocks` takes them; lse carries gradient.
        block_indices: int32 `[B, T, H, n]`, or `[B, T, HQ, n]` where heads choose alone; those of padding tokens
            (segment_ids below 0) count as -1.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices; 0 at padding and at indices that name no
        block.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    settings = (compress_block_size, compress_stride, selection_block_size)
    where = (seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, segment_ids)
    arguments = _check_chosen(q, k_cmp, lse, block_indices, *settings, *where, causal, scale, softcap)
    num_selected = block_indices.shape[3]
    match backend_of('chosen_scores', q, k_cmp, num_selected=num_selected, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.block_selection import triton

            return triton.chosen_scores(*arguments)
        case _:
            from native_sparse_attention.ops.block_selection import eager

            return eager.chosen_scores(*arguments)


def straight_through_scale(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    num_init: int,
    num_local: int,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    seqlen_k: int | None = None,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    backend: str = 'auto',
) -> Tensor:
    """1 for every chosen block, with the gradients of `chosen_scores` where the block was not forced: `block_scale` of
    `selected_attention`, by which the choice is learned (a straight-through estimator).

    It is 1 + scores - scores.detach(), but the Triton kernels compute no score for it, so that it is 1 where a score is
    not finite too.

    Args:
        num_init, num_local: as `select_blocks` takes them; the others as `chosen_scores` does.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices.

    Raises:
        ValueError: as `chosen_scores`.
    """
    settings = (compress_block_size, compress_stride, selection_block_size)
    where = (seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, segment_ids)
    arguments = _check_chosen(q, k_cmp, lse, block_indices, *settings, *where, causal, scale, softcap)
    check_not_negative(num_init=num_init, num_local=num_local)
    num_selected = block_indices.shape[3]
    match backend_of('straight_through_scale', q, k_cmp, num_selected=num_selected, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.block_selection import triton

            return triton.straight_through_scale(*arguments, num_init, num_local)
        case _:
            from native_sparse_attention.ops.block_selection import eager

            return eager.straight_through_scale(*arguments, num_init, num_local)


def backend_of(
    op: str, q: Tensor, k_cmp: Tensor, *, group_size: int = 1, num_selected: int = 1, backend: str = 'auto'
) -> BackendChoice:
    """The backend that would serve these inputs of 'select_blocks', 'chosen_scores' or 'straight_through_scale'.

    group_size, num_selected: how many heads choose together, which matters to 'select_blocks' alone, and how many
    blocks.
    """
    if op == 'select_blocks':
        unsupported = partial(_choice_unsupported, q, k_cmp, group_size, num_selected)
    else:
        unsupported = partial(_scores_unsupported, q, k_cmp, num_selected)
    candidates = {'triton': unsupported, 'eager': serves}
    return choose_backend(op, backend, q.device, candidates)


def _check_chosen(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    seqlen_k: int | None,
    q_offset: int | Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    segment_ids: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Sequences, tuple[int, int, int], bool, float, float | None]:
    """What the backends take for `chosen_scores`, once it fits."""
    check_qk(q, k_cmp, 'k_cmp')
    check_lse(lse, q)
    check_flags(causal=causal)
    check_block_indices(block_indices, q, k_cmp)
    check_all_block_sizes(compress_block_size, compress_stride, selection_block_size)
    softcap = checked_softcap(softcap)
    where = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens, padding = make_borders(segment_ids, q, None, seqlen_k, *where)
    sequences = make_compressed_sequences(
        q, k_cmp, compress_block_size, compress_stride, seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k
    )
    block_indices = _without_padding(block_indices, padding)
    sizes = (compress_block_size, compress_stride, selection_block_size)
    return q, k_cmp, lse, block_indices, sequences, sizes, causal, logit_scale(q, scale), softcap


def _without_padding(block_indices: Tensor, padding: Tensor | None) -> Tensor:
    return block_indices if padding is None else block_indices.masked_fill(padding[:, :, None, None], -1)


def _check_counts(
    block_counts: int | Tensor | None, q: Tensor, k_cmp: Tensor, num_selected: int, share_group: bool
) -> tuple[Tensor | None, int]:
    """What the backends take: a count per row or None, and the most that a row takes."""
    if block_counts is None:
        return None, num_selected
    check_block_counts(block_counts, k_cmp.shape[2] if share_group else q.shape[2], q)
    if isinstance(block_counts, Tensor):
        return block_counts, num_selected
    return None, max(0, min(block_counts, num_selected))


def _scores_unsupported(q: Tensor, k_cmp: Tensor, num_selected: int) -> str | None:
    """Why the Triton kernels cannot serve a call about chosen scores, or None where they can."""
    return support.too_many_choices(q, k_cmp, num_selected) or support.unsupported(q, k_cmp)


def _choice_unsupported(q: Tensor, k_cmp: Tensor, group_size: int, num_selected: int) -> str | None:
    """Why the Triton kernel cannot serve a call of `select_blocks`, or None where it can."""
    if group_size > MAX_GROUP:
        return f'{group_size} heads choose together, but a tile of its kernel holds up to {MAX_GROUP}'
    if num_selected > MAX_SELECTED:
        return f'num_selected is {num_selected}, but its kernel keeps up to {MAX_SELECTED} blocks of a row'
    return support.unsupported(q, k_cmp)
