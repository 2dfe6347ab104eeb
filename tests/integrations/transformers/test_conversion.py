"""Conversion of dense models: equality with dense attention, saving, loading and refusals."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from native_sparse_attention import SparseAttention
from native_sparse_attention.integrations.transformers import NSAConfig, change_settings, convert_to_nsa, families
from native_sparse_attention.integrations.transformers.config import NETWORKS
from native_sparse_attention.ops import rotary
from tests.support.hf_models import (
    COVERING,
    FAMILIES,
    LLAMA_FIRST,
    MERGED,
    PAPER,
    SETTINGS,
    SIZES,
    SPARSE,
    dense_model,
    logits_of,
    nsa_model,
    random_ids,
)

NEAR_DENSE = 3e-5  # of logits around 5, in float32
every_family = pytest.mark.parametrize('family', FAMILIES)
every_family_in_full = pytest.mark.parametrize('family', LLAMA_FIRST)
every_start = pytest.mark.parametrize('config', [SPARSE, PAPER, MERGED], ids=['dense', 'paper', 'merged'])


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@every_family
def test_logits_are_dense_where_everything_is_read(family: str):
    model, ids = dense_model(family), random_ids(2, 70)
    dense = logits_of(model, ids)
    assert convert_to_nsa(model, COVERING) is model
    assert model.config.model_type == f'nsa_{family}'
    assert worst(logits_of(model, ids), dense) <= NEAR_DENSE
    change_settings(model, num_selected_blocks=1, sliding_window_size=70)
    assert worst(logits_of(model, ids), dense) <= NEAR_DENSE
    far = nsa_model(family, SPARSE)  # more tokens than four blocks and a window hold
    assert worst(logits_of(far, ids)[:, 60:], dense[:, 60:]) > 1e-3


@every_family
def test_forced_blocks_are_dense_attention_under_their_mask(family: str):
    """With n = 3 the blocks are known: the first, the query's own, and the one before it, with the window."""
    model, ids = dense_model(family), random_ids(1, 70)
    config = NSAConfig(**{**SETTINGS, 'num_selected_blocks': 3, 'sliding_window_size': 12})
    position, block = torch.arange(70), torch.arange(70) // 8
    row, column = position[:, None], position[None]
    forced = (block[None] == 0) | ((block[:, None] - block[None]) <= 1) | (row - column < 12)
    allowed = (column <= row) & forced
    masks: Any = {'full_attention': allowed}
    if 'sliding_window' in FAMILIES[family][1]:
        masks['sliding_attention'] = (column <= row) & (row - column < 8)
    masks = {name: torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None] for name, mask in masks.items()}
    has_kinds = family not in ('llama', 'mistral', 'gemma')
    dense = logits_of(model, ids, attention_mask=masks if has_kinds else masks['full_attention'])
    sparse = logits_of(convert_to_nsa(model, config), ids)
    assert worst(sparse, dense) <= NEAR_DENSE
    assert worst(sparse, logits_of(dense_model(family), ids)) > 1e-3


@pytest.mark.parametrize('rope', ['linear', 'dynamic', 'yarn', 'llama3'])
@pytest.mark.parametrize('block_scores', ['rotated', 'plain'])
def test_rotary_embeddings_stay_those_of_the_model(rope: str, block_scores: str):
    settings: dict[str, Any] = {'rope_type': rope, 'rope_theta': 10000.0, 'factor': 4.0}
    if rope != 'linear':
        settings['original_max_position_embeddings'] = 32
    if rope == 'llama3':
        settings |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    longest = 32 if rope == 'dynamic' else 128  # its frequencies change beyond that
    model, ids = dense_model(rope_parameters=settings, max_position_embeddings=longest), random_ids(1, 70)
    dense = logits_of(model, ids)
    convert_to_nsa(model, COVERING.replace(block_scores=block_scores))
    assert worst(logits_of(model, ids), dense) <= NEAR_DENSE


def test_yarn_scales_plain_scores_too():
    """The factor of cos and sin multiplies plain queries and keys, so scores do not depend on rotation by 0."""
    from native_sparse_attention.integrations.transformers.attention import scale_rotary

    x, factor = torch.randn(1, 3, 2, 8), 1.5
    cos, sin = torch.full((1, 3, 2), factor), torch.zeros(1, 3, 2)
    assert torch.equal(rotary(x, cos, sin, layout='half'), scale_rotary(x, 4, factor))
    assert torch.equal(scale_rotary(x, 4, factor)[..., 4:], x[..., 4:])


@every_start
def test_a_layer_is_sparse_attention(config: NSAConfig):
    """A converted layer computes what `SparseAttention` with its weights does."""
    model = nsa_model(config=config.replace(block_scores='plain', use_diff_topk=True), attention_bias=False)
    attention: Any = model.model.layers[0].self_attn
    networks: Any = [c.network for c in (attention.k_compress, attention.v_compress) if c is not None]
    layer = SparseAttention(
        **{'dim': 32, 'dim_head': 8, 'heads': 4, 'kv_heads': 2, **SETTINGS},
        num_compressed_mem_kv=0,
        causal=True,
        norm=False,
        use_diff_topk=True,
        compress_mlp=networks if config.compressed_output else networks[0],
        rotary_layout='half',
        merge_window=config.merge_window,
        compressed_output=config.compressed_output,
        select_before_window=config.select_before_window,
        output_gate=config.merge_window and config.compressed_output,
    )
    own: dict[str, torch.Tensor] = dict(layer.named_parameters())
    own['to_qkv.weight'].data = torch.cat([getattr(attention, f'{name}_proj').weight for name in 'qkv'])
    own['combine_heads.weight'].data = attention.o_proj.weight
    own['k_intrablock_positions'].data = attention.k_compress.positions
    if config.compressed_output:
        own['v_intrablock_positions'].data = attention.v_compress.positions
        layer.to_strategy_combine = attention.to_strategy_combine
    seen: list[torch.Tensor] = []
    attention.register_forward_hook(
        lambda _, __, given, out: seen.extend((given['hidden_states'], out[0])), with_kwargs=True
    )
    logits_of(model, random_ids(2, 70))
    hidden, expected = seen
    torch.testing.assert_close(layer.eval()(hidden), expected, atol=2e-5, rtol=0)


@every_family_in_full
@every_start
def test_reload_is_bit_equal(family: str, config: NSAConfig, tmp_path: Path):
    model, ids = nsa_model(family, config), random_ids(2, 50)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager')
    assert type(loaded) is type(model)
    assert loaded.config.nsa == model.config.nsa
    assert json.loads((tmp_path / 'config.json').read_text())['nsa']['init'] == config.init
    assert torch.equal(logits_of(loaded.eval(), ids), logits_of(model, ids))
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, nsa={'num_selected_blocks': 3})
    assert changed.config.nsa == {**model.config.nsa, 'num_selected_blocks': 3}


@every_start
def test_a_dense_checkpoint_starts_as_conversion_does(config: NSAConfig, tmp_path: Path):
    model, ids = dense_model(), random_ids(1, 50)
    model.save_pretrained(tmp_path)
    loaded: Any = families.NSALlamaForCausalLM.from_pretrained(tmp_path, nsa=config).eval()
    converted = convert_to_nsa(model, config)
    gate = loaded.model.layers[0].self_attn.to_strategy_combine
    assert (gate is not None) is config.compressed_output
    if gate is not None:
        start = [-2, 2] if config.merge_window else [-2, -2, 2]
        assert gate.bias.tolist() == start * 4
    # The hidden layer of φ is random, but its output layer starts at 0.
    assert torch.equal(logits_of(loaded, ids), logits_of(converted, ids))
    assert loaded.config.to_dict()['model_type'] == loaded.config.model_type == 'nsa_llama'
    assert families.NSALlamaForCausalLM.from_pretrained(tmp_path).config.nsa == NSAConfig().to_dict()


@every_family
def test_a_converted_checkpoint_is_never_dense(family: str, tmp_path: Path):
    nsa_model(family).save_pretrained(tmp_path)
    with pytest.raises(Exception, match='nsa_attention'):
        type(dense_model(family)).from_pretrained(tmp_path)
    # Trainer reads the class of no family when it resumes. There, transformers 5.4 takes rotary parameters by kind of
    # layer, as Gemma 3 has them, only for kinds that `layer_types` names.
    if family == 'gemma3_text' and not hasattr(PreTrainedConfig, 'nested_rope_parameter_keys'):
        with pytest.raises(KeyError, match='Missing required keys'):
            PreTrainedConfig.from_pretrained(tmp_path)
    else:
        assert PreTrainedConfig.from_pretrained(tmp_path).model_type.startswith('nsa')
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 2


@pytest.mark.full
def test_a_converted_checkpoint_needs_the_import(tmp_path: Path):
    nsa_model().save_pretrained(tmp_path)
    code = f'from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert 'nsa_llama' in done.stderr


@pytest.mark.full
def test_code_on_the_hub_loads_without_the_import(tmp_path: Path):
    code = f"""
from native_sparse_attention.integrations.transformers import families
from tests.support.hf_models import nsa_model
families.NSALlamaConfig.register_for_auto_class()
families.NSALlamaForCausalLM.register_for_auto_class('AutoModelForCausalLM')
nsa_model().save_pretrained({str(tmp_path)!r})
"""
    load = f"""
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
assert model.config.nsa['sliding_window_size'] == 8, model.config
"""
    for step in (code, load):
        done = subprocess.run([sys.executable, '-c', step], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_config_of_other_models_stays():
    model = dense_model()
    shared = type(model)(model.config)
    convert_to_nsa(model, SPARSE)
    assert shared.config.model_type == 'llama'
    assert model.model.layers[0].self_attn.config is model.config


def test_some_layers(tmp_path: Path):
    model, ids = dense_model(num_hidden_layers=3), random_ids(1, 70)
    convert_to_nsa(model, SPARSE, layers=[2, 0])
    assert model.config.nsa['layers'] == [0, 2]
    assert model.config.to_dict()['layer_types'] == ['nsa_attention', 'full_attention', 'nsa_attention']
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager').eval()
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_a_model_without_head(tmp_path: Path):
    model, ids = dense_model().model, random_ids(1, 40)
    convert_to_nsa(model, SPARSE).save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is families.NSALlamaModel
    assert torch.equal(loaded(ids)[0], model(ids)[0])


def heads_of_families() -> list[Any]:
    """Return kinds of head and the families that have them."""
    pairs = [(kind, family) for family in families.FAMILIES for kind in family.models]
    names = [
        (kind, f.config.model_type.removeprefix('nsa_')) for kind, f in pairs if kind not in ('Model', 'ForCausalLM')
    ]
    return [pytest.param(*pair, marks=[pytest.mark.full] if pair[1] != 'llama' else []) for pair in names]


@pytest.mark.parametrize(('kind', 'family'), heads_of_families())
def test_other_heads(kind: str, family: str, tmp_path: Path):
    """Logits of padded rows are dense where everything is read, and those of the loaded model are the same."""
    auto, config = getattr(transformers, f'AutoModel{kind}'), dense_model(family).config
    config.num_labels, config.pad_token_id = 3, 0
    dense = auto.from_config(config, attn_implementation='eager').eval()
    ids = random_ids(2, 60).clamp(min=1)
    ids[1, 50:] = 0
    mask = (ids != 0).long()
    names = {'ForQuestionAnswering': ('start_positions', 'end_positions')}.get(kind, ('labels',))
    labels = dict.fromkeys(names, ids % 3 if kind == 'ForTokenClassification' else torch.tensor([2, 1]))

    def logits(model: Any) -> torch.Tensor:
        output = model(ids, mask)
        found = output.start_logits if kind == 'ForQuestionAnswering' else output.logits
        return found[mask.bool()] if found.shape[:2] == ids.shape else found

    expected = logits(dense)
    model = convert_to_nsa(dense, COVERING)
    assert worst(logits(model), expected) <= NEAR_DENSE
    change_settings(model, num_selected_blocks=3, sliding_window_size=4)
    assert worst(logits(model), expected) > 1e-4
    model(ids, mask, **labels).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, attn_implementation='eager').eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))


def test_hidden_states():
    """transformers looks up by class what to record, and notes it where it makes a model of the class."""
    transformers.modeling_utils._CAN_RECORD_REGISTRY.clear()
    dense, ids = dense_model(), random_ids(2, 40)
    expected = dense(ids, output_hidden_states=True).hidden_states
    found = convert_to_nsa(dense_model(), COVERING)(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    assert all(worst(a, b) <= NEAR_DENSE for a, b in zip(found, expected, strict=True))


def test_classes_are_found_by_their_names():
    for family in families.FAMILIES:
        model = family.models['Model'][0]
        for kind in (family.config, *(new for new, _ in family.models.values()), model.attention_class):
            assert pickle.loads(pickle.dumps(kind)) is kind
    with pytest.raises(AttributeError, match='NSAGPT2Model'):
        _ = families.NSAGPT2Model


def test_new_modules_follow_the_layers():
    model = convert_to_nsa(dense_model().to(torch.bfloat16), PAPER)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(logits_of(model, random_ids(2, 40))).all()


@pytest.mark.parametrize('network', NETWORKS)
def test_every_network(network: str):
    config = SPARSE.replace(compress_mlp=network, compress_mlp_expand_factor=0.5)
    assert torch.isfinite(logits_of(nsa_model(config=config), random_ids(1, 40))).all()


def test_settings_change_after_conversion(tmp_path: Path):
    model, ids = dense_model(), random_ids(1, 70)
    dense = logits_of(model, ids)
    convert_to_nsa(model, SPARSE)
    change_settings(model, num_selected_blocks=16, sliding_window_size=4)
    assert worst(logits_of(model, ids), dense) <= NEAR_DENSE
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation='eager').eval()
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    change_settings(model, select_before_window=True)
    assert worst(logits_of(model, ids), dense) <= NEAR_DENSE
    with pytest.raises(ValueError, match='compress_block_size is given, but only num_selected_blocks, '):
        change_settings(model, compress_block_size=8)
    with pytest.raises(ValueError, match='sliding_window_size is 0, but must be'):
        change_settings(model, sliding_window_size=0)
    with pytest.raises(ValueError, match='model is a LlamaForCausalLM, but must be converted'):
        change_settings(dense_model(), num_selected_blocks=16)


def test_a_changed_config_is_refused():
    """A changed configuration would be saved, but the layers would not follow it."""
    model, ids = nsa_model(), random_ids(1, 40)
    model.config.nsa['num_selected_blocks'] = 16
    with pytest.raises(ValueError, match=r'config\.nsa has num_selected_blocks 16'):
        logits_of(model, ids)
    model.config.nsa = SPARSE.replace(sliding_window_size=9)
    with pytest.raises(ValueError, match=r'config\.nsa has sliding_window_size 9, but must have .* layers, 8: change'):
        logits_of(model, ids)
    change_settings(model, sliding_window_size=9)
    logits_of(model, ids)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'init': 'sparse'}, "init is 'sparse', but must be one of 'dense', 'merged', 'paper'"),
        ({'selection_block_size': 40, 'compress_block_sliding_stride': 16}, 'selection_block_size is 40, but must be'),
        ({'compress_block_sliding_stride': 64}, 'compress_block_sliding_stride is 64, but must be at most'),
        ({'num_selected_blocks': 0}, 'num_selected_blocks is 0, but must be an integer of at least 1'),
        ({'dense_below': -1}, 'dense_below is -1, but must be an integer of at least 0'),
        ({'compress_mlp': 'big'}, "compress_mlp is 'big', but must be one of 'mean'"),
        ({'compress_mlp_expand_factor': 0}, 'compress_mlp_expand_factor is 0, but must be a number above 0'),
        ({'block_scores': None}, "block_scores is None, but must be one of 'rotated', 'plain'"),
        ({'backend': 'cuda'}, "backend is 'cuda', but must be one of"),
        ({'use_diff_topk': 1}, 'use_diff_topk is 1, but must be True or False'),
        (
            {'select_before_window': True, 'init': 'paper'},
            "select_before_window is True, but must be False unless init is 'dense' or 'merged'",
        ),
        ({'layers': [0, 0]}, 'layers is [0, 0], but must name each layer once'),
        ({'layers': []}, 'layers is [], but must be a sequence of at least one layer index'),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        NSAConfig(**settings)
    assert '\n' not in str(error.value)


def test_refused_models():
    with pytest.raises(ValueError, match='has sparse attention already'):
        convert_to_nsa(nsa_model())
    with pytest.raises(ValueError, match=r'model is a Linear, but must be one of Model, ForCausalLM, .* of Llama, Mis'):
        convert_to_nsa(torch.nn.Linear(1, 1))  # type: ignore[type-var]
    oss = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=2))
    with pytest.raises(ValueError, match='model is a GptOssForCausalLM'):
        convert_to_nsa(oss)
    with pytest.raises(ValueError, match='layers has 2, but the model has 2 layers'):
        convert_to_nsa(dense_model(), layers=[2])
    with pytest.raises(ValueError, match=r'that layer has sliding window attention \(sliding_window is 8\)'):
        convert_to_nsa(dense_model('gemma2'), layers=[0])
    sliding = dense_model('mistral', sliding_window=16)
    with pytest.raises(ValueError, match='no layer to convert: its layer 0 has sliding window attention'):
        convert_to_nsa(sliding)
    assert type(sliding) is transformers.MistralForCausalLM
    assert sliding.config.model_type == 'mistral'
    with pytest.raises(ValueError, match="nsa has the setting 'window', but must have those of NSAConfig"):
        families.NSALlamaConfig(**{**SIZES, 'nsa': {'window': 3}})


def test_a_forward_of_an_instance_is_refused():
    """Hooks of accelerate hold the forward of the dense class, so that the model would stay dense."""
    model: Any = accelerate.dispatch_model(dense_model(), {'': 'cpu'}, force_hooks=True)
    with pytest.raises(
        ValueError, match=r'^model has a forward .* by NSALlamaForCausalLM\.from_pretrained\(path, nsa=c'
    ):
        convert_to_nsa(model)
    assert type(model) is transformers.LlamaForCausalLM
    model = dense_model()
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r'model\.layers\.1\.self_attn has a forward of its own'):
        convert_to_nsa(model)
    del attention.forward
    convert_to_nsa(model)


def test_dense_weights_load_over_devices(tmp_path: Path):
    """Weights load over devices as the error for hooks advises."""
    model, ids = dense_model(), random_ids(1, 50)
    model.save_pretrained(tmp_path)
    devices: Any = dict.fromkeys(('model.embed_tokens', 'model.layers', 'model.norm', 'model.rotary_emb'), 'cpu')
    devices['lm_head'] = 'cpu'
    loaded: Any = families.NSALlamaForCausalLM.from_pretrained(tmp_path, nsa=SPARSE, device_map=devices).eval()
    loaded = accelerate.dispatch_model(loaded, devices, force_hooks=True)
    assert torch.equal(logits_of(loaded, ids), logits_of(convert_to_nsa(model, SPARSE), ids))


@pytest.mark.parametrize('family', ['llama', 'gemma2'])
def test_a_config_is_made_of_what_it_writes(family: str, tmp_path: Path):
    config = nsa_model(family).config
    config.save_pretrained(tmp_path)
    file = tmp_path / 'config.json'
    ways = [
        type(config).from_json_file(file),
        type(config)(**json.loads(file.read_text())),
        type(config).from_dict(config.to_dict()),
    ]
    for made in (*ways, type(config)(**config.to_dict())):
        assert made.num_hidden_layers == 2
        assert made.to_dict()['layer_types'] == config.to_dict()['layer_types']
        assert made.nsa == config.nsa
        AutoModelForCausalLM.from_config(made)


def test_without_transformers():
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)
import native_sparse_attention.integrations
assert 'transformers' not in sys.modules
import native_sparse_attention.integrations.transformers
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert 'pip install native-sparse-attention[transformers]' in done.stderr.splitlines()[-1]
