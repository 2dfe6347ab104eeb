"""Public path of `Transformer` and its parts."""

from native_sparse_attention.nn.transformer import Block, Transformer

__all__ = ['Block', 'Transformer']
