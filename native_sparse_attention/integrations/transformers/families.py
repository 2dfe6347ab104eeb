"""Model families: a configuration, a model, and the models with a head that transformers has for it.

The classes of a family are those of transformers with a mixin of this package before them, such as `NSALlamaConfig`,
`NSALlamaAttention`, `NSALlamaModel` and `NSALlamaForCausalLM`. To add a family, add its line to `FAMILIES`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from native_sparse_attention.integrations.transformers.attention import NSAAttention
from native_sparse_attention.integrations.transformers.model import (
    NSAForCausalLM,
    NSAModel,
    NSAModelConfig,
    NSAPreTrained,
)

# Mixins of the kinds of model, by the endings of class names, such as `LlamaForCausalLM`.
KINDS: dict[str, Any] = {
    'Model': NSAModel,
    'ForCausalLM': NSAForCausalLM,
    'ForSequenceClassification': NSAPreTrained,
    'ForTokenClassification': NSAPreTrained,
    'ForQuestionAnswering': NSAPreTrained,
}
_CLASSES: dict[str, Any] = {}


class Family(NamedTuple):
    """Classes of a family.

    Attributes:
        name: first part of the names of dense classes.
        config: configuration of the converted models.
        models: for each of `KINDS` that transformers has, the converted class and the dense one that it stands for.
    """

    name: str
    config: Any
    models: dict[str, tuple[Any, Any]]


def _make_family(name: str, modeling: Any, infix: str = '') -> Family:
    """Return the family of the classes in a module of transformers that begin with name.

    infix: follows the name in all classes but attention and causal language model, such as Text in `Gemma3TextModel`.
    """

    def subclass(mixin: type, dense: Any, ending: str, **attributes: Any) -> Any:
        attributes |= {'__module__': __name__, '__doc__': f'`{dense.__name__}` with sparse attention.'}
        new = _CLASSES[f'NSA{name}{ending}'] = type(f'NSA{name}{ending}', (mixin, dense), attributes)
        return new

    dense_config = getattr(modeling, f'{name}{infix}Config')
    config = subclass(NSAModelConfig, dense_config, 'Config', model_type=f'nsa_{dense_config.model_type}')
    attention = subclass(NSAAttention, getattr(modeling, f'{name}Attention'), 'Attention')
    attributes: dict[str, Any] = {'config_class': config, 'attention_class': attention}
    models: dict[str, tuple[Any, Any]] = {}
    for kind, mixin in KINDS.items():
        dense = getattr(modeling, name + ('' if kind == 'ForCausalLM' else infix) + kind, None)
        if dense is not None:
            models[kind] = subclass(mixin, dense, kind, **attributes), dense
            attributes = {'config_class': config, 'base_class': models['Model'][0]}
    return Family(name + infix, config, models)


FAMILIES = (
    _make_family('Llama', llama),
    _make_family('Mistral', mistral),
    _make_family('Qwen2', qwen2),
    _make_family('Qwen3', qwen3),
    _make_family('Gemma', gemma),
    _make_family('Gemma2', gemma2),
    _make_family('Gemma3', gemma3, 'Text'),
)


def __getattr__(name: str) -> Any:
    """Return a class of a family by its name, for imports and pickles."""
    if name not in _CLASSES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return _CLASSES[name]
