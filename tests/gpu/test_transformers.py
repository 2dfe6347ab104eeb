"""Converted Hugging Face models on a GPU: their kernels against dense attention, eager and whole forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip('transformers')

from transformers import LlamaConfig, LlamaForCausalLM

from native_sparse_attention.integrations.transformers import NSAConfig, convert_to_nsa

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    'compress_block_size': 16,
    'compress_block_sliding_stride': 8,
    'selection_block_size': 32,
    'num_selected_blocks': 5,
    'sliding_window_size': 48,
}
KINDS: dict[str, dict[str, Any]] = {
    'dense start': {'init': 'dense', 'use_diff_topk': True},
    'scores alone': {'init': 'dense'},
    'plain scores': {'init': 'dense', 'block_scores': 'plain'},
    'paper': {'init': 'paper', 'use_diff_topk': True},
    'merged': {'init': 'merged', 'use_diff_topk': True, 'select_before_window': True, 'block_scores': 'plain'},
}
kinds = pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS)


def make(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)
    model = model.cuda().eval()
    return (convert_to_nsa(model, NSAConfig(**SIZES | settings)) if settings else model).to(dtype)


def make_ids(length: int, batch: int = 2) -> Tensor:
    return torch.randint(1, 128, (batch, length), generator=torch.Generator().manual_seed(1)).cuda()


@torch.no_grad()
@pytest.mark.parametrize('scores', ['rotated', 'plain'])
def test_is_dense_where_every_block_is_read(scores: str):
    ids = make_ids(700)
    model = make(init='dense', num_selected_blocks=22, block_scores=scores, backend='triton')
    torch.testing.assert_close(model(ids).logits, make()(ids).logits, rtol=0, atol=3e-5)


@kinds
def test_gradients_equal_those_of_eager(kind: dict[str, Any]):
    ids = make_ids(500)
    models = [make(**kind, backend=backend).train() for backend in ('triton', 'eager')]
    for model in models:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    pairs = zip(*(dict(model.named_parameters()).items() for model in models), strict=True)
    for (name, parameter), (_, expected) in pairs:
        assert parameter.grad is not None, name
        assert expected.grad is not None, name
        error = (parameter.grad - expected.grad).norm()
        assert error <= 1e-3 * expected.grad.norm() + 1e-7, name


@torch.no_grad()
@kinds
@pytest.mark.parametrize('padded', [False, True], ids=['', 'padded'])
def test_decoding_equals_the_full_forward(kind: dict[str, Any], padded: bool):
    """Prefill, single tokens and a chunk, by the decode kernels, in float32."""
    ids, model = make_ids(420), make(**kind, backend='triton')
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :37] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    out = model(ids[:, :380], attention_mask=mask[:, :380], use_cache=True)
    logits, cache = [out.logits], out.past_key_values
    for first, last in [*((t, t + 1) for t in range(380, 400)), (400, 420)]:
        out = model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True)
        logits.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected[real], rtol=0, atol=1e-4)


@torch.no_grad()
@kinds
def test_generation_runs_through_the_decode_launches(kind: dict[str, Any]):
    model, ids = make(torch.bfloat16, **kind), make_ids(300)
    out = model.generate(ids, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    rows = [layer.rows for layer in out.past_key_values.layers]
    assert out.sequences.shape == (2, 324)
    assert all(row.session.launches for row in rows)


@torch.no_grad()
@kinds
def test_a_static_cache_generates_as_a_dynamic_one(kind: dict[str, Any]):
    """A static cache gives the text of a dynamic one; for it, transformers would compile the steps on a GPU."""
    model, ids = make(**kind), make_ids(300)
    options: dict[str, Any] = {'max_new_tokens': 24, 'do_sample': False, 'return_dict_in_generate': True}
    dynamic = model.generate(ids, **options)
    static = model.generate(ids, cache_implementation='static', **options)
    assert torch.equal(static.sequences, dynamic.sequences)
    assert all(layer.rows.session.launches for layer in static.past_key_values.layers)
