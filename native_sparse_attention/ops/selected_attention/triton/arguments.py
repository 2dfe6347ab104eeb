"""Kernel arguments that several kernels of selected attention share.

Letters in shapes: B batch rows, T query tokens, S key tokens, HQ query heads, H KV heads, HI index heads (H or HQ),
n selected blocks per query, D head size of q and k, DV head size of v. G = HQ / HI query heads share one row of
`block_indices`; R = HI / H index heads share one KV head.

Tensors and their strides are two arguments. A tensor that a call does not have is None, and so are its strides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops._triton.varlen import SequenceLayout, last_dim_contiguous, make_layout


class Arguments(NamedTuple):
    """Arguments of selected attention, passed on by the launchers. The last dimensions of all tensors are contiguous.

    q: `[B, T, HQ, D]`. k: `[B, S, H, D]`. v: `[B, S, H, DV]`. block_indices: `[B, T, HI, n]`. block_scale: of the same
    shape, or None. block_size: tokens per block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    block_scale: Tensor | None
    layout: SequenceLayout
    block_size: int
    causal: bool
    scale: float
    softcap: float | None


class Sizes(NamedTuple):
    """Sizes of the problem, a compile-time constant.

    group: G. repeats: R. num_selected: n. block_size: tokens per block, at most S.
    """

    group: int
    repeats: int
    num_selected: int
    block_size: int
    causal: bool
    head_dim: int
    value_dim: int


class Tile(NamedTuple):
    """Sizes of a program's tiles, a compile-time constant; all but `chunk` are powers of two.

    block_m: rows, each one head of one query. block_n: keys. block_d, block_dv: padded head sizes. block_s: padded n.
    int64_offsets: whether an element offset within one batch row may exceed int32. block_g: rows per query where a tile
    holds several queries. union_size: capacity of a block union. chunk: entries of the CSR index per program.
    """

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    int64_offsets: bool
    block_s: int = 0
    block_g: int = 0
    union_size: int = 0
    chunk: int = 0


class Strides(NamedTuple):
    """Strides of each tensor of a kernel, a tuple of int; None for a tensor that the kernel or the call does not have.

    The last field is always None: Triton 3.6 keeps constants of an inner tuple, such as a stride of 1, only where a
    later field of the record itself is constant.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    indices: Any = None
    factors: Any = None
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None
    gate: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    end: Any = None


class ForwardTensors(NamedTuple):
    """q `[B, T, HQ, D]`, k `[B, S, H, D]`, v `[B, S, H, DV]`, indices and factors `[B, T, HI, n]`.

    factors: `block_scale`. out: `[B, T, HQ, DV]`. lse: float32 `[B, HQ, T]`, contiguous. low_bits: int16, contiguous,
    shaped like out (`split_low_bits`), or None.
    """

    q: Any
    k: Any
    v: Any
    indices: Any
    factors: Any
    out: Any
    lse: Any
    low_bits: Any


class BackwardTensors(NamedTuple):
    """Inputs and outputs of the kernels for dq; shapes as in `ForwardTensors`.

    dlse, lse, delta: float32 `[B, HQ, T]`, the last two contiguous. The gradient of a logit is p * (dp - delta).
    gate: `[B, T, HQ]`, the factor that dout still lacks, or None. dfactors: float32, contiguous, or None.
    """

    q: Any
    k: Any
    v: Any
    indices: Any
    factors: Any
    out: Any
    lse: Any
    dout: Any
    dlse: Any
    gate: Any
    dq: Any
    delta: Any
    dfactors: Any


class KeySource(NamedTuple):
    """Where a program finds its keys and values, made inside a kernel.

    k, v: pointers to the first key of the batch row and KV head. k_tiles, v_tiles: tensor descriptors of the whole
    tensors, or None. key_start: first token of the sequence.
    """

    k: Any
    v: Any
    k_tiles: Any
    v_tiles: Any
    row: Any
    kv_head: Any
    k_stride: Any
    v_stride: Any
    key_start: Any


class Selection(NamedTuple):
    """One row of `block_indices`, made inside a kernel by `select_row` or `find_full_blocks` (block_loop.py).

    indices: pointer to the row. blocks: the row, [BLOCK_S]. readable: keys of the sequence that the query may read.
    num_slots, first_slot, tail_slot: see `find_full_blocks`.
    """

    indices: Any
    blocks: Any
    readable: Any
    num_slots: Any
    first_slot: Any
    tail_slot: Any


def sizes_of(arguments: Arguments) -> Sizes:
    """Return the sizes of the problem, for at least one key; a block has at most all keys."""
    q, k, v, block_indices, *_ = arguments
    index_heads, num_selected = block_indices.shape[2:]
    heads = (q.shape[2] // index_heads, index_heads // k.shape[2])
    block_size = min(arguments.block_size, k.shape[1])
    return Sizes(*heads, num_selected, block_size, arguments.causal, q.shape[3], v.shape[3])


def stride_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Return the strides of a tensor, or None without one."""
    return None if tensor is None else tensor.stride()


def strides_of(**tensors: Tensor | None) -> Strides:
    """Return the strides of the tensors, named as in `Strides`."""
    return Strides(**{name: stride_of(tensor) for name, tensor in tensors.items()})


def make_arguments(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    sequences: Sequences,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> Arguments:
    """Return the arguments. tensors: q, k, v, block_indices and block_scale."""
    q, k, v, block_indices, block_scale = last_dim_contiguous(*tensors)
    layout = make_layout(sequences)
    return Arguments(q, k, v, block_indices, block_scale, layout, block_size, causal, scale, softcap)
