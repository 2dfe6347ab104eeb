"""Tensor parallelism: the heads of attention, hidden units and the vocabulary are divided over the ranks.

Inside a block there are two sums over the ranks in the forward, after attention and after the feed-forward network, and
two in the backward. Between them every rank computes with the heads and the hidden units that it has.
"""

from __future__ import annotations

from copy import deepcopy
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from native_sparse_attention.core.checks import check_flags, shown
from native_sparse_attention.distributed.local import can_be_captured, divide, gather_last, sum_over_ranks, to_ranks
from native_sparse_attention.distributed.mesh import check_mesh, check_not_staged
from native_sparse_attention.distributed.sequence import exchange_objects
from native_sparse_attention.nn.attention import SparseAttention
from native_sparse_attention.nn.compress import ConvLinearCompress
from native_sparse_attention.nn.linear import BranchLinear, FixedStartLinear, HeadLinear, SplitLinear
from native_sparse_attention.nn.start import own_weight
from native_sparse_attention.nn.transformer import IGNORED_LABEL, Transformer

ROWS, COLUMNS = {'weight': Shard(0), 'bias': Shard(0)}, {'weight': Shard(1)}
_OF_HEADS = (
    *('k_intrablock_positions', 'v_intrablock_positions', 'compress_mem_k', 'compress_mem_v'),
    *('compress_sinks', 'window_sinks'),
)
# Classes in a new model; an adapter or a quantised weight in place of one computes something else.
_DIVISIBLE = (nn.RMSNorm, nn.Identity, nn.Linear, BranchLinear, nn.Embedding)


Model = TypeVar('Model', bound=nn.Module)


class Behaviours(NamedTuple):
    """Mixins of the modules of a `Transformer`; None for the class of one process with divided weights."""

    norm: type | None  # before attention and before the feed-forward network
    attention: type
    combine_heads: type | None
    second: type  # linear layer of the feed-forward network
    embedding: type
    head: type


def apply_tp(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Model:
    """Divide the weights of a model over the ranks of a mesh, in place; return the model.

    Each rank computes some KV heads with their query heads, and some hidden units; block scores, block selection and
    caches never leave a rank. The vocabulary is divided too. `return_loss` gathers no logits; logits that are returned
    are whole. All ranks take the same rows and get the same loss. Apply it before checkpointing, compilation and
    `apply_fsdp`, and make the optimizer afterwards.

    `to_qkv` becomes a `SplitLinear`, with a weight each for queries, keys and values, so that each can be cut between
    heads at any number of ranks.

    Of a converted Hugging Face model, the vocabulary is not divided.

    Args:
        model: `Transformer`, or a converted Hugging Face model. Its networks φ compute each head independently, with
            weights that all heads share. Networks with weights per head are those of this package.
        mesh: of one dimension, whose size divides the number of KV heads and the hidden size of the feed-forward
            networks. Weights are those of its first rank.
        sequence_parallel: shard hidden states over the tokens of a row, of any number, between linear layers. Norms and
            residual sums run on shards `[B, ceil(T / N), dim]`, for N ranks. An all-gather and a reduce-scatter, with
            the traffic of the sum that they replace, enclose attention and the feed-forward network (arXiv 2205.05198).
            Calls with a cache have whole hidden states. Not for Hugging Face models, `apply_cp` and `apply_pp`.

    Raises:
        ValueError: another model or mesh, sizes that the mesh does not divide, modules of other classes, or biases that
            a new model does not have. In a call, on all ranks: ids whose shape differs between ranks, if it is new to
            each of them.
    """
    from native_sparse_attention.distributed import token_shards
    from native_sparse_attention.distributed.converted import divide_converted, is_converted

    check_mesh(mesh, (1,))
    check_flags(sequence_parallel=sequence_parallel)
    check_not_staged(model, 'apply_tp')
    if is_converted(model):
        if sequence_parallel:
            raise ValueError('sequence_parallel is True, but must be False for a Hugging Face model')
        divide_converted(model, mesh)
        return model
    _check_model(model, mesh.size())
    assert isinstance(model, Transformer)
    if sequence_parallel and hasattr(model, 'context_mesh'):
        raise ValueError('sequence_parallel is True, but must be False for a model after apply_cp')
    behaviours = token_shards.BEHAVIOURS if sequence_parallel else _BEHAVIOURS
    # With shards of tokens, replicated parameters read other tokens on each rank.
    replicated: dict[str, Any] = {'mesh': mesh, 'is_shared': sequence_parallel}
    for block in model.blocks:
        _divide_attention(block.attention, mesh, behaviours, replicated)
        norm, first, _, second = block.feed_forward.children()
        divide(norm, placements={}, behaviour=behaviours.norm, **replicated)
        divide(first, mesh, ROWS)
        divide(second, placements=COLUMNS, behaviour=behaviours.second, **replicated)
    divide(model.norm, placements={}, **replicated)
    is_tied = model.is_tied
    divide(model.token_emb, mesh, ROWS, behaviour=behaviours.embedding)
    if is_tied:
        model.to_logits.weight = own_weight(model.token_emb)
    divide(model.to_logits, mesh, ROWS, behaviour=behaviours.head)
    if sequence_parallel:
        token_shards.shard_tokens(model, mesh)
    return model


class ToRanks:
    """A norm whose output is the input of computation that differs by rank."""

    tensor_mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        return to_ranks(super().forward(x), self.tensor_mesh)  # type: ignore[misc]


class HeadsOfRank:
    """An attention layer with the heads of this rank. The loss of its block scores is the mean of all ranks."""

    tensor_mesh: DeviceMesh

    def forward(self, *args: Any, return_block_loss: bool = False, **options: Any) -> Any:
        if not return_block_loss:
            return super().forward(*args, **options)  # type: ignore[misc]
        out, loss = super().forward(*args, return_block_loss=True, **options)  # type: ignore[misc]
        return out, sum_over_ranks(loss / self.tensor_mesh.size(), self.tensor_mesh)

    def decodes_fixed(self, *args: Any) -> bool:
        return can_be_captured(self.tensor_mesh) and super().decodes_fixed(*args)  # type: ignore[misc]


class SumOverRanks:
    """A linear layer of features that are divided over the ranks."""

    tensor_mesh: DeviceMesh
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        out = sum_over_ranks(F.linear(x, self.weight), self.tensor_mesh)
        return out if self.bias is None else out + self.bias


class SameIds:
    """An embedding, whose ids start every exchange of a model. The ranks compare the shape of ids if it is new to them.

    Raises ValueError on all ranks if shapes differ.
    """

    tensor_mesh: DeviceMesh

    def forward(self, ids: Tensor) -> Tensor:
        self.compare(ids)
        return super().forward(ids)  # type: ignore[misc]

    def compare(self, ids: Tensor) -> None:
        known: set[tuple[int, ...]] = vars(self).setdefault('known_shapes', set())
        shape = tuple(ids.shape)
        if torch.compiler.is_compiling() or shape in known:
            return
        first, *others = exchange_objects(self.tensor_mesh.get_group(), shape)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise ValueError(f'ids of the embedding have shape {first} on rank 0, but {other} on rank {rank}')
        known.add(shape)


class EmbeddingOfRank(SameIds):
    """An embedding whose rows are divided over the ranks."""

    weight: Tensor
    num_embeddings: int

    def forward(self, ids: Tensor) -> Tensor:
        return sum_over_ranks(self._own_rows(ids), self.tensor_mesh)

    def _own_rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, 0 for those that other ranks have."""
        self.compare(ids)
        index, is_local = _local_rows(ids, self.num_embeddings, self.tensor_mesh)
        return F.embedding(index, self.weight) * is_local[..., None]


class HeadOfRank:
    """A linear layer without a bias whose outputs, the logits, are divided over the ranks."""

    tensor_mesh: DeviceMesh
    weight: Tensor
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Return all logits."""
        return gather_last(self._local_logits(x), self.out_features, self.tensor_mesh)

    def summed_cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over targets `[B, T]` of x `[B, T, dim]`, without gathering logits."""
        logits = self._local_logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.detach().amax(-1)
        all_reduce(largest, ReduceOp.MAX, self.tensor_mesh.get_group())
        sums = sum_over_ranks((logits - largest[..., None]).exp().sum(-1), self.tensor_mesh)
        is_ignored = targets == IGNORED_LABEL
        index, is_local = _local_rows(targets.masked_fill(is_ignored, 0), self.out_features, self.tensor_mesh)
        logit = sum_over_ranks(logits.gather(-1, index[..., None])[..., 0] * is_local, self.tensor_mesh)
        return (sums.log() + largest - logit).masked_fill(is_ignored, 0.0).sum()

    def _local_logits(self, x: Tensor) -> Tensor:
        return F.linear(self._to_ranks(x), self.weight)

    def _to_ranks(self, x: Tensor) -> Tensor:
        return to_ranks(x, self.tensor_mesh)


_BEHAVIOURS = Behaviours(
    norm=ToRanks,
    attention=HeadsOfRank,
    combine_heads=SumOverRanks,
    second=SumOverRanks,
    embedding=EmbeddingOfRank,
    head=HeadOfRank,
)


def _local_rows(ids: Tensor, num_tokens: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return the row of each id in the shard of this rank, 0 for rows of other ranks, and whether this rank has it.

    Ids outside the vocabulary have rows out of range on every rank, so that indexing raises, as in one process.
    """
    num_rows = -(-num_tokens // mesh.size())  # as Shard divides
    index = ids.long() - mesh.get_local_rank() * num_rows
    is_local = (index >= 0) & (index < num_rows)
    return index.masked_fill(~is_local & (ids >= 0) & (ids < num_tokens), 0), is_local


def _divide_attention(layer: Any, mesh: DeviceMesh, behaviours: Behaviours, replicated: dict[str, Any]) -> None:
    divide(layer.norm, placements={}, behaviour=behaviours.norm, **replicated)
    layer.to_qkv = SplitLinear.of(layer.to_qkv, layer.projection_sizes)
    divide(layer.to_qkv, mesh, dict.fromkeys(layer.to_qkv.names, Shard(0)))
    divide(layer.combine_heads, mesh, COLUMNS, behaviour=behaviours.combine_heads)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            divide(norm, mesh, {}, is_shared=True)
    if layer.rotary is not None and layer.rotary.rotary_emb is not None:
        divide(layer.rotary.rotary_emb, mesh, {}, is_shared=True)
    if (gate := _gate_of(layer)) is not None:
        divide(gate, mesh, ROWS)
    if isinstance(layer, SparseAttention):
        networks = [network for network in (layer.k_compress, layer.v_compress) if network is not None]
        divide_networks(nn.ModuleList(networks), layer.kv_heads, mesh)
    divide(layer, mesh, dict.fromkeys(_OF_HEADS, Shard(0)), behaviour=behaviours.attention)
    layer.divide_heads(mesh.size(), mesh.get_local_rank())


def divide_networks(networks: nn.ModuleList, kv_heads: int, mesh: DeviceMesh) -> None:
    for module in networks.modules():  # each once: keys and values may share modules
        if isinstance(module, ConvLinearCompress) and module.heads > 1:
            module.heads //= mesh.size()
            for name in ('groups', 'in_channels', 'out_channels'):
                setattr(module.conv, name, getattr(module.conv, name) // mesh.size())
            divide(module.conv, mesh, ROWS)
        elif isinstance(module, HeadLinear) and len(module.weight) == kv_heads > 1:
            divide(module, mesh, {'weight': Shard(0), 'bias': Shard(1)})
        elif not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            divide(module, mesh, {}, is_shared=True)


def _gate_of(layer: Any) -> nn.Module | None:
    return layer.to_strategy_combine if isinstance(layer, SparseAttention) else layer.output_gate


def _check_model(model: Any, ranks: int) -> None:
    """Raise ValueError, the same on every rank, before anything is changed or communicated."""
    if not isinstance(model, Transformer):
        raise ValueError(f'model is {shown(model)}, but must be a Transformer or a converted Hugging Face model')
    check_parameters(model)
    _check_modules(model, 'token_emb', 'norm', 'to_logits')
    num_rows = -(-model.num_tokens // ranks)
    if num_rows * (ranks - 1) >= model.num_tokens:
        raise ValueError(f'num_tokens is {model.num_tokens}, but must give each of {ranks} ranks a row')
    for block in model.blocks:
        layer: Any = block.attention
        if layer.kv_heads % ranks:
            raise ValueError(
                f'mesh has {ranks} ranks, but their number must divide the number of KV heads, {layer.kv_heads}'
            )
        kinds = [type(module) for module in block.feed_forward.children()]
        if kinds != [nn.RMSNorm, nn.Linear, nn.GELU, nn.Linear]:
            names = ', '.join(kind.__name__ for kind in kinds)
            raise ValueError(f'feed_forward has {names}, but must have RMSNorm, Linear, GELU, Linear')
        _check_modules(layer, 'norm', 'to_qkv', 'combine_heads')
        hidden = list(block.feed_forward.children())[1].out_features
        if hidden % ranks:  # type: ignore[operator]
            raise ValueError(
                f'mesh has {ranks} ranks, but their number must divide the hidden size of feed_forward, {hidden}'
            )
        if type(gate := _gate_of(layer)) not in (FixedStartLinear, nn.Linear, type(None)):
            raise ValueError(f'the gate is a {type(gate).__name__}, but must be a linear layer to be divided by heads')
        if isinstance(layer, SparseAttention):
            _check_networks(layer, ranks)


def check_parameters(model: nn.Module) -> None:
    """Raise ValueError for a model that is divided already and for parameters of a class of their own."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError('model is divided already, but apply_tp comes first, before apply_fsdp')
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ValueError(f'{name} is of class {type(parameter).__name__}, but must be a plain parameter')


def _check_modules(owner: nn.Module, *names: str) -> None:
    for name in names:
        if type(module := getattr(owner, name)) not in _DIVISIBLE:
            raise ValueError(f'{name} is a {type(module).__name__}, but must be the module of a new model')
        if getattr(module, 'bias', None) is not None:
            raise ValueError(f'{name} has a bias, but must have none to be divided')
        for option in ('padding_idx', 'max_norm', 'scale_grad_by_freq'):  # of an embedding
            if (value := getattr(module, option, None)) is not None and value is not False:
                raise ValueError(f'{name} has {option}={value}, but must have none to be divided')


@torch.no_grad()
def _check_networks(layer: SparseAttention, ranks: int) -> None:
    """Raise ValueError for networks that mix heads or have weights per head that the package cannot divide."""
    for network, dim, name in (
        (layer.k_compress, layer.dim_head, 'keys'),
        (layer.v_compress, layer.dim_value_head, 'values'),
    ):
        if network is None or any(isinstance(module, ConvLinearCompress | HeadLinear) for module in network.modules()):
            continue
        probe, shape = _perturbed_copy(network), (1, layer.kv_heads, 3, layer.compress_block_size, dim)
        device = next(probe.parameters(), layer.combine_heads.weight).device
        device = torch.device('cpu') if device.type == 'meta' else device
        with device:
            blocks = torch.linspace(-1, 1, prod(shape), dtype=torch.float32, device=device).view(shape)
            expected = probe(blocks)
            try:
                found = torch.cat([probe(part) for part in blocks.chunk(ranks, 1)], 1)
                is_alike = torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
            except Exception:  # of any class, as networks are given by users
                is_alike = False
        if not is_alike:
            raise ValueError(
                f'compress_mlp ({name}) is a {type(network).__name__}, which does not compute each head by itself with '
                f'the same weights, but must to be divided over {ranks} ranks'
            )


def _perturbed_copy(network: nn.Module) -> nn.Module:
    """Return a float32 copy in evaluation mode, on the CPU if the network is on the meta device.

    A small number is added to each parameter, since initial weights may be 0 or equal for all heads.
    """
    copy = deepcopy(network).eval()
    if any(tensor.is_meta for tensor in (*copy.parameters(), *copy.buffers())):
        copy.to_empty(device='cpu')
        for tensor in (*copy.parameters(), *copy.buffers()):
            tensor.zero_()
    for parameter in filter(torch.is_floating_point, copy.float().parameters()):
        parameter.add_(torch.linspace(0.05, 0.1, parameter.numel(), device=parameter.device).view_as(parameter))
    return copy
