"""`block_mass` as a registered PyTorch op: log-sum-exp of every block, then the mass of the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import QueryLayout, num_selection_blocks
from native_sparse_attention.ops._triton.launch import exceeds_int32, head_block, launch, settings_of
from native_sparse_attention.ops._triton.registered import register_op
from native_sparse_attention.ops._triton.varlen import last_dim_contiguous
from native_sparse_attention.ops.block_mass.triton import settings
from native_sparse_attention.ops.block_mass.triton.kernels import Blocks, Sizes, block_lse_kernel, mass_kernel

# Keys of a program. A constant, so that the bits do not depend on the number of queries.
CHUNK_KEYS = 1024
# Bytes of the log-sum-exp of blocks; more queries take several passes.
WORKSPACE = 2**28
# Blocks, queries and chunks of keys of a tile of the second kernel.
BLOCK_J, BLOCK_T, BLOCK_C = 64, 32, 16


def block_mass(q: Tensor, k: Tensor, tokens: QueryLayout, rules: MassRules, call: Call) -> Tensor:
    left, right = rules.window_size or (None, None)
    layout = (tokens.position, tokens.key_start, tokens.key_len)
    return _block_mass(q, k, *layout, rules.block_size, left, right, rules.share_group, *call[1:])


@register_op(
    'block_mass',
    'Tensor q, Tensor k, Tensor position, Tensor key_start, Tensor key_len, SymInt block_size, SymInt? left, '
    'SymInt? right, bool share_group, bool causal, float scale, float? softcap',
)
def _block_mass(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """position, key_start, key_len: `[B, R]`, as in `QueryLayout`. left, right: of the window; None without one."""
    layout, (block_size, *_) = rest[:3], rest[3:]
    batch, num_queries, heads, _ = q.shape
    out = _empty(q, k, *rest)
    if out.numel() == 0:
        return out
    q, k = last_dim_contiguous(q, k)
    step = max(1, WORKSPACE // (4 * batch * heads * num_selection_blocks(k.shape[1], block_size)))
    for start in range(0, num_queries, step):
        part = slice(start, start + step)
        _add_queries(q[:, part], k, tuple(t[:, part].contiguous() for t in layout), out[:, part], *rest[3:])
    return out


def _add_queries(
    q: Tensor,
    k: Tensor,
    layout: tuple[Tensor, ...],
    out: Tensor,
    block_size: int,
    left: int | None,
    right: int | None,
    share_group: bool,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the mass of queries `[B, R, HQ, D]` to out `[B, R, HI, blocks]`."""
    batch, num_queries, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    group, (index_heads, num_blocks) = heads // kv_heads, out.shape[2:]
    block_size = min(block_size, seqlen_k)
    block_m, block_n, num_warps, num_stages = settings_of(settings.BLOCK_LSE, q)
    block_l = min(block_n, 1 << (block_size - 1).bit_length())
    per_tile = block_n // block_l
    chunk_blocks = max(1, CHUNK_KEYS // (per_tile * block_size)) * per_tile
    num_chunks = -(-num_blocks // chunk_blocks)
    block_lse = q.new_empty(batch, heads, num_blocks, num_queries, dtype=torch.float32)
    lse = q.new_empty(batch, heads, num_chunks, num_queries, dtype=torch.float32)
    sizes = Sizes(num_queries, seqlen_k, num_blocks, num_chunks, left, right)
    tiles = -(-num_queries * group // block_m)
    launch(
        block_lse_kernel,
        (batch * num_chunks * tiles, kv_heads),
        *(q, k, *layout, block_lse, lse, q.stride(), k.stride(), sizes, scale, softcap),
        blocks=Blocks(block_size, block_l, per_tile, -(-block_size // block_l), chunk_blocks),
        CAUSAL=causal,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_D=head_block(head_dim),
        INT64_OFFSETS=exceeds_int32(k),
        num_warps=num_warps,
        num_stages=num_stages,
        device=q.device,
    )
    launch(
        mass_kernel,
        (batch * -(-num_queries // BLOCK_T) * -(-num_blocks // BLOCK_J), index_heads),
        *(block_lse, lse, *layout, out, out.stride(), sizes),
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        GROUP=group if share_group else 1,
        BLOCK_J=BLOCK_J,
        BLOCK_T=BLOCK_T,
        BLOCK_C=BLOCK_C,
        num_warps=4,
        device=q.device,
    )


@_block_mass.register_fake
def _empty(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    block_size, _, _, share_group = rest[3:7]
    index_heads = k.shape[2] if share_group else q.shape[2]
    count = num_selection_blocks(k.shape[1], block_size)
    return q.new_empty(*q.shape[:2], index_heads, count, dtype=torch.float32)
