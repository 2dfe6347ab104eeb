"""Triton backend of the mass of full attention by selection block."""

from native_sparse_attention.ops.block_mass.triton.op import block_mass

__all__ = ['block_mass']
