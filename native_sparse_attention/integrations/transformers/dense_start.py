"""Dense attention of the first queries of each sequence, which `NSAConfig.dense_below` asks for.

below: queries at positions below this one of their own sequence attend densely. settings: arguments of
`window_attention` other than its tensors and their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.checks import make_sequences
from native_sparse_attention.ops import window_attention


def attend_with_dense_start(
    sparse: Callable[[int], Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    below: int,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Mapping[str, Any],
) -> Tensor:
    """Return the output `[B, T, HQ, D]` of whole sequences.

    sparse: sparse attention for the queries from an index on. lengths: int32 `[B]`, real tokens of each row, which
    stand first. cu_seqlens: boundaries of packed sequences.
    """
    if below == 0:
        return sparse(0)
    if cu_seqlens is not None:
        dense, _ = window_attention(*qkv, window_size=(below - 1, 0), cu_seqlens=cu_seqlens, **settings)
        position = make_sequences(qkv[0], qkv[1].shape[1], None, None, cu_seqlens, None).layout().position
        return torch.where((position < below)[..., None, None], dense, sparse(0))
    seqlen = qkv[0].shape[1]
    first = min(below, seqlen)
    lengths = None if lengths is None else lengths.clamp(max=first)
    starts = (t[:, :first] for t in qkv)
    dense, _ = window_attention(*starts, window_size=(-1, 0), q_offset=0, seqlens_k=lengths, **settings)
    return dense if first == seqlen else concatenate((dense, sparse(first)), 1)


def replace_dense_start(
    out: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    below: int,
    offset: Tensor,
    lengths: Tensor,
    settings: Mapping[str, Any],
) -> Tensor:
    """Return the sparse output `[B, T, HQ, D]` of queries at positions offset `[B]` + t, with that of dense attention
    for those below `below`. k and v hold the first `lengths` `[B]` tokens of each row.
    """
    seqlens_k = lengths.clamp(max=qkv[1].shape[1])
    dense, _ = window_attention(*qkv, window_size=(-1, 0), q_offset=offset, seqlens_k=seqlens_k, **settings)
    position = offset[:, None] + torch.arange(out.shape[1], device=out.device)
    return torch.where((position < below)[..., None, None], dense, out)
