"""Launch settings of the choice of blocks, by architecture, bytes of an element and head size.

block_m counts columns of a product (queries times heads of a group), of which fewer are taken where what queries keep
would not fit (`select`); block_n counts selection blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import Settings, Table, is_hopper

SELECT: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 3),
    ('sm80', 2, 128): Settings(64, 64, 4, 2),
    ('sm80', 2, 256): Settings(64, 32, 4, 2),
    ('sm80', 4, 64): Settings(64, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 64, 4, 2),
    ('sm86', 2, 128): Settings(64, 32, 4, 2),
    ('sm86', 2, 256): Settings(64, 32, 4, 1),
    ('sm86', 4, 64): Settings(64, 32, 4, 1),
    ('sm86', 4, 128): Settings(32, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(128, 64, 4, 2),
    ('sm90', 2, 128): Settings(128, 64, 4, 2),
}


def limit_registers(q: Tensor, levels: int) -> dict[str, int]:
    """What lets three programs of the choice share an SM of Hopper, where columns of blocks (`levels`) would take more
    registers than that: they are asked for once a tile, so they may lie in memory.
    """
    is_limited = levels > 0 and q.element_size() == 2 and is_hopper(q.device) and torch.version.hip is None
    return {'maxnreg': 168} if is_limited else {}
