"""Triton backend of block selection and of the scores of selected blocks."""

from native_sparse_attention.ops.block_selection.triton.scores import chosen_scores, straight_through_scale
from native_sparse_attention.ops.block_selection.triton.select import select_blocks

__all__ = ['chosen_scores', 'select_blocks', 'straight_through_scale']
