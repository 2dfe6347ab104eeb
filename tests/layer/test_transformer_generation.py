"""`generate` and `sample` of the language model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.layer.test_transformer import KINDS, VOCABULARY, make_ids, make_model, pad


@KINDS
def test_greedy_generation_takes_the_likeliest_token(sparse):
    model, prompt = make_model(sparse), make_ids(2, 7)
    ids = prompt
    for _ in range(20):
        ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), dim=1)
    new = model.generate(prompt, 20, temperature=0)
    assert torch.equal(new, ids[:, 7:])
    assert not new.requires_grad
    assert torch.equal(model.generate(prompt.int(), 20, 0), new.int())
    assert torch.equal(model.generate(prompt, 20, top_k=1), new)
    assert torch.equal(model.generate(prompt, 20, top_p=1e-9), new)
    assert torch.equal(model.generate(prompt, 20, temperature=1e-30), new)


@KINDS
@pytest.mark.parametrize('side', ['left', 'right'])
def test_padded_prompts_continue_like_prompts_alone(sparse, side):
    model = make_model(sparse)
    prompts = [make_ids(length, seed=length) for length in (13, 4, 1)]
    ids, mask = pad(prompts, side)
    new = model.generate(ids, 12, 0, mask=mask)
    for row, prompt in enumerate(prompts):
        assert torch.equal(new[row], model.generate(prompt[None], 12, 0)[0])


@KINDS
def test_generation_is_repeatable(sparse):
    model, prompt = make_model(sparse), make_ids(2, 7)
    first, second = (model.generate(prompt, 30, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    other = model.generate(prompt, 30, generator=torch.Generator().manual_seed(4))
    assert not torch.equal(first, other)


def frequencies(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens.flatten(), minlength=VOCABULARY) / tokens.numel()


def assert_drawn_from(probs: Tensor, tokens: Tensor) -> None:
    """Assert that every frequency lies within five standard deviations of its probability."""
    deviation = (probs * (1 - probs) / tokens.numel()).sqrt()
    assert ((frequencies(tokens) - probs).abs() <= 5 * deviation).all()


def test_any_temperature_above_zero_is_taken():
    model, prompt = make_model(False).float(), make_ids(1, 7)
    greedy = model.generate(prompt, 10, 0)
    for temperature in (1e-3, 1e-38, 1e-45, 1e-300):
        assert torch.equal(model.generate(prompt, 10, temperature), greedy)
        assert torch.equal(model.sample(prompt, 17, temperature), greedy)
    assert model.generate(prompt, 10, 1e30).shape == (1, 10)


def test_tokens_are_drawn_from_the_filtered_distribution():
    torch.manual_seed(0)
    model, prompt = make_model(False), make_ids(1, 5)
    many = prompt.expand(10_000, -1)
    logits = model(prompt)[0, -1] / 6.0
    order = logits.argsort(descending=True)
    probs = logits.softmax(-1)
    assert_drawn_from(probs, model.generate(many, 1, 6.0))
    kept = torch.zeros_like(probs).index_fill(0, order[:6], 1)
    assert_drawn_from(probs * kept / (probs * kept).sum(), model.generate(many, 1, 6.0, top_k=6))
    reached = int((probs[order].cumsum(0) < 0.6).sum()) + 1
    kept = torch.zeros_like(probs).index_fill(0, order[:reached], 1)
    assert_drawn_from(probs * kept / (probs * kept).sum(), model.generate(many, 1, 6.0, top_p=0.6))
    kept = torch.zeros_like(probs).index_fill(0, order[:6], 1)  # ceil(0.2 * 29)
    assert_drawn_from(probs * kept / (probs * kept).sum(), model.sample(many, 6, 6.0, filter_thres=0.8))


@KINDS
def test_generation_leaves_the_mode_of_every_module(sparse):
    model, prompt = make_model(sparse), make_ids(1, 3)
    model.train()
    model.blocks[0].feed_forward.eval()
    modes = [m.training for m in model.modules()]
    model.generate(prompt, 2)
    model.sample(prompt, 5)
    with pytest.raises(KeyError):
        model.generate(prompt, 2, callback={}.__getitem__)
    assert [m.training for m in model.modules()] == modes


def test_generation_of_nothing():
    model, prompt = make_model(False), make_ids(2, 3)
    assert model.generate(prompt, 0).shape == (2, 0)
    assert model.sample(prompt, 2).shape == (2, 0)
    assert model.sample(prompt, 3, use_cache_kv=True).shape == (2, 0)


def test_generation_shows_a_bar(capsys):
    pytest.importorskip('tqdm')
    model, prompt = make_model(False), make_ids(1, 3)
    model.generate(prompt, 2)
    assert capsys.readouterr() == ('', '')
    model.generate(prompt, 2, progress=True)
    assert '2/2' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'max_new_tokens': -1}, 'max_new_tokens is -1'),
        ({'max_new_tokens': 1.5}, 'max_new_tokens is 1.5'),
        ({'temperature': -0.1}, 'temperature is -0.1'),
        ({'temperature': float('nan')}, 'temperature is nan'),
        ({'temperature': '1'}, "temperature is '1', but must be a finite number of at least 0"),
        ({'temperature': None}, 'temperature is None'),
        ({'top_k': 0}, 'top_k is 0'),
        ({'top_k': 2.0}, 'top_k is 2.0'),
        ({'top_p': 0.0}, 'top_p is 0.0'),
        ({'top_p': 1.1}, 'top_p is 1.1'),
        ({'top_p': '1'}, r"top_p is '1', but must be a number in \(0, 1\] or None"),
        ({'top_p': True}, 'top_p is True'),
        ({'prompt': [[1, 2]]}, 'prompt is a list, but must be a tensor'),
        ({'prompt': torch.tensor([[3, 29]])}, r'prompt lies in \[3, 29\], but must lie in \[0, 28\], the vocabulary'),
        ({'mask': [[True] * 3]}, 'mask is a list, but must be a tensor'),
        ({'prompt': torch.zeros(1, 0, dtype=torch.long)}, 'prompt has no tokens'),
        ({'prompt': torch.zeros(3, dtype=torch.long)}, 'prompt has shape'),
        ({'mask': torch.zeros(1, 3, dtype=torch.bool)}, 'mask has a row of padding alone'),
        ({'mask': torch.ones(2, 3, dtype=torch.bool)}, 'mask has shape'),
    ],
)
def test_generation_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(False).generate(**({'prompt': make_ids(1, 3), 'max_new_tokens': 2} | arguments))


@KINDS
def test_sample_with_and_without_the_cache(sparse):
    model, prompt = make_model(sparse), make_ids(2, 5)
    recomputed = model.sample(prompt, 30, temperature=0.0)
    assert recomputed.shape == (2, 25)
    assert torch.equal(model.sample(prompt, 30, temperature=0.0, use_cache_kv=True), recomputed)
    assert torch.equal(model.sample(prompt, 30, -1.0, 0.5, True), recomputed)
    assert torch.equal(model.generate(prompt, 25, 0), recomputed)
    torch.manual_seed(1)
    drawn = model.sample(prompt, 30)
    torch.manual_seed(1)
    assert torch.equal(model.sample(prompt, 30, use_cache_kv=True), drawn)


@pytest.mark.parametrize(
    ('name', 'values'),
    [
        ('filter_thres', (-0.1, 1.0, '0.9', None, True, float('nan'))),
        ('temperature', ('1', None, True, float('nan'))),
        ('seq_len', (-1, '9', 9.5, None)),
        ('use_cache_kv', ('no', None)),
    ],
)
def test_sample_errors(name, values):
    model, prompt = make_model(False), make_ids(2, 5)
    for value in values:
        with pytest.raises(ValueError, match=f'{name} is {value!r}, but must be'):
            model.sample(**{'prompt': prompt, 'seq_len': 8, name: value})
