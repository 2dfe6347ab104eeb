from native_sparse_attention.ops.compressed_attention.api import compressed_attention

__all__ = ['compressed_attention']
