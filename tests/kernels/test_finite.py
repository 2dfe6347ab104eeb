"""Non-finite elements, and elements too large for products, are found in their chunks."""

from __future__ import annotations

import pytest
import torch

from native_sparse_attention.ops._triton import finite

# Two programs per head, the last with rows that do not exist.
SHAPE = (2, finite.BLOCK_T + 3, 2)


@pytest.mark.quick
@pytest.mark.parametrize('name', 'kv')
@pytest.mark.parametrize('value', [2.0**59, -(2.0**59), torch.inf, -torch.inf, torch.nan])
def test_large_elements_are_found(value: float, name: str, device: torch.device) -> None:
    tensors = {'k': torch.randn(*SHAPE, 40, device=device), 'v': torch.randn(*SHAPE, 24, device=device)}
    assert not finite.find_large(**tensors).any()
    tensors[name][1, -1, 0, -1] = value
    found = finite.find_large(**tensors)
    assert found.shape == (2, 2, 2)
    assert found.nonzero().tolist() == [[1, 0, 1]]


def test_smaller_elements_are_not_found(device: torch.device) -> None:
    # The sum of a chunk of tokens is half as large.
    below = torch.full((*SHAPE, 16), 2.0**58 / (finite.BLOCK_T * 16), device=device)
    assert not finite.find_large(below, -below).any()
