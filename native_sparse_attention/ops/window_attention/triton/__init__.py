"""Window attention with the kernels of interval attention: a query reads the keys t - left ... t + right."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.geometry import Sequences
from native_sparse_attention.ops._triton.interval.op import interval_attention


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    return interval_attention(
        q, k, v, None, sequences, None if left < 0 else left, None if right < 0 else -right, scale
    )
