"""Block selection: block scores, their sum over a group, and the top-n (equations 9 to 11 of arXiv 2502.11089)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import BackendChoice, Candidates, choose_backend, serves
from native_sparse_attention.core.call import Call, SelectionRules, make_call
from native_sparse_attention.ops._triton import support

# A tile of the Triton kernel holds the heads that select together, and the blocks of a row.
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
    num_recent: int = 0,
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
        num_recent: candidates and local blocks are those of a query num_recent positions earlier, so the first
            num_recent queries of a sequence select nothing. Scores do not change. With num_recent = W, a window of W
            keys and the candidates hold every visible key. Must be 0 where not causal.
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
    checks.check_qk(q, k_cmp, 'k_cmp')
    checks.check_lse(lse, q)
    checks.check_flags(share_group=share_group)
    sizes = (compress_block_size, compress_stride, selection_block_size)
    checks.check_block_sizes(*sizes)
    forced = {'num_init': num_init, 'num_local': num_local, 'num_recent': num_recent}
    checks.check_not_negative(num_selected=num_selected, **forced)
    checks.check_num_recent(num_recent, causal)
    kv_heads = k_cmp.shape[2]
    if block_counts is not None:
        checks.check_block_counts(block_counts, kv_heads if share_group else q.shape[2], q)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    call, padding = make_call(
        q, k_cmp, segment_ids, *placed, causal, scale, softcap, compress=sizes[:2], seqlen_k=seqlen_k
    )
    group_size = q.shape[2] // kv_heads if share_group else 1
    choice = backend_of('select_blocks', q, k_cmp, group_size=group_size, num_selected=num_selected, backend=backend)
    rules = SelectionRules(num_selected, num_init, num_local, num_recent, share_group, block_counts)
    return _without_padding(select(q, k_cmp, lse, sizes, call, rules, choice.name), padding)


def select(
    q: Tensor, k_cmp: Tensor, lse: Tensor, sizes: tuple[int, int, int], call: Call, rules: SelectionRules, backend: str
) -> Tensor:
    """Run `select_blocks` with checked arguments on a resolved backend. sizes: (l, d, l')."""
    missing = 0
    if rules.block_counts is not None and not isinstance(rules.block_counts, Tensor):
        num_read = max(0, min(rules.block_counts, rules.num_selected))
        missing, rules = rules.num_selected - num_read, rules._replace(num_selected=num_read, block_counts=None)
    match backend:
        case 'triton':
            from native_sparse_attention.ops.block_selection import triton as ops
        case _:
            from native_sparse_attention.ops.block_selection import eager as ops
    blocks = ops.select_blocks(q, k_cmp, lse, sizes, call, rules)
    return torch.nn.functional.pad(blocks, (0, missing), value=-1) if missing else blocks


def selector(
    choose: Callable[..., Tensor], sizes: tuple[int, int, int], call: Call, rules: SelectionRules, backend: str
) -> Callable[..., Tensor]:
    """Return a function like `select` that calls choose, a function like `select_blocks`, with these settings.

    The backend, and settings at the default of `select_blocks`, are left out where choose does not take them. Raises
    ValueError for others that it does not take.
    """
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    placed = ('seqlen_k', 'q_offset', 'seqlens_k', 'cu_seqlens', 'cu_seqlens_k')
    settings = dict(zip(names, sizes, strict=True)) | rules._asdict()
    settings |= {name: getattr(call.sequences, name) for name in placed}
    settings |= {'causal': call.causal, 'scale': call.scale, 'softcap': call.softcap}
    settings |= {'backend': 'eager' if backend == 'flex' else backend}
    defaults, taken = _keywords(select_blocks), _keywords(choose)
    if taken is not None and defaults is not None:
        for name in [name for name in settings if name not in taken]:
            value = settings.pop(name)
            if name != 'backend' and (isinstance(value, Tensor) or value != defaults[name]):
                raise ValueError(f'choose has no argument {name}, but must have it: {name} is {checks.shown(value)}')

    def select_by(q: Tensor, k_cmp: Tensor, lse: Tensor, *_: Any) -> Tensor:
        block_indices = choose(q, k_cmp, lse, **settings)
        checks.check_block_indices(block_indices, q, k_cmp)
        return block_indices

    return select_by


def _keywords(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the arguments that a function takes by name, with their defaults, or None where it may take any."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


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
        compress_block_size: as in `select_blocks`.
        compress_stride: as in `select_blocks`.
        selection_block_size: as in `select_blocks`.
        seqlen_k: as in `select_blocks`.
        q_offset: as in `select_blocks`.
        seqlens_k: as in `select_blocks`.
        causal: as in `select_blocks`.
        scale: as in `select_blocks`.
        cu_seqlens: as in `select_blocks`.
        cu_seqlens_k: as in `select_blocks`.
        segment_ids: as in `select_blocks`.
        softcap: as in `select_blocks`.
        backend: as in `select_blocks`.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices; 0 at padding and at indices of no block.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    sizes = (compress_block_size, compress_stride, selection_block_size)
    _check_scores(q, k_cmp, lse, block_indices, sizes)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    call, padding = make_call(
        q, k_cmp, segment_ids, *placed, causal, scale, softcap, compress=sizes[:2], seqlen_k=seqlen_k
    )
    choice = backend_of('chosen_scores', q, k_cmp, num_selected=block_indices.shape[3], backend=backend)
    return score(q, k_cmp, lse, _without_padding(block_indices, padding), sizes, call, backend=choice.name)


def straight_through_scale(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    num_init: int,
    num_local: int,
    num_recent: int = 0,
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
        num_init: as in `select_blocks`.
        num_local: as in `select_blocks`.
        num_recent: as in `select_blocks`.
        compress_block_size: as in `select_blocks`.
        compress_stride: as in `select_blocks`.
        selection_block_size: as in `select_blocks`.
        seqlen_k: as in `select_blocks`.
        q_offset: as in `select_blocks`.
        seqlens_k: as in `select_blocks`.
        causal: as in `select_blocks`.
        scale: as in `select_blocks`.
        cu_seqlens: as in `select_blocks`.
        cu_seqlens_k: as in `select_blocks`.
        segment_ids: as in `select_blocks`.
        softcap: as in `select_blocks`.
        backend: as in `select_blocks`.

    Returns:
        float32 (float64 for float64 inputs) in the shape of block_indices.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    sizes = (compress_block_size, compress_stride, selection_block_size)
    _check_scores(q, k_cmp, lse, block_indices, sizes)
    checks.check_not_negative(num_init=num_init, num_local=num_local, num_recent=num_recent)
    checks.check_num_recent(num_recent, causal)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    call, padding = make_call(
        q, k_cmp, segment_ids, *placed, causal, scale, softcap, compress=sizes[:2], seqlen_k=seqlen_k
    )
    choice = backend_of('straight_through_scale', q, k_cmp, num_selected=block_indices.shape[3], backend=backend)
    block_indices, forced = _without_padding(block_indices, padding), (num_init, num_local, num_recent)
    return score(q, k_cmp, lse, block_indices, sizes, call, forced, backend=choice.name)


def score(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    sizes: tuple[int, int, int],
    call: Call,
    straight_through: tuple[int, int, int] | None = None,
    *,
    backend: str,
) -> Tensor:
    """Run `chosen_scores`, or with straight_through = (num_init, num_local, num_recent) `straight_through_scale`, with
    checked arguments on a resolved backend.
    """
    match backend:
        case 'triton':
            from native_sparse_attention.ops.block_selection import triton as ops
        case _:
            from native_sparse_attention.ops.block_selection import eager as ops
    if straight_through is None:
        return ops.chosen_scores(q, k_cmp, lse, block_indices, sizes, call)
    return ops.straight_through_scale(q, k_cmp, lse, block_indices, sizes, call, straight_through)


def backend_of(op: str, q: Tensor, k_cmp: Tensor, *, backend: str = 'auto', **settings: Any) -> BackendChoice:
    """Return the backend that serves these inputs of `op`. settings: of `candidates`."""
    return choose_backend(op, backend, q.device, candidates(op, q, k_cmp, **settings))


def candidates(op: str, q: Tensor, k_cmp: Tensor, *, group_size: int = 1, num_selected: int = 1) -> Candidates:
    """Return the candidates of 'select_blocks', 'chosen_scores' or 'straight_through_scale'.

    group_size: number of heads that select together, which matters to 'select_blocks' alone.
    """
    if op == 'select_blocks':
        return {'triton': partial(_selection_unsupported, q, k_cmp, group_size, num_selected), 'eager': serves}
    return {'triton': partial(_scores_unsupported, q, k_cmp, num_selected), 'eager': serves}


def _check_scores(q: Tensor, k_cmp: Tensor, lse: Tensor, block_indices: Tensor, sizes: tuple[int, int, int]) -> None:
    checks.check_qk(q, k_cmp, 'k_cmp')
    checks.check_lse(lse, q)
    checks.check_block_indices(block_indices, q, k_cmp)
    checks.check_block_sizes(*sizes)


def _without_padding(block_indices: Tensor, padding: Tensor | None) -> Tensor:
    return block_indices if padding is None else block_indices.masked_fill(padding[:, :, None, None], -1)


def _scores_unsupported(q: Tensor, k_cmp: Tensor, num_selected: int) -> str | None:
    """Return the reason why Triton does not support these scores, or None."""
    return support.too_many_selected(q, k_cmp, num_selected) or support.unsupported(q, k_cmp)


def _selection_unsupported(q: Tensor, k_cmp: Tensor, group_size: int, num_selected: int) -> str | None:
    """Return the reason why Triton does not support this call of `select_blocks`, or None."""
    if group_size > MAX_GROUP:
        return f'{group_size} heads select together, but a tile of its kernel holds up to {MAX_GROUP}'
    if num_selected > MAX_SELECTED:
        return f'num_selected is {num_selected}, but its kernel keeps up to {MAX_SELECTED} blocks of a row'
    return support.unsupported(q, k_cmp)
