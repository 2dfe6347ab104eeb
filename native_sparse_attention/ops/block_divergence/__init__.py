from native_sparse_attention.ops.block_divergence.api import block_divergence

__all__ = ['block_divergence']
