"""Checks of the shape that a compression network returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def check_network(network: nn.Module, shape: Sequence[int], *, name: str, like: Tensor | None = None) -> None:
    """Run the network once on zeros of `shape` `[B, H, C, l, D]`, in eval mode, and restore its mode.

    name: as in `compress_blocks`. like: a tensor with the dtype and device of the zeros; default a weight.

    Raises ValueError where the network raises, or returns another shape than `[B, H, C, D]`.
    """
    if like is None:
        default = torch.empty((), device=torch.get_default_device())
        like = next((p for p in network.parameters() if p.is_floating_point()), default)
    blocks = torch.zeros(shape, dtype=like.dtype, device=like.device)
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
    check_output(compressed, shape, shape[-1], name)


def check_output(compressed: Tensor, shape: Sequence[int], value_dim: int, name: str) -> None:
    if not isinstance(compressed, Tensor) or compressed.shape != (*shape[:3], value_dim):
        raise ValueError(f'{_rule(shape, value_dim, name)}, got {describe(compressed)}')


def _rule(shape: Sequence[int], value_dim: int, name: str) -> str:
    expected = [*shape[:3], value_dim]
    return f'compress_mlp ({name}) must map [B, H, C, l, D] = {list(shape)} to [B, H, C, D] = {expected}'


def describe(value: object) -> str:
    match value:
        case Tensor():
            return str(list(value.shape))
        case list() | tuple():
            return f'{type(value).__name__} of ({", ".join(type(item).__name__ for item in value)})'
        case _:
            return type(value).__name__
