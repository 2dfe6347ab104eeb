"""Exact attention over the most recent tokens; with an unbounded window it is dense attention."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.ops._checks import check_qkv, logit_scale, make_sequences
from native_sparse_attention.ops._triton import support
from native_sparse_attention.ops.backend import BackendChoice, choose_backend, serves


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: tuple[int, int],
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str = 'auto',
) -> tuple[Tensor, Tensor]:
    """Attention of the query at position t over the keys t - left ... t + right.

    Args:
        q: `[B, T, HQ, D]`. k: `[B, S, H, D]`. v: `[B, S, H, DV]`. Packed: B = 1.
        window_size: (left, right), keys before and after the query's own; -1 means unbounded. Causal: right is 0 (-1 is
            taken for 0).
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`) or None: queries end where the keys end.
        seqlens_k: int32 `[B]`, how many keys of a row are real.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens, cu_seqlens_k: int32 `[N + 1]` borders of packed queries and keys; queries that they do not cover
            give 0.
        backend: 'auto', 'triton', 'flex' or 'eager'.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q and its log-sum-exp `[B, HQ, T]` (float32; float64 for float64
        inputs), both differentiable. Rows that see nothing give 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_qkv(q, k, v)
    left, right = check_window(window_size, causal)
    sequences = make_sequences(q, k.shape[1], q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    scale = logit_scale(q, scale)
    arguments = (q, k, v, sequences, left, right, scale)
    match backend_of(q, k, v, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.window_attention import triton

            return triton.window_attention(*arguments)
        case 'flex':
            from native_sparse_attention.ops.window_attention import flex

            return flex.window_attention(*arguments)
        case _:
            from native_sparse_attention.ops.window_attention import eager

            return eager.window_attention(*arguments)


def backend_of(q: Tensor, k: Tensor, v: Tensor, *, backend: str = 'auto') -> BackendChoice:
    """The backend that would serve these inputs."""
    from native_sparse_attention.ops import _flex

    candidates = {
        'triton': partial(support.unsupported, q, k, v),
        'flex': partial(_flex.passed_over, backend, q, k, v),
        'eager': serves,
    }
    return choose_backend('window_attention', backend, q.device, candidates)


def check_window(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """The window as the backends take it: right is 0 where causal."""
    if len(window_size) != 2 or not all(isinstance(side, int) and side >= -1 for side in window_size):
        raise ValueError(f'window_size is {window_size}, but must be (left, right), integers of at least -1')
    left, right = window_size
    if causal and right > 0:
        raise ValueError(f'window_size is {window_size}, but right must be 0 (or -1) where causal is set')
    return left, 0 if causal else right
