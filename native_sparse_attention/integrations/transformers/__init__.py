"""Hugging Face models with Native Sparse Attention in place of their dense attention layers.

Importing this package registers the converted model types, such as `nsa_llama`, with `AutoConfig`, `AutoModel` and the
auto classes of causal language models, sequence and token classification and question answering. It needs
`pip install native-sparse-attention[transformers]`.
"""

import importlib.util

if importlib.util.find_spec('transformers') is None:
    raise ImportError(
        'transformers is not installed, but native_sparse_attention.integrations.transformers needs it: '
        'pip install native-sparse-attention[transformers]'
    )

from native_sparse_attention.integrations.transformers.config import NSAConfig
from native_sparse_attention.integrations.transformers.convert import change_settings, convert_to_nsa, register
from native_sparse_attention.integrations.transformers.losses import collect_block_losses

register()

__all__ = ['NSAConfig', 'change_settings', 'collect_block_losses', 'convert_to_nsa']
