"""`Transformer` with tools: saved and loaded, with labels, with checkpointed activations, in `Trainer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from torch.nn.utils import parametrizations, prune

from native_sparse_attention.integrations import lucidrains
from native_sparse_attention.nn import pretrained
from native_sparse_attention.nn.compress import MeanPool
from native_sparse_attention.nn.transformer import Transformer

pytest.importorskip('safetensors', reason='safetensors is not installed')

VOCABULARY = 29
SPARSE: dict[str, Any] = {
    'sliding_window_size': 3,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 5,
    'use_diff_topk': True,
}
SIZES: dict[str, Any] = {'dim': 24, 'depth': 2, 'dim_head': 8, 'heads': 4, 'kv_heads': 2}


def make_model(settings: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    """Return a model without zero parameters."""
    arguments = SIZES | {'use_sparse_attn': True, 'sparse_attn_kwargs': SPARSE | (settings or {})} | changes
    model = Transformer(VOCABULARY, **arguments)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def make_ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


MODELS: dict[str, dict[str, Any]] = {
    'sparse': {},
    'dense': {'use_sparse_attn': False},
    'output gate': {'use_sparse_attn': False, 'dense_output_gate': True, 'ff_expansion_factor': 1.5},
    'merged output gate': {'settings': {'merge_window': True, 'output_gate': True}},
    'tied': {'tie_embeddings': True},
    'scores alone': {'settings': {'merge_window': True, 'compressed_output': False, 'rotary_emb': False}},
    'own keys and values': {'settings': {'independent_branch_kv': True, 'softcap': 2.5, 'num_sinks': 1}},
}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', MODELS)
def test_loaded_is_saved(name: str, dtype: torch.dtype, tmp_path: Path):
    model = make_model(**MODELS[name]).to(dtype).eval()
    model.save_pretrained(tmp_path / 'new' / 'folder')
    random = torch.get_rng_state()
    loaded = Transformer.from_pretrained(tmp_path / 'new' / 'folder')
    assert torch.get_rng_state().equal(random)
    assert not loaded.training
    assert loaded.is_tied == model.is_tied
    assert str(loaded) == str(model)
    ids = make_ids(2, 17)
    assert loaded(ids).equal(model(ids))
    expected = model.state_dict()
    assert {n: (t.dtype, t.shape) for n, t in loaded.state_dict().items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    assert all(p.requires_grad for p in loaded.parameters())
    assert json.loads((tmp_path / 'new' / 'folder' / 'config.json').read_text())['arguments']['dim'] == 24


def test_changes(tmp_path: Path):
    """Arguments that the weights do not depend on may change; others are refused."""
    make_model().save_pretrained(tmp_path)
    changed = Transformer.from_pretrained(tmp_path, backend='eager', sparse_attn_kwargs={'num_selected_blocks': 7})
    assert changed.backend == changed.blocks[0].attention.backend == 'eager'  # type: ignore[union-attr]
    assert [block.attention.num_selected_blocks for block in changed.blocks] == [7, 7]  # type: ignore[union-attr]
    for changes, message in (
        ({'sparse_attn_kwargs': {'softcap': 3.0}}, 'softcap is 3.0, but must be None'),
        ({'num_tokens': 30}, 'size mismatch for to_logits.weight'),
    ):
        with pytest.raises(RuntimeError, match=message):
            Transformer.from_pretrained(tmp_path, **changes)
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        Transformer.from_pretrained(tmp_path, width=3)


def test_modules_are_given_again(tmp_path: Path):
    modules = {'compress_mlp': (MeanPool(), MeanPool()), 'rotary_emb': RotaryEmbedding(8, theta=500)}
    model = make_model(modules).eval()
    model.save_pretrained(tmp_path)
    ids = make_ids(2, 17)
    assert Transformer.from_pretrained(tmp_path, sparse_attn_kwargs=modules)(ids).equal(model(ids))
    for name in modules:
        rest = {key: module for key, module in modules.items() if key != name}
        with pytest.raises(ValueError, match=rf'{name} is left out, but must be given: it was .*, which config'):
            Transformer.from_pretrained(tmp_path, sparse_attn_kwargs=rest)
    with pytest.raises(RuntimeError, match=r'rotary is .* but must be'):
        Transformer.from_pretrained(tmp_path, sparse_attn_kwargs=modules | {'rotary_emb': None})


def test_other_class(tmp_path: Path):
    """A subclass with a constructor of its own."""
    model = lucidrains.Transformer(VOCABULARY, **SIZES, use_sparse_attn=True, sparse_attn_kwargs=SPARSE).eval()
    model.save_pretrained(tmp_path)
    loaded = lucidrains.Transformer.from_pretrained(tmp_path)
    assert isinstance(loaded, lucidrains.Transformer)
    ids = make_ids(1, 9)
    assert loaded(ids).equal(model(ids))


def test_objects_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r'directory is .*, but must have config.json and model.safetensors'):
        Transformer.from_pretrained(tmp_path)
    model = make_model()
    model.save_pretrained(tmp_path)
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', but must have 'native_sparse_attention'"):
        Transformer.from_pretrained(tmp_path)
    with torch.device('meta'):
        empty = Transformer(VOCABULARY, **SIZES)
    with pytest.raises(ValueError, match=r'token_emb\.weight is on the meta device, but must be a plain tensor'):
        empty.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    for call in (model.save_pretrained, Transformer.from_pretrained):
        with pytest.raises(ImportError, match=r'pip install native-sparse-attention\[transformers\]'):
            call(tmp_path)


@pytest.mark.parametrize(
    'change',
    [
        lambda model: parametrizations.weight_norm(model.layers[0].attention.to_qkv),
        lambda model: prune.l1_unstructured(model.to_logits, 'weight', 0.5),
        lambda model: peft.inject_adapter_in_model(peft.LoraConfig(target_modules=['to_qkv']), model),
        lambda model: setattr(model, 'norm', torch.nn.Identity()),
    ],
    ids=['parametrised', 'pruned', 'adapter', 'another module'],
)
def test_weights_that_a_new_model_lacks_are_refused(change: Callable[[Any], Any], tmp_path: Path):
    model = make_model()
    change(model)
    with pytest.raises(
        ValueError, match=r'^the model has other weights than a new one \(\S+\), but must have the same'
    ):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_an_interrupted_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, ids = make_model().eval(), make_ids(1, 9)
    model.save_pretrained(tmp_path)
    expected = model(ids)

    def write_half(weights: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b'half')
        raise OSError('disk full')

    with monkeypatch.context() as patch:
        patch.setattr(pretrained._import_safetensors().torch, 'save_file', write_half)
        with pytest.raises(OSError, match='disk full'):
            make_model().save_pretrained(tmp_path)
    assert Transformer.from_pretrained(tmp_path)(ids).equal(expected)


@pytest.mark.parametrize('kind', ['whole', 'padded', 'packed'])
def test_labels(kind: str):
    """The loss of ids as labels is that of return_loss; ignored labels and a given number change the count."""
    model = make_model().double()
    ids = make_ids(1 if kind == 'packed' else 3, 17)
    options: dict[str, Any] = {
        'whole': {},
        'padded': {'mask': torch.arange(17) < torch.tensor([17, 4, 9])[:, None]},
        'packed': {'cu_seqlens': torch.tensor([0, 5, 12, 15], dtype=torch.int32)},
    }[kind]
    out = model(ids, labels=ids, **options)
    torch.testing.assert_close(out.loss, model(ids, return_loss=True, **options))
    torch.testing.assert_close(out.logits, model(ids, **options))
    assert out[0] is out.loss
    twice = model(ids, labels=ids, num_items_in_batch=torch.tensor(50), **options)
    counted = {'whole': 48, 'padded': 27, 'packed': 12}[kind]
    torch.testing.assert_close(twice.loss * 50, out.loss * counted)
    if kind == 'whole':
        labels = ids.clone()
        labels[:, :9] = -100
        expected = F.cross_entropy(out.logits[:, 8:-1].flatten(0, 1), ids[:, 9:].flatten())
        torch.testing.assert_close(model(ids, labels=labels.int()).loss, expected)
    out, block_loss = model(ids, labels=ids, return_block_loss=True, **options)
    assert out.loss.shape == block_loss.shape == ()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'labels': make_ids(2, 8)}, r'labels has shape \(2, 8\), but must have that of ids, \(2, 9\)'),
        ({'labels': make_ids(2, 9).float()}, 'labels has shape .* must be int32 or int64'),
        ({'labels': make_ids(2, 9), 'return_loss': True}, 'labels is given, but needs a forward without'),
        ({'labels': make_ids(2, 9), 'last_only': True}, 'labels is given, but needs a forward without'),
        ({'labels': make_ids(2, 9), 'return_cache': True}, 'labels is given, but needs a forward without'),
        ({'num_items_in_batch': 3}, 'num_items_in_batch is given, but must be None without labels'),
    ],
    ids=['shape', 'dtype', 'loss', 'last', 'cache', 'items'],
)
def test_refused_labels(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_model().eval()(make_ids(2, 9), **changes)


@pytest.mark.parametrize('reentrant', [False, True])
@pytest.mark.parametrize('settings', [{}, {'recompute': True}, {'dropout': 0.3}], ids=str)
def test_checkpointed_gradients_are_the_same(settings: dict[str, Any], reentrant: bool):
    model, ids = make_model(settings), make_ids(2, 17)
    mask = torch.arange(17) < torch.tensor([17, 6])[:, None]
    with_loss = not settings.get('recompute', False)
    calls: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        calls.clear()
        out = model(ids, labels=ids, mask=mask, return_block_loss=with_loss)
        loss = out[0].loss + out[1] if with_loss else out.loss
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    assert calls == [0, 1]
    model.gradient_checkpointing_enable({'use_reentrant': reentrant})
    found = gradients()
    assert calls == [0, 1, 1, 0]
    assert len(found) == len(expected)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    model.activation_checkpointing_enable({'use_reentrant': reentrant}, every_n_layers=2)
    gradients()
    assert calls == [0, 1, 0]
    calls.clear()
    model.eval()(ids, labels=ids).loss.backward()
    assert calls == [0, 1]
    model.train().gradient_checkpointing_disable()
    gradients()
    assert calls == [0, 1]


def test_refused_checkpointing():
    with pytest.raises(ValueError, match='every_n_layers is 0'):
        make_model().activation_checkpointing_enable(every_n_layers=0)
    with pytest.raises(ValueError, match='offload is True'):
        make_model().activation_checkpointing_enable(offload=True)


@pytest.mark.full
def test_trainer(tmp_path: Path):
    """Train over accumulated batches of different numbers of labels, with evaluation, checkpoints and resumption."""
    transformers = pytest.importorskip('transformers', reason='transformers is not installed')
    rows = []
    for length in (17, 17, 17, 17, 17, 17, 17, 17):
        ids = make_ids(length)
        labels = ids.clone()
        labels[: int(torch.randint(1, length - 1, ()))] = -100
        rows.append({'ids': ids, 'labels': labels})
    options: dict[str, Any] = {
        'per_device_train_batch_size': 2,
        'per_device_eval_batch_size': 8,
        'gradient_accumulation_steps': 2,
        'learning_rate': 1e-2,
        'lr_scheduler_type': 'constant',
        'optim': 'sgd',
        'max_grad_norm': 0.0,
        'gradient_checkpointing': True,
        'logging_steps': 1,
        'save_steps': 2,
        'report_to': [],
        'use_cpu': True,
        'disable_tqdm': True,
    }

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    class SaveConfiguration(transformers.TrainerCallback):
        """Save the configuration, as docs/training.md shows."""

        def on_save(self, args: Any, state: Any, control: Any, model: Transformer, **_: Any) -> None:
            model.save_pretrained(f'{args.output_dir}/checkpoint-{state.global_step}')

    def trainer(model: Transformer, max_steps: int) -> Any:
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=max_steps, **options)
        datasets = {'train_dataset': rows, 'eval_dataset': rows}
        return InOrder(model=model, args=arguments, callbacks=[SaveConfiguration], **datasets)

    start = make_model()
    start.save_pretrained(tmp_path / 'start')
    trained = trainer(start, 4)
    assert getattr(trained, '_loss_shifts_labels', True)  # older versions count all labels
    trained.train()
    # The same steps by hand: each is the mean over the labels of four rows.
    twin = Transformer.from_pretrained(tmp_path / 'start').train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for step in range(4):
        batch = rows[4 * (step % 2) : 4 * (step % 2) + 4]
        ids, labels = (torch.stack([row[name] for row in batch]) for name in ('ids', 'labels'))
        optimizer.zero_grad()
        twin(ids, labels=labels).loss.backward()
        optimizer.step()
    for (name, found), expected in zip(start.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ('ids', 'labels'))
    expected = twin.eval()(ids, labels=labels).loss
    assert trained.evaluate()['eval_loss'] == pytest.approx(expected.item(), rel=1e-4)
    trained.model.save_pretrained(tmp_path / 'end')
    for folder in ('end', 'checkpoint-4'):
        loaded = Transformer.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(loaded(ids), start.eval()(ids), rtol=0, atol=0)
    resumed = Transformer.from_pretrained(tmp_path / 'start')
    trainer(resumed, 4).train(resume_from_checkpoint=str(tmp_path / 'checkpoint-2'))
    for found, expected in zip(resumed.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
