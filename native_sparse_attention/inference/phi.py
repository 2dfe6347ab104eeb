"""The compression networks φ of a layer in decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import projection_dtype
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.nn.compress.apply import compress_blocks, takes_overlapping
from native_sparse_attention.nn.compress.check import check_network
from native_sparse_attention.nn.compress.networks import CompressMLP, GroupedMLP, MeanPool, MeanResidualMLP
from native_sparse_attention.ops.decoding.step import ALIGNMENT, Mlp, Mlps


class Phi(NamedTuple):
    """The networks for keys and for values, and the positions `[H, l, D]`, `[H, l, DV]` that are added before them.

    Those for values are None where blocks are only scored, and all are None without compressed blocks.
    """

    networks: tuple[Any, Any]
    positions: tuple[Any, Any]

    @property
    def is_mean(self) -> bool:
        """Whether all networks are means, which the kernels compute themselves."""
        network_k, network_v = self.networks
        return (network_k is None or is_plain(network_k, MeanPool)) and (
            network_v is None or is_plain(network_v, MeanPool)
        )

    def mlps(self, cache: LayerCache) -> Mlps | None:
        """Return the weights of MLPs that the kernels compute themselves, or None where the networks must be called.

        The kernels know two plain networks of one class (`CompressMLP`, `MeanResidualMLP`, `GroupedMLP`) whose weights
        have the dtype of the cache, in a call as in memory.
        """
        network_k, network_v = self.networks
        if cache.compress is None or projection_dtype(cache.k) != cache.dtype:
            return None
        mlp_k = _mlp(network_k, cache, cache.layout['head_dim'])
        is_one = network_v is None or (network_v is network_k and cache.layout['head_dim'] == cache.layout['value_dim'])
        mlp_v = mlp_k if is_one else _mlp(network_v, cache, cache.layout['value_dim'])
        if mlp_k is None or mlp_v is None or mlp_k.num_weights != mlp_v.num_weights:
            return None
        adds_mean = isinstance(network_k, MeanResidualMLP)
        if network_v is not None and isinstance(network_v, MeanResidualMLP) != adds_mean:
            return None
        return Mlps(mlp_k, None if network_v is None else mlp_v, adds_mean)

    def check(self, cache: LayerCache, q: Tensor) -> None:
        """Raise ValueError where the networks cannot compress the blocks that new tokens complete.

        They are run on zeros, once for every session, number of blocks and dtype.
        """
        assert cache.compress is not None
        block_size, stride = cache.compress
        num_blocks = -(-q.shape[1] // stride)
        case, checked = (*self.networks, num_blocks, q.dtype), cache.session.checked_networks
        # Operations during the capture of a graph would be part of it.
        if checked.find(case) or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        heads = cache.layout['kv_heads']
        for network, name, size in zip(self.networks, ('keys', 'values'), ('head_dim', 'value_dim'), strict=True):
            if network is not None:
                shape = (q.shape[0], heads, num_blocks, block_size, cache.layout[size])
                check_network(network, shape, name=name, like=q)
        checked.record(case, True)

    def of_tokens(self, blocks: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
        """Return compressed keys and values in dtype, None without a network.

        blocks: `[B, C, l, H, D or DV]`, as `LayerCache.block_candidates` returns them; positions are added here.
        """
        compressed: list[Tensor | None] = []
        for index, (tokens, positions) in enumerate(zip(blocks, self.positions, strict=True)):
            if positions is None:
                compressed.append(None)
            else:
                laid_out = rearrange(tokens, 'b c l h d -> b h c l d').to(dtype)
                compressed.append(self._compress(index, laid_out + positions[:, None].to(dtype)))
        return compressed

    def aligned(self, blocks: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Return compressed keys `[B, C, H, D]` and values `[B, C, H, DV]` of blocks `[B, H, C, l, D or DV]`, or None.

        Blocks are cast to dtype. The results are contiguous and aligned whatever the networks return.
        """
        pair = [None if b is None else self._compress(i, b.to(dtype)).contiguous() for i, b in enumerate(blocks)]
        return [t if t is None or t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in pair]

    def _compress(self, index: int, blocks: Tensor) -> Tensor:
        return compress_blocks(self.networks[index], blocks, name=('keys', 'values')[index], value_dim=blocks.shape[-1])


def _mlp(network: Any, cache: LayerCache, dim: int) -> Mlp | None:
    """Return the weights of a plain MLP of blocks `[H, l, dim]` in the dtype of the cache, or None."""
    if not isinstance(network, (CompressMLP, GroupedMLP)) or not takes_overlapping(network):
        return None
    assert cache.compress is not None
    mlp = Mlp(*network.weights())
    if any(weight.dtype != cache.dtype or weight.device != cache.device for weight in mlp):
        return None
    inputs, shapes = cache.compress[0] * dim, tuple(weight.shape for weight in mlp)
    if isinstance(network, CompressMLP):
        hidden = mlp.first_bias.numel()
        return mlp if shapes == ((hidden, inputs), (hidden,), (dim, hidden), (dim,)) else None
    heads = 1 if mlp.first_bias.shape[1:2] == (1,) else cache.layout['kv_heads']
    hidden = mlp.first_bias.numel() // heads
    expected = ((heads, inputs, hidden), (1, heads, 1, hidden), (heads, hidden, dim), (1, heads, 1, dim))
    return mlp if shapes == expected else None
