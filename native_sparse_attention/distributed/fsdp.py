"""Sharded data parallelism: `fully_shard` of PyTorch (FSDP2) for each block and for the rest of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from native_sparse_attention.core.checks import check_flags, shown
from native_sparse_attention.distributed.mesh import blocks_of, check_mesh, device_of
from native_sparse_attention.nn.layer import AttentionLayer
from native_sparse_attention.nn.rotary import Rotary

Model = TypeVar('Model', bound=nn.Module)

_RESHARDS = '_reshards_after_forward'  # attribute of units, which `hold_weights` restores
_HOLDS = '_holds_weights'  # attribute of the model, true inside `hold_weights`


def apply_fsdp(
    model: Model,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    *,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> Model:
    """Shard parameters, gradients and optimizer state of a model over the ranks of a mesh, in place; return the model.

    Each block is one unit of `fully_shard`, whose weights are whole only while it runs. Embedding, last norm and head
    are one more unit. Learned rotary frequencies are units of their own without a policy, so they stay float32. After a
    call without gradients all units are resharded. The gradients of the ranks are averaged. Nothing is broadcast, so
    all ranks must start from the same weights. Make the optimizer afterwards.

    `prefill`, `generate` and `DecodeStep` work as before, because each step calls the model. All ranks must make the
    same number of calls, see `hold_weights`. A model on the meta device gets values by `to_empty` and a loaded
    checkpoint, or by `reset_parameters` of its modules.

    Args:
        model: `Transformer`, or a Hugging Face model that `convert_to_nsa` returned.
        mesh: one dimension: shards; two: copies of shards (replicate, shard).
        mp_policy: dtypes of weights, gradients and outputs; default those of the parameters.
        reshard_after_forward: free the weights of a block after its forward and gather them again for its backward.
        offload_policy: where shards stay between uses; default on the device.

    Raises:
        ValueError: another model, a mesh of another number of dimensions, or a model that is sharded already.
    """
    check_mesh(mesh, (1, 2))
    check_flags(reshard_after_forward=reshard_after_forward)
    for name, value, kind in (
        ('mp_policy', mp_policy, MixedPrecisionPolicy),
        ('offload_policy', offload_policy, OffloadPolicy),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f'{name} is {shown(value)}, but must be of class {kind.__name__} or None')
    blocks = blocks_of(model)
    if _units(model):
        raise ValueError('model is sharded already, but must not be')
    if mesh.mesh_dim_names is None and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError('mesh has no mesh_dim_names, but after apply_tp it must be another part of the same mesh')
    common: dict[str, Any] = {'mesh': mesh, 'offload_policy': offload_policy or OffloadPolicy()}
    policy: dict[str, Any] = {'mp_policy': mp_policy or MixedPrecisionPolicy()}
    learned = [m for m in model.modules() if isinstance(m, Rotary) and m.rotary_emb is not None]
    # The backward pass starts with the unit of the head, so its weights stay.
    for module in (*learned, *blocks, model):
        own, reshards = {} if module in learned else policy, reshard_after_forward and module is not model
        unit = fully_shard(module, reshard_after_forward=reshards, **own, **common)
        setattr(unit, _RESHARDS, reshards)
    for layer in (m for m in model.modules() if isinstance(m, AttentionLayer)):
        layer.run_dtype = policy['mp_policy'].param_dtype
        layer.run_device = device_of(mesh) if isinstance(offload_policy, CPUOffloadPolicy) else None
    setattr(model, _HOLDS, False)
    model.register_forward_hook(_reshard_without_gradients)
    return model


def _reshard_without_gradients(model: nn.Module, *_: Any) -> None:
    """Free the weights that would stay whole for a backward pass.

    While a weight is whole, `parameters` yields it instead of its shard, so an optimizer made then would not train it.
    A step of an optimizer made before changes the shard, and the next forward would read the old weight.
    """
    if not torch.is_grad_enabled() and not getattr(model, _HOLDS):
        for unit in _units(model):
            unit.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def hold_weights(model: nn.Module) -> Iterator[None]:
    """Gather the weights of a sharded model once and keep them whole inside the context, for generation.

    A step of decoding gathers nothing then, so ranks may decode texts of different lengths. Every rank must enter and
    leave. Each GPU holds the whole model.

    Args:
        model: as `apply_fsdp` returns it.

    Raises:
        ValueError: the model is not sharded.
    """
    units = _units(model)
    if not units:
        raise ValueError('model is not sharded, but must be: apply_fsdp shards it')
    try:
        setattr(model, _HOLDS, True)
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        setattr(model, _HOLDS, False)
        for unit in units:
            unit.set_reshard_after_forward(getattr(unit, _RESHARDS), recurse=False)
            unit.reshard()
