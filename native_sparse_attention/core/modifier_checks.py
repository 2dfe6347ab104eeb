"""Checks of the modifiers of logits and weights, and their record."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.core import random as _random
from native_sparse_attention.core.checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_device,
    check_tensors,
    checked_softcap,
    is_readable,
)
from native_sparse_attention.core.modifiers import Modifiers

SegmentIds = Tensor | tuple[Tensor, Tensor] | None


def make_modifiers(
    q: Tensor,
    k: Tensor,
    segment_ids: SegmentIds,
    mask: Tensor | None,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
) -> Modifiers:
    """Check the features of `window_attention` and return their record; a seed is drawn if one is
    needed and not given.
    """
    softcap = checked_softcap(softcap)
    sink_logits = reduce_sinks(sinks, q)
    query_segments, key_segments = _make_segments(q, k, segment_ids, mask)
    if bias is not None:
        _check_table('bias', bias, q, k)
        if bias.dtype not in (q.dtype, torch.float32):
            raise ValueError(f'bias has dtype {bias.dtype}, but must have that of q, {q.dtype}, or torch.float32')
    if attn_mask is not None:
        _check_table('attn_mask', attn_mask, q, k)
        if attn_mask.dtype != torch.bool:
            raise ValueError(f'attn_mask has dtype {attn_mask.dtype}, but must be bool; what is added is bias')
    _random.check_dropout(dropout_p, dropout_seed, q)
    seed = _random.as_seed(dropout_seed, q.device) if dropout_p else None
    return Modifiers(softcap, sink_logits, query_segments, key_segments, bias, attn_mask, float(dropout_p), seed)


def reduce_sinks(sinks: Tensor | None, q: Tensor, name: str = 'sinks') -> Tensor | None:
    """Return sinks `[HQ]` or `[HQ, M]` as one logit per head, `[HQ]` in float32 (float64 if q is)."""
    if sinks is None:
        return None
    check_tensors(**{name: sinks})
    heads = q.shape[2]
    if sinks.dim() not in (1, 2) or sinks.shape[0] != heads:
        raise ValueError(f'{name} has shape {tuple(sinks.shape)}, but must have ({heads},) or ({heads}, M)')
    if sinks.dtype not in FLOAT_DTYPES:
        raise ValueError(f'{name} has dtype {sinks.dtype}, but must be float64, float32, bfloat16 or float16')
    check_device(name, sinks, q)
    logits = sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if sinks.dim() == 1:
        return logits
    # If all sinks are -inf, the gradient of logsumexp is NaN.
    empty = (logits == -torch.inf).all(1)
    return logits.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, -torch.inf)


def _make_segments(
    q: Tensor, k: Tensor, segment_ids: SegmentIds, mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return int32 `[B, T]` and `[B, S]`; masked keys have -1."""
    batch, seqlen_q, seqlen_k = *q.shape[:2], k.shape[1]
    query_segments = key_segments = None
    if segment_ids is not None:
        if isinstance(segment_ids, torch.Tensor):
            if seqlen_q != seqlen_k:
                raise ValueError(
                    f'segment_ids is one tensor, but must be a pair where the {seqlen_q} queries and {seqlen_k} keys '
                    'of a row differ in number'
                )
            segment_ids = (segment_ids, segment_ids)
        if not isinstance(segment_ids, tuple | list) or len(segment_ids) != 2:
            kind = type(segment_ids).__name__
            raise ValueError(f'segment_ids is a {kind}, but must be a tensor or a pair, for queries and keys')
        query_ids, key_ids = segment_ids
        for name, ids, length in (('segment_ids', query_ids, seqlen_q), ('segment_ids[1]', key_ids, seqlen_k)):
            check_tensors(**{name: ids})
            if ids.dtype not in INT_DTYPES:
                raise ValueError(f'{name} has dtype {ids.dtype}, but must be int32 or int64')
            if ids.shape != (batch, length):
                raise ValueError(f'{name} has shape {tuple(ids.shape)}, but must have {(batch, length)}')
            check_device(name, ids, q)
            if ids.dtype == torch.int64 and is_readable(ids) and ids.numel() and ids.max() >= 2**31:
                raise ValueError(f'{name} has an id of {int(ids.max())}, but must have ids below 2 ** 31')
        query_segments, key_segments = (ids.clamp(min=-1).int() for ids in segment_ids)
    if mask is not None:
        check_tensors(mask=mask)
        if mask.dtype != torch.bool:
            raise ValueError(f'mask has dtype {mask.dtype}, but must be bool, True for a real key')
        if mask.shape != (batch, seqlen_k):
            raise ValueError(f'mask has shape {tuple(mask.shape)}, but must have {(batch, seqlen_k)} (B, S)')
        check_device('mask', mask, q)
        if query_segments is None or key_segments is None:
            query_segments = torch.zeros(batch, seqlen_q, dtype=torch.int32, device=q.device)
            key_segments = mask.int() - 1
        else:
            key_segments = key_segments.masked_fill(~mask, -1)
    return query_segments, key_segments


def _check_table(name: str, table: Tensor, q: Tensor, k: Tensor) -> None:
    """Check `[B or 1, HQ or 1, T, S]` against q and k."""
    check_tensors(**{name: table})
    batch, seqlen_q, heads, _ = q.shape
    sizes = ((1, batch), (1, heads), (seqlen_q,), (k.shape[1],))
    if table.dim() != 4 or any(size not in allowed for size, allowed in zip(table.shape, sizes, strict=True)):
        raise ValueError(
            f'{name} has shape {tuple(table.shape)}, but must have ({batch} or 1, {heads} or 1, {seqlen_q}, '
            f'{k.shape[1]}) (B, HQ, T, S)'
        )
    check_device(name, table, q)
