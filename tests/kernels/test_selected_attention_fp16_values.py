"""Forward of selected attention with weights of 11 bits, and the low bits of its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops._triton.varlen import flatten, make_layout
from native_sparse_attention.ops.selected_attention.triton import fp16_values, op
from native_sparse_attention.ops.selected_attention.triton.fp16_values import convert_values
from tests.support.harness import make_sequences, place, run_eager, same_bits
from tests.support.problems import Extents, Heads, packed, whole
from tests.support.selected_attention_problems import make_inputs

HEADS = Heads(16, 1, 16, 16)
BLOCK_SIZE = 16
# Kinds of weights. The interpreter has no bfloat16, so float16 is converted there as bfloat16 is.
CONVERTED, BY_PRODUCTS, TWO_FACTORS = 'converted', 'converted, sums by products', 'two factors'
# Values above the limit of float16; the interpreter uses a smaller limit.
TOO_LARGE = {torch.float16: 1000.0, torch.bfloat16: 1e5}


@pytest.fixture(params=['query', 'union'])
def design(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[CONVERTED, BY_PRODUCTS, TWO_FACTORS])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(op, 'is_hopper', lambda _: request.param == BY_PRODUCTS)
    if request.param == TWO_FACTORS:
        return torch.float16
    if not is_interpreted():
        return torch.bfloat16
    monkeypatch.setattr(op, 'converts_values', lambda _: True)
    monkeypatch.setattr(fp16_values, 'LARGEST', tl.constexpr(100.0))
    return torch.float16


def make_problem(
    extents: Extents, dtype: torch.dtype, device: torch.device, *, num_selected: int = 3, heads: Heads = HEADS
) -> dict[str, Tensor]:
    num_blocks = extents.seqlen_k // BLOCK_SIZE + 1
    indices = torch.randint(-1, num_blocks, (extents.batch, extents.seqlen_q, heads.kv_heads, num_selected)).int()
    return make_inputs(extents, heads, device, indices, dtype=dtype)


def forward(
    tensors: dict[str, Tensor], extents: Extents, design: str, **settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp, and the float32 output before rounding, from its low bits."""
    q, k, v, indices = (tensors[name] for name in ('q', 'k', 'v', 'block_indices'))
    sequences: Sequences = make_sequences(extents, q.device)
    options = (BLOCK_SIZE, settings.get('causal', True), settings.get('scale', q.shape[3] ** -0.5))
    arguments = (q, k, v, indices, None, None, *flatten(sequences), *options, settings.get('softcap'))
    out, lse, low, _, _ = op._forward(*arguments, False, design, False, True)
    if out.dtype == torch.bfloat16:
        return out, lse, (out.float().view(torch.int32) + low.int()).view(torch.float32)
    return out, lse, out.float() + low.view(torch.float16).float() / 2048


def assert_exact(tensors: dict[str, Tensor], extents: Extents, design: str, **settings: Any) -> None:
    out, lse, exact = forward(tensors, extents, design, **settings)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    where = place(extents.where, out.device)
    gold = run_eager(selected_attention, wide, block_size=BLOCK_SIZE, **where, **settings)
    torch.testing.assert_close(out.float(), exact, rtol=torch.finfo(out.dtype).eps, atol=1e-7)
    torch.testing.assert_close(lse.double(), gold['out1'], rtol=2e-6, atol=2e-6)
    # A weight with eleven bits has a relative error of at most 2 ** -11, and the output moves by as much.
    sizes = run_eager(selected_attention, wide | {'v': wide['v'].abs()}, block_size=BLOCK_SIZE, **where, **settings)
    assert ((exact - gold['out0']).abs() <= 2**-11 * (sizes['out0'] + gold['out0'].abs()) + 1e-6).all()


@pytest.mark.quick
@pytest.mark.parametrize('settings', [{}, {'causal': False}, {'softcap': 2.0}, {'scale': -0.5}], ids=str)
@pytest.mark.parametrize(
    'extents',
    [whole(50), Extents(2, 9, 70, {'q_offset': 40}, [70, 70]), packed([5, 0, 37, 20], 2)],
    ids=['whole', 'rows', 'packed'],
)
def test_output(
    extents: Extents, settings: dict[str, Any], dtype: torch.dtype, design: str, device: torch.device
) -> None:
    assert_exact(make_problem(extents, dtype, device), extents, design, **settings)


def test_several_heads_and_larger_groups(dtype: torch.dtype, design: str, device: torch.device) -> None:
    heads = Heads(64, 2, 16, 24)
    assert_exact(make_problem(whole(40, batch=2), dtype, device, heads=heads), whole(40, batch=2), design)


def test_values_with_a_mean(dtype: torch.dtype, design: str, device: torch.device) -> None:
    """The divisor must be the sum of the rounded weights, or the mean of the values shows in the error."""
    mean = 64.0
    tensors = make_problem(whole(64), dtype, device)
    tensors['v'] = (tensors['v'] + mean).to(dtype)
    _, _, exact = forward(tensors, whole(64), design)
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    gold = run_eager(selected_attention, wide, block_size=BLOCK_SIZE)['out0']
    assert (exact - gold).abs().max() < 1e-3


def test_values_that_do_not_fit(dtype: torch.dtype, design: str, device: torch.device) -> None:
    """Some queries select blocks that do not fit; the bits of the other queries do not change."""
    extents = Extents(1, 24, 80, {'q_offset': 56}, [80])
    tensors = make_problem(extents, dtype, device)
    tensors['block_indices'] = torch.tensor([[0, 2, 3], [2, 0, 1], [3, 4, 5]]).int().repeat(8, 1).view(1, 24, 1, 3)
    tensors['block_indices'] = tensors['block_indices'].to(device)
    expected, _, _ = forward(tensors, extents, design)
    tensors['v'] = tensors['v'].clone()
    tensors['v'][:, 20:40:3] *= TOO_LARGE[dtype]
    assert_exact(tensors, extents, design)
    out, _, _ = forward(tensors, extents, design)
    assert same_bits(out[:, 2::3], expected[:, 2::3])


def test_values_that_do_not_fit_in_a_packed_sequence(dtype: torch.dtype, design: str, device: torch.device) -> None:
    extents = packed([40, 0, 60])
    tensors = make_problem(extents, dtype, device)
    tensors['v'] = tensors['v'].clone()
    tensors['v'][:, 45:60:3] *= TOO_LARGE[dtype]
    assert_exact(tensors, extents, design)


def test_large_logits(dtype: torch.dtype, design: str, device: torch.device) -> None:
    """float32 logits of a hundred million are far apart: weights are inexact, but finite."""
    tensors = make_problem(whole(36), dtype, device)
    tensors['q'], tensors['k'] = (torch.full_like(t, 2048) + t.round() * 16 for t in (tensors['q'], tensors['k']))
    for scale in (0.5, 1, 1.7, 2):
        out, lse, exact = forward(tensors, whole(36), design, scale=scale)
        assert out.isfinite().all()
        assert exact.isfinite().all()
        assert not lse.isnan().any()


@pytest.mark.parametrize('junk', ['too large', torch.nan, torch.inf])
@pytest.mark.parametrize('name', ['k', 'v'])
def test_keys_of_other_queries_change_nothing(
    name: str, junk: float | str, dtype: torch.dtype, design: str, device: torch.device
) -> None:
    extents = Extents(1, 14, 48, {'q_offset': 33}, [48])
    tensors = make_problem(extents, dtype, device)
    tensors['block_indices'] = torch.tensor([[0, 2], [1, 2]], device=device).int().repeat(7, 1).view(1, 14, 1, 2)
    expected = forward(tensors, extents, design)
    tensors[name] = tensors[name].clone()
    tensors[name][:, 20] = tensors[name][:, 47] = TOO_LARGE[dtype] if isinstance(junk, str) else junk
    for t, other in zip(forward(tensors, extents, design), expected, strict=True):
        queries = t if t.shape[1] == 14 else t.transpose(1, 2)
        others = other if t.shape[1] == 14 else other.transpose(1, 2)
        assert same_bits(queries[:, :14:2], others[:, :14:2])
    if junk != 'too large':
        assert not forward(tensors, extents, design)[0][:, 1::2].isfinite().all(-1).any()


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_queries_that_are_not_finite(junk: float, dtype: torch.dtype, design: str, device: torch.device) -> None:
    """One of them reads full blocks, one only its own block, one nothing; other queries of the tile keep their bits."""
    extents = Extents(1, 12, 48, {'q_offset': 36}, [48])
    tensors = make_problem(extents, dtype, device)
    tensors['block_indices'] = torch.tensor([0, 2], device=device).int().repeat(12, 1).view(1, 12, 1, 2)
    tensors['block_indices'][:, 5] = torch.tensor([2, -1])
    tensors['block_indices'][:, 9] = -1
    expected, _, _ = forward(tensors, extents, design)
    tensors['q'] = tensors['q'].clone()
    tensors['q'][:, [2, 5, 9]] = junk
    out, _, _ = forward(tensors, extents, design)
    others = [t for t in range(12) if t not in (2, 5)]
    assert same_bits(out[:, others], expected[:, others])
    assert not out[:, [2, 5]].isfinite().any()


@pytest.mark.skipif(is_interpreted(), reason='float16 has no queries so large that products may be infinite')
def test_queries_that_are_large(design: str, device: torch.device) -> None:
    extents = Extents(1, 12, 48, {'q_offset': 36}, [48])
    tensors = make_problem(extents, torch.bfloat16, device)
    tensors['k'] *= 2.0**-100
    expected, _, _ = forward(tensors, extents, design)
    tensors['q'] = tensors['q'].clone()
    tensors['q'][:, 3] *= 2.0**100
    out, _, _ = forward(tensors, extents, design)
    others = [t for t in range(12) if t != 3]
    assert same_bits(out[:, others], expected[:, others])
    assert out[:, 3].isfinite().all()


def test_the_future_changes_nothing(dtype: torch.dtype, design: str, device: torch.device) -> None:
    """Later values that do not fit, in the block of an earlier query, and later selections."""
    tensors = make_problem(whole(40), dtype, device)
    expected = forward(tensors, whole(40), design)
    changed = {name: t.clone() for name, t in tensors.items()}
    changed['v'][:, 22:] = TOO_LARGE[dtype]
    changed['block_indices'][:, 22:] = 1
    for t, other in zip(forward(changed, whole(40), design)[::2], expected[::2], strict=True):
        assert same_bits(t[:, :22], other[:, :22])


def test_converted_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only full blocks fit, if conversion changes no element by much of its token's largest element."""
    dtype = torch.float16 if is_interpreted() else torch.bfloat16
    monkeypatch.setattr(fp16_values, 'LARGEST', tl.constexpr(100.0 if is_interpreted() else 65504.0))
    extents = packed([20, 0, 50], 3)
    k, v = (torch.ones(1, extents.seqlen_k, 2, 24, dtype=dtype, device=device) for _ in 'kv')
    v[:, 41, 0, 3] = TOO_LARGE[dtype]  # the second block of the last sequence, 36 to 51
    k[:, 20, 1, 5] = torch.nan  # its first
    converted = convert_values(k, v, make_layout(make_sequences(extents, device)), BLOCK_SIZE)
    # Slots: 0 and 1 of the first sequence, which has 20 keys; from 20 // 16 + 2 = 3 on of the last one.
    fits, is_small = fp16_values.FITS.value, fp16_values.IS_SMALL.value
    flags = converted.flags.view(2, converted.num_slots)
    assert flags[0, [0, 3, 4, 5]].tolist() == [fits, fits, is_small, fits]
    assert flags[1, [0, 3, 4, 5]].tolist() == [fits, 0, fits, fits]
    assert flags[:, 1].tolist() == flags[:, 6].tolist() == [is_small] * 2
    assert converted.data[:, 20:36].eq(1).all()
    assert converted.data[:, 36:52].isfinite().all()
