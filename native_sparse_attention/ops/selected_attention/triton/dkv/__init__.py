"""Gradients of k and v."""
