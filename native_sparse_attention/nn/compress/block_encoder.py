"""The compression network that is a transformer encoder over the tokens of a block."""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from native_sparse_attention.core.checks import check_positive
from native_sparse_attention.core.random import check_probability


class CompressTransformer(nn.Module):
    """Pre-norm transformer encoder over the tokens of a block, all heads side by side. The last token is the summary.

    Args:
        num_layers: number of encoder layers.
        dim: H * D, features of a token.
        num_heads: attention heads of the encoder, a divisor of dim.
        ff_hidden_dim: hidden size of the feed-forward networks; default 4 * dim.
        dropout: probability for attention weights and feed-forward layers.
    """

    def __init__(
        self, num_layers: int, dim: int, num_heads: int, ff_hidden_dim: int | None = None, dropout: float = 0.0
    ):
        super().__init__()
        check_positive(num_layers=num_layers, dim=dim, num_heads=num_heads)
        check_probability(dropout=dropout)
        if dim % num_heads != 0:
            raise ValueError(f'dim is {dim}, but must be a multiple of num_heads, {num_heads}')
        ff_hidden_dim = 4 * dim if ff_hidden_dim is None else ff_hidden_dim
        check_positive(ff_hidden_dim=ff_hidden_dim)
        self.layers = nn.ModuleList(_EncoderLayer(dim, num_heads, ff_hidden_dim, dropout) for _ in range(num_layers))

    def forward(self, blocks: Tensor) -> Tensor:
        batch, heads, num_blocks, length, dim_head = blocks.shape
        tokens = rearrange(blocks, 'b h c l d -> (b c) l (h d)')
        # Under autocast blocks may have a half type: the residual stream has the dtype of the norms' weights.
        weight = getattr(self.layers[0].norm1, 'weight', tokens)
        tokens = tokens.to(weight.dtype) if isinstance(weight, Tensor) else tokens
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
        """Return the last `num_updated` of tokens `[N, l, dim]` after attention to all l."""
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
        """Return the attention of the last `num_queries` of tokens `[N, l, dim]` to all l, in both directions."""
        projected = self.q_proj(tokens[:, -num_queries:]), self.k_proj(tokens), self.v_proj(tokens)
        q, k, v = (rearrange(t, 'n l (h d) -> n h l d', h=self.num_heads) for t in projected)
        # Blocks are short and many: scaled_dot_product_attention gains little, and on CUDA it fails in bf16 for more
        # than 65,535 blocks.
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        out = F.dropout(weights, self.dropout, self.training) @ v
        return self.out_proj(rearrange(out, 'n h l d -> n l (h d)'))
