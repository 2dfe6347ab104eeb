"""The launches that compute φ as an MLP, alone: blocks, networks and the error rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.nn.compress import GroupedMLP
from native_sparse_attention.ops.decoding.step import Mlps
from native_sparse_attention.ops.decoding.triton import LaunchCache, compress
from native_sparse_attention.testing import assert_matches
from tests.support.harness import fence

# Names for keys and for values.
Pair = Sequence[Any]


def make_mlps(
    make: Callable[..., nn.Module],
    dims: tuple[int, int],
    block_size: int,
    kv_heads: int,
    expand_factor: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Pair:
    """Return networks for keys and for values, without layers that start at 0."""
    heads = (kv_heads,) if make is GroupedMLP else ()
    networks = [make(dim, block_size, *heads, expand_factor).to(device, dtype) for dim in dims]
    for parameter in (p for network in networks for p in network.parameters()):
        if not parameter.any():
            nn.init.uniform_(parameter, -0.1, 0.1)
    return networks


def run_compress(networks: Pair, blocks: Pair, lengths: list[int], num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Run the launches for rows of so many tokens before the step. blocks: `[B, K, H, l, D or DV]`; d is l / 2."""
    storage: Any = SimpleNamespace(k=blocks[0], lengths=fence(torch.tensor(lengths, dtype=torch.int32)), capacity=2**20)
    storage.lengths = storage.lengths.to(blocks[0].device)
    block_size = blocks[0].shape[3]
    sizes: Any = SimpleNamespace(compress_stride=block_size // 2, selection_block_size=block_size)
    mlps = weights_of(networks, blocks)
    assert mlps is not None
    return compress((blocks[0], blocks[1]), mlps, storage, num_tokens, sizes, {}, LaunchCache((), (), {}))


def weights_of(networks: Pair, blocks: Pair) -> Mlps | None:
    heads, block_size, dim = blocks[0].shape[2:]
    layout = {'kv_heads': heads, 'head_dim': dim, 'value_dim': blocks[1].shape[4]}
    like = {'k': blocks[0], 'dtype': blocks[0].dtype, 'device': blocks[0].device}
    cache: Any = SimpleNamespace(compress=(block_size, block_size // 2), layout=layout, **like)
    return Phi((networks[0], networks[1]), (None, None)).mlps(cache)


def of_networks(networks: Pair, blocks: Pair) -> list[Tensor]:
    """Return the results of the networks, `[B, K, H, D or DV]`."""
    pairs = zip(networks, blocks, strict=True)
    return [network(b.transpose(1, 2)).transpose(1, 2) for network, b in pairs]


@torch.no_grad()
def check_compress(
    networks: Pair, blocks: Pair, lengths: list[int], num_tokens: int, complete: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Compare the complete blocks with the networks by the error rules. complete: their number in each row."""
    found = run_compress(networks, blocks, lengths, num_tokens)
    is_complete = torch.arange(blocks[0].shape[1]) < torch.tensor(complete)[:, None]
    is_complete = is_complete.to(blocks[0].device)
    results = [None if t is None else t[is_complete] for t in found]
    eager = of_networks(networks, blocks)
    gold = of_networks([n.double() for n in networks], [b.double() for b in blocks])
    for network in networks:
        network.to(blocks[0].dtype)
    for name, result, exact, same_dtype in zip('kv', results, gold, eager, strict=True):
        assert result is not None
        assert_matches(result, exact[is_complete], same_dtype[is_complete], name=name)
        assert torch.equal(result.isfinite(), exact[is_complete].isfinite()), name
    return found
