"""Triton backend of decoding: five launches per step, with φ between the first and the second."""

from native_sparse_attention.ops.decoding.triton.launch_cache import LaunchCache
from native_sparse_attention.ops.decoding.triton.op import append, attend

__all__ = ['LaunchCache', 'append', 'attend']
