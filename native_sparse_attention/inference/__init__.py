"""Caches, cached decoding and text generation."""
