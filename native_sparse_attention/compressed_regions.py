"""Choice of regions and attention within them, composed of the existing ops with their Triton kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.backend import Candidates, serves
from native_sparse_attention.core.call import Call, Regions, SelectionRules
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops.block_selection import api as block_selection
from native_sparse_attention.ops.compressed_attention import api as compressed_attention
from native_sparse_attention.ops.compressed_regions import eager
from native_sparse_attention.ops.compressed_regions.regions import RegionRules, make_region_keys, region_extents
from native_sparse_attention.ops.selected_attention import api as selected_attention


def candidates(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rules: RegionRules, sizes: tuple[int, int, int], **settings: Any
) -> Candidates:
    """Return the backends of `attend` and of the block selection in its regions. sizes: (l, d, l'); settings: mem_kv
    and modifiers, as of `compressed_attention`.
    """

    def not_by_triton() -> str | None:
        group_size = q.shape[2] // k_cmp.shape[2] if rules.share_group else 1
        choices: dict[str, Any] = {'group_size': group_size, 'num_selected': rules.num_regions}
        for of_op in (
            compressed_attention.candidates(q, k_cmp, v_cmp, **settings),
            block_selection.candidates('select_blocks', q, k_cmp, **choices),
            selected_attention.candidates(q, k_cmp, v_cmp, num_selected=rules.num_regions),
        ):
            if (reason := of_op['triton']()) is not None:
                return reason
        from native_sparse_attention.ops.block_selection.triton.in_regions import unsupported_sizes

        return unsupported_sizes(sizes)

    return {'triton': not_by_triton, 'flex': lambda: 'it has no regions of compressed blocks', 'eager': serves}


def attend(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_kv: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int],
    call: Call,
    sinks: Tensor | None,
    rules: RegionRules,
    *,
    backend: str,
) -> tuple[Tensor, Tensor, Regions]:
    """Return what `attend_to_regions` returns, and the regions, which `select_regions` selects."""
    regions = Regions(select_regions(q, k_cmp, sizes, call, rules, backend=backend), rules.size)
    return *attend_to_regions(q, k_cmp, v_cmp, mem_kv, sizes, call, sinks, regions, backend=backend), regions


@torch.no_grad()
def select_regions(
    q: Tensor, k_cmp: Tensor, sizes: tuple[int, int], call: Call, rules: RegionRules, *, backend: str
) -> Tensor:
    """Return what `eager.select_regions` returns; on 'triton' by `select_by_blocks`."""
    select = eager.select_regions if backend == 'eager' else partial(select_by_blocks, backend=backend)
    return select(q, k_cmp, sizes, call, rules)


@torch.no_grad()
def select_by_blocks(
    q: Tensor, k_cmp: Tensor, sizes: tuple[int, int], call: Call, rules: RegionRules, *, backend: str
) -> Tensor:
    """Select regions by `select_blocks`, causal only.

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
    sinks: Tensor | None,
    regions: Regions,
    *,
    backend: str,
    design: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the memory pairs and to the visible compressed blocks of the regions that each query reads.

    On 'triton' this is selected attention over the compressed keys and values, with regions as its blocks.

    Args:
        q: `[B, T, HQ, D]` queries without rotary embedding.
        k_cmp, v_cmp: `[B, C, H, D]` and `[B, C, H, DV]`.
        mem_kv: a pair `[H, M, D]`, `[H, M, DV]` of keys and values that every query sees, or None.
        sizes: (l, d) of the compressed blocks.
        sinks: `[HQ]` or None.
        design: of the Triton kernels of selected attention, as in `selected_attention`.

    Returns:
        The output `[B, T, HQ, DV]` and its log-sum-exp `[B, HQ, T]`, both differentiable.
    """
    if backend == 'eager':
        from native_sparse_attention.ops.compressed_attention import eager as compressed

        return compressed.compressed_attention(q, k_cmp, v_cmp, mem_kv, sizes, call, sinks, regions)
    of_blocks = call._replace(sequences=call.sequences.of_compressed(k_cmp.shape[1], *sizes))
    if sinks is None and (mem_kv is None or mem_kv[0].shape[1] == 0):
        tensors = (q, k_cmp, v_cmp, regions.indices, None, regions.size, of_blocks)
        return selected_attention.attend(*tensors, gate=None, backend=backend, design=design, compress=sizes)
    from native_sparse_attention.ops.selected_attention.triton import merged

    return merged.attend_with_memory(
        q, k_cmp, v_cmp, regions.indices, mem_kv, sinks, regions.size, of_blocks, sizes, design
    )


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
