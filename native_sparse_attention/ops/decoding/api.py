"""What the kernels of decoding take, and when they serve a step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.geometry import overlapping_blocks
from native_sparse_attention.ops.backend import BackendChoice, choose_backend, serves

# New tokens of a row that the kernels take at a time.
MAX_NEW_TOKENS = 16
# Heads of a group whose rows a tile of the kernels holds.
MAX_GROUP = 64
# Compressed blocks that share tokens with a selection block: a tile of the kernels has them all.
MAX_OVERLAPPING = 128


class Storage(NamedTuple):
    """The tensors of a cache.

    k, v, k_window, v_window: `[B, S, H, D or DV]`, or pages `[P, page_size, H, D or DV]` that block_table, int32 `[B,
    pages of a row]`, leads to; k_cmp, v_cmp likewise, with block_table_cmp. raw_k, raw_v: the last tokens before rotary
    `[B, R, H, D or DV]`, position p in place p modulo R, or None where k or v have them. lengths, peaks: int32 `[B]`.
    capacity: tokens of a row.
    """

    k: Tensor
    v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None
    k_cmp: Tensor
    v_cmp: Tensor
    raw_k: Tensor | None
    raw_v: Tensor | None
    lengths: Tensor
    peaks: Tensor
    block_table: Tensor | None
    block_table_cmp: Tensor | None
    capacity: int


class Tokens(NamedTuple):
    """New tokens before rotary, `[B, T, heads, D or DV]`: raw_k and raw_v are what is compressed, k_window and v_window
    None where the window reads k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw_k: Tensor
    raw_v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None


class Settings(NamedTuple):
    """Of a layer: l, d, l', n, W, forced blocks, whether a group chooses together, and the factor of the logits.

    num_splits: parts that the compressed blocks of a row are read in, and tiles_of_program: tiles of tokens that a
    program of the selected and the window branch reads; 0 for what suits the batch. Results depend on them in the last
    bits, so a row has the same bits in batches of any size where they are given.
    """

    compress_block_size: int
    compress_stride: int
    selection_block_size: int
    num_selected: int
    window_size: int
    num_init: int
    num_local: int
    share_group: bool
    scale: float
    num_splits: int = 0
    tiles_of_program: int = 0


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype,
    compress: tuple[int, int],
    selection_block_size: int,
    backend: str = 'auto',
) -> BackendChoice:
    """The backend that would serve a step of q `[B, T, HQ, D]`, k and v on a cache of `dtype`, of blocks `compress` =
    (l, d): 'triton', or 'eager' for the ops one by one.
    """
    candidates = {'triton': partial(_unsupported, q, k, v, dtype, (*compress, selection_block_size)), 'eager': serves}
    return choose_backend('decoding', 'eager' if backend == 'flex' else backend, q.device, candidates)


def _unsupported(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, sizes: tuple[int, int, int]) -> str | None:
    """Why the kernels cannot serve a step, or None where they can."""
    from native_sparse_attention.ops._triton import support

    num_tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    if not 1 <= num_tokens <= MAX_NEW_TOKENS:
        return f'there are {num_tokens} new tokens, but its kernels take 1 to {MAX_NEW_TOKENS}'
    if group > MAX_GROUP:
        return f'{group} heads share a key head, but its kernels take up to {MAX_GROUP}'
    overlapping = len(overlapping_blocks(*sizes))
    if overlapping > MAX_OVERLAPPING:
        return (
            f'{overlapping} compressed blocks overlap a selection block, but its kernels take up to {MAX_OVERLAPPING}'
        )
    if dtype not in support.DTYPES:
        return f'the cache has dtype {dtype}, but its kernels compute in float32'
    return support.unsupported(q, k, v)
