"""Problems for selected attention, and every kind of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.dlogits import dq as query_gradients
from native_sparse_attention.ops.selected_attention.triton.dlogits import storage as dlogits
from native_sparse_attention.testing import lay_out
from tests.support import problems
from tests.support.harness import fence, place
from tests.support.problems import Extents, Heads

HEADS = Heads(2, 1, 16, 16)
TWO_GROUPS = Heads(4, 2, 16, 16)
INT32 = torch.iinfo(torch.int32)
JUNK = (-1, -2, INT32.min, INT32.max, 10**6)
Tensors = dict[str, Tensor]
group_block = plan.group_block

# A tile of two queries has a union of half of its pairs at least.
SHARES_OFTEN = {'forward': 75, 'backward': 75}
KERNELS = ('a program per query', 'a program per tile of queries', 'a program per block', 'a tile or its queries')
# For what does not depend on these kernels; those per tile take less time in the interpreter.
per_tile = pytest.mark.parametrize('kernels', KERNELS[1:2], indirect=True)
per_block = pytest.mark.parametrize('kernels', KERNELS[2:3], indirect=True)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of up to SMALL_GROUP heads have kernels of their own."""
    if request.param in (KERNELS[0], KERNELS[3]):
        monkeypatch.setattr(plan, 'SMALL_GROUP', 0)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 0 if request.param == KERNELS[3] else 10**9)
    if request.param == KERNELS[3]:
        # 4 queries of small groups in a tile of 32 rows, so that a few tokens are several tiles.
        monkeypatch.setattr(plan, 'group_block', lambda group: max(8, group_block(group)))
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', SHARES_OFTEN)
    monkeypatch.setattr(plan, 'MEETING', 0 if request.param == KERNELS[2] else 10**9)
    monkeypatch.setattr(plan, 'MEETING_LARGE', 0)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_BY_BLOCK', 0)


@pytest.fixture(autouse=True)
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large groups alone, no matter how few queries, and most tiles that can share do."""
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 0)
    monkeypatch.setattr(plan, 'MEETING_LARGE', 0)
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', SHARES_OFTEN)


def make_indices(extents: Extents, index_heads: int, num_selected: int, block_size: int) -> Tensor:
    """Blocks of every kind, with repeats and junk among them."""
    shape = (extents.batch, extents.seqlen_q, index_heads, num_selected)
    indices = torch.randint(-1, extents.seqlen_k // block_size + 2, shape).int()
    junk = torch.tensor(JUNK).int()[torch.randint(0, len(JUNK), shape)]
    return torch.where(torch.rand(shape) < 0.15, junk, indices)


def make_inputs(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    indices: Tensor,
    *,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    layout: str = 'contiguous',
) -> Tensors:
    """NaN in every key that belongs to no sequence, and around every tensor."""
    tensors = dict(zip('qkv', problems.make_qkv(extents, heads), strict=True))
    tensors = {name: fence(lay_out(t.to(device, dtype), layout)) for name, t in tensors.items()}
    if scaled:
        tensors['block_scale'] = place(1 + 0.5 * torch.randn(indices.shape), device)
    return tensors | {'block_indices': place(indices, device)}


def pass_dlogits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """However few tokens there are. The lengths of the ranges of tokens that dq will be made of."""
    ranges: list[int] = []
    finish = query_gradients.QueryGradients.finish

    def counted(self: Any, lists: Any, pairs: range, tokens: range) -> None:
        ranges.append(len(tokens))
        finish(self, lists, pairs, tokens)

    monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1)
    monkeypatch.setattr(dlogits, 'MIN_CHOICE', 0)
    monkeypatch.setattr(query_gradients.QueryGradients, 'finish', counted)
    return ranges
