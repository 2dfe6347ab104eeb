"""Segment ids of the sparse branches: runs of equal ids are sequences, converted to `cu_seqlens`."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.checks import INT_DTYPES, check_device


def cu_seqlens_of(segment_ids: Tensor, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the boundaries of the runs of equal ids, found on the host: on a GPU this waits for the ids.

    segment_ids: int32 or int64 `[1, T]` on the device of q `[1, T, HQ, D]`; ids below 0 are padding, in runs of their
    own. Returns `cu_seqlens`, int32 `[N + 1]`, and the padding mask, bool `[1, T]`, or None without padding.
    """
    _check_segment_ids(segment_ids, q)
    ids = segment_ids[0].cpu()
    seqlen = len(ids)
    starts = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
    borders = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), seqlen)]).int()
    padding = segment_ids < 0 if bool((ids < 0).any()) else None
    return borders.to(q.device), padding


def mask_outputs(out: Tensor, lse: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out `[1, T, HQ, DV]` with 0 and lse `[1, HQ, T]` with -inf at padding."""
    if padding is None:
        return out, lse
    return out.masked_fill(padding[:, :, None, None], 0), lse.masked_fill(padding[:, None], -torch.inf)


def _check_segment_ids(segment_ids: Tensor, q: Tensor) -> None:
    batch, seqlen = q.shape[:2]
    if segment_ids.dtype not in INT_DTYPES:
        raise ValueError(f'segment_ids has dtype {segment_ids.dtype}, but must be int32 or int64')
    if batch != 1:
        raise ValueError(f'q has batch size {batch}, but must have 1 where segment_ids is given')
    if segment_ids.shape != (1, seqlen):
        raise ValueError(f'segment_ids has shape {tuple(segment_ids.shape)}, but must have {(1, seqlen)} (1, T)')
    check_device('segment_ids', segment_ids, q)
    if segment_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            'segment_ids is given while a CUDA graph is captured, but must be read on the host: give cu_seqlens instead'
        )
