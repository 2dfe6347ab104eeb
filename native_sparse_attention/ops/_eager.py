"""Shared by the eager ops: masked softmax and attention, rounding of half types, query chunks, drawn rows.

Logits, softmax and log-sum-exp are float32 (float64 for float64 inputs). For half types, as in the kernels, the
normalised weights are rounded before they are multiplied by v, and in the backward pass the gradients of the logits
before they are multiplied by q and k.

Non-finite inputs and gradients propagate as in an attention that computes each query from its visible keys alone: to
the queries and keys that read each other, and to no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
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
    """Return softmax weights over the last dimension and their log-sum-exp.

    Invisible keys have the weight 0 and no gradient, whatever their logits and the gradients of their weights are. A
    row where nothing is visible has the log-sum-exp -inf.

    Args:
        logits, visible: `[..., keys]`.
        dtype: the dtype that weights and gradients of logits are rounded to.
        softcap, bias: as in `Modifiers`; bias is added after the cap.
        sinks: `[..., 1]`, one more logit per row.
        kept: factors of the weights. visible, bias, sinks and kept broadcast.

    Returns:
        `[..., keys]` and `[...]`.
    """
    hidden = ~visible
    logits = _round_gradient(logits, dtype)
    if softcap is not None:
        # An invisible logit may be NaN, and so would be the slope of its cap, which multiplies a gradient of 0.
        logits = cap(logits.masked_fill(hidden, 0), softcap)
    if bias is not None:
        logits = logits + bias.where(visible, 0)
    logits = logits.masked_fill(hidden, -torch.inf)
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
    weights = (exponentials / total).masked_fill(hidden, 0)
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
    """Attention of queries over the visible ones of the keys and values.

    Non-finite elements of q, k, v and of the gradients reach the queries and keys that read each other, in the output
    and in all gradients, and no others.

    Args:
        q: `[B, T, H, G, D]`. k: `[B, S, H, D]`. v: `[B, S, H, DV]`. visible: `[B, HQ or 1, T, S]`.
        dtype: of the output.
        softcap, bias `[B or 1, HQ or 1, T, S]`, sinks `[HQ]`: as in `Modifiers`.
        kept: `[B, HQ, T, S]`, factors of the weights.
        factor: `[B, HQ, T, S]`, factors of the logits before the soft cap.

    Returns:
        `[B, T, HQ, DV]` and the log-sum-exp `[B, HQ, T]`.
    """
    groups = q.shape[2:4]
    visible = _by_group(visible, groups)
    if bias is not None:
        bias = _by_group(bias, groups)
        visible = visible & (bias != -torch.inf)
    kept = None if kept is None else _by_group(kept, groups)
    sinks = None if sinks is None else sinks.view(*groups, 1, 1)
    logits = _apply(_Logits, _LogitsInTransforms, q, k) * scale
    if factor is not None:
        logits = logits.masked_fill(~visible, 0) * _by_group(factor, groups)
    weights, lse = masked_softmax(logits, visible, dtype, softcap=softcap, bias=bias, sinks=sinks, kept=kept)
    out = _apply(_WeightedSum, _WeightedSumInTransforms, weights, v, visible).to(dtype)
    return rearrange(out, 'b t h g d -> b t (h g) d'), rearrange(lse, 'b h g t -> b (h g) t')


def in_query_chunks(
    function: Callable[[int, int], tuple[Tensor, ...]],
    seqlen: int,
    elements_per_query: int,
    dims: tuple[int, ...],
    chunk: int | None = None,
) -> tuple[Tensor, ...]:
    """Call `function(start, stop)` for consecutive ranges of queries and concatenate its results along `dims`.

    Where all queries together exceed CHUNK_ELEMENTS, chunks are small enough that each fits, and the backward pass
    recomputes them one by one, so that the peak memory is that of one chunk.
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


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x `[B, T, ...]` at the rows `[B, R]`. Its gradient is deterministic where no row is taken twice."""
    flat = rows + torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, rows.shape)


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
    return _apply(_RoundGradient, _RoundGradientInTransforms, logits, dtype)


def _apply(function: type[Function], in_transforms: type[Function], *inputs: Any) -> Any:
    """Call an autograd function. in_transforms: its subclass with a jvp, which torch.compile cannot trace."""
    return (function if torch.compiler.is_compiling() else in_transforms).apply(*inputs)


class _RoundGradient(Function):
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
    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.view_as(tangent)


class _Logits(Function):
    """Products `[B, H, G, T, S]` of q `[B, T, H, G, D]` and k `[B, S, H, D]`, NaN where one of them is not finite.

    The backward pass takes non-finite elements of q and k as 0: the gradient of a visible logit that they made is NaN
    already, and that of an invisible one is 0, which times NaN would be NaN.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        logits = torch.einsum('bthgd,bshd->bhgts', q, k)
        finite_q, finite_k = (t.isfinite().all(-1) for t in (q, k))
        finite_q, finite_k = rearrange(finite_q, 'b t h g -> b h g t 1'), rearrange(finite_k, 'b s h -> b h 1 1 s')
        return logits.masked_fill(~(finite_q & finite_k), torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (t.where(t.isfinite(), 0) for t in ctx.saved_tensors)
        return torch.einsum('bhgts,bshd->bthgd', grad, k), torch.einsum('bhgts,bthgd->bshd', grad, q)


class _LogitsInTransforms(_Logits):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent_q: Tensor, tangent_k: Tensor) -> Tensor:
        q, k = ctx.saved_tensors
        return _Logits.forward(tangent_q, k) + _Logits.forward(q, tangent_k)


class _WeightedSum(Function):
    """Sums `[B, T, H, G, DV]` of v `[B, S, H, DV]`, weighted by `[B, H, G, T, S]`.

    A value that is not finite makes the sums of the queries that read it NaN, and a gradient that is not finite the
    gradients of the values that its query reads; visible: `[B, H or 1, G or 1, T, S]`.
    """

    @staticmethod
    def forward(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return _sum_visible('bsh', 'bthg', weights, v, visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, v, visible = ctx.saved_tensors
        # Not finite for invisible keys either, where `masked_softmax` has no gradient.
        grad_weights = torch.einsum('bthgd,bshd->bhgts', grad, v)
        return grad_weights, _sum_visible('bthg', 'bsh', weights, grad, visible), None


class _WeightedSumInTransforms(_WeightedSum):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent_weights: Tensor, tangent_v: Tensor, _: None) -> Tensor:
        weights, v, visible = ctx.saved_tensors
        return _WeightedSum.forward(tangent_weights, v, visible) + _WeightedSum.forward(weights, tangent_v, visible)


def _sum_visible(of_x: str, of_sum: str, weights: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    """Return sums of rows x `[..., D]`, weighted by `[B, H, G, T, S]`; NaN where a visible row is not finite.

    of_x, of_sum: dimensions of x and of the sums, as in einsum, without D.
    """
    finite = x.isfinite().all(-1)
    total = torch.einsum(f'bhgts,{of_x}d->{of_sum}d', weights, x.where(finite[..., None], 0))
    reads_nonfinite = torch.einsum(f'bhgts,{of_x}->{of_sum}', visible.to(x.dtype), (~finite).to(x.dtype)) > 0
    return total.masked_fill(reads_nonfinite[..., None], torch.nan)
