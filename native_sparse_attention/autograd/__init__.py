"""Saved tensors and recomputation of the backward pass."""
