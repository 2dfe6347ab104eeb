"""Compression networks φ. To add one, write a module in `networks` and test it by `tests/layer/test_compress.py`."""

from native_sparse_attention.nn.compress.block_encoder import CompressTransformer
from native_sparse_attention.nn.compress.networks import (
    AttentionPool,
    CompressMLP,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    MeanResidualMLP,
    SingleProjection,
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
]
