"""Launch settings of `chosen_scores`, by architecture, bytes of an element and head size.

block_m: heads of a group in FORWARD and DQ, queries times heads in DK. block_n: (selected block, overlapping compressed
block) combinations in FORWARD and DQ, compressed blocks in DK.
"""

from __future__ import annotations

from native_sparse_attention.ops._triton.launch import Table, read_table

FORWARD: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 4 2 | 64 64 4 1
    sm80 4: 64 64 4 1 | 32 64 4 1 | 16 32 4 1
    sm86 2: 64 64 4 2 | 64 64 4 1 | 32 64 4 1
    sm86 4: 64 64 4 1 | 32 64 4 1 | 16 32 4 1
    sm90 2: 64 32 1 2 | 64 32 1 2 | -
""")

DQ: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 4 1 | 32 32 4 1
    sm80 4: 32 64 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 64 4 1 | 32 64 4 1 | 16 32 4 1
    sm86 4: 32 64 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 32 1 1 | 64 32 1 2 | 32 64 4 1
""")

DK: Table = read_table("""
    sm80 2: 64 16 4 2 | 64 16 4 2 | 64 16 4 1
    sm80 4: 64 16 4 1 | 32 16 4 1 | 16 16 4 1
    sm86 2: 64 16 4 2 | 64 16 4 1 | 32 16 4 1
    sm86 4: 64 16 4 1 | 32 16 4 1 | 16 16 4 1
    sm90 2: 128 16 4 2 | 64 16 2 3 | -
""")

# Groups of at most `settings.SMALL_GROUP` query heads. The tables above are tuned for groups of 16.
DQ_SMALL: Table = read_table("""
    sm90 2: 32 32 1 2 | 64 32 1 2 | 32 64 4 1
""")

DK_SMALL: Table = read_table("""
    sm90 2: 128 16 4 3 | 64 16 2 3 | -
""")
