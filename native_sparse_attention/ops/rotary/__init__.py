from native_sparse_attention.ops.rotary.api import rotary

__all__ = ['rotary']
