"""Auxiliary losses for training the block scores."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.core.call import Call, make_call
from native_sparse_attention.core.geometry import Sequences, forced_priority, num_selection_blocks
from native_sparse_attention.core.random import as_seed, philox
from native_sparse_attention.ops.block_selection.api import backend_of, score
from native_sparse_attention.ops.selected_attention import api as selected_attention

# Keeps the logarithm of a score finite that underflowed; every other score is far above it.
TINY = 1e-20


def block_score_loss(
    q: Tensor,
    k: Tensor,
    q_cmp: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    *,
    compress_block_size: int,
    compress_stride: int,
    selection_block_size: int,
    num_init: int = 1,
    num_local: int = 2,
    num_random: int = 2,
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
    """Return the divergence of the block scores from the attention mass of the blocks, averaged over rows.

    A row is a query and the heads that select together. Its candidates are its selected blocks and a few random ones.
    The target is the mass of each candidate in exact attention over the tokens of all candidates, averaged over the
    heads of the row, without gradient. Block scores and target are normalised over the candidates that are not forced,
    since scores do not decide about forced blocks; the loss of the row is KL(target || scores). Rows with fewer than
    two such candidates do not count, nor do queries at positions beyond the keys, which are padding. No query reads
    more than its candidates, so memory is linear in T.

    The gradient reaches q_cmp and k_cmp, and through k_cmp the compression network. Add the result, times a small
    weight, to the loss of the model; pass a detached q_cmp to train the network alone.

    Args:
        q: `[B, T, HQ, D]` queries with rotary embedding.
        k: `[B, S, H, D]` keys with rotary embedding.
        q_cmp: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        lse: `[B, HQ, T]` as returned by `compressed_attention` of q_cmp and k_cmp.
        block_indices: int32 `[B, T, H, n]` as returned by `select_blocks` (`[B, T, HQ, n]` if heads select alone).
        compress_block_size: l, tokens of a compressed block.
        compress_stride: d, tokens between starts of compressed blocks.
        selection_block_size: l', tokens of a selection block, a multiple of d.
        num_init: forced blocks at the start, as in `select_blocks`.
        num_local: forced blocks that end with the query's own, as in `select_blocks`.
        num_random: blocks drawn uniformly for each row from those that may be selected; a block that is a candidate
            already is not counted twice.
        seed: of the random blocks, an int or int64 `[1]`; default: drawn from PyTorch's generator.
        q_offset: position of the first query, an int or `[B]`; default: queries end where the keys end.
        seqlens_k: int32 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 `[N + 1]`, boundaries of packed sequences; B is 1.
        cu_seqlens_k: int32 `[N + 1]`, boundaries of the keys if they differ from those of the queries.
        softcap: soft cap of the logits, the one that lse was computed with.
        backend: 'auto', 'triton', 'flex' (scores run in eager) or 'eager'.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 if no row counts.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    check_backend(backend)
    checks.check_qkv(q, k, k)
    checks.check_tensors(q_cmp=q_cmp)
    if q_cmp.shape != q.shape:
        raise ValueError(f'q_cmp has shape {tuple(q_cmp.shape)}, but must have {tuple(q.shape)}')
    checks.check_same_kind(q=q, q_cmp=q_cmp)
    sizes = (compress_block_size, compress_stride, selection_block_size)
    checks.check_block_sizes(*sizes)
    checks.check_block_indices(block_indices, q, k)
    checks.check_not_negative(num_init=num_init, num_local=num_local, num_random=num_random)
    if not (seed is None or checks.is_int(seed) or isinstance(seed, Tensor)):
        raise ValueError(f'seed is {checks.shown(seed)}, but must be an int, an int64 tensor [1] or None')
    call, _ = make_call(q, k, None, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale, softcap)
    checks.check_qk(q_cmp, k_cmp, 'k_cmp')
    checks.check_compressed_heads(k_cmp, k)
    checks.check_lse(lse, q)
    checks.check_num_compressed(k_cmp, call.sequences, *sizes[:2])
    q, k = q.detach(), k.detach()
    forced = (num_init, num_local)
    candidates, is_ranked = add_random_blocks(
        block_indices, call.sequences, selection_block_size, forced, causal, num_random, as_seed(seed, q.device)
    )
    mass = _attention_mass(q, k, candidates, selection_block_size, call, backend)
    of_scores = 'eager' if backend == 'flex' else backend
    of_scores = backend_of('chosen_scores', q_cmp, k_cmp, num_selected=candidates.shape[3], backend=of_scores).name
    scores = score(q_cmp, k_cmp, lse.detach(), candidates, sizes, call, backend=of_scores)
    is_ranked &= (is_ranked.sum(-1, keepdim=True) > 1) & (mass.where(is_ranked, 0).sum(-1, keepdim=True) > 0)
    target = mass.where(is_ranked, 0)
    target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    scores = scores.where(is_ranked, 0) + TINY
    log_share = scores.log() - scores.sum(-1, keepdim=True).log()
    divergence = torch.special.xlogy(target, target) - target * log_share
    return divergence.sum() / is_ranked.any(-1).sum().clamp(min=1)


@torch.no_grad()
def add_random_blocks(
    block_indices: Tensor,
    sequences: Sequences,
    block_size: int,
    forced: tuple[int, int],
    causal: bool,
    num_random: int,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the candidates of each row, and which of them are not forced.

    Returns:
        int32 `[B, T, HI, n + num_random]`, ascending, padded with -1, each block once; bool of the same shape.
    """
    batch, seqlen, index_heads, _ = block_indices.shape
    layout = sequences.layout()
    own_block = (layout.position // block_size)[..., None, None]
    count = num_selection_blocks(layout.key_len, block_size)[..., None, None]
    count = torch.minimum(count, own_block + 1) if causal else count
    # Counters of the random numbers: entry, query, head, batch.
    sizes = (batch, seqlen, index_heads, num_random)
    b, t, h, entry = torch.meshgrid(*(torch.arange(size, device=seed.device) for size in sizes), indexing='ij')
    blocks = torch.cat((block_indices.long(), philox(seed, entry, t, h, b) % count.clamp(min=1)), -1)
    is_real = layout.covered & (layout.position < layout.key_len)
    exists = (blocks >= 0) & (blocks < count) & is_real[..., None, None]
    blocks = blocks.masked_fill(~exists, torch.iinfo(torch.int32).max).sort(-1).values
    blocks[..., 1:].masked_fill_(blocks[..., 1:] == blocks[..., :-1], torch.iinfo(torch.int32).max)
    blocks = blocks.sort(-1).values
    exists = blocks < count
    is_forced = forced_priority(blocks, own_block, *forced, causal) > 0
    return blocks.masked_fill(~exists, -1).int(), exists & ~is_forced


@torch.no_grad()
def _attention_mass(q: Tensor, k: Tensor, candidates: Tensor, block_size: int, call: Call, backend: str) -> Tensor:
    """Return the share of each candidate in the attention over all of them, `[B, T, HI, n]`, mean of the heads."""
    backend = selected_attention.backend_of(q, k, k, backend=backend).name
    # Of one block at a time the log-sum-exp is all that is needed.
    lse = [
        selected_attention.attend(q, k, k, blocks, None, block_size, call, gate=None, backend=backend)[1]
        for blocks in candidates.split(1, -1)
    ]
    # [B, HQ, T, n]
    logits = torch.stack(lse, -1)
    shares = logits.softmax(-1).where(logits.isfinite().any(-1, keepdim=True), 0)
    return shares.unflatten(1, (candidates.shape[2], -1)).mean(2).transpose(1, 2)
