"""Problems for selected attention, and every kind of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.dlogits import dq as dlogits_dq
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
rows_per_query = plan.rows_per_query

# The union of two queries has at least half as many blocks as they select together.
SHARES_OFTEN = {'forward': 75, 'backward': 75}
KERNELS = (
    'a program per query',
    'a program per tile of queries',
    'a program per block',
    'a tile or its queries',
    'dq, dk and dv per block',
)
# For tests that do not depend on the kernels; those per tile take less time in the interpreter.
per_tile = pytest.mark.parametrize('kernels', KERNELS[1:2], indirect=True)
per_block = pytest.mark.parametrize('kernels', KERNELS[2::2], indirect=True)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small problems take one kind of kernels. Groups of up to SMALL_GROUP heads have kernels of their own."""
    if request.param in (KERNELS[0], KERNELS[3]):
        monkeypatch.setattr(plan, 'SMALL_GROUP', 0)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 0 if request.param == KERNELS[3] else 10**9)
    if request.param == KERNELS[3]:
        # 4 queries of small groups in a tile of 32 rows, so that a few tokens are several tiles.
        monkeypatch.setattr(plan, 'rows_per_query', lambda group: max(8, rows_per_query(group)))
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', SHARES_OFTEN)
    monkeypatch.setattr(plan, 'MAX_BLOCK_RATIO', 0 if request.param in (KERNELS[2], KERNELS[4]) else 10**9)
    for name in ('MAX_GROUP_FUSED', 'MAX_GROUP_FACTORS'):
        monkeypatch.setattr(plan, name, 10**9 if request.param == KERNELS[4] else 0)
    monkeypatch.setattr(plan, 'MAX_BLOCK_RATIO_LARGE', 0)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_BY_BLOCK', 0)


@pytest.fixture(autouse=True)
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let large groups with few queries take the mixed design, and most of their tiles the union."""
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 0)
    monkeypatch.setattr(plan, 'MAX_BLOCK_RATIO_LARGE', 0)
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', SHARES_OFTEN)


def with_design(design: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `selected_attention` that takes a design wherever the backend is Triton."""

    def attend(*args: Any, backend: str = 'auto', **settings: Any) -> tuple[Tensor, Tensor]:
        forced = design if backend == 'triton' else None
        return selected_attention(*args, **settings, backend=backend, _design=forced)

    return attend


def make_indices(extents: Extents, index_heads: int, num_selected: int, block_size: int) -> Tensor:
    """Return random block indices, with repeats and invalid indices among them."""
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
    """Return q, k, v and indices, with NaN around every tensor and in every key outside all sequences."""
    tensors = dict(zip('qkv', problems.make_qkv(extents, heads), strict=True))
    tensors = {name: fence(lay_out(t.to(device, dtype), layout)) for name, t in tensors.items()}
    if scaled:
        tensors['block_scale'] = place(1 + 0.5 * torch.randn(indices.shape), device)
    return tensors | {'block_indices': place(indices, device)}


def force_dlogits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Store gradients of logits for any number of tokens. Returns a list that receives the length of every range."""
    ranges: list[int] = []
    finish = dlogits_dq.DlogitsQueryGradients.finish

    def counted(self: Any, csr: Any, pairs: range, tokens: range) -> None:
        ranges.append(len(tokens))
        finish(self, csr, pairs, tokens)

    monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1)
    monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 0)
    monkeypatch.setattr(dlogits_dq.DlogitsQueryGradients, 'finish', counted)
    return ranges
