"""Exact attention over the most recent tokens; with an unbounded window it is dense attention."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, without_gate
from native_sparse_attention.core.checks import (
    check_optional_gate,
    check_qkv,
    check_window,
    logit_scale,
    make_sequences,
)
from native_sparse_attention.core.modifier_checks import make_modifiers
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.ops._triton import support


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
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> tuple[Tensor, Tensor]:
    """Attention of the query at position t over the keys t - left ... t + right.

    A logit is scale * q . k, softcap makes it softcap * tanh(logit / softcap), and then bias is added. A key is read
    where the window, segment_ids, mask, attn_mask all allow it and bias is not -inf. What is None is off, and every
    feature goes with every other one.

    Args:
        q: `[B, T, HQ, D]`. k: `[B, S, H, D]`. v: `[B, S, H, DV]`. Packed: B = 1.
        window_size: (left, right), keys before and after the query's own; -1 means unbounded. Causal: right is 0 (-1 is
            taken for 0).
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`) or None: queries end where the keys end.
        seqlens_k: int32 or int64 `[B]`, how many keys of a row are real.
        causal: no query reads a later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens, cu_seqlens_k: int32 or int64 `[N + 1]` borders of packed queries and keys; queries that they do not
            cover give 0.
        segment_ids: int32 or int64 below 2 ** 31, `[B, T]` where T = S, or a pair `[B, T]`, `[B, S]`: a query reads
            keys of its own id. Those of an id below 0 read nothing and are not read.
        mask: bool `[B, S]`, True for a real key.
        bias: `[B or 1, HQ or 1, T, S]` in the dtype of q or float32, by index of query and key, where packed too.
            Differentiable; its gradient has its shape. -inf: not read. By Triton, gradients of rows whose biases are
            all below about -1e7 are wrong: their log-sum-exp has no digits left for the weights.
        attn_mask: bool in such a shape, True where a query may read.
        softcap: above 0, from 1e-30 to 1e30.
        sinks: `[HQ]` or `[HQ, M]`, any floating dtype: logits that take part in the softmax of every query and in its
            log-sum-exp, and carry no value (StreamingLLM, arXiv 2309.17453; gpt-oss). Differentiable.
        dropout_p: in [0, 1), how probably a weight is dropped after the softmax; the others are divided by
            1 - dropout_p. The log-sum-exp knows nothing of it.
        dropout_seed: an int, or int64 `[1]` beside q. With one seed and p the same weights are dropped in every call,
            on every backend: by Philox, of the indices of row, head, query and key. None: a seed of torch's generator.
        gate: `[B, T, HQ]`, any floating dtype but float64: the factor by which `gated_sum(gate_in_attention=True)`
            multiplies the output. The output is returned without it, and its incoming gradient must be that of
            gate * output; the log-sum-exp has no gradient. With float16 inputs, products of gates and weights below
            6e-5 lose bits. Triton only.
        backend: 'auto', 'triton', 'flex' or 'eager'.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q and its log-sum-exp `[B, HQ, T]` (float32; float64 for float64
        inputs), both differentiable. Rows that see nothing give 0 and -inf, or the log-sum-exp of the sinks.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_qkv(q, k, v)
    left, right = check_window(window_size, causal)
    sequences = make_sequences(q, k.shape[1], q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    scale = logit_scale(q, scale)
    modifiers = make_modifiers(q, k, segment_ids, mask, bias, attn_mask, softcap, sinks, dropout_p, dropout_seed)
    check_optional_gate(gate, q)
    arguments = (q, k, v, sequences, left, right, scale, modifiers)
    match backend_of(q, k, v, modifiers=modifiers, gate=gate, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.window_attention import triton

            return triton.window_attention(*arguments, gate)
        case 'flex':
            from native_sparse_attention.ops.window_attention import flex

            return flex.window_attention(*arguments)
        case _:
            from native_sparse_attention.ops.window_attention import eager

            return eager.window_attention(*arguments)


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> BackendChoice:
    """The backend that would serve these inputs."""
    from native_sparse_attention.ops import _flex

    candidates = {
        'triton': partial(support.unsupported, q, k, v),
        'flex': without_gate(gate, partial(_flex.passed_over, backend, q, k, v, modifiers=modifiers)),
        'eager': without_gate(gate),
    }
    return choose_backend('window_attention', backend, q.device, candidates)
