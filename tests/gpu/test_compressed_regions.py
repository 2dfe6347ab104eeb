"""Compressed attention within regions on a GPU, in every design of selected attention, and the choice of regions.

python -m pytest -m gpu -n 16 tests/gpu/test_compressed_regions.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import compressed_regions as composed
from native_sparse_attention.core.call import Call, Regions, make_call
from native_sparse_attention.ops.compressed_attention import eager as compressed_attention
from native_sparse_attention.ops.compressed_regions.eager import select_regions
from native_sparse_attention.ops.compressed_regions.regions import RegionRules
from native_sparse_attention.testing import make_qkv
from tests.support.gpu_problems import Problem, assert_obeys_the_rules
from tests.support.problems import cumulative, row_integers

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
dlogits = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.dlogits.storage')

pytestmark = pytest.mark.gpu

SIZES = (32, 16)
SEQLEN = 1300
WHERE: dict[str, dict[str, Any]] = {
    'whole': {},
    'lengths': {'seqlens_k': row_integers([1300, 777])},
    'packed': {'cu_seqlens': cumulative([700, 0, 31, 569])},
}


def attend_to_regions(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    mem_k: Tensor,
    mem_v: Tensor,
    regions: Tensor,
    *,
    size: int,
    call: Call,
    design: str | None,
    has_memory: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    read, memory = Regions(regions, size), (mem_k, mem_v) if has_memory else None
    if backend == 'eager':
        return compressed_attention.compressed_attention(q, k_cmp, v_cmp, memory, SIZES, call, None, read)
    return composed.attend_to_regions(q, k_cmp, v_cmp, memory, SIZES, call, None, read, backend=backend, design=design)


def make_problem(
    group: int, head_dim: int, dtype: torch.dtype, where: str, device: torch.device
) -> tuple[list[Tensor], Call]:
    """Return q, compressed keys and values, memory pairs, and the record of the call."""
    generator = torch.Generator(device).manual_seed(0)
    batch = 1 if where == 'packed' else 2
    count = (SEQLEN - SIZES[0]) // SIZES[1] + 1
    shape: dict[str, Any] = {'heads': 2 * group, 'kv_heads': 2, 'head_dim': head_dim, 'dtype': dtype}
    q, k, v = make_qkv(batch, SEQLEN, count, **shape, device=device, generator=generator)
    memory = torch.randn(2, 2, 1, head_dim, device=device, generator=generator).to(dtype).unbind()
    placed = {name: value.to(device) for name, value in WHERE[where].items()}
    seqlens, borders = placed.get('seqlens_k'), placed.get('cu_seqlens')
    call, _ = make_call(q, k, None, None, seqlens, borders, None, True, None, compress=SIZES, seqlen_k=SEQLEN)
    return [q, k, v, *memory], call


@pytest.mark.parametrize('has_memory', [True, False], ids=['memory', 'no memory'])
@pytest.mark.parametrize('where', WHERE)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize('head_dim', [64, 128])
@pytest.mark.parametrize(
    ('design', 'group', 'stores_dlogits'),
    [
        ('query', 16, False),
        ('query', 2, False),
        ('union', 4, False),
        ('mixed', 16, False),
        ('mixed', 16, True),
        ('block', 2, False),
        ('fused', 2, False),
        ('block', 16, False),
    ],
)
def test_attention(
    design: str,
    group: int,
    stores_dlogits: bool,
    head_dim: int,
    dtype: torch.dtype,
    where: str,
    has_memory: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rules hold in memory full of NaN, and the first call gives the bits of the second."""
    monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1 if stores_dlogits else 10**9)
    monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 0)
    tensors, call = make_problem(group, head_dim, dtype, where, device)
    size = 16
    regions = select_regions(tensors[0], tensors[1], SIZES, call, RegionRules(size, 3, True))
    names = ('q', 'k_cmp', 'v_cmp', 'mem_k', 'mem_v')
    inputs = dict(zip(names, tensors, strict=True)) | {'regions': regions}
    settings = {'size': size, 'call': call, 'design': design, 'has_memory': has_memory}
    problem = Problem(attend_to_regions, inputs, settings, {'out1': 0})
    grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads)
    harness.assert_same_bits(problem.run('triton', grads), result)


@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('where', WHERE)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize('group', [1, 4, 16])
def test_choice_of_regions(group: int, dtype: torch.dtype, where: str, share_group: bool, device: torch.device) -> None:
    """Equal to eager but for near ties, whose order rounding may decide."""
    (q, k, *_), call = make_problem(group, 64, dtype, where, device)
    rules = RegionRules(8, 4, share_group)
    found = composed.select_regions(q, k, SIZES, call, rules, backend='triton')
    expected = select_regions(q, k, SIZES, call, rules)
    assert (found == expected).all(-1).float().mean() > 0.998
