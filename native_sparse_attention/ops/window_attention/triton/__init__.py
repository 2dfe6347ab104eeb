"""Window attention with the kernels of interval attention: a query reads the keys t - left ... t + right."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.ops._triton.interval.op import interval_attention
from native_sparse_attention.ops._triton.support import MAX_TOKENS


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    left: int,
    right: int,
    scale: float,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    # What reaches beyond any token is unbounded, and sums of positions fit into int32.
    bounds = [None if side < 0 or side >= MAX_TOKENS else side for side in (left, right)]
    reach = None if bounds[1] is None else -bounds[1]
    return interval_attention(q, k, v, None, sequences, bounds[0], reach, scale, modifiers=modifiers, gate=gate)
