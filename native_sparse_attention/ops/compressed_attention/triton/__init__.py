"""Triton backend of compressed attention: interval attention over the blocks that end at or before a query."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.modifiers import Modifiers
from native_sparse_attention.ops._triton.interval.op import interval_attention


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int],
    call: Call,
    sinks: Tensor | None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (block_size, stride), (sequences, causal, scale, softcap) = sizes, call
    reach = block_size - 1 if causal else None
    settings = (sequences, None, reach, scale, block_size, stride, Modifiers(softcap, sinks), gate)
    return interval_attention(q, k_cmp, v_cmp, mem_kv, *settings)
