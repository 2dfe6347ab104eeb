"""Regions of compressed blocks: their keys, and how many there are.

Region r of a sequence is its compressed blocks [r * m, (r + 1) * m), with m = `region_size`. Complete regions have a
key, the mean of the keys of their blocks. In tokens, a complete region is a block of (m - 1) * d + l tokens that starts
at r * m * d, so `geometry` knows where region keys are visible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.geometry import Sequences, packed_block_starts

# Default values of region_size and num_regions.
REGION_SIZE, NUM_REGIONS = 64, 16


class RegionRules(NamedTuple):
    """How queries choose regions.

    size: m, compressed blocks of a region. num_regions: R, regions that a query reads. share_group: the heads of a
    group read the same regions.
    """

    size: int
    num_regions: int
    share_group: bool


def make_region_rules(
    compress_levels: int,
    region_size: int | None,
    num_regions: int | None,
    share_group: bool,
    sizes: tuple[int, int, int],
    causal: bool,
) -> RegionRules | None:
    """Return the checked rules of two levels of compression, or None with one level.

    sizes: (l, d, l'). Raises ValueError for settings that do not fit each other.
    """
    checks.check_positive(compress_levels=compress_levels)
    given = {'region_size': region_size, 'num_regions': num_regions}
    if compress_levels > 2:
        raise ValueError(f'compress_levels is {compress_levels}, but must be 1 or 2')
    if compress_levels == 1:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f'{name} is {checks.shown(value)}, but must be None where compress_levels is 1')
        return None
    if not causal:
        raise ValueError('compress_levels is 2, but must be 1 where causal is False')
    checks.check_positive(**{name: value for name, value in given.items() if value is not None})
    size = REGION_SIZE if region_size is None else region_size
    rules = RegionRules(size, NUM_REGIONS if num_regions is None else num_regions, share_group)
    check_region_rules(rules, sizes, causal)
    return rules


def check_region_rules(rules: RegionRules, sizes: tuple[int, int, int], causal: bool) -> None:
    """Raise ValueError for rules that do not fit the sizes (l, d, l')."""
    size, num_regions, _ = rules
    if size < 1 or size * sizes[1] % sizes[2]:
        raise ValueError(
            f'region_size is {size}, but {size} * {sizes[1]} tokens, those of a region, must be a positive multiple of '
            f'selection_block_size, {sizes[2]}'
        )
    least = 3 if causal else 5
    if num_regions < least:
        raise ValueError(f'num_regions is {num_regions}, but must be at least {least}, which are always read')


def region_extents(size: int, block_size: int, stride: int) -> tuple[int, int]:
    """Return the tokens of a complete region, and the tokens between the starts of two regions."""
    return (size - 1) * stride + block_size, size * stride


@torch.no_grad()
def make_region_keys(k_cmp: Tensor, sequences: Sequences, size: int, block_size: int, stride: int) -> Tensor:
    """Return the keys of the complete regions, `[B, RC, H, D]` in the dtype of k_cmp, without a gradient.

    Packed: those of the sequences follow each other, and RC is a bound on their number. Keys of no region may be
    anything.

    Args:
        k_cmp: `[B, C, H, D]`.
        sequences: of the tokens.
    """
    num_compressed = k_cmp.shape[1]
    count = num_compressed // size
    if sequences.cu_seqlens is None:
        members = k_cmp[:, : count * size].unflatten(1, (count, size))
    else:
        cu_blocks = sequences.of_compressed(num_compressed, block_size, stride).cu_seqlens_k
        assert cu_blocks is not None
        first = packed_block_starts(cu_blocks, num_compressed, size, size)
        members = k_cmp[:, first[:, None] + torch.arange(size, device=k_cmp.device)]
    dtype = torch.float64 if k_cmp.dtype == torch.float64 else torch.float32
    return members.mean(2, dtype=dtype).to(k_cmp.dtype)
