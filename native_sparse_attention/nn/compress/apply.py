"""Apply compression networks to keys and values."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention.core import geometry
from native_sparse_attention.core.plain import is_plain
from native_sparse_attention.core.projection import projection_dtype
from native_sparse_attention.nn.compress.check import check_output
from native_sparse_attention.nn.compress.networks import (
    CompressMLP,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    MeanResidualMLP,
    SingleProjection,
)
from native_sparse_attention.nn.compress.overlapping import OverlappingBlocks, join, lay_out_chunks
from native_sparse_attention.nn.linear import FixedStartLinear, HeadLinear

# Networks that are linear in the block first, and what their layers may be.
_LINEAR_FIRST = (CompressMLP, MeanResidualMLP, GroupedMLP, ConvLinearCompress, SingleProjection, MeanPool)
_KNOWN = (*_LINEAR_FIRST, nn.Linear, nn.Conv1d, nn.Flatten, nn.ReLU, nn.Sequential, FixedStartLinear, HeadLinear)


def compress_blocks(network: nn.Module, blocks: Tensor, *, name: str, value_dim: int) -> Tensor:
    """Summarises blocks [B, H, C, l, D] as [B, C, H, value_dim], any strides, in the dtype of blocks (autocast or not).

    With C = 0 the result is empty, and the network is not called and has gradients of 0. `name` ('keys' or 'values')
    says in an error whose network it is.

    Raises ValueError where the network does not return [B, H, C, value_dim].
    """
    batch, heads, num_blocks = blocks.shape[:3]
    if num_blocks == 0:
        return _no_summaries(network, blocks).view(batch, 0, heads, value_dim)
    compressed = network(blocks)
    check_output(compressed, blocks.shape, value_dim, name)
    return compressed.transpose(1, 2).to(blocks.dtype)


def compress_tokens(
    network: nn.Module,
    tokens: Tensor,
    positions: Tensor,
    stride: int,
    cu_seqlens: Tensor | None = None,
    *,
    name: str,
    value_dim: int,
) -> Tensor:
    """Summarises the blocks of tokens `[B, T, H, D]`, any strides, that begin every `stride` tokens, as
    `[B, C, H, value_dim]`.

    positions: `[H, l, D]`, what every block adds. cu_seqlens: int32 `[N + 1]`, borders of packed sequences; the
    summaries of each follow those of the one before, and C is T // stride, of which the last are meaningless. name: as
    in `compress_blocks`. Blocks are laid out only for a network that must have them so.

    Raises ValueError where the network does not return `[B, H, C, value_dim]`.
    """
    batch, total, heads, dim = tokens.shape
    block_size = positions.shape[1]
    if total < block_size:
        return _no_summaries(network, tokens, positions).view(batch, 0, heads, value_dim)
    if block_size % stride or not _takes_overlapping(network):
        blocks = _lay_out(tokens, block_size, stride, cu_seqlens) + positions[:, None].to(tokens.dtype)
        return compress_blocks(network, blocks, name=name, value_dim=value_dim)
    chunks, first_chunks = lay_out_chunks([tokens], block_size, stride, cu_seqlens)
    blocks = OverlappingBlocks(chunks, positions[None], first_chunks)
    compressed = network(blocks)
    check_output(compressed, (batch, heads, blocks.num_left, block_size, dim), value_dim, name)
    return compressed.transpose(1, 2).to(tokens.dtype)


def compress_pair(
    networks: tuple[nn.Module, nn.Module],
    tokens: tuple[Tensor, Tensor],
    positions: tuple[Tensor, Tensor],
    stride: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Summaries of keys and of values, for each of which the arguments of `compress_tokens` are given.

    Two MLPs of the same sizes run as one, in half as many operations, where autocast casts their weights: so no copy of
    them is kept that there would not be otherwise.
    """
    (batch, total, heads, dim), block_size = tokens[0].shape, positions[0].shape[1]
    overlaps = total >= block_size and block_size % stride == 0
    mlps = _run_as_one(networks, tokens[0].dtype, tokens[0].device.type) if overlaps else []
    if not mlps:
        (network_k, network_v), (k, v), (positions_k, positions_v) = networks, tokens, positions
        at = (stride, cu_seqlens)
        return (
            compress_tokens(network_k, k, positions_k, *at, name='keys', value_dim=k.shape[3]),
            compress_tokens(network_v, v, positions_v, *at, name='values', value_dim=v.shape[3]),
        )
    chunks, first_chunks = lay_out_chunks(tokens, block_size, stride, cu_seqlens)
    parameters = [[*network.weights(), p] for network, p in zip(mlps, positions, strict=True)]
    *weights, both_positions = join(parameters, tokens[0].dtype)
    blocks = OverlappingBlocks(chunks, both_positions, first_chunks)
    compressed = mlps[0].run(blocks, weights)
    check_output(compressed[0], (batch, heads, blocks.num_left, block_size, dim), dim, 'keys')
    k_cmp, v_cmp = compressed.transpose(2, 3).to(tokens[0].dtype).unbind()
    return k_cmp, v_cmp


def _run_as_one(
    networks: tuple[nn.Module, nn.Module], dtype: torch.dtype, device_type: str
) -> list[CompressMLP | GroupedMLP]:
    """Both networks if they are MLPs of the same sizes that take `OverlappingBlocks`, and autocast makes their weights
    of this dtype; else none.
    """
    if type(networks[0]) is not type(networks[1]) or not torch.is_autocast_enabled(device_type):
        return []
    mlps = [n for n in networks if isinstance(n, (CompressMLP, GroupedMLP)) and _takes_overlapping(n)]
    if len(mlps) < 2:
        return []
    kinds = [[(w.shape, w.dtype, w.device) for w in mlp.weights()] for mlp in mlps]
    weight = mlps[0].weights()[0]
    return mlps if kinds[0] == kinds[1] and weight.dtype != dtype == projection_dtype(weight) else []


def _no_summaries(network: nn.Module, *made_of: Tensor) -> Tensor:
    """`[0]`, in the dtype of the first of made_of. Gradients of these and of the network are 0, not None: distributed
    training waits for those of all parameters.
    """
    like = made_of[0]
    if not torch.is_grad_enabled():
        return like.new_empty(0)
    parameters: list[Any] = [p for p in network.parameters() if p.requires_grad and not p.is_meta]
    # Of what is sharded, the part that lies here.
    made_of = (*made_of, *(p.to_local() if hasattr(p, 'to_local') else p for p in parameters))
    return torch.cat([t.flatten()[:0].to(like) for t in made_of])


def with_zero_gradients(out: Tensor, network: nn.Module, *tensors: Tensor | None) -> Tensor:
    """Return `out` with a dependence on the network's parameters and the tensors whose gradient is 0, not None.

    Distributed training waits for a gradient of every parameter.
    """
    given = [t for t in tensors if t is not None]
    return out + _no_summaries(network, out, *given).sum()


def _lay_out(tokens: Tensor, block_size: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    """Blocks `[B, H, C, l, D]` of `[B, T, H, D]`, T at least l; a view where sequences are not packed."""
    if cu_seqlens is None:
        return rearrange(tokens.unfold(1, block_size, stride), 'b c h d l -> b h c l d')
    starts = geometry.packed_block_starts(cu_seqlens, tokens.shape[1], block_size, stride)
    token = starts[:, None] + torch.arange(block_size, device=tokens.device)
    return rearrange(tokens[:, token], 'b c l h d -> b h c l d')


def _takes_overlapping(network: nn.Module) -> bool:
    """Whether the network takes `OverlappingBlocks`, and nothing in it is another's: it goes around its first layer,
    whose hooks, parametrisations and adapters would not be seen.
    """
    return isinstance(network, _LINEAR_FIRST) and is_plain(network, *_KNOWN) and network.takes_overlapping()
