"""Triton backend of the rotary embedding: one kernel for forward and backward, and the sum of gradients of a shared
input.
"""

from native_sparse_attention.ops.rotary.triton.op import rotary
from native_sparse_attention.ops.rotary.triton.sums import shared_input

__all__ = ['rotary', 'shared_input']
