"""Compressed attention and block selection that read some regions of the compressed blocks, chosen by region keys."""
