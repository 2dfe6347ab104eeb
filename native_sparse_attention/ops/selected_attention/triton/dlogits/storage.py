"""Gradients of logits that dkv leaves in memory, for dq to be one product with k.

Dq needs what dkv computes. Of a block of 64 keys and 16 heads the gradients of the logits are two kilobytes, where k
and v are 32: so dkv stores them, for as many tokens at a time as the workspace holds, and dq fetches them with k alone.

Every entry of a pair (a token and a place in its row of indices) has a tile for each 16 heads, `[keys, 16]`,
with the heads in another order (`find_head`): products leave a thread of a quad two neighbours of every 8, so what a
thread has of a key lies side by side and needs no shared memory on its way.
"""

# To pyright a jit function that another calls never returns.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from native_sparse_attention.ops._triton.tiles import store_rows

# Bytes of the gradients of logits that are there at once, of the sums of dk and dv over ranges of tokens with the two
# numbers that there are for every query and head, of values in float16, and of the unions of a row.
MAX_BYTES, MAX_BYTES_OF_SUMS, MAX_BYTES_OF_VALUES, MAX_BYTES_OF_UNIONS = 2**29, 2**28 + 2**27, 2**29, 2**26
# Fewer tokens than this at once, or in all, are not worth it.
MIN_TOKENS = 2048
# Nor are sequences of so few blocks, on average, that neighbours read the same whatever they choose: so many times as
# many as each of them chooses are enough.
MIN_CHOICE = 3
# Heads of a group, all of which are in a tile of dq.
GROUPS = (16, 32, 64)
# The most indices of a row, of which dq looks for a block; and the largest head, beyond which sums fill the registers.
MAX_SELECTED, MAX_HEAD = 64, 128


def passes_dlogits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None,
    block_size: int,
    num_packed: int = 0,
) -> bool:
    """Whether the backward of selected attention goes that way, by shape alone. num_packed: sequences that `cu_seqlens`
    names.
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
    if num_blocks < MIN_CHOICE * num_selected:
        return False
    most = most_tokens(q, k, block_indices, block_size)
    # 12 bytes for each of at most twice as many indices, of all heads where pairs of several rows are there at once.
    bytes_of_unions = 24 * num_selected * index_heads * seqlen if 2 * seqlen <= most else 0
    return (
        min(seqlen, most) >= MIN_TOKENS
        and 4 * seqlen_k * (q.shape[3] + v.shape[3]) + 8 * q.shape[0] * seqlen * q.shape[2] <= MAX_BYTES_OF_SUMS
        and 2 * v.numel() <= MAX_BYTES_OF_VALUES
        and bytes_of_unions <= MAX_BYTES_OF_UNIONS
    )


def most_tokens(q: Tensor, k: Tensor, block_indices: Tensor, block_size: int) -> int:
    """Tokens of one pair whose gradients of logits are there at once."""
    heads = q.shape[2] // k.shape[2]
    return MAX_BYTES // (heads * block_indices.shape[3] * block_size * q.element_size())


@triton.jit
def store_dlogits(
    dlogits_ptr,
    dlogits,
    pair,
    entry,
    exists,
    first_chunk,
    first_in_block,
    lists,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """dlogits: `[keys, members]`, keys from first_in_block of their block on. entry: the entry of each 16 members,
    [members / 16]; exists: which there are. first_chunk: of the list, in units of 16 members.
    """
    BLOCK_N: tl.constexpr = dlogits.shape[0]
    CHUNKS: tl.constexpr = dlogits.shape[1] // 16
    # Threads of a warp have 8 rows and 4 pairs of columns; a thread has two rows, and two pairs of every 16 columns.
    values = tl.reshape(dlogits.to(dlogits_ptr.dtype.element_ty), [BLOCK_N // 16, 2, 8, CHUNKS, 2, 4, 2])
    values = tl.reshape(tl.permute(values, [1, 3, 0, 2, 5, 4, 6]), [2 * CHUNKS * BLOCK_N * 2, 4])
    chunk = (first_chunk + tl.arange(0, CHUNKS)) % (GROUP // 16)
    tiles = (pair * lists.num_entries + entry) * (GROUP // 16) + chunk
    rows = tl.arange(0, BLOCK_N // 16)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
    pieces = (rows + first_in_block) * 4 + tl.arange(0, 4)[None, None, :]
    pieces = (tiles * (BLOCK_SIZE * 4))[:, None, None, None] + pieces[None, :, :, :]
    pieces = tl.arange(0, 2)[:, None, None, None, None] * 32 + pieces[None, :, :, :, :]
    mask = tl.broadcast_to(exists[None, :, None, None, None], [2, CHUNKS, BLOCK_N // 16, 8, 4])
    SIZE: tl.constexpr = 2 * CHUNKS * BLOCK_N * 2
    store_rows(dlogits_ptr, tl.reshape(pieces, [SIZE]), 4, values, tl.reshape(mask, [SIZE]), 4, 4, False)


@triton.jit
def find_head(place):
    """The head of its group that stands at a place of tiles of 16."""
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
