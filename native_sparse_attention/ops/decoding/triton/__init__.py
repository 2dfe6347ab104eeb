"""Triton backend of decoding: five launches per step, with φ between the first and the second: two launches where it is
an MLP that the kernels know, none where it is a mean.
"""

from native_sparse_attention.ops.decoding.triton.launch_cache import LaunchCache
from native_sparse_attention.ops.decoding.triton.op import append, attend, compress

__all__ = ['LaunchCache', 'append', 'attend', 'compress']
