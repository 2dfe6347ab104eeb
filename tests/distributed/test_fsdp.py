"""`apply_fsdp`: a model sharded over ranks equals one process, in training, decoding and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import (
    KINDS,
    assert_near,
    assert_same_gradients,
    gradients,
    learned_rotary,
    make_ids,
    make_model,
    recorded_blocks,
    whole,
)

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from native_sparse_attention.distributed import apply_fsdp, hold_weights

full = pytest.mark.full


def line(world_size: int | None = None) -> Any:
    return init_device_mesh('cpu', (world_size or dist.get_world_size(),))


def train_and_decode(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rank, batch = dist.get_rank(), 2
    model, ids = make_model(kind).to(dtype), make_ids(batch * dist.get_world_size())
    one = copy.deepcopy(model)
    apply_fsdp(model, init_device_mesh('cpu', shape, mesh_dim_names=('copies', 'shards')[-len(shape) :]))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    mine = slice(batch * rank, batch * (rank + 1))
    with recorded_blocks() as expected_blocks:
        expected = one(ids, return_loss=True)
        expected.backward()
    with recorded_blocks() as blocks:
        loss = model(ids[mine], return_loss=True)
        loss.backward()
    for found, wanted in zip(blocks, expected_blocks, strict=True):
        assert torch.equal(found, wanted[mine]), 'another block is selected'
    dist.all_reduce(mean := loss.detach() / dist.get_world_size())
    assert_near(mean, expected, 'loss')
    assert_same_gradients(model, gradients(one))
    model.eval()
    one.eval()
    assert_near(decoded(model, ids[:2]), decoded(one, ids[:2]), 'logits')
    tokens = one.generate(ids[:2], 4, seed=3)
    assert torch.equal(model.generate(ids[:2], 4, seed=3), tokens)
    with hold_weights(model):  # the ranks make different numbers of calls
        assert rank or torch.equal(model.generate(ids[:2], 4, seed=3), tokens)
    assert all(p.to_local().numel() < p.numel() for p in model.layers.parameters() if isinstance(p, DTensor))


@torch.no_grad()
def decoded(model: Transformer, ids: Tensor) -> Tensor:
    """Return the logits of a prefill in chunks, of a step and of several tokens."""
    cache = model.init_cache(len(ids), 40)
    logits = [model.prefill(ids, cache, chunk_size=20)[:, None], DecodeStep(model, cache)(ids[:, :1])]
    return torch.cat([*logits, model(ids[:, 1:4], cache=cache)], dim=1)


@pytest.mark.parametrize(
    ('kind', 'dtype', 'shape'),
    [
        ('separate', torch.float64, (2,)),
        *(pytest.param(kind, torch.float64, (3,), marks=full) for kind in KINDS),
        pytest.param('separate', torch.float32, (2,), marks=full),
        pytest.param('merged', torch.float64, (2, 2), marks=full),
    ],
)
def test_equals_one_process(kind: str, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    ranks = int(torch.tensor(shape).prod())
    run_processes(train_and_decode, ranks, tmp_path, kind, dtype, shape)


def in_half_precision() -> None:
    model = make_model('separate', sparse={'rotary_emb': learned_rotary()}).float()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if name.endswith(('rotary', 'to_qkv')):
            module.register_forward_hook(lambda m, args, out, name=name: seen.update({name: out.dtype}))
    apply_fsdp(model, line(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(make_ids(2), return_loss=True).backward()
    assert {dtype for name, dtype in seen.items() if name.endswith('rotary')} == {torch.float32}
    assert {dtype for name, dtype in seen.items() if name.endswith('to_qkv')} == {torch.bfloat16}
    assert all(p.dtype == whole(p.grad).dtype == torch.float32 for p in model.parameters())
    model.eval()
    cache = model.init_cache(1, 40)
    assert {layer.dtype for layer in cache} == {torch.bfloat16}
    model.prefill(make_ids(1), cache)
    with torch.no_grad():
        assert {layer.dtype for layer in model(make_ids(1), return_cache=True)[1]} == {torch.bfloat16}


def with_shards_on_the_cpu() -> None:
    """With `CPUOffloadPolicy`, layers make caches on the device where they run."""
    model, ids, rank = make_model(), make_ids(4), dist.get_rank()
    one = copy.deepcopy(model)
    apply_fsdp(model, line(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model(ids[2 * rank : 2 * rank + 2], return_loss=True).backward()
    one(ids, return_loss=True).backward()
    assert_same_gradients(model, gradients(one))
    model.eval()
    one.eval()
    assert torch.equal(model.generate(ids, 4, seed=3), one.generate(ids, 4, seed=3))
    for block in model.blocks:
        assert block.attention.run_device == torch.device('cpu')
        block.attention.run_device = torch.device('meta')
    assert {layer.device.type for layer in model.init_cache(1, 40)} == {'meta'}


@full
def test_half_precision(tmp_path: Path) -> None:
    run_processes(in_half_precision, 2, tmp_path)


@full
def test_offload(tmp_path: Path) -> None:
    run_processes(with_shards_on_the_cpu, 2, tmp_path)


def start(model: Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Transformer, optimizer: torch.optim.Optimizer, seed: int) -> None:
    # The same rows on every rank, so that the mean is that of any number of ranks.
    model(make_ids(2, seed=seed), return_loss=True).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights, states = get_state_dict(model, optimizer)
    flat = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    state: Any = states['state']
    for name, entries in state.items():
        flat |= {f'{name} {key}': value for key, value in entries.items()}
    return {name: whole(value).detach().clone() for name, value in flat.items()}


def sharded(kind: str) -> Transformer:
    return apply_fsdp(make_model(kind), line())


def save(folder: Path, kind: str, make: Callable[..., Transformer] = sharded, *arguments: Any) -> None:
    model = make(kind, *arguments)
    optimizer = start(model)
    step(model, optimizer, 1)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({'model': weights, 'optimizer': states}, checkpoint_id=folder / 'checkpoint')
    saved = state_of(model, optimizer)
    step(model, optimizer, 2)
    after = state_of(model, optimizer)
    if dist.get_rank() == 0:
        torch.save((saved, after), folder / 'expected')


def load(
    folder: Path, kind: str, same_ranks: bool, make: Callable[..., Transformer] = sharded, *arguments: Any
) -> None:
    """Load into a model on the meta device: every value equals that of the checkpoint."""
    with torch.device('meta'):
        model = make(kind, *arguments)
    model.to_empty(device='cpu')
    optimizer = start(model)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({'model': weights, 'optimizer': states}, checkpoint_id=folder / 'checkpoint')
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    saved, after = torch.load(folder / 'expected')
    for found, expected, is_exact in ((state_of(model, optimizer), saved, True), (None, after, same_ranks)):
        if found is None:
            step(model, optimizer, 2)
            found = state_of(model, optimizer)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if is_exact:
                assert torch.equal(found[name], value), name
            else:
                assert_near(found[name], value, name)


@pytest.mark.parametrize('kind', ['separate', *(pytest.param(k, marks=full) for k in ('merged', 'branches'))])
def test_checkpoints_load_at_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    for number, (function, ranks, more) in enumerate([(save, 2, ()), (load, 2, (True,)), (load, 3, (False,))]):
        (store := tmp_path / str(number)).mkdir()
        run_processes(function, ranks, store, tmp_path, kind, *more)


def evaluate_between() -> None:
    """Calls without gradients reshard weights: before the optimizer is made, inside a forward, and before its step."""
    model, ids = make_model(), make_ids(2)
    one = copy.deepcopy(model)
    apply_fsdp(model, line())
    losses = []
    for each in (model, one):

        @torch.no_grad()
        def evaluate(each: Transformer = each) -> None:
            each(ids[:, :9])

        evaluate()
        assert each is one or all(isinstance(p, DTensor) for p in each.parameters())
        optimizer = start(each)
        for _ in range(2):
            loss = each(ids, return_loss=True)
            evaluate()
            loss.backward()
            evaluate()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(each(ids, return_loss=True))
    assert_near(*losses)


@full
def test_evaluation_between_steps(tmp_path: Path) -> None:
    run_processes(evaluate_between, 2, tmp_path)


def start_on_meta() -> None:
    """Values are those that `reset_parameters` draws: each shard draws its own, and all constants are set."""
    with torch.device('meta'):
        model = make_model()
    apply_fsdp(model, line()).to_empty(device='cpu')
    torch.manual_seed(dist.get_rank())  # on a CPU each rank draws its shard by itself
    for module in model.modules():
        reset: Any = getattr(module, 'reset_parameters', lambda: None)
        reset()
    attention: Any = model.blocks[0].attention
    assert torch.equal(whole(attention.to_strategy_combine.bias), torch.tensor([-2.0, -2.0, 2.0]).double().repeat(8))
    assert not whole(attention.k_intrablock_positions).any()
    rows = whole(attention.to_qkv.weight)
    assert len(rows.unique(dim=0)) == len(rows)
    assert 0.5 < rows.abs().max() / 16**-0.5 <= 1.0
    model(make_ids(1), return_loss=True).backward()


@full
def test_start_on_the_meta_device(tmp_path: Path) -> None:
    run_processes(start_on_meta, 2, tmp_path)


def errors() -> None:
    """Every rank raises an error of one line; the group and the model work afterwards."""
    model, mesh = make_model(), line()
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("mesh is 'cpu', but must be a DeviceMesh", model, 'cpu', {}),
        ('mesh has 3 dimensions', model, init_device_mesh('cpu', (2, 1, 1)), {}),
        ('mesh has dimensions without names', model, init_device_mesh('cpu', (2, 1)), {}),
        ('model is .*, but must be a Transformer', nn.Linear(2, 2), mesh, {}),
        ('mp_policy is .*, but must be of class', model, mesh, {'mp_policy': torch.bfloat16}),
        ('reshard_after_forward is', model, mesh, {'reshard_after_forward': 2}),
        ('model is sharded already', apply_fsdp(make_model(), mesh), mesh, {}),
    ]
    for message, module, on, options in cases:
        with pytest.raises(ValueError, match=message) as raised:
            apply_fsdp(module, on, **options)
        assert '\n' not in str(raised.value)
    with pytest.raises(ValueError, match='model is not sharded'), hold_weights(model):
        pass
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    one, ids = copy.deepcopy(model), make_ids(1)
    one(ids, return_loss=True).backward()
    apply_fsdp(model, mesh)
    with pytest.raises(ValueError, match='one must be left out'):  # inside a block
        model(ids, mask=torch.ones_like(ids, dtype=torch.bool), cu_seqlens=torch.tensor([0, 33], dtype=torch.int32))
    model(ids, return_loss=True).backward()
    assert_same_gradients(model, gradients(one))


@full
def test_wrong_arguments(tmp_path: Path) -> None:
    run_processes(errors, 2, tmp_path)
