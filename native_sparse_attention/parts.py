"""Parts of a sparse attention layer, for layers of your own around `nsa` and `nsa_decode`."""

from native_sparse_attention.nn.compress.apply import compress_pair, compress_tokens
from native_sparse_attention.nn.compress.build import make_networks
from native_sparse_attention.nn.gate import make_gate
from native_sparse_attention.nn.padding import FrontOrder, from_front, front_order, move_to_front

__all__ = [
    'FrontOrder',
    'compress_pair',
    'compress_tokens',
    'from_front',
    'front_order',
    'make_gate',
    'make_networks',
    'move_to_front',
]
