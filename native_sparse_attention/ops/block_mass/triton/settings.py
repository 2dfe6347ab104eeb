"""Launch settings of `block_mass`, by architecture, bytes of an element and head size.

block_m: queries times heads of a group. block_n: keys.
"""

from __future__ import annotations

from native_sparse_attention.ops._triton.launch import Table, read_table

BLOCK_LSE: Table = read_table("""
    sm80 2: 64 64 4 3 | 64 64 4 2 | 64 64 4 1
    sm80 4: 32 32 4 1 | 16 32 4 1 | 16 32 4 1
    sm86 2: 64 64 4 2 | 64 64 4 1 | 32 64 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 32 4 1
    sm90 2: 32 32 4 1 | 64 64 4 3 | 64 64 4 2
""")
