"""Launch settings of interval attention, by architecture, bytes of an element and head size."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import Settings, Table, is_hopper

FORWARD: Table = {
    ('sm80', 2, 64): Settings(128, 64, 4, 3),
    ('sm80', 2, 128): Settings(128, 64, 8, 2),
    ('sm80', 2, 256): Settings(64, 32, 4, 2),
    ('sm80', 4, 64): Settings(64, 32, 4, 2),
    ('sm80', 4, 128): Settings(64, 32, 4, 1),
    ('sm80', 4, 256): Settings(32, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 64, 4, 2),
    ('sm86', 2, 128): Settings(64, 32, 4, 2),
    ('sm86', 2, 256): Settings(64, 32, 4, 1),
    ('sm86', 4, 64): Settings(64, 32, 4, 1),
    ('sm86', 4, 128): Settings(32, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(128, 64, 8, 3),
    ('sm90', 2, 128): Settings(128, 32, 8, 3),
    ('sm90', 2, 256): Settings(64, 64, 4, 2),
    ('sm100', 2, 64): Settings(128, 64, 4, 3),
    ('sm100', 2, 128): Settings(64, 64, 4, 3),
}

# Where logits are more than products: with a soft cap, or something to be looked up or drawn for each of them.
FORWARD_MODIFIED: Table = FORWARD | {
    ('sm90', 2, 64): Settings(128, 64, 4, 3),
    ('sm90', 2, 128): Settings(64, 64, 4, 3),
}

DQ: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 2),
    ('sm80', 2, 128): Settings(64, 64, 8, 2),
    ('sm80', 2, 256): Settings(32, 32, 4, 1),
    ('sm80', 4, 64): Settings(32, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 32, 4, 2),
    ('sm86', 2, 128): Settings(64, 32, 4, 1),
    ('sm86', 2, 256): Settings(32, 16, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(32, 16, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 4, 3),
    ('sm90', 2, 128): Settings(64, 64, 4, 2),
}

# Of the keys of a window, of which a tile has few.
DQ_WINDOW: Table = DQ | {
    ('sm90', 2, 128): Settings(64, 32, 4, 3),
}

DKV: Table = {
    ('sm80', 2, 64): Settings(64, 64, 4, 2),
    ('sm80', 2, 128): Settings(64, 64, 8, 2),
    ('sm80', 2, 256): Settings(32, 32, 4, 1),
    ('sm80', 4, 64): Settings(32, 32, 4, 1),
    ('sm80', 4, 128): Settings(32, 32, 4, 1),
    ('sm80', 4, 256): Settings(16, 16, 4, 1),
    ('sm86', 2, 64): Settings(64, 32, 4, 2),
    ('sm86', 2, 128): Settings(32, 32, 4, 1),
    ('sm86', 2, 256): Settings(32, 16, 4, 1),
    ('sm86', 4, 64): Settings(32, 32, 4, 1),
    ('sm86', 4, 128): Settings(16, 32, 4, 1),
    ('sm86', 4, 256): Settings(16, 16, 4, 1),
    ('sm90', 2, 64): Settings(64, 64, 4, 3),
    ('sm90', 2, 128): Settings(64, 128, 8, 3),
}

# Of the keys of a window, which few queries read: loops are short.
DKV_WINDOW: Table = DKV | {
    ('sm90', 2, 64): Settings(64, 64, 4, 2),
    ('sm90', 2, 128): Settings(32, 64, 4, 3),
}


def limit_registers(q: Tensor, num_warps: int) -> dict[str, int]:
    """What lets two forward programs of eight warps share an SM of Hopper. The loop over keys in the middle of an
    interval needs no more registers; the others may spill.
    """
    is_limited = num_warps == 8 and q.element_size() == 2 and is_hopper(q.device) and torch.version.hip is None
    return {'maxnreg': 128} if is_limited else {}
