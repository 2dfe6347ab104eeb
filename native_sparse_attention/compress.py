"""The networks φ that summarise blocks of keys or values, and what the layer calls to make and to run them.

Every network is a module that maps blocks [B, H, C, l, D] to one summary per block, [B, H, C, D], each block by itself.
Blocks are unrotated and already carry the learned position inside the block. For values, DV stands in place of D.

Blocks overlap, so laid out they take l / d times the memory of the tokens. The networks here that are linear in the
block, or begin so, take `OverlappingBlocks` of one kind too; two MLPs of the same sizes take those of keys and of
values at once.

Legend: B batch, H key/value heads, C compressed blocks, l tokens of a block, d tokens between the starts of blocks, D
head size, DV head size of values.

The constructor arguments are those of native-sparse-attention-pytorch 0.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from einops import rearrange
from einops.layers.torch import EinMix
from torch import Tensor, nn

from native_sparse_attention import geometry
from native_sparse_attention.block_encoder import CompressTransformer as CompressTransformer
from native_sparse_attention.ops._checks import check_positive, is_number, shown
from native_sparse_attention.overlapping import OverlappingBlocks, join, lay_out_chunks
from native_sparse_attention.plain import is_plain, plain_bias, plain_weight
from native_sparse_attention.projection import projection_dtype


class CompressMLP(nn.Module):
    """The default network: an MLP over the flattened block, its weights shared by the heads.

    The hidden layer has int(expand_factor · l · D) units and a ReLU, the output `dim_out` features (else `dim_head`).
    """

    def __init__(
        self, dim_head: int, compress_window_size: int, expand_factor: float = 1.0, *, dim_out: int | None = None
    ):
        super().__init__()
        dim_out = dim_head if dim_out is None else dim_out
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size, dim_out=dim_out)
        dim = dim_head * compress_window_size
        dim_hidden = hidden_size(expand_factor, dim)
        self.to_hidden = nn.Linear(dim, dim_hidden)
        self.to_out = nn.Linear(dim_hidden, dim_out)

    def takes_overlapping(self) -> bool:
        return all(type(layer) is nn.Linear and layer.bias is not None for layer in (self.to_hidden, self.to_out))

    def weights(self) -> list[Tensor]:
        return [self.to_hidden.weight, self.to_hidden.bias, self.to_out.weight, self.to_out.bias]

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """`[K, B, H, C, D]`; weights: those of K networks, `[K, ...]` each."""
        return blocks.through_mlp(*weights)

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            return self.run(blocks, [w[None] for w in self.weights()])[0]
        return self.to_out(self.to_hidden(blocks.flatten(-2)).relu())


class MeanResidualMLP(CompressMLP):
    """The mean of the block's tokens plus the MLP of `CompressMLP`, whose output layer starts at 0.

    Training begins from the block mean. Weights are shared by the heads; the hidden layer has
    int(expand_factor · l · D) units.
    """

    def __init__(self, dim_head: int, compress_window_size: int, expand_factor: float = 1.0):
        super().__init__(dim_head, compress_window_size, expand_factor)
        nn.init.zeros_(self.to_out.weight)
        nn.init.zeros_(self.to_out.bias)

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """`[K, B, H, C, D]`; weights: those of K networks, `[K, ...]` each."""
        return blocks.mean() + blocks.through_mlp(*weights)

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        out = super().forward(blocks)
        return out if isinstance(blocks, OverlappingBlocks) else blocks.mean(dim=-2) + out


class GroupedMLP(nn.Module):
    """The MLP of `CompressMLP` with weights of its own for every head; with `heads` = 1 every head uses the same."""

    def __init__(self, dim_head: int, compress_window_size: int, heads: int, expand_factor: float = 1.0):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size, heads=heads)
        dim = dim_head * compress_window_size
        dim_hidden = hidden_size(expand_factor, dim)
        self.net = nn.Sequential(
            EinMix('b h c i -> b h c o', weight_shape='h i o', bias_shape='h o', h=heads, i=dim, o=dim_hidden),
            nn.ReLU(),
            EinMix('b h c i -> b h c o', weight_shape='h i o', bias_shape='h o', h=heads, i=dim_hidden, o=dim_head),
        )

    def takes_overlapping(self) -> bool:
        if [type(module) for module in self.net] != [EinMix, nn.ReLU, EinMix]:
            return False
        return all(getattr(layer, 'bias', None) is not None for layer in (self.net[0], self.net[2]))

    def weights(self) -> list[Tensor]:
        first, _, second = self.net
        return [plain_weight(first), plain_bias(first), plain_weight(second), plain_bias(second)]

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """`[K, B, H, C, D]`; weights: those of K networks, `[K, ...]` each."""
        first, first_bias, second, second_bias = weights
        first, second = first.flatten(0, 1).mT, second.flatten(0, 1).mT
        return blocks.through_mlp(first, first_bias.view(len(first), -1), second, second_bias.view(len(second), -1))

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            return self.run(blocks, [w[None] for w in self.weights()])[0]
        return self.net(blocks.flatten(-2))


class AttentionPool(nn.Module):
    """A weighted mean of the block's tokens: per feature, a softmax over the tokens of logits linear in the token.

    The linear map starts as the identity (the pooling of Enformer, Avsec et al. 2021). Blocks may have any length, so
    `compress_window_size` changes nothing; it keeps the arguments of 0.2.3.
    """

    def __init__(self, dim_head: int, compress_window_size: int):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size)
        self.to_attn_logits = nn.Linear(dim_head, dim_head, bias=False)
        nn.init.eye_(self.to_attn_logits.weight)

    def forward(self, blocks: Tensor) -> Tensor:
        weights = self.to_attn_logits(blocks).softmax(dim=-2)
        return (weights * blocks).sum(dim=-2)


class ConvLinearCompress(nn.Module):
    """A linear map of the whole block with a bias, one per head: a grouped convolution as wide as the block.

    With `heads` = 1 every head uses the same.
    """

    def __init__(self, heads: int, dim_head: int, compress_window_size: int):
        super().__init__()
        check_positive(heads=heads, dim_head=dim_head, compress_window_size=compress_window_size)
        self.heads = heads
        self.conv = nn.Conv1d(heads * dim_head, heads * dim_head, compress_window_size, groups=heads)

    def takes_overlapping(self) -> bool:
        return type(self.conv) is nn.Conv1d and self.conv.bias is not None

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        # The kernel meets each block at one place only, so this is a matrix product per head: faster than a grouped
        # convolution, not subject to its TF32 default, and defined for C = 0.
        if isinstance(blocks, OverlappingBlocks):
            weight = rearrange(plain_weight(self.conv), '(h o) i l -> h o (l i)', h=self.heads)
            bias = rearrange(plain_bias(self.conv), '(h o) -> h o', h=self.heads)
            return blocks.heads_apart(blocks.times(weight, bias))[0]
        if not is_plain(self.conv, nn.Conv1d) or self.conv.bias is None:
            batch, num_blocks = blocks.shape[0], blocks.shape[2]
            summaries = self.conv(rearrange(blocks, 'b h c l d -> (b c) (h d) l'))
            return rearrange(summaries, '(b c) (h d) 1 -> b h c d', b=batch, c=num_blocks, h=self.heads)
        weight = rearrange(plain_weight(self.conv), '(h o) i l -> h o i l', h=self.heads)
        summaries = torch.einsum('bhcli,hoil->bhco', blocks, weight)
        return summaries + rearrange(plain_bias(self.conv), '(h o) -> h 1 o', h=self.heads)


class SingleProjection(nn.Module):
    """A linear map of the whole block without a bias, shared by the heads, or one per head where `heads` > 1.

    The map per head has a weight for every token of the block; in 0.2.3 it has one that all tokens share.
    """

    def __init__(self, dim_head: int, compress_window_size: int, heads: int = 1):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size, heads=heads)
        if heads > 1:
            self.compress = EinMix(
                'b h c l i -> b h c o', weight_shape='h l i o', h=heads, l=compress_window_size, i=dim_head, o=dim_head
            )
        else:
            self.compress = nn.Sequential(
                nn.Flatten(-2), nn.Linear(compress_window_size * dim_head, dim_head, bias=False)
            )

    def takes_overlapping(self) -> bool:
        if isinstance(self.compress, EinMix):
            return self.compress.bias is None
        layers = [*self.compress.children()]
        return [type(layer) for layer in layers] == [nn.Flatten, nn.Linear] and layers[1].bias is None

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            if isinstance(self.compress, EinMix):
                weight = plain_weight(self.compress).flatten(1, 2).mT
            else:
                weight = plain_weight(self.compress[1])[None]
            return blocks.heads_apart(blocks.times(weight))[0]
        return self.compress(blocks)


class MeanPool(nn.Module):
    """The mean of the block's tokens; nothing is learned."""

    def takes_overlapping(self) -> bool:
        return True

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        return blocks.mean()[0] if isinstance(blocks, OverlappingBlocks) else blocks.mean(dim=-2)


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
            raise ValueError(f'compress_mlp must be None, a module or a pair of modules, got {_describe(compress_mlp)}')
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
        raise ValueError(f'compress_mlp must be None or a module, got {_describe(compress_mlp)}')
    # C differs from H, so that a network that swaps the two is refused as well.
    check_network(network, (1, kv_heads, 3 if kv_heads == 2 else 2, block_size, head_dim), name='keys')
    return network


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
    _check_output(compressed, blocks.shape, value_dim, name)
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
    _check_output(compressed, (batch, heads, blocks.num_left, block_size, dim), value_dim, name)
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
    _check_output(compressed[0], (batch, heads, blocks.num_left, block_size, dim), dim, 'keys')
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
    parameters: list[Any] = [p for p in network.parameters() if p.requires_grad]
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


_LINEAR_FIRST = (CompressMLP, MeanResidualMLP, GroupedMLP, ConvLinearCompress, SingleProjection, MeanPool)
_KNOWN = (*_LINEAR_FIRST, nn.Linear, nn.Conv1d, nn.Flatten, nn.ReLU, nn.Sequential, EinMix)


def check_network(network: nn.Module, shape: Sequence[int], *, name: str, like: Tensor | None = None) -> None:
    """Runs the network once on zeros of `shape` [B, H, C, l, D], in eval mode, and leaves it as it was.

    name: as in `compress_blocks`. like: has the dtype and the device of the zeros; default the network's weights.

    Raises ValueError where the network raises, or returns another shape than [B, H, C, D].
    """
    if like is None:
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(()))
    blocks = torch.zeros(shape, dtype=like.dtype, device=like.device)
    was_training = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            compressed = network(blocks)
    except Exception as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise ValueError(f'{_rule(shape, shape[-1], name)}, got {reason}') from error
    finally:
        for module, training in was_training:
            module.training = training
    _check_output(compressed, shape, shape[-1], name)


def _check_output(compressed: Tensor, shape: Sequence[int], value_dim: int, name: str) -> None:
    if not isinstance(compressed, Tensor) or compressed.shape != (*shape[:3], value_dim):
        raise ValueError(f'{_rule(shape, value_dim, name)}, got {_describe(compressed)}')


def _rule(shape: Sequence[int], value_dim: int, name: str) -> str:
    expected = [*shape[:3], value_dim]
    return f'compress_mlp ({name}) must map [B, H, C, l, D] = {list(shape)} to [B, H, C, D] = {expected}'


def _describe(value: object) -> str:
    match value:
        case Tensor():
            return str(list(value.shape))
        case list() | tuple():
            return f'{type(value).__name__} of ({", ".join(type(item).__name__ for item in value)})'
        case _:
            return type(value).__name__


def hidden_size(
    expand_factor: float, dim: int, name: str = 'expand_factor', rule: str = 'block size times head size'
) -> int:
    """int(expand_factor * dim), checked. name, rule: what an error calls expand_factor and dim."""
    if not is_number(expand_factor) or not 1 <= expand_factor * dim < math.inf:
        raise ValueError(
            f'{name} is {shown(expand_factor)}, but must be a number that times {dim}, {rule}, is finite and at least 1'
        )
    return int(expand_factor * dim)
