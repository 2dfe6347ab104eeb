"""The kernels of RMSNorm followed by rotary embedding against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import rotary
from native_sparse_attention.ops.rotary import norm_rotary
from native_sparse_attention.ops.rotary.triton import norm
from native_sparse_attention.testing import LAYOUTS, assert_matches, lay_out, outputs_and_gradients
from tests.support.harness import fence, same_bits

Shape = tuple[int, int, int, int]
Tables = tuple[Tensor, Tensor]
EPS = 1e-6
# Plain and rotated outputs: of merged and separate branches, of keys that only one branch reads.
COUNTS = [(1, 1), (1, 2), (0, 1), (0, 2), (1, 0)]


def make_problem(
    shape: Shape,
    num_angles: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = 'contiguous',
    rows: int = 1,
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tables]:
    """Return x, a weight that the dtype of x represents, and tables."""
    angles = torch.rand(rows, shape[1], num_angles, device=device) * 1000
    x = lay_out(torch.randn(shape, device=device).to(dtype), layout)
    weight = (torch.rand(shape[3], device=device) + 0.5).to(dtype).to(weight_dtype)
    return fence(x), fence(weight), (fence(angles.cos()), fence(angles.sin()))


def make_grads(shape: Shape, count: int, device: torch.device, layout: str = 'contiguous') -> list[Tensor]:
    return [lay_out(torch.randn(shape, device=device), layout) for _ in range(count)]


def run(
    x: Tensor, weight: Tensor, tables: Tables | None, counts: tuple[int, int], grads: list[Tensor], **options: Any
) -> dict[str, Tensor]:
    def normalise(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return norm_rotary(x, weight, *counts, tables, eps=EPS, **options)

    return outputs_and_gradients(normalise, {'x': x, 'weight': weight}, grads)


def check(
    x: Tensor, weight: Tensor, tables: Tables | None, counts: tuple[int, int], grads: list[Tensor], **pairs: str
) -> None:
    """Check outputs and gradients by the error rules. pairs: the layout of the pairs of features."""
    grads = [grad.to(x.dtype) for grad in grads]
    result = run(x, weight, tables, counts, grads, **pairs, backend='triton')
    same_dtype = run(x, weight, tables, counts, grads, **pairs, backend='eager')
    gold_tables = None if tables is None else (tables[0].double(), tables[1].double())
    gold = run(x.double(), weight.double(), gold_tables, counts, grads, **pairs, backend='eager')
    for name, value in result.items():
        assert value.dtype == (weight.dtype if name == 'grad of weight' else x.dtype)
        assert_matches(value, gold[name], same_dtype[name], name=name, dtype=x.dtype)


@pytest.mark.quick
@pytest.mark.parametrize('pairs', ['interleaved', 'half'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('counts', COUNTS)
@pytest.mark.parametrize(
    ('shape', 'num_angles'),
    [
        ((2, 33, 6, 40), 20),
        ((1, 130, 3, 64), 8),
        ((1, 67, 2, 32), 16),
        ((3, 5, 16, 80), 40),
        ((2, 21, 3, 96), 48),
        ((1, 1, 8, 128), 64),
        ((1, 9, 2, 256), 128),
    ],
)
def test_error_rules(
    shape: Shape, num_angles: int, counts: tuple[int, int], dtype: torch.dtype, pairs: str, device: torch.device
) -> None:
    problem = make_problem(shape, num_angles, dtype, device, weight_dtype=dtype)
    check(*problem, counts, make_grads(shape, sum(counts), device), layout=pairs)


@pytest.mark.gpu
@pytest.mark.parametrize('pairs', ['interleaved', 'half'])
@pytest.mark.parametrize('counts', COUNTS)
@pytest.mark.parametrize('weight_dtype', [torch.bfloat16, torch.float32])
@pytest.mark.parametrize('head_dim', [32, 64, 80, 96, 128])
def test_error_rules_of_bfloat16(
    head_dim: int, weight_dtype: torch.dtype, counts: tuple[int, int], pairs: str, device: torch.device
) -> None:
    shape = (2, 333, 6, head_dim)
    problem = make_problem(shape, head_dim // 2, torch.bfloat16, device, weight_dtype=weight_dtype)
    check(*problem, counts, make_grads(shape, sum(counts), device), layout=pairs)


@settings(max_examples=12)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(1, 5), st.integers(3, 70)),
    counts=st.sampled_from(COUNTS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_any_shape(shape: Shape, counts: tuple[int, int], dtype: torch.dtype, layout: str, data: st.DataObject) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    layout = layout if shape[0] else 'contiguous'
    num_angles, rows = data.draw(st.integers(0, shape[3] // 2)), data.draw(st.sampled_from((1, shape[0])))
    x, weight, tables = make_problem(shape, num_angles, dtype, device, layout, rows)
    if shape[0] * shape[1] == 0:
        results = run(x, weight, tables, counts, make_grads(shape, sum(counts), device), backend='triton')
        assert results['grad of x'].shape == x.shape
        assert results['grad of weight'].eq(0).all()
    else:
        check(x, weight, tables, counts, make_grads(shape, sum(counts), device, layout))


def test_strides(device: torch.device) -> None:
    shape = (2, 19, 5, 24)
    _, weight, tables = make_problem(shape, 9, torch.float32, device, rows=2)
    x = torch.randn(2, 24, 19, 5, device=device).permute(0, 2, 3, 1)
    strided = weight[:, None].expand(-1, 3).contiguous()[:, 1]
    # Expanded, as from `out.sum().backward()`, and in another layout.
    expanded = torch.ones((), device=device).expand(shape)
    permuted = torch.randn(2, 5, 24, 19, device=device).permute(0, 3, 1, 2)
    check(x, strided, tables, (1, 2), [permuted, torch.randn(shape, device=device), permuted])
    check(x, weight, tables, (1, 1), [expanded, permuted])


def test_equals_the_composition(device: torch.device) -> None:
    """The rotated output has the bits of `rotary` of the plain output, which equals that of PyTorch up to rounding."""
    x, weight, tables = make_problem((2, 37, 3, 20), 7, torch.float16, device)
    rotated, plain = norm_rotary(x, weight, 1, 1, tables, eps=EPS, backend='triton')
    assert same_bits(rotated, rotary(plain, *tables, backend='triton'))
    expected = F.rms_norm(x, (20,), weight.half(), EPS)
    torch.testing.assert_close(plain, expected, rtol=2**-10, atol=1e-6)


def test_without_tables(device: torch.device) -> None:
    x, weight, _ = make_problem((2, 37, 3, 20), 7, torch.float32, device)
    check(x, weight, None, (1, 2), make_grads((2, 37, 3, 20), 3, device))


def test_rows_of_zeros_and_of_large_numbers(device: torch.device) -> None:
    shape = (1, 40, 2, 12)
    x, weight, tables = make_problem(shape, 6, torch.float32, device)
    x[0, 3], x[0, 4] = 0, 1e15 * x[0, 4]
    check(x, weight, tables, (1, 1), make_grads(shape, 2, device))


def test_eps_of_zero(device: torch.device) -> None:
    """Rows of a tile beyond the last row, whose mean of squares is 0, add nothing to the gradient of the weight."""
    x, weight, tables = make_problem((1, 5, 3, 40), 20, torch.float32, device)
    results = []
    for backend in ('triton', 'eager'):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = norm_rotary(*leaves, 1, 1, tables, eps=0.0, backend=backend)
        results.append([*outputs, *torch.autograd.grad(torch.stack(outputs).sin().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    x, weight, tables = make_problem((3, 37, 2, 20), 10, torch.float16, device)
    grads = [grad.half() for grad in make_grads((3, 37, 2, 20), 2, device)]
    together = run(x, weight, tables, (1, 1), grads, backend='triton')
    alone = run(x[1:2], weight, tables, (1, 1), [grad[1:2] for grad in grads], backend='triton')
    for name in ('out0', 'out1', 'grad of x'):
        assert same_bits(together[name][1:2], alone[name]), name


def test_several_tiles_of_a_program(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 61, 4, 128)
    problem, grads = make_problem(shape, 64, torch.float32, device), make_grads(shape, 3, device)
    for count in (1, 2, 6):
        monkeypatch.setattr(norm, 'MAX_PROGRAMS', count)
        check(*problem, (1, 2), grads)


def test_one_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    launch = norm.launch
    monkeypatch.setattr(norm, 'launch', lambda *args, **meta: (calls.append(meta), launch(*args, **meta)))
    x, weight, tables = make_problem((1, 5, 2, 12), 6, torch.float32, device)
    run(x, weight, tables, (1, 2), make_grads((1, 5, 2, 12), 3, device), backend='triton')
    assert [(meta.get('NUM_ROTATED'), meta.get('NUM_GRADS')) for meta in calls] == [(None, None), (2, 3)]


def test_unused_outputs_and_frozen_inputs(device: torch.device) -> None:
    x, weight, tables = make_problem((1, 5, 2, 12), 6, torch.float32, device)
    grads = make_grads((1, 5, 2, 12), 3, device)
    for used in ([0, 2], [1], [2]):
        given = [grad if index in used else torch.zeros_like(grad) for index, grad in enumerate(grads)]
        expected = run(x, weight, tables, (1, 2), given, backend='eager')
        for trained in ('x', 'weight', 'both'):
            leaves = {'x': x.clone().requires_grad_(trained != 'weight')}
            leaves['weight'] = weight.clone().requires_grad_(trained != 'x')
            outputs = norm_rotary(leaves['x'], leaves['weight'], 1, 2, tables, eps=EPS, backend='triton')
            torch.autograd.backward([outputs[i] for i in used], [grads[i] for i in used])
            for name, leaf in leaves.items():
                if leaf.requires_grad:
                    assert leaf.grad is not None
                    torch.testing.assert_close(leaf.grad, expected[f'grad of {name}'], rtol=1e-5, atol=1e-5)
                else:
                    assert leaf.grad is None


def test_more_readers_than_the_kernel_adds(device: torch.device) -> None:
    shape = (1, 5, 2, 12)
    problem, grads = make_problem(shape, 6, torch.float32, device), make_grads(shape, 7, device)
    results = [run(*problem, (3, 4), grads, backend=backend) for backend in ('triton', 'eager')]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('counts', COUNTS)
def test_compiles(counts: tuple[int, int], device: torch.device) -> None:
    torch._dynamo.reset()
    shape = (1, 9, 2, 12)
    x, weight, tables = make_problem(shape, 6, torch.float32, device)
    grads = make_grads(shape, sum(counts), device)

    def normalise(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return norm_rotary(x, weight, *counts, tables, eps=EPS, backend='triton')

    compiled: Any = torch.compile(normalise, fullgraph=True, backend='aot_eager')
    expected = outputs_and_gradients(normalise, {'x': x, 'weight': weight}, grads)
    results = outputs_and_gradients(compiled, {'x': x, 'weight': weight}, grads)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    x, weight, tables = make_problem((2, 5, 2, 12), 6, torch.float32, device)
    leaves = x.requires_grad_(), weight.requires_grad_()
    for is_half, needs_rotated, needs_plain in ((False, True, True), (True, True, False), (False, False, True)):
        torch.library.opcheck(norm._forward, (*leaves, *tables, EPS, is_half, needs_rotated, needs_plain))
    torch.library.opcheck(norm._forward, (*leaves, None, None, EPS, False, False, True))


def test_offsets_beyond_int32(device: torch.device) -> None:
    # Only the rows of the view are accessed in the storage.
    storage = torch.empty(2**31 + 2**12, dtype=torch.float16)
    if device.type == 'cuda':
        storage = storage.to(device)
    x, weight, tables = make_problem((2, 3, 2, 8), 4, torch.float16, device)
    far = storage.as_strided((2, 3, 2, 8), (2**31, 2**9, 2**7, 1)).copy_(x)
    grads = [grad.half() for grad in make_grads((2, 3, 2, 8), 2, device)]
    results = [run(t, weight, tables, (1, 1), grads, backend='triton') for t in (far, x)]
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name


@pytest.mark.gpu
def test_repeated_gradients_have_the_same_bits(device: torch.device) -> None:
    shape = (2, 4096, 8, 64)
    problem = make_problem(shape, 32, torch.bfloat16, device)
    grads = [grad.bfloat16() for grad in make_grads(shape, 2, device)]
    first = run(*problem, (1, 1), grads, backend='triton')
    for _ in range(100):
        again = run(*problem, (1, 1), grads, backend='triton')
        assert all(same_bits(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'weight': torch.ones(11)}, r'weight has shape \(11,\), but must have \(12,\)'),
        ({'weight': torch.ones(12, dtype=torch.int32)}, 'weight has dtype torch.int32, but must be a floating dtype'),
        ({'weight': torch.ones(12, device='meta')}, 'weight is on meta, but x is on'),
        ({'x': torch.ones(1, 5, 12)}, r'x has shape \(1, 5, 12\), but must have 4 dimensions'),
        ({'x': torch.ones(1, 6, 2, 12)}, r'cos has shape \(1, 5, 6\), but must have \(1 or 1, 6, F\)'),
        ({'weight': torch.ones(12).double()}, 'weight has dtype torch.float64, but its kernels compute in float32'),
        ({'x': torch.ones(1, 5, 2, 12).double()}, 'x has dtype torch.float64, but its kernels compute in float32'),
    ],
)
def test_wrong_and_unsupported_calls(changes: dict[str, Tensor], message: str, device: torch.device) -> None:
    x, weight, tables = make_problem((1, 5, 2, 12), 6, torch.float32, device)
    tensors: dict[str, Any] = {'x': x, 'weight': weight} | {
        name: t if t.is_meta else t.to(device) for name, t in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        norm_rotary(**tensors, num_plain=1, num_rotated=1, tables=tables, eps=EPS, backend='triton')


def test_learned_angles_are_not_served(device: torch.device) -> None:
    x, weight, (cos, sin) = make_problem((1, 5, 2, 12), 4, torch.float32, device)
    with pytest.raises(ValueError, match='cos or sin requires a gradient, which its kernel does not compute'):
        norm_rotary(x, weight, 1, 1, (cos.requires_grad_(), sin), eps=EPS, backend='triton')
