"""Rotary position embedding as one kernel, which its gradient takes too, and the sum of all readers' gradients."""

from native_sparse_attention.ops.rotary.triton.op import rotary
from native_sparse_attention.ops.rotary.triton.sums import fan_out

__all__ = ['fan_out', 'rotary']
