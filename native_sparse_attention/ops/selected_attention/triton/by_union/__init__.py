"""Kernels with one program per query tile, which reads the union of the blocks that its queries selected."""
