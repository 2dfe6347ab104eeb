"""Public path of `Transformer` and its parts."""

from native_sparse_attention.nn.transformer import Block, LossAndLogits, Transformer

__all__ = ['Block', 'LossAndLogits', 'Transformer']
