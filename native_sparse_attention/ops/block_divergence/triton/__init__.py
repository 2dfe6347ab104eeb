"""Triton backend of the divergence of the block scores: three kernels forward and two backward."""

from native_sparse_attention.ops.block_divergence.triton.op import block_divergence

__all__ = ['block_divergence']
