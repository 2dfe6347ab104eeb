"""Kernels with one program per KV block and chunk of the queries that selected it."""
