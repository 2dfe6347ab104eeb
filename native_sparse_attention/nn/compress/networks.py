"""Compression networks φ, which map each block of keys or values to one compressed key or value.

Every network is a module that maps blocks `[B, H, C, l, D]` to `[B, H, C, D]`, each block by itself. Blocks have no
rotary embedding, and the learned position inside the block is added. For values, DV stands in place of D.

Blocks overlap, so laid out they take l / d times the memory of the tokens. A network whose first layer is linear in the
block takes `OverlappingBlocks` too, of one kind; two MLPs of the same sizes take those of keys and values at once.

Legend: B batch, H KV heads, C compressed blocks, l tokens of a block, d tokens between the starts of blocks, D head
size, DV head size of values.

The constructor arguments are those of native-sparse-attention-pytorch 0.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention.core.checks import check_positive, is_number, shown
from native_sparse_attention.core.plain import is_plain, kind_of, plain_bias, plain_weight
from native_sparse_attention.nn.compress.overlapping import OverlappingBlocks
from native_sparse_attention.nn.linear import FixedStartLinear, HeadLinear


class CompressMLP(nn.Module):
    """MLP over the flattened block with a ReLU; the heads share its weights. It is the default network.

    Args:
        dim_head: D, size of a head.
        compress_window_size: l, tokens of a block.
        expand_factor: the hidden layer has int(expand_factor * l * D) units.
        dim_out: features of the output; default dim_head.
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
        self.to_out = self.make_output_layer(dim_hidden, dim_out)

    @staticmethod
    def make_output_layer(dim_hidden: int, dim_out: int) -> nn.Linear:
        return nn.Linear(dim_hidden, dim_out)

    def takes_overlapping(self) -> bool:
        return all(
            kind_of(layer) in (nn.Linear, FixedStartLinear) and layer.bias is not None
            for layer in (self.to_hidden, self.to_out)
        )

    def weights(self) -> list[Tensor]:
        return [self.to_hidden.weight, self.to_hidden.bias, self.to_out.weight, self.to_out.bias]

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """Return `[K, B, H, C, D]`; weights: of K networks, `[K, ...]` each."""
        return blocks.mlp(*weights)

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            return self.run(blocks, [w[None] for w in self.weights()])[0]
        return self.to_out(self.to_hidden(blocks.flatten(-2)).relu())


class MeanResidualMLP(CompressMLP):
    """Mean of the block's tokens plus the MLP of `CompressMLP`, whose output layer starts at 0.

    Training begins from the block mean. The heads share the weights.

    Args:
        dim_head: D, size of a head.
        compress_window_size: l, tokens of a block.
        expand_factor: the hidden layer has int(expand_factor * l * D) units.
    """

    def __init__(self, dim_head: int, compress_window_size: int, expand_factor: float = 1.0):
        super().__init__(dim_head, compress_window_size, expand_factor)

    @staticmethod
    def make_output_layer(dim_hidden: int, dim_out: int) -> nn.Linear:
        return FixedStartLinear(dim_hidden, dim_out, bias_start=[0.0] * dim_out)

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """Return `[K, B, H, C, D]`; weights: of K networks, `[K, ...]` each."""
        return blocks.mean() + blocks.mlp(*weights)

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        out = super().forward(blocks)
        return out if isinstance(blocks, OverlappingBlocks) else blocks.mean(dim=-2) + out


class GroupedMLP(nn.Module):
    """MLP of `CompressMLP` with weights of its own for every head.

    Args:
        dim_head: D, size of a head.
        compress_window_size: l, tokens of a block.
        heads: H, number of KV heads; with 1 all heads share the weights.
        expand_factor: the hidden layer has int(expand_factor * l * D) units.
    """

    def __init__(self, dim_head: int, compress_window_size: int, heads: int, expand_factor: float = 1.0):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size, heads=heads)
        dim = dim_head * compress_window_size
        dim_hidden = hidden_size(expand_factor, dim)
        self.net = nn.Sequential(
            HeadLinear(heads, (dim,), dim_hidden), nn.ReLU(), HeadLinear(heads, (dim_hidden,), dim_head)
        )

    def takes_overlapping(self) -> bool:
        if [kind_of(module) for module in self.net] != [HeadLinear, nn.ReLU, HeadLinear]:
            return False
        return all(getattr(layer, 'bias', None) is not None for layer in (self.net[0], self.net[2]))

    def weights(self) -> list[Tensor]:
        first, _, second = self.net
        return [plain_weight(first), plain_bias(first), plain_weight(second), plain_bias(second)]

    @staticmethod
    def run(blocks: OverlappingBlocks, weights: Sequence[Tensor]) -> Tensor:
        """Return `[K, B, H, C, D]`; weights: of K networks, `[K, ...]` each."""
        first, first_bias, second, second_bias = weights
        first, second = first.flatten(0, 1).mT, second.flatten(0, 1).mT
        return blocks.mlp(first, first_bias.view(len(first), -1), second, second_bias.view(len(second), -1))

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            return self.run(blocks, [w[None] for w in self.weights()])[0]
        return self.net(blocks.flatten(-2))


class AttentionPool(nn.Module):
    """Weighted mean of the tokens: per feature, a softmax over the tokens of logits that are linear in the token.

    The linear map starts as the identity (the pooling of Enformer, Avsec et al. 2021).

    Args:
        dim_head: D, size of a head.
        compress_window_size: unused, because blocks may have any length; it keeps the arguments of
            native-sparse-attention-pytorch.
    """

    def __init__(self, dim_head: int, compress_window_size: int):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size)
        self.to_attn_logits = FixedStartLinear(dim_head, dim_head, 'identity')

    def forward(self, blocks: Tensor) -> Tensor:
        weights = self.to_attn_logits(blocks).softmax(dim=-2)
        return (weights * blocks).sum(dim=-2)


class ConvLinearCompress(nn.Module):
    """Linear map of the whole block with a bias, one per head: a grouped convolution as wide as the block.

    Args:
        heads: H, number of KV heads; with 1 all heads share the weights.
        dim_head: D, size of a head.
        compress_window_size: l, tokens of a block.
    """

    def __init__(self, heads: int, dim_head: int, compress_window_size: int):
        super().__init__()
        check_positive(heads=heads, dim_head=dim_head, compress_window_size=compress_window_size)
        self.heads = heads
        self.conv = nn.Conv1d(heads * dim_head, heads * dim_head, compress_window_size, groups=heads)

    def takes_overlapping(self) -> bool:
        return kind_of(self.conv) is nn.Conv1d and self.conv.bias is not None

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        # The kernel is as wide as the block, so this is a matrix product per head: faster than a grouped convolution,
        # not subject to its TF32 default, and defined for C = 0.
        if isinstance(blocks, OverlappingBlocks):
            weight = rearrange(plain_weight(self.conv), '(h o) i l -> h o (l i)', h=self.heads)
            bias = rearrange(plain_bias(self.conv), '(h o) -> h o', h=self.heads)
            return blocks.split_heads(blocks.linear(weight, bias))[0]
        if not is_plain(self.conv, nn.Conv1d) or self.conv.bias is None:
            batch, heads, num_blocks = blocks.shape[:3]
            summaries = self.conv(rearrange(blocks, 'b (g h) c l d -> (b g c) (h d) l', h=self.heads))
            sizes = {'g': heads // self.heads, 'b': batch, 'c': num_blocks, 'h': self.heads}
            return rearrange(summaries, '(b g c) (h d) 1 -> b (g h) c d', **sizes)
        weight = rearrange(plain_weight(self.conv), '(h o) i l -> h o i l', h=self.heads)
        summaries = torch.einsum('bhcli,hoil->bhco', blocks, weight)
        return summaries + rearrange(plain_bias(self.conv), '(h o) -> h 1 o', h=self.heads)


class SingleProjection(nn.Module):
    """Linear map of the whole block without a bias, with a weight for every token of the block.

    Args:
        dim_head: D, size of a head.
        compress_window_size: l, tokens of a block.
        heads: 1: the heads share one map; H: each head has its own.
    """

    def __init__(self, dim_head: int, compress_window_size: int, heads: int = 1):
        super().__init__()
        check_positive(dim_head=dim_head, compress_window_size=compress_window_size, heads=heads)
        if heads > 1:
            self.compress = HeadLinear(heads, (compress_window_size, dim_head), dim_head, bias=False)
        else:
            self.compress = nn.Sequential(
                nn.Flatten(-2), nn.Linear(compress_window_size * dim_head, dim_head, bias=False)
            )

    def takes_overlapping(self) -> bool:
        if isinstance(self.compress, HeadLinear):
            return self.compress.bias is None
        layers = [*self.compress.children()]
        return [kind_of(layer) for layer in layers] == [nn.Flatten, nn.Linear] and layers[1].bias is None

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        if isinstance(blocks, OverlappingBlocks):
            if isinstance(self.compress, HeadLinear):
                weight = plain_weight(self.compress).flatten(1, 2).mT
            else:
                weight = plain_weight(self.compress[1])[None]
            return blocks.split_heads(blocks.linear(weight))[0]
        return self.compress(blocks)


class MeanPool(nn.Module):
    """Mean of the block's tokens. It has no parameters."""

    def takes_overlapping(self) -> bool:
        return True

    def forward(self, blocks: Tensor | OverlappingBlocks) -> Tensor:
        return blocks.mean()[0] if isinstance(blocks, OverlappingBlocks) else blocks.mean(dim=-2)


def hidden_size(
    expand_factor: float, dim: int, name: str = 'expand_factor', rule: str = 'block size times head size'
) -> int:
    """Return int(expand_factor * dim), checked. name, rule: the names of expand_factor and dim in an error."""
    if not is_number(expand_factor) or not 1 <= expand_factor * dim < math.inf:
        raise ValueError(
            f'{name} is {shown(expand_factor)}, but must be a number that times {dim}, {rule}, is finite and at least 1'
        )
    return int(expand_factor * dim)
