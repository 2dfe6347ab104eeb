"""Native Sparse Attention (arXiv 2502.11089) as a drop-in PyTorch layer."""

from native_sparse_attention.build import build_kernels
from native_sparse_attention.functional import nsa
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.inference.model_cache import ModelCache
from native_sparse_attention.inference.paged_cache import PagedLayerCache
from native_sparse_attention.nn.attention import SparseAttention

__version__ = '0.1.0'  # the build reads it from here

__all__ = [
    'LayerCache',
    'ModelCache',
    'PagedLayerCache',
    'SparseAttention',
    'build_kernels',
    'nsa',
    'nsa_decode',
]
