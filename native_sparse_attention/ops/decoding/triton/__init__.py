"""Decoding in Triton: five launches for a step, and φ between the first and the second."""

from native_sparse_attention.ops.decoding.triton.op import append, attend
from native_sparse_attention.ops.decoding.triton.prepared import Launches

__all__ = ['Launches', 'append', 'attend']
