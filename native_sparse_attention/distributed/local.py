"""Modules whose weights are divided over the ranks of a mesh and which compute with the part of this rank.

Parameters are DTensors, as optimizers, `fully_shard` and checkpoints need. The class of a module is replaced by a
subclass that reads them as plain tensors, so that its own arithmetic, and kernels, run as in one process. No hooks are
involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_reduce, get_backend_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from native_sparse_attention.distributed.sequence import all_gather_single


def to_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, equal on all ranks, for computation that differs by rank: its gradient is the sum over the ranks."""
    if not torch.is_grad_enabled():
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of x over the ranks.

    Computation that reads it must be equal on all ranks, so that the gradient is equal too; each x gets that gradient.
    x: a tensor that nothing else reads. Without autograd it is overwritten.
    """
    if calls_directly():
        all_reduce(x := x.contiguous(), group=mesh.get_group())
        return x
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()


def gather_last(x: Tensor, size: int, mesh: DeviceMesh) -> Tensor:
    """Return `[..., size]`, of which x is the part of this rank, divided as `Shard` divides the last dimension."""
    if not calls_directly():
        shape = torch.Size((*x.shape[:-1], size))
        kind: dict[str, Any] = {'shape': shape, 'stride': torch.empty(shape, device='meta').stride()}
        return DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False, **kind).full_tensor()
    part = -(-size // mesh.size())
    x = F.pad(x, (0, part - x.shape[-1])) if x.shape[-1] < part else x.contiguous()
    parts = x.new_empty(mesh.size() * x.shape[0], *x.shape[1:])
    all_gather_single(parts, x, group=mesh.get_group())
    *others, last = parts.view(mesh.size(), *x.shape)
    return torch.cat([*others, last[..., : size - part * len(others)]], -1)


def calls_directly() -> bool:
    """Return whether collectives are called directly: without autograd and compilation, which DTensors serve.

    They run on the current stream then and take the host less time. A CUDA graph can capture them.
    """
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def can_be_captured(mesh: DeviceMesh) -> bool:
    """Return whether a CUDA graph can capture collectives of the mesh, as those of NCCL; gloo runs on the host."""
    return 'cuda:nccl' in get_backend_config(mesh.get_group()).split(',')


def divide(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement],
    *,
    behaviour: type | None = None,
    is_shared: bool = False,
) -> None:
    """Distribute the parameters of a module itself, not those of its submodules, over the mesh.

    Args:
        module: changed in place.
        mesh: of one dimension. Values are those of its first rank.
        placements: by name of a parameter; replicated where there is none.
        behaviour: mixin before the module's class, whose methods find the mesh in `tensor_mesh`.
        is_shared: computation that differs by rank reads the replicated parameters; their gradients are summed over the
            ranks.
    """
    names = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        names.append(name)
        if not isinstance(parameter, DTensor):  # a tied weight is distributed already
            divided = distribute_tensor(parameter.detach(), mesh, [placements.get(name, Replicate())])
            setattr(module, name, nn.Parameter(divided, parameter.requires_grad))
    shared = frozenset(name for name in names if is_shared and name not in placements)
    if names or behaviour is not None:
        module.__class__ = _local_class(type(module), tuple(names), shared, behaviour)
        object.__setattr__(module, 'tensor_mesh', mesh)


def with_behaviour(module: nn.Module, behaviour: type) -> None:
    """Change the class of a module to a subclass with this mixin before it."""
    module.__class__ = _local_class(type(module), (), frozenset(), behaviour)


@cache
def _local_class(whole: type, names: tuple[str, ...], shared: frozenset[str], behaviour: type | None) -> type:
    def reset_parameters(module: Any) -> None:
        """Reset the DTensors, so that initial values depend on their shapes and not on the shapes of shards."""
        own, module.__class__ = module.__class__, whole
        try:
            module.reset_parameters()
        finally:
            module.__class__ = own

    members: dict[str, Any] = {name: property(partial(_read, name, name in shared)) for name in names}
    if hasattr(whole, 'reset_parameters'):
        members['reset_parameters'] = reset_parameters
    if behaviour is None:
        members |= {'divided_class': whole, 'weights_of_rank': _weights_of_rank}
    bases = (whole,) if behaviour is None else (behaviour, whole)
    return type(whole.__name__, bases, {**members, '__module__': whole.__module__})


def _weights_of_rank(module: nn.Module) -> list[Any]:
    """Return the tensors that the arithmetic of a divided module reads, see `core.plain.is_plain`."""
    with torch.no_grad():
        return [_read(name, is_shared=False, module=module) for name, _ in module.named_parameters(recurse=False)]


def _read(name: str, is_shared: bool, module: nn.Module) -> Any:
    parameter = nn.Module.__getattr__(module, name)
    # Between calls a sharded parameter is on a mesh of more dimensions, and the engine that shards it reads it here.
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
        return parameter
    local = parameter.to_local()
    return to_ranks(local, parameter.device_mesh) if is_shared else local
