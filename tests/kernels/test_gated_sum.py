"""The kernels of the gated sum against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import gated_sum
from native_sparse_attention.ops.gated_sum.triton import op
from native_sparse_attention.testing import LAYOUTS, assert_matches, lay_out, outputs_and_gradients
from tests.support.harness import fence

BRANCHES = ('out_compressed', 'out_selected', 'out_window')
Shape = tuple[int, int, int, int]
Tensors = dict[str, Any]


def make_problem(
    shape: Shape, dtype: torch.dtype, gate_dtype: torch.dtype, device: torch.device, layout: str = 'contiguous'
) -> Tensors:
    tensors = {'gates': torch.rand(*shape[:3], 3, device=device).to(gate_dtype)}
    for name in BRANCHES:
        tensors[name] = lay_out(torch.randn(shape, device=device).to(dtype), layout)
    return tensors


def run(tensors: Tensors, grad: Tensor, backend: str, dtype: torch.dtype | None = None) -> Tensors:
    cast = {name: fence(t if dtype is None else t.to(dtype)) for name, t in tensors.items()}
    return outputs_and_gradients(lambda **leaves: gated_sum(**leaves, backend=backend), cast, [grad])


def check(tensors: Tensors, grad: Tensor) -> None:
    """Check the output and every gradient by the error rules."""
    grad = grad.to(tensors['out_window'].dtype)
    result, same_dtype = run(tensors, grad, 'triton'), run(tensors, grad, 'eager')
    gold = run(tensors, grad, 'eager', torch.float64)
    for name, value in result.items():
        assert value.dtype == same_dtype[name].dtype
        assert_matches(value, gold[name], same_dtype[name], name=name)


@pytest.mark.quick
@pytest.mark.parametrize('gate_dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('shape', [(1, 1, 1, 1), (2, 33, 6, 40), (1, 130, 3, 64), (3, 5, 16, 100), (1, 3, 2, 256)])
def test_error_rules(shape: Shape, dtype: torch.dtype, gate_dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_problem(shape, dtype, gate_dtype, device)
    check(tensors, torch.randn(shape, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize('gate_dtype', [torch.float32, torch.bfloat16])
def test_error_rules_of_bfloat16(gate_dtype: torch.dtype, device: torch.device) -> None:
    shape = (2, 333, 6, 128)
    tensors = make_problem(shape, torch.bfloat16, gate_dtype, device)
    check(tensors, torch.randn(shape, device=device))


@settings(max_examples=8)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(1, 5), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_shape(shape: Shape, dtype: torch.dtype, layout: str) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    tensors = make_problem(shape, dtype, torch.float32, device, layout if shape[0] else 'contiguous')
    check(tensors, torch.randn(shape, device=device))


@pytest.mark.parametrize('layout', LAYOUTS)
def test_strides(layout: str, device: torch.device) -> None:
    shape = (2, 19, 5, 24)
    tensors = make_problem(shape, torch.float32, torch.float32, device, layout)
    gates = torch.rand(2, 5, 3, 19 * 2, device=device)[..., ::2].permute(0, 3, 1, 2)
    tensors['gates'] = gates
    tensors['out_window'] = torch.randn(2, 24, 19, 5, device=device).permute(0, 2, 3, 1)
    check(tensors, torch.randn(shape, device=device))
    # Expanded, as from `out.sum().backward()`, and in another layout.
    check(tensors, torch.ones((), device=device).expand(shape))
    check(tensors, torch.randn(2, 5, 24, 19, device=device).permute(0, 3, 1, 2))


@pytest.mark.parametrize('needed', [(), ('gates',), ('out_selected',), ('out_compressed', 'out_window')])
def test_gradients_of_required_tensors_alone(needed: tuple[str, ...], device: torch.device) -> None:
    tensors = make_problem((1, 17, 2, 20), torch.float32, torch.float32, device)
    grad = torch.randn(1, 17, 2, 20, device=device)
    expected = run(tensors, grad, 'eager')
    for name in needed:
        tensors[name].requires_grad_()
    out = gated_sum(**tensors, backend='triton')
    assert out.requires_grad == bool(needed)
    if needed:
        out.backward(grad)
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in needed)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, expected[f'grad of {name}'], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    tensors = make_problem((3, 37, 2, 20), torch.float16, torch.float32, device)
    grad = torch.randn(3, 37, 2, 20, device=device)
    together = run(tensors, grad, 'triton')
    again = run(tensors, grad, 'triton')
    alone = run({name: t[1:2] for name, t in tensors.items()}, grad[1:2], 'triton')
    for name, value in together.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value[1:2], alone[name])


def test_nan_stays_in_its_row(device: torch.device) -> None:
    tensors = make_problem((1, 9, 2, 20), torch.float32, torch.float32, device)
    tensors['out_selected'][0, 4, 1, 3] = torch.nan
    result = run(tensors, torch.ones(1, 9, 2, 20, device=device), 'triton')
    assert result['out0'].isnan().nonzero().tolist() == [[0, 4, 1, 3]]
    assert result['grad of gates'].isnan().nonzero().tolist() == [[0, 4, 1, 1]]


def test_offsets_beyond_int32(device: torch.device) -> None:
    # Only the rows of the view are accessed in the storage.
    storage = torch.empty(2**31 + 2**12, dtype=torch.float16)
    if device.type == 'cuda':
        storage = storage.to(device)
    branch = storage.as_strided((2, 3, 2, 8), (2**31, 2**9, 2**7, 1))
    branch.copy_(torch.randn(2, 3, 2, 8))
    tensors = make_problem((2, 3, 2, 8), torch.float16, torch.float32, device)
    expected = run(tensors | {'out_window': branch.clone()}, torch.ones(2, 3, 2, 8, device=device), 'triton')
    tensors['out_window'] = branch
    result = gated_sum(**tensors, backend='triton')
    assert torch.equal(result, expected['out0'])


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    tensors = make_problem((2, 5, 2, 12), torch.float32, torch.float32, device)
    arguments = tuple(t.requires_grad_() for t in tensors.values())
    for gate_in_attention in (False, True):
        torch.library.opcheck(op._forward, (*arguments, gate_in_attention))
    for needs in ([True] * 4, [False, True, False, True], [True, False, False, False]):
        inputs = (torch.randn(2, 5, 2, 12, device=device), *(t.detach() for t in arguments), needs)
        torch.library.opcheck(op._backward, inputs)


def test_double_backward_is_refused(device: torch.device) -> None:
    tensors = make_problem((1, 5, 2, 12), torch.float32, torch.float32, device)
    tensors['gates'].requires_grad_()
    out = gated_sum(**tensors, backend='triton')
    (grad,) = torch.autograd.grad(out.sum(), tensors['gates'], create_graph=True)
    with pytest.raises(RuntimeError, match='backend="eager"'):
        grad.sum().backward()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'dtype': torch.float64}, 'dtype torch.float64, but its kernels compute in float32'),
        ({'gate_dtype': torch.float64}, 'gates has dtype torch.float64, but its kernels compute in float32'),
        ({'shape': (1, 2, 1, 257)}, 'the head size is 257, but its kernels fit head sizes up to 256'),
    ],
)
def test_unsupported_calls(changes: dict[str, Any], message: str, device: torch.device) -> None:
    problem = {'shape': (1, 5, 2, 12), 'dtype': torch.float32, 'gate_dtype': torch.float32, 'device': device} | changes
    with pytest.raises(ValueError, match=message):
        gated_sum(**make_problem(**problem), backend='triton')
