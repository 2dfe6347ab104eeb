"""The gated sum in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.ops._eager import compute_dtype


def gated_sum(gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor) -> Tensor:
    dtype = compute_dtype(out_compressed.dtype)
    branches = (out_compressed, out_selected, out_window)
    gates = gates.to(dtype)
    # Not unbound: inductor of PyTorch 2.13 takes the memory of a sigmoid for its gradient while views of it, which the
    # graph keeps for the backward, are still to be read.
    weighted = [gates[..., place, None] * branch.to(dtype) for place, branch in enumerate(branches)]
    return (weighted[0] + weighted[1] + weighted[2]).to(out_compressed.dtype)
