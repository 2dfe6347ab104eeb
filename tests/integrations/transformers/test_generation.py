"""Generation: every way to decode with a cache equals forwards without a cache.

The cases are those of `GenerationTesterMixin` of transformers, which its wheel does not have. Left out, because sparse
attention refuses them: quantised and offloaded caches, continuous batching, `output_attentions`, masks of 4 dimensions.
FlashAttention and FlexAttention do not apply.
"""

from __future__ import annotations

from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from native_sparse_attention.integrations.transformers import NSAConfig
from native_sparse_attention.integrations.transformers.cache import NSACacheLayer
from tests.support.hf_models import (
    CACHE,
    FAMILIES,
    MERGED,
    PAPER,
    SPARSE,
    dense_model,
    left_padded,
    logits_of,
    nsa_model,
    random_ids,
)
from tests.support.pairwise import choose_pairs

NEW_TOKENS = 10
CONFIGS = {
    'dense': SPARSE,
    'paper': PAPER,
    'plain': SPARSE.replace(block_scores='plain'),
    'mean': SPARSE.replace(compress_mlp='mean'),
    'before': SPARSE.replace(select_before_window=True),
    'merged': MERGED,
}
# Arguments of `generate` and the rows of the prompt. `generate` itself takes one row for candidates.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    'greedy': ({'do_sample': False}, 2),
    'sample': ({'do_sample': True, 'num_return_sequences': 2}, 2),
    'beam': ({'do_sample': False, 'num_beams': 3, 'num_return_sequences': 2}, 2),
    'beam_sample': ({'do_sample': True, 'num_beams': 2}, 2),
    'static': ({'do_sample': False, 'cache_implementation': 'static'}, 2),
    'static_beam': ({'do_sample': False, 'num_beams': 2, 'cache_implementation': 'static'}, 2),
    'chunked': ({'do_sample': False, 'prefill_chunk_size': 7}, 2),
    'prompt_lookup': ({'do_sample': False, 'prompt_lookup_num_tokens': 4}, 1),
    'assisted': ({'do_sample': False, 'assistant_model': True}, 1),
    'assisted_sample': ({'do_sample': True, 'assistant_model': True}, 1),
}


def prompt(rows: int, padded: bool) -> dict[str, Tensor]:
    return left_padded([45, 30, 9][:rows]) if padded else left_padded([45] * rows)


def generate(model: Any, inputs: dict[str, Tensor], **arguments: Any) -> Tensor:
    torch.manual_seed(0)
    arguments = {'max_new_tokens': NEW_TOKENS, 'min_new_tokens': NEW_TOKENS, **arguments}
    return model.generate(**inputs, **arguments)


def reference(model: Any, inputs: dict[str, Tensor], **arguments: Any) -> Tensor:
    """Generate without a cache."""
    for name in ('cache_implementation', 'prefill_chunk_size', 'prompt_lookup_num_tokens', 'assistant_model'):
        arguments.pop(name, None)
    return generate(model, inputs, use_cache=False, **arguments)


def every_pair() -> list[Any]:
    """Return ways, padding, settings and families, so many that every pair of them occurs."""
    names = ('way', 'padded', 'config', 'family')
    ways = [(way, padded) for way, (_, rows) in WAYS.items() for padded in (False, True)[:rows]]
    cases = [(*way, config, family) for way in ways for config in CONFIGS for family in FAMILIES]
    chosen = choose_pairs([dict(zip(names, case, strict=True)) for case in cases])
    return [pytest.param(*cases[i], id='-'.join(map(str, cases[i]))) for i in sorted(chosen)]


def check_generation(way: str, padded: bool, family: str, config: NSAConfig) -> None:
    arguments, rows = WAYS[way]
    model, inputs = nsa_model(family, config), prompt(rows, padded)
    if 'assistant_model' in arguments:
        arguments = {**arguments, 'assistant_model': nsa_model(family, config, seed=3)}
    out = generate(model, inputs, **arguments)
    length = inputs['input_ids'].shape[1] + NEW_TOKENS
    assert out.shape[1] >= length
    if way == 'assisted_sample':  # draws other random numbers
        return
    # Prompt lookup of transformers 5.4 may return a few candidates more than requested.
    assert torch.equal(out[:, :length], reference(model, inputs, **arguments))


@pytest.mark.parametrize('way', WAYS)
def test_llama(way: str):
    check_generation(way, padded=WAYS[way][1] > 1, family='llama', config=SPARSE)


@pytest.mark.parametrize('config', list(CONFIGS)[1:])
@pytest.mark.parametrize('way', ['greedy', 'prompt_lookup'])
def test_settings(way: str, config: str):
    check_generation(way, padded=way == 'greedy', family='llama', config=CONFIGS[config])


@pytest.mark.parametrize('family', list(FAMILIES)[1:])
def test_families(family: str):
    check_generation('greedy', padded=True, family=family, config=SPARSE)


@pytest.mark.full
@pytest.mark.parametrize(('way', 'padded', 'config', 'family'), every_pair())
def test_every_way(way: str, padded: bool, family: str, config: str):
    check_generation(way, padded, family, CONFIGS[config])


def test_a_static_cache_serves_several_calls():
    """Older versions of transformers keep it."""
    model = nsa_model()
    for rows, padded in ((2, True), (2, False), (3, True)):
        inputs = prompt(rows, padded)
        found = generate(model, inputs, do_sample=False, cache_implementation='static')
        assert torch.equal(found, reference(model, inputs, do_sample=False))


@pytest.mark.parametrize('padded', [False, True], ids=['whole', 'padded'])
@pytest.mark.parametrize('kind', ['dynamic', 'static'])
def test_a_returned_cache_continues(kind: str, padded: bool):
    model, inputs = nsa_model(), prompt(3, padded)
    cache = DynamicCache() if kind == 'dynamic' else StaticCache(config=model.config, max_cache_len=80)
    whole = reference(model, inputs, do_sample=False)
    first = generate(model, inputs, do_sample=False, max_new_tokens=4, min_new_tokens=4, **{CACHE: cache})
    mask = torch.cat((inputs['attention_mask'], torch.ones(3, 4, dtype=torch.long)), 1)
    rest = {'input_ids': first, 'attention_mask': mask}
    more = NEW_TOKENS - 4
    out = generate(model, rest, do_sample=False, max_new_tokens=more, min_new_tokens=more, **{CACHE: cache})
    assert torch.equal(out, whole)


@pytest.mark.parametrize('kind', ['dynamic', 'static'])
def test_logits_of_every_step(kind: str):
    """Logits, not only their largest: chunks of several lengths over a padded batch."""
    model, inputs = nsa_model(), left_padded([60, 41, 17])
    ids, mask = inputs['input_ids'], inputs['attention_mask']
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    cache = DynamicCache(config=model.config) if kind == 'dynamic' else StaticCache(model.config, max_cache_len=64)
    start = 0
    for stop in (20, 21, 50, 51, 60):
        chunk = {'input_ids': ids[:, start:stop], 'position_ids': positions[:, start:stop]}
        with torch.no_grad():
            out = model(**chunk, attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache}).logits
        real = mask[:, start:stop].bool()
        torch.testing.assert_close(out[real], whole[:, start:stop][real], atol=2e-5, rtol=0)
        start = stop
        assert cache.get_seq_length() == stop


def filled(model: Any, inputs: dict[str, Tensor], static: bool = False) -> Any:
    cache = StaticCache(model.config, max_cache_len=90) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, use_cache=True, **{CACHE: cache})
    return cache


@torch.no_grad()
def next_logits(model: Any, cache: Any, mask: Tensor, ids: Tensor) -> Tensor:
    """Logits of ids `[B, T]`, read after the cache."""
    mask = torch.cat((mask, torch.ones_like(ids)), 1)
    positions = (mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    arguments = {'attention_mask': mask, 'position_ids': positions, CACHE: cache, 'use_cache': True}
    return model(input_ids=ids, **arguments).logits


@torch.no_grad()
def expected_logits(model: Any, ids: Tensor, mask: Tensor, more: Tensor) -> Tensor:
    mask = torch.cat((mask, torch.ones_like(more)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = logits_of(model, torch.cat((ids, more), 1), attention_mask=mask, position_ids=positions)
    return whole[:, -more.shape[1] :]


def with_positions(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**inputs, 'position_ids': (inputs['attention_mask'].cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
@pytest.mark.parametrize('config', ['dense', 'plain'])
@pytest.mark.parametrize('padded', [False, True], ids=['whole', 'padded'])
@pytest.mark.parametrize('kept', [59, 44, 19, 3])
def test_crop_of_any_depth(kept: int, padded: bool, config: str, static: bool):
    model, inputs = nsa_model(config=CONFIGS[config]), left_padded([60, 45] if padded else [60, 60])
    cache = filled(model, with_positions(inputs), static)
    cache.crop(kept - 60)
    ids, mask = inputs['input_ids'][:, :kept], inputs['attention_mask'][:, :kept]
    assert cache.get_seq_length() == kept
    more = random_ids(2, 30, seed=9)
    expected = expected_logits(model, ids, mask, more)
    torch.testing.assert_close(next_logits(model, cache, mask, more), expected, atol=2e-5, rtol=0)


def test_crop_to_a_length():
    """In older versions of transformers, a positive argument is the number of columns to keep."""
    layer = filled(nsa_model(), left_padded([40, 40])).layers[0]
    layer.crop(50)
    assert layer.get_seq_length() == 40
    layer.crop(30)
    assert layer.get_seq_length() == layer.min_length == layer.rows.max_length == 30
    layer.crop(0)
    assert layer.get_seq_length() == 30
    layer.crop(np.int64(-3))
    assert layer.get_seq_length() == 27
    assert type(layer.get_seq_length()) is int


def interrupt(model: Any, cache: Any, num_tokens: int = 1) -> None:
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with handle, pytest.raises(KeyboardInterrupt):
        next_logits(model, cache, torch.ones(2, cache.get_seq_length()), random_ids(2, num_tokens))


@pytest.mark.parametrize(
    ('tear', 'message'),
    [
        (lambda _, cache: cache.layers[0].crop(-3), 'layer 1 holds 40 columns, but layer 0 holds 37'),
        (lambda _, cache: cache.layers[1].rows.crop(37), 'those of layer 1 do not hold its 40 columns'),
        (lambda _, cache: cache.layers[1].rows.crop(torch.tensor([40, 37])), 'those of layer 1 do not hold its 40'),
        (
            lambda _, cache: [layer.rows.crop(torch.tensor([40, 37])) for layer in cache.layers],
            'those of layer 0 do not hold its 40 columns',
        ),
        (interrupt, 'layer 2 holds 40 columns, but layer 0 holds 41'),
    ],
)
def test_a_torn_cache_is_refused(tear: Any, message: str):
    model = nsa_model(num_hidden_layers=3)
    cache = filled(model, left_padded([40, 40]))
    tear(model, cache)
    with pytest.raises(ValueError, match=message):
        next_logits(model, cache, torch.ones(2, 40), random_ids(2, 1))
    cache.crop(-1)
    with pytest.raises(ValueError, match='cache is torn'):
        next_logits(model, cache, torch.ones(2, cache.get_seq_length()), random_ids(2, 1))


@pytest.mark.parametrize('kind', ['dynamic', 'growing', 'static'])
def test_an_interrupted_first_call_tears_the_cache(kind: str):
    """Layer 2 was not reached: its cache layer is an empty dense one, or missing."""
    model = nsa_model(num_hidden_layers=3)
    caches = {
        'dynamic': lambda: DynamicCache(config=model.config),
        'growing': DynamicCache,
        'static': lambda: StaticCache(model.config, max_cache_len=90),
    }
    cache = caches[kind]()
    interrupt(model, cache, 40)
    with pytest.raises(ValueError, match='layer 2 holds 0 columns, but layer 0 holds 40'):
        next_logits(model, cache, torch.ones(2, 40), random_ids(2, 1))


@pytest.mark.parametrize('exit_layer', [1, 2])
def test_assistant_early_exit(exit_layer: int):
    """The assistant is the model without its later layers, whose cache layers stay empty."""
    model, inputs = nsa_model(num_hidden_layers=3), prompt(1, padded=False)
    found = generate(model, inputs, do_sample=False, assistant_early_exit=exit_layer)
    assert torch.equal(found, reference(model, inputs, do_sample=False))


@pytest.mark.parametrize('rows', ['cropped', 'ahead'])
@pytest.mark.parametrize('padded', [False, True], ids=['whole', 'padded'])
def test_emptied_layers_are_not_torn(monkeypatch: pytest.MonkeyPatch, padded: bool, rows: str):
    """Rows ahead of the columns: the first call was interrupted between their write and the count of columns."""
    model, inputs = nsa_model(num_hidden_layers=3), with_positions(left_padded([40, 27 if padded else 40]))
    cache: Any = filled(model, inputs) if rows == 'cropped' else DynamicCache(config=model.config)
    if rows == 'cropped':
        cache.layers[1].rows.crop(23)
    else:
        monkeypatch.setattr(NSACacheLayer, 'advance', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(**inputs, use_cache=True, **{CACHE: cache})
        monkeypatch.undo()
        assert cache.layers[0].is_torn
    for layer in cache.layers:
        if isinstance(layer, NSACacheLayer):  # the others are dense ones of transformers, still empty
            layer.crop(-40)
    mask, more = inputs['attention_mask'], random_ids(2, 5, seed=9)
    with torch.no_grad():
        model(**inputs, use_cache=True, **{CACHE: cache})
    expected = expected_logits(model, inputs['input_ids'], mask, more)
    torch.testing.assert_close(next_logits(model, cache, mask, more), expected, atol=2e-5, rtol=0)


def test_rows_are_not_cropped_one_by_one():
    layer = filled(nsa_model(), left_padded([40, 40])).layers[0]
    for lengths in (torch.tensor([-3, -5]), torch.tensor(-3), -3.0, None, True):
        with pytest.raises(ValueError, match=r'tokens_to_remove is .*, but must be an integer, for all rows'):
            layer.crop(lengths)
    assert layer.get_seq_length() == layer.rows.max_length == 40


@pytest.mark.parametrize('operation', ['reorder', 'select', 'mask', 'repeat', 'reset'])
@pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
def test_operations_on_rows(operation: str, static: bool):
    model, inputs, more = nsa_model(), with_positions(left_padded([40, 27, 9])), random_ids(3, 5, seed=9)
    cache, rows = filled(model, inputs, static), torch.arange(3)
    match operation:
        case 'reorder':
            rows = torch.tensor([2, 0, 2])
            cache.reorder_cache(rows)
        case 'select':
            rows = torch.tensor([1, 1])
            cache.batch_select_indices(rows)
        case 'mask':
            cache.batch_select_indices(torch.tensor([True, False, True]))
            rows = torch.tensor([0, 2])
        case 'repeat':
            rows = rows.repeat_interleave(2)
            cache.batch_repeat_interleave(2)
        case 'reset':
            cache.reset()
            assert cache.get_seq_length() == 0
            with torch.no_grad():
                model(**inputs, use_cache=True, **{CACHE: cache})
    assert cache.layers[0].batch_size == len(rows)
    ids, mask = inputs['input_ids'][rows], inputs['attention_mask'][rows]
    more = more[:1].expand(len(rows), -1)
    expected = expected_logits(model, ids, mask, more)
    torch.testing.assert_close(next_logits(model, cache, mask, more), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize('way', ['greedy', 'beam', 'static'])
def test_embeddings_as_prompt(way: str):
    model, inputs, arguments = nsa_model(), prompt(3, padded=True), WAYS[way][0]
    embeds = model.get_input_embeddings()(inputs['input_ids'])
    out = generate(model, {'inputs_embeds': embeds, 'attention_mask': inputs['attention_mask']}, **arguments)
    assert torch.equal(out, reference(model, inputs, **arguments)[:, -NEW_TOKENS:])


def test_embeddings_continue_a_cache():
    model, inputs = nsa_model(), prompt(3, padded=True)
    embed = model.get_input_embeddings()
    whole, mask, cache = reference(model, inputs, do_sample=False), inputs['attention_mask'], DynamicCache()
    for ids, count in ((inputs['input_ids'], 4), (whole[:, :-6], 6)):
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        given = {'inputs_embeds': embed(ids), 'attention_mask': mask, CACHE: cache}
        out = generate(model, given, do_sample=False, max_new_tokens=count, min_new_tokens=count)
        assert torch.equal(out, whole[:, ids.shape[1] : ids.shape[1] + count])


@pytest.mark.parametrize(
    'arguments',
    [{'guidance_scale': 1.5}, {'repetition_penalty': 1.4, 'no_repeat_ngram_size': 2}, {'logits_to_keep': 1}],
)
def test_options_of_generate(arguments: dict[str, Any]):
    model, inputs = nsa_model(), prompt(3, padded=True)
    found = generate(model, inputs, do_sample=False, **arguments)
    assert torch.equal(found, reference(model, inputs, do_sample=False, **arguments))


def test_without_a_prompt():
    model = nsa_model()
    assert torch.equal(generate(model, {}, do_sample=False), reference(model, {}, do_sample=False))


def test_a_row_of_padding_alone():
    """A row of padding alone reads nothing, gives no NaN and changes no other row."""
    model, inputs = nsa_model(), prompt(3, padded=True)
    expected = reference(model, inputs, do_sample=False)
    inputs['attention_mask'][1] = 0
    for way in ('greedy', 'static'):
        found = generate(model, inputs, **WAYS[way][0])
        assert torch.equal(found, reference(model, inputs, do_sample=False))
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_outputs_of_generate():
    model, inputs = nsa_model(), prompt(2, padded=False)
    wanted: dict[str, Any] = {'return_dict_in_generate': True, 'output_scores': True, 'output_hidden_states': True}
    out: Any = generate(model, inputs, do_sample=False, **wanted)
    cache = getattr(out, CACHE)
    assert len(out.scores) == len(out.hidden_states) == NEW_TOKENS
    assert cache.get_seq_length() == 45 + NEW_TOKENS - 1
    assert all(isinstance(layer, NSACacheLayer) for layer in cache.layers)
    assert cache.layers[0].keys.shape == cache.layers[1].values.shape == (2, 2, 45 + NEW_TOKENS - 1, 8)


def test_dense_and_sparse_layers_share_a_cache():
    from native_sparse_attention.integrations.transformers import convert_to_nsa

    model = convert_to_nsa(dense_model(num_hidden_layers=3), SPARSE, layers=[1])
    for way in ('greedy', 'static', 'beam'):
        inputs = prompt(3, padded=True)
        assert torch.equal(generate(model, inputs, **WAYS[way][0]), reference(model, inputs, **WAYS[way][0]))


def test_hooks_of_a_device_map():
    """With a device map, accelerate moves every argument of a layer."""
    model, inputs = nsa_model(), prompt(3, padded=True)
    expected = generate(model, inputs, do_sample=False)
    dispatched = accelerate.dispatch_model(model, {'': 'cpu'}, force_hooks=True)
    assert torch.equal(generate(dispatched, inputs, do_sample=False), expected)


@pytest.mark.parametrize('config', ['dense', pytest.param('paper', marks=pytest.mark.full)])
def test_weights_on_the_cpu(config: str):
    """Decoding reads weights of φ for which accelerate sees no call."""
    model, inputs = nsa_model(config=CONFIGS[config]), prompt(3, padded=True)
    expected = generate(model, inputs, do_sample=False)
    accelerate.cpu_offload(model, execution_device=torch.device('cpu'))
    assert torch.equal(generate(model, inputs, do_sample=False), expected)
    assert {parameter.device.type for parameter in model.parameters()} == {'meta'}


@pytest.mark.slow
def test_compiled_steps():
    """Steps over a static cache compile to one graph, but on request alone."""
    model, inputs = nsa_model(num_hidden_layers=1), prompt(2, padded=True)
    expected = reference(model, inputs, do_sample=False)
    counts = torch._dynamo.utils.counters['stats']
    for compile_config in (None, CompileConfig(backend='eager', fullgraph=True, mode='default')):
        torch.compiler.reset()
        counts.clear()
        if compile_config is not None:
            vars(compile_config)['_compile_all_devices'] = True
        static: dict[str, Any] = {'cache_implementation': 'static', 'compile_config': compile_config}
        assert torch.equal(generate(model, inputs, do_sample=False, **static), expected)
        assert bool(counts['unique_graphs']) is (compile_config is not None)
    assert model.get_compiled_call(None) == model.__call__


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match='continuous batching is requested, but its paged cache'):
        nsa_model().generate_batch([[5, 6, 7]])


def test_a_static_cache_that_is_too_small():
    model, ids = nsa_model(), random_ids(2, 30)
    with torch.no_grad():
        with pytest.raises(ValueError, match='max_cache_len of the cache is 20, but must be at least 30 for the 30'):
            model(ids, **{CACHE: StaticCache(model.config, max_cache_len=20)})
        cache = StaticCache(model.config, max_cache_len=32)
        model(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match='max_cache_len of the cache is 32, but must be at least 33 for the 3'):
            model(ids[:, :3], **{CACHE: cache})
        assert cache.get_seq_length() == 30
        model(ids[:, :2], **{CACHE: cache})  # what fits still does


def test_refused_caches():
    model, inputs = nsa_model(), prompt(1, padded=False)
    offloaded = DynamicCache()
    offloaded.offloading = True  # as DynamicCache(offloading=True) does, which makes a stream of a GPU, too
    with pytest.raises(ValueError, match='the cache is offloaded, but the cache of sparse attention must stay'):
        generate(model, inputs, **{CACHE: offloaded})
    with pytest.raises(ValueError, match='cache is a tuple, but must be a DynamicCache or a StaticCache'):
        model(**inputs, **{CACHE: ()})
    with pytest.raises(ValueError, match='cache is a EncoderDecoderCache, but must be a DynamicCache'):
        model(**inputs, **{CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())})
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f'the inputs have {rows} rows, but the cache holds 2'):
            model(random_ids(rows, 1), **{CACHE: filled(model, prompt(2, padded=True))})
    layer: Any = filled(model, inputs).layers[0]
    for call in (layer.offload, layer.prefetch):
        with pytest.raises(ValueError, match='must stay on its device'):
            call()
    with pytest.raises(ValueError, match='must be written by its attention layer, not by update'):
        layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    dense = filled(dense_model(), inputs)
    with pytest.raises(ValueError, match='layer 0 of the cache holds dense keys, but must be empty'):
        next_logits(model, dense, inputs['attention_mask'], random_ids(1, 1))
    quantized = DynamicCache(config=model.config)
    quantized.layers[0] = type('QuantizedLayer', (DynamicLayer,), {})()
    with pytest.raises(ValueError, match='layer 0 of the cache is a QuantizedLayer, but must be a DynamicLayer'):
        next_logits(model, quantized, torch.ones(1, 0, dtype=torch.long), random_ids(1, 1))
    with pytest.raises(ValueError, match='max_cache_len of the cache is 90, but must be at least 95 for the 50 next'):
        next_logits(model, filled(model, inputs, static=True), inputs['attention_mask'], random_ids(1, 50))


def test_padding_in_the_cache_cannot_change():
    model, inputs = nsa_model(), prompt(2, padded=True)
    cache = filled(model, inputs)
    with pytest.raises(ValueError, match='attention_mask differs from the masks with which its first 45 columns'):
        next_logits(model, cache, torch.ones_like(inputs['attention_mask']), random_ids(2, 1))
    with pytest.raises(ValueError, match=r'attention_mask has shape \(2, 1\), but must have \(2, 46\)'):
        model(input_ids=random_ids(2, 1), attention_mask=torch.ones(2, 1), use_cache=True, **{CACHE: cache})
