"""Block selection: block scores, their sum over a group, and the top-n (equations 9 to 11 of arXiv 2502.11089)."""

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
    """Select the blocks that each query reads.

    Blocks are ranked by attention mass on their compressed tokens (equation 9 of arXiv 2502.11089): the score of block
    j is the sum over c of p[c], the compressed attention weights, times the tokens that compressed block c and
    selection block j share, over the stride. Scores of the heads of a group are added (equation 10). Initial and local
    blocks are always selected and count towards num_selected: the own block first, then the initial ones, then the
    other local ones, nearer first. The rest goes to the highest scores (equation 11); ties go to the lower block. Only
    blocks whose first token is visible can be selected (not causal: all).

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        lse: `[B, HQ, T]` float32, natural log, as returned by `compressed_attention` for the same inputs.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        num_selected: n, forced blocks included.
        num_init: forced blocks at the start.
        num_local: forced blocks that end with the query's own. Not causal: the own block and num_local - 1 on either
            side.
        share_group: the heads of a group read the same blocks; otherwise each head selects for itself.
        seqlen_k: as in `compressed_attention`.
        q_offset: as in `compressed_attention`.
        seqlens_k: as in `compressed_attention`.
        causal: as in `compressed_attention`.
        scale: as in `compressed_attention`.
        cu_seqlens: as in `compressed_attention`.
        cu_seqlens_k: as in `compressed_attention`.
        segment_ids: as in `compressed_attention`; lse must come from the same ids.
        softcap: as in `compressed_attention`; lse must come from the same soft cap.
        block_counts: how many of the n blocks a query reads, an int or integers `[B, T, H]` (`[B, T, HQ]` where heads
            select alone). Values below 0 count as 0, values above n as n.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        int32 `[B, T, H, n]` (`[B, T, HQ, n]` where heads select alone), ascending, padded at the end with -1, without a
        gradient. Padding tokens select nothing.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
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
    """Return the scores of selected blocks, differentiable, with memory linear in T.

    A score is that of `select_blocks` times compress_stride / (compress_block_size * G), with G = 1 where heads select
    alone, so it lies in [0, selection_block_size / compress_block_size].

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        lse: `[B, HQ, T]` as returned by `compressed_attention` for the same inputs; it carries gradient.
        block_indices: int32 `[B, T, H, n]`, or `[B, T, HQ, n]` where heads select alone. Those of padding tokens
            (segment_ids below 0) count as -1.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        seqlen_k: as in `compressed_attention`.
        q_offset: as in `compressed_attention`.
        seqlens_k: as in `compressed_attention`.
        causal: as in `compressed_attention`.
        scale: as in `compressed_attention`.
        cu_seqlens: as in `compressed_attention`.
        cu_seqlens_k: as in `compressed_attention`.
        segment_ids: as in `compressed_attention`; lse must come from the same ids.
        softcap: as in `compressed_attention`; lse must come from the same soft cap.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices; 0 at padding and at indices of no block.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
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
    """Return 1 for every selected block, with the gradient of `chosen_scores` where the block was not forced.

    As `block_scale` of `selected_attention` it trains the block scores (a straight-through estimator). It equals 1 +
    scores - scores.detach(), but the Triton kernels compute no score, so it is also 1 where a score is not finite.

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        lse: `[B, HQ, T]` as returned by `compressed_attention` for the same inputs; it carries gradient.
        block_indices: int32 `[B, T, H, n]`, or `[B, T, HQ, n]` where heads select alone.
        num_init: forced blocks at the start, as in `select_blocks`.
        num_local: forced blocks that end with the query's own, as in `select_blocks`.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        seqlen_k: as in `compressed_attention`.
        q_offset: as in `compressed_attention`.
        seqlens_k: as in `compressed_attention`.
        causal: as in `compressed_attention`.
        scale: as in `compressed_attention`.
        cu_seqlens: as in `compressed_attention`.
        cu_seqlens_k: as in `compressed_attention`.
        segment_ids: as in `compressed_attention`; lse must come from the same ids.
        softcap: as in `compressed_attention`; lse must come from the same soft cap.
        backend: 'auto', 'triton' or 'eager'.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
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
    """Check the arguments of `chosen_scores`, and return those that the backends take."""
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
    """Return the count of each row or None, and the largest count of a row, as the backends take them."""
    if block_counts is None:
        return None, num_selected
    check_block_counts(block_counts, k_cmp.shape[2] if share_group else q.shape[2], q)
    if isinstance(block_counts, Tensor):
        return block_counts, num_selected
    return None, max(0, min(block_counts, num_selected))


def _scores_unsupported(q: Tensor, k_cmp: Tensor, num_selected: int) -> str | None:
    """Return the reason why Triton does not support these scores, or None."""
    return support.too_many_choices(q, k_cmp, num_selected) or support.unsupported(q, k_cmp)


def _choice_unsupported(q: Tensor, k_cmp: Tensor, group_size: int, num_selected: int) -> str | None:
    """Return the reason why Triton does not support this call of `select_blocks`, or None."""
    if group_size > MAX_GROUP:
        return f'{group_size} heads choose together, but a tile of its kernel holds up to {MAX_GROUP}'
    if num_selected > MAX_SELECTED:
        return f'num_selected is {num_selected}, but its kernel keeps up to {MAX_SELECTED} blocks of a row'
    return support.unsupported(q, k_cmp)
