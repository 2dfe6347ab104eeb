"""Triton backend of the gated sum: one kernel forward and one backward."""

from native_sparse_attention.ops.gated_sum.triton.op import gated_sum

__all__ = ['gated_sum']
