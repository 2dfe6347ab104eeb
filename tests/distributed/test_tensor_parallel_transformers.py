"""`apply_tp` for converted Hugging Face models equals one process, in training, generation and the saved model."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_processes
from tests.support.sharded_models import assert_near, gradients, make_ids

pytest.importorskip('transformers')
pytest.importorskip('torch.distributed.fsdp', exc_type=ImportError)
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from native_sparse_attention.distributed import apply_tp
from native_sparse_attention.integrations.transformers import attention, collect_block_losses, dense_start
from tests.support.hf_models import MERGED, PAPER, SPARSE, left_padded, nsa_model

full = pytest.mark.full
CONFIGS = {  # with enough hidden units, or compressed keys, and thus scores, would be equal
    'dense': SPARSE.replace(use_diff_topk=True, dense_below=5, compress_mlp_expand_factor=1.0),
    'plain': SPARSE.replace(
        block_scores='plain', compress_mlp='grouped_mlp', compress_mlp_expand_factor=1.0, layers=[1]
    ),
    'paper': PAPER.replace(compress_mlp='conv'),
    'heads': PAPER.replace(query_heads_share_selected_kv=False, compress_mlp='attention_pool'),
    'merged': MERGED.replace(use_diff_topk=True, dense_below=5, compress_mlp_expand_factor=1.0),
}


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with collect_block_losses(model) as losses:
        loss = model(input_ids=ids, labels=ids).loss
    return loss + torch.stack(losses).mean()


def train_and_generate(family: str, config: str, folder: str) -> None:
    model: Any = nsa_model(family, CONFIGS[config], tie_word_embeddings=config == 'plain').double().train()
    model.config.use_cache = False
    one, ids = copy.deepcopy(model), make_ids(2, seqlen=48)
    assert apply_tp(model, init_device_mesh('cpu', (dist.get_world_size(),))) is model
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss, expected = loss_of(model, ids), loss_of(one, ids)
    loss.backward()
    expected.backward()
    # Rotary embedding, norms and dense softmax of transformers are in float32.
    assert_near(loss, expected.float(), 'loss')
    found = gradients(model)
    for name, gradient in gradients(one).items():  # 1e-8: a shift of all keys has no gradient but by rounding
        limit = 1e-5 * gradient.abs().max().item() + 1e-8
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=limit, msg=name)
    for trained in (model, one):
        torch.optim.AdamW(trained.parameters(), lr=1e-3).step()
        trained.eval()
    options: dict[str, Any] = {'max_new_tokens': 5, 'do_sample': False, 'use_cache': True}
    inputs = left_padded([45, 20])
    assert torch.equal(model.generate(**inputs, **options), one.generate(**inputs, **options))
    with pytest.raises(ValueError, match='is a DTensor, but must be whole to be saved: pass state_dict'):
        model.save_pretrained(folder)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=weights)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()
        assert_near(loaded(ids).logits, one(ids).logits.float(), 'logits of the saved model')
    dist.barrier()


@pytest.mark.parametrize(
    ('family', 'config'),
    [
        ('llama', 'dense'),
        *(pytest.param('llama', config, marks=full) for config in list(CONFIGS)[1:]),
        *(pytest.param(family, 'paper', marks=full) for family in ('qwen3', 'gemma2', 'gemma3_text')),
    ],
)
def test_equals_one_process(family: str, config: str, tmp_path: Path) -> None:
    run_processes(train_and_generate, 2, tmp_path, family, config, str(tmp_path / 'saved'))


def refused() -> None:
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    model = nsa_model(num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    with pytest.raises(ValueError, match='mesh has 2 ranks, but their number must divide the number of KV heads, 3'):
        apply_tp(model, mesh)
    model = nsa_model(intermediate_size=47)
    with pytest.raises(ValueError, match='mesh has 2 ranks, but their number must divide the hidden size of mlp, 47'):
        apply_tp(model, mesh)
    model = nsa_model()
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    with pytest.raises(ValueError, match='up_proj is a Sequential, but must be the module of a new model'):
        apply_tp(model, mesh)
    for name in ('to_strategy_combine', 'v_compress'):
        model = nsa_model('llama', PAPER)
        attention_layer = model.model.layers[1].self_attn
        setattr(attention_layer, name, torch.nn.Sequential(getattr(attention_layer, name)))
        with pytest.raises(ValueError, match=f'{name} is a Sequential, but must be the module of a new model'):
            apply_tp(model, mesh)
    with pytest.raises(ValueError, match='sequence_parallel is True, but must be False for a Hugging Face model'):
        apply_tp(nsa_model(), mesh, sequence_parallel=True)
    apply_tp(model := nsa_model(), mesh)
    with pytest.raises(ValueError, match='model is divided already'):
        apply_tp(model, mesh)
    with pytest.raises(ValueError, match=r'embedding have shape \(1, 9\) on rank 0, but \(1, 10\) on rank 1'):
        model(make_ids(1, 9 + dist.get_rank()))
    draw_dropout()


def draw_dropout() -> None:
    """Ranks with one random state drop different weights of their heads, by one seed for both parts of a layer."""
    model = nsa_model('llama', SPARSE.replace(dense_below=5), attention_dropout=0.5).train()
    apply_tp(model, init_device_mesh('cpu', (dist.get_world_size(),)))
    seeds, dense, sparse = [], dense_start.window_attention, attention.nsa

    def record(function: Any, *args: Any, dropout_seed: torch.Tensor, **settings: Any) -> Any:
        seeds.append(dropout_seed)
        return function(*args, dropout_seed=dropout_seed, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_start, 'window_attention', partial(record, dense))
        patch.setattr(attention, 'nsa', partial(record, sparse))
        model(make_ids(1))
    mine = torch.cat(seeds)
    assert mine[::2].equal(mine[1::2])
    assert len(mine[::2].unique()) == len(model.model.layers)
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    assert not (others[0] == others[1]).any()


@full
def test_refused(tmp_path: Path) -> None:
    run_processes(refused, 2, tmp_path)
