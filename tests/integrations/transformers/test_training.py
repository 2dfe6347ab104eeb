"""Training of converted models: gradients, checkpointing, autocast, adapters, compilation and `Trainer`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, Trainer, TrainingArguments

from native_sparse_attention.integrations.transformers import collect_block_losses
from tests.support.hf_models import (
    CACHE,
    COVERING,
    LLAMA_FIRST,
    MERGED,
    PAPER,
    SPARSE,
    convert_to_nsa,
    dense_model,
    left_padded,
    logits_of,
    nsa_model,
    random_ids,
)

CONFIGS = {
    'dense': SPARSE,
    'scores': SPARSE.replace(use_diff_topk=True),
    'plain': SPARSE.replace(use_diff_topk=True, block_scores='plain'),
    'paper': PAPER,
    'merged': MERGED,
}
every_family = pytest.mark.parametrize('family', LLAMA_FIRST)
every_config = pytest.mark.parametrize('config', CONFIGS)
merged_in_full = pytest.mark.parametrize(
    'config', [*list(CONFIGS)[:-1], pytest.param('merged', marks=pytest.mark.full)]
)


def gradients(model: Any, ids: Tensor, **arguments: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, **arguments).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=1e-4, msg=name)


@every_family
@every_config
def test_every_parameter_has_a_gradient(family: str, config: str):
    model = nsa_model(family, CONFIGS[config]).train()
    found = gradients(model, random_ids(2, 60))
    assert all(g is not None and g.isfinite().all() for g in found.values()), found.keys()
    trained = {name: bool(g.any()) for name, g in found.items() if 'compress' in name or 'strategy' in name}
    assert trained
    assert all(trained.values()) is (config != 'dense'), trained
    short = gradients(model, random_ids(1, 3))  # no compressed block
    assert all(g is not None and g.isfinite().all() for g in short.values())


@every_family
def test_gradients_are_dense_where_everything_is_read(family: str):
    model, ids = dense_model(family).train(), random_ids(2, 50)
    dense = gradients(model, ids)
    sparse = gradients(convert_to_nsa(model, COVERING), ids)
    compare({name: sparse[name] for name in dense}, dense)


@every_config
def test_an_empty_cache_takes_part_in_training(config: str):
    """transformers passes a cache in training by default."""
    model, ids = nsa_model(config=CONFIGS[config]).train(), random_ids(2, 45)
    cache = DynamicCache(config=model.config)
    cached = gradients(model, ids, use_cache=True, **{CACHE: cache})
    compare(cached, gradients(model, ids, use_cache=False))
    assert cache.get_seq_length() == 45
    assert not any(layer.keys.requires_grad for layer in cache.layers)  # type: ignore[union-attr]
    more = random_ids(2, 3, seed=9)
    with pytest.raises(ValueError, match='the cache holds 45 tokens, but must be empty or None where gradients'):
        model(input_ids=more, **{CACHE: cache})
    with torch.no_grad():
        out = model.eval()(input_ids=more, **{CACHE: cache}).logits
    torch.testing.assert_close(out, logits_of(model, torch.cat((ids, more), 1))[:, -3:], atol=2e-5, rtol=0)


@merged_in_full
@pytest.mark.parametrize(('reentrant', 'use_cache'), [(False, True), (True, False)])
def test_gradient_checkpointing(config: str, reentrant: bool, use_cache: bool):
    model, inputs = nsa_model(config=CONFIGS[config]).train(), left_padded([50, 31])
    ids, mask = inputs['input_ids'], inputs['attention_mask']
    expected = gradients(model, ids, attention_mask=mask, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': reentrant})
    compare(gradients(model, ids, attention_mask=mask, use_cache=use_cache), expected)


def test_dropout_of_the_family():
    model, ids = nsa_model(attention_dropout=0.5), random_ids(1, 40)
    first = logits_of(model, ids)
    assert torch.equal(first, logits_of(model, ids))
    model.train()
    torch.manual_seed(0)
    dropped = logits_of(model, ids)
    assert not torch.equal(first, dropped)
    torch.manual_seed(0)
    assert torch.equal(dropped, logits_of(model, ids))


@every_config
def test_bfloat16(config: str):
    model, ids = nsa_model(config=CONFIGS[config]).train(), random_ids(2, 50)
    expected = model(input_ids=ids, labels=ids).loss
    with torch.autocast('cpu', torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss, expected, atol=0.1, rtol=0)
    model.to(torch.bfloat16)
    found = gradients(model, ids)
    assert all(g.isfinite().all() for g in found.values())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss.float(), expected, atol=0.1, rtol=0)


def check_adapters(family: str, config: str, tmp_path: Path) -> None:
    settings = CONFIGS[config]
    model, ids = nsa_model(family, settings), random_ids(2, 50)
    added = ['k_compress', *(('v_compress', 'to_strategy_combine') if settings.compressed_output else ())]
    targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
    before = logits_of(model, ids)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, modules_to_save=added, r=4))
    assert torch.equal(logits_of(adapted, ids), before)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        adapted(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
        optimizer.step()
    trained = logits_of(adapted, ids)
    assert (trained - before).abs().max() > 1e-3
    prompt = {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}
    greedy = {**prompt, 'max_new_tokens': 3, 'do_sample': False}
    assert torch.equal(adapted.generate(**greedy), adapted.generate(**greedy, use_cache=False))
    adapted.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(nsa_model(family, settings), tmp_path)
    assert torch.equal(logits_of(loaded, ids), trained)
    merged: Any = adapted.merge_and_unload()  # type: ignore[operator]
    torch.testing.assert_close(logits_of(merged, ids), trained, atol=1e-4, rtol=0)
    merged.save_pretrained(tmp_path / 'merged')
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / 'merged', attn_implementation='eager').eval()
    assert torch.equal(logits_of(reloaded, ids), logits_of(merged, ids))


@merged_in_full
def test_adapters(config: str, tmp_path: Path):
    check_adapters('llama', config, tmp_path)


@pytest.mark.parametrize('family', LLAMA_FIRST[1:])
def test_adapters_of_every_family(family: str, tmp_path: Path):
    check_adapters(family, 'scores', tmp_path)


@pytest.mark.parametrize('config', ['dense', 'plain', 'paper', pytest.param('merged', marks=pytest.mark.full)])
def test_block_losses_train_the_scores(config: str):
    """With the other weights frozen, the scores approach the attention mass of the blocks."""
    settings = CONFIGS[config].replace(compress_mlp_expand_factor=1.0, dense_below=10)
    model = nsa_model(config=settings).train()
    inputs, values = left_padded([70, 51]), []
    model.requires_grad_(False)
    trained = [p for name, p in model.named_parameters() if 'k_compress' in name]
    optimizer = torch.optim.Adam([p.requires_grad_() for p in trained], lr=1e-2)
    for _ in range(15):
        torch.manual_seed(0)  # of the random candidates
        with collect_block_losses(model) as losses:
            model(**inputs, use_cache=False)
        assert len(losses) == 2
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.any() for p in trained if p.ndim > 1)  # type: ignore[union-attr]
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.8 * values[0], values
    assert model.model.layers[0].self_attn.block_losses is None
    with collect_block_losses(model) as losses:
        pass
    model(**inputs, use_cache=False)
    assert not losses


@pytest.mark.parametrize('dense_below', [0, 40])
def test_block_losses_of_packed_sequences(dense_below: int):
    """The losses equal those of the sequences alone; dense queries do not count, in packed sequences either."""
    model = nsa_model(config=SPARSE.replace(dense_below=dense_below)).train()
    sequences = [random_ids(1, 70), random_ids(1, 70)]
    positions = torch.arange(70)[None]
    calls = [{'input_ids': ids, 'position_ids': positions} for ids in sequences]
    calls.append({'input_ids': torch.cat(sequences, 1), 'position_ids': positions.repeat(1, 2)})
    found = []
    for call in calls:
        with collect_block_losses(model) as losses:
            model(**call, use_cache=False)
        found.append(torch.stack(losses))
    assert (found[2] > 0).all()
    torch.testing.assert_close(found[2], (found[0] + found[1]) / 2, atol=1e-6, rtol=1e-4)


def test_dense_queries_alone_have_a_loss_of_0():
    model = nsa_model(config=CONFIGS['dense'].replace(dense_below=30)).train()
    for seqlen, is_zero in ((1, True), (30, True), (60, False)):
        with collect_block_losses(model) as losses:
            model(random_ids(2, seqlen), use_cache=False)
        assert [loss == 0 for loss in losses] == [is_zero] * 2
        model.zero_grad()
        torch.stack(losses).mean().backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if 'k_compress' in name)


def test_refused_block_losses():
    model = nsa_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match='gradient checkpointing is on, but must be off'), collect_block_losses(model):
        pass
    with pytest.raises(ValueError, match='but must be converted'), collect_block_losses(dense_model()):
        pass


class Rows(torch.utils.data.Dataset):
    """Eight rows of text, one of which is padded."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = random_ids(1, 40, seed=index)[0]
        mask = torch.arange(40) >= (9 if index == 3 else 0)
        return {'input_ids': ids, 'attention_mask': mask.long(), 'labels': ids.where(mask, -100)}

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize('checkpointing', [False, True])
@every_family
def test_trainer(family: str, checkpointing: bool, tmp_path: Path):
    model = nsa_model(family, PAPER)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        save_steps=6,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    losses = [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / 'checkpoint-6', attn_implementation='eager').eval()
    ids = random_ids(1, 30)
    assert torch.equal(logits_of(saved, ids), logits_of(model.eval(), ids))
    arguments.max_steps = 7
    if family == 'gemma3_text' and not hasattr(PreTrainedConfig, 'nested_rope_parameter_keys'):
        return  # transformers 5.4 cannot read its configuration
    resumed = Trainer(model=nsa_model(family, PAPER, seed=1), args=arguments, train_dataset=Rows())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 7


@pytest.mark.full
@pytest.mark.parametrize(('config', 'padded'), [('scores', False), ('paper', True), ('merged', True)])
def test_compiled(config: str, padded: bool):
    model = nsa_model(config=CONFIGS[config].replace(dense_below=20), num_hidden_layers=1).train()
    inputs = left_padded([50, 31] if padded else [50, 50])
    ids, arguments = inputs['input_ids'], {'attention_mask': inputs['attention_mask']} if padded else {}
    expected = gradients(model, ids, use_cache=False, **arguments)
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model), backend='aot_eager', fullgraph=True)
    found = gradients(compiled, ids, use_cache=False, **arguments)
    compare({name.removeprefix('_orig_mod.'): gradient for name, gradient in found.items()}, expected)


def test_compiled_models_cannot_find_packed_positions():
    model, ids = nsa_model(num_hidden_layers=1), random_ids(1, 20)
    compiled = torch.compile(model, backend='eager', fullgraph=True)
    with pytest.raises(Exception, match='position_ids is given while the model is compiled'):
        compiled(input_ids=ids, position_ids=torch.arange(20)[None], use_cache=False)


def test_compiled_models_take_packed_lengths():
    model, ids, boundaries = nsa_model(num_hidden_layers=1), random_ids(1, 50), torch.tensor([0, 20, 50])
    packed: dict[str, Any] = {'cu_seq_lens_q': boundaries, 'cu_seq_lens_k': boundaries.clone()}
    torch.compiler.reset()
    compiled = torch.compile(model, backend='eager', fullgraph=True)
    torch.testing.assert_close(logits_of(compiled, ids, **packed), logits_of(model, ids, **packed))


@pytest.mark.full
def test_exported():
    model, ids = nsa_model(num_hidden_layers=1), random_ids(2, 77)
    length = {'input_ids': {1: torch.export.Dim.AUTO}, 'use_cache': None}
    example = {'input_ids': random_ids(2, 50), 'use_cache': False}
    exported: Any = torch.export.export(model, (), example, dynamic_shapes=length, strict=False).module()
    torch.testing.assert_close(logits_of(exported, ids), logits_of(model, ids))


def test_traces_are_refused():
    with pytest.raises(ValueError, match=r'the model is traced by torch\.jit, but must be exported'):
        torch.jit.trace(nsa_model(), (random_ids(1, 20),))
