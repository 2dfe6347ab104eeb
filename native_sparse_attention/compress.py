"""Public path of the compression networks φ."""

from native_sparse_attention.nn.compress import (
    AttentionPool,
    CompressMLP,
    CompressTransformer,
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
