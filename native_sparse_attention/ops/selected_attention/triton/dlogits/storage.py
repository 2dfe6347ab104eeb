"""Gradients of logits that the kernel for dk and dv stores, so that dq is a single product with k.

Dq needs what that kernel computes. For a block of 64 keys and 16 heads, the gradients of the logits are 2 KiB, while k
and v are 32 KiB. So the kernel stores them, for as many tokens at a time as the workspace holds, and the kernel for dq
loads them with k alone.

Every entry of a pair (a token and a slot of its row of indices) has a tile `[keys, 16]` for each 16 heads, with the
heads in another order (`find_head`). A thread of an MMA quad holds two neighbouring elements of every 8; in this order
the elements of one thread are adjacent, which avoids a layout conversion through shared memory.
"""

# To pyright a jit function that another calls never returns, and a constant has no fields.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.tiles import store_rows

# Bytes of the gradients of logits that exist at once; of float32 dk and dv over ranges of tokens, with the two numbers
# per query and head; of values in float16; and of the block unions of a batch row.
MAX_BYTES, MAX_BYTES_OF_SUMS, MAX_BYTES_OF_VALUES, MAX_BYTES_OF_UNIONS = 2**29, 2**28 + 2**27, 2**29, 2**26
# Minimum number of tokens, in total and per range.
MIN_TOKENS = 2048
# Minimum ratio of blocks per sequence to selected blocks. With fewer blocks, neighbouring queries read the same blocks
# anyway.
MIN_BLOCK_RATIO = 3
# Supported heads per group, all of which are in one tile of dq.
GROUPS = (16, 32, 64)
# Most indices per row, which the kernel for dq searches; and the largest head size, beyond which sums exceed the
# registers.
MAX_SELECTED, MAX_HEAD = 64, 128


def stores_dlogits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    num_packed: int = 0,
) -> bool:
    """Return whether the backward pass stores gradients of logits. It depends on shapes alone.

    num_packed: number of sequences in `cu_seqlens`.
    """
    seqlen, index_heads, num_selected = block_indices.shape[1:]
    seqlen_k = k.shape[1]
    if q.element_size() != 2 or max(q.shape[3], v.shape[3]) > MAX_HEAD:
        return False
    if block_scale is not None or not 0 < num_selected <= MAX_SELECTED:
        return False
    if index_heads != k.shape[2] or q.shape[2] // index_heads not in GROUPS:
        return False
    if not 16 <= block_size <= seqlen_k or block_size & (block_size - 1):
        return False
    num_blocks = seqlen_k // max(1, num_packed) // block_size
    if num_blocks < MIN_BLOCK_RATIO * num_selected:
        return False
    most = max_tokens(q, k, block_indices, block_size)
    # 12 bytes for each of at most twice as many indices, of all heads where pairs of several rows exist at once.
    bytes_of_unions = 24 * num_selected * index_heads * seqlen if 2 * seqlen <= most else 0
    return (
        min(seqlen, most) >= MIN_TOKENS
        and 4 * seqlen_k * (q.shape[3] + v.shape[3]) + 8 * q.shape[0] * seqlen * q.shape[2] <= MAX_BYTES_OF_SUMS
        and 2 * v.numel() <= MAX_BYTES_OF_VALUES
        and bytes_of_unions <= MAX_BYTES_OF_UNIONS
    )


def max_tokens(q: Tensor, k: Tensor, block_indices: Tensor, block_size: int) -> int:
    """Return the most tokens of one pair whose gradients of logits fit into the workspace."""
    heads = q.shape[2] // k.shape[2]
    return MAX_BYTES // (heads * block_indices.shape[3] * block_size * q.element_size())


@triton.jit
def store_dlogits(dlogits_ptr, dlogits, pair, entry, exists, first_chunk, first_in_block, csr, sizes: tl.constexpr):
    """Store dlogits `[keys, rows]` for the keys from first_in_block of their block on.

    entry, exists: entry and mask of each 16 rows, [rows / 16]. first_chunk: first row, in units of 16 rows.
    """
    GROUP: tl.constexpr = sizes.group
    BLOCK_SIZE: tl.constexpr = sizes.block_size
    BLOCK_N: tl.constexpr = dlogits.shape[0]
    CHUNKS: tl.constexpr = dlogits.shape[1] // 16
    # A warp holds 8 rows and 4 pairs of columns; a thread has two rows, and two pairs of every 16 columns.
    values = tl.reshape(dlogits.to(dlogits_ptr.dtype.element_ty), [BLOCK_N // 16, 2, 8, CHUNKS, 2, 4, 2])
    values = tl.reshape(tl.permute(values, [1, 3, 0, 2, 5, 4, 6]), [2 * CHUNKS * BLOCK_N * 2, 4])
    chunk = (first_chunk + tl.arange(0, CHUNKS)) % (GROUP // 16)
    tiles = (pair * csr.num_entries + entry) * (GROUP // 16) + chunk
    rows = tl.arange(0, BLOCK_N // 16)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
    pieces = (rows + first_in_block) * 4 + tl.arange(0, 4)[None, None, :]
    pieces = (tiles * (BLOCK_SIZE * 4))[:, None, None, None] + pieces[None, :, :, :]
    pieces = tl.arange(0, 2)[:, None, None, None, None] * 32 + pieces[None, :, :, :, :]
    mask = tl.broadcast_to(exists[None, :, None, None, None], [2, CHUNKS, BLOCK_N // 16, 8, 4])
    SIZE: tl.constexpr = 2 * CHUNKS * BLOCK_N * 2
    store_rows(dlogits_ptr, tl.reshape(pieces, [SIZE]), 4, values, tl.reshape(mask, [SIZE]), 4, 4, INT64_OFFSETS=False)


@triton.jit
def find_head(column):
    """Return the head within its group that a column of the stored tiles belongs to."""
    return column // 16 * 16 + column % 4 // 2 * 8 + column % 16 // 4 * 2 + column % 2
