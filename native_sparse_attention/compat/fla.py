"""`parallel_nsa` as users of flash-linear-attention call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.geometry import packed_block_starts
from native_sparse_attention.ops import (
    compressed_attention,
    gated_sum,
    select_blocks,
    selected_attention,
    window_attention,
)
from native_sparse_attention.ops._checks import (
    INT_DTYPES,
    check_block_indices,
    check_not_negative,
    check_positive,
    check_qkv,
    make_sequences,
)
from native_sparse_attention.ops.backend import check_backend

# The blocks that are read whatever their scores: the first, the query's own and the one before it.
FORCED = {'num_init': 1, 'num_local': 2}


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
    """Native Sparse Attention over means of blocks, which are as long as the selected ones and do not overlap.

    The selected branch is always read. Queries stand at the end of their sequence's keys, so that a cache is read by
    fewer queries than keys. The first block of a sequence, the query's own and the one before it are read whatever
    their scores; where fewer blocks are read, the own goes first, then the first one. Rows with nothing to read give 0.

    Args:
        q: `[B, T, HQ, K]`. k: `[B, S, H, K]`. v: `[B, S, H, V]`; HQ is any multiple of H. Packed: B = 1.
        g_cmp: `[B, T, HQ]`, gate of the compressed branch; without it the branch is left out.
        g_slc: `[B, T, HQ]`, gate of the selected branch, 1 if not given.
        g_swa: `[B, T, HQ]`, gate of the window branch, needed where window_size is above 0.
        block_indices: `[B, T, H, n]` (`[B, T, HQ, n]` where heads choose alone), blocks to read, -1 for none; needed
            without g_cmp. If not given, those of the highest compressed attention weights, summed over a group.
        block_counts: how many blocks a query reads: an int, for blocks that are chosen here (all of block_indices are
            read), or a tensor `[B, T, H]` (`[B, T, HQ]`), which limits block_indices too, to the first of a row. To
            choose blocks, its largest entry is read on the host.
        block_size: tokens of a block.
        window_size: keys that a query reads in the window branch, its own included; 0 leaves the branch out.
        scale: factor of the logits of all branches, default K ** -0.5.
        cu_seqlens: int32 or int64 `[N + 1]`, borders of packed sequences, or a pair of them, for queries and keys.
        backend: 'auto', 'triton', 'flex' (the three attentions; choice and sum are eager) or 'eager'.

    Returns:
        `[B, T, HQ, V]` in the dtype of q, differentiable in q, k, v and the gates.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_backend(backend)
    check_qkv(q, k, v)
    check_positive(block_size=block_size)
    check_not_negative(window_size=window_size)
    for name, gate in (('g_cmp', g_cmp), ('g_slc', g_slc), ('g_swa', g_swa)):
        _check_gate(name, gate, q)
    if window_size > 0 and g_swa is None:
        raise ValueError(f'g_swa is None, but must be given where window_size is {window_size}')
    if block_indices is not None:
        check_block_indices(block_indices, q, k)
    elif g_cmp is None:
        raise ValueError('block_indices is None, but must be given where g_cmp is None')
    _check_counts(block_counts, q, k.shape[2] if block_indices is None else block_indices.shape[2])
    counts = block_counts if isinstance(block_counts, Tensor) else None
    num_selected = 0 if block_indices is not None else _enough(block_counts)
    cu_seqlens_q, cu_seqlens_k = _borders(cu_seqlens)
    make_sequences(q, k.shape[1], None, None, cu_seqlens_q, cu_seqlens_k)  # checks the borders
    where: dict[str, Any] = {'scale': scale, 'cu_seqlens': cu_seqlens_q, 'cu_seqlens_k': cu_seqlens_k}
    eager_in_flex = 'eager' if backend == 'flex' else backend

    out_compressed = out_window = None
    if g_cmp is not None:
        k_cmp, v_cmp = (
            _block_means(t, block_size, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k) for t in (k, v)
        )
        seqlen_k = k.shape[1] if cu_seqlens is None else None
        out_compressed, lse = compressed_attention(
            q, k_cmp, v_cmp, block_size=block_size, stride=block_size, seqlen_k=seqlen_k, backend=backend, **where
        )
        if block_indices is None:
            block_indices = select_blocks(
                q,
                k_cmp,
                lse,
                compress_block_size=block_size,
                compress_stride=block_size,
                selection_block_size=block_size,
                num_selected=num_selected,
                block_counts=counts,
                seqlen_k=seqlen_k,
                backend=eager_in_flex,
                **FORCED,
                **where,
            )
            counts = None  # they are in the choice
    assert block_indices is not None
    out_selected, _ = selected_attention(
        q, k, v, block_indices, block_size=block_size, block_counts=counts, backend=backend, **where
    )
    if window_size > 0:
        out_window, _ = window_attention(q, k, v, window_size=(window_size - 1, 0), backend=backend, **where)
    elif g_cmp is None and g_slc is None:
        return out_selected
    g_slc = q.new_ones(q.shape[:3]) if g_slc is None else g_slc
    nothing = out_selected.new_zeros(()).expand_as(out_selected)
    branches = [
        (gate if out is not None and gate is not None else torch.zeros_like(g_slc), nothing if out is None else out)
        for gate, out in ((g_cmp, out_compressed), (g_slc, out_selected), (g_swa, out_window))
    ]
    gates, outs = zip(*branches, strict=True)
    return gated_sum(torch.stack(gates, -1), *outs, backend=eager_in_flex)


def _block_means(tokens: Tensor, block_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """Means `[B, C, H, D]` of the complete blocks of tokens `[B, S, H, D]`; packed: C is S // block_size, of which the
    last are meaningless.
    """
    num_blocks = tokens.shape[1] // block_size
    if cu_seqlens is None or num_blocks == 0:
        return tokens[:, : num_blocks * block_size].unflatten(1, (num_blocks, block_size)).mean(2)
    starts = packed_block_starts(cu_seqlens, tokens.shape[1], block_size, block_size)
    token = starts[:, None] + torch.arange(block_size, device=tokens.device)
    return tokens[:, token].mean(2)


def _borders(cu_seqlens: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """The borders of the queries, and those of the keys where they are others."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens, None
    match cu_seqlens:
        case [Tensor() as cu_seqlens_q, Tensor() as cu_seqlens_k]:
            return cu_seqlens_q, cu_seqlens_k
    raise ValueError(f'cu_seqlens is {cu_seqlens!r}, but must be a tensor or a pair of tensors')


def _check_counts(block_counts: Tensor | int, q: Tensor, choosers: int) -> None:
    if not isinstance(block_counts, Tensor):
        check_not_negative(block_counts=block_counts)
        return
    expected = (*q.shape[:2], choosers)
    if block_counts.dtype not in INT_DTYPES:
        raise ValueError(f'block_counts has dtype {block_counts.dtype}, but must be int32 or int64')
    if block_counts.shape != expected:
        raise ValueError(f'block_counts has shape {tuple(block_counts.shape)}, but must have {expected} (B, T, H)')
    if block_counts.device != q.device:
        raise ValueError(f'block_counts is on {block_counts.device}, but q is on {q.device}')


def _enough(block_counts: Tensor | int) -> int:
    """How many blocks are enough for every query; a power of two for a tensor, as kernels are made for each number."""
    if not isinstance(block_counts, Tensor):
        return block_counts
    if block_counts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            'block_counts is a tensor while a CUDA graph is captured, but its largest entry is read on the host to '
            'choose blocks: give an int, or block_indices'
        )
    largest = int(block_counts.max()) if block_counts.numel() else 0
    return 1 << (largest - 1).bit_length() if largest > 0 else 0


def _check_gate(name: str, gate: Tensor | None, q: Tensor) -> None:
    if gate is None:
        return
    expected = tuple(q.shape[:3])
    if gate.shape != expected:
        raise ValueError(f'{name} has shape {tuple(gate.shape)}, but must have {expected} (B, T, HQ)')
    if not gate.is_floating_point():
        raise ValueError(f'{name} has dtype {gate.dtype}, but must be a floating dtype')
    if gate.device != q.device:
        raise ValueError(f'{name} is on {gate.device}, but q is on {q.device}')
