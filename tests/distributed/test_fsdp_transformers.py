"""`apply_fsdp` for Hugging Face models with sparse attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes
from tests.support.sharded_models import assert_near, assert_same_gradients, gradients, make_ids, recorded_blocks

pytest.importorskip('transformers')
pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh

from native_sparse_attention.distributed import apply_fsdp, hold_weights
from native_sparse_attention.integrations.transformers import attention
from tests.support.hf_models import MERGED, SPARSE, nsa_model

CONFIGS = {
    'dense': SPARSE,
    # A network without a bias: a shift of all compressed keys has no gradient but by rounding.
    'merged': MERGED.replace(compress_mlp='attention_pool'),
}


def train_and_generate(family: str, config: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = nsa_model(family, CONFIGS[config]).train()  # its norms compute in float32
    one, ids = copy.deepcopy(model), make_ids(ranks, seqlen=48)
    apply_fsdp(model, init_device_mesh('cpu', (ranks,)))
    with recorded_blocks(attention) as expected_blocks:
        expected = one(input_ids=ids, labels=ids).loss
        expected.backward()
    with recorded_blocks(attention) as blocks:
        loss = model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss
        loss.backward()
    assert expected_blocks
    for found, wanted in zip(blocks, expected_blocks, strict=True):
        assert torch.equal(found, wanted[rank : rank + 1]), 'another block is selected'
    dist.all_reduce(mean := loss.detach() / ranks)
    assert_near(mean, expected, 'loss')
    assert_same_gradients(model, gradients(one))
    model.eval()
    one.eval()
    options: dict[str, Any] = {'max_new_tokens': 4, 'do_sample': False}
    tokens = one.generate(ids[:1], **options)
    assert torch.equal(model.generate(ids[:1], **options), tokens)
    with hold_weights(model):  # the ranks make different numbers of calls, which `generate` would else count together
        assert rank or torch.equal(model.generate(ids[:1], synced_gpus=False, **options), tokens)


@pytest.mark.full
@pytest.mark.parametrize(('family', 'config'), [('llama', 'dense'), ('gemma2', 'dense'), ('llama', 'merged')])
def test_equals_one_process(family: str, config: str, tmp_path: Path) -> None:
    run_processes(train_and_generate, 2, tmp_path, family, config)
