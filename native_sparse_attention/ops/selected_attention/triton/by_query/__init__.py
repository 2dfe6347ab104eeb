"""Kernels with one program per query and tile of the heads that share its blocks."""
