"""Recompute everything of `nsa` but the block selection in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from native_sparse_attention.core import private
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops.block_selection.api import select


def recompute(attend: Callable[[Callable[..., Tensor]], Tensor]) -> Tensor:
    """Return attend(select); its backward pass saves the inputs and the selected blocks and recomputes the rest.

    attend: calls `nsa` with the given function in place of `select_blocks`, after whatever else is to be recomputed.
        It draws no random numbers.

    Under transforms of torch.func and in torch.export, which have no checkpointing, nothing is recomputed.
    """
    if private.is_transformed() or torch.compiler.is_exporting():
        return attend(select_blocks)
    if not torch.compiler.is_compiling():
        return checkpoint(attend, SavedSelection(), use_reentrant=False, preserve_rng_state=False)
    # Traced code must not change state outside it, so the selected blocks are saved as the result of their op.
    contexts = partial(create_selective_checkpoint_contexts, _save_selection)
    return checkpoint(attend, select_blocks, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class SavedSelection:
    """Select blocks once, called as the inner `select`; return the same blocks in every later call."""

    def __init__(self) -> None:
        self.block_indices: Tensor | None = None
        self._parts: dict[object, SavedSelection] = {}

    def part(self, key: object) -> SavedSelection:
        """Return the saved selection of one of several calls of `nsa`, which make up the output together."""
        return self._parts.setdefault(key, SavedSelection())

    @torch.no_grad()
    def __call__(self, *args: Any) -> Tensor:
        if self.block_indices is None:
            self.block_indices = select(*args)
        return self.block_indices


def _save_selection(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_selection = str(op) == 'native_sparse_attention.select_blocks.default'
    return CheckpointPolicy.MUST_SAVE if is_selection else CheckpointPolicy.PREFER_RECOMPUTE
