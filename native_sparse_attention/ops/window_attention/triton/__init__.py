"""Window attention with the kernels of interval attention: a query reads the keys t - left ... t + right."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops._triton.interval.op import interval_attention
from native_sparse_attention.ops._triton.support import MAX_TOKENS


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], call: Call, modifiers: Modifiers, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Windows beyond any token are unbounded, and sums of positions fit into int32.
    bounds = [None if side < 0 or side >= MAX_TOKENS else side for side in window]
    reach = None if bounds[1] is None else -bounds[1]
    settings = (call.sequences, bounds[0], reach, call.scale)
    return interval_attention(q, k, v, None, *settings, modifiers=modifiers, gate=gate)
