"""Conversion of a dense Hugging Face model, and the registration of the converted model types."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import transformers
from transformers import PreTrainedModel

from native_sparse_attention.core.checks import shown
from native_sparse_attention.integrations.transformers.attention import NSAAttention
from native_sparse_attention.integrations.transformers.config import NSAConfig
from native_sparse_attention.integrations.transformers.families import FAMILIES, KINDS
from native_sparse_attention.integrations.transformers.model import NSAPreTrained, convert_layers

# Settings that neither weights nor caches depend on.
_CHANGEABLE = (
    *('num_selected_blocks', 'sliding_window_size', 'num_init_blocks', 'num_local_blocks', 'dense_below'),
    *('select_before_window', 'use_diff_topk', 'backend'),
)

Model = TypeVar('Model', bound=PreTrainedModel)


def convert_to_nsa(model: Model, config: NSAConfig | None = None, layers: Sequence[int] | None = None) -> Model:
    """Replace the attention of a dense model by sparse attention, in place, and return the model.

    Projections, their names, norms and rotary embedding stay. Class and configuration become those of the converted
    family, such as `NSALlamaForCausalLM` and `nsa_llama`. A configuration that other models share stays as it is.

    Args:
        model: a model of Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2 or Gemma 3 (text) without a head, or with that of
            a causal language model, a classifier of sequences or tokens, or question answering.
        config: settings; default `NSAConfig()`.
        layers: indices of the layers to convert; default those of config, or every layer with full attention.

    Raises:
        ValueError: the model is of another class or converted already, a layer has no full causal attention, or
            modules have a forward that is not of their class, such as hooks of accelerate.
    """
    if config is not None and not isinstance(config, NSAConfig):
        raise ValueError(f'config is {shown(config)}, but must be an NSAConfig')
    config = NSAConfig() if config is None else config
    if layers is not None:
        config = config.replace(layers=layers)
    if isinstance(model, NSAPreTrained):
        raise ValueError(f'model is a {type(model).__name__}, but must be dense: it has sparse attention already')
    converted = {dense: (new, f.config) for f in FAMILIES for new, dense in f.models.values()}
    if type(model) not in converted:
        families, kinds = (', '.join(names) for names in ((f.name for f in FAMILIES), KINDS))
        raise ValueError(f'model is a {type(model).__name__}, but must be one of {kinds} of {families}')
    new_class, config_class = converted[type(model)]
    _check_forwards(model, new_class)
    dense_class, dense_config = type(model), model.config
    new_config: Any = copy.deepcopy(dense_config)
    new_config.__class__ = config_class
    holders = [module for module in model.modules() if getattr(module, 'config', None) is dense_config]
    _take(model, new_class, holders, new_config)
    try:
        convert_layers(model, config, added_like_layers=True)
    except ValueError:
        _take(model, dense_class, holders, dense_config)
        raise
    for kind in {type(model), type(model.base_model)}:
        PreTrainedModel.__init__(kind.__new__(kind), new_config)  # registers the outputs that the class records
    return model


def _check_forwards(model: Any, new_class: type) -> None:
    """Raise ValueError where a forward of the dense class is held by an instance: it would stay dense."""
    replaced = {id(model.base_model), *(id(layer.self_attn) for layer in model.base_model.layers)}
    for name, module in model.named_modules():
        if hasattr(module, '_hf_hook') or (id(module) in replaced and 'forward' in vars(module)):
            raise ValueError(
                f'{name or "model"} has a forward of its own, as a device_map over several devices gives it, but must '
                f'have that of its class: convert the model before accelerate dispatches it, or load the dense weights '
                f'by {new_class.__name__}.from_pretrained(path, nsa=config, device_map=...)'
            )


def _take(model: Any, new_class: type, holders: list[Any], config: Any) -> None:
    """Give a model its class, and it and its modules their configuration."""
    model.__class__ = new_class
    for module in holders:
        module.config = config


def change_settings(model: PreTrainedModel, **settings: Any) -> None:
    """Change settings of a converted model on which its weights do not depend, for instance as training proceeds.

    They take effect in the next forward and are saved with the model.

    Args:
        model: a converted model.
        settings: num_selected_blocks, sliding_window_size, num_init_blocks, num_local_blocks, dense_below,
            select_before_window, use_diff_topk or backend, as in `NSAConfig`.

    Raises:
        ValueError: another setting is given, or the model is not converted.
    """
    if not isinstance(model, NSAPreTrained):
        raise ValueError(f'model is a {type(model).__name__}, but must be converted')
    for name in settings:
        if name not in _CHANGEABLE:
            raise ValueError(f'{name} is given, but only {", ".join(_CHANGEABLE)} may change after conversion')
    new = NSAConfig.of(model.config.nsa).replace(**settings)
    model.config.nsa = new
    for module in model.modules():
        if isinstance(module, NSAAttention):
            module.nsa = new


def register() -> None:
    """Register the converted model types with the auto classes of transformers."""
    for family in FAMILIES:
        transformers.AutoConfig.register(family.config.model_type, family.config, exist_ok=True)
        for kind, (model, _) in family.models.items():
            getattr(transformers, 'AutoModel' + kind.removeprefix('Model')).register(
                family.config, model, exist_ok=True
            )
