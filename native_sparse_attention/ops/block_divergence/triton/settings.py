"""Launch settings of `block_divergence`, by architecture, bytes of an element and head size.

block_m: queries times heads of a group. block_n: blocks (FORWARD) or compressed keys.
"""

from __future__ import annotations

from native_sparse_attention.ops._triton.launch import Table, read_table

FORWARD: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 32 4 2 | 32 32 4 1
    sm80 4: 32 32 4 1 | 16 32 4 1 | 16 32 4 1
    sm86 2: 64 64 4 2 | 64 32 4 1 | 32 32 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 32 4 1
""")

DQ: Table = read_table("""
    sm80 2: 32 64 4 1 | 32 64 4 1 | 32 32 4 1
    sm80 4: 32 32 4 1 | 16 32 4 1 | 16 16 4 1
    sm86 2: 32 64 4 1 | 32 64 4 1 | 32 32 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 16 4 1
""")

DK: Table = read_table("""
    sm80 2: 32 32 4 2 | 32 32 4 1 | 16 32 4 1
    sm80 4: 32 32 4 1 | 32 16 4 1 | 16 16 4 1
    sm86 2: 32 32 4 1 | 32 32 4 1 | 16 32 4 1
    sm86 4: 32 32 4 1 | 32 16 4 1 | 16 16 4 1
""")
