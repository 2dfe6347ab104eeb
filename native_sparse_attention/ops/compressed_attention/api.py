"""Attention over compressed keys and values: the coarse view of the whole past (equations 7 and 8 of the paper)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from native_sparse_attention.core.backend import BackendChoice, choose_backend, without_gate
from native_sparse_attention.core.checks import (
    check_block_sizes,
    check_flags,
    check_optional_gate,
    check_qkv,
    check_same_kind,
    check_tensors,
    checked_softcap,
    logit_scale,
    make_compressed_sequences,
)
from native_sparse_attention.core.modifier_checks import reduce_sinks
from native_sparse_attention.core.modifiers import OFF, Modifiers
from native_sparse_attention.core.segments import make_borders, mask_outputs
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
    """Attention of every query over the compressed blocks that are complete at its position, and over memory pairs.

    Compressed block c stands for the tokens [c * stride, c * stride + block_size) and is visible at position t when its
    last token is, c * stride + block_size - 1 <= t; not causal: every block of the sequence is visible.

    Args:
        q: `[B, T, HQ, D]`, before rotary. k_cmp: `[B, C, H, D]`. v_cmp: `[B, C, H, DV]`. Packed: B = 1, the blocks of
            the sequences one after the other, max(0, (length - block_size) // stride + 1) each; what follows the last
            is ignored.
        block_size, stride: tokens of a compressed block, tokens between two block starts.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` of keys and values that every query sees.
        seqlen_k: S, the keys of a row in tokens; default T, with an int offset q_offset + T.
        q_offset: position of the first query, an int, `[B]` (packed: `[N]`) or None: queries end where the keys end.
        seqlens_k: int32 or int64 `[B]`, how many tokens of a row are real.
        causal: a query sees no block with a later token.
        scale: factor of the logits, default D ** -0.5.
        cu_seqlens, cu_seqlens_k: int32 or int64 `[N + 1]` borders in tokens of packed queries and keys; queries that
            they do not cover give 0.
        segment_ids: int32 or int64 `[1, T]`, instead of cu_seqlens: runs of equal ids are packed sequences, those of an
            id below 0 padding. They are read on the host, once a call; where several calls share them, cu_seqlens
            is the faster way.
        softcap: above 0, from 1e-30 to 1e30: a logit becomes softcap * tanh(logit / softcap).
        sinks: `[HQ]` or `[HQ, M]`, any floating dtype: logits that take part in the softmax of every query and in its
            log-sum-exp, and carry no value. Differentiable.
        gate: `[B, T, HQ]`, any floating dtype but float64: the factor by which `gated_sum(gate_in_attention=True)`
            multiplies the output. The output is returned without it, and its incoming gradient must be that of
            gate * output; the log-sum-exp has no gradient. With float16 inputs, products of gates and weights below
            6e-5 lose bits. Triton only.
        backend: 'auto', 'triton', 'flex' or 'eager'.

    Returns:
        The output `[B, T, HQ, DV]` in the dtype of q and its log-sum-exp `[B, HQ, T]` (float32; float64 for float64
        inputs), both differentiable. Rows that see nothing give 0 and -inf, or the log-sum-exp of the sinks; padding
        gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, or an explicit backend that cannot serve the call.
    """
    check_qkv(q, k_cmp, v_cmp, 'k_cmp', 'v_cmp')
    check_flags(causal=causal)
    check_block_sizes(block_size, stride, names=('block_size', 'stride'))
    if mem_kv is not None:
        check_mem_kv(mem_kv, k_cmp.shape[2], k_cmp.shape[3], v_cmp.shape[3])
        check_same_kind(**{'q': q, 'mem_kv[0]': mem_kv[0], 'mem_kv[1]': mem_kv[1]})
    check_optional_gate(gate, q)
    modifiers = Modifiers(softcap=checked_softcap(softcap), sinks=reduce_sinks(sinks, q))
    where = (q_offset, seqlens_k, cu_seqlens, cu_seqlens_k)
    cu_seqlens, padding = make_borders(segment_ids, q, None, seqlen_k, *where)
    sequences = make_compressed_sequences(
        q, k_cmp, block_size, stride, seqlen_k, q_offset, seqlens_k, cu_seqlens, cu_seqlens_k
    )
    scale = logit_scale(q, scale)
    arguments = (q, k_cmp, v_cmp, mem_kv, sequences, block_size, stride, causal, scale, modifiers)
    match backend_of(q, k_cmp, v_cmp, mem_kv=mem_kv, modifiers=modifiers, gate=gate, backend=backend).name:
        case 'triton':
            from native_sparse_attention.ops.compressed_attention import triton

            outputs = triton.compressed_attention(*arguments, gate)
        case 'flex':
            from native_sparse_attention.ops.compressed_attention import flex

            outputs = flex.compressed_attention(*arguments)
        case _:
            from native_sparse_attention.ops.compressed_attention import eager

            outputs = eager.compressed_attention(*arguments)
    return mask_outputs(*outputs, padding)


def backend_of(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    mem_kv: tuple[Tensor, Tensor] | None = None,
    modifiers: Modifiers = OFF,
    gate: Tensor | None = None,
    backend: str = 'auto',
) -> BackendChoice:
    """The backend that would serve these inputs."""
    from native_sparse_attention.ops import _flex

    candidates = {
        'triton': partial(support.unsupported, q, k_cmp, v_cmp),
        'flex': without_gate(
            gate, partial(_flex.passed_over, backend, q, k_cmp, v_cmp, *(mem_kv or ()), modifiers=modifiers)
        ),
        'eager': without_gate(gate),
    }
    return choose_backend('compressed_attention', backend, q.device, candidates)


def check_mem_kv(mem_kv: tuple[Tensor, Tensor], heads: int, head_dim: int, value_dim: int) -> None:
    if not isinstance(mem_kv, tuple | list) or len(mem_kv) != 2:
        raise ValueError(f'mem_kv is a {type(mem_kv).__name__}, but must be a pair of tensors (keys, values)')
    mem_k, mem_v = mem_kv
    check_tensors(**{'mem_kv[0]': mem_k, 'mem_kv[1]': mem_v})
    for name, tensor, dim in (('mem_kv[0]', mem_k, head_dim), ('mem_kv[1]', mem_v, value_dim)):
        if tensor.dim() != 3 or tensor.shape[0] != heads or tensor.shape[2] != dim:
            raise ValueError(f'{name} has shape {tuple(tensor.shape)}, but must have ({heads}, M, {dim})')
    if mem_k.shape[1] != mem_v.shape[1]:
        raise ValueError(f'mem_kv holds {mem_k.shape[1]} keys and {mem_v.shape[1]} values, but must hold pairs')
