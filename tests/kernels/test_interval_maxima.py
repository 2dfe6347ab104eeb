"""The forward kernel of interval attention weighs the middle of an interval relative to the largest logit at its ends.
It must notice if that is far from the largest logit in the middle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, window_attention
from native_sparse_attention.ops._triton.support import is_interpreted
from tests.support.problems import Heads, whole
from tests.support.window_attention_problems import make_inputs

HEADS = Heads(4, 2, 16, 16)
SEQLEN = 300
# Queries read all tokens before them; some keys in the middle, of which every other query has logits of `far`.
MIDDLE = slice(70, 90)
# Dtypes whose unmasked loop has a fixed reference; the interpreter computes bfloat16 wrongly.
DTYPES = [torch.float32] if is_interpreted() else [torch.float32, torch.bfloat16]


def make_tensors(far: float, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = make_inputs(whole(SEQLEN), HEADS, device)
    tensors['q'][..., 0] = 0
    tensors['q'][:, 1::2, :, 0] = 1
    tensors['k'][..., 0] = 0
    tensors['k'][:, MIDDLE, :, 0] = far * 4  # scaled by 16 ** -0.5
    return {name: t.to(dtype) for name, t in tensors.items()}


def run(tensors: dict[str, Tensor], backend: str, **settings: Any) -> tuple[Tensor, Tensor]:
    return window_attention(**tensors, window_size=(-1, 0), backend=backend, **settings)


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('far', [-200, -30, 30, 60, 200, 2000])
def test_logits_far_from_those_at_the_ends(far: float, dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_tensors(far, device, dtype)
    out, lse = run(tensors, 'triton')
    exact, exact_lse = run({name: t.double() for name, t in tensors.items()}, 'eager')
    # Large logits lose their last digits, and so do results.
    tolerance = (1e-5 if dtype == torch.float32 else 2e-3) + abs(far) * 2**-21
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('far', [60, 200, 2000])
def test_rows_beside_them_keep_their_bits(far: float, dtype: torch.dtype, device: torch.device) -> None:
    near, other = (run(make_tensors(logit, device, dtype), 'triton') for logit in (0, far))
    assert torch.equal(near[0][:, ::2], other[0][:, ::2])
    assert torch.equal(near[1][..., ::2], other[1][..., ::2])
    assert not torch.equal(near[0][:, 101::2], other[0][:, 101::2])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('junk', [torch.nan, torch.inf, 1e30])
def test_later_tokens_change_no_bit(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_tensors(30, device, dtype)
    expected = run(tensors, 'triton')
    for name, position in (('q', 200), ('k', 200), ('k', 249), ('v', 249), ('v', 298)):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][:, position:] = junk
        out, lse = run(changed, 'triton')
        assert torch.equal(out[:, :position], expected[0][:, :position])
        assert torch.equal(lse[..., :position], expected[1][..., :position])


@pytest.mark.parametrize('dtype', DTYPES)
def test_values_change_no_log_sum_exp(dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_tensors(30, device, dtype)
    _, expected = run(tensors, 'triton')
    tensors['v'][:, 10] = torch.nan
    out, lse = run(tensors, 'triton')
    assert out[:, 10:].isnan().all()
    assert torch.equal(lse, expected)


@pytest.mark.parametrize('size', [6e30, 8e30, 1e31])
def test_rows_whose_values_cancel_keep_their_bits(size: float, device: torch.device) -> None:
    """The sum of a row overflows, that of its tile does not."""
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(1, 150, 1, 16, generator=generator) * 0.1 for _ in range(2))
    v = torch.randn(1, 150, 1, 16, generator=generator)
    q[:, ::2, :, 0], q[:, 1::2, :, 0], k[..., 0] = 1, -1, 0
    k[:, :10, :, 0], k[:, 10:20, :, 0] = 60, -60
    v[:, :10, :, :2], v[:, 10:20, :, :2] = size, -size
    spoiled = v.clone()
    spoiled[:, 140:] = torch.nan
    first, second = (run({'q': q.to(device), 'k': k.to(device), 'v': x.to(device)}, 'triton') for x in (v, spoiled))
    assert first[0].isfinite().all()
    assert torch.equal(first[0][:, :140], second[0][:, :140])
    assert torch.equal(first[1][..., :140], second[1][..., :140])


def test_large_values_of_rows_that_are_far(device: torch.device) -> None:
    """Sums of values may overflow before sums of weights."""
    tensors = make_tensors(30, device, torch.float32)
    tensors['v'] *= 1e32
    exact, _ = run({name: t.double() for name, t in tensors.items()}, 'eager')
    torch.testing.assert_close(run(tensors, 'triton')[0].double() / 1e32, exact / 1e32, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('logit', [-200.0, -30.0, 0.0, 30.0, 200.0])
def test_intervals_without_ends(logit: float, device: torch.device) -> None:
    """Three queries that all read 64 compressed blocks: whole tiles."""
    q, k, v = torch.randn(1, 3, 2, 16), torch.randn(1, 64, 1, 16), torch.randn(1, 64, 1, 16)
    q[..., 0], k[..., 0] = 1, logit * 4
    tensors = [t.to(device) for t in (q, k, v)]
    settings: dict[str, Any] = {'block_size': 4, 'stride': 4, 'seqlen_k': 258, 'q_offset': 255}
    out, lse = compressed_attention(*tensors, backend='triton', **settings)
    exact, exact_lse = compressed_attention(*(t.double() for t in tensors), backend='eager', **settings)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)
