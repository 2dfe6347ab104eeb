"""Shared parts of the Triton backends: varlen sequence boundaries, launches, and jit helpers that several ops use."""
