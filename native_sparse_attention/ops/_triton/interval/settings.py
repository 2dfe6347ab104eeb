"""Launch settings of interval attention, by architecture, bytes of an element and head size."""

from __future__ import annotations

import torch
from torch import Tensor

from native_sparse_attention.ops._triton.launch import Table, is_hopper, read_table

FORWARD: Table = read_table("""
    sm80 2: 128 64 4 3 | 128 64 8 2 | 64 32 4 2
    sm80 4: 64 32 4 2 | 64 32 4 1 | 32 16 4 1
    sm86 2: 64 64 4 2 | 64 32 4 2 | 64 32 4 1
    sm86 4: 64 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm90 2: 128 64 8 3 | 128 32 8 3 | 64 64 4 2
    sm100 2: 128 64 4 3 | 64 64 4 3 | -
""")

# With a soft cap, or with a table entry or random number per logit.
FORWARD_MODIFIED: Table = FORWARD | read_table("""
    sm90 2: 128 64 4 3 | 64 64 4 3 | -
""")

DQ: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 8 2 | 32 32 4 1
    sm80 4: 32 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 32 4 2 | 64 32 4 1 | 32 16 4 1
    sm86 4: 32 32 4 1 | 32 16 4 1 | 16 16 4 1
    sm90 2: 64 64 4 3 | 64 64 4 2 | -
""")

# Window attention, where a query tile reads few keys.
DQ_WINDOW: Table = DQ | read_table("""
    sm90 2: - | 64 32 4 3 | -
""")

DKV: Table = read_table("""
    sm80 2: 64 64 4 2 | 64 64 8 2 | 32 32 4 1
    sm80 4: 32 32 4 1 | 32 32 4 1 | 16 16 4 1
    sm86 2: 64 32 4 2 | 32 32 4 1 | 32 16 4 1
    sm86 4: 32 32 4 1 | 16 32 4 1 | 16 16 4 1
    sm90 2: 64 64 4 3 | 64 128 8 3 | -
""")

# Window attention, where few queries read a key tile and loops are short.
DKV_WINDOW: Table = DKV | read_table("""
    sm90 2: 64 64 4 2 | 32 64 4 3 | -
""")


def limit_registers(q: Tensor, num_warps: int) -> dict[str, int]:
    """Return the register limit that lets two forward programs of eight warps share an SM on Hopper.

    The loop over fully visible keys needs no more registers; the other loops may spill.
    """
    is_limited = num_warps == 8 and q.element_size() == 2 and is_hopper(q.device) and torch.version.hip is None
    return {'maxnreg': 128} if is_limited else {}
