"""`validate_packing`: an explicit check of arguments that the ops do not read on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native_sparse_attention.ops import validate_packing
from tests.support.problems import row_integers


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_valid_packing(dtype: torch.dtype) -> None:
    borders = row_integers([0, 3, 3, 9]).to(dtype)
    validate_packing(9, borders)
    validate_packing(11, borders)
    validate_packing(11, borders, total_k=20, cu_seqlens_k=row_integers([0, 0, 5, 20]))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'cu_seqlens': row_integers([0])}, r'cu_seqlens has 1 entries, but must have one per sequence and one more'),
        ({'cu_seqlens': row_integers([1, 9])}, r'cu_seqlens starts at 1, but must start at 0'),
        ({'cu_seqlens': row_integers([0, 5, 4])}, r'cu_seqlens decreases at entry 2, but must not'),
        ({'cu_seqlens': row_integers([0, 10])}, r'cu_seqlens ends at 10, but there are 9 tokens'),
        ({'cu_seqlens_k': row_integers([0, 9])}, r'cu_seqlens_k has 2 entries, but cu_seqlens has 3'),
        ({'cu_seqlens_k': row_integers([0, 4, 10])}, r'cu_seqlens_k ends at 10, but there are 9 tokens'),
        ({'cu_seqlens_k': row_integers([0, 4, 9]), 'total_k': 8}, r'cu_seqlens_k ends at 9, but there are 8 tokens'),
        ({'cu_seqlens_k': row_integers([0, 4, 3])}, r'cu_seqlens_k decreases at entry 2, but must not'),
    ],
)
def test_wrong_packing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_packing(9, **{'cu_seqlens': row_integers([0, 5, 9]), **arguments})


@pytest.mark.parametrize('borders', [torch.tensor([0.0, 9.0]), torch.zeros(2, 2, dtype=torch.int32)])
def test_tensors_that_are_no_packing(borders: torch.Tensor) -> None:
    with pytest.raises(ValueError, match='cu_seqlens'):
        validate_packing(9, borders)
