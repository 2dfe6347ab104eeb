from native_sparse_attention.ops.block_mass.api import block_mass

__all__ = ['block_mass']
