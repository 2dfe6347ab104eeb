"""Divergence of the block scores from a mass of the blocks: the differentiable part of `losses.block_score_loss`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.core.backend import Candidates, serves
from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import QueryLayout
from native_sparse_attention.ops._triton import support


def block_divergence(
    q_cmp: Tensor,
    k_cmp: Tensor,
    mass: Tensor,
    rows: Tensor,
    layouts: tuple[QueryLayout, QueryLayout],
    compress: tuple[int, int],
    rules: MassRules,
    call: Call,
    backend: str,
) -> Tensor:
    """Return the mean of KL(mass || scores) over rows with two candidates or more (`losses.block_score_loss`), with
    checked arguments on a resolved backend.

    Args:
        q_cmp: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp: `[B, C, H, D]` compressed keys.
        mass: `[B, R, HI, blocks]` of the drawn queries, of every block outside the window; without a gradient.
        rows: int64 `[B, R]`, the drawn queries, ascending, none twice.
        layouts: of the drawn queries, with extents in tokens and in compressed blocks.
        compress: (l, d) of the compressed blocks.
        rules: l', window and share_group.
        call: settings of the logits.
        backend: 'triton' or 'eager'.

    Returns:
        A scalar, float32 (float64 for float64 inputs), with gradients for q_cmp and k_cmp.
    """
    match backend:
        case 'triton':
            from native_sparse_attention.ops.block_divergence import triton as ops
        case _:
            from native_sparse_attention.ops.block_divergence import eager as ops
    return ops.block_divergence(q_cmp, k_cmp, mass.detach(), rows, layouts, compress, rules, call)


def candidates(q_cmp: Tensor, k_cmp: Tensor) -> Candidates:
    """Return the candidates for these inputs."""
    return {'triton': partial(support.unsupported, q_cmp, k_cmp, name='q_cmp'), 'eager': serves}
