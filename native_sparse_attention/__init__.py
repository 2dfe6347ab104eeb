"""Native Sparse Attention (arXiv 2502.11089) as a drop-in PyTorch layer."""

from native_sparse_attention.attention import SparseAttention
from native_sparse_attention.cache import LayerCache, ModelCache
from native_sparse_attention.decoding import nsa_decode
from native_sparse_attention.functional import nsa
from native_sparse_attention.paged_cache import PagedLayerCache

__all__ = ['LayerCache', 'ModelCache', 'PagedLayerCache', 'SparseAttention', 'nsa', 'nsa_decode']
