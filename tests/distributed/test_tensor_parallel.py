"""`apply_tp`: a model whose heads are divided over ranks equals one process, in training, decoding and checkpoints."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from native_sparse_attention import functional
from native_sparse_attention.compress import ConvLinearCompress
from native_sparse_attention.core.backend import BackendChoice
from native_sparse_attention.inference import decode
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.nn.compress.apply import takes_overlapping
from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import (
    KINDS,
    assert_near,
    gradients,
    joined,
    learned_rotary,
    make_ids,
    make_model,
    recorded_blocks,
    whole,
)

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from native_sparse_attention.distributed import apply_fsdp, apply_tp, local, tensor_parallel
from tests.distributed.test_fsdp import decoded, load, save
from tests.layer.test_compress import NETWORKS
from tests.layer.test_decode_step import recorded_step

full = pytest.mark.full


def assert_equal_training(
    model: Transformer, one: Transformer, ids: Tensor, mine: slice = slice(None), **options: Any
) -> None:
    """model: divided, and sharded where mine are rows of this rank. one: the same model in one process."""
    with recorded_blocks() as expected_blocks:
        expected = one(ids, return_loss=True, **options)
        _total(expected).backward()
    with recorded_blocks() as blocks:
        out = model(ids[mine], return_loss=True, **options)
        _total(out).backward()
    layer: Any = model.blocks[0].attention
    for found, wanted in zip(blocks, expected_blocks, strict=True):
        assert torch.equal(found, wanted[mine].chunk(layer.head_ranks, 2)[layer.head_rank]), 'another block is selected'
    if mine == slice(None):
        assert_near(_total(out), _total(expected), 'loss')
    found, wanted = joined(gradients(model)), gradients(one)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_near(found[name], gradient, name)
    model.zero_grad()
    one.zero_grad()


def _total(out: Any) -> Tensor:
    return out[0] + out[1] if isinstance(out, tuple) else out


def line() -> Any:
    return init_device_mesh('cpu', (dist.get_world_size(),))


def train_and_decode(kind: str, dtype: torch.dtype) -> None:
    model, ids = make_model(kind).to(dtype), make_ids(2)
    one = copy.deepcopy(model)
    apply_tp(model, line())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_equal_training(model, one, ids)
    for found, wanted in zip(model(ids, labels=ids), one(ids, labels=ids), strict=True):
        assert_near(found, wanted, 'logits')
    with torch.no_grad():
        assert_near(model(ids).view(2, -1), one(ids).view(2, -1), 'logits without gradients')
    model.eval()
    one.eval()
    assert_near(decoded(model, ids), decoded(one, ids), 'logits')
    assert torch.equal(model.generate(ids, 4, seed=3), one.generate(ids, 4, seed=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, 'backend_of', lambda *_, **__: BackendChoice('triton'))
        cache = model.init_cache(2, 40)
        assert one.decodes_fixed(cache, 1) == (kind != 'dense')
        assert not model.decodes_fixed(cache, 1)
        with pytest.raises(ValueError, match=r'use_graph is True, .* collectives of apply_tp, if any, run over NCCL'):
            DecodeStep(model, cache, use_graph=True)
        patch.setattr(local, 'get_backend_config', lambda group: 'cpu:gloo,cuda:nccl')
        assert model.decodes_fixed(cache, 1) == (kind != 'dense')
    mask = torch.arange(33) < torch.tensor([[33], [20]])
    assert torch.equal(model.generate(ids, 4, mask=mask, seed=3), one.generate(ids, 4, mask=mask, seed=3))


@pytest.mark.parametrize(
    ('kind', 'ranks', 'dtype'),
    [
        ('separate', 2, torch.float64),
        *(pytest.param(kind, 4, torch.float64, marks=full) for kind in KINDS),
        pytest.param('merged', 2, torch.float32, marks=full),
        pytest.param('separate', 1, torch.float64, marks=full),
    ],
)
def test_equals_one_process(kind: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    run_processes(train_and_decode, ranks, tmp_path, kind, dtype)


def replay_steps() -> None:
    """A replay reads the parts of this rank, and a step with other parts is taken back. Shapes are compared once."""
    ids, compared = make_ids(2, 12), list[Any]()
    one, other = make_model('merged').eval(), make_model('merged', seed=3).eval()
    model, replacement = (apply_tp(copy.deepcopy(each), line()) for each in (one, other))
    expected = one(ids)
    with pytest.MonkeyPatch.context() as patch:
        step, captured = recorded_step(model, model.init_cache(2, 12), patch)
        exchange = tensor_parallel.exchange_objects
        patch.setattr(tensor_parallel, 'exchange_objects', lambda *args: compared.append(args) or exchange(*args))
        for t in range(6):
            assert_near(step(ids[:, t : t + 1]), expected[:, t : t + 1], 'logits')
        model.load_state_dict(replacement.state_dict(), assign=True)
        for t in range(6, 9):
            twin = copy.deepcopy(step.cache)
            wanted = model(ids[:, t : t + 1], cache=twin)
            assert_near(step(ids[:, t : t + 1]), wanted, 'logits of other weights')
    assert [recorded.replays for recorded in captured] == [6, 2]
    assert len(compared) == 1


def test_replayed_steps(tmp_path: Path) -> None:
    run_processes(replay_steps, 2, tmp_path)


class PerHead(nn.Module):
    """A network with parameters of each head that the package does not know."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2) * self.scale


class ByIndex(PerHead):
    """A network that runs with fewer heads, but with the parameters of the first ones."""

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2) * self.scale[: blocks.shape[1]]


class MixedHeads(nn.Module):
    """A network that mixes heads by a weight that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2) + self.scale * blocks.mean((1, 3))[:, None]


def train_with_networks() -> None:
    """Parameters that heads share have the sum of the gradients of all heads."""
    ids = make_ids(2)
    for name, make in NETWORKS.items():
        if name != 'transformer':  # it mixes the heads of a token
            model = make_model(sparse={'compress_mlp': make(4, 8, 4)}, depth=1)
            divided = apply_tp(copy.deepcopy(model), line())
            networks: list[Any] = [each.blocks[0].attention.k_compress for each in (divided, model)]
            assert [takes_overlapping(network) for network in networks] == [name != 'attention pool'] * 2, name
            assert_equal_training(divided, model, ids)
    with torch.device('meta'):
        for make in (NETWORKS['mean'], NETWORKS['mlp']):
            apply_tp(make_model(sparse={'compress_mlp': make(4, 8, 4)}), line())
    shared = ConvLinearCompress(4, 8, 4)
    for network in (ConvLinearCompress(1, 8, 4), (shared, shared)):
        model = make_model(sparse={'compress_mlp': network}, depth=1)
        assert_equal_training(apply_tp(copy.deepcopy(model), line()), model, ids)
    boundaries = torch.tensor([0, 14, 33], dtype=torch.int32)
    model = make_model('merged', sparse={'rotary_emb': learned_rotary(), 'norm': False})
    divided = apply_tp(copy.deepcopy(model), line())
    assert_equal_training(divided, model, ids[:1], cu_seqlens=boundaries)
    assert_equal_training(divided, model, ids, mask=torch.arange(33) < torch.tensor([[33], [20]]))
    model.gradient_checkpointing_enable()
    divided.gradient_checkpointing_enable()
    assert_equal_training(divided, model, ids)


def train_drawn_settings(seeds: range) -> None:
    ranks = dist.get_world_size()
    for seed in seeds:
        draw = random.Random(seed).choice
        sparse: dict[str, Any] = {'merge_window': draw([True, False]), 'num_selected_blocks': draw([0, 3, 5])}
        sparse |= {name: draw([True, False]) for name in ('norm', 'qk_norm', 'recompute', 'use_diff_topk')}
        sparse |= {'query_heads_share_selected_kv': draw([True, False]), 'softcap': draw([None, 5.0])}
        # Without memory and sinks, gradients of the biases of compressed keys are rounding errors.
        sparse['num_compressed_mem_kv'], sparse['num_sinks'] = draw([(1, 0), (0, 1), (3, 2)])
        sparse['rotary_emb'] = draw([None, False, learned_rotary()])
        sparse['compressed_output'] = not sparse['merge_window'] or draw([True, False])
        sparse['output_gate'] = sparse['merge_window'] and sparse['compressed_output'] and draw([True, False])
        if sparse['compressed_output']:
            sparse['dim_value_head'] = draw([6, 8])
        kv_heads, seqlen = ranks * draw([1, 2, 3]), draw([2, 5, 33])
        settings = {'kv_heads': kv_heads, 'heads': kv_heads * draw([1, 2]), 'causal': draw([True, False]), 'depth': 1}
        settings |= {'tie_embeddings': draw([True, False]), 'ff_expansion_factor': 3.0}
        model, ids = make_model(sparse=sparse, **settings), make_ids(2, seqlen, seed)
        assert_equal_training(apply_tp(copy.deepcopy(model), line()), model, ids)


@full
@pytest.mark.parametrize(('ranks', 'count'), [(2, 12), (3, 6)])
def test_drawn_settings(ranks: int, count: int, tmp_path: Path) -> None:
    run_processes(train_drawn_settings, ranks, tmp_path, range(count))


def train_block_scores() -> None:
    """The loss is the mean over the heads of all ranks, which read the same queries."""
    model, ids = make_model('scores'), make_ids(8)
    _, expected = model(ids, return_loss=True, return_block_loss=True)
    _, loss = apply_tp(model, line())(ids, return_loss=True, return_block_loss=True)
    assert_near(loss, expected, 'loss of the block scores')
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.blocks[0].attention.k_compress.parameters())  # type: ignore[union-attr]


@full
def test_loss_of_block_scores(tmp_path: Path) -> None:
    run_processes(train_block_scores, 2, tmp_path)


@full
def test_networks_and_inputs(tmp_path: Path) -> None:
    run_processes(train_with_networks, 2, tmp_path)


def cast_divided() -> None:
    """A cast of a divided model leaves learned frequencies and the identity of parameters."""
    mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('data', 'tensor'))
    divisions: list[Any] = [
        lambda model: apply_tp(model, line()),
        lambda model: apply_fsdp(model, line()),
        lambda model: apply_fsdp(apply_tp(model, mesh['tensor']), mesh['data']),
    ]
    for divide in divisions:
        model = make_model(sparse={'rotary_emb': learned_rotary()}, depth=1).float()
        one = copy.deepcopy(model)
        before = list(divide(model).parameters())
        model.to(torch.bfloat16)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for name, parameter in model.named_parameters():
            is_learned = name.endswith('freqs')
            assert parameter.dtype == (torch.float32 if is_learned else torch.bfloat16)
            assert not is_learned or torch.equal(whole(parameter), one.get_parameter(name))
        model(make_ids(2), return_loss=True).backward()
        assert all(p.grad is not None for p in model.parameters())


@full
def test_casts(tmp_path: Path) -> None:
    run_processes(cast_divided, 2, tmp_path)


def train_with_sharding(kind: str, sequence_parallel: bool) -> None:
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('data', 'tensor'))
    model = make_model(kind)
    one, rank, ids = copy.deepcopy(model), mesh['data'].get_local_rank(), make_ids(4)
    apply_tp(model, mesh['tensor'], sequence_parallel=sequence_parallel)
    apply_fsdp(model, mesh['data'])
    assert_equal_training(model, one, ids, slice(2 * rank, 2 * rank + 2))
    model(ids[2 * rank : 2 * rank + 2], return_loss=True).backward()
    one(ids, return_loss=True).backward()
    norm, expected = (nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, one))
    assert_near(whole(norm), expected, 'norm')
    model.eval()
    one.eval()
    assert torch.equal(model.generate(ids, 4, seed=3), one.generate(ids, 4, seed=3))


@full
@pytest.mark.parametrize('sequence_parallel', [False, True])
@pytest.mark.parametrize('kind', ['separate', 'merged'])
def test_with_sharded_data_parallelism(kind: str, sequence_parallel: bool, tmp_path: Path) -> None:
    run_processes(train_with_sharding, 4, tmp_path, kind, sequence_parallel)


def train_compiled() -> None:
    """Train in the order of `docs/distributed.md`: division, checkpointing, compilation of the blocks, sharding."""
    mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('data', 'tensor'))
    model, ids = make_model('separate', depth=1), make_ids(2)
    one = copy.deepcopy(model)
    apply_tp(model, mesh['tensor']).gradient_checkpointing_enable()
    for block in model.blocks:
        block.compile(backend='eager')
    apply_fsdp(model, mesh['data'])
    one(ids, return_loss=True).backward()
    for _ in range(2):
        model.zero_grad()
        model(ids, return_loss=True).backward()
        for name, gradient in joined(gradients(model)).items():
            assert_near(gradient, one.get_parameter(name).grad, name)  # type: ignore[arg-type]


@full
def test_compiled_and_checkpointed(tmp_path: Path) -> None:
    run_processes(train_compiled, 2, tmp_path)


def divided(kind: str, shape: tuple[int, int]) -> Transformer:
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=('data', 'tensor'))
    return apply_fsdp(apply_tp(make_model(kind), mesh['tensor']), mesh['data'])


@full
def test_checkpoints_load_into_another_layout(tmp_path: Path) -> None:
    for number, (function, shape, more) in enumerate(
        [(save, (2, 2), ()), (load, (2, 2), (True,)), (load, (1, 4), (False,)), (load, (2, 1), (False,))]
    ):
        (store := tmp_path / str(number)).mkdir()
        run_processes(function, shape[0] * shape[1], store, tmp_path, 'branches', *more, divided, shape)


def exchange_state_dicts() -> None:
    """State dicts of a model with one projection weight and of a divided model with three load into each other."""
    ids = make_ids(2)
    for kind in ('separate', 'branches', 'dense'):
        one, model = make_model(kind, seed=3), apply_tp(make_model(kind), line())
        set_model_state_dict(model, one.state_dict(), options=StateDictOptions(full_state_dict=True))
        assert_near(model(ids), one(ids))
        again = make_model(kind, seed=5)
        again.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        assert torch.equal(again(ids), one(ids))
        model.load_state_dict(model.state_dict(), assign=True)
        assert_near(copy.deepcopy(model)(ids), one(ids))


@full
def test_state_dicts(tmp_path: Path) -> None:
    run_processes(exchange_state_dicts, 2, tmp_path)


def draw_dropout() -> None:
    """Ranks with one random state drop different weights of their heads."""
    model, seeds = make_model(sparse={'dropout': 0.5}), []
    apply_tp(model, line())
    nsa = functional.nsa

    def record(*args: Any, dropout_seed: Tensor, **settings: Any) -> Tensor:
        seeds.append(dropout_seed)
        return nsa(*args, dropout_seed=dropout_seed, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, 'nsa', record)
        model(make_ids(2), return_loss=True).backward()
    mine = torch.cat(seeds)
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    assert not (others[0] == others[1]).any()


@full
def test_dropout(tmp_path: Path) -> None:
    run_processes(draw_dropout, 2, tmp_path)


def errors() -> None:
    """Every rank raises an error of one line before anything is changed."""
    two = init_device_mesh('cpu', (2, 2), mesh_dim_names=('data', 'tensor'))
    other_block = make_model()
    other_block.blocks[1].feed_forward[2] = nn.ReLU()  # type: ignore[operator]
    adapted = make_model()
    adapted.blocks[1].attention.combine_heads = nn.Sequential(adapted.blocks[1].attention.combine_heads)  # type: ignore[assignment]
    biased: list[Any] = [make_model() for _ in range(3)]
    for model, name in zip(biased, ('to_logits', 'to_qkv', 'combine_heads'), strict=True):
        owner = model if name == 'to_logits' else model.blocks[1].attention
        getattr(owner, name).bias = nn.Parameter(torch.zeros(getattr(owner, name).out_features))
    padded = make_model()
    padded.token_emb.padding_idx = 0
    embedded = make_model()
    embedded.token_emb = nn.Sequential(embedded.token_emb)  # type: ignore[assignment]
    quantised = make_model()
    quantised.to_logits.weight = nn.Parameter(quantised.to_logits.weight.detach().as_subclass(Quantised))
    networks: list[nn.Module] = [PerHead(4), ByIndex(4), MixedHeads(), NETWORKS['transformer'](4, 8, 4)]
    cases: list[tuple[str, Any, Any]] = [
        ('token_emb is a Sequential, but must be the module of a new model', embedded, line()),
        (r'to_logits\.weight is of class Quantised, but must be a plain parameter', quantised, line()),
        ('to_logits has a bias, but must have none to be divided', biased[0], line()),
        ('to_qkv has a bias', biased[1], line()),
        ('combine_heads has a bias', biased[2], line()),
        ('token_emb has padding_idx=0, but must have none to be divided', padded, line()),
        ('combine_heads is a Sequential, but must be the module of a new model', adapted, line()),
        ('mesh has 2 dimensions, but must have 1', make_model(), two),
        ('model is .*, but must be a Transformer', nn.Linear(2, 2), line()),
        ('mesh has 4 ranks, .* must divide the number of KV heads, 2', make_model(heads=4, kv_heads=2), line()),
        ('mesh has 4 ranks, .* hidden size of feed_forward, 18', make_model(ff_expansion_factor=1.125), line()),
        ('feed_forward has RMSNorm, Linear, ReLU, Linear, but must', other_block, line()),
        ('the gate is a Sequential', make_model(sparse={'strategy_combine_mlp': gate(16, 24)}), line()),
        ('model is divided already', apply_tp(make_model(), line()), line()),
    ]
    for network in networks:
        message = rf'compress_mlp \(keys\) is a {type(network).__name__}, which'
        same_heads = make_model(sparse={'compress_mlp': network})
        for attention in (block.attention for block in same_heads.blocks):
            attention.k_compress.load_state_dict(network.state_dict())  # type: ignore[union-attr]
        cases.append((message, same_heads, line()))
        cases.append((message, make_model(sparse={'compress_mlp': network}).to('meta'), line()))
    for message, model, mesh in cases:
        before = [type(p) for p in model.parameters()]
        with pytest.raises(ValueError, match=message) as raised:
            apply_tp(model, mesh)
        assert '\n' not in str(raised.value)
        assert before == [type(p) for p in model.parameters()]


class Quantised(Tensor):
    pass


def gate(dim: int, logits: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4), nn.Linear(4, logits))


def read_wrong_ids() -> None:
    """Ids outside the vocabulary fail on every rank, also those in the last rank's share of an uneven division."""
    model = apply_tp(make_model(depth=1), line())
    for wrong in (-1, 29, 31, 1000):
        ids = make_ids(1)
        ids[0, 3] = wrong
        with pytest.raises(IndexError):
            model(ids)
        with pytest.raises((IndexError, RuntimeError), match=r'out of (bounds|range)'):
            model.to_logits.summed_cross_entropy(torch.zeros(1, 33, 16, dtype=torch.float64), ids)  # type: ignore[operator]


def read_other_lengths() -> None:
    """One error is raised on all ranks, which continue afterwards. Shapes are compared when they are new."""
    model, rank, compared = apply_tp(make_model(depth=1), line()), dist.get_rank(), list[Any]()
    exchange = tensor_parallel.exchange_objects

    def record(group: Any, shape: Any) -> list[Any]:
        compared.append(shape)
        return exchange(group, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, 'exchange_objects', record)
        for _ in range(2):
            with pytest.raises(ValueError, match=r'embedding have shape \(1, 19\) on rank 0, but \(1, 20\) on rank 1'):
                model(make_ids(1, 20 + rank), return_loss=True)
            model(make_ids(1, 22), return_loss=True).backward()
        with pytest.raises(ValueError, match=r'embedding have shape \(1, 20\) on rank 0, but \(2, 20\) on rank 1'):
            model(make_ids(1 + rank, 20))
    assert compared == [(1, 19 + rank), (1, 21), (1, 19 + rank), (1 + rank, 20)]


def test_other_lengths(tmp_path: Path) -> None:
    run_processes(read_other_lengths, 2, tmp_path, time_limit=60)


@full
def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    run_processes(read_wrong_ids, 4, tmp_path)


@full
def test_wrong_arguments(tmp_path: Path) -> None:
    run_processes(errors, 4, tmp_path)
