"""Pipeline parallelism: the blocks of a model are divided over the ranks, for `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from native_sparse_attention.core.checks import is_int, shown
from native_sparse_attention.distributed.local import with_behaviour
from native_sparse_attention.distributed.mesh import check_mesh, check_not_staged, check_whole_rows, device_of
from native_sparse_attention.distributed.sequence import exchange_objects
from native_sparse_attention.nn.checks import check_ids
from native_sparse_attention.nn.transformer import Transformer, num_labels, summed_cross_entropy


def apply_pp(model: Transformer, mesh: DeviceMesh, layers_per_stage: Sequence[int] | None = None) -> PipelineStage:
    """Reduce a model to the blocks of one stage of a pipeline, in place; return the stage for a schedule of PyTorch.

    Rank r of the mesh is stage r. The first stage has the embedding and takes ids `[B, T]`; the last one has the last
    norm and the head and returns logits `[B, T, num_tokens]`. Stages send hidden states `[B, T, dim]` and their
    gradients to each other. Parameters have the names and values that they have in the whole model.

    Apply it after `apply_tp`, before checkpointing, compilation and `apply_fsdp`, which take `stage.submod`. Make the
    optimizer of its parameters afterwards. The ranks build the same model; nothing is broadcast.

    Args:
        model: `Transformer` whose embedding and head are not tied.
        mesh: of one dimension.
        layers_per_stage: number of blocks of each rank, the same on all ranks; default as even as possible, the first
            stages having one more.

    Raises:
        ValueError: on all ranks: another model or mesh, and numbers of ranks or blocks that do not fit. In a forward of
            the stage: keyword arguments other than backend.
    """
    check_mesh(mesh, (1,))
    group, layers = mesh.get_group(), None
    try:
        _check_model(model)
        layers = _layers_of_stages(len(model.layers), mesh.size(), layers_per_stage)
    except ValueError as error:
        exchange_objects(group, error)
    assert layers is not None
    for rank, others in enumerate(exchange_objects(group, layers)):
        if others != layers:
            raise ValueError(f'layers_per_stage is {layers} on this rank, but {others} on rank {rank}')
    index = mesh.get_local_rank()
    start = sum(layers[:index])
    blocks, module = list(model.layers), nn.ModuleList()
    for number in range(start, start + layers[index]):
        module.add_module(str(number), blocks[number])
    model.layers = module
    absent = [*(['token_emb'] if index else []), *(['norm', 'to_logits'] if index < len(layers) - 1 else [])]
    for name in absent:
        setattr(model, name, None)
    with_behaviour(model, _StageModel)
    object.__setattr__(model, 'pipeline_mesh', mesh)
    stage = PipelineStage(model, index, len(layers), device_of(mesh), group=group)
    # A micro-batch of another shape than the first would not fit the buffers of the next stage. PyTorch 2.11 always
    # compares shapes.
    stage._runtime_validate = stage.is_first
    return stage


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of every label given the tokens before it, the loss of a schedule.

    Args:
        logits: `[B, T, num_tokens]`, of the last stage.
        labels: int32 or int64 `[B, T]`, in most cases the ids; -100 is ignored.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_ids('labels', labels)
    if logits.shape[:-1] != labels.shape or labels.shape[1] < 2:
        found, expected = tuple(labels.shape), tuple(logits.shape[:-1])
        raise ValueError(f'labels has shape {found}, but must have that of the ids, {expected}, with at least 2 tokens')
    targets = labels[:, 1:]
    return summed_cross_entropy(logits[:, :-1], targets) / num_labels(targets).clamp(min=1)


class _StageModel(Transformer):
    """A `Transformer` with the blocks of one stage. Modules of other stages are None."""

    pipeline_mesh: DeviceMesh

    @property
    def is_tied(self) -> bool:
        return False

    def forward(self, tokens: Tensor, *, backend: str | None = None, **unknown: NoReturn) -> Tensor:
        """tokens: ids `[B, T]` on the first stage, hidden states `[B, T, dim]` on the others."""
        for name in unknown:
            raise ValueError(f'{name} is given, but must not be to a stage of a pipeline')
        embed, norm, head = (getattr(self, name) for name in ('token_emb', 'norm', 'to_logits'))
        if embed is not None:
            check_ids('ids', tokens)
            tokens = embed(tokens)
        out = self._run_blocks(tokens, backend=backend)
        # PyTorch 2.11 refuses the strides of logits that are gathered from an uneven division of the vocabulary.
        return out if head is None else head(norm(out)).contiguous()


def _check_model(model: Any) -> None:
    if not isinstance(model, Transformer):
        raise ValueError(f'model is {shown(type(model).__name__)}, but must be a Transformer')
    check_not_staged(model, 'apply_pp')
    check_whole_rows(model, 'apply_pp')
    if hasattr(model, 'context_mesh'):
        raise ValueError('model is divided by apply_cp, but stages of a pipeline take whole sequences')
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError('model is sharded already, but apply_pp comes first, before apply_fsdp')
    if model.is_tied:
        raise ValueError('tie_embeddings of the model is True, but must be False: two stages would train one weight')


def _layers_of_stages(depth: int, ranks: int, layers: Any) -> list[int]:
    """Return the number of blocks of each stage."""
    if ranks > depth:
        raise ValueError(f'mesh has {ranks} ranks, but there must be at most as many stages as blocks, {depth}')
    if layers is None:
        return [depth // ranks + (rank < depth % ranks) for rank in range(ranks)]
    if not isinstance(layers, Sequence) or not all(is_int(number) and number > 0 for number in layers):
        raise ValueError(f'layers_per_stage is {shown(layers)}, but must be a sequence of integers of at least 1')
    if len(layers) != ranks or sum(layers) != depth:
        raise ValueError(
            f'layers_per_stage is {list(layers)}, but must have a number for each of {ranks} ranks, which sum to the '
            f'number of blocks, {depth}'
        )
    return list(layers)
