"""`ProjectionLoadPlanner`: checkpoints load across `apply_tp`, weights and optimizer state bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint

from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import joined, make_ids, make_model, whole

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from native_sparse_attention.distributed import ProjectionLoadPlanner, apply_fsdp, apply_tp

KINDS = ('separate', 'branches')
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def make(kind: str, tp: int, seed: int, **settings: Any) -> Transformer:
    """Return a model on data x tp ranks; with tp = 1 its heads are not divided."""
    mesh = init_device_mesh('cpu', (dist.get_world_size() // tp, tp), mesh_dim_names=('data', 'tensor'))
    model = make_model(kind, seed=seed, depth=1, **settings)
    if tp > 1:
        apply_tp(model, mesh['tensor'])
    return apply_fsdp(model, mesh['data'])


def train(kind: str, tp: int, seed: int) -> tuple[Transformer, torch.optim.Optimizer]:
    """Return a model after one training step."""
    model = make(kind, tp, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(make_ids(2, seed=seed), return_loss=True).backward()
    optimizer.step()
    return model, optimizer


def state_of(model: Transformer, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    parameters = dict(model.named_parameters())
    moments = ({name: whole(optimizer.state[p][key]) for name, p in parameters.items()} for key in ('exp_avg', 'step'))
    averages, steps = moments
    return [joined({name: whole(p).detach() for name, p in parameters.items()}), joined(averages), steps]


def save(folder: Path, tp: int) -> None:
    for kind in KINDS:
        model, optimizer = train(kind, tp, seed=3)
        weights, states = get_state_dict(model, optimizer, options=BY_NAME)
        checkpoint.save({'model': weights, 'optimizer': states}, checkpoint_id=folder / kind)
        expected = state_of(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, folder / f'{kind}.pt')


def load(folder: Path, tp: int) -> None:
    for kind in KINDS:
        model, optimizer = train(kind, tp, seed=5)
        for group in optimizer.param_groups:
            group['lr'] = 1.0
        weights, states = get_state_dict(model, optimizer, options=BY_NAME)
        state = {'model': weights, 'optimizer': states}
        checkpoint.load(state, checkpoint_id=folder / kind, planner=ProjectionLoadPlanner())
        settings = {'model_state_dict': weights, 'optim_state_dict': state['optimizer']}
        set_state_dict(model, optimizer, **settings, options=BY_NAME)
        assert optimizer.param_groups[0]['lr'] == 1e-2
        *found, steps = state_of(model, optimizer)
        *expected, _ = torch.load(folder / f'{kind}.pt')
        assert {float(step) for step in steps.values()} == {1.0}
        for values, wanted in zip(found, expected, strict=True):
            assert values.keys() == wanted.keys()
            assert all(torch.equal(values[name], wanted[name]) for name in wanted)
    model = make('separate', tp, seed=5, heads=4)
    weights = get_model_state_dict(model)
    with pytest.raises(CheckpointException, match=r'of a projection of .* rows, but the checkpoint has|Size mismatch'):
        checkpoint.load({'model': weights}, checkpoint_id=folder / 'separate', planner=ProjectionLoadPlanner())


@pytest.mark.full
@pytest.mark.parametrize(('saved', 'loaded'), [((4, 2), (1, 1)), ((3, 1), (4, 2))])
def test_across_tensor_parallelism(saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path) -> None:
    """saved, loaded: numbers of processes and of tensor ranks."""
    for name, function, (ranks, tp) in (('first', save, saved), ('second', load, loaded)):
        (tmp_path / name).mkdir()
        run_processes(function, ranks, tmp_path / name, tmp_path, tp)
