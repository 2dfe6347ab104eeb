from native_sparse_attention.ops.rotary.api import rotary, shared_input
from native_sparse_attention.ops.rotary.norm import norm_rotary

__all__ = ['norm_rotary', 'rotary', 'shared_input']
