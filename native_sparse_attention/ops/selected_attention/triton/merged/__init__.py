"""Selected blocks and window in one softmax."""

from native_sparse_attention.ops.selected_attention.triton.merged.op import merged_attention

__all__ = ['merged_attention']
