"""Public path of text generation."""

from native_sparse_attention.inference.generation import DecodeStep

__all__ = ['DecodeStep']
