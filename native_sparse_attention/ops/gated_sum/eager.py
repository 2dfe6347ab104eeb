"""The gated sum in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.ops._eager import compute_dtype


def gated_sum(gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor) -> Tensor:
    dtype = compute_dtype(out_compressed.dtype)
    branches = (out_compressed, out_selected, out_window)
    gate_of = gates.to(dtype).unbind(-1)
    weighted = [gate[..., None] * branch.to(dtype) for gate, branch in zip(gate_of, branches, strict=True)]
    return (weighted[0] + weighted[1] + weighted[2]).to(out_compressed.dtype)
