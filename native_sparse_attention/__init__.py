"""Native Sparse Attention (arXiv 2502.11089) as a drop-in PyTorch layer."""

from native_sparse_attention.attention import SparseAttention
from native_sparse_attention.cache import LayerCache, ModelCache
from native_sparse_attention.functional import nsa

__all__ = ['LayerCache', 'ModelCache', 'SparseAttention', 'nsa']
