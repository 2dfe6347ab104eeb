"""Build the compression networks of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from native_sparse_attention.nn.compress.check import check_network, describe
from native_sparse_attention.nn.compress.networks import CompressMLP, hidden_size


def make_networks(
    compress_mlp: nn.Module | Sequence[nn.Module] | None,
    *,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    block_size: int,
    compress_mlp_expand_factor: float = 1.0,
) -> tuple[nn.Module, Any]:
    """Return the network of the keys and the network of the values, or None without one.

    Every network runs once on a few blocks of zeros, so that one of the wrong shape is refused here.

    Args:
        compress_mlp: None for a `CompressMLP` each; one module, of which each gets a copy; or a pair (for keys, for
            values), used as given.
        kv_heads: H, number of KV heads.
        head_dim: D, size of a key head.
        value_dim: DV; None for no network of values.
        block_size: l, tokens of a compressed block.
        compress_mlp_expand_factor: as in `CompressMLP`, for the default.

    Raises:
        ValueError: for another `compress_mlp`, for one module where DV != D, and for a network that does not map
            `[B, H, C, l, D]` to `[B, H, C, D]`.
    """
    dims = [head_dim] if value_dim is None else [head_dim, value_dim]
    match compress_mlp:
        case None:
            for dim in dims:
                hidden_size(compress_mlp_expand_factor, dim * block_size, 'compress_mlp_expand_factor')
            networks: list[nn.Module] = [CompressMLP(dim, block_size, compress_mlp_expand_factor) for dim in dims]
        case nn.Module():
            if value_dim not in (None, head_dim):
                raise ValueError(
                    'compress_mlp must be a pair (for keys, for values) where their head sizes differ, '
                    f'got one {type(compress_mlp).__name__} for head sizes {head_dim} and {value_dim}'
                )
            networks = [deepcopy(compress_mlp) for _ in dims]
        case [nn.Module() as network_k, nn.Module() as network_v] if value_dim is not None:
            networks = [network_k, network_v]
        case _:
            raise ValueError(f'compress_mlp must be None, a module or a pair of modules, got {describe(compress_mlp)}')
    # C differs from H, so that a network that swaps the two is refused as well.
    num_blocks = 3 if kv_heads == 2 else 2
    for network, dim, name in zip(networks, dims, ('keys', 'values'), strict=False):
        check_network(network, (1, kv_heads, num_blocks, block_size, dim), name=name)
    return networks[0], None if value_dim is None else networks[1]
