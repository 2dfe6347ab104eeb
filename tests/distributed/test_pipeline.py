"""`apply_pp`: a model that is cut into the stages of a pipeline equals one process, in training and checkpoints."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import (
    KINDS,
    assert_near,
    gradients,
    joined,
    make_ids,
    make_model,
    recorded_blocks,
)

pytest.importorskip('torch.distributed.pipelining', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_pp, apply_tp, next_token_loss

full = pytest.mark.full


def line() -> Any:
    return init_device_mesh('cpu', (dist.get_world_size(),))


def untied(kind: str, **changes: Any) -> Transformer:
    return make_model(kind, tie_embeddings=False, **changes)


def step(schedule: Any, stage: PipelineStage, ids: Tensor) -> Tensor | None:
    """Return the loss on the last stage."""
    losses: list[Tensor] = []
    schedule.step(*[ids] * stage.is_first, target=ids if stage.is_last else None, losses=losses)
    return torch.stack(losses).mean().detach() if stage.is_last else None


def assert_equal_training(
    one: Transformer,
    stage: PipelineStage,
    ids: Tensor,
    micro_batches: int = 4,
    make_schedule: Any = Schedule1F1B,
    mine: slice = slice(None),
) -> None:
    """Train two steps. stage: of the model one. mine: rows of this rank, whose gradients are averaged over ranks."""
    model: Any = stage.submod
    schedule = make_schedule(stage, micro_batches, loss_fn=next_token_loss)
    for _ in range(2):
        expected = one(ids, labels=ids).loss
        expected.backward()
        loss = step(schedule, stage, ids[mine])
        if loss is not None and mine == slice(None):
            assert_near(loss, expected, 'loss')
        wanted, found = gradients(one), joined(gradients(model))
        assert found
        for name, gradient in found.items():
            assert_near(gradient, wanted[name], name)
        for each in (one, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


@torch.no_grad()
def assert_equal_evaluation(one: Transformer, stage: PipelineStage, ids: Tensor) -> None:
    """Logits and block indices of the second call: in the first, PyTorch runs the stage once more to learn shapes."""
    schedule = ScheduleGPipe(stage, len(ids), loss_fn=next_token_loss)
    with recorded_blocks() as expected_blocks:
        expected = one(ids)
    inputs, target = [ids] * stage.is_first, ids if stage.is_last else None
    schedule.eval(*inputs, target=target)
    with recorded_blocks() as blocks:
        logits = schedule.eval(*inputs, target=target)
    assert stage.is_last == (logits is not None)
    if stage.is_last:
        assert_near(logits, expected, 'logits')
    assert bool(expected_blocks) == one.use_sparse_attn
    model: Any = stage.submod
    layers = [int(name) for name, _ in model.layers.named_children()]
    for number, layer in enumerate(layers if expected_blocks else []):
        found = torch.cat(blocks[number :: len(layers)])
        assert torch.equal(found, expected_blocks[layer]), 'another block is selected'


def train(kind: str, dtype: torch.dtype, layers: list[int] | None, make_schedule: Any) -> None:
    one, ids = untied(kind, depth=5).to(dtype), make_ids(4)
    stage = apply_pp(copy.deepcopy(one), line(), layers)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [name for name, _ in stage.submod.named_parameters()])
    assert sorted(name for of_rank in names for name in of_rank or ()) == sorted(dict(one.named_parameters()))
    assert_equal_training(one, stage, ids, 4, make_schedule)
    assert_equal_evaluation(one, stage, ids)


@pytest.mark.parametrize(
    ('kind', 'ranks', 'layers', 'make_schedule', 'dtype'),
    [
        ('separate', 2, None, Schedule1F1B, torch.float64),
        pytest.param('merged', 3, None, Schedule1F1B, torch.float64, marks=full),
        pytest.param('branches', 3, [1, 3, 1], Schedule1F1B, torch.float64, marks=full),
        pytest.param('dense', 4, None, ScheduleGPipe, torch.float64, marks=full),
        pytest.param('scores', 4, [2, 1, 1, 1], Schedule1F1B, torch.float64, marks=full),
        pytest.param('merged', 2, [1, 4], ScheduleGPipe, torch.float32, marks=full),
        pytest.param('separate', 1, None, Schedule1F1B, torch.float64, marks=full),
    ],
)
def test_equals_one_process(
    kind: str, ranks: int, layers: list[int] | None, make_schedule: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    run_processes(train, ranks, tmp_path, kind, dtype, layers, make_schedule)


def train_drawn_settings() -> None:
    for seed in range(8):
        draw = random.Random(seed)
        ranks, depth = dist.get_world_size(), draw.randint(3, 6)
        borders = sorted(draw.sample(range(1, depth), ranks - 1))
        layers = [b - a for a, b in zip([0, *borders], [*borders, depth], strict=True)]
        micro_batches, kind = draw.choice([3, 4, 7]), draw.choice([*KINDS])
        ids = make_ids(micro_batches * draw.choice([1, 2]), draw.choice([2, 3, 5, 33]), seed)
        one = untied(kind, seed=seed, depth=depth, causal=draw.choice([True, True, False]))
        stage = apply_pp(copy.deepcopy(one), line(), layers)
        try:
            assert_equal_training(one, stage, ids, micro_batches, draw.choice([Schedule1F1B, ScheduleGPipe]))
        except Exception as error:
            raise AssertionError(f'seed {seed}, layers {layers}') from error


@full
def test_drawn_settings(tmp_path: Path) -> None:
    run_processes(train_drawn_settings, 3, tmp_path)


def train_with_other_parallelism(kind: str) -> None:
    """Train in the order of `docs/distributed.md`."""
    one, ids = untied(kind), make_ids(8)
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('stage', 'data'))
    stage = apply_pp(copy.deepcopy(one), mesh['stage'])
    model: Any = stage.submod
    model.gradient_checkpointing_enable()
    apply_fsdp(model, mesh['data'])
    first = 4 * mesh['data'].get_local_rank()
    assert_equal_training(copy.deepcopy(one), stage, ids, mine=slice(first, first + 4))

    mesh = init_device_mesh('cpu', (2, 1, 2), mesh_dim_names=('stage', 'data', 'tensor'))
    stage = apply_pp(apply_tp(copy.deepcopy(one), mesh['tensor']), mesh['stage'])
    if kind == 'merged':
        apply_fsdp(stage.submod, mesh['data'])
    assert_equal_training(one, stage, ids)


@full
@pytest.mark.parametrize('kind', ['separate', 'merged'])
def test_with_tensor_parallelism_and_sharding(kind: str, tmp_path: Path) -> None:
    run_processes(train_with_other_parallelism, 4, tmp_path, kind)


def train_compiled() -> None:
    """Compile and shard blocks, also those of a stage without embedding and head."""
    mesh, one = init_device_mesh('cpu', (3, 1), mesh_dim_names=('stage', 'data')), untied('dense', depth=3)
    stage = apply_pp(copy.deepcopy(one), mesh['stage'])
    model: Any = stage.submod
    for block in model.blocks:
        block.compile(backend='eager')
    apply_fsdp(model, mesh['data'])
    assert_equal_training(one, stage, make_ids(4))


@full
def test_compiled(tmp_path: Path) -> None:
    run_processes(train_compiled, 3, tmp_path)


BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer, options=BY_NAME)
    return {'model': weights, 'optimizer': states}


def save(folder: Path) -> None:
    stage = apply_pp(untied('separate', depth=3), line())
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    for seed in range(2):
        step(Schedule1F1B(stage, 3, loss_fn=next_token_loss), stage, make_ids(3, seed=seed))
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(state_of(stage.submod, optimizer), checkpoint_id=folder)


def loaded(folder: Path, model: nn.Module) -> torch.optim.Optimizer:
    model.to_empty(device='cpu')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    states = {'model_state_dict': state['model'], 'optim_state_dict': state['optimizer']}
    set_state_dict(model, optimizer, **states, options=BY_NAME)
    return optimizer


def load(folder: Path) -> None:
    """Load into a model on the meta device: every value equals that of the checkpoint."""
    with torch.device('meta'):
        one, model = untied('separate', depth=3), untied('separate', depth=3)
    stage = apply_pp(model, line())
    optimizers = [loaded(folder, one), loaded(folder, model)]
    ids = make_ids(3)
    loss = step(Schedule1F1B(stage, 3, loss_fn=next_token_loss), stage, ids)
    expected = one(ids, labels=ids).loss
    expected.backward()
    if loss is not None:
        assert_near(loss, expected, 'loss')
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert_near(parameter, one.get_parameter(name), name)


@full
def test_checkpoints_load_into_other_stages(tmp_path: Path) -> None:
    for number, (function, ranks) in enumerate([(save, 2), (load, 3), (load, 1)]):
        (store := tmp_path / str(number)).mkdir()
        run_processes(function, ranks, store, tmp_path / 'checkpoint')


def errors() -> None:
    """Every rank raises an error of one line before anything is changed; the group works afterwards."""
    flat, rank = line(), dist.get_rank()
    named = init_device_mesh('cpu', (3, 1), mesh_dim_names=('stage', 'data'))
    cases: list[tuple[str, Any, Any, Any]] = [
        ("mesh is 'cpu', but must be a DeviceMesh", untied('separate'), 'cpu', None),
        ('mesh has 2 dimensions, but must have 1', untied('separate', depth=3), named, None),
        ("model is 'Linear', but must be a Transformer", nn.Linear(2, 2), flat, None),
        ('mesh has 3 ranks, but there must be at most as many stages as blocks, 2', untied('separate'), flat, None),
        ('layers_per_stage is 3, but must be a sequence', untied('separate', depth=3), flat, 3),
        (r'layers_per_stage is \[2, 0, 1\], but must be a sequence', untied('separate', depth=3), flat, [2, 0, 1]),
        (r'layers_per_stage is \[1, 2\], but must have a number', untied('separate', depth=3), flat, [1, 2]),
        (r'layers_per_stage is \[1, 1, 2\], but must .* blocks, 3', untied('separate', depth=3), flat, [1, 1, 2]),
        ('tie_embeddings of the model is True, but must be False', make_model('merged', depth=3), flat, None),
        ('model is divided by apply_cp', apply_cp(untied('separate', depth=3), flat), flat, None),
        ('model is sharded already', apply_fsdp(untied('separate', depth=3), flat), flat, None),
        ('model is a stage .* whole for apply_pp', apply_pp(untied('dense', depth=3), flat).submod, flat, None),
        # A setting that one rank alone passes is an error on all ranks.
        ('layers_per_stage is 3, but must be a sequence', untied('dense', depth=3), flat, 3 if rank == 1 else None),
        ('layers_per_stage is .* on rank', untied('dense', depth=4), flat, [2, 1, 1] if rank else [1, 2, 1]),
    ]
    for message, model, mesh, layers in cases:
        before = [name for name, _ in model.named_parameters()]
        with pytest.raises(ValueError, match=message) as raised:
            apply_pp(model, mesh, layers)
        assert '\n' not in str(raised.value)
        assert before == [name for name, _ in model.named_parameters()]
    model: Any = apply_pp(untied('separate', depth=3), flat).submod
    for apply, name in ((apply_tp, 'apply_tp'), (apply_cp, 'apply_cp')):
        with pytest.raises(ValueError, match=f'model is a stage of a pipeline, but must be whole for {name}'):
            apply(model, flat)
    with pytest.raises(ValueError, match='mask is given, but must not be to a stage'):
        model(make_ids(1), mask=torch.ones(1, 33, dtype=torch.bool))
    with pytest.raises(ValueError, match='cache is given, but must not be to a stage'):
        model.eval().generate(make_ids(1), 2)
    with pytest.raises(ValueError, match='labels has shape'):
        next_token_loss(torch.zeros(2, 5, 29), make_ids(2, 4))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3


@full
def test_wrong_arguments(tmp_path: Path) -> None:
    run_processes(errors, 3, tmp_path)


def change_shape(batch: int, seqlen: int) -> None:
    stage = apply_pp(untied('dense'), line())
    schedule = Schedule1F1B(stage, 2, loss_fn=next_token_loss)
    step(schedule, stage, make_ids(4))
    if stage.is_first:
        with pytest.raises(Exception, match=r'Stage 0 forward inputs.*shape mismatch') as raised:
            step(schedule, stage, make_ids(batch, seqlen))
        assert '\n' not in str(raised.value)
        raise ValueError('the shape is refused')
    step(schedule, stage, make_ids(batch, seqlen))


@full
@pytest.mark.parametrize(('batch', 'seqlen'), [(3, 33), (4, 20), (4, 40)])
def test_another_shape_ends_the_run(batch: int, seqlen: int, tmp_path: Path) -> None:
    """The first stage raises before it sends, and the others miss a peer."""
    with pytest.raises(pytest.fail.Exception, match='ValueError: the shape is refused'):
        run_processes(change_shape, 2, tmp_path, batch, seqlen)
