"""The tensors of a checkpoint: a folder that any number of processes writes and any other number reads."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from native_sparse_attention.distributed import ProjectionLoadPlanner
from trainer.console import UserError, one_line
from trainer.folder import load_checkpoint
from trainer.ranks import is_lost_peer

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Write the weights and the state of the optimizer, None for one that made no step. All processes call it.

    Raises:
        OSError: names the folder.
    """
    try:
        with without_warnings():
            checkpoint.save(_tensors(model, optimizer)[0], checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        cause = _cause(error)
        cause = cause if isinstance(cause, OSError) else cause.__context__ or cause
        number = cause.errno if isinstance(cause, OSError) else None
        raise OSError(number, os.strerror(number) if number else one_line(cause), str(folder)) from error


def load_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill a model, and an optimizer that made steps, from a folder that any number of processes wrote.

    Raises:
        UserError: the folder cannot be read, or is of another shape.
    """
    state, moments = _tensors(model, optimizer)
    try:
        with without_warnings():
            planner = ProjectionLoadPlanner()
            checkpoint.load(state, checkpoint_id=folder, planner=planner, no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as error:  # of many kinds for a damaged file
        if is_lost_peer(error):
            raise
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        raise UserError(f'{folder}: damaged or of another shape: {one_line(cause)}') from error
    set_model_state_dict(model, state['model'])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, moments, options=_BY_NAME)


def read_newest(folder: Path, state: dict[str, Any], read: Callable[[dict[str, Any]], None]) -> None:
    """Call `read` with the state of a checkpoint, and again with a newer one that took its place meanwhile."""
    while True:
        try:
            return read(state)
        except UserError:
            newest = load_checkpoint(folder)
            if newest['tensors'] == state['tensors']:
                raise
            state = newest


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of both, and the whole state of the optimizer, which starts at zeros if there is none."""
    moments = {} if optimizer is None else get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    tensors = {name: value for name, value in moments.items() if isinstance(value, Tensor)}
    return {'model': get_model_state_dict(model), 'optimizer': tensors}, moments


def _cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Silence what PyTorch prints of a save or load without a process group, and its log of a folder without metadata,
    which holds whole tracebacks.
    """
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'torch.distributed is disabled')
        logging.disable(max(disabled, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(disabled)
