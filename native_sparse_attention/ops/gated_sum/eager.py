"""The gated sum in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.ops._eager import compute_dtype


def gated_sum(gates: Tensor, out_compressed: Tensor, out_selected: Tensor, out_window: Tensor) -> Tensor:
    dtype = compute_dtype(out_compressed.dtype)
    branches = (out_compressed, out_selected, out_window)
    gates = gates.to(dtype)
    # No unbind: inductor of PyTorch 2.13 reuses the memory of a sigmoid for its gradient while saved views of it are
    # still to be read.
    weighted = [gates[..., index, None] * branch.to(dtype) for index, branch in enumerate(branches)]
    return (weighted[0] + weighted[1] + weighted[2]).to(out_compressed.dtype)
