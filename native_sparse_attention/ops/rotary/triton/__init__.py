"""Rotary position embedding as one kernel, which its gradient takes too."""

from native_sparse_attention.ops.rotary.triton.op import rotary

__all__ = ['rotary']
