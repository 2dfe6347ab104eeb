from native_sparse_attention.ops.rotary.api import rotary, shared_input

__all__ = ['rotary', 'shared_input']
