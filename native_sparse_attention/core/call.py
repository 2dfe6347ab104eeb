"""Checked settings of a call: one record, made by the public function and taken by every op below it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from native_sparse_attention.core.checks import (
    check_flags,
    checked_softcap,
    logit_scale,
    make_compressed_sequences,
    make_sequences,
)
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.segments import make_borders


class Call(NamedTuple):
    """Settings that the ops of one call share. scale: factor of the logits. softcap: as in `Modifiers`."""

    sequences: Sequences
    causal: bool
    scale: float
    softcap: float | None = None


def make_call(
    q: Tensor,
    k: Tensor,
    segment_ids: Tensor | None,
    q_offset: int | Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None = None,
    *,
    compress: tuple[int, int] | None = None,
    seqlen_k: int | None = None,
) -> tuple[Call, Tensor | None]:
    """Check the arguments and return their record, and the padding of segment_ids: bool `[1, T]`, or None without any.

    compress: (l, d) where k holds compressed keys; seqlen_k is then the number of keys in tokens, or None.
    """
    check_flags(causal=causal)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens, padding = make_borders(segment_ids, q, k if compress is None else None, seqlen_k, *placed)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    if compress is None:
        sequences = make_sequences(q, k.shape[1], *placed)
    else:
        sequences = make_compressed_sequences(q, k, *compress, seqlen_k, *placed)
    return Call(sequences, causal, logit_scale(q, scale), checked_softcap(softcap)), padding
