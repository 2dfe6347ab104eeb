"""`parallel_nsa` with the arguments of flash-linear-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import check_backend
from native_sparse_attention.core.geometry import num_selection_blocks, packed_block_starts
from native_sparse_attention.functional import nsa
from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.gated_sum.api import check_gate


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    *,
    backend: str = 'auto',
) -> Tensor:
    """Native Sparse Attention with the arguments of `fla.ops.nsa.parallel_nsa`.

    Blocks are compressed to their means; compressed and selected blocks have the same length and do not overlap. The
    selected branch is always read. Queries end where the keys of their sequence end, so fewer queries than keys can
    read a cache. The first block of a sequence, the query's own and the one before it are always selected; where fewer
    blocks are read, the own goes first, then the first one. Rows with nothing to read give 0.

    Args:
        q: `[B, T, HQ, K]` queries, HQ any multiple of H. Packed: B is 1.
        k: `[B, S, H, K]` keys.
        v: `[B, S, H, V]` values.
        g_cmp: `[B, T, HQ]`, gate of the compressed branch; None leaves the branch out.
        g_slc: `[B, T, HQ]`, gate of the selected branch; None stands for 1.
        g_swa: `[B, T, HQ]`, gate of the window branch; required where window_size is above 0.
        block_indices: int32 `[B, T, H, n]` (`[B, T, HQ, n]` where heads select alone), blocks to read, -1 for none.
            Required without g_cmp. None: the blocks with the highest compressed attention weights, summed over a group.
        block_counts: number of blocks that a query reads: an int, for blocks that are selected here (all of
            block_indices are read), or a tensor `[B, T, H]` (`[B, T, HQ]`), which limits block_indices to the first
            ones of a row. To select blocks, its largest entry is read on the host.
        block_size: tokens of a block.
        window_size: keys that a query reads in the window branch, its own included; 0 leaves the branch out.
        scale: factor of the logits of all branches, default K ** -0.5.
        cu_seqlens: int32 or int64 `[N + 1]`, boundaries of packed sequences, or a pair of them, for queries and keys.
        backend: 'auto', 'triton', 'flex' (the three attentions; selection and sum run in eager) or 'eager'.

    Returns:
        `[B, T, HQ, V]` in the dtype of q, differentiable in q, k, v and the gates.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    check_backend(backend)
    checks.check_qkv(q, k, v)
    checks.check_positive(block_size=block_size)
    checks.check_not_negative(window_size=window_size)
    for name, gate in (('g_cmp', g_cmp), ('g_slc', g_slc), ('g_swa', g_swa)):
        if gate is not None:
            check_gate(name, gate, tuple(q.shape[:3]), '(B, T, HQ)', q)
    if window_size > 0 and g_swa is None:
        raise ValueError(f'g_swa is None, but must be given where window_size is {window_size}')
    if block_indices is not None:
        checks.check_block_indices(block_indices, q, k)
    elif g_cmp is None:
        raise ValueError('block_indices is None, but must be given where g_cmp is None')
    counts = _check_counts(block_counts, q, k.shape[2] if block_indices is None else block_indices.shape[2])
    cu_seqlens_q, cu_seqlens_k = _borders(cu_seqlens)
    where: dict[str, Any] = {'scale': scale, 'cu_seqlens': cu_seqlens_q, 'cu_seqlens_k': cu_seqlens_k}
    checks.make_sequences(q, k.shape[1], None, None, cu_seqlens_q, cu_seqlens_k)  # checks the borders

    if g_cmp is None and g_slc is None and window_size == 0:
        assert block_indices is not None
        return selected_attention(
            q, k, v, block_indices, block_size=block_size, block_counts=counts, backend=backend, **where
        )[0]
    k_cmp = v_cmp = None
    if g_cmp is not None:
        borders = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        k_cmp, v_cmp = (_block_means(t, block_size, borders) for t in (k, v))
    gates = (g_cmp, q.new_ones(q.shape[:3]) if g_slc is None else g_slc, g_swa if window_size > 0 else None)
    return nsa(
        q,
        k,
        v,
        k_cmp,
        v_cmp,
        gates,
        compress_block_size=block_size,
        compress_stride=block_size,
        selection_block_size=block_size,
        num_selected=_enough(block_counts, k.shape[1], block_size) if block_indices is None else None,
        window_size=(max(window_size - 1, 0), 0),
        num_init=1,
        num_local=2,
        block_indices=block_indices,
        block_counts=counts,
        backend=backend,
        **where,
    )


def _block_means(tokens: Tensor, block_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return means `[B, C, H, D]` of the complete blocks of tokens `[B, S, H, D]`.

    With packed sequences C is S // block_size, of which the last are undefined.
    """
    num_blocks = tokens.shape[1] // block_size
    if cu_seqlens is None or num_blocks == 0:
        return tokens[:, : num_blocks * block_size].unflatten(1, (num_blocks, block_size)).mean(2)
    starts = packed_block_starts(cu_seqlens, tokens.shape[1], block_size, block_size)
    token = starts[:, None] + torch.arange(block_size, device=tokens.device)
    return tokens[:, token].mean(2)


def _borders(cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the borders of the queries, and those of the keys where they differ."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens, None
    match cu_seqlens:
        case [Tensor() as cu_seqlens_q, Tensor() as cu_seqlens_k]:
            return cu_seqlens_q, cu_seqlens_k
    kind = type(cu_seqlens).__name__
    raise ValueError(f'cu_seqlens is a {kind}, but must be a tensor or a pair of tensors, for queries and keys')


def _check_counts(block_counts: Tensor | int, q: Tensor, index_heads: int) -> Tensor | None:
    """Return the counts per query, or None for an int."""
    if not isinstance(block_counts, Tensor):
        checks.check_not_negative(block_counts=block_counts)
        return None
    checks.check_block_counts(block_counts, index_heads, q)
    return block_counts


def _enough(block_counts: Tensor | int, seqlen_k: int, block_size: int) -> int:
    """Return the number of blocks to select for every query; a power of two for a tensor, to bound recompilation."""
    if not isinstance(block_counts, Tensor):
        return block_counts
    if block_counts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            'block_counts is a tensor while a CUDA graph is captured, but its largest entry is read on the host to '
            'choose blocks: give an int, or block_indices'
        )
    # More than there are may mean all of them.
    largest = min(int(block_counts.max()) if block_counts.numel() else 0, num_selection_blocks(seqlen_k, block_size))
    return 1 << (largest - 1).bit_length() if largest > 0 else 0
