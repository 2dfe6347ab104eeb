from native_sparse_attention.ops.gated_sum.api import gated_sum

__all__ = ['gated_sum']
