"""Selected attention in Triton: by query, by neighbours or by block (`op.choose_design`); keys have their gradients by
block.
"""

from native_sparse_attention.ops.selected_attention.triton.op import selected_attention

__all__ = ['selected_attention']
