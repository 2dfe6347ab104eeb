"""Choice of regions and attention within them, composed of the existing ops with their Triton kernels."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.call import Call, Regions, SelectionRules
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._eager import cap, without_autocast
from native_sparse_attention.ops.block_selection import api as block_selection
from native_sparse_attention.ops.compressed_attention import api as compressed_attention
from native_sparse_attention.ops.compressed_regions.regions import RegionRules, make_region_keys, region_extents
from native_sparse_attention.ops.selected_attention import api as selected_attention


@torch.no_grad()
def select_regions(
    q: Tensor, k_cmp: Tensor, sizes: tuple[int, int], call: Call, rules: RegionRules, *, backend: str
) -> Tensor:
    """Return what the eager function of this name returns, by `select_blocks`. Causal only.

    With lengths of C * d tokens and positions that are l - d tokens earlier, a complete region is a block of m * d
    tokens that starts at r * m * d, compressed without overlap: its score as a selection block is its own weight. With
    num_recent = d - 1 the own block is the region of the newest compressed block that may be visible.
    """
    if not call.causal:
        raise ValueError('causal is False, but regions are chosen by select_blocks for causal queries alone')
    block_size, stride = sizes
    extents = region_extents(rules.size, *sizes)
    keys = make_region_keys(k_cmp, call.sequences, rules.size, *sizes)
    call = call._replace(sequences=_count_strides(call.sequences, k_cmp.shape[1], block_size, stride))
    of_region = (extents[1], extents[1])
    # The log-sum-exp alone is used.
    _, lse = compressed_attention.attend(
        q, keys, keys[..., :16], None, of_region, call, None, gate=None, backend=backend
    )
    selection = SelectionRules(rules.num_regions, 1, 2, stride - 1, rules.share_group)
    return block_selection.select(q, keys, lse, (*of_region, extents[1]), call, selection, backend)


def attend_to_regions(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int],
    call: Call,
    regions: Regions,
    *,
    backend: str,
    design: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the memory pairs and to the visible compressed blocks of the regions that each query reads.

    Selected attention over the compressed keys and values, with regions as its blocks; the memory pairs are a second
    attention, merged by the log-sum-exp.

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp, v_cmp: `[B, C, H, D]` and `[B, C, H, DV]`.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` of keys and values that every query sees, or None.
        sizes: (l, d) of the compressed blocks.
        design: of the Triton kernels of selected attention, as in `selected_attention`.

    Returns:
        The output `[B, T, HQ, DV]` and its log-sum-exp `[B, HQ, T]`, both differentiable.
    """
    of_blocks = call._replace(sequences=call.sequences.of_compressed(k_cmp.shape[1], *sizes))
    tensors = (q, k_cmp, v_cmp, regions.indices, None, regions.size, of_blocks)
    out, lse = selected_attention.attend(*tensors, gate=None, backend=backend, design=design, compress=sizes)
    if mem_kv is None or mem_kv[0].shape[1] == 0:
        return out, lse
    covered = call.sequences.layout().covered
    return _merge_memory(q, mem_kv, call, covered, out, lse)


def _count_strides(sequences: Sequences, num_compressed: int, block_size: int, stride: int) -> Sequences:
    """Return sequences of stride tokens per compressed block, with queries l - d tokens earlier."""
    of_blocks = sequences.of_compressed(num_compressed, block_size, stride)
    offset = of_blocks.q_offset
    assert offset is not None
    seqlens_k, cu_seqlens_k = (None if t is None else t * stride for t in (of_blocks.seqlens_k, of_blocks.cu_seqlens_k))
    return of_blocks._replace(
        seqlen_k=num_compressed * stride,
        q_offset=offset - (block_size - stride),
        seqlens_k=seqlens_k,
        cu_seqlens_k=cu_seqlens_k,
    )


def _merge_memory(
    q: Tensor, mem_kv: tuple[Tensor, Tensor], call: Call, covered: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Add memory pairs to the softmax of an attention with output `[B, T, HQ, DV]` and log-sum-exp `[B, HQ, T]`."""
    mem_k, mem_v = (t.to(lse.dtype) for t in mem_kv)
    queries = rearrange(q, 'b t (h g) d -> b t h g d', h=mem_k.shape[0]).to(lse.dtype)
    with without_autocast(q):
        logits = cap(torch.einsum('bthgd,hmd->bhgtm', queries, mem_k) * call.scale, call.softcap)
        logits = rearrange(logits, 'b h g t m -> b (h g) t m')
        # One softmax over the memory keys and, as one more key, everything that the query has read.
        total = torch.cat((logits, lse[..., None]), -1).logsumexp(-1)
        weights = (logits - total[..., None]).exp().unflatten(1, (mem_k.shape[0], -1))
        of_memory = torch.einsum('bhgtm,hmd->bthgd', weights, mem_v)
    kept = (lse - total).exp().transpose(1, 2)[..., None]
    merged = of_memory.flatten(2, 3) + kept * out.to(lse.dtype)
    return (
        merged.masked_fill(~covered[..., None, None], 0).to(out.dtype),
        total.masked_fill(~covered[:, None], -torch.inf),
    )
