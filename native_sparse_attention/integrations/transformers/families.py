"""Model families: a configuration, a model and a causal language model each.

A family keeps the classes of transformers and puts a mixin of this package before them. To add one, write its classes
here and its row in `FAMILIES`.
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
from native_sparse_attention.integrations.transformers.model import NSAForCausalLM, NSAModel, NSAModelConfig


class NSALlamaConfig(NSAModelConfig, llama.LlamaConfig):
    """`LlamaConfig` with `nsa`."""

    model_type = 'nsa_llama'


class NSALlamaAttention(NSAAttention, llama.LlamaAttention):
    """Sparse `LlamaAttention`."""


class NSALlamaModel(NSAModel, llama.LlamaModel):
    """`LlamaModel` with sparse attention."""

    config_class = NSALlamaConfig
    attention_class = NSALlamaAttention


class NSALlamaForCausalLM(NSAForCausalLM, llama.LlamaForCausalLM):
    """`LlamaForCausalLM` with sparse attention."""

    config_class = NSALlamaConfig
    base_class = NSALlamaModel


class NSAMistralConfig(NSAModelConfig, mistral.MistralConfig):
    """`MistralConfig` with `nsa`."""

    model_type = 'nsa_mistral'


class NSAMistralAttention(NSAAttention, mistral.MistralAttention):
    """Sparse `MistralAttention`."""


class NSAMistralModel(NSAModel, mistral.MistralModel):
    """`MistralModel` with sparse attention."""

    config_class = NSAMistralConfig
    attention_class = NSAMistralAttention


class NSAMistralForCausalLM(NSAForCausalLM, mistral.MistralForCausalLM):
    """`MistralForCausalLM` with sparse attention."""

    config_class = NSAMistralConfig
    base_class = NSAMistralModel


class NSAQwen2Config(NSAModelConfig, qwen2.Qwen2Config):
    """`Qwen2Config` with `nsa`."""

    model_type = 'nsa_qwen2'


class NSAQwen2Attention(NSAAttention, qwen2.Qwen2Attention):
    """Sparse `Qwen2Attention`."""


class NSAQwen2Model(NSAModel, qwen2.Qwen2Model):
    """`Qwen2Model` with sparse attention."""

    config_class = NSAQwen2Config
    attention_class = NSAQwen2Attention


class NSAQwen2ForCausalLM(NSAForCausalLM, qwen2.Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` with sparse attention."""

    config_class = NSAQwen2Config
    base_class = NSAQwen2Model


class NSAQwen3Config(NSAModelConfig, qwen3.Qwen3Config):
    """`Qwen3Config` with `nsa`."""

    model_type = 'nsa_qwen3'


class NSAQwen3Attention(NSAAttention, qwen3.Qwen3Attention):
    """Sparse `Qwen3Attention`."""


class NSAQwen3Model(NSAModel, qwen3.Qwen3Model):
    """`Qwen3Model` with sparse attention."""

    config_class = NSAQwen3Config
    attention_class = NSAQwen3Attention


class NSAQwen3ForCausalLM(NSAForCausalLM, qwen3.Qwen3ForCausalLM):
    """`Qwen3ForCausalLM` with sparse attention."""

    config_class = NSAQwen3Config
    base_class = NSAQwen3Model


class NSAGemmaConfig(NSAModelConfig, gemma.GemmaConfig):
    """`GemmaConfig` with `nsa`."""

    model_type = 'nsa_gemma'


class NSAGemmaAttention(NSAAttention, gemma.GemmaAttention):
    """Sparse `GemmaAttention`."""


class NSAGemmaModel(NSAModel, gemma.GemmaModel):
    """`GemmaModel` with sparse attention."""

    config_class = NSAGemmaConfig
    attention_class = NSAGemmaAttention


class NSAGemmaForCausalLM(NSAForCausalLM, gemma.GemmaForCausalLM):
    """`GemmaForCausalLM` with sparse attention."""

    config_class = NSAGemmaConfig
    base_class = NSAGemmaModel


class NSAGemma2Config(NSAModelConfig, gemma2.Gemma2Config):
    """`Gemma2Config` with `nsa`."""

    model_type = 'nsa_gemma2'


class NSAGemma2Attention(NSAAttention, gemma2.Gemma2Attention):
    """Sparse `Gemma2Attention`."""


class NSAGemma2Model(NSAModel, gemma2.Gemma2Model):
    """`Gemma2Model` with sparse attention."""

    config_class = NSAGemma2Config
    attention_class = NSAGemma2Attention


class NSAGemma2ForCausalLM(NSAForCausalLM, gemma2.Gemma2ForCausalLM):
    """`Gemma2ForCausalLM` with sparse attention."""

    config_class = NSAGemma2Config
    base_class = NSAGemma2Model


class NSAGemma3Config(NSAModelConfig, gemma3.Gemma3TextConfig):
    """`Gemma3TextConfig` with `nsa`."""

    model_type = 'nsa_gemma3_text'


class NSAGemma3Attention(NSAAttention, gemma3.Gemma3Attention):
    """Sparse `Gemma3Attention`."""


class NSAGemma3Model(NSAModel, gemma3.Gemma3TextModel):
    """`Gemma3TextModel` with sparse attention."""

    config_class = NSAGemma3Config
    attention_class = NSAGemma3Attention


class NSAGemma3ForCausalLM(NSAForCausalLM, gemma3.Gemma3ForCausalLM):
    """`Gemma3ForCausalLM` with sparse attention."""

    config_class = NSAGemma3Config
    base_class = NSAGemma3Model


class Family(NamedTuple):
    """Classes of a family, converted, and the dense ones that they stand for."""

    config: Any
    model: Any
    causal_lm: Any
    dense_model: Any
    dense_causal_lm: Any


FAMILIES = (
    Family(NSALlamaConfig, NSALlamaModel, NSALlamaForCausalLM, llama.LlamaModel, llama.LlamaForCausalLM),
    Family(NSAMistralConfig, NSAMistralModel, NSAMistralForCausalLM, mistral.MistralModel, mistral.MistralForCausalLM),
    Family(NSAQwen2Config, NSAQwen2Model, NSAQwen2ForCausalLM, qwen2.Qwen2Model, qwen2.Qwen2ForCausalLM),
    Family(NSAQwen3Config, NSAQwen3Model, NSAQwen3ForCausalLM, qwen3.Qwen3Model, qwen3.Qwen3ForCausalLM),
    Family(NSAGemmaConfig, NSAGemmaModel, NSAGemmaForCausalLM, gemma.GemmaModel, gemma.GemmaForCausalLM),
    Family(NSAGemma2Config, NSAGemma2Model, NSAGemma2ForCausalLM, gemma2.Gemma2Model, gemma2.Gemma2ForCausalLM),
    Family(NSAGemma3Config, NSAGemma3Model, NSAGemma3ForCausalLM, gemma3.Gemma3TextModel, gemma3.Gemma3ForCausalLM),
)
