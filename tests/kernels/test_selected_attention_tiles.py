"""Selected attention in Triton with tiles that the tensor memory accelerator fetches: the same bits as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton import launch
from native_sparse_attention.ops._triton.launch import describe_tiles
from tests.support.harness import assert_same_bits, make_grads, place, run_triton
from tests.support.problems import Extents, Heads, packed, whole
from tests.support.selected_attention_problems import (
    HEADS,
    KERNELS,
    TWO_GROUPS,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
)

with_tiles = pytest.mark.parametrize('kernels', [KERNELS[0], KERNELS[1], KERNELS[3]], indirect=True)
per_query = pytest.mark.parametrize('kernels', KERNELS[:1], indirect=True)


@pytest.mark.quick
@with_tiles
@pytest.mark.parametrize(
    ('extents', 'heads', 'block_size', 'scaled'),
    [
        (whole(40), HEADS, 16, False),
        (whole(64), HEADS, 32, True),
        (whole(20, batch=2), TWO_GROUPS, 16, False),
        (whole(37), Heads(4, 2, 40, 24), 16, True),
        (packed([35, 0, 20], uncovered=2), HEADS, 16, True),
        (Extents(1, 5, 80, {'q_offset': 61}, [80]), HEADS, 16, False),
    ],
    ids=['whole', 'two tiles a block', 'a batch', 'heads that are not a power of two', 'packed', 'offset'],
)
def test_the_same_bits(
    extents: Extents, heads: Heads, block_size: int, scaled: bool, described: list[Tensor], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    indices = make_indices(extents, heads.kv_heads, 3, block_size)
    tensors = make_inputs(extents, heads, device, indices, scaled=scaled, dtype=torch.float16)
    grads = make_grads(extents, heads, device)
    settings: dict[str, Any] = {'block_size': block_size, **place(extents.where, device)}
    result = run_triton(selected_attention, tensors, grads, **settings)
    assert described
    monkeypatch.setattr(launch, 'WITH_TILES', ())
    del described[:]
    assert_same_bits(run_triton(selected_attention, tensors, grads, **settings), result)
    assert not described


@with_tiles
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_the_future_changes_nothing(junk: float, described: list[Tensor], device: torch.device) -> None:
    """Later keys and blocks that are not selected change nothing."""
    extents = whole(40)
    indices = torch.tensor([0, 2], dtype=torch.int32).expand(1, 40, 1, 2)
    tensors = make_inputs(extents, HEADS, device, indices, dtype=torch.float16)
    expected = run_triton(selected_attention, tensors, block_size=16)
    for name in 'kv':
        tensors[name] = tensors[name].clone()
        tensors[name][:, 16:32] = junk
        tensors[name][:, 37:] = junk
    result = run_triton(selected_attention, tensors, block_size=16)
    assert described
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, :37], expected[name][:, :37]), name


@per_query
@pytest.mark.parametrize('case', ['rows of 24 bytes', 'not aligned', 'expanded', 'empty', 'float32'])
def test_tensors_without_descriptors(case: str, described: list[Tensor], device: torch.device) -> None:
    k = torch.randn(2, 32, 1, 16, dtype=torch.float16, device=device)
    cases = {
        'rows of 24 bytes': torch.zeros(1, 32, 1, 12, dtype=torch.float16, device=device),
        'not aligned': torch.zeros(1, 32, 1, 24, dtype=torch.float16, device=device)[..., 4:20],
        'expanded': k[:1].expand_as(k),
        'empty': k[:0],
    }
    if case == 'float32':
        q = torch.randn(1, 32, 2, 16, device=device)
        selected_attention(
            q,
            k[:1].float(),
            k[:1].float(),
            place(make_indices(whole(32), 1, 2, 16), device),
            block_size=16,
            backend='triton',
        )
        assert not described
    else:
        assert describe_tiles(cases[case], 16, 64) is None
        assert describe_tiles(k, 16, 64) is not None
