"""The gated sum: its definition, dtypes and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_sparse_attention.ops import gated_sum
from native_sparse_attention.testing import assert_matches, outputs_and_gradients
from tests.definition import definition
from tests.support.problems import assert_agree, normal

sizes = st.integers(0, 5)
NAMES: tuple[str, ...] = ('gates', 'out_compressed', 'out_selected', 'out_window')


@given(sizes, sizes, st.integers(1, 4), st.integers(1, 6))
def test_definition(batch: int, seqlen: int, heads: int, value_dim: int) -> None:
    branches = [normal(batch, seqlen, heads, value_dim) for _ in range(3)]
    assert_agree(gated_sum, definition.gated_sum, torch.rand(batch, seqlen, heads, 3).double(), *branches)


def test_gradcheck() -> None:
    inputs = [t.requires_grad_() for t in (normal(2, 3, 2, 3), *(normal(2, 3, 2, 4) for _ in range(3)))]
    assert torch.autograd.gradcheck(gated_sum, inputs)


def test_strides() -> None:
    branches = normal(2, 4, 5, 6).transpose(1, 2), normal(1, 1, 4, 6).expand(2, 5, 4, 6), normal(2, 5, 4, 18)[..., 6:12]
    gates = normal(2, 4, 3, 5).permute(0, 3, 1, 2)
    assert_agree(gated_sum, definition.gated_sum, gates, *branches)


@pytest.mark.parametrize('gate_dtype', [torch.float32, None])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype, gate_dtype: torch.dtype | None) -> None:
    gates = torch.rand(2, 30, 4, 3).to(gate_dtype or dtype)
    branches = [torch.randn(2, 30, 4, 16).to(dtype) for _ in range(3)]
    out = gated_sum(gates, *branches)
    assert out.dtype == dtype
    gold = gated_sum(gates.double(), *(t.double() for t in branches))
    assert_matches(out, gold, gold.to(dtype), name='out')


def test_gradients_of_half_types() -> None:
    tensors = dict(zip(NAMES, (torch.rand(2, 30, 4, 3), *torch.randn(3, 2, 30, 4, 16).bfloat16()), strict=True))
    grads = [torch.randn(2, 30, 4, 16).bfloat16()]
    results = outputs_and_gradients(gated_sum, tensors, grads)
    gold = outputs_and_gradients(gated_sum, {name: t.double() for name, t in tensors.items()}, grads)
    assert results['grad of gates'].dtype == torch.float32
    for name in ('grad of out_compressed', 'grad of out_selected', 'grad of out_window'):
        assert_matches(results[name], gold[name], gold[name].bfloat16(), name=name)
    torch.testing.assert_close(results['grad of gates'].double(), gold['grad of gates'], rtol=1e-5, atol=1e-5)


def call(**changes: Any) -> None:
    tensors: dict[str, Any] = dict(
        zip(NAMES, (normal(2, 5, 4, 3), *(normal(2, 5, 4, 6) for _ in range(3))), strict=True)
    )
    gated_sum(**(tensors | changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'gates': normal(2, 5, 4, 2)},
            r'gates has shape \(2, 5, 4, 2\), but must have \(2, 5, 4, 3\) \(B, T, HQ, 3\)',
        ),
        ({'gates': torch.ones(2, 5, 4, 3).int()}, r'gates has dtype torch.int32, but must be a floating dtype'),
        ({'out_compressed': normal(2, 5, 24)}, r'out_compressed has shape \(2, 5, 24\), but must have 4 dimensions'),
        ({'out_selected': None}, 'out_selected is a NoneType, but must be a tensor'),
        ({'out_selected': normal(2, 5, 4, 5)}, r'out_selected has shape \(2, 5, 4, 5\), but out_compressed has'),
        ({'out_window': normal(2, 5, 4, 6).float()}, r'out_window has dtype torch.float32, but out_compressed has'),
        ({'gate_in_attention': 1}, 'gate_in_attention is 1, but must be True or False'),
        (
            {'gate_in_attention': True, 'backend': 'eager'},
            "backend 'eager' cannot serve this call of gated_sum: gate is differentiated by the Triton kernels alone",
        ),
        (
            {'gate_in_attention': True},
            'no backend can serve this call of gated_sum: .*eager: gate is differentiated by the Triton',
        ),
        ({'backend': 'fast'}, r"backend is 'fast', but must be one of 'auto', 'triton', 'flex', 'eager'"),
        ({'backend': 'flex'}, r"backend 'flex' cannot serve this call of gated_sum: gated_sum has no flex backend"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
