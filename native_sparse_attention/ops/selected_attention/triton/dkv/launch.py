"""Gradients of k and v."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.inverse_index import InverseIndex, group_pairs, num_block_slots
from native_sparse_attention.ops._triton.launch import head_block, is_wide, launch, row_block, settings_of
from native_sparse_attention.ops._triton.varlen import SequenceLayout
from native_sparse_attention.ops.selected_attention.triton import settings
from native_sparse_attention.ops.selected_attention.triton.dkv.kernels import (
    Gates,
    Partials,
    combine_kernel,
    dkv_kernel,
)
from native_sparse_attention.ops.selected_attention.triton.index.block_to_query import Lists, make_lists, split_evenly

# Pairs of a query and a head, and entries, that one program adds to the gradients of a block, by bytes of an element;
# the lists of some blocks have many more. In float32 the sums are shorter, and so more exact.
CHUNK_ROWS = {2: 8192, 4: 512}
CHUNK_ENTRIES = 2048
# Keys of a program that adds partial sums: few, since it waits for memory.
COMBINED_KEYS = 8
# Bytes that partial sums may take, with the entries of their lists.
WORKSPACE = 2**28


class Members(Protocol):
    """What is done about the members of lists, besides, while the lists are there.

    most_tokens, most_pairs: how many they are for at once. dlogits: room for the gradients of the logits (dlogits.py),
    or None.
    """

    most_tokens: int
    most_pairs: int

    @property
    def dlogits(self) -> Tensor | None: ...

    def prepare(self, lists: Lists, pairs: range, tokens: range) -> None:
        """Before the gradients of k and v, which need delta."""
        ...

    def finish(self, lists: Lists, pairs: range, tokens: range) -> None:
        """Behind them, when the gradients of the logits are there."""
        ...


def differentiate_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    place: SequenceLayout,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    members: Members | None = None,
    index: InverseIndex | None = None,
    gates: Gates | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v, for one group of pairs (a row of the batch and a kv head) after the other; where `members`
    has no room for all tokens at once, for some tokens after the other. lse, delta: `[B, HQ, T]`, of the same strides.
    index: of all pairs and tokens, where it is known. gates: where dout is not multiplied by them yet. grad_dtype: of
    dk and dv, default that of k.
    """
    seqlen, heads, head_dim = q.shape[1:]
    seqlen_k, kv_heads, value_dim = v.shape[1:]
    index_heads, num_selected = block_indices.shape[2:]
    # The kernels do not visit what no sequence covers.
    allocate = torch.empty if place.cu_seqlens_k is None else torch.zeros
    dk, dv = (allocate(t.shape, dtype=grad_dtype or t.dtype, device=t.device) for t in (k, v))
    if dk.numel() + dv.numel() == 0:
        return dk, dv
    block_size = min(block_size, seqlen_k)
    repeats, group = index_heads // kv_heads, heads // index_heads
    num_slots = num_block_slots(place, block_size)
    ranges = split_evenly(seqlen, max(seqlen, 1) if members is None else members.most_tokens) or [range(0)]
    most_entries = max(1, len(ranges[0])) * repeats * num_selected
    bytes_of_partial = 4 * block_size * (head_dim + value_dim)
    most_in_chunk = min(CHUNK_ROWS[q.element_size()] // group, CHUNK_ENTRIES)
    # Beside sums of all keys partial sums have half of it.
    workspace = WORKSPACE if len(ranges) == 1 else WORKSPACE // 2
    chunk, num_partials = split_lists(most_entries, most_in_chunk, bytes_of_partial, workspace)
    # Of a pair, its entries with them.
    most = max(1, WORKSPACE // max(1, num_partials * bytes_of_partial + 4 * most_entries))
    if members is not None:
        most = min(most, members.most_pairs)
    block_m, block_n, num_warps, num_stages = settings_of(settings.DKV, q, v)
    block_n = min(block_n, row_block(block_size))
    tiles = -(-block_size // block_n)
    meta: dict[str, Any] = {
        'BLOCK_SIZE': block_size,
        'CHUNK': chunk,
        'HEAD_DIM': head_dim,
        'VALUE_DIM': value_dim,
        'BLOCK_N': block_n,
        'BLOCK_D': head_block(head_dim),
        'BLOCK_DV': head_block(value_dim),
        'device': q.device,
    }
    combined: dict[str, Any] = {**meta, 'BLOCK_N': COMBINED_KEYS}
    groups = group_pairs(block_indices, kv_heads, num_slots, most)
    shape = {'kv_heads': kv_heads, 'block_size': block_size, 'causal': causal}
    rows = len(groups[0]) * num_partials
    partials = Partials(
        q.new_empty(rows, block_size, head_dim, dtype=torch.float32),
        q.new_empty(rows, block_size, value_dim, dtype=torch.float32),
        num_partials,
    )
    for pairs in groups:
        sums = (dk, dv) if len(ranges) == 1 else tuple(_sum_of_pair(t) for t in (dk, dv))
        for tokens in ranges:
            known = index if len(ranges) == 1 else None
            lists = make_lists(block_indices, place, pairs, tokens, **shape, chunk=chunk, index=known)
            if members is not None:
                members.prepare(lists, pairs, tokens)
            strides = [t.stride() for t in sums]
            launch(
                dkv_kernel,
                (len(pairs) * lists.num_programs * tiles,),
                *(q, k, v, block_scale, lse, delta, dout, gates, *sums),
                *(None if members is None else members.dlogits, partials),
                *(q.stride(), k.stride(), v.stride(), None if block_scale is None else block_scale.stride()),
                *(lse.stride(), dout.stride(), None if gates is None else gates.gate.stride()),
                *(*strides, place, lists, scale, softcap),
                GROUP=group,
                REPEATS=repeats,
                NUM_SELECTED=num_selected,
                CAUSAL=causal,
                INT64_OFFSETS=is_wide(q, dout, lse, block_scale, None if gates is None else gates.gate),
                ADDS=len(ranges) > 1,
                BLOCK_M=block_m,
                num_warps=num_warps,
                num_stages=num_stages,
                **meta,
            )
            if num_partials:
                launch(
                    combine_kernel,
                    (len(pairs) * num_slots * -(-block_size // COMBINED_KEYS),),
                    *(*sums, partials, *strides, place, lists),
                    ADDS=len(ranges) > 1,
                    num_warps=4,
                    **combined,
                )
            if members is not None:
                members.finish(lists, pairs, tokens)
            del lists  # before those of the next group are made
        if len(ranges) > 1:
            _store_sums(sums, (dk, dv), *divmod(pairs.start, kv_heads))
        del sums  # before those of the next pair are made
    return dk, dv


def fold_gate(lse: Tensor, gate: Tensor | None) -> tuple[Tensor, Gates | None]:
    """The log-sum-exp that leads to gate * p, and what the gradients of k and v take beside it."""
    return (lse, None) if gate is None else (lse - gate.float().log().transpose(1, 2), Gates(gate, lse))


def _sum_of_pair(grad: Tensor) -> Tensor:
    """Float32 zeros `[S, D]` for one pair, which every row of the batch and kv head leads to."""
    zeros = grad.new_zeros(grad.shape[1], grad.shape[3], dtype=torch.float32)
    return zeros[None, :, None].expand(grad.shape)


def _store_sums(sums: tuple[Tensor, ...], grads: tuple[Tensor, ...], row: int, kv_head: int) -> None:
    for total, grad in zip(sums, grads, strict=True):
        grad[row, :, kv_head] = total[0, :, 0]


def split_lists(num_entries: int, chunk: int, bytes_of_partial: int, workspace: int) -> tuple[int, int]:
    """How many entries a chunk of a list has, and a bound of the partial sums of a pair, which fit into workspace.

    It depends on lengths and heads, not on the batch, so that a row's gradient does not depend on its neighbours.
    """
    chunk = 1 << (max(1, chunk).bit_length() - 1)
    while num_entries > chunk and 2 * num_entries // chunk * bytes_of_partial > workspace:
        chunk *= 2
    return chunk, 2 * num_entries // chunk if num_entries > chunk else 0
