from native_sparse_attention.ops.selected_attention.api import selected_attention

__all__ = ['selected_attention']
