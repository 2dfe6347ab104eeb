"""Disjoint sets of keys in one softmax: selected blocks and window, regions of compressed blocks and memory pairs."""

from native_sparse_attention.ops.selected_attention.triton.merged.memory import attend_with_memory
from native_sparse_attention.ops.selected_attention.triton.merged.op import merged_attention

__all__ = ['attend_with_memory', 'merged_attention']
