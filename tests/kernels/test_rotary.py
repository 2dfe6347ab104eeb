"""The rotary embedding kernel against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import rotary
from native_sparse_attention.ops.rotary.triton import op
from native_sparse_attention.testing import LAYOUTS, assert_matches, lay_out, outputs_and_gradients
from tests.support.harness import fence, same_bits

Shape = tuple[int, int, int, int]


def make_problem(
    shape: Shape, num_angles: int, dtype: torch.dtype, device: torch.device, layout: str = 'contiguous', rows: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.rand(rows, shape[1], num_angles, device=device) * 1000
    x = lay_out(torch.randn(shape, device=device).to(dtype), layout)
    return fence(x), fence(angles.cos()), fence(angles.sin())


def run(x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor, backend: str, **pairs: str) -> dict[str, Tensor]:
    return outputs_and_gradients(lambda x: rotary(x, cos, sin, **pairs, backend=backend), {'x': x}, [grad])


def check(x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor, **pairs: str) -> None:
    """Check the output and the gradient by the error rules. pairs: the layout of the pairs of features."""
    grad = grad.to(x.dtype)
    result, same_dtype = run(x, cos, sin, grad, 'triton', **pairs), run(x, cos, sin, grad, 'eager', **pairs)
    gold = run(x.double(), cos.double(), sin.double(), grad, 'eager', **pairs)
    for name, value in result.items():
        assert value.dtype == x.dtype
        assert_matches(value, gold[name], same_dtype[name], name=name)


@pytest.mark.quick
@pytest.mark.parametrize('pairs', ['interleaved', 'half'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ('shape', 'num_angles'),
    [
        ((1, 1, 1, 1), 0),
        ((1, 3, 1, 3), 1),
        ((2, 33, 6, 40), 20),
        ((1, 130, 3, 64), 8),
        ((3, 5, 16, 100), 50),
        ((1, 3, 2, 256), 128),
    ],
)
def test_error_rules(shape: Shape, num_angles: int, dtype: torch.dtype, pairs: str, device: torch.device) -> None:
    check(*make_problem(shape, num_angles, dtype, device), torch.randn(shape, device=device), layout=pairs)


@pytest.mark.gpu
@pytest.mark.parametrize('pairs', ['interleaved', 'half'])
@pytest.mark.parametrize('num_angles', [64, 16])
def test_error_rules_of_bfloat16(num_angles: int, pairs: str, device: torch.device) -> None:
    shape = (2, 333, 6, 128)
    check(*make_problem(shape, num_angles, torch.bfloat16, device), torch.randn(shape, device=device), layout=pairs)


@settings(max_examples=8)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(1, 5), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_any_shape(shape: Shape, dtype: torch.dtype, layout: str, data: st.DataObject) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    num_angles = data.draw(st.integers(0, shape[3] // 2))
    rows = data.draw(st.sampled_from((1, shape[0])))
    problem = make_problem(shape, num_angles, dtype, device, layout if shape[0] else 'contiguous', rows)
    check(*problem, torch.randn(shape, device=device))


def test_strides(device: torch.device) -> None:
    shape = (2, 19, 5, 24)
    angles = torch.rand(9, 19, 4, device=device).permute(2, 1, 0)[1:3]
    x = torch.randn(2, 24, 19, 5, device=device).permute(0, 2, 3, 1)
    tables = angles.cos(), torch.rand(1, 1, 9, device=device).expand(2, 19, 9)
    check(x, *tables, torch.randn(shape, device=device))
    # Expanded, as from `out.sum().backward()`, and in another layout.
    check(x, *tables, torch.ones((), device=device).expand(shape))
    check(x, *tables, torch.randn(2, 5, 24, 19, device=device).permute(0, 3, 1, 2))


def test_the_inverse_is_the_gradient(device: torch.device) -> None:
    x, cos, sin = make_problem((2, 7, 3, 12), 5, torch.float32, device)
    rotated = rotary(x, cos, sin, backend='triton')
    torch.testing.assert_close(run(x, cos, sin, rotated, 'triton')['grad of x'], x, rtol=1e-5, atol=1e-6)


def test_a_second_derivative_is_that_of_a_linear_map(device: torch.device) -> None:
    x, cos, sin = make_problem((1, 5, 2, 12), 6, torch.float32, device)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(rotary(x, cos, sin, backend='triton').square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x, cos, sin = make_problem((3, 37, 2, 20), 10, torch.float16, device)
    together = rotary(x, cos, sin, backend='triton')
    assert same_bits(together[1:2], rotary(x[1:2], cos, sin, backend='triton'))


def test_non_finite_features_stay_in_their_pair(device: torch.device) -> None:
    x, cos, sin = make_problem((1, 9, 2, 20), 8, torch.float32, device)
    x[0, 4, 1, 3] = torch.nan
    x[0, 5, 0, 16] = x[0, 5, 0, 19] = torch.inf
    out = rotary(x, cos, sin, backend='triton')
    assert (~out.isfinite()).nonzero().tolist() == [[0, 4, 1, 2], [0, 4, 1, 3], [0, 5, 0, 16], [0, 5, 0, 19]]
    assert out[0, 5, 0, 16] == out[0, 5, 0, 19] == torch.inf


def test_offsets_beyond_int32(device: torch.device) -> None:
    # Only the rows of the view are accessed in the storage.
    storage = torch.empty(2**31 + 2**12, dtype=torch.float16)
    if device.type == 'cuda':
        storage = storage.to(device)
    x, cos, sin = make_problem((2, 3, 2, 8), 4, torch.float16, device)
    far = storage.as_strided((2, 3, 2, 8), (2**31, 2**9, 2**7, 1)).copy_(x)
    assert same_bits(rotary(far, cos, sin, backend='triton'), rotary(x, cos, sin, backend='triton'))


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    x, cos, sin = make_problem((2, 5, 2, 12), 6, torch.float32, device)
    for inverse, is_half in ((False, False), (True, False), (False, True)):
        torch.library.opcheck(op._rotate, (x.requires_grad_(), cos, sin, inverse, is_half))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'dtype': torch.float64}, 'x has dtype torch.float64, but its kernels compute in float32'),
        ({'shape': (1, 2, 1, 257)}, 'the head size is 257, but its kernels fit head sizes up to 256'),
    ],
)
def test_unsupported_calls(changes: dict[str, Any], message: str, device: torch.device) -> None:
    problem = {'shape': (1, 5, 2, 12), 'num_angles': 4, 'dtype': torch.float32, 'device': device} | changes
    with pytest.raises(ValueError, match=message):
        rotary(*make_problem(**problem), backend='triton')


def test_learned_angles_are_not_served(device: torch.device) -> None:
    x, cos, sin = make_problem((1, 5, 2, 12), 4, torch.float32, device)
    with pytest.raises(ValueError, match='cos or sin requires a gradient, which its kernel does not compute'):
        rotary(x, cos.requires_grad_(), sin, backend='triton')
    with torch.no_grad():
        rotary(x, cos, sin, backend='triton')
