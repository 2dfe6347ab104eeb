"""Gradients of k and v: workspace, loop over groups of pairs and ranges of tokens, launches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import InverseIndex, group_pairs, num_block_slots
from native_sparse_attention.ops._triton.launch import exceeds_int32, head_block, launch, row_block, settings_of
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.arguments import Arguments, Tile, sizes_of, strides_of
from native_sparse_attention.ops.selected_attention.triton.dkv.kernels import (
    DkvTensors,
    Gates,
    PartialSums,
    combine_kernel,
    dkv_kernel,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import (
    BlockToQuery,
    make_block_to_query,
    split_evenly,
)

# Rows (entries times heads) and entries that one program adds to the gradients of a block, by bytes per element; some
# blocks have many more. Float32 sums are shorter, and so more exact.
CHUNK_ROWS = {2: 8192, 4: 512}
CHUNK_ENTRIES = 2048
# Keys per program that adds partial sums: few, since it waits for memory.
COMBINED_KEYS = 8
# Bytes of partial sums and of the entries of their CSR index.
WORKSPACE = 2**28


Stored = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class QueryGradients(Protocol):
    """Computation of dq that shares the CSR index with dk and dv.

    max_tokens, max_pairs: bounds per call. fused: whether the kernel for dk and dv stores partial dq. stored: its
    tensors for what dq takes, from `prepare` to `finish`: dlogits, dq, dq_units and inverse_units of `DkvTensors`.
    """

    max_tokens: int
    max_pairs: int
    fused: bool

    @property
    def stored(self) -> Stored: ...

    def prepare(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Run before dk and dv, which need delta."""
        ...

    def finish(self, csr: BlockToQuery, pairs: range, tokens: range) -> None:
        """Run after dk and dv, when the gradients of the logits are stored."""
        ...


def differentiate_keys(
    arguments: Arguments,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    queries: QueryGradients | None = None,
    index: InverseIndex | None = None,
    gates: Gates | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv, computed for one group of pairs (batch row, KV head) after the other.

    Where `queries` has no room for all tokens at once, one range of tokens follows the other. lse, delta: float32
    `[B, HQ, T]`, of equal strides. index: inverse index of all pairs and tokens, if known. gates: if dout lacks the
    gate. grad_dtype: of dk and dv, default that of k.
    """
    q, k, v, block_indices, block_scale, layout, _, _, scale, softcap = arguments
    seqlen, kv_heads = q.shape[1], k.shape[2]
    # The kernels do not visit keys outside all sequences.
    allocate = torch.empty if layout.cu_seqlens_k is None else torch.zeros
    dk, dv = (allocate(t.shape, dtype=grad_dtype or t.dtype, device=t.device) for t in (k, v))
    if dk.numel() + dv.numel() == 0:
        return dk, dv
    sizes = sizes_of(arguments)
    group, repeats, num_selected, block_size, causal, head_dim, value_dim = sizes
    num_slots = num_block_slots(layout, block_size)
    ranges = split_evenly(seqlen, max(seqlen, 1) if queries is None else queries.max_tokens) or [range(0)]
    max_entries = max(1, len(ranges[0])) * repeats * num_selected
    bytes_of_partial = 4 * block_size * (head_dim + value_dim)
    max_chunk = min(CHUNK_ROWS[q.element_size()] // group, CHUNK_ENTRIES)
    # Sums over several ranges take half of the workspace.
    workspace = WORKSPACE if len(ranges) == 1 else WORKSPACE // 2
    chunk, num_partials = choose_chunk(max_entries, max_chunk, bytes_of_partial, workspace)
    max_pairs = max(1, WORKSPACE // max(1, num_partials * bytes_of_partial + 4 * max_entries))
    if queries is not None:
        max_pairs = min(max_pairs, queries.max_pairs)
    fused = queries is not None and queries.fused
    block_m, block_n, num_warps, num_stages = settings_of(settings.FUSED if fused else settings.DKV, q, v)
    block_n = row_block(block_size) if fused else min(block_n, row_block(block_size))
    tiles = -(-block_size // block_n)
    gate = None if gates is None else gates.gate
    int64_offsets = exceeds_int32(q, dout, lse, block_scale, gate)
    tile = Tile(block_m, block_n, head_block(head_dim), head_block(value_dim), int64_offsets, chunk=chunk)
    groups = group_pairs(block_indices, kv_heads, num_slots, max_pairs)
    shape = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal}
    rows = len(groups[0]) * num_partials
    partials = PartialSums(
        q.new_empty(rows, block_size, head_dim, dtype=torch.float32),
        q.new_empty(rows, block_size, value_dim, dtype=torch.float32),
        num_partials,
    )
    for pairs in groups:
        sums = (dk, dv) if len(ranges) == 1 else tuple(_allocate_sum(t) for t in (dk, dv))
        for tokens in ranges:
            known = index if len(ranges) == 1 else None
            csr = make_block_to_query(block_indices, layout, pairs, tokens, **shape, chunk=chunk, index=known)
            if queries is not None:
                queries.prepare(csr, pairs, tokens)
            stored = (None,) * 4 if queries is None else queries.stored
            outs = {'dk': sums[0], 'dv': sums[1]}
            strides = strides_of(q=q, k=k, v=v, factors=block_scale, lse=lse, dout=dout, gate=gate, **outs)
            launch(
                dkv_kernel,
                (len(pairs) * csr.num_programs * tiles,),
                DkvTensors(q, k, v, block_scale, lse, delta, dout, gates, *sums, *stored),
                *(partials, strides, layout, csr, scale, softcap),
                ACCUMULATE=len(ranges) > 1,
                sizes=sizes,
                tile=tile,
                num_warps=num_warps,
                num_stages=num_stages,
                device=q.device,
            )
            if num_partials:
                launch(
                    combine_kernel,
                    (len(pairs) * num_slots * -(-block_size // COMBINED_KEYS),),
                    *(*sums, partials, strides.dk, strides.dv, layout, csr),
                    ACCUMULATE=len(ranges) > 1,
                    sizes=sizes,
                    tile=tile._replace(block_n=COMBINED_KEYS),
                    num_warps=4,
                    device=q.device,
                )
            if queries is not None:
                queries.finish(csr, pairs, tokens)
            del csr  # before the next one is built
        if len(ranges) > 1:
            _store_sums(sums, (dk, dv), *divmod(pairs.start, kv_heads))
        del sums  # before the next ones are allocated
    return dk, dv


def fold_gate(lse: Tensor, gate: Tensor | None) -> tuple[Tensor, Gates | None]:
    """Return the log-sum-exp that makes weights gate * p, and the `Gates` that dk and dv need beside it."""
    return (lse, None) if gate is None else (lse - gate.float().log().transpose(1, 2), Gates(gate, lse))


def _allocate_sum(grad: Tensor) -> Tensor:
    """Return float32 zeros `[S, D]` for one pair, expanded to the shape of `grad`."""
    zeros = grad.new_zeros(grad.shape[1], grad.shape[3], dtype=torch.float32)
    return zeros[None, :, None].expand(grad.shape)


def _store_sums(sums: tuple[Tensor, ...], grads: tuple[Tensor, ...], row: int, kv_head: int) -> None:
    for total, grad in zip(sums, grads, strict=True):
        grad[row, :, kv_head] = total[0, :, 0]


def choose_chunk(num_entries: int, chunk: int, bytes_of_partial: int, workspace: int) -> tuple[int, int]:
    """Return the entries per chunk and a bound on the partial sums of a pair, which fit into the workspace.

    They depend on lengths and heads but not on the batch, so that a row's gradient does not depend on other rows.
    """
    chunk = 1 << (max(1, chunk).bit_length() - 1)
    while num_entries > chunk and 2 * num_entries // chunk * bytes_of_partial > workspace:
        chunk *= 2
    return chunk, 2 * num_entries // chunk if num_entries > chunk else 0
