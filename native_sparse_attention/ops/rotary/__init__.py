from native_sparse_attention.ops.rotary.api import norm_rotary, rotary, shared_input

__all__ = ['norm_rotary', 'rotary', 'shared_input']
