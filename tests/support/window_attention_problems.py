"""Problems for window attention."""

from __future__ import annotations

from typing import Any

import torch

from native_sparse_attention.testing import lay_out
from tests.support import problems
from tests.support.harness import fence
from tests.support.problems import Extents, Heads

HEADS = Heads(2, 1, 16, 16)
TWO_GROUPS = Heads(4, 2, 16, 16)
Tensors = dict[str, Any]


def make_inputs(
    extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype = torch.float32, layout: str = 'contiguous'
) -> Tensors:
    """Return inputs with NaN in every key that belongs to no sequence and around every tensor."""
    tensors = dict(zip('qkv', problems.make_qkv(extents, heads), strict=True))
    return {name: fence(lay_out(t.to(device, dtype), layout)) for name, t in tensors.items()}
