"""Checks of meshes and models, which run before any communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from native_sparse_attention.core.checks import shown


def check_mesh(mesh: Any, dims: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh. Raise ValueError unless it has one of these numbers of dimensions, with names if more than 1."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f'mesh is {shown(mesh)}, but must be a DeviceMesh')
    if mesh.ndim not in dims:
        allowed = ' or '.join(map(str, dims))
        raise ValueError(f'mesh has {mesh.ndim} dimensions, but must have {allowed}: take a part of it by name')
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ValueError('mesh has dimensions without names, but must have mesh_dim_names')
    return mesh


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of a `Transformer` or of a Hugging Face model, with or without its head."""
    layers = getattr(getattr(model, 'base_model', model), 'layers', None)
    if not isinstance(model, nn.Module) or not isinstance(layers, nn.ModuleList):
        raise ValueError(f'model is {shown(model)}, but must be a Transformer or a converted Hugging Face model')
    return list(layers)


def check_not_staged(model: nn.Module, function: str) -> None:
    """Raise ValueError for a model that `apply_pp` has cut."""
    if hasattr(model, 'pipeline_mesh'):
        raise ValueError(f'model is a stage of a pipeline, but must be whole for {function}')


def check_whole_rows(model: nn.Module, function: str) -> None:
    """Raise ValueError for a model whose hidden states `apply_tp` has sharded over the tokens."""
    if hasattr(model, 'token_mesh'):
        raise ValueError(f'sequence_parallel of apply_tp was True, but must be False for {function}')


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank."""
    kind = mesh.device_type
    return torch.device(kind) if kind == 'cpu' else torch.device(kind, torch.get_device_module(kind).current_device())
