"""Rotary position embedding as one kernel, which its gradient takes too, and the sum of all readers' gradients."""

from native_sparse_attention.ops.rotary.triton.op import rotary
from native_sparse_attention.ops.rotary.triton.sums import shared_input

__all__ = ['rotary', 'shared_input']
