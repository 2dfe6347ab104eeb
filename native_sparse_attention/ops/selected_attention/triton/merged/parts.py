"""Two disjoint sets of keys in one softmax: each set is a part with an output and a log-sum-exp of its own.

The weight of a part in the combination acts like a gate on its output; in the backward pass each part also receives the
gradient of its log-sum-exp. The first part is a window or memory pairs, the second one selected blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import head_block, launch_rows
from native_sparse_attention.ops._triton.varlen import last_dim_contiguous
from native_sparse_attention.ops.selected_attention.triton.merged.combine import combine_kernel, split_kernel

# Output `[B, T, HQ, DV]` and log-sum-exp `[B, HQ, T]`, both float32.
Part = tuple[Tensor, Tensor]


def combine(q: Tensor, first: Part, second: Part, save_difference: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and log-sum-exp of both parts, and the difference of their outputs `[B, T, HQ, DV]` with its units
    `[B, HQ, T]`, both empty unless save_difference.

    The gradients of the log-sum-exps need more bits of the difference than bfloat16 has.
    """
    (out_first, lse_first), (out_second, lse_second) = first, second
    out, lse = q.new_empty(out_first.shape), torch.empty_like(lse_first)
    difference, units = allocate_difference(q, out.shape, lse, save_difference)
    launch_rows(
        combine_kernel,
        out,
        *(out_first, out_second, lse_first, lse_second, out, lse),
        *((difference, units) if save_difference else (None, None)),
        block_dv=head_block(out.shape[3]),
    )
    return out, lse, difference, units


def split(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, lses: list[Tensor], difference: Tensor, units: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Return dout with a contiguous last dimension and, of each part, the output, the weight `[B, T, HQ]` and the
    gradient of the log-sum-exp before this weight. lses: log-sum-exps of the parts.
    """
    (dout,) = last_dim_contiguous(dout)
    outs = [out.new_empty(out.shape) for _ in range(2)]
    weights = [lse.new_empty(out.shape[:3]) for _ in range(2)]
    dlses = [torch.empty_like(lse) for _ in range(2)]
    strides = (dout.stride(), None if dlse is None else dlse.stride())
    rows = (out, difference, units, dout, *lses, lse, dlse, *outs, *weights, *dlses)
    launch_rows(split_kernel, out, *rows, *strides, block_dv=head_block(out.shape[3]))
    return dout, outs, weights, dlses


def join_deltas(
    deltas: tuple[Tensor, Tensor], dlses: list[Tensor], lse: Tensor, lses: list[Tensor], dlse: Tensor | None
) -> Tensor:
    """Return the sum of p * dp over all keys, minus dlse, `[B, HQ, T]`.

    deltas: of each part the sum over its own keys, minus its gradient of the log-sum-exp.
    """
    shares = ((t - lse).exp().masked_fill(t == -torch.inf, 0) for t in lses)
    first, second = ((delta + of_part) * share for delta, of_part, share in zip(deltas, dlses, shares, strict=True))
    return first + second if dlse is None else first + second - dlse


def allocate_difference(q: Tensor, shape: torch.Size, lse: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    """Allocate the difference of the outputs and its units, both empty if it is not needed."""
    dtype = torch.float16 if q.element_size() == 2 else torch.float32
    return q.new_empty(shape if needed else 0, dtype=dtype), lse.new_empty(lse.shape if needed else 0)


def add_gradients(grad: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """Add two float32 gradients of a tensor and round the sum to its dtype, in one pass."""
    return torch.add(grad, other, out=like.new_empty(grad.shape))
