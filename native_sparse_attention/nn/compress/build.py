"""Build the compression networks of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from torch import nn

from native_sparse_attention.nn.compress.check import check_network, describe
from native_sparse_attention.nn.compress.networks import CompressMLP, hidden_size


def make_networks(
    compress_mlp: nn.Module | Sequence[nn.Module] | None,
    *,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    compress_mlp_expand_factor: float = 1.0,
) -> tuple[nn.Module, nn.Module]:
    """The network of the keys and the network of the values.

    compress_mlp: None for two `CompressMLP`, with compress_mlp_expand_factor as theirs; one module, of which each gets
    a copy (`value_dim` must then equal `head_dim`); or a pair (for keys, for values), used as given.

    Each network is run once on a few blocks of zeros, so that one of the wrong shape is refused here.

    Raises ValueError for any other `compress_mlp`, and for a network that does not map [B, H, C, l, D] to [B, H, C, D].
    """
    match compress_mlp:
        case None:
            for dim in (head_dim, value_dim):
                hidden_size(compress_mlp_expand_factor, dim * block_size, 'compress_mlp_expand_factor')
            network_k = CompressMLP(head_dim, block_size, compress_mlp_expand_factor)
            network_v = CompressMLP(value_dim, block_size, compress_mlp_expand_factor)
        case nn.Module():
            if value_dim != head_dim:
                raise ValueError(
                    'compress_mlp must be a pair (for keys, for values) where their head sizes differ, '
                    f'got one {type(compress_mlp).__name__} for head sizes {head_dim} and {value_dim}'
                )
            network_k, network_v = deepcopy(compress_mlp), deepcopy(compress_mlp)
        case [nn.Module() as network_k, nn.Module() as network_v]:
            pass
        case _:
            raise ValueError(f'compress_mlp must be None, a module or a pair of modules, got {describe(compress_mlp)}')
    # C differs from H, so that a network that swaps the two is refused as well.
    num_blocks = 3 if kv_heads == 2 else 2
    check_network(network_k, (1, kv_heads, num_blocks, block_size, head_dim), name='keys')
    check_network(network_v, (1, kv_heads, num_blocks, block_size, value_dim), name='values')
    return network_k, network_v


def make_network(
    compress_mlp: nn.Module | None,
    *,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    compress_mlp_expand_factor: float = 1.0,
) -> nn.Module:
    """Return the network of the keys alone: a `CompressMLP` for None, else a copy of the module.

    Raises ValueError for anything else, and for a network that does not map [B, H, C, l, D] to [B, H, C, D].
    """
    if compress_mlp is None:
        hidden_size(compress_mlp_expand_factor, head_dim * block_size, 'compress_mlp_expand_factor')
        network: nn.Module = CompressMLP(head_dim, block_size, compress_mlp_expand_factor)
    elif isinstance(compress_mlp, nn.Module):
        network = deepcopy(compress_mlp)
    else:
        raise ValueError(f'compress_mlp must be None or a module, got {describe(compress_mlp)}')
    # C differs from H, so that a network that swaps the two is refused as well.
    check_network(network, (1, kv_heads, 3 if kv_heads == 2 else 2, block_size, head_dim), name='keys')
    return network
