"""Triton backend of compressed attention: interval attention over the blocks that end at or before a query."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.ops._triton.interval.op import interval_attention


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sequences: Sequences,
    block_size: int,
    stride: int,
    causal: bool,
    scale: float,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    reach = block_size - 1 if causal else None
    settings = (sequences, None, reach, scale, block_size, stride, modifiers, gate)
    return interval_attention(q, k_cmp, v_cmp, mem_kv, *settings)
