"""Launch settings of selected attention, by architecture, bytes per element and head size.

block_m: rows per tile, at most the heads of one query (DKV, UNION and BLOCK: rows are pairs of query and head).
block_n: keys per tile at most; BLOCK and BLOCK_DQ hold a whole block, and have tables of their own for short blocks.
"""

from __future__ import annotations

from torch import Tensor

from native_sparse_attention.ops._triton.launch import Settings, Table, read_table, settings_of_first

# Tables by group size, for kernels by query: any group, groups of 17 to 32, and larger groups.
GroupTables = tuple[Table, Table, Table]

FORWARD: Table = read_table("""
    sm80 2: 64 64 4 3 | 64 64 4 2 | 32 64 4 2
    sm80 4: 32 64 4 2 | 32 32 4 2 | 16 16 4 2
    sm86 2: 64 64 4 2 | 32 64 4 2 | 32 32 4 2
    sm86 4: 32 32 4 2 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 64 1 5 | 64 32 1 5 | -
""")

DQ: Table = read_table("""
    sm80 2: 64 64 4 2 | 32 64 4 2 | 16 32 4 2
    sm80 4: 32 32 4 2 | 16 32 4 1 | 16 16 4 1
    sm86 2: 32 64 4 2 | 32 32 4 2 | 16 32 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 32 64 2 3 | 32 64 2 2 | -
""")

# By query, for groups of 17 to 32 and larger groups; the tables above are tuned for groups of 16. A head size without a
# row takes the row of the next larger head size.
FORWARD_32: Table = read_table("""
    sm90 2: 64 64 1 5 | 64 64 2 3 | -
""")
FORWARD_64: Table = read_table("""
    sm90 2: 64 64 4 2 | 64 64 4 3 | -
""")
DQ_32: Table = read_table("""
    sm90 2: 32 64 2 2 | 32 32 2 3 | -
""")
DQ_64: Table = read_table("""
    sm90 2: 64 64 4 2 | 64 32 4 3 | -
""")

DKV: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 8 2 | 32 32 4 1
    sm80 4: 32 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 32 64 4 2 | 32 32 4 1 | 16 32 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 64 4 3 | 32 64 4 3 | -
""")

UNION_FORWARD: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 4 2 | 64 32 4 1
    sm80 4: 32 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 64 4 1 | 64 32 4 1 | 32 32 4 1
    sm86 4: 32 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm90 2: 64 64 4 6 | 64 64 4 3 | -
""")

UNION_DQ: Table = read_table("""
    sm80 2: 64 64 4 1 | 64 64 8 1 | 32 32 4 1
    sm80 4: 32 32 4 1 | 32 16 4 1 | 16 16 4 1
    sm86 2: 64 32 4 1 | 32 32 4 1 | 16 32 4 1
    sm86 4: 32 32 4 1 | 16 16 4 1 | 16 16 4 1
    sm90 2: 64 64 4 2 | 64 32 4 3 | -
""")

# For dq from stored gradients of logits: half types and head sizes up to 128.
DLOGITS_DQ: Table = read_table("""
    sm80 2: - | 64 64 4 3 | -
    sm86 2: - | 64 64 4 2 | -
    sm90 2: - | 64 64 4 3 | -
""")

BLOCK: Table = read_table("""
    sm80 2: 64 128 4 3 | 64 64 4 2 | 64 64 8 1
    sm80 4: 32 64 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 64 4 2 | 64 64 4 1 | 32 32 4 1
    sm86 4: 32 64 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 128 128 4 3 | 64 64 4 3 | -
""")

BLOCK_DQ: Table = read_table("""
    sm80 2: 32 128 4 2 | 32 64 8 2 | 16 32 4 1
    sm80 4: 16 64 4 1 | 16 16 4 1 | 16 16 4 1
    sm86 2: 32 64 4 2 | 16 64 8 1 | 16 32 4 1
    sm86 4: 16 64 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 128 4 2 | 64 64 4 2 | -
""")

# For dk, dv and partial dq by one kernel. The tile holds a whole block; its largest size is block_n.
FUSED: Table = read_table("""
    sm80 2: 32 64 4 2 | 32 64 8 1 | 16 32 4 1
    sm80 4: 16 64 4 1 | 16 16 4 1 | 16 16 4 1
    sm86 2: 32 64 4 1 | 16 64 8 1 | 16 32 4 1
    sm86 4: 16 64 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 64 4 2 | 64 64 8 2 | -
""")

# Largest size of a short block, whose tiles are small, and settings for short blocks.
SHORT = 32
BLOCK_SHORT: Table = read_table("""
    sm90 2: 64 128 2 2 | - | -
""")
BLOCK_DQ_SHORT: Table = read_table("""
    sm90 2: 32 128 1 3 | - | -
""")


def settings_of_group(tables: GroupTables, group: int, q: Tensor, v: Tensor) -> Settings:
    """Return the settings of a kernel by query, by the number of heads per group."""
    table, of_32, of_64 = tables
    return settings_of_first(of_64 if group > 32 else of_32 if group > 16 else table, table, q, v)


def settings_of_blocks(table: Table, short: Table, block_size: int, q: Tensor, v: Tensor) -> Settings:
    """Return the settings for a block size, from `short` if the block is short and `short` has a row."""
    return settings_of_first(short if block_size <= SHORT else table, table, q, v)
