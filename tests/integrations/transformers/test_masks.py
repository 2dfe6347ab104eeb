"""Padding, packed sequences, dense starts, and masks that are refused: a sequence is computed as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from native_sparse_attention.integrations.transformers.attention import scale_rotary
from native_sparse_attention.integrations.transformers.dense_start import attend_with_dense_start
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

LENGTHS = (40, 3, 57, 20)
every_family = pytest.mark.parametrize('family', LLAMA_FIRST)
every_start = pytest.mark.parametrize('config', [SPARSE, PAPER, MERGED], ids=['dense', 'paper', 'merged'])


def alone(model: Any, ids: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Logits `[1, T, vocabulary]` of the sequences that follow each other in ids `[1, T]`."""
    return torch.cat([logits_of(model, part) for part in ids.split(lengths, 1)], 1)


def positions_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


@every_family
def test_padding_on_either_side(family: str):
    model, inputs = nsa_model(family), left_padded([50, 33, 2])
    ids, mask = inputs['input_ids'], inputs['attention_mask']
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    left = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(left, logits_of(model, ids, attention_mask=mask))  # positions are found in the mask
    right = logits_of(model, ids.flip(1), attention_mask=mask.flip(1).bool())
    for row, length in enumerate((50, 33, 2)):
        expected = logits_of(model, ids[row : row + 1, -length:])[0]
        near(left[row, -length:], expected)
        near(right[row, :length], logits_of(model, ids[row : row + 1, -length:].flip(1))[0])


def test_a_mask_of_ones_is_no_mask():
    model, ids = nsa_model(), random_ids(2, 40)
    for dtype in (torch.int64, torch.float32):
        assert torch.equal(logits_of(model, ids, attention_mask=torch.ones(2, 40, dtype=dtype)), logits_of(model, ids))


@every_family
@every_start
def test_packed_by_positions(family: str, config: Any):
    model, ids = nsa_model(family, config), random_ids(1, sum(LENGTHS))
    packed = logits_of(model, ids, position_ids=positions_of(LENGTHS))
    near(packed, alone(model, ids))


def test_packed_rows_of_a_batch():
    model, ids, other = nsa_model(), random_ids(2, sum(LENGTHS)), (60, 60)
    positions = torch.cat((positions_of(LENGTHS), positions_of(other)))
    packed = logits_of(model, ids, position_ids=positions)
    near(packed[:1], alone(model, ids[:1]))
    near(packed[1:], alone(model, ids[1:], other))


@pytest.mark.parametrize('chunks', [(20, 37), (20, 30, 1, 6)])
def test_positions_after_padding_in_the_cache(chunks: tuple[int, ...]):
    """Chunks after the first have no mask: their positions follow the real tokens in the cache."""
    model, inputs, cache = nsa_model(), left_padded([57, 40]), DynamicCache()
    parts, mask = inputs['input_ids'].split(chunks, 1), inputs['attention_mask'][:, : chunks[0]]
    with torch.no_grad():
        masks = [mask, *[None] * (len(chunks) - 1)]
        logits = [model(p, attention_mask=m, **{CACHE: cache}).logits for p, m in zip(parts, masks, strict=True)]
    near(torch.cat(logits, 1)[1, 17:], logits_of(model, inputs['input_ids'][1:, 17:])[0])


@pytest.mark.parametrize('layers', [None, [1]])
def test_packed_by_lengths_alone(layers: list[int] | None):
    """Positions start again without position_ids, in dense layers too."""
    model, ids = nsa_model(config=SPARSE.replace(layers=layers)), random_ids(1, sum(LENGTHS))
    boundaries = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    near(logits_of(model, ids, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries), alone(model, ids))


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_packed_by_lengths(dtype: torch.dtype):
    model, ids = nsa_model(), random_ids(1, sum(LENGTHS))
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    arguments: dict[str, Any] = {'cu_seq_lens_q': boundaries, 'cu_seq_lens_k': boundaries.clone()}
    arguments |= {'max_length_q': max(LENGTHS), 'max_length_k': max(LENGTHS), 'position_ids': positions_of(LENGTHS)}
    with torch.no_grad():
        out = model(input_ids=ids, **arguments)  # use_cache is True by default
    near(out.logits, alone(model, ids))
    assert getattr(out, CACHE) is None


def test_packed_positions_without_use_cache():
    """No cache is made for packed rows, which no cache could continue."""
    model, ids = nsa_model(), random_ids(1, sum(LENGTHS))
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions_of(LENGTHS))
    near(out.logits, alone(model, ids))
    assert getattr(out, CACHE) is None


def test_skipped_positions():
    """A row whose positions skip some is one sequence if a mask or a cache says so; else it might be packed ones."""
    model, ids = dense_model(), random_ids(2, 40)
    positions = torch.cat((torch.arange(20), torch.arange(300, 320)))[None]
    ways: list[dict[str, Any]] = [{'attention_mask': torch.ones_like(ids)}, {'use_cache': True}]
    expected = [model(ids, position_ids=positions, **way).logits for way in ways]
    convert_to_nsa(model, COVERING)
    ways[1] |= {CACHE: DynamicCache()}
    for way, logits in zip(ways, expected, strict=True):
        near(model(ids, position_ids=positions, **way).logits, logits)
    refused(model, 'position_ids skip positions, which does not say', position_ids=positions[:, 16:24])


BELOW = [*(config.replace(dense_below=37) for config in (SPARSE, PAPER, MERGED)), SPARSE.replace(dense_below=500)]


@pytest.mark.parametrize('config', BELOW, ids=['dense', 'paper', 'merged', 'all'])
class TestDenseBelow:
    def test_first_positions_are_dense(self, config: Any):
        model, ids = dense_model(), random_ids(2, 80)
        dense = logits_of(model, ids)
        convert_to_nsa(model, config)
        below = min(config.dense_below, 80)
        near(logits_of(model, ids)[:, :below], dense[:, :below])
        if below < 80:
            assert (logits_of(model, ids) - dense)[:, below:].abs().max() > 1e-3

    def test_packed_is_alone(self, config: Any):
        model, ids = nsa_model(config=config), random_ids(1, sum(LENGTHS))
        near(logits_of(model, ids, position_ids=positions_of(LENGTHS)), alone(model, ids))

    @pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
    @pytest.mark.parametrize('padded', [False, True], ids=['whole', 'padded'])
    def test_cached_is_uncached(self, config: Any, padded: bool, static: bool):
        model, inputs = nsa_model(config=config), left_padded([60, 41, 9] if padded else [60, 60, 60])
        ids, mask = inputs['input_ids'], inputs['attention_mask']
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        whole = logits_of(model, ids, attention_mask=mask, position_ids=positions)
        cache = StaticCache(model.config, max_cache_len=60) if static else DynamicCache(config=model.config)
        start = 0
        for stop in (20, 21, 36, 39, 45, 46, 60):
            chunk = {'input_ids': ids[:, start:stop], 'position_ids': positions[:, start:stop], CACHE: cache}
            with torch.no_grad():
                out = model(**chunk, attention_mask=mask[:, :stop], use_cache=True).logits
            real = mask[:, start:stop].bool()
            near(out[real], whole[:, start:stop][real])
            start = stop

    def test_gradients(self, config: Any):
        model, ids = nsa_model(config=config).train(), random_ids(2, 50)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dense_below_stops_costing_where_no_query_is_below(monkeypatch: pytest.MonkeyPatch):
    from native_sparse_attention.integrations.transformers import cache as module

    model, ids = nsa_model(config=SPARSE.replace(dense_below=20)), random_ids(1, 40)
    cache, calls = DynamicCache(), []
    replace = module.replace_dense_start
    monkeypatch.setattr(module, 'replace_dense_start', lambda *given: (calls.append(1), replace(*given))[1])
    with torch.no_grad():
        for start, stop in ((0, 15), (15, 19), (19, 25), (25, 26), (26, 40)):
            model(input_ids=ids[:, start:stop], use_cache=True, **{CACHE: cache})
    assert len(calls) == 2 * len(model.model.layers)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('autocast', [torch.float16, torch.bfloat16], ids=str)
def test_half_types_under_autocast_to_the_other(autocast: torch.dtype, dtype: torch.dtype):
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=dtype) for heads in (4, 2, 2))

    def results() -> tuple[Tensor, Tensor]:
        start = attend_with_dense_start(lambda first: q[:, first:], (q, k, v), 5, None, None, {'backend': 'eager'})
        return start, scale_rotary(q, 4, 0.5)

    expected = results()
    with torch.autocast('cpu', autocast):
        found = results()
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def refused(model: Any, message: str, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=message):
        logits_of(model, random_ids(2, 8), **arguments)


def test_refused_masks():
    model = nsa_model()
    refused(model, 'attention_mask has shape .2, 1, 8, 8., but must be', attention_mask=torch.ones(2, 1, 8, 8))
    refused(model, 'attention_mask is a dict, but must be a tensor', attention_mask={'full_attention': None})
    refused(model, r'attention_mask has shape \(2, 7\), but must', attention_mask=torch.ones(2, 7, dtype=torch.long))
    for value in (-1e9, 0.5):
        refused(model, 'integers must be 0 or 1', attention_mask=torch.full((2, 8), value))
    refused(model, 'integers must be 0 or 1', attention_mask=torch.full((2, 8), 2))
    refused(model, 'output_attentions is True, but must be False', output_attentions=True)


def test_refused_packing():
    model, ids, boundaries = nsa_model(), random_ids(1, 8), torch.tensor([0, 3, 8])
    given: dict[str, Any] = {'cu_seq_lens_q': boundaries, 'cu_seq_lens_k': boundaries}
    refused(model, 'batch size is 2, but must be 1 where cu_seq_lens_q is given', **given)
    cases = {
        'attention_mask is given, but must be None': {**given, 'attention_mask': torch.ones(1, 8, dtype=torch.long)},
        'a cache is given, but must be None': {**given, CACHE: DynamicCache()},
        'cu_seq_lens_k differs from cu_seq_lens_q': {**given, 'cu_seq_lens_k': torch.tensor([0, 4, 8])},
        'cu_seq_lens_k is a NoneType, but must be a tensor': {**given, 'cu_seq_lens_k': None},
        'position_ids start again, but must not': {'position_ids': positions_of((3, 5)), CACHE: DynamicCache()},
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids, **arguments)
