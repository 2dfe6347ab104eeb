"""The rotary embedding: its definition, dtypes and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import rotary
from native_sparse_attention.testing import assert_matches, outputs_and_gradients
from tests.support.problems import assert_agree, normal


def definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of features of every token as a complex number."""
    rows = [row if len(cos) > 1 else 0 for row in range(len(x))]
    features = list(x.unbind(-1))
    for i in range(cos.shape[-1]):
        turn = torch.complex(cos[rows, :, None, i], sin[rows, :, None, i])
        pair = torch.complex(features[2 * i], features[2 * i + 1]) * turn
        features[2 * i : 2 * i + 2] = pair.real, pair.imag
    return torch.stack(features, -1)


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.data())
def test_definition(batch: int, seqlen: int, heads: int, head_dim: int, shared: bool, data: st.DataObject) -> None:
    angles = normal(1 if shared else batch, seqlen, data.draw(st.integers(0, head_dim // 2))) * 9
    assert_agree(rotary, definition, normal(batch, seqlen, heads, head_dim), angles.cos(), angles.sin())


@pytest.mark.parametrize(('head_dim', 'num_angles'), [(6, 3), (7, 2), (5, 0)])
def test_halves_are_neighbours_of_permuted_features(head_dim: int, num_angles: int) -> None:
    x, angles = normal(2, 4, 3, head_dim), normal(1, 4, num_angles)
    tables = angles.cos(), angles.sin()
    order = torch.arange(2 * num_angles).view(2, num_angles).T.flatten()  # 0, F, 1, F + 1, ...
    order = torch.cat((order, torch.arange(2 * num_angles, head_dim)))
    expected = torch.empty_like(x)
    expected[..., order] = rotary(x[..., order], *tables)
    torch.testing.assert_close(rotary(x, *tables, layout='half'), expected)


@pytest.mark.parametrize('layout', ['interleaved', 'half'])
def test_gradcheck(layout: str) -> None:
    angles = normal(1, 3, 2)
    inputs = [t.requires_grad_() for t in (normal(2, 3, 2, 5), angles.cos(), angles.sin())]
    assert torch.autograd.gradcheck(partial(rotary, layout=layout), inputs)


def test_strides() -> None:
    angles = normal(3, 5, 4).permute(2, 1, 0)[:2]
    for x in (normal(2, 4, 5, 7).transpose(1, 2), normal(1, 1, 4, 7).expand(2, 5, 4, 7), normal(2, 5, 4, 21)[..., :7]):
        assert_agree(rotary, definition, x, angles.cos(), angles.sin())


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    angles = torch.rand(1, 30, 7) * 30

    def rotated(x: Tensor) -> Tensor:
        return rotary(x, angles.cos(), angles.sin())

    x, grads = torch.randn(2, 30, 4, 16).to(dtype), [torch.randn(2, 30, 4, 16).to(dtype)]
    results = outputs_and_gradients(rotated, {'x': x}, grads)
    gold = outputs_and_gradients(rotated, {'x': x.double()}, grads)
    for name, result in results.items():
        assert result.dtype == dtype
        assert_matches(result, gold[name], gold[name].to(dtype), name=name)


def call(**changes: Any) -> None:
    tensors: dict[str, Any] = {'x': torch.randn(2, 5, 4, 6), 'cos': torch.rand(1, 5, 3), 'sin': torch.rand(1, 5, 3)}
    rotary(**(tensors | changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'x': torch.rand(2, 5, 6)}, r'x has shape \(2, 5, 6\), but must have 4 dimensions \(B, T, H, D\)'),
        ({'x': torch.ones(2, 5, 4, 6).int()}, r'x has dtype torch.int32, but must be a floating dtype'),
        ({'cos': [1.0]}, 'cos is a list, but must be a tensor'),
        ({'cos': torch.rand(3, 5, 3)}, r'cos has shape \(3, 5, 3\), but must have \(2 or 1, 5, F\)'),
        ({'sin': torch.rand(1, 4, 3)}, r'sin has shape \(1, 4, 3\), but must have \(2 or 1, 5, F\)'),
        ({'sin': torch.rand(1, 5, 2)}, r'sin has shape \(1, 5, 2\), but cos has \(1, 5, 3\)'),
        ({'cos': torch.rand(1, 5, 4)}, r'cos has 4 angles, but heads of 6 features take 3'),
        ({'cos': torch.rand(1, 5, 3).half()}, r'cos has dtype torch.float16, but must be float32'),
        ({'sin': torch.rand(1, 5, 3, device='meta')}, r'sin is on meta, but x is on cpu'),
        ({'layout': 'split'}, r"layout is 'split', but must be 'interleaved' or 'half'"),
        ({'backend': 'fast'}, r"backend is 'fast', but must be one of 'auto', 'triton', 'flex', 'eager'"),
        ({'backend': 'flex'}, r"backend 'flex' cannot serve this call of rotary: rotary has no flex backend"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)
