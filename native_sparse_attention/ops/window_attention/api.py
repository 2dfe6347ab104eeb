"""Window attention: exact attention to the most recent tokens. With an unbounded window it is dense attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from native_sparse_attention.core.backend import Candidates, resolver, without_gate
from native_sparse_attention.core.call import Call, make_call
from native_sparse_attention.core.checks import check_optional_gate, check_qkv, check_window
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
    """Attend from the query at position t to the keys t - left ... t + right.

    A logit is scale * q . k. softcap makes it softcap * tanh(logit / softcap), and then bias is added. A key is read
    where the window, segment_ids, mask and attn_mask all allow it and bias is not -inf. All features combine. With
    window_size=(-1, 0) this is dense causal attention.

    Args:
        q: `[B, T, HQ, D]` queries. Packed: B is 1.
        k: `[B, S, H, D]` keys.
        v: `[B, S, H, DV]` values.
        window_size: (left, right), keys before and after the query's own; -1 is unbounded. Causal: right is 0 (or -1).
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`), or None: queries end where the keys end.
        seqlens_k: int32 or int64 `[B]`, number of real keys of each row.
        causal: queries read no later key.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 or int64 `[N + 1]`, boundaries of packed queries. Queries behind the last give 0.
        cu_seqlens_k: the same for the keys, where they differ.
        segment_ids: int32 or int64 below 2 ** 31, `[B, T]` where T = S, or a pair `[B, T]`, `[B, S]`: a query reads
            keys of its own id. Tokens of negative ids read nothing and are not read.
        mask: bool `[B, S]`, True at real keys.
        bias: `[B or 1, HQ or 1, T, S]` in the dtype of q or float32, by index of query and key, in packed rows too.
            Differentiable. -inf: the key is not read. With Triton, gradients of rows whose biases are all below about
            -1e7 are wrong: their log-sum-exp has no digits left for the weights.
        attn_mask: bool of such a shape, True where a query may read a key.
        softcap: from 1e-30 to 1e30.
        sinks: as in `compressed_attention` (StreamingLLM, arXiv 2309.17453; gpt-oss).
        dropout_p: in [0, 1), probability with which a weight is dropped after the softmax. The others are divided by
            the probability to be kept. The log-sum-exp ignores it.
        dropout_seed: an int, or int64 `[1]` on the device of q. One seed and probability drop the same weights in every
            call on every backend: Philox of the indices of row, head, query and key. None: a seed from torch's
            generator.
        gate: as in `compressed_attention`.
        backend: 'auto', 'triton', 'flex' or 'eager'.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q, and its log-sum-exp `[B, HQ, T]` in float32 (float64 for float64
        inputs), both differentiable. Rows that read nothing give 0 and -inf, or the log-sum-exp of the sinks.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    check_qkv(q, k, v)
    call, _ = make_call(q, k, None, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k, causal, scale)
    window = check_window(window_size, causal)
    modifiers = make_modifiers(q, k, segment_ids, mask, bias, attn_mask, softcap, sinks, dropout_p, dropout_seed)
    check_optional_gate(gate, q)
    choice = backend_of(q, k, v, modifiers=modifiers, gate=gate, backend=backend)
    return attend(q, k, v, window, call, modifiers, gate=gate, backend=choice.name)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[int, int],
    call: Call,
    modifiers: Modifiers,
    *,
    gate: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run `window_attention` with checked arguments on a resolved backend."""
    arguments: Any = (q, k, v, window, call, modifiers)
    match backend:
        case 'triton':
            from native_sparse_attention.ops.window_attention import triton as ops

            arguments = (*arguments, gate)
        case 'flex':
            from native_sparse_attention.ops.window_attention import flex as ops
        case _:
            from native_sparse_attention.ops.window_attention import eager as ops
    return ops.window_attention(*arguments)


def candidates(
    q: Tensor, k: Tensor, v: Tensor, *, modifiers: Modifiers = OFF, gate: Tensor | None = None, backend: str = 'auto'
) -> Candidates:
    from native_sparse_attention.ops import _flex

    return {
        'triton': partial(support.unsupported, q, k, v),
        'flex': without_gate(gate, partial(_flex.passed_over, backend, q, k, v, modifiers=modifiers)),
        'eager': without_gate(gate),
    }


backend_of = resolver('window_attention', candidates)
