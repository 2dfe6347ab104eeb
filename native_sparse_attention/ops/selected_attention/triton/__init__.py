"""Selected attention in Triton.

A program computes a query, a query tile or the queries of a KV block; `plan.choose_design` decides which. The gradients
of k and v are always computed by block.
"""

from native_sparse_attention.ops.selected_attention.triton.op import selected_attention

__all__ = ['selected_attention']
