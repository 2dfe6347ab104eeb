"""Segment ids of the sparse branches: runs of equal ids are sequences of their own, converted to `cu_seqlens`."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core.checks import INT_DTYPES, check_device, check_tensors


def make_borders(
    segment_ids: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    seqlen_k: int | None,
    q_offset: int | Tensor | None,
    seqlens_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return cu_seqlens, made from segment_ids if given, and the padding mask.

    k `[B, S, H, D]`, or seqlen_k for compressed keys, gives the number of keys.
    """
    if segment_ids is None:
        return cu_seqlens, None
    check_tensors(segment_ids=segment_ids)
    others = {'cu_seqlens': cu_seqlens, 'cu_seqlens_k': cu_seqlens_k, 'seqlens_k': seqlens_k, 'q_offset': q_offset}
    for other, value in others.items():
        if value is not None:
            raise ValueError(f'{other} is given, but cannot be combined with segment_ids')
    seqlen = q.shape[1]
    if k is not None and k.shape[1] != seqlen:
        raise ValueError(f'k has {k.shape[1]} tokens, but must have {seqlen}, as q, where segment_ids is given')
    if seqlen_k is not None and seqlen_k != seqlen:
        raise ValueError(f'seqlen_k is {seqlen_k}, but must be T, {seqlen}, where segment_ids is given')
    return cu_seqlens_of(segment_ids, q)


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


def mask_output(out: Tensor, padding: Tensor | None) -> Tensor:
    """Return out `[1, T, HQ, DV]` with 0 at padding."""
    return out if padding is None else out.masked_fill(padding[:, :, None, None], 0)


def mask_outputs(out: Tensor, lse: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out `[1, T, HQ, DV]` with 0 and lse `[1, HQ, T]` with -inf at padding."""
    if padding is None:
        return out, lse
    return mask_output(out, padding), lse.masked_fill(padding[:, None], -torch.inf)


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
