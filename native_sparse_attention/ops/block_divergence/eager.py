"""Eager divergence of the block scores from a mass of the blocks, in query chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import without_autocast
from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import (
    QueryLayout,
    compressed_block_end,
    in_window,
    num_compressed_blocks,
    overlapping_blocks,
    shared_tokens,
)
from native_sparse_attention.ops._eager import cap, compute_dtype, in_query_chunks, take_rows

# Keeps the logarithm of a score finite that underflowed; every other score of a candidate is far above it.
TINY = 1e-20


def block_divergence(
    q_cmp: Tensor,
    k_cmp: Tensor,
    mass: Tensor,
    rows: Tensor,
    layouts: tuple[QueryLayout, QueryLayout],
    compress: tuple[int, int],
    rules: MassRules,
    call: Call,
) -> Tensor:
    tokens, compressed = layouts
    sizes = (*compress, rules.block_size)
    group = q_cmp.shape[2] // k_cmp.shape[2] if rules.share_group else 1
    count = mass.shape[3]
    candidates = _candidates(tokens, rules.block_size, count, rules.window_size, call.causal)
    candidates = candidates & _have_scores(compressed, count, sizes, call.causal)
    # Padding may hold anything, and 0 times NaN is NaN.
    drawn = take_rows(q_cmp, rows).where(candidates.any(-1)[..., None, None], 0)
    mass = mass.masked_fill(~candidates[:, :, None], 0)
    with without_autocast(q_cmp):
        scores = _block_scores(drawn, k_cmp, compressed, candidates, sizes, group, call)
    return _divergence(mass, scores, candidates)


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
        no_gradient = q_cmp[:0].sum(dtype=dtype) + k_cmp[:0].sum(dtype=dtype)  # 0, so that backward can be called
        return q_cmp.new_zeros((batch, num_rows, heads // group, count), dtype=dtype) + no_gradient
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
