"""Launch settings of block selection, by architecture, bytes of an element and head size.

block_m: columns of a product (queries times heads of a group), fewer where the candidates of its queries would not fit
(`select.py`). block_n: selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import Settings, Table, is_hopper, read_table, settings_of_first

SELECT: Table = read_table("""
    sm80 2: 64 64 4 3 | 64 64 4 2 | 64 32 4 2
    sm80 4: 64 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 64 4 2 | 64 32 4 2 | 64 32 4 1
    sm86 4: 64 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm90 2: 128 64 4 2 | 128 64 4 2 | -
""")

# Groups of at most SMALL_GROUP query heads. The tables above are tuned for groups of 16.
SMALL_GROUP = 4
SELECT_SMALL: Table = read_table("""
    sm90 2: 128 32 2 2 | 128 64 4 2 | -
""")


def settings_of_group(small: Table, table: Table, group: int, q: Tensor) -> Settings:
    """Return the settings for a group size, from `small` if the group is small and `small` has a row."""
    return settings_of_first(small if group <= SMALL_GROUP else table, table, q)


def limit_registers(q: Tensor, levels: int) -> dict[str, int]:
    """Return the register limit that lets three programs of the kernel share an SM of Hopper.

    Columns of candidates (`levels`) would take more registers; they are used once per tile, so they may be spilled.
    """
    is_limited = levels > 0 and q.element_size() == 2 and is_hopper(q.device) and torch.version.hip is None
    return {'maxnreg': 168} if is_limited else {}
