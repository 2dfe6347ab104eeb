"""Tiny random models of the families that the transformers integration converts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from native_sparse_attention.integrations.transformers import NSAConfig, convert_to_nsa

# The argument of the forward that holds the cache: `cache` from transformers 5.24 on.
CACHE = next(
    name
    for name in ('cache', 'past_key_values')
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
SIZES: dict[str, Any] = {
    'vocab_size': 99,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 512,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
ALTERNATING = {'layer_types': ['sliding_attention', 'full_attention'], 'sliding_window': 8}
# Configuration class and settings by family; gemma2 and gemma3_text have one layer with a sliding window.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    'llama': ('LlamaConfig', {'attention_bias': True}),
    'mistral': ('MistralConfig', {'sliding_window': None}),
    'qwen2': ('Qwen2Config', {}),
    'qwen3': ('Qwen3Config', {}),
    'gemma': ('GemmaConfig', {}),
    'gemma2': ('Gemma2Config', {**ALTERNATING, 'query_pre_attn_scalar': 16, 'attn_logit_softcapping': 5.0}),
    'gemma3_text': ('Gemma3TextConfig', ALTERNATING),
}
# Parameters of a test: families other than llama are not in the quick run.
LLAMA_FIRST = ['llama', *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name != 'llama')]
# Small blocks: with 4 blocks of 8 tokens and a window of 8, the selection matters from 32 tokens on.
SETTINGS: dict[str, Any] = {
    'selection_block_size': 8,
    'num_selected_blocks': 4,
    'sliding_window_size': 8,
    'compress_block_size': 4,
    'compress_block_sliding_stride': 2,
}
COVERING = NSAConfig(**{**SETTINGS, 'num_selected_blocks': 16})
SPARSE = NSAConfig(**SETTINGS)
PAPER = NSAConfig(**SETTINGS, init='paper')
MERGED = NSAConfig(**SETTINGS, init='merged', select_before_window=True)


def dense_model(family: str = 'llama', seed: int = 0, **settings: Any) -> Any:
    """Return a dense model in eval mode with logits around 5."""
    name, own = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SIZES, **own, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
    randomize(model)
    return model


def nsa_model(family: str = 'llama', config: NSAConfig = SPARSE, **settings: Any) -> Any:
    """Return a converted model whose networks and gates have random weights, too."""
    model = convert_to_nsa(dense_model(family, **settings), config)
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))


def random_ids(batch: int, seqlen: int, seed: int = 1) -> Tensor:
    return torch.randint(3, SIZES['vocab_size'], (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 1) -> dict[str, Tensor]:
    """Return input_ids and attention_mask `[B, T]` of rows with padding on the left."""
    ids, longest = random_ids(len(lengths), max(lengths), seed), max(lengths)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {'input_ids': ids.where(mask, SIZES['pad_token_id']), 'attention_mask': mask.long()}


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **arguments).logits
