"""What is not finite, or too large for a product to be, is found where it stands."""

from __future__ import annotations

import pytest
import torch

from native_sparse_attention.ops._triton import finite

# Two programs for a head, the last one with rows that there are not.
SHAPE = (2, finite.BLOCK_T + 3, 2)


@pytest.mark.quick
@pytest.mark.parametrize('name', 'kv')
@pytest.mark.parametrize('value', [2.0**59, -(2.0**59), torch.inf, -torch.inf, torch.nan])
def test_what_is_large_is_found(value: float, name: str, device: torch.device) -> None:
    tensors = {'k': torch.randn(*SHAPE, 40, device=device), 'v': torch.randn(*SHAPE, 24, device=device)}
    assert not finite.find_large(**tensors).any()
    tensors[name][1, -1, 0, -1] = value
    found = finite.find_large(**tensors)
    assert found.shape == (2, 2, 2)
    assert found.nonzero().tolist() == [[1, 0, 1]]


def test_what_is_smaller_is_not(device: torch.device) -> None:
    # What a chunk of tokens adds up to is half as much.
    below = torch.full((*SHAPE, 16), 2.0**58 / (finite.BLOCK_T * 16), device=device)
    assert not finite.find_large(below, -below).any()
