"""What the eager ops share: a softmax that knows empty rows, the roundings of half types, and query chunks.

Logits, softmax and log-sum-exp are float32 (float64 for float64 inputs). In half types the normalised weights are
rounded before they meet v, and in the backward pass the gradients of the logits before they meet q and k, as the
kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from native_sparse_attention.core import random as _random
from native_sparse_attention.core.modifiers import Modifiers

# Elements of the largest intermediate tensor of a chunk of queries.
CHUNK_ELEMENTS = 2**24


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def masked_softmax(
    logits: Tensor,
    visible: Tensor,
    dtype: torch.dtype,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights over the last dimension and their log-sum-exp; 0 and -inf in rows where nothing is visible.

    logits, visible: `[..., keys]`; dtype: what weights and gradients of logits are rounded to. softcap, and bias, which
    is added after it: as `Modifiers` says. sinks: `[..., 1]`, further logits, one a row. kept: factors of the weights.
    visible and the last three broadcast. Returns `[..., keys]` and `[...]`.
    """
    logits = _round_gradient(logits, dtype)
    if softcap is not None:
        # What is not read may be no number, which the slope of the cap would carry into gradients of 0.
        logits = cap(logits.where(visible, 0), softcap)
    if bias is not None:
        logits = logits + bias.where(visible, 0)
    logits = logits.masked_fill(~visible, -torch.inf)
    detached = logits.detach()
    row_max = detached.amax(-1, keepdim=True) if logits.shape[-1] else detached.sum(-1, keepdim=True) - torch.inf
    if sinks is not None:
        row_max = row_max.maximum(sinks.detach())
    subtracted = row_max.masked_fill(row_max == -torch.inf, 0)
    exponentials = (logits - subtracted).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - subtracted).exp()
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (row_max + total.log()).squeeze(-1)
    weights = exponentials / total
    return _round_value(weights if kept is None else weights * kept, dtype), lse


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    kept: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries `[B, T, H, G, D]` over the visible ones of keys `[B, S, H, D]` and values `[B, S, H, DV]`.

    visible: `[B, HQ or 1, T, S]`; dtype: of the output. softcap, bias `[B or 1, HQ or 1, T, S]` and sinks `[HQ]`: as
    `Modifiers` says. kept: factors of the weights, `[B, HQ, T, S]`. factor: factors of the logits before the softcap,
    `[B, HQ, T, S]`. Returns `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`. A query, key or value that is not finite
    reaches those who read it, as NaN, and no one else: 0 * NaN is NaN, so such are set to 0 first, and what they reach
    to NaN at last.
    """
    finite_q, finite_k, finite_v = (t.isfinite().all(-1) for t in (q, k, v))
    q, k, v = (torch.where(ok[..., None], t, 0) for ok, t in ((finite_q, q), (finite_k, k), (finite_v, v)))
    groups = q.shape[2:4]
    visible = _by_group(visible, groups)
    if bias is not None:
        bias = _by_group(bias, groups)
        visible = visible & (bias != -torch.inf)
    kept = None if kept is None else _by_group(kept, groups)
    sinks = None if sinks is None else sinks.view(*groups, 1, 1)
    logits = torch.einsum('bthgd,bshd->bhgts', q, k) * scale
    if factor is not None:
        logits = logits * _by_group(factor, groups)
    weights, lse = masked_softmax(logits, visible, dtype, softcap=softcap, bias=bias, sinks=sinks, kept=kept)
    out = torch.einsum('bhgts,bshd->bthgd', weights, v).to(dtype)

    def reads_one_of(marked: Tensor) -> Tensor:
        return torch.einsum('bhgts,bsh->bthg', visible.to(q.dtype), marked.to(q.dtype)) > 0

    # [B, T, H, G]
    nan_logits = reads_one_of(~finite_k) | (~finite_q & rearrange(visible.any(-1), 'b h g t -> b t h g'))
    nan_out = nan_logits | reads_one_of(~finite_v)
    out = out.masked_fill(nan_out[..., None], torch.nan)
    lse = lse.masked_fill(rearrange(nan_logits, 'b t h g -> b h g t'), torch.nan)
    return rearrange(out, 'b t h g d -> b t (h g) d'), rearrange(lse, 'b h g t -> b (h g) t')


def in_query_chunks(
    function: Callable[[int, int], tuple[Tensor, ...]],
    seqlen: int,
    elements_per_query: int,
    dims: tuple[int, ...],
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """`function(start, stop)` for one range of queries after the other, its results joined along `dims`.

    Where the whole would not fit into CHUNK_ELEMENTS, chunks are made so small that each does, and the backward pass
    computes each again, so that memory is that of one chunk.
    """
    largest = max(1, CHUNK_ELEMENTS // max(1, elements_per_query))
    size = min(largest, chunk or largest)
    # A loop over chunks would bind an exported graph to one length.
    if torch.compiler.is_exporting() or size >= seqlen:
        return function(0, seqlen)
    ranges = [(start, min(seqlen, start + size)) for start in range(0, seqlen, size)]
    if torch.is_grad_enabled() and largest < seqlen:
        parts = [checkpoint(function, *r, use_reentrant=False, preserve_rng_state=False) for r in ranges]
    else:
        parts = [function(*r) for r in ranges]
    return tuple(torch.cat(part, dim) for part, dim in zip(zip(*parts, strict=True), dims, strict=True))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast must not turn the float32 products of an op into half ones."""
    device_type = tensor.device.type
    # torch.compile cannot trace the question in every version, and knows no device without autocast.
    if torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def dropout_factors(
    modifiers: Modifiers, batch: int, heads: int, start: int, stop: int, index: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the factors `[B, HQ, T, keys]` of the weights of queries start ... stop under dropout, or None without it.

    index: `[1 or B, keys]`, positions along the key axis.
    """
    seed, dropout_p = modifiers.dropout_seed, modifiers.dropout_p
    if seed is None:
        return None
    row, head, query = (torch.arange(*ends, device=index.device) for ends in ((batch,), (heads,), (start, stop)))
    place = (row[:, None, None, None], head[:, None, None], query[:, None], index[:, None, None])
    return _random.keep(seed, dropout_p, *place).to(dtype) / (1 - dropout_p)


def _by_group(table: Tensor, groups: torch.Size) -> Tensor:
    """`[B, HQ or 1, T, S]` as `[B, H or 1, G or 1, T, S]`."""
    return table.unflatten(1, (1, 1) if table.shape[1] == 1 else groups)


def _round_value(weights: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == weights.dtype:
        return weights
    return weights + (weights.to(dtype).to(weights.dtype) - weights).detach()


def _round_gradient(logits: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == logits.dtype:
        return logits
    # torch.compile traces no class that has a jvp of its own.
    identity = _RoundGradient if torch.compiler.is_compiling() else _RoundGradientInTransforms
    return identity.apply(logits, dtype)


class _RoundGradient(torch.autograd.Function):
    """The identity, with the gradient rounded to `dtype`."""

    @staticmethod
    def forward(logits: Tensor, dtype: torch.dtype) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
        ctx.dtype = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class _RoundGradientInTransforms(_RoundGradient):
    """The same for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)
