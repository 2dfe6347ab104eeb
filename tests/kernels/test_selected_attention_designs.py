"""The design of selected attention follows from the shape."""

from __future__ import annotations

import pytest
import torch

from native_sparse_attention.ops._triton import launch
from native_sparse_attention.ops.selected_attention.triton import plan


@pytest.mark.quick
@pytest.mark.parametrize(
    ('seqlen', 'group', 'num_selected', 'block_size', 'forward', 'backward'),
    [
        (4096, 1, 16, 64, 'union', 'union'),
        (8192, 1, 16, 64, 'block', 'fused'),
        (4096, 8, 16, 64, 'union', 'union'),
        (4160, 1, 16, 64, 'block', 'fused'),
        (8192, 4, 16, 64, 'block', 'block'),
        (65536, 1, 16, 64, 'block', 'fused'),
        (65536, 4, 16, 200, 'query', 'query'),
        (8192, 2, 5, 16, 'block', 'fused'),
        (512, 2, 1, 16, 'query', 'query'),
        (8192, 16, 16, 64, 'mixed', 'mixed'),
        (65536, 12, 1, 16, 'mixed', 'mixed'),
        (255, 16, 16, 64, 'query', 'query'),
        (8192, 16, 65, 64, 'query', 'query'),
        (65536, 32, 16, 64, 'union', 'mixed'),
        (8192, 33, 16, 64, 'query', 'query'),
        (8192, 16, 0, 64, 'query', 'query'),
        (8192, 1, 65, 64, 'block', 'fused'),
        (8192, 1, 0, 64, 'query', 'query'),
        (2**20, 4, 16, 64, 'block', 'query'),
    ],
)
def test_the_design_follows_from_the_shape(
    seqlen: int,
    group: int,
    num_selected: int,
    block_size: int,
    forward: str,
    backward: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, 'MAX_BLOCK_RATIO', 4)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_BY_BLOCK', 1024)
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 256)
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', {'forward': 70, 'backward': 60})
    monkeypatch.setattr(launch, 'architecture_of', lambda _: 'sm90')
    q, k, indices = (
        torch.empty(1, seqlen, heads, size, dtype=torch.bfloat16, device='meta')
        for heads, size in ((2 * group, 64), (2, 64), (2, num_selected))
    )
    assert plan.choose_design(q, k, k, indices, block_size) == forward
    assert plan.choose_design(q, k, k, indices, block_size, backward=True) == backward


@pytest.mark.parametrize(
    ('seqlen', 'packed', 'group', 'head_dim', 'dtype', 'design'),
    [
        (8192, 0, 16, 128, torch.bfloat16, 'union'),
        (8192, 0, 12, 100, torch.float16, 'union'),
        (8256, 0, 16, 128, torch.bfloat16, 'mixed'),
        (65536, 8, 16, 128, torch.bfloat16, 'union'),
        (65536, 7, 16, 128, torch.bfloat16, 'mixed'),
        (8192, 0, 16, 64, torch.bfloat16, 'mixed'),
        (65536, 0, 32, 128, torch.bfloat16, 'union'),
        (8192, 0, 32, 256, torch.bfloat16, 'mixed'),
        (8192, 0, 16, 192, torch.bfloat16, 'mixed'),
        (8192, 0, 16, 128, torch.float32, 'mixed'),
    ],
)
def test_large_groups_take_unions_of_few_blocks(
    seqlen: int,
    packed: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    design: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, 'architecture_of', lambda _: 'sm90')
    q, k, indices = (
        torch.empty(1, seqlen, heads, size, dtype=dtype, device='meta')
        for heads, size in ((2 * group, head_dim), (2, head_dim), (2, 16))
    )
    assert plan.choose_design(q, k, k, indices, 64, num_packed=packed) == design


@pytest.mark.parametrize(('seqlen', 'num_packed'), [(2**19, 0), (2**19, 2**19), (2**20, 0), (2**22, 0)])
def test_large_groups_in_long_and_in_many_sequences(
    seqlen: int, num_packed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the unions of all tiles do not fit into memory at once."""
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 256)
    monkeypatch.setattr(plan, 'MAX_UNION_PERCENT', {'forward': 70, 'backward': 60})
    monkeypatch.setattr(launch, 'architecture_of', lambda _: 'sm90')
    q, k, indices = (
        torch.empty(1, seqlen, heads, size, dtype=torch.bfloat16, device='meta')
        for heads, size in ((64, 128), (4, 128), (4, 16))
    )
    assert plan.choose_design(q, k, k, indices, 64, backward=True, num_packed=num_packed) == 'mixed'
    assert plan.choose_design(q, k, k, indices, 64, num_packed=num_packed) == ('union' if num_packed else 'mixed')


def test_large_groups_take_unions_up_to_a_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block number and a position in a union of 64 share one integer."""
    monkeypatch.setattr(launch, 'architecture_of', lambda _: 'sm90')
    for seqlen, design in ((2**24 - 2, 'mixed'), (2**24 - 1, 'query')):
        q, k, indices = (
            torch.empty(1, seqlen, heads, size, dtype=torch.bfloat16, device='meta')
            for heads, size in ((64, 128), (4, 128), (4, 16))
        )
        assert plan.choose_design(q, k, k, indices, 1) == design
