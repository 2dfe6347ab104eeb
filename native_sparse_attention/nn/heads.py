"""Norms and rotary embedding of queries and keys, in one kernel where nothing else happens in a call of the norms."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from native_sparse_attention.core.plain import is_plain, plain_weight
from native_sparse_attention.nn.rotary import backend_of_op, rotate, rotated_and_plain
from native_sparse_attention.ops.rotary import norm_rotary
from native_sparse_attention.ops.rotary.api import Tables, is_fused


class HeadNorm(nn.RMSNorm):
    """RMSNorm of queries or keys `[B, T, heads, D]` over the features of a head, with the weight in their dtype.

    PyTorch has no fused kernel for a float32 weight beside bfloat16 inputs, as autocast leaves them. eps is that of
    Qwen3 and OLMo 2; the default of `nn.RMSNorm` depends on the dtype of the input.
    """

    def __init__(self, dim_head: int) -> None:
        super().__init__(dim_head, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# Norms of queries and keys, or None without norms.
Norms = tuple[nn.Module | None, nn.Module | None]


class FusedNorm(NamedTuple):
    """A norm as an argument of `norm_rotary`."""

    weight: Tensor
    eps: float


class Projected(NamedTuple):
    """Tensors of new tokens before rotary, `[B, T, heads, head size]`, and gates `[B, T, HQ, 3, 2 or 1]` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw_k: Tensor
    raw_v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None
    gates: Tensor | None

    def normalised(self, norms: Norms) -> Projected:
        """Return them with normalised queries and keys."""
        q_norm, k_norm = norms
        if q_norm is None and k_norm is None:
            return self
        raw_k = normalised(k_norm, self.raw_k)
        k = raw_k if self.k is self.raw_k else normalised(k_norm, self.k)
        k_window = None if self.k_window is None else normalised(k_norm, self.k_window)
        return self._replace(q=normalised(q_norm, self.q), k=k, raw_k=raw_k, k_window=k_window)


class BranchHeads:
    """Queries and keys as the branches of `SparseAttention` read them.

    Where the norms are fused, keys are computed here, once. Queries, and keys without fused norms, are computed by each
    call of a method, as recomputation in the backward pass needs.

    Args:
        new: the projected tensors, before the norms.
        norms: of queries and keys.
        tables: cosines and sines, or None without rotary embedding.
        layout: of the rotary embedding.
        backend: of the layer.
        merges: whether one attention reads the rotated tensors, not two.
        compresses: whether something reads keys without rotary embedding.
        recomputes: whether `queries` is called again in the backward pass.

    Attributes:
        new: `new` with normalised keys in `raw_k`; with normalised queries and keys where norms are not fused.
    """

    def __init__(
        self,
        new: Projected,
        norms: Norms,
        tables: Tables | None,
        layout: str,
        backend: str,
        *,
        merges: bool,
        compresses: bool,
        recomputes: bool,
    ) -> None:
        self.tables, self.layout, self.backend, self.num_rotated = tables, layout, backend, 1 if merges else 2
        fused = fused_norms(norms, new.q, new.k, tables, backend)
        self._q_norm: FusedNorm | None = None
        self._keys: tuple[Tensor, Tensor | None] | None = None
        if fused is None:
            self.new = new.normalised(norms)
            return
        q_norm, k_norm = fused
        # Copied, because parameters may have other values when queries are recomputed.
        self._q_norm = q_norm._replace(weight=q_norm.weight.to(q_norm.weight.dtype, copy=recomputes))
        self.new, self._keys = self._fused_keys(new, k_norm, int(compresses))

    def queries(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return queries of the selected (or merged) branch, of the window branch, and without rotary embedding."""
        q, *q_window, q_cmp = self._read(self.new.q, self._q_norm, self.num_rotated, 1)
        return q, q_window[0] if q_window else None, q_cmp

    def keys(self) -> tuple[Tensor, Tensor | None]:
        """Return keys of the selected (or merged) and of the window branch."""
        if self._keys is not None:
            return self._keys
        k, k_window = self.new.k, self.new.k_window
        if k_window is None and self.num_rotated == 2:
            k, k_window = rotated_and_plain(self.tables, self.backend, k, 2, layout=self.layout)
            return k, k_window
        k, k_window = rotate(self.tables, self.backend, k, k_window, layout=self.layout)
        return k, k_window

    def _fused_keys(
        self, new: Projected, norm: FusedNorm, num_raw: int
    ) -> tuple[Projected, tuple[Tensor, Tensor | None]]:
        if new.k_window is None:
            k, *others = self._read(new.k, norm, self.num_rotated, num_raw)
            k_window = others[0] if self.num_rotated == 2 else None
            return new._replace(raw_k=others[-1] if num_raw else new.raw_k), (k, k_window)
        (k,), (k_window,) = (self._read(t, norm, 1, 0) for t in (new.k, new.k_window))
        (raw_k,) = self._read(new.raw_k, norm, 0, 1) if num_raw else (new.raw_k,)
        return new._replace(raw_k=raw_k), (k, k_window)

    def _read(self, x: Tensor, norm: FusedNorm | None, num_rotated: int, num_plain: int) -> tuple[Tensor, ...]:
        if norm is None:
            return rotated_and_plain(self.tables, self.backend, x, num_rotated, num_plain, self.layout)
        settings = {'layout': self.layout, 'backend': self.backend}
        return norm_rotary(x, norm.weight, num_plain, num_rotated, self.tables, eps=norm.eps, **settings)


def normalised(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Return q or k `[B, T, heads, D]` after its norm in its own dtype, or itself without a norm."""
    return x if norm is None else norm(x).to(x.dtype)


def normalised_and_rotated(
    norms: Norms, tables: Tables | None, layout: str, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q and k after their norms and rotary embedding, if there are any."""
    fused = fused_norms(norms, q, k, tables, 'auto')
    if fused is None:
        q, k = rotate(tables, 'auto', *map(normalised, norms, (q, k)), layout=layout)
        return q, k
    settings = {'layout': layout, 'backend': 'auto'}
    (q,), (k,) = (
        norm_rotary(t, n.weight, 0, 1, tables, eps=n.eps, **settings) for t, n in zip((q, k), fused, strict=True)
    )
    return q, k


def fused_norms(
    norms: Norms, q: Tensor, k: Tensor, tables: Tables | None, backend: str
) -> tuple[FusedNorm, FusedNorm] | None:
    """Return the norms if they are plain and `norm_rotary` has kernels for them on the backend of a layer, else None.

    A norm that is not plain, which a hook or a replaced weight makes it, must be called as a module.
    """
    backend = backend_of_op(tables, backend)
    fused = [_fused_norm(norm, x, tables, backend) for norm, x in zip(norms, (q, k), strict=True)]
    return None if fused[0] is None or fused[1] is None else (fused[0], fused[1])


def _fused_norm(norm: nn.Module | None, x: Tensor, tables: Tables | None, backend: str) -> FusedNorm | None:
    if norm is None or not is_plain(norm, HeadNorm):
        return None
    weight, eps = plain_weight(norm), cast(HeadNorm, norm).eps
    if weight is None or eps is None or not is_fused(x, weight, tables, backend):
        return None
    return FusedNorm(weight, eps)
