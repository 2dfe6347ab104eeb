"""PyTorch modules: the attention layers, their parts, and a small transformer."""
