"""Public path of the compression networks φ."""

from native_sparse_attention.nn.compress import *  # noqa: F403
