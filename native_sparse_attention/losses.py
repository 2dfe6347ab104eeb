"""Auxiliary losses for training the block scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import choose_backends
from native_sparse_attention.core.call import MassRules, make_call
from native_sparse_attention.core.random import as_seed, check_seed, split_mix
from native_sparse_attention.ops._eager import take_rows
from native_sparse_attention.ops.block_divergence.api import block_divergence
from native_sparse_attention.ops.block_divergence.api import candidates as divergence_candidates
from native_sparse_attention.ops.block_mass.api import candidates as mass_candidates
from native_sparse_attention.ops.block_mass.api import mass_at


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
    min_position: int = 0,
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
    Rows with fewer than two candidates do not count, nor do queries at positions below min_position or beyond the keys,
    which are padding.
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
        min_position: position in its sequence from which on a query counts; others may attend densely.
        seed: of the draw, an int or int64 `[1]`; default: drawn from PyTorch's generator.
        q_offset: position of the first query, an int or `[B]`; default: queries end where the keys end.
        seqlens_k: int32 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences; B is 1.
        cu_seqlens_k: int32 `[N + 1]`, boundaries of the keys if they differ from those of the queries.
        softcap: soft cap of the logits.
        backend: of the mass of full attention and of the divergence, 'auto', 'triton' or 'eager'; 'flex' takes eager.
            Queries are drawn in plain PyTorch.

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
    compress = (compress_block_size, compress_stride)
    checks.check_block_sizes(*compress, selection_block_size)
    checks.check_flags(share_group=share_group)
    checks.check_positive(num_queries=num_queries)
    checks.check_not_negative(min_position=min_position)
    if window_size is not None:
        window_size = checks.check_window(window_size, causal)
    check_seed('seed', seed, q)
    call, _ = make_call(q, k, None, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale, softcap)
    checks.check_qk(q_cmp, k_cmp, 'k_cmp')
    checks.check_compressed_heads(k_cmp, k)
    checks.check_num_compressed(k_cmp, call.sequences, *compress)
    ops = {'block_mass': mass_candidates(q, k), 'block_divergence': divergence_candidates(q_cmp, k_cmp)}
    choices = choose_backends(backend, q.device, ops, flex_or_eager=True)
    rows = _draw_rows(q.shape[0], q.shape[1], num_queries, as_seed(seed, q.device))
    tokens = call.sequences.layout(rows)
    if min_position:  # a query of no keys does not count
        tokens = replace(tokens, key_len=tokens.key_len.where(tokens.position >= min_position, 0))
    compressed, _ = call.sequences.compressed_layout(*compress, rows)
    rules = MassRules(selection_block_size, window_size, share_group)
    with torch.no_grad():
        mass = mass_at(take_rows(q, rows), k, tokens, rules, call, choices['block_mass'].name)
    backend = choices['block_divergence'].name
    return block_divergence(q_cmp, k_cmp, mass, rows, (tokens, compressed), compress, rules, call, backend)


def _draw_rows(batch: int, seqlen: int, num_queries: int, seed: Tensor) -> Tensor:
    """Return int64 `[B, R]`, ascending, one query of each of R equal parts of the sequence."""
    count = min(num_queries, seqlen)
    part = torch.arange(count + 1, device=seed.device) * seqlen // max(1, count)
    numbers = split_mix(seed, torch.arange(batch * count, device=seed.device)).view(batch, count)
    return part[:-1] + numbers % part.diff().clamp(min=1)
