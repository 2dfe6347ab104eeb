"""The ops of Native Sparse Attention, for code with projections of its own."""

from native_sparse_attention.core.backend import BackendChoice
from native_sparse_attention.core.checks import validate_packing
from native_sparse_attention.ops.block_selection import chosen_scores, select_blocks, straight_through_scale
from native_sparse_attention.ops.compressed_attention import compressed_attention
from native_sparse_attention.ops.gated_sum import gated_sum
from native_sparse_attention.ops.rotary import rotary
from native_sparse_attention.ops.selected_attention import selected_attention
from native_sparse_attention.ops.window_attention import window_attention

__all__ = [
    'BackendChoice',
    'chosen_scores',
    'compressed_attention',
    'gated_sum',
    'rotary',
    'select_blocks',
    'selected_attention',
    'straight_through_scale',
    'validate_packing',
    'window_attention',
]
