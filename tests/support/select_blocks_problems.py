"""Problems of block selection, run by both backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, select_blocks
from native_sparse_attention.testing import lay_out
from tests.support.harness import fence, place
from tests.support.problems import Extents, Heads, make_compressed, make_mem_kv, make_qkv

Sizes = tuple[int, int, int]
Problem = tuple[dict[str, Tensor], dict[str, Any]]
HEADS = Heads(4, 2, 16, 16)
SIZES = (4, 2, 4)


def settings_of(sizes: Sizes, extents: Extents, device: torch.device, **more: Any) -> dict[str, Any]:
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    where = place(extents.where, device)
    return {**dict(zip(names, sizes, strict=True)), 'seqlen_k': extents.seqlen_k, **more, **where}


def make_problem(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = 'contiguous',
    pairs: int = 1,
    **more: Any,
) -> Problem:
    """Return tensors and settings, with NaN in every compressed key that belongs to no sequence and around every
    tensor.
    """
    settings = settings_of(sizes, extents, device, **more)
    q, _, _ = make_qkv(extents, heads)
    k_cmp, v_cmp = make_compressed(extents, heads, *sizes[:2], more=1)
    q, k_cmp, v_cmp = (lay_out(t.to(device, dtype), layout) for t in (q, k_cmp, v_cmp))
    where = {name: value for name, value in settings.items() if name in ('seqlen_k', 'causal', 'scale', *extents.where)}
    mem_kv = place(make_mem_kv(heads, pairs), device, dtype)
    _, lse = compressed_attention(
        q, k_cmp, v_cmp, block_size=sizes[0], stride=sizes[1], mem_kv=mem_kv, **where, backend='eager'
    )
    return {'q': fence(q), 'k_cmp': fence(k_cmp), 'lse': fence(lse)}, settings


def make_counts(extents: Extents, heads: Heads, sizes: Sizes, device: torch.device, **more: Any) -> Problem:
    """Return a problem with weights of 1 or 0: scores are counts in any order of summation, and many of them are equal.

    The stride must be a power of two, since thirds of a token cannot be counted without rounding.
    """
    batch, seqlen = extents.batch, extents.seqlen_q
    feature = torch.randint(0, heads.head_dim, (batch, seqlen, heads.heads))
    q = torch.nn.functional.one_hot(feature, heads.head_dim).float()
    k_cmp, _ = make_compressed(extents, heads, *sizes[:2], more=1)
    k_cmp = torch.where(k_cmp.isnan(), k_cmp, -1000.0 * (torch.rand_like(k_cmp) < 0.6)).float()
    lse = torch.zeros(batch, heads.heads, seqlen)
    tensors = {'q': q, 'k_cmp': k_cmp, 'lse': lse}
    return place(tensors, device), settings_of(sizes, extents, device, scale=1.0, **more)


def choose(problem: Problem, backend: str = 'triton', **selection: Any) -> Tensor:
    tensors, settings = problem
    return select_blocks(**tensors, **settings, **selection, backend=backend)
