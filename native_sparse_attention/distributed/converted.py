"""Tensor parallelism of converted Hugging Face models: heads and hidden units are divided, embedding and head are not.

Modules are found by the names that all families share; transformers is not imported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from native_sparse_attention.distributed.local import divide, sum_over_ranks
from native_sparse_attention.distributed.mesh import blocks_of
from native_sparse_attention.distributed.tensor_parallel import (
    COLUMNS,
    ROWS,
    SameIds,
    SumOverRanks,
    ToRanks,
    check_parameters,
    divide_networks,
)
from native_sparse_attention.nn.start import own_weight

_PROJECTIONS = (('self_attn', ('q_proj', 'k_proj', 'v_proj', 'o_proj')), ('mlp', ('gate_proj', 'up_proj', 'down_proj')))

_ADDED = {'k_compress': 'positions', 'v_compress': 'positions', 'to_strategy_combine': 'weight'}


def is_converted(model: Any) -> bool:
    """Return whether the model has layers of the transformers integration."""
    layers = getattr(getattr(model, 'base_model', None), 'layers', ())
    return any(hasattr(getattr(layer, 'self_attn', None), 'k_compress') for layer in layers)


def divide_converted(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of a converted model over the ranks of a mesh, in place. Raises ValueError, as `apply_tp`."""
    blocks: list[Any] = blocks_of(model)
    check_parameters(model)
    for block in blocks:
        _check_block(block, mesh.size())
    for block in blocks:
        attention = block.self_attn
        before_mlp = getattr(block, 'pre_feedforward_layernorm', block.post_attention_layernorm)
        for norm in (block.input_layernorm, before_mlp):
            divide(norm, mesh, {}, behaviour=ToRanks)
        for part, (*first, last) in _PROJECTIONS:
            for name in first:
                divide(getattr(getattr(block, part), name), mesh, ROWS)
            divide(getattr(getattr(block, part), last), mesh, COLUMNS, behaviour=SumOverRanks)
        for name in ('q_norm', 'k_norm'):
            if hasattr(attention, name):
                divide(getattr(attention, name), mesh, {}, is_shared=True)
        if hasattr(attention, 'k_compress'):
            _divide_sparse(attention, mesh)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = [] if head is None or head.weight is not embedding.weight else [head]
    divide(embedding, mesh, {}, behaviour=SameIds)
    for head in tied:
        head.weight = own_weight(embedding)
        divide(head, mesh, {})
    for module in model.modules():  # other norms and heads
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            divide(module, mesh, {})


class _HeadsOfRank:
    """An attention layer with the heads of this rank. Losses of its block scores are the mean of all ranks."""

    tensor_mesh: DeviceMesh
    block_losses: list[Tensor] | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        losses = [] if self.block_losses is None else self.block_losses
        start = len(losses)
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        losses[start:] = [sum_over_ranks(loss / self.tensor_mesh.size(), self.tensor_mesh) for loss in losses[start:]]
        return out


def _divide_sparse(attention: Any, mesh: DeviceMesh) -> None:
    compressors = [c for c in (attention.k_compress, attention.v_compress) if c is not None]
    for compressor in compressors:
        divide_networks(nn.ModuleList([compressor.network]), len(compressor.positions), mesh)
        divide(compressor, mesh, {'positions': Shard(0)})
    if attention.to_strategy_combine is not None:
        divide(attention.to_strategy_combine, mesh, ROWS)
    divide(attention, mesh, {}, behaviour=_HeadsOfRank)
    attention.head_rank = mesh.get_local_rank()


def _check_block(block: Any, ranks: int) -> None:
    for part, names in _PROJECTIONS:
        for name in names:
            if type(module := getattr(getattr(block, part), name)) is not nn.Linear:
                raise ValueError(f'{name} is a {type(module).__name__}, but must be the module of a new model')
    for name, parameter in _ADDED.items():  # an adapter in place of one has no such parameter of its own
        module = getattr(block.self_attn, name, None)
        if module is not None and parameter not in dict(module.named_parameters(recurse=False)):
            raise ValueError(f'{name} is a {type(module).__name__}, but must be the module of a new model')
    kv_heads = block.self_attn.k_proj.out_features // block.self_attn.head_dim
    for count, name in ((kv_heads, 'number of KV heads'), (block.mlp.up_proj.out_features, 'hidden size of mlp')):
        if count % ranks:
            raise ValueError(f'mesh has {ranks} ranks, but their number must divide the {name}, {count}')
