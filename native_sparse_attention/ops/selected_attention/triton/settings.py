"""Launch settings of selected attention, by architecture, bytes of an element and head size.

block_m: rows of a tile, heads of one query at most (DKV, NEIGHBOURS and BLOCK: pairs of a query and a head). block_n:
keys of a tile at most; BLOCK and BLOCK_DQ have a whole block in one, and rows of their own for short blocks.
"""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from native_sparse_attention.ops._triton.launch import Settings, Table, settings_of

# Of groups by query: any, those that fill 32 rows of a tile, and 64.
GroupTables = tuple[Table, Table, Table]

FORWARD: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 3),
    ('sm80', 2, 128): Settings(64, 64, 4, 2),
    ('sm80', 2, 256): Settings(32, 64, 4, 2),
    ('sm80', 4, 64): Settings(32, 64, 4, 2),
    ('sm80', 4, 128): Settings(32, 32, 4, 2),
    ('sm80', 4, 256): Settings(16, 16, 4, 2),
    ('sm86', 2, 64): Settings(64, 64, 4, 2),
    ('sm86', 2, 128): Settings(32, 64, 4, 2),
    ('sm86', 2, 256): Settings(32, 32, 4, 2),
    ('sm86', 4, 64): Settings(32, 32, 4, 2),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 1, 5),
    ('sm90', 2, 128): Settings(64, 32, 1, 5),
}

DQ: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 2),
    ('sm80', 2, 128): Settings(32, 64, 4, 2),
    ('sm80', 2, 256): Settings(16, 32, 4, 2),
    ('sm80', 4, 64): Settings(32, 32, 4, 2),
    ('sm80', 4, 128): Settings(16, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(32, 64, 4, 2),
    ('sm86', 2, 128): Settings(32, 32, 4, 2),
    ('sm86', 2, 256): Settings(16, 32, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(32, 64, 2, 3),
    ('sm90', 2, 128): Settings(32, 64, 2, 2),
}

# By query, of groups that fill 32 rows, and 64 or more, where those of any group are the settings of 16. A head size
# that has none of its own would take those of the next larger one.
FORWARD_32: Table = {
    ('sm90', 2, 64): Settings(64, 64, 1, 5),
    ('sm90', 2, 128): Settings(64, 64, 2, 3),
}
FORWARD_64: Table = {
    ('sm90', 2, 64): Settings(64, 64, 4, 2),
    ('sm90', 2, 128): Settings(64, 64, 4, 3),
}
DQ_32: Table = {
    ('sm90', 2, 64): Settings(32, 64, 2, 2),
    ('sm90', 2, 128): Settings(32, 32, 2, 3),
}
DQ_64: Table = {
    ('sm90', 2, 64): Settings(64, 64, 4, 2),
    ('sm90', 2, 128): Settings(64, 32, 4, 3),
}

DKV: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 2),
    ('sm80', 2, 128): Settings(64, 64, 8, 2),
    ('sm80', 2, 256): Settings(32, 32, 4, 1),
    ('sm80', 4, 64): Settings(32, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(32, 64, 4, 2),
    ('sm86', 2, 128): Settings(32, 32, 4, 1),
    ('sm86', 2, 256): Settings(16, 32, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 4, 3),
    ('sm90', 2, 128): Settings(32, 64, 4, 3),
}

NEIGHBOURS_FORWARD: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 2),
    ('sm80', 2, 128): Settings(64, 64, 4, 2),
    ('sm80', 2, 256): Settings(64, 32, 4, 1),
    ('sm80', 4, 64): Settings(32, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 64, 4, 1),
    ('sm86', 2, 128): Settings(64, 32, 4, 1),
    ('sm86', 2, 256): Settings(32, 32, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(32, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 4, 6),
    ('sm90', 2, 128): Settings(64, 64, 4, 3),
}

NEIGHBOURS_DQ: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 1),
    ('sm80', 2, 128): Settings(64, 64, 8, 1),
    ('sm80', 2, 256): Settings(32, 32, 4, 1),
    ('sm80', 4, 64): Settings(32, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 16, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 32, 4, 1),
    ('sm86', 2, 128): Settings(32, 32, 4, 1),
    ('sm86', 2, 256): Settings(16, 32, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(16, 16, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 4, 2),
    ('sm90', 2, 128): Settings(64, 32, 4, 3),
}

# Of dq where dkv leaves the gradients of the logits: of half types, and of heads of up to 128.
DLOGITS_DQ: Table = {
    ('sm80', 2, 128): Settings(64, 64, 4, 3),
    ('sm86', 2, 128): Settings(64, 64, 4, 2),
    ('sm90', 2, 128): Settings(64, 64, 4, 3),
}

BLOCK: Table = {
    ('sm80', 2, 64): Settings(64, 128, 4, 3),
    ('sm80', 2, 128): Settings(64, 64, 4, 2),
    ('sm80', 2, 256): Settings(64, 64, 8, 1),
    ('sm80', 4, 64): Settings(32, 64, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 64, 4, 2),
    ('sm86', 2, 128): Settings(64, 64, 4, 1),
    ('sm86', 2, 256): Settings(32, 32, 4, 1),
    ('sm86', 4, 64): Settings(32, 64, 4, 1),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(128, 128, 4, 3),
    ('sm90', 2, 128): Settings(64, 64, 4, 3),
}

BLOCK_DQ: Table = {
    ('sm80', 2, 64): Settings(32, 128, 4, 2),
    ('sm80', 2, 128): Settings(32, 64, 8, 2),
    ('sm80', 2, 256): Settings(16, 32, 4, 1),
    ('sm80', 4, 64): Settings(16, 64, 4, 1),
    ('sm80', 4, 128): Settings(16, 16, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(32, 64, 4, 2),
    ('sm86', 2, 128): Settings(16, 64, 8, 1),
    ('sm86', 2, 256): Settings(16, 32, 4, 1),
    ('sm86', 4, 64): Settings(16, 64, 4, 1),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 128, 4, 2),
    ('sm90', 2, 128): Settings(64, 64, 4, 2),
}

# Keys of a short block, whose tiles are small, and rows for such blocks.
SHORT = 32
BLOCK_SHORT: Table = {
    ('sm90', 2, 64): Settings(64, 128, 2, 2),
}
BLOCK_DQ_SHORT: Table = {
    ('sm90', 2, 64): Settings(32, 128, 1, 3),
}


def settings_of_group(tables: GroupTables, group: int, q: Tensor, v: Tensor) -> Settings:
    """The entry for a program per query of so many heads, by the rows that they fill."""
    table, of_32, of_64 = tables
    return _settings_of_first(of_64 if group > 32 else of_32 if group > 16 else table, table, q, v)


def settings_of_blocks(table: Table, short: Table, block_size: int, q: Tensor, v: Tensor) -> Settings:
    """The entry for blocks of this size: that of `short` where they are, and there is one."""
    return _settings_of_first(short if block_size <= SHORT else table, table, q, v)


def _settings_of_first(special: Table, table: Table, q: Tensor, v: Tensor) -> Settings:
    """The entry of a special table, or of the other one where that has none."""
    with suppress(KeyError):
        return settings_of(special, q, v)
    return settings_of(table, q, v)
