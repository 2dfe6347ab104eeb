"""Former path of `native_sparse_attention.integrations`."""
