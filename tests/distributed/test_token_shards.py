"""`apply_tp` with sequence-parallel norms: hidden states that are shards of rows equal whole rows of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from native_sparse_attention.transformer import Transformer
from tests.support.processes import run_processes
from tests.support.sharded_models import KINDS, assert_near, gradients, joined, make_ids, make_model

pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh

from native_sparse_attention.distributed import apply_cp, apply_fsdp, apply_pp, apply_tp
from tests.distributed.test_fsdp import decoded
from tests.distributed.test_tensor_parallel import assert_equal_training, line

full = pytest.mark.full
LENGTHS = (33, 32, 4, 2)  # of rows; a loss reads a token less, so 32 to 1 tokens


def divided(one: Transformer) -> Transformer:
    return apply_tp(copy.deepcopy(one), line(), sequence_parallel=True)


def record_shapes(model: Transformer) -> list[tuple[int, ...]]:
    """Collect the shapes of hidden states between the parts of the blocks.

    Inputs of linear layers are contiguous, because each layer would save a copy of another one.
    """
    shapes: list[tuple[int, ...]] = []

    def record(_: nn.Module, args: Any, out: Tensor) -> None:
        shapes.extend((tuple(args[0].shape), tuple(out.shape)))

    def check(_: nn.Module, args: Any) -> None:
        assert args[0].is_contiguous()

    for block in model.blocks:
        for module in (block, block.attention, block.feed_forward):
            module.register_forward_hook(record)
        for module in (block.attention.to_qkv, block.feed_forward[1], model.to_logits):  # type: ignore[index]
            module.register_forward_pre_hook(check)
    return shapes


def train_and_decode(kind: str, lengths: tuple[int, ...]) -> None:
    ranks = dist.get_world_size()
    sizes: dict[str, Any] = {'heads': 6, 'kv_heads': 3, 'ff_expansion_factor': 3.0} if ranks == 3 else {}
    one, ids = make_model(kind, **sizes), make_ids(2)
    model = divided(one)
    for seqlen in lengths:
        assert_equal_training(model, one, make_ids(2, seqlen))
    total, expected = (m(ids, labels=ids, num_items_in_batch=50) for m in (model, one))
    assert_near(total.logits, expected.logits, 'logits')
    total.loss.backward()
    expected.loss.backward()
    for name, gradient in joined(gradients(model)).items():
        assert_near(gradient, one.get_parameter(name).grad, name)  # type: ignore[arg-type]
    model.eval()
    one.eval()
    assert_near(decoded(model, ids), decoded(one, ids), 'logits')
    assert torch.equal(model.generate(ids, 4, seed=3), one.generate(ids, 4, seed=3))
    assert torch.equal(model.sample(ids, 36, temperature=0), one.sample(ids, 36, temperature=0))
    shapes = record_shapes(model)
    model(ids)
    assert set(shapes) == {(2, -(-33 // ranks), 16)}


@pytest.mark.parametrize(
    ('kind', 'ranks', 'lengths'),
    [
        ('separate', 2, (33, 2)),
        *(pytest.param(kind, 4, LENGTHS, marks=full) for kind in KINDS),
        pytest.param('merged', 3, LENGTHS, marks=full),
        pytest.param('separate', 1, LENGTHS, marks=full),
    ],
)
def test_equals_one_process(kind: str, ranks: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    run_processes(train_and_decode, ranks, tmp_path, kind, lengths)


def train_with_inputs() -> None:
    """Train on packed and padded rows, with checkpointing, and the loss of the block scores."""
    boundaries = torch.tensor([0, 14, 29], dtype=torch.int32)  # the last tokens are of no sequence
    lengths, index, ids = torch.tensor([[33], [20]]), torch.arange(33), make_ids(2)
    for kind in ('merged', 'dense'):
        one = make_model(kind)
        model = divided(one)
        assert_equal_training(model, one, ids)
        for mask in (index < lengths, index >= 33 - lengths):
            assert_equal_training(model, one, ids, mask=mask)
        assert_equal_training(model, one, ids[:1], cu_seqlens=boundaries)
        one.gradient_checkpointing_enable()
        model.gradient_checkpointing_enable()
        assert_equal_training(model, one, ids[:, :-2])
        mask = index >= 33 - lengths
        assert_near(model(ids, mask=mask, last_only=True), one(ids, mask=mask, last_only=True), 'last logits')
    assert model(ids[:, :0]).shape == (2, 0, one.num_tokens)
    one = make_model('scores')
    whole_rows, model = apply_tp(copy.deepcopy(one), line()), divided(one)
    results = [m(ids, return_loss=True, return_block_loss=True) for m in (whole_rows, model)]
    for expected, found in zip(*results, strict=True):
        assert_near(found, expected, 'losses')
    for loss, block_loss in results:
        (loss + block_loss).backward()
    expected = gradients(whole_rows)
    for name, gradient in gradients(model).items():
        assert_near(gradient, expected[name], name)


@full
def test_inputs(tmp_path: Path) -> None:
    run_processes(train_with_inputs, 2, tmp_path)


def train_compiled() -> None:
    """Train in the order of `docs/distributed.md`: division, checkpointing, compilation of the blocks, sharding."""
    mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('data', 'tensor'))
    one, ids = make_model(depth=1), make_ids(2, 32)  # 31 tokens
    model = apply_tp(copy.deepcopy(one), mesh['tensor'], sequence_parallel=True)
    model.gradient_checkpointing_enable()
    for block in model.blocks:
        block.compile(backend='eager')
    apply_fsdp(model, mesh['data'])
    one(ids, return_loss=True).backward()
    model(ids, return_loss=True).backward()
    for name, gradient in joined(gradients(model)).items():
        assert_near(gradient, one.get_parameter(name).grad, name)  # type: ignore[arg-type]


@full
def test_compiled_and_checkpointed(tmp_path: Path) -> None:
    run_processes(train_compiled, 2, tmp_path)


def refused() -> None:
    one = make_model()
    model = divided(one)
    no: Any = 'no'
    for call, message in (
        (lambda: apply_tp(one, line(), sequence_parallel=no), "sequence_parallel is 'no', but must be True or False"),
        (lambda: apply_cp(model, line()), 'sequence_parallel of apply_tp was True, but must be False for apply_cp'),
        (lambda: apply_pp(model, line()), 'sequence_parallel of apply_tp was True, but must be False for apply_pp'),
        (
            lambda: apply_tp(apply_cp(one, line()), line(), sequence_parallel=True),
            'must be False for a model after apply_cp',
        ),
        (lambda: model.blocks[0](torch.zeros(1, 3, 16).double()), 'a module is called without its model'),
        (lambda: model.token_emb(make_ids(2)), 'a module is called without its model'),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert '\n' not in str(raised.value)


@full
def test_refused(tmp_path: Path) -> None:
    run_processes(refused, 2, tmp_path)
