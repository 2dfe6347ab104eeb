"""Selected attention in Triton: a program per query reads its blocks; gradients of k and v are added by block."""

from native_sparse_attention.ops.selected_attention.triton.op import selected_attention

__all__ = ['selected_attention']
