"""Former path of `native_sparse_attention.integrations.fla`."""

from native_sparse_attention.integrations.fla import parallel_nsa

__all__ = ['parallel_nsa']
