"""Model families: a configuration, a model, a causal language model and a sequence classifier each.

The classes of a family are those of transformers with a mixin of this package before them, such as `NSALlamaConfig`,
`NSALlamaAttention`, `NSALlamaModel`, `NSALlamaForCausalLM` and `NSALlamaForSequenceClassification`. To add a family,
add its line to `FAMILIES`.
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

_CLASSES: dict[str, Any] = {}


class Family(NamedTuple):
    """Classes of a family.

    Attributes:
        config: configuration of the converted models.
        model: converted model without a head.
        heads: converted models with a head.
        dense: dense models that `model` and each of `heads` stand for.
    """

    config: Any
    model: Any
    heads: tuple[Any, ...]
    dense: tuple[Any, ...]


def _make_family(name: str, modeling: Any, infix: str = '') -> Family:
    """Return the family of the classes in a module of transformers that begin with name.

    infix: follows the name in configuration, model and classifier, such as Text in `Gemma3TextModel`.
    """

    def subclass(mixin: type, dense: Any, ending: str, **attributes: Any) -> Any:
        attributes |= {'__module__': __name__, '__doc__': f'`{dense.__name__}` with sparse attention.'}
        new = _CLASSES[f'NSA{name}{ending}'] = type(f'NSA{name}{ending}', (mixin, dense), attributes)
        return new

    def dense(ending: str) -> Any:
        return getattr(modeling, name + ending)

    dense_config, dense_model = dense(f'{infix}Config'), dense(f'{infix}Model')
    lm, classifier = dense('ForCausalLM'), dense(f'{infix}ForSequenceClassification')
    config = subclass(NSAModelConfig, dense_config, 'Config', model_type=f'nsa_{dense_config.model_type}')
    attention = subclass(NSAAttention, dense('Attention'), 'Attention')
    model = subclass(NSAModel, dense_model, 'Model', config_class=config, attention_class=attention)
    of_family = {'config_class': config, 'base_class': model}
    heads = (
        subclass(NSAForCausalLM, lm, 'ForCausalLM', **of_family),
        subclass(NSAPreTrained, classifier, 'ForSequenceClassification', **of_family),
    )
    return Family(config, model, heads, (dense_model, lm, classifier))


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
