"""The auxiliary loss of the block scores of a converted model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from native_sparse_attention.integrations.transformers.attention import NSAAttention
from native_sparse_attention.integrations.transformers.model import NSAPreTrained


@contextmanager
def collect_block_losses(model: Any) -> Iterator[list[Tensor]]:
    """Collect the `block_score_loss` of each converted layer, in the order of the layers.

    Forwards inside the context append one scalar per layer, differentiable in the network φ and the model. Dense
    queries of `dense_below` do not count; a forward of such queries alone appends 0. Forwards after a filled cache
    append nothing. Add the mean of the losses, times a weight, to the loss of the model; with the other weights frozen
    it trains φ alone, as a first stage may.

    Args:
        model: a converted model.

    Raises:
        ValueError: the model is not converted, or trains with gradient checkpointing, which would compute losses twice.
    """
    if not isinstance(model, NSAPreTrained):
        raise ValueError(f'model is a {type(model).__name__}, but must be converted')
    if model.training and any(getattr(m, 'gradient_checkpointing', False) for m in model.modules()):
        raise ValueError('gradient checkpointing is on, but must be off where losses of block scores are collected')
    layers = [module for module in model.modules() if isinstance(module, NSAAttention)]
    losses: list[Tensor] = []
    for layer in layers:
        layer.block_losses = losses
    try:
        yield losses
    finally:
        for layer in layers:
            layer.block_losses = None
