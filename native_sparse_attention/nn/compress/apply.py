"""Apply compression networks to keys and values."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention.core import geometry
from native_sparse_attention.core.autocast import concatenate, is_autocast
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
from native_sparse_attention.nn.compress.overlapping import OverlappingBlocks, make_chunks, stack_parameters
from native_sparse_attention.nn.linear import FixedStartLinear, HeadLinear

# Networks whose first layer is linear in the block, and the modules that they consist of.
_LINEAR_FIRST = (CompressMLP, MeanResidualMLP, GroupedMLP, ConvLinearCompress, SingleProjection, MeanPool)
_KNOWN = (*_LINEAR_FIRST, nn.Linear, nn.Conv1d, nn.Flatten, nn.ReLU, nn.Sequential, FixedStartLinear, HeadLinear)


def compress_blocks(network: nn.Module, blocks: Tensor, *, name: str, value_dim: int) -> Tensor:
    """Compress blocks `[B, H, C, l, D]` to `[B, C, H, value_dim]`, any strides, in the dtype of blocks.

    With C = 0 the network is not called, and its gradients are 0. name: 'keys' or 'values', for errors.

    Raises ValueError where the network does not return `[B, H, C, value_dim]`.
    """
    batch, heads, num_blocks = blocks.shape[:3]
    if num_blocks == 0:
        return _nothing_compressed(network, blocks).view(batch, 0, heads, value_dim)
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
    """Compress the blocks of tokens `[B, T, H, D]`, any strides, that start every `stride` tokens.

    The result is `[B, C, H, value_dim]`. Blocks are laid out only for networks that do not take `OverlappingBlocks`.

    Args:
        network: φ, `[B, H, C, l, D]` to `[B, H, C, value_dim]`.
        tokens: `[B, T, H, D]`.
        positions: `[H, l, D]`, added to every block.
        stride: d, tokens between starts of blocks.
        cu_seqlens: int32 `[N + 1]`, borders of packed sequences, whose compressed tokens follow each other; C is then
            T // stride, of which the last are undefined.
        name: 'keys' or 'values', for errors.
        value_dim: features of a compressed token.

    Raises:
        ValueError: where the network does not return `[B, H, C, value_dim]`.
    """
    batch, total, heads, dim = tokens.shape
    block_size = positions.shape[1]
    if total < block_size:
        return _nothing_compressed(network, tokens, positions).view(batch, 0, heads, value_dim)
    if block_size % stride or not takes_overlapping(network):
        blocks = _lay_out(tokens, block_size, stride, cu_seqlens) + positions[:, None].to(tokens.dtype)
        return compress_blocks(network, blocks, name=name, value_dim=value_dim)
    chunks, first_chunks = make_chunks([tokens], block_size, stride, cu_seqlens)
    blocks = OverlappingBlocks(chunks, positions[None], first_chunks)
    compressed = network(blocks)
    check_output(compressed, (batch, heads, blocks.num_blocks, block_size, dim), value_dim, name)
    return compressed.transpose(1, 2).to(tokens.dtype)


def compress_pair(
    networks: tuple[nn.Module, nn.Module],
    tokens: tuple[Tensor, Tensor],
    positions: tuple[Tensor, Tensor],
    stride: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return compressed keys `[B, C, H, D]` and values `[B, C, H, DV]`, as `compress_tokens` does for each.

    Two MLPs of the same sizes run as one, in half as many operations, where autocast casts their weights. The cast then
    makes the copy that running them as one needs.

    Args:
        networks: φ for keys and for values.
        tokens: keys `[B, T, H, D]` and values `[B, T, H, DV]`.
        positions: `[H, l, D]` and `[H, l, DV]`, added to every block.
        stride: d, tokens between starts of blocks.
        cu_seqlens: as in `compress_tokens`.
    """
    (batch, total, heads, dim), block_size = tokens[0].shape, positions[0].shape[1]
    overlaps = total >= block_size and block_size % stride == 0
    mlps = _run_as_one(networks, tokens[0]) if overlaps else []
    if not mlps:
        (network_k, network_v), (k, v), (positions_k, positions_v) = networks, tokens, positions
        at = (stride, cu_seqlens)
        return (
            compress_tokens(network_k, k, positions_k, *at, name='keys', value_dim=k.shape[3]),
            compress_tokens(network_v, v, positions_v, *at, name='values', value_dim=v.shape[3]),
        )
    chunks, first_chunks = make_chunks(tokens, block_size, stride, cu_seqlens)
    parameters = [[*network.weights(), p] for network, p in zip(mlps, positions, strict=True)]
    *weights, both_positions = stack_parameters(parameters, tokens[0].dtype)
    blocks = OverlappingBlocks(chunks, both_positions, first_chunks)
    compressed = mlps[0].run(blocks, weights)
    check_output(compressed[0], (batch, heads, blocks.num_blocks, block_size, dim), dim, 'keys')
    k_cmp, v_cmp = compressed.transpose(2, 3).to(tokens[0].dtype).unbind()
    return k_cmp, v_cmp


def _run_as_one(networks: tuple[nn.Module, nn.Module], tokens: Tensor) -> list[CompressMLP | GroupedMLP]:
    """Return both networks if they are MLPs of the same sizes that take `OverlappingBlocks`, and autocast casts their
    weights from float32 to the dtype of the tokens; else none. It cannot concatenate weights of the other half type.
    """
    if type(networks[0]) is not type(networks[1]) or not is_autocast(tokens.device):
        return []
    mlps = [n for n in networks if isinstance(n, (CompressMLP, GroupedMLP)) and takes_overlapping(n)]
    if len(mlps) < 2:
        return []
    kinds = [[(w.shape, w.dtype, w.device) for w in mlp.weights()] for mlp in mlps]
    weight = mlps[0].weights()[0]
    is_cast = weight.dtype == torch.float32 and weight.dtype != tokens.dtype == projection_dtype(weight)
    return mlps if kinds[0] == kinds[1] and is_cast else []


def _nothing_compressed(network: nn.Module, *inputs: Tensor) -> Tensor:
    """Return an empty tensor `[0]` in the dtype of the first input, with gradients of 0 for inputs and network.

    Distributed training waits for a gradient of every parameter, so None would not do.
    """
    like = inputs[0]
    if not torch.is_grad_enabled():
        return like.new_empty(0)
    parameters: list[Any] = [p for p in network.parameters() if p.requires_grad and not p.is_meta]
    shards = [p.to_local() if hasattr(p, 'to_local') else p for p in parameters]
    return concatenate([t.flatten()[:0].to(like) for t in (*inputs, *shards)], 0)


def with_zero_gradients(out: Tensor, network: nn.Module, *tensors: Tensor | None) -> Tensor:
    """Return `out` with a dependence of gradient 0 on the network's parameters and the tensors."""
    given = [t for t in tensors if t is not None]
    return out + _nothing_compressed(network, out, *given).sum()


def _lay_out(tokens: Tensor, block_size: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return blocks `[B, H, C, l, D]` of tokens `[B, T, H, D]`, T >= l; a view where sequences are not packed."""
    if cu_seqlens is None:
        return rearrange(tokens.unfold(1, block_size, stride), 'b c h d l -> b h c l d')
    starts = geometry.packed_block_starts(cu_seqlens, tokens.shape[1], block_size, stride)
    token = starts[:, None] + torch.arange(block_size, device=tokens.device)
    return rearrange(tokens[:, token], 'b c l h d -> b h c l d')


def takes_overlapping(network: nn.Module) -> bool:
    """Return whether the network takes `OverlappingBlocks` and is plain.

    Its layers are then computed without a call of the module, which would skip hooks, parametrisations and adapters.
    """
    return isinstance(network, _LINEAR_FIRST) and is_plain(network, *_KNOWN) and network.takes_overlapping()
