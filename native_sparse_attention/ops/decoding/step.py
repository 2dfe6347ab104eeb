"""What a step of decoding is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Bytes by which Triton tells addresses apart.
ALIGNMENT = 16
# Parts of a row whose results a program of the kernels puts together.
MAX_SPLITS = 64


class Storage(NamedTuple):
    """The tensors of a cache.

    k, v, k_window, v_window: `[B, S, H, D or DV]`, or pages `[P, page_size, H, D or DV]` that block_table, int32 `[B,
    pages of a row]`, leads to; k_cmp, v_cmp likewise, with block_table_cmp, where v_cmp is None in a cache without it.
    raw_k, raw_v: the last tokens before rotary `[B, R, H, D or DV]`, position p in place p modulo R, or None where k or
    v have them. lengths, peaks: int32 `[B]`. capacity: tokens of a row.
    """

    k: Tensor
    v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None
    k_cmp: Tensor
    v_cmp: Any  # a tensor, or None
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
    program of the selected and the window branch reads, more where a query would have over 64 such programs; 0 for what
    suits the batch. Results depend on them in the last bits, so a row has the same bits in batches of any size where
    they are given.
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


def look_at(given: Sequence[Tensor | None], owned: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], list[int]]:
    """What launches depend on besides the values of tensors; and the addresses of those given, 0 for None. Launches for
    some given tensors serve others of the same looks, but no others that are owned.
    """
    addresses = [0 if t is None else t.data_ptr() for t in given]
    looks = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, address % ALIGNMENT)
        for t, address in zip(given, addresses, strict=True)
    ]
    looks += [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr()) for t in owned]
    return tuple(looks), addresses
