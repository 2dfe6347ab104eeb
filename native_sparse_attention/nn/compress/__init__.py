"""Compression networks φ. To add one, write a module in `networks` and test it by `tests/layer/test_compress.py`."""

from native_sparse_attention.nn.compress.apply import (
    compress_blocks,
    compress_pair,
    compress_tokens,
    with_zero_gradients,
)
from native_sparse_attention.nn.compress.block_encoder import CompressTransformer
from native_sparse_attention.nn.compress.build import make_networks
from native_sparse_attention.nn.compress.check import check_network
from native_sparse_attention.nn.compress.networks import (
    AttentionPool,
    CompressMLP,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    MeanResidualMLP,
    SingleProjection,
    hidden_size,
)

__all__ = [
    'AttentionPool',
    'CompressMLP',
    'CompressTransformer',
    'ConvLinearCompress',
    'GroupedMLP',
    'MeanPool',
    'MeanResidualMLP',
    'SingleProjection',
    'check_network',
    'compress_blocks',
    'compress_pair',
    'compress_tokens',
    'hidden_size',
    'make_networks',
    'with_zero_gradients',
]
