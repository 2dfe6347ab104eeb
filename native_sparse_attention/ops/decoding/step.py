"""Inputs of a decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Alignment in bytes by which Triton specialises kernels.
ALIGNMENT = 16
# Most partial results of a row that a program combines.
MAX_SPLITS = 64


class Storage(NamedTuple):
    """Tensors of a cache.

    k, v, k_window, v_window: `[B, S, H, D or DV]`, or pages `[P, page_size, H, D or DV]` with a block table, int32 `[B,
    pages of a row]`. k_cmp, v_cmp: likewise, with block_table_cmp, or None in a cache without them.
    raw_k, raw_v: the last tokens before rotary `[B, R, H, D or DV]`, position p at index p modulo R, or None if k or v
    hold them. lengths, peaks: int32 `[B]`. capacity: tokens per row.
    """

    k: Tensor
    v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    raw_k: Tensor | None
    raw_v: Tensor | None
    lengths: Tensor
    peaks: Tensor
    block_table: Tensor | None
    block_table_cmp: Tensor | None
    capacity: int


class Tokens(NamedTuple):
    """New tokens `[B, T, heads, D or DV]`, before rotary embedding if the step applies it. raw_k, raw_v: inputs of the
    compression. k_window, v_window: None if the window reads k and v. q_cmp: queries of the compressed branch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw_k: Tensor
    raw_v: Tensor
    k_window: Tensor | None
    v_window: Tensor | None
    q_cmp: Tensor


class LayerSettings(NamedTuple):
    """Settings of a layer: l, d, l', n, W, forced blocks, num_recent as in `select_blocks`, whether a group selects
    together, the scale of the logits, whether selected blocks and window are read in one softmax, and whether rotary
    embedding pairs features i and i + F.

    num_splits: parts in which the compressed blocks of a row are read. tiles_of_program: key tiles per program of the
    selected and the window branch, more where a query would need over 64 programs. 0 chooses either by the batch.
    Results depend on both in the last bits, so with fixed values a row has the same bits in batches of any size.
    """

    compress_block_size: int
    compress_stride: int
    selection_block_size: int
    num_selected: int
    window_size: int
    num_init: int
    num_local: int
    num_recent: int
    share_group: bool
    scale: float
    merge_window: bool = False
    is_half: bool = False
    num_splits: int = 0
    tiles_of_program: int = 0


class Mlp(NamedTuple):
    """Weights of φ where it is an MLP of the flattened block with a ReLU, for keys or for values.

    first: `[hidden, l * D]` and second: `[D, hidden]` with biases `[hidden]` and `[D]`, as in `nn.Linear`; or as in
    `HeadLinear`, for each of H or 1 heads: `[H, l * D, hidden]` and `[H, hidden, D]` with biases `[1, H, 1, hidden]`
    and `[1, H, 1, D]`. All have the dtype of the cache, and any strides.
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor

    @property
    def num_weights(self) -> int:
        """Heads with weights of their own; 1 if all heads share the weights."""
        return 1 if self.first.dim() == 2 else len(self.first)


class Mlps(NamedTuple):
    """φ of keys and of values, of one form; v is None without compressed values. adds_mean: the block mean is added to
    the output.
    """

    k: Mlp
    v: Mlp | None
    adds_mean: bool

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all weights, those of one network for both once."""
        return (*self.k, *(self.v or ())) if self.v is not self.k else tuple(self.k)


def look_at(given: Sequence[Tensor | None], owned: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], list[int]]:
    """Return the shapes, strides, dtypes, devices and alignments that launches depend on, and the addresses of `given`,
    0 for None.

    Launches for some given tensors also serve others of equal properties, but no other `owned` tensors.
    """
    addresses = [0 if t is None else t.data_ptr() for t in given]
    looks = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, address % ALIGNMENT)
        for t, address in zip(given, addresses, strict=True)
    ]
    looks += [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr()) for t in owned]
    return tuple(looks), addresses
