"""The kernel that adds all gradients of a shared input, against autograd's sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import rotary
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.rotary.triton import sums
from native_sparse_attention.testing import LAYOUTS, assert_matches, lay_out
from tests.support.harness import fence, same_bits

Shape = tuple[int, int, int, int]
Tables = tuple[Tensor, Tensor]


def make_tables(shape: Shape, num_angles: int, rows: int, device: torch.device) -> Tables:
    angles = torch.rand(rows, shape[1], num_angles, device=device) * 1000
    return fence(angles.cos()), fence(angles.sin())


def make_grads(shape: Shape, count: int, device: torch.device, layout: str = 'contiguous') -> list[Tensor]:
    return [lay_out(torch.randn(shape, device=device), layout) for _ in range(count)]


def differentiate(
    x: Tensor, tables: Tables | None, num_rotated: int, grads: list[Tensor], backend: str, **pairs: str
) -> Tensor:
    x = x.detach().requires_grad_()
    readers = shared_input(x, len(grads) - num_rotated, num_rotated, tables, **pairs, backend=backend)
    assert len(readers) == len(grads)
    (dx,) = torch.autograd.grad(readers, x, [grad.to(x.dtype) for grad in grads])
    return dx


def check(x: Tensor, tables: Tables | None, num_rotated: int, grads: list[Tensor], **pairs: str) -> None:
    """Check the sum by the error rules. pairs: the layout of the pairs of features."""
    grads = [grad.to(x.dtype) for grad in grads]
    gold_tables = None if tables is None else (tables[0].double(), tables[1].double())
    result = differentiate(x, tables, num_rotated, grads, 'triton', **pairs)
    gold = differentiate(x.double(), gold_tables, num_rotated, grads, 'eager', **pairs)
    assert result.dtype == x.dtype
    same_dtype = differentiate(x, tables, num_rotated, grads, 'eager', **pairs)
    assert_matches(result, gold, same_dtype, name='gradient of x')


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize(('num_rotated', 'num_plain'), [(0, 2), (0, 3), (1, 1), (2, 0), (2, 1), (2, 3)])
@pytest.mark.parametrize(
    ('shape', 'num_angles'), [((1, 3, 1, 3), 1), ((2, 33, 6, 40), 20), ((1, 130, 3, 64), 8), ((1, 3, 2, 256), 128)]
)
def test_error_rules(
    shape: Shape, num_angles: int, num_rotated: int, num_plain: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, tables = torch.randn(shape, device=device).to(dtype), make_tables(shape, num_angles, 1, device)
    for pairs in ('interleaved', 'half'):
        check(x, tables, num_rotated, make_grads(shape, num_rotated + num_plain, device), layout=pairs)


@pytest.mark.gpu
@pytest.mark.parametrize('num_rotated', [0, 2])
def test_error_rules_of_bfloat16(num_rotated: int, device: torch.device) -> None:
    shape = (2, 333, 6, 128)
    x, tables = torch.randn(shape, device=device).bfloat16(), make_tables(shape, 64, 2, device)
    check(x, tables, num_rotated, make_grads(shape, num_rotated + 1, device))


@settings(max_examples=12)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(1, 5), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_any_shape(shape: Shape, dtype: torch.dtype, layout: str, data: st.DataObject) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    layout = layout if shape[0] else 'contiguous'
    num_angles, rows = data.draw(st.integers(0, shape[3] // 2)), data.draw(st.sampled_from((1, shape[0])))
    tables = data.draw(st.sampled_from((None, make_tables(shape, num_angles, rows, device))))
    num_rotated, num_plain = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    x = lay_out(torch.randn(shape, device=device).to(dtype), layout)
    check(x, tables, num_rotated, make_grads(shape, num_rotated + num_plain, device, layout))


def test_readers(device: torch.device) -> None:
    x = torch.randn(2, 7, 3, 12, device=device)
    tables = make_tables((2, 7, 3, 12), 5, 1, device)
    rotated = rotary(x, *tables, backend='triton')
    for requires_grad in (True, False):
        readers = shared_input(x.clone().requires_grad_(requires_grad), 2, 2, tables, backend='triton')
        assert all(same_bits(reader, like) for reader, like in zip(readers, (rotated, rotated, x, x), strict=True))
        assert [reader.requires_grad for reader in readers] == [requires_grad] * 4
        assert readers[0].data_ptr() == readers[1].data_ptr()


def test_unused_outputs(device: torch.device) -> None:
    x = torch.randn(1, 5, 2, 12, device=device).requires_grad_()
    tables = make_tables((1, 5, 2, 12), 6, 1, device)
    first, second, plain, other = shared_input(x, 2, 2, tables, backend='triton')
    grads = make_grads((1, 5, 2, 12), 2, device)
    (dx,) = torch.autograd.grad((second, plain), x, grads, retain_graph=True)
    expected = rotary(grads[0], tables[0], -tables[1], backend='eager') + grads[1]
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(first, x, grads[0], retain_graph=True)
    torch.testing.assert_close(dx, expected - grads[1], rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(other.sum(), x, retain_graph=True)
    assert dx.eq(1).all()


def test_one_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    launch = sums.launch
    monkeypatch.setattr(sums, 'launch', lambda *args, **meta: (calls.append(meta), launch(*args, **meta)))
    x = torch.randn(1, 5, 2, 12, device=device)
    differentiate(x, None, 0, make_grads((1, 5, 2, 12), 3, device), 'triton')
    assert [meta['NUM_GRADS'] for meta in calls] == [3]


def test_the_gradient_of_a_single_reader_is_not_copied(device: torch.device) -> None:
    x = torch.randn(1, 5, 2, 12, device=device).requires_grad_()
    readers = shared_input(x, 2, 2, make_tables((1, 5, 2, 12), 6, 1, device), backend='triton')
    (grad,) = make_grads((1, 5, 2, 12), 1, device)
    assert torch.autograd.grad(readers[3], x, grad)[0].data_ptr() == grad.data_ptr()


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    grads, tables = make_grads((2, 5, 2, 12), 3, device), make_tables((2, 5, 2, 12), 6, 1, device)
    grads = [grad.requires_grad_() for grad in grads]
    torch.library.opcheck(sums._add, (*grads, None, None, 2, *tables, False))
    torch.library.opcheck(sums._add, (*grads, None, None, 2, *tables, True))
    torch.library.opcheck(sums._add, (*grads[:2], None, None, None, 0, None, None, False))


@pytest.mark.parametrize('num_rotated', [0, 2])
def test_a_second_derivative_is_that_of_a_linear_map(num_rotated: int, device: torch.device) -> None:
    shape = (1, 5, 2, 12)
    tables, x = make_tables(shape, 6, 1, device), torch.randn(shape, device=device)
    weights = make_grads(shape, 3, device)

    def second(backend: str) -> Tensor:
        inputs = x.clone().requires_grad_()
        readers = shared_input(inputs, 3 - num_rotated, num_rotated, tables, backend=backend)
        loss = (torch.stack(weights) * torch.stack(readers).square()).sum()
        (dx,) = torch.autograd.grad(loss, inputs, create_graph=True)
        # The input is reached another way too: what is missing would not show otherwise.
        return torch.autograd.grad(loss + dx.square().sum(), inputs)[0]

    torch.testing.assert_close(second('triton'), second('eager'), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('num_rotated', [0, 2])
def test_many_gradients_at_once(num_rotated: int, device: torch.device) -> None:
    shape = (1, 5, 2, 12)
    tables, x = make_tables(shape, 6, 1, device), torch.randn(shape, device=device).requires_grad_()
    readers = shared_input(x, 3 - num_rotated, num_rotated, tables, backend='triton')
    grads = [torch.randn(4, *shape, device=device) for _ in readers]
    (together,) = torch.autograd.grad(readers, x, grads, retain_graph=True, is_grads_batched=True)
    for index in range(4):
        (alone,) = torch.autograd.grad(readers, x, [grad[index] for grad in grads], retain_graph=True)
        torch.testing.assert_close(together[index], alone)


def test_learned_angles_have_gradients(device: torch.device) -> None:
    shape = (1, 5, 2, 12)
    x, (cos, sin) = torch.randn(shape, device=device).requires_grad_(), make_tables(shape, 6, 1, device)
    readers = shared_input(x, 1, 2, (cos.requires_grad_(), sin))
    assert torch.autograd.grad(readers[0].sum(), cos)[0].abs().max() > 0
    with pytest.raises(ValueError, match='cos or sin requires a gradient, which its kernel does not compute'):
        shared_input(x, 1, 2, (cos, sin), backend='triton')


def test_more_readers_than_the_kernel_adds(device: torch.device) -> None:
    x, grads = torch.randn(1, 3, 2, 6, device=device), make_grads((1, 3, 2, 6), 7, device)
    torch.testing.assert_close(differentiate(x, None, 0, grads, 'triton'), torch.stack(grads).sum(0))


@pytest.mark.parametrize('backend', ['triton', 'auto', 'eager'])
def test_unsupported_sums_are_left_to_autograd(backend: str, device: torch.device) -> None:
    x = torch.randn(1, 3, 2, 300, device=device, dtype=torch.float64)
    grads = [grad.double() for grad in make_grads((1, 3, 2, 300), 3, device)]
    torch.testing.assert_close(differentiate(x, None, 0, grads, backend), torch.stack(grads).sum(0))
