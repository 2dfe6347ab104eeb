"""Auxiliary losses for training the block scores."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import choose_backends
from native_sparse_attention.core.call import Call, MassRules, make_call
from native_sparse_attention.core.geometry import (
    QueryLayout,
    compressed_block_end,
    in_window,
    num_compressed_blocks,
    num_selection_blocks,
    overlapping_blocks,
    shared_tokens,
)
from native_sparse_attention.core.random import as_seed, check_seed, split_mix
from native_sparse_attention.ops._eager import cap, compute_dtype, in_query_chunks, without_autocast
from native_sparse_attention.ops.block_mass.api import candidates as mass_candidates
from native_sparse_attention.ops.block_mass.api import mass_at

# Keeps the logarithm of a score finite that underflowed; every other score of a candidate is far above it.
TINY = 1e-20


def block_score_loss(
    q: Tensor,
    k: Tensor,
    q_cmp: Tensor,
    k_cmp: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    window_size: tuple[int, int] | None = None,
    share_group: bool = True,
    num_queries: int = 512,
    seed: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softcap: float | None = None,
    backend: str = 'auto',
) -> Tensor:
    """Return the divergence of the block scores from the mass of full attention, averaged over sampled rows.

    A row is a query and the heads that select together. Its candidates are the blocks with a visible key outside the
    window that share tokens with a visible compressed block, without which a block has no score. The target is the mass
    of these keys by block, in full attention over all visible keys, averaged over the heads of the row, without
    gradient. Block scores are those of `select_blocks` with compressed attention over k_cmp alone, without memory pairs
    and sinks. Block scores and target are normalised over the candidates; the loss of the row is KL(target || scores).
    Rows with fewer than two candidates do not count, nor do queries at positions beyond the keys, which are padding.
    One query is drawn from each of num_queries equal parts of the T queries, the same for all heads, so time and memory
    are linear in S.

    The gradient reaches q_cmp and k_cmp, and through k_cmp the compression network and the keys that it reads. Add the
    result, times 0.1, to the loss of the model.

    Args:
        q: `[B, T, HQ, D]` queries with rotary embedding.
        k: `[B, S, H, D]` keys with rotary embedding.
        q_cmp: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        window_size: (left, right), keys before and after the query's own that it reads without a selection; -1 is
            unbounded. None: no window.
        share_group: the query heads of a KV head select together.
        num_queries: queries drawn from each batch row, or all of them if T is not larger.
        seed: of the draw, an int or int64 `[1]`; default: drawn from PyTorch's generator.
        q_offset: position of the first query, an int or `[B]`; default: queries end where the keys end.
        seqlens_k: int32 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences; B is 1.
        cu_seqlens_k: int32 `[N + 1]`, boundaries of the keys if they differ from those of the queries.
        softcap: soft cap of the logits.
        backend: of the mass of full attention, 'auto', 'triton' or 'eager'; 'flex' takes eager. The rest of the loss is
            plain PyTorch.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 if no row counts.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    checks.check_qkv(q, k, k)
    checks.check_tensors(q_cmp=q_cmp)
    if q_cmp.shape != q.shape:
        raise ValueError(f'q_cmp has shape {tuple(q_cmp.shape)}, but must have {tuple(q.shape)}')
    checks.check_same_kind(q=q, q_cmp=q_cmp)
    sizes = (compress_block_size, compress_stride, selection_block_size)
    checks.check_block_sizes(*sizes)
    checks.check_flags(share_group=share_group)
    checks.check_positive(num_queries=num_queries)
    if window_size is not None:
        window_size = checks.check_window(window_size, causal)
    check_seed('seed', seed, q)
    call, _ = make_call(q, k, None, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale, softcap)
    checks.check_qk(q_cmp, k_cmp, 'k_cmp')
    checks.check_compressed_heads(k_cmp, k)
    checks.check_num_compressed(k_cmp, call.sequences, *sizes[:2])
    choice = choose_backends(backend, q.device, {'block_mass': mass_candidates(q, k)}, flex_or_eager=True)['block_mass']
    rows = _draw_rows(q.shape[0], q.shape[1], num_queries, as_seed(seed, q.device))
    group = q.shape[2] // k.shape[2] if share_group else 1
    with without_autocast(q):
        tokens = _at_rows(call.sequences.layout(), rows)
        count = num_selection_blocks(k.shape[1], selection_block_size)
        compressed = _at_rows(call.sequences.compressed_layout(*sizes[:2])[0], rows)
        candidates = _candidates(tokens, selection_block_size, count, window_size, causal)
        candidates = candidates & _have_scores(compressed, count, sizes, causal)
        # Padding may hold anything, and 0 times NaN is NaN.
        counts = candidates.any(-1)[..., None, None]
        q, q_cmp = (_gather(t, rows).where(counts, 0) for t in (q, q_cmp))
        with torch.no_grad():
            rules = MassRules(selection_block_size, window_size, share_group)
            mass = mass_at(q, k, tokens, rules, call, choice.name).masked_fill_(~candidates[:, :, None], 0)
        scores = _block_scores(q_cmp, k_cmp, compressed, candidates, sizes, group, call)
    return _divergence(mass, scores, candidates)


def _draw_rows(batch: int, seqlen: int, num_queries: int, seed: Tensor) -> Tensor:
    """Return int64 `[B, R]`, ascending, one query of each of R equal parts of the sequence."""
    count = min(num_queries, seqlen)
    part = torch.arange(count + 1, device=seed.device) * seqlen // max(1, count)
    numbers = split_mix(seed, torch.arange(batch * count, device=seed.device)).view(batch, count)
    return part[:-1] + numbers % part.diff().clamp(min=1)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Return x `[B, T, ...]` at the rows `[B, R]`. Its gradient is deterministic, as no row is drawn twice."""
    flat = rows + torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, rows.shape)


def _at_rows(layout: QueryLayout, rows: Tensor) -> QueryLayout:
    fields = (layout.position, layout.key_start, layout.key_len, layout.covered)
    return QueryLayout(*(field.gather(1, rows) for field in fields))


def _candidates(
    tokens: QueryLayout, block_size: int, count: int, window_size: tuple[int, int] | None, causal: bool
) -> Tensor:
    """Return bool `[B, R, blocks]`: blocks with a visible key outside the window, for queries that are no padding."""
    first = torch.arange(count, device=tokens.position.device) * block_size
    position, key_len = tokens.position[..., None], tokens.key_len[..., None]
    last = torch.minimum(first + block_size, key_len) - 1
    if causal:
        last = torch.minimum(last, position)
    exists = (first <= last) & (tokens.covered[..., None] & (position < key_len))
    if window_size is None:
        return exists
    left, right = window_size
    # A block lies inside the window if both its first and its last visible key do.
    return exists & ~(in_window(first, position, left, right) & in_window(last, position, left, right))


def _have_scores(compressed: QueryLayout, count: int, sizes: tuple[int, int, int], causal: bool) -> Tensor:
    """Return bool `[B, R, blocks]`: blocks that share tokens with a visible compressed block."""
    first = torch.arange(count, device=compressed.position.device) * (sizes[2] // sizes[1])
    first = (first + overlapping_blocks(*sizes).start).clamp(min=0)
    exists = first < compressed.key_len[..., None]
    if not causal:
        return exists
    return exists & (compressed_block_end(first, *sizes[:2]) <= compressed.position[..., None])


def _block_scores(
    q_cmp: Tensor,
    k_cmp: Tensor,
    compressed: QueryLayout,
    candidates: Tensor,
    sizes: tuple[int, int, int],
    group: int,
    call: Call,
) -> Tensor:
    """Return the scores of `select_blocks`, `[B, R, HI, blocks]`, as the mean of a group; 0 for other blocks."""
    batch, num_rows, heads, _ = q_cmp.shape
    dtype, (num_compressed, kv_heads) = compute_dtype(q_cmp.dtype), k_cmp.shape[1:3]
    count = candidates.shape[2]
    if not num_compressed * num_rows:
        return q_cmp.new_zeros((batch, num_rows, heads // group, count), dtype=dtype)
    index = torch.arange(num_compressed, device=q_cmp.device)
    seen = index < (compressed.key_start + compressed.key_len).amax(1, keepdim=True)
    keys = k_cmp.to(dtype).where(seen[..., None, None], 0)
    add_up, first = _add_packed_blocks, compressed.key_start
    if call.sequences.cu_seqlens is None:
        # Keys that no query sees make the weights of the compressed blocks of a selection block a row of a matrix.
        before, per_selection = _lead(sizes), sizes[2] // sizes[1]
        keys = torch.nn.functional.pad(
            keys, (0, 0, 0, 0, before * per_selection, count * per_selection - num_compressed)
        )
        index = torch.arange(keys.shape[1], device=q_cmp.device)
        add_up, first = _add_blocks, first + before * per_selection
    last = first + _num_visible(compressed, sizes, call.causal)
    keys, least = keys.permute(0, 2, 3, 1), torch.finfo(dtype).min

    def score(start: int, stop: int) -> tuple[Tensor]:
        visible = (index >= first[:, start:stop, None]) & (index < last[:, start:stop, None])
        visible = visible[:, None, None]
        rows = (q_cmp[:, start:stop].to(dtype) * call.scale).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
        logits = (rows.flatten(2, 3) @ keys).unflatten(2, (-1, stop - start))  # [B, H, G, R, C]
        if call.softcap is not None:
            # An invisible logit may be NaN, and so would be the slope of its cap, which multiplies a gradient of 0.
            logits = cap(logits.where(visible, 0), call.softcap)
        # In a row that sees no block every weight counts, but it has no candidates.
        weights = logits.where(visible, least).softmax(-1).flatten(1, 2).unflatten(1, (-1, group)).mean(2)
        scores = add_up(weights, compressed.chunk(start, stop), sizes, count)
        return (scores.where(candidates[:, None, start:stop], 0),)

    (scores,) = in_query_chunks(score, num_rows, batch * heads * num_compressed, dims=(2,))
    return scores.transpose(1, 2)


def _lead(sizes: tuple[int, int, int]) -> int:
    """Return the number of selection blocks before a selection block in which compressed blocks begin that reach it."""
    return -(overlapping_blocks(*sizes).start // (sizes[2] // sizes[1]))


def _num_visible(compressed: QueryLayout, sizes: tuple[int, int, int], causal: bool) -> Tensor:
    """Return int64 `[B, R]`, the number of visible compressed blocks, which are the first ones of a sequence."""
    if not causal:
        return compressed.key_len
    return torch.minimum(compressed.key_len, num_compressed_blocks(compressed.position + 1, *sizes[:2]))


def _add_blocks(weights: Tensor, _: QueryLayout, sizes: tuple[int, int, int], count: int) -> Tensor:
    """Return the scores `[B, HI, R, count]` from weights `[B, HI, R, C]` that begin `_lead` selection blocks before the
    first one.
    """
    before, per_selection = _lead(sizes), sizes[2] // sizes[1]
    parts = weights.unflatten(-1, (before + count, per_selection)).unbind(-1)
    scores = weights.new_zeros(())
    for offset in overlapping_blocks(*sizes):
        first = before + offset // per_selection
        of_offset = parts[offset % per_selection][..., first : first + count]
        scores = torch.add(scores, of_offset, alpha=shared_tokens(offset, *sizes) / sizes[1])
    return scores


def _add_packed_blocks(weights: Tensor, compressed: QueryLayout, sizes: tuple[int, int, int], count: int) -> Tensor:
    """Return the scores `[B, HI, R, count]` from weights `[B, HI, R, C]` of packed sequences."""
    first = torch.arange(count, device=weights.device) * (sizes[2] // sizes[1])
    scores = weights.new_zeros(*weights.shape[:3], count)
    for offset in overlapping_blocks(*sizes):
        exists = (first + offset >= 0) & (first + offset < compressed.key_len[..., None])
        slot = (first + offset + compressed.key_start[..., None]).clamp(0, weights.shape[3] - 1)
        of_block = weights.gather(-1, slot[:, None].expand_as(scores)).where(exists[:, None], 0)
        scores = scores + of_block * (shared_tokens(offset, *sizes) / sizes[1])
    return scores


def _divergence(mass: Tensor, scores: Tensor, candidates: Tensor) -> Tensor:
    """Return the mean of KL(mass || scores) over the rows that count. Both are 0 where there is no candidate."""
    total = mass.sum(-1, keepdim=True)
    counts = (candidates.sum(-1)[..., None] > 1) & (total[..., 0] > 0)
    target = mass / total.clamp(min=torch.finfo(total.dtype).tiny)
    scores = scores + TINY
    # The entropy of the target, its cross entropy, and the normalisation of the scores, as targets add up to 1.
    divergence = torch.special.xlogy(target, target).sum(-1) - (target * scores.log()).sum(-1) + scores.sum(-1).log()
    return divergence.where(counts, 0).sum() / counts.sum().clamp(min=1)
