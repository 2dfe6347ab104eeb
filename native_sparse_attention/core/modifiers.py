"""Modifiers of attention logits and weights beyond scale and position: one record, which every backend takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Modifiers(NamedTuple):
    """Modifiers of an attention; None (0 for dropout_p) is off.

    A logit is scale * q . k; softcap makes it softcap * tanh(logit / softcap); then bias is added; then masked keys are
    removed. sinks take part in the softmax and in its log-sum-exp, and carry no value. Weights are dropped after the
    softmax, so the log-sum-exp does not depend on dropout.

    softcap: above 0. sinks: `[HQ]`, logits, float32 (float64 for float64 inputs). query_segments, key_segments: int32
    `[B, T]` and `[B, S]`, given together: a query reads keys of its own id; ids below 0 read nothing and are not read.
    bias: `[B or 1, HQ or 1, T, S]`, in the dtype of q or float32. attn_mask: bool of such a shape, True where a query
    may read. dropout_p: in [0, 1). dropout_seed: int64 `[1]`, see `native_sparse_attention.core.random`.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    bias: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


OFF = Modifiers()
