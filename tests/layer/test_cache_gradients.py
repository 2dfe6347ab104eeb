"""A call with a cache never drops gradients silently; integer masks; non-finite logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.nn.dense import DenseAttention
from native_sparse_attention.nn.transformer import Transformer

SMALL: dict[str, Any] = {
    'sliding_window_size': 4,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
    'selection_block_size': 4,
    'num_selected_blocks': 5,
}
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def make_attention(sparse: bool) -> SparseAttention | DenseAttention:
    torch.manual_seed(0)
    if sparse:
        return SparseAttention(8, 4, 2, causal=True, backend='eager', **SMALL)
    return DenseAttention(8, 4, 2)


def make_model(sparse: bool = True) -> Transformer:
    torch.manual_seed(0)
    return Transformer(11, 8, 2, 4, 2, use_sparse_attn=sparse, sparse_attn_kwargs=SMALL, backend='eager')


both = pytest.mark.parametrize('sparse', [True, False])


@both
@pytest.mark.parametrize('cached', ['cache', 'return_cache'])
def test_a_cache_is_refused_where_gradients_would_vanish(sparse: bool, cached: str) -> None:
    attn, x = make_attention(sparse), torch.randn(1, 5, 8)
    cache = attn.init_cache(1, 16)
    options: dict[str, Any] = {'cache': cache} if cached == 'cache' else {'return_cache': True}
    with pytest.raises(ValueError, match=r'the module is in training mode.*: pass cache=None .*torch\.no_grad\(\)'):
        attn(x, **options)
    with pytest.raises(ValueError, match='x requires gradients'):
        attn.eval()(x.requires_grad_(), **options)
    assert cache.max_length == 0
    attn(x.detach(), **options)
    with torch.no_grad():
        attn.train()(x, **options)
    with torch.inference_mode():
        attn(x.detach(), **options)


@both
def test_a_cache_of_a_model(sparse: bool) -> None:
    model, ids = make_model(sparse), torch.randint(11, (1, 5))
    cache = model.init_cache(1, 32)
    for options in ({'cache': cache}, {'return_cache': True}):
        with pytest.raises(ValueError, match='the module is in training mode'):
            model(ids, **options)  # type: ignore[arg-type]
    assert cache.max_length == 0
    model.prefill(ids, cache)
    DecodeStep(model, cache)(ids[:, :1])
    model.generate(ids, 3)
    model.eval()(ids, cache=cache)
    assert model.training is False


@both
@pytest.mark.parametrize('dtype', INTEGERS)
def test_masks_of_integers(sparse: bool, dtype: torch.dtype) -> None:
    attn, model, x = make_attention(sparse).eval(), make_model(sparse).eval(), torch.randn(2, 9, 8)
    mask = torch.arange(9) >= torch.tensor([[3], [0]])
    assert attn(x, mask.to(dtype)).equal(attn(x, mask))
    assert attn(x, mask.to(dtype), return_cache=True)[0].equal(attn(x, mask, return_cache=True)[0])
    ids = torch.randint(11, (2, 9)).masked_fill(~mask, -100)
    assert model(ids, mask=mask.to(dtype)).equal(model(ids, mask=mask))
    assert model(ids, True, mask=mask.to(dtype)).equal(model(ids, True, mask=mask))
    generated = [model.generate(ids, 4, temperature=0, mask=m) for m in (mask, mask.to(dtype))]
    assert generated[0].equal(generated[1])


@both
@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (torch.full((1, 3), 2), 'mask has values from 2 to 2, but integers must be 0 or 1'),
        (torch.tensor([[1, 0, -1]]), 'mask has values from -1 to 1'),
        (torch.ones(1, 3), 'mask has shape .* dtype torch.float32, but must be bool or integers'),
    ],
)
def test_other_masks_are_refused(sparse: bool, mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_attention(sparse)(torch.randn(1, 3, 8), mask)


class Broken(nn.Module):
    """A head whose logits of row 1 have one value from some call on."""

    def __init__(self, head: nn.Module, value: float, whole: bool, after: int) -> None:
        super().__init__()
        self.head, self.value, self.whole, self.calls_left = head, value, whole, after

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x).clone()
        self.calls_left -= 1
        if self.calls_left < 0:
            logits[1, ..., slice(None) if self.whole else 3] = self.value
        return logits


SAMPLING: dict[str, dict[str, Any]] = {
    'likeliest': {'temperature': 0},
    'drawn': {},
    'top_k': {'top_k': 3},
    'top_p': {'top_p': 0.5},
    'stop tokens': {'stop_tokens': 99},
    'seeds': {'seed': 5, 'top_p': 0.9},
}


VALUES = ((torch.nan, False), (torch.inf, False), (-torch.inf, True))
BROKEN = [('drawn', after, *value) for after in (0, 2) for value in VALUES]
BROKEN += [(options, 2, *value) for options in SAMPLING if options != 'drawn' for value in VALUES[::2]]


@pytest.mark.full
@pytest.mark.parametrize(('options', 'after', 'value', 'whole'), BROKEN)
def test_logits_that_cannot_be_drawn_from(options: str, after: int, value: float, whole: bool) -> None:
    model, ids, seen = make_model(), torch.randint(11, (3, 5)), []
    model.to_logits = Broken(model.to_logits, value, whole, after)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r'logits have NaN or \+inf, or only -inf, in rows \[1\]'):
        model.generate(ids, 20, callback=lambda tokens: seen.append(tokens.clone()), **SAMPLING[options])
    assert torch.stack(seen).lt(11).all()
    assert torch.stack(seen).ge(0).all()


@pytest.mark.parametrize('use_cache_kv', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_sample_with_logits_that_cannot_be_drawn_from(use_cache_kv: bool, temperature: float) -> None:
    model, ids = make_model(), torch.randint(11, (3, 5))
    model.to_logits = Broken(model.to_logits, torch.nan, False, 1)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r'logits have NaN or \+inf'):
        model.sample(ids, 9, temperature, use_cache_kv=use_cache_kv)


def test_tokens_of_logit_minus_infinity_are_not_drawn() -> None:
    model, ids = make_model(), torch.randint(11, (3, 5))
    model.to_logits = Broken(model.to_logits, -torch.inf, False, 0)  # type: ignore[assignment]
    assert not model.generate(ids, 30)[1].eq(3).any()
