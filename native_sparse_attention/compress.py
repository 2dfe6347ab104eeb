"""The networks φ that summarise blocks of keys or values, and what the layer calls to make and to run them.

Every network is a module that maps blocks [B, H, C, l, D] to one summary per block, [B, H, C, D], each block by itself.
Blocks are unrotated and already carry the learned position inside the block. For values, DV stands in place of D.

Legend: B batch, H key/value heads, C compressed blocks, l tokens of a block, D head size, DV head size of values.

The constructor arguments are those of native-sparse-attention-pytorch 0.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import EinMix
from torch import Tensor, nn


class CompressMLP(nn.Module):
    """The default network: an MLP over the flattened block, its weights shared by the heads.

    The hidden layer has int(expand_factor · l · D) units and a ReLU, the output `dim_out` features (else `dim_head`).
    """

    def __init__(
        self, dim_head: int, compress_window_size: int, expand_factor: float = 1.0, *, dim_out: int | None = None
    ):
        super().__init__()
        dim = dim_head * compress_window_size
        dim_hidden = _hidden_size(expand_factor, dim)
        self.to_hidden = nn.Linear(dim, dim_hidden)
        self.to_out = nn.Linear(dim_hidden, dim_head if dim_out is None else dim_out)

    def forward(self, blocks: Tensor) -> Tensor:
        return self.to_out(self.to_hidden(blocks.flatten(-2)).relu())


class GroupedMLP(nn.Module):
    """The MLP of `CompressMLP` with weights of its own for every head; with `heads` = 1 every head uses the same."""

    def __init__(self, dim_head: int, compress_window_size: int, heads: int, expand_factor: float = 1.0):
        super().__init__()
        dim = dim_head * compress_window_size
        dim_hidden = _hidden_size(expand_factor, dim)
        self.net = nn.Sequential(
            EinMix('b h c i -> b h c o', weight_shape='h i o', bias_shape='h o', h=heads, i=dim, o=dim_hidden),
            nn.ReLU(),
            EinMix('b h c i -> b h c o', weight_shape='h i o', bias_shape='h o', h=heads, i=dim_hidden, o=dim_head),
        )

    def forward(self, blocks: Tensor) -> Tensor:
        return self.net(blocks.flatten(-2))


class AttentionPool(nn.Module):
    """A weighted mean of the block's tokens: per feature, a softmax over the tokens of logits linear in the token.

    The linear map starts as the identity (the pooling of Enformer, Avsec et al. 2021). Blocks may have any length, so
    `compress_window_size` changes nothing; it keeps the arguments of 0.2.3.
    """

    def __init__(self, dim_head: int, compress_window_size: int):
        super().__init__()
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
        self.heads = heads
        self.conv = nn.Conv1d(heads * dim_head, heads * dim_head, compress_window_size, groups=heads)

    def forward(self, blocks: Tensor) -> Tensor:
        # The kernel meets each block at one place only, so this is a matrix product per head: faster than a grouped
        # convolution, not subject to its TF32 default, and defined for C = 0.
        weight = rearrange(self.conv.weight, '(h o) i l -> h o i l', h=self.heads)
        assert self.conv.bias is not None
        summaries = torch.einsum('bhcli,hoil->bhco', blocks, weight)
        return summaries + rearrange(self.conv.bias, '(h o) -> h 1 o', h=self.heads)


class SingleProjection(nn.Module):
    """A linear map of the whole block without a bias, shared by the heads, or one per head where `heads` > 1.

    The map per head has a weight for every token of the block; in 0.2.3 it has one that all tokens share.
    """

    def __init__(self, dim_head: int, compress_window_size: int, heads: int = 1):
        super().__init__()
        if heads > 1:
            self.compress = EinMix(
                'b h c l i -> b h c o', weight_shape='h l i o', h=heads, l=compress_window_size, i=dim_head, o=dim_head
            )
        else:
            self.compress = nn.Sequential(
                nn.Flatten(-2), nn.Linear(compress_window_size * dim_head, dim_head, bias=False)
            )

    def forward(self, blocks: Tensor) -> Tensor:
        return self.compress(blocks)


class CompressTransformer(nn.Module):
    """A pre-norm transformer encoder over the tokens of a block, all heads side by side; the last token is the summary.

    `dim` is H · D, `num_heads` the encoder's own number of heads, `ff_hidden_dim` defaults to 4 · dim, and `dropout`
    applies to attention weights and feed-forward layers.
    """

    def __init__(
        self, num_layers: int, dim: int, num_heads: int, ff_hidden_dim: int | None = None, dropout: float = 0.0
    ):
        super().__init__()
        if num_layers < 1:
            raise ValueError(f'num_layers must be at least 1, got {num_layers}')
        if num_heads < 1 or dim % num_heads != 0:
            raise ValueError(f'dim must be a multiple of num_heads, got dim {dim} and num_heads {num_heads}')
        ff_hidden_dim = 4 * dim if ff_hidden_dim is None else ff_hidden_dim
        self.layers = nn.ModuleList(_EncoderLayer(dim, num_heads, ff_hidden_dim, dropout) for _ in range(num_layers))

    def forward(self, blocks: Tensor) -> Tensor:
        batch, heads, num_blocks, length, dim_head = blocks.shape
        tokens = rearrange(blocks, 'b h c l d -> (b c) l (h d)')
        # Under autocast blocks may be of a half type: the residual stream keeps the type of the norms' weights.
        tokens = tokens.to(next(self.parameters()).dtype)
        *inner_layers, last_layer = self.layers
        for layer in inner_layers:
            tokens = layer(tokens, num_updated=length)
        summary = last_layer(tokens, num_updated=1)
        return rearrange(summary, '(b c) 1 (h d) -> b h c d', b=batch, c=num_blocks, h=heads, d=dim_head)


class _EncoderLayer(nn.Module):
    def __init__(self, dim: int, num_heads: int, ff_hidden_dim: int, dropout: float):
        super().__init__()
        self.norm1 = nn.RMSNorm(dim)
        self.attn = _SelfAttention(dim, num_heads, dropout)
        self.norm2 = nn.RMSNorm(dim)
        self.ff = nn.Sequential(
            nn.Linear(dim, ff_hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(ff_hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, tokens: Tensor, num_updated: int) -> Tensor:
        """Returns the last `num_updated` of tokens [N, l, dim], each after it has attended to all l."""
        updated = tokens[:, -num_updated:] + self.attn(self.norm1(tokens), num_updated)
        return updated + self.ff(self.norm2(updated))


class _SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, num_queries: int) -> Tensor:
        """The last `num_queries` of tokens [N, l, dim] attend to all l, in both directions."""
        projected = self.q_proj(tokens[:, -num_queries:]), self.k_proj(tokens), self.v_proj(tokens)
        q, k, v = (rearrange(t, 'n l (h d) -> n h l d', h=self.num_heads) for t in projected)
        # Blocks are short and many: scaled_dot_product_attention gains little here, and on CUDA it was seen to fail in
        # bf16 for more than 65,535 blocks.
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        out = F.dropout(weights, self.dropout, self.training) @ v
        return self.out_proj(rearrange(out, 'n h l d -> n l (h d)'))


class MeanPool(nn.Module):
    """The mean of the block's tokens; nothing is learned."""

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(dim=-2)


def make_networks(
    compress_mlp: nn.Module | Sequence[nn.Module] | None,
    *,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    expand_factor: float = 1.0,
) -> tuple[nn.Module, nn.Module]:
    """The network of the keys and the network of the values.

    compress_mlp: None for two `CompressMLP` with `expand_factor`; one module, of which each gets a copy (`value_dim`
    must then equal `head_dim`); or a pair (for keys, for values), used as given.

    Each network is run once on a few blocks of zeros, so that one of the wrong shape is refused here.

    Raises ValueError for any other `compress_mlp`, and for a network that does not map [B, H, C, l, D] to [B, H, C, D].
    """
    match compress_mlp:
        case None:
            network_k = CompressMLP(head_dim, block_size, expand_factor)
            network_v = CompressMLP(value_dim, block_size, expand_factor)
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
    _check_network(network_k, [1, kv_heads, num_blocks, block_size, head_dim], 'keys')
    _check_network(network_v, [1, kv_heads, num_blocks, block_size, value_dim], 'values')
    return network_k, network_v


def compress_blocks(network: nn.Module, blocks: Tensor, *, name: str, value_dim: int) -> Tensor:
    """Summarises blocks [B, H, C, l, D] as [B, C, H, value_dim], any strides, in the dtype of blocks (autocast or not).

    With C = 0 the result is empty and the network is not called. `name` ('keys' or 'values') says in an error whose
    network it is.

    Raises ValueError where the network does not return [B, H, C, value_dim].
    """
    batch, heads, num_blocks = blocks.shape[:3]
    if num_blocks == 0:
        return blocks.new_empty(batch, 0, heads, value_dim)
    compressed = network(blocks)
    _check_output(compressed, blocks.shape, value_dim, name)
    return compressed.transpose(1, 2).to(blocks.dtype)


def _check_network(network: nn.Module, shape: Sequence[int], name: str) -> None:
    """Runs the network once on zeros of `shape`, in eval mode, and leaves it as it was."""
    weight = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(()))
    blocks = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
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


def _hidden_size(expand_factor: float, dim: int) -> int:
    if not 1 <= expand_factor * dim < math.inf:
        raise ValueError(
            f'expand_factor times block size times head size must be finite and at least 1, got {expand_factor} · {dim}'
        )
    return int(expand_factor * dim)
