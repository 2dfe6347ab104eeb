from native_sparse_attention.ops.window_attention.api import window_attention

__all__ = ['window_attention']
