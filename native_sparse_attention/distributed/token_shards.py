"""Sequence-parallel norms beside tensor parallelism: between linear layers, hidden states are sharded over tokens.

Of a row of T tokens each of N ranks has a shard of S = ceil(T / N), `[B, S, dim]`; tokens after the T-th are padding.
Norms and residual sums run on the shard. An all-gather before to_qkv and before the first linear layer of the
feed-forward network makes rows whole, and a reduce-scatter after combine_heads and after the second linear layer shards
them again, so attention reads whole rows (Korthikanti et al., arXiv 2205.05198).

A call with a cache has whole hidden states: it decodes few tokens, or has no activations to save.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from native_sparse_attention.distributed.local import divide, sum_over_ranks
from native_sparse_attention.distributed.tensor_parallel import (
    Behaviours,
    EmbeddingOfRank,
    HeadOfRank,
    HeadsOfRank,
    SumOverRanks,
)
from native_sparse_attention.nn.transformer import Block, Transformer


def gather_tokens(x: Tensor, seqlen: int, mesh: DeviceMesh) -> Tensor:
    """Return whole rows `[B, T, dim]` of shards `[B, S, dim]`, for computation that differs by rank.

    The gradient of a shard is the sum over the ranks of the gradients of its tokens.
    """
    whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    # Of a view without the padding, each linear layer that reads it would save a copy.
    return whole.to_local(grad_placements=[Partial()])[:, :seqlen].contiguous()


def sum_tokens(x: Tensor, mesh: DeviceMesh, to_shards: bool) -> Tensor:
    """Return the sum over the ranks of x `[B, T, dim]`, or with to_shards the shard `[B, S, dim]` of it."""
    if not to_shards:
        if torch.is_grad_enabled():  # every rank would add the gradients of all tokens to the weights of norms
            raise ValueError(
                'a module is called without its model, but after apply_tp with sequence_parallel=True it must be under '
                'torch.no_grad()'
            )
        return sum_over_ranks(x, mesh)
    padding = -x.shape[1] % mesh.size()
    x = F.pad(x, (0, 0, 0, padding)) if padding else x
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def shard_tokens(model: Transformer, mesh: DeviceMesh) -> None:
    """Change the classes of a model whose modules have `BEHAVIOURS`, so that its hidden states are shards."""
    for block in model.blocks:
        divide(block.feed_forward, mesh, {}, behaviour=_FeedForward)
        divide(block, mesh, {}, behaviour=_Block)
    divide(model, mesh, {}, behaviour=_Model)
    object.__setattr__(model, 'token_mesh', mesh)


class _Model(Transformer):
    """A `Transformer` whose hidden states are shards in a call without a cache."""

    tensor_mesh: DeviceMesh

    def _embed(self, ids: Tensor, mask: Any, cu_seqlens: Any, backend: str | None, block_losses: Any) -> Tensor:
        """Return whole rows, as input of computation that differs by rank."""
        seqlen = ids.shape[1]
        x = self._tokens(ids, mask, to_shards=True)
        x = self._run_blocks(x, mask, cu_seqlens, backend, block_losses, seqlen=seqlen)
        return gather_tokens(self.norm(x), seqlen, self.tensor_mesh)


class _Block(Block):
    """A block. seqlen: T, the tokens of a row of which x `[B, S, dim]` is a shard; None for whole rows."""

    def forward(self, x: Tensor, *args: Any, seqlen: int | None = None, **options: Any) -> Any:
        if seqlen is None:
            return super().forward(x, *args, **options)
        out = self.attention(x, *args, seqlen=seqlen, **options)
        out, *beside = out if isinstance(out, tuple) else (out,)
        x = x + out
        x = x + self.feed_forward(x, seqlen=seqlen)
        return (x, *beside) if beside else x


class _Attention(HeadsOfRank):
    """An attention layer with the heads of this rank, whose norm runs before its rows are gathered."""

    def forward(self, x: Tensor, *args: Any, seqlen: int | None = None, **options: Any) -> Any:
        x = super()._normalise(x)  # type: ignore[misc]
        x = x if seqlen is None else gather_tokens(x, seqlen, self.tensor_mesh)
        out = super().forward(x, *args, **options)
        out, *beside = out if isinstance(out, tuple) else (out,)
        if seqlen is None:  # hooks of combine_heads may have kept it
            out = out.clone()
        out = sum_tokens(out, self.tensor_mesh, seqlen is not None)
        return (out, *beside) if beside else out

    def _normalise(self, x: Tensor) -> Tensor:
        return x


class _FeedForward(nn.Sequential):
    """Norm, linear layer, activation, linear layer."""

    tensor_mesh: DeviceMesh

    def forward(self, x: Tensor, seqlen: int | None = None) -> Tensor:
        norm, first, activation, second = self
        x = norm(x)
        x = x if seqlen is None else gather_tokens(x, seqlen, self.tensor_mesh)
        return second(activation(first(x)), to_shards=seqlen is not None)


class _Second(SumOverRanks):
    """The last linear layer of a feed-forward network."""

    def forward(self, x: Tensor, to_shards: bool = False) -> Tensor:
        out = sum_tokens(F.linear(x, self.weight), self.tensor_mesh, to_shards)
        return out if self.bias is None else out + self.bias


class _Embedding(EmbeddingOfRank):
    """An embedding whose rows are divided over the ranks."""

    def forward(self, ids: Tensor, to_shards: bool = False) -> Tensor:
        return sum_tokens(self._own_rows(ids), self.tensor_mesh, to_shards)


class _Head(HeadOfRank):
    """A head whose input comes from `gather_tokens`, which sums its gradient over the ranks."""

    def _to_ranks(self, x: Tensor) -> Tensor:
        return x


# The attention layer sums after combine_heads: padding on the left is undone between the two.
BEHAVIOURS = Behaviours(
    norm=None, attention=_Attention, combine_heads=None, second=_Second, embedding=_Embedding, head=_Head
)
