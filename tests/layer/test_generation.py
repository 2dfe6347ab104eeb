"""Generation: dependencies of a draw, chunks of a prompt, stop tokens and callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from native_sparse_attention.inference.generation import (
    STOP_CHECK,
    WORD_BITS,
    DecodeStep,
    _draw,
    _random_words,
    sampler,
)
from tests.layer.test_transformer import KINDS, VOCABULARY, assert_near, make_ids, make_model, pad

SIDES = pytest.mark.parametrize('side', ['left', 'right'])


def draw(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Draw an id for each of logits `[B, V]`, from random numbers of seed 0."""
    choose = sampler(
        len(logits), 1, logits.device, temperature=temperature, top_k=top_k, top_p=top_p, seed=0, generator=None
    )
    return choose(logits, 0)


def test_numbers_of_numpy() -> None:
    model, ids = make_model(False), make_ids(1, 5)
    kinds: list[Any] = [float, np.float32]
    tokens = [model.generate(ids, 4, kind(0.5), top_p=kind(0.75), seed=1) for kind in kinds]
    assert torch.equal(*tokens)


def test_a_vocabulary_that_was_made_larger() -> None:
    """The size of the embedding counts, not the constructor's argument."""
    model = make_model(False)
    model.token_emb, model.to_logits = nn.Embedding(VOCABULARY + 5, 24).double(), nn.Linear(24, VOCABULARY + 5).double()
    assert model.generate(torch.tensor([[VOCABULARY + 4]]), 3).shape == (1, 3)
    with pytest.raises(ValueError, match='the vocabulary'):
        model.generate(torch.tensor([[VOCABULARY + 5]]), 3)


@KINDS
@pytest.mark.parametrize('chunk_size', [1, 4, 13])
def test_a_prompt_in_chunks_is_the_prompt_at_once(sparse, chunk_size):
    model, ids = make_model(sparse), make_ids(2, 26)
    caches = [model.init_cache(2, 30) for _ in range(3)]
    whole = model.prefill(ids, caches[0])
    assert_near(whole, model(ids)[:, -1])
    assert_near(model.prefill(ids, caches[1], chunk_size=chunk_size), whole)
    assert caches[1].lengths.tolist() == [26, 26]
    assert model.prefill(ids.int(), caches[2], chunk_size=26).dtype == whole.dtype
    assert torch.equal(model.generate(ids, 9, 0, chunk_size=chunk_size), model.generate(ids, 9, 0))


@KINDS
@SIDES
def test_prompts_of_different_lengths_in_chunks(sparse, side):
    """Rows that begin after the first chunk, and rows that end before the last."""
    model = make_model(sparse)
    prompts = [make_ids(length, seed=length) for length in (26, 9, 1)]
    ids, mask = pad(prompts, side)
    logits = model.prefill(ids, model.init_cache(3, 26), mask=mask, chunk_size=8)
    assert_near(logits, torch.stack([model(prompt[None])[0, -1] for prompt in prompts]))
    new = model.generate(ids, 12, 0, mask=mask, chunk_size=8)
    for row, prompt in enumerate(prompts):
        assert torch.equal(new[row], model.generate(prompt[None], 12, 0)[0])


def test_a_prompt_that_does_not_fit_is_refused_before_its_first_chunk():
    model, cache = make_model(True), make_model(True).init_cache(2, 10)
    before = [layer.k.clone() for layer in cache]
    with pytest.raises(ValueError, match='its capacity is 10'):
        model.prefill(make_ids(2, 11), cache, chunk_size=4)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.max_length == 0
    assert all(torch.equal(layer.k, kept) for layer, kept in zip(cache, before, strict=True))


@pytest.mark.full
@KINDS
@pytest.mark.parametrize('filters', [{}, {'top_k': 7}, {'top_p': 0.8}, {'top_k': 9, 'top_p': 0.7}], ids=str)
def test_a_row_with_its_seed_is_the_same_alone_and_in_a_batch(sparse, filters):
    model = make_model(sparse)
    prompts = [make_ids(length, seed=length) for length in (13, 4, 6)]
    ids, mask = pad(prompts, 'left')
    seeds = [7, 2**32 - 1, 7]
    together = model.generate(ids, 20, 2.0, mask=mask, seed=seeds, **filters)
    assert torch.equal(together, model.generate(ids, 20, 2.0, mask=mask, seed=torch.tensor(seeds), **filters))
    for row, prompt in enumerate(prompts):
        # Fewer requested tokens are the first ones of more.
        alone = model.generate(prompt[None], 11, 2.0, seed=seeds[row], **filters)
        assert torch.equal(alone[0], together[row, :11])


def test_one_seed_counts_the_rows():
    model, prompt = make_model(False), make_ids(1, 5)
    new = model.generate(prompt.expand(3, -1), 20, seed=4)
    for row in range(3):
        assert torch.equal(model.generate(prompt, 20, seed=4 + row)[0], new[row])
    assert len({tuple(row) for row in new.tolist()}) == 3


def test_draws_of_rows_with_one_seed_are_spread():
    """Over rows of one int seed, and over the steps of a row, draws have the frequencies of the probabilities."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    choose = sampler(4000, 50, probs.device, temperature=1.0, top_k=None, top_p=None, seed=0, generator=None)
    tokens = torch.stack([choose(probs.log().expand(4000, -1), step) for step in range(50)], dim=1)
    for drawn in (tokens[:, 0], tokens[:, 49], tokens[:50], tokens):
        found = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
        assert ((found - probs).abs() <= 5 * (probs * (1 - probs) / drawn.numel()).sqrt()).all()


def test_draws_keep_to_top_k_and_top_p():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 40, generator=generator, dtype=torch.float64)
    order = logits.argsort(descending=True)
    rank = order.argsort()

    def rank_of(tokens: Tensor) -> Tensor:
        return rank.gather(1, tokens[:, None])[:, 0]

    assert rank_of(draw(logits, 3.0)).max() == 39
    assert rank_of(draw(logits, 3.0, top_k=5)).unique().tolist() == [0, 1, 2, 3, 4]
    assert (rank_of(draw(logits, 3.0, top_k=1)) == 0).all()
    assert torch.equal(draw(logits, 3.0, top_k=100), draw(logits, 3.0, top_k=40))
    ordered = (logits / 3).softmax(-1).gather(1, order)
    kept = (ordered.cumsum(-1) - ordered < 0.4).sum(-1)
    drawn = rank_of(draw(logits, 3.0, top_p=0.4))
    assert (drawn < kept).all()
    assert (drawn == kept - 1).any()
    assert (rank_of(draw(logits, 3.0, top_k=3, top_p=0.99)) < 3).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_tokens_the_lower_ids_are_kept(dtype):
    logits = torch.zeros(500, 20, dtype=dtype)
    assert draw(logits, top_k=3).unique().tolist() == [0, 1, 2]
    assert draw(logits, top_p=0.15).unique().tolist() == [0, 1, 2]
    assert draw(logits, temperature=0).unique().tolist() == [0]


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((5000, 7), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, -1.0
    assert draw(logits).unique().tolist() == [2, 4]
    assert draw(logits, top_p=1.0).unique().tolist() == [2, 4]


def test_a_draw_is_exact_integer_arithmetic() -> None:
    """The words of a draw, read as a fraction, pick the token whose range of the cumulative sum holds it."""
    logits, bits = 3 * torch.randn(200, 50), WORD_BITS
    words = _random_words(200, 1, logits.device, list(range(200)), None)[:, 0]
    words[:2], words[2:4] = 0, 2**bits - 1
    tokens = _draw(logits, words, 1.0, None, None)
    weights = (logits.softmax(-1) * 2 ** (2 * bits)).long().tolist()
    for row, (high, low), token in zip(weights, words.tolist(), tokens.tolist(), strict=True):
        target = sum(row) * (high * 2**bits + low) // 2 ** (2 * bits)
        assert sum(row[:token]) <= target < sum(row[: token + 1])
    assert tokens[:2].tolist() == [0, 0]
    assert tokens[2:4].tolist() == [49, 49]


class NoFloat64(TorchDispatchMode):
    """A device without float64: operations that return it fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            assert not (isinstance(t, Tensor) and t.dtype in (torch.float64, torch.complex128)), func
        return out


@KINDS
@pytest.mark.parametrize('options', [{}, {'seed': 3}, {'seed': 3, 'top_k': 5, 'top_p': 0.8}, {'stop_tokens': 3}])
def test_devices_without_float64(sparse: bool, options: dict[str, Any]) -> None:
    model, prompt = make_model(sparse).float(), make_ids(2, 9)
    with NoFloat64():
        new = model.generate(prompt, 12, **options)
        model.sample(prompt, 12)
    assert len(new) == 2
    with pytest.raises(AssertionError), NoFloat64():
        prompt.double()


def rows_until(tokens: Tensor, stops: list[int]) -> list[list[int]]:
    """Return every row up to its first stop token."""
    ends = [next((i + 1 for i, t in enumerate(row) if t in stops), len(row)) for row in tokens.tolist()]
    return [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True)]


@pytest.mark.full
@KINDS
@pytest.mark.parametrize('stops', [[3, 17], [28, 5, 11]], ids=str)
def test_stop_tokens(sparse, stops):
    model, prompt = make_model(sparse), torch.full((4, 3), stops[0])  # in the prompt they stop nothing
    free = model.generate(prompt, 100, 20.0, seed=1)
    expected = rows_until(free, stops)
    longest = max(map(len, expected))
    assert min(map(len, expected)) < longest < 100
    for given in (stops, torch.tensor(stops), tuple(stops)):
        new = model.generate(prompt, 100, 20.0, seed=1, stop_tokens=given)
        assert new.shape == (4, longest)
        assert rows_until(new, stops) == expected
        for row, end in zip(new.tolist(), map(len, expected), strict=True):
            assert set(row[end - 1 :]) <= {row[end - 1]}
    few = model.generate(prompt, 5, 20.0, seed=1, stop_tokens=stops)
    assert rows_until(few, stops) == [row[:5] for row in expected]
    assert torch.equal(model.generate(prompt, 9, 20.0, seed=1, stop_tokens=[]), free[:, :9])
    assert torch.equal(model.generate(prompt, 9, 20.0, seed=1, stop_tokens=VOCABULARY), free[:, :9])


def test_no_step_is_made_long_after_all_rows_have_stopped(monkeypatch):
    model, prompt, calls = make_model(False), make_ids(2, 3), []
    call = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, '__call__', lambda self, ids: calls.append(ids.shape) or call(self, ids))
    everything = list(range(VOCABULARY))
    assert model.generate(prompt, 500, stop_tokens=everything).shape == (2, 1)
    assert calls == [(2, 1)] * (STOP_CHECK - 1)
    calls.clear()
    assert model.generate(prompt, 500, stop_tokens=everything, callback=lambda tokens: None).shape == (2, 1)
    assert not calls


@KINDS
@pytest.mark.parametrize('stop_tokens', [None, [3, 17]])
def test_callback_gets_every_column_in_order(sparse, stop_tokens):
    model, prompt, seen = make_model(sparse), make_ids(3, 4), []
    new = model.generate(
        prompt, 60, 20.0, seed=2, stop_tokens=stop_tokens, callback=lambda tokens: seen.append(tokens.clone())
    )
    assert torch.equal(torch.stack(seen, dim=1), new)
    assert torch.equal(new, model.generate(prompt, 60, 20.0, seed=2, stop_tokens=stop_tokens))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'seed': -1}, 'seed is -1 for a row'),
        ({'seed': 2**32 - 1}, 'seed is 4294967296 for a row'),
        ({'seed': [1]}, 'seed has 1 entries, but must have one for each of 2 rows'),
        ({'seed': [1, 0.5]}, 'seed is 0.5 for a row'),
        ({'seed': [1, True]}, 'seed is True for a row'),
        ({'seed': True}, 'seed is True, but must be an integer'),
        ({'seed': 1.0}, 'seed is 1.0, but must be an integer'),
        ({'seed': torch.tensor(True)}, 'seed is True, but must be an integer'),
        ({'top_k': True}, 'top_k is True'),
        ({'max_new_tokens': True}, 'max_new_tokens is True'),
        ({'seed': 1, 'generator': torch.Generator()}, 'seed and generator are given'),
        ({'stop_tokens': 0.5}, 'stop_tokens is 0.5'),
        ({'stop_tokens': 'end'}, "stop_tokens is 'end'"),
        ({'chunk_size': 0}, 'chunk_size is 0'),
        ({'use_graph': True}, 'use_graph is True'),
        ({'use_graph': 1}, 'use_graph is 1, but must be True or False'),
        ({'callback': 'print'}, "callback is 'print', but must be callable or None"),
        ({'progress': 'no'}, "progress is 'no', but must be True or False"),
        ({'generator': 3}, 'generator is 3, but must be a torch.Generator or None'),
    ],
)
def test_generation_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(False).generate(make_ids(2, 3), **{'max_new_tokens': 4} | arguments)
