"""Triton backend of the rotary embedding: one kernel for forward and backward, the sum of gradients of a shared input,
and RMSNorm followed by rotary embedding.
"""

from native_sparse_attention.ops.rotary.triton.norm import norm_rotary
from native_sparse_attention.ops.rotary.triton.op import rotary
from native_sparse_attention.ops.rotary.triton.sums import shared_input

__all__ = ['norm_rotary', 'rotary', 'shared_input']
