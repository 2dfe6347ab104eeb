"""The forward by query tile weighs full blocks relative to the row's largest logit among the first keys and the keys up
to the tile. It must notice where that logit is far from the largest logit of a block.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.selected_attention.triton import op
from tests.kernels.test_selected_attention_fp16_values import forward
from tests.support.problems import Extents, Heads, whole
from tests.support.selected_attention_problems import make_inputs

HEADS = Heads(16, 1, 16, 16)
BLOCK_SIZE, SEQLEN = 16, 160
# A block that all later queries read completely. Every other query has logits of `far` there.
FAR_BLOCK = 3
AFTER = (FAR_BLOCK + 1) * BLOCK_SIZE


@pytest.fixture(autouse=True)
def converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert float16 values in the interpreter, which has no bfloat16."""
    if is_interpreted():
        monkeypatch.setattr(op, 'converts_values', lambda _: True)


def make_tensors(far: float, device: torch.device, *, chosen: tuple[int, ...] = (0, FAR_BLOCK)) -> dict[str, Tensor]:
    """Return tensors in which every query selects its own block and `chosen`."""
    torch.manual_seed(0)
    own = torch.arange(SEQLEN)[:, None] // BLOCK_SIZE
    indices = torch.cat((torch.tensor(chosen).expand(SEQLEN, -1), own), 1).sort(1).values
    dtype = torch.float16 if is_interpreted() else torch.bfloat16
    tensors = make_inputs(whole(SEQLEN), HEADS, device, indices[None, :, None].int().contiguous(), dtype=dtype)
    tensors['q'][..., 0] = 0
    tensors['q'][:, 1::2, :, 0] = 1
    tensors['k'][..., 0] = 0
    tensors['k'][:, FAR_BLOCK * BLOCK_SIZE + 4 : AFTER - 4, :, 0] = far * 4  # scaled by 16 ** -0.5
    return tensors


def run(tensors: dict[str, Tensor], low_bits: bool, **settings: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp. low_bits: the float32 output before rounding, from converted values."""
    if low_bits:
        _, lse, exact = forward(tensors, whole(SEQLEN), 'union', **settings)
        return exact, lse
    arguments: dict[str, Any] = {**tensors, **settings}
    with torch.no_grad():
        return selected_attention(**arguments, block_size=BLOCK_SIZE, backend='triton', _design='union')


def assert_right(tensors: dict[str, Tensor], low_bits: bool, size: float = 0.0) -> None:
    wide: dict[str, Any] = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    exact, exact_lse = selected_attention(**wide, block_size=BLOCK_SIZE, backend='eager')
    out, lse = run(tensors, low_bits)
    # Large logits lose their last digits, and so do results.
    tolerance = (2**-10 if low_bits else 2**-6) + size * 2**-21
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('far', [-200, -30, 5, 12, 30, 60, 200])
def test_logits_far_from_those_at_the_ends(far: float, low_bits: bool, device: torch.device) -> None:
    assert_right(make_tensors(far, device), low_bits, abs(far))


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('chosen', [(), (2,), (FAR_BLOCK,), (2, FAR_BLOCK, 5)], ids=str)
@pytest.mark.parametrize('far', [0, 60])
def test_without_the_first_block(far: float, chosen: tuple[int, ...], low_bits: bool, device: torch.device) -> None:
    assert_right(make_tensors(far, device, chosen=chosen), low_bits, far)


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('logit', [-11, -30, -200])
def test_precision_of_rows_without_a_reference(logit: float, low_bits: bool, device: torch.device) -> None:
    """Rows that read neither the first block nor their own have logits far below 0.

    Errors are at most those of eager in the same dtype, and near 0 for the output before rounding.
    """
    chosen = tuple(range(1, 8))
    tensors = make_tensors(0, device, chosen=chosen)
    tensors['block_indices'][..., -1] = -1
    tensors['q'][..., 0], tensors['q'][..., 1:] = 1, tensors['q'][..., 1:] * 0.01
    tensors['k'][..., 0] = logit * 4
    tensors['v'] = (1 + tensors['v'] * 0.01).to(tensors['v'].dtype)
    tensors = {name: t[:, 128:] if name in ('q', 'block_indices') else t for name, t in tensors.items()}
    wide: dict[str, Any] = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    where: dict[str, Any] = {'block_size': BLOCK_SIZE, 'q_offset': 128}
    exact, exact_lse = selected_attention(**wide, **where, backend='eager')
    narrow: dict[str, Any] = {**tensors}
    eager, _ = selected_attention(**narrow, **where, backend='eager')
    extents = Extents(1, SEQLEN - 128, SEQLEN, {'q_offset': 128}, [SEQLEN])
    if low_bits:
        _, lse, out = forward(tensors, extents, 'union')
        limit = 2.0**-16
    else:
        with torch.no_grad():
            out, lse = selected_attention(**narrow, **where, backend='triton', _design='union')
        limit = 2 * (eager.double() - exact).abs().max().item()
    assert (out.double() - exact).abs().max() <= limit
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('low_bits', [False, True])
def test_the_first_keys_are_far_above_the_others(low_bits: bool, device: torch.device) -> None:
    """The first keys have large logits, like an attention sink; some queries do not read them."""
    tensors = make_tensors(0, device)
    tensors['k'][:, 0, :, 0] = 240
    assert_right(tensors, low_bits, 60)
    tensors['block_indices'][:, ::4, :, 0] = -1
    assert_right(tensors, low_bits, 60)


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('far', [60, 200])
def test_other_rows_keep_their_bits(far: float, low_bits: bool, device: torch.device) -> None:
    near, other = (run(make_tensors(logit, device), low_bits) for logit in (0, far))
    assert torch.equal(near[0][:, ::2], other[0][:, ::2])
    assert torch.equal(near[1][..., ::2], other[1][..., ::2])
    assert not torch.equal(near[0][:, AFTER + 1 :: 2], other[0][:, AFTER + 1 :: 2])


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('taken', [0, FAR_BLOCK])
def test_selections_of_other_queries_change_no_bit(
    taken: int, causal: bool, low_bits: bool, device: torch.device
) -> None:
    tensors = make_tensors(5, device)
    changed = {**tensors, 'block_indices': tensors['block_indices'].clone()}
    rows = changed['block_indices'][:, 1::2]
    rows[rows == taken] = 1 if causal else SEQLEN // BLOCK_SIZE - 1  # behind the own block
    expected, results = (run(t, low_bits, causal=causal) for t in (tensors, changed))
    assert torch.equal(results[0][:, ::2], expected[0][:, ::2])
    assert torch.equal(results[1][..., ::2], expected[1][..., ::2])
    assert not torch.equal(results[0][:, AFTER + 1 :: 2], expected[0][:, AFTER + 1 :: 2])


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('junk', [torch.nan, 3e4])
def test_unread_first_keys_change_no_bit(junk: float, low_bits: bool, device: torch.device) -> None:
    tensors = make_tensors(5, device, chosen=(FAR_BLOCK,))
    changed = {**tensors, 'k': tensors['k'].clone()}
    changed['k'][:, :BLOCK_SIZE] = junk
    expected, results = run(tensors, low_bits), run(changed, low_bits)
    assert torch.equal(results[0][:, BLOCK_SIZE:], expected[0][:, BLOCK_SIZE:])
    assert torch.equal(results[1][..., BLOCK_SIZE:], expected[1][..., BLOCK_SIZE:])


@pytest.mark.parametrize('low_bits', [False, True])
@pytest.mark.parametrize('junk', [torch.nan, torch.inf, 1e4])
def test_later_tokens_change_no_bit(junk: float, low_bits: bool, device: torch.device) -> None:
    tensors = make_tensors(5, device)
    expected = run(tensors, low_bits)
    for position in (AFTER + 1, AFTER + 15, SEQLEN - 1):
        changed = {name: t.clone() for name, t in tensors.items()}
        for name in 'qkv':
            changed[name][:, position:] = junk
        out, lse = run(changed, low_bits)
        assert torch.equal(out[:, :position], expected[0][:, :position])
        assert torch.equal(lse[..., :position], expected[1][..., :position])
