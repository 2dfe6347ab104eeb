"""Experimental attention layers of `benchmarks.learning`, as subclasses of those of the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.gate import GATE_START, make_output_gate
from native_sparse_attention.nn.rotary import rotate
from native_sparse_attention.ops import window_attention


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()[..., None]


class WithOutputGate(SparseAttention):
    """A sigmoid gate per query head on the whole output, like `DenseAttention(output_gate=True)`."""

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.output_gate = make_output_gate(dim, heads)

    def _project(self, x: Tensor) -> Any:
        self._gate = _sigmoid(self.output_gate(self.norm(x)))  # `_combine` reads it in the same forward
        return super()._project(x)

    def _combine(self, out: Tensor) -> Tensor:
        gate, self._gate = self._gate, self._gate.detach()  # the autograd graph of a step must not outlive it
        return super()._combine((out * gate).to(out.dtype))


class WithWindow(SparseAttention):
    """The output of the layer plus a window branch with a softmax and a gate of its own; without a cache."""

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.window_gate = make_output_gate(dim, heads)
        nn.init.constant_(self.window_gate.bias, GATE_START[0])

    def _project(self, x: Tensor) -> Any:
        self._gate = _sigmoid(self.window_gate(self.norm(x)))
        return super()._project(x)

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        k, v, size = tensors[0], tensors[1], self.sliding_window_size - 1
        out, gate = super()._nsa(q, *tensors, **settings), self._gate
        self._gate = gate.detach()  # for the probes; the autograd graph of a step must not outlive it
        places = {name: settings[name] for name in ('q_offset', 'seqlens_k', 'cu_seqlens', 'backend')}
        window, _ = window_attention(q, k, v, window_size=(size, 0), causal=True, softcap=self.softcap, **places)
        return out + (window * gate).to(out.dtype)


class DetachedScores(SparseAttention):
    """Block scores whose gradient reaches the network of compressed keys alone, not queries and keys."""

    def _compress(
        self, new: Any, cu_seqlens: Tensor | None, trains_scores: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return super()._compress(new._replace(raw_k=new.raw_k.detach()), cu_seqlens, trains_scores)

    def _nsa(self, q: Tensor, *tensors: Any, **settings: Any) -> Tensor:
        return super()._nsa(q, *tensors, **{**settings, 'q_cmp': settings['q_cmp'].detach()})


class DetachedScoresWithWindow(WithWindow, DetachedScores):
    """Detached block scores, and a gated window beside the merged softmax."""


class QKNorm(SparseAttention):
    """RMSNorm of queries and keys per head, before rotary; every branch reads them."""

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.q_norm, self.k_norm = nn.RMSNorm(dim_head), nn.RMSNorm(dim_head)

    def _project(self, x: Tensor) -> Any:
        new = super()._project(x)
        q, k = self.q_norm(new.q).to(new.q.dtype), self.k_norm(new.k).to(new.k.dtype)
        return new._replace(q=q, k=k, raw_k=k)


class DenseQKNorm(DenseAttention):
    """RMSNorm of queries and keys per head, before rotary."""

    def __init__(self, dim: int, dim_head: int, heads: int, **settings: Any) -> None:
        super().__init__(dim, dim_head, heads, **settings)
        self.q_norm, self.k_norm = nn.RMSNorm(dim_head), nn.RMSNorm(dim_head)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.to_qkv(x).split(self._split_sizes, dim=-1)
        q, k, v = (
            t.unflatten(-1, (-1, size))
            for t, size in ((q, self.dim_head), (k, self.dim_head), (v, self.dim_value_head))
        )
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if self.rotary is not None:
            q, k = rotate(self.rotary.tables(positions), 'auto', q, k)
        return q, k, v
