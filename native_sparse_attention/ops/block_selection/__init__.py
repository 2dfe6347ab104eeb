from native_sparse_attention.ops.block_selection.api import chosen_scores, select_blocks, straight_through_scale

__all__ = ['chosen_scores', 'select_blocks', 'straight_through_scale']
