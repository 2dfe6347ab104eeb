"""Compressed attention: queries attend to compressed keys and values (equations 7 and 8 of arXiv 2502.11089)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.backend import Candidates, resolver, without_gate
from native_sparse_attention.core.call import Call, make_call
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.core.segments import mask_outputs
from native_sparse_attention.ops._triton import support


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block_size: int,
    stride: int,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    seqlen_k: int | None = None,
    q_offset: int | Tensor | None = None,
    seqlens_k: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    segment_ids: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> tuple[Tensor, Tensor]:
    """Attend to the complete compressed blocks and to memory pairs (equations 7 and 8 of arXiv 2502.11089).

    Compressed block c covers the tokens [c * stride, c * stride + block_size). It is visible at position t once its
    last token is: c * stride + block_size - 1 <= t. Not causal: every block of the sequence is visible.

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding. Packed: B is 1.
        k_cmp: `[B, C, H, D]` compressed keys. Packed: the blocks of the sequences follow each other, max(0, (length -
            block_size) // stride + 1) each; what follows the last one is ignored.
        v_cmp: `[B, C, H, DV]` compressed values.
        block_size: l, tokens of a compressed block.
        stride: d, tokens between two block starts.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` of keys and values that every query sees.
        seqlen_k: S, number of keys of a row in tokens; default T, with an int offset q_offset + T.
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`), or None: queries end where the keys end.
        seqlens_k: int32 or int64 `[B]`, number of real tokens of each row.
        causal: a query sees no block with a later token.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens: int32 or int64 `[N + 1]`, boundaries of packed queries in tokens. Queries behind the last give 0.
        cu_seqlens_k: the same for the keys, where they differ.
        segment_ids: int32 or int64 `[1, T]`, replaces cu_seqlens, seqlens_k and q_offset: runs of equal ids are
            sequences, negative ids are padding. Read on the host once per call, so cu_seqlens is faster where several
            calls share it; refused under CUDA graph capture.
        softcap: from 1e-30 to 1e30: a logit becomes softcap * tanh(logit / softcap).
        sinks: `[HQ]` or `[HQ, M]`, any floating dtype: logits of keys without values, in the softmax of every query and
            in its log-sum-exp. Differentiable.
        gate: `[B, T, HQ]`, any floating dtype but float64: the factor by which `gated_sum(gate_in_attention=True)`
            multiplies the output. The output is returned without it, and its incoming gradient must be that of the
            product; the log-sum-exp has no gradient. With float16 inputs, products of gates and weights below 6e-5 lose
            bits. Triton only.
        backend: 'auto', 'triton', 'flex' or 'eager'.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q, and its log-sum-exp `[B, HQ, T]` in float32 (float64 for float64
        inputs), both differentiable. Rows that see nothing give 0 and -inf, or the log-sum-exp of the sinks. Padding
        gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or settings do not fit, or an explicit backend does not support the call.
    """
    checks.check_qkv(q, k_cmp, v_cmp, 'k_cmp', 'v_cmp')
    checks.check_block_sizes(block_size, stride, names=('block_size', 'stride'))
    if mem_kv is not None:
        check_memory(mem_kv, q, k_cmp, v_cmp)
    checks.check_optional_gate(gate, q)
    sinks = reduce_sinks(sinks, q)
    placed, sizes = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k), (block_size, stride)
    call, padding = make_call(q, k_cmp, segment_ids, *placed, causal, scale, softcap, compress=sizes, seqlen_k=seqlen_k)
    modifiers = Modifiers(call.softcap, sinks)
    choice = backend_of(q, k_cmp, v_cmp, mem_kv=mem_kv, modifiers=modifiers, gate=gate, backend=backend)
    return mask_outputs(*attend(q, k_cmp, v_cmp, mem_kv, sizes, call, sinks, gate=gate, backend=choice.name), padding)


def attend(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: Any,
    sizes: tuple[int, int],
    call: Call,
    sinks: Tensor | None,
    *,
    gate: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run `compressed_attention` with checked arguments on a resolved backend. sizes: (l, d); sinks: `[HQ]`."""
    arguments: Any = (q, k_cmp, v_cmp, mem_kv, sizes, call, sinks)
    match backend:
        case 'triton':
            from native_sparse_attention.ops.compressed_attention import triton as ops

            arguments = (*arguments, gate)
        case 'flex':
            from native_sparse_attention.ops.compressed_attention import flex as ops
        case _:
            from native_sparse_attention.ops.compressed_attention import eager as ops
    return ops.compressed_attention(*arguments)


def candidates(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    mem_kv: tuple[Tensor, Tensor | None] | None = None,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> Candidates:
    from native_sparse_attention.ops import _flex

    unsupported = partial(_flex.passed_over, backend, q, k_cmp, v_cmp, *(mem_kv or ()), modifiers=modifiers)
    return {
        'triton': partial(support.unsupported, q, k_cmp, v_cmp),
        'flex': without_gate(gate, unsupported),
        'eager': without_gate(gate),
    }


backend_of = resolver('compressed_attention', candidates)


def check_memory(mem_kv: tuple[Tensor, Tensor], q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> None:
    check_mem_kv(mem_kv, k_cmp.shape[2], k_cmp.shape[3], v_cmp.shape[3])
    checks.check_same_kind(**{'q': q, 'mem_kv[0]': mem_kv[0], 'mem_kv[1]': mem_kv[1]})


def check_mem_kv(mem_kv: tuple[Tensor, Tensor], heads: int, head_dim: int, value_dim: int) -> None:
    if not isinstance(mem_kv, tuple | list) or len(mem_kv) != 2:
        raise ValueError(f'mem_kv is a {type(mem_kv).__name__}, but must be a pair of tensors (keys, values)')
    mem_k, mem_v = mem_kv
    checks.check_tensors(**{'mem_kv[0]': mem_k, 'mem_kv[1]': mem_v})
    for name, tensor, dim in (('mem_kv[0]', mem_k, head_dim), ('mem_kv[1]', mem_v, value_dim)):
        if tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[2] != dim:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have ({heads}, M, {dim})')
    if mem_k.shape[1] != mem_v.shape[1]:
        raise ValueError(f'mem_kv holds {mem_k.shape[1]} keys and {mem_v.shape[1]} values, but must hold pairs')
