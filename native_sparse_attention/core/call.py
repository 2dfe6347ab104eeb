"""Checked settings of a call: one record, made by the public function and taken by every op below it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.segments import cu_seqlens_of


class Call(NamedTuple):
    """Settings that the ops of one call share. scale: factor of the logits. softcap: as in `Modifiers`."""

    sequences: Sequences
    causal: bool
    scale: float
    softcap: float | None = None


class SelectionRules(NamedTuple):
    """Rules of a block selection. num_selected: n; num_recent: as in `select_blocks`; block_counts: how many of the n
    blocks each query reads.
    """

    num_selected: int
    num_init: int
    num_local: int
    num_recent: int
    share_group: bool
    block_counts: Any = None


class MassRules(NamedTuple):
    """Settings of the mass of full attention by block. block_size: l'. window_size: (left, right) or None."""

    block_size: int
    window_size: tuple[int, int] | None
    share_group: bool


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
    checks.check_flags(causal=causal)
    padding = None
    if segment_ids is not None:
        checks.check_tensors(segment_ids=segment_ids)
        others = {'cu_seqlens': cu_seqlens, 'cu_seqlens_k': cu_seqlens_k, 'seqlens_k': seqlens_k, 'q_offset': q_offset}
        for other, value in others.items():
            if value is not None:
                raise ValueError(f'{other} is given, but cannot be combined with segment_ids')
        seqlen = q.shape[1]
        if compress is None and k.shape[1] != seqlen:
            raise ValueError(f'k has {k.shape[1]} tokens, but must have {seqlen}, as q, where segment_ids is given')
        if seqlen_k is not None and seqlen_k != seqlen:
            raise ValueError(f'seqlen_k is {seqlen_k}, but must be T, {seqlen}, where segment_ids is given')
        cu_seqlens, padding = cu_seqlens_of(segment_ids, q)
    placed = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    if compress is None:
        sequences = checks.make_sequences(q, k.shape[1], *placed)
    else:
        sequences = checks.make_compressed_sequences(q, k, *compress, seqlen_k, *placed)
    return Call(sequences, causal, checks.logit_scale(q, scale), checks.checked_softcap(softcap)), padding
