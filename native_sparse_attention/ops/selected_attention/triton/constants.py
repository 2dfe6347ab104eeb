"""Compile-time constants and tensor descriptors of the kernels with a program per query or query tile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention.ops._triton.launch import Settings, describe_tiles, head_block, is_wide, row_block


def find_constants(
    tile: Settings, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, causal: bool
) -> dict[str, Any]:
    shapes = (q.shape, k.shape, v.shape, block_indices.shape)
    return _find_constants(tile, *shapes, block_size, causal, is_wide(k, v)).copy()


@lru_cache(maxsize=1024)
def _find_constants(
    tile: Settings,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    indices_shape: tuple[int, ...],
    block_size: int,
    causal: bool,
    wide: bool,
) -> dict[str, Any]:
    index_heads, num_selected = indices_shape[2:]
    # No block is longer than all keys.
    block_size = max(1, min(block_size, k_shape[1]))
    block_m, block_n, num_warps, num_stages = tile
    return {
        'GROUP': q_shape[2] // index_heads,
        'REPEATS': index_heads // k_shape[2],
        'NUM_SELECTED': num_selected,
        'BLOCK_SIZE': block_size,
        'CAUSAL': causal,
        'HEAD_DIM': q_shape[3],
        'VALUE_DIM': v_shape[3],
        'BLOCK_S': 1 << max(num_selected - 1, 0).bit_length(),
        'BLOCK_M': block_m,
        'BLOCK_N': min(block_n, row_block(block_size)),
        'BLOCK_D': head_block(q_shape[3]),
        'BLOCK_DV': head_block(v_shape[3]),
        'INT64_OFFSETS': wide,
        'num_warps': num_warps,
        'num_stages': num_stages,
    }


def describe_key_tiles(
    k: Tensor, v: Tensor, meta: dict[str, Any]
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return the descriptors of k and v, or None where a block is not a whole number of tiles."""
    block_n = meta['BLOCK_N']
    if meta['BLOCK_SIZE'] % block_n or k.element_size() == 4:
        return None, None
    return describe_tiles(k, block_n, meta['BLOCK_D']), describe_tiles(v, block_n, meta['BLOCK_DV'])
