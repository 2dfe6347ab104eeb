"""Selected attention with soft caps, counts of blocks and segments: eager against a dense definition, and arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from tests.support.problems import Extents, Heads, assert_agree, make_qkv, normal, whole

HEADS = Heads(4, 2, 5, 3)
BLOCK_SIZE = 3


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_scale: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    softcap: float | None = None,
    block_counts: int | Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute all logits, with a mask that is filled entry by entry of a row of indices."""
    batch, seqlen, heads = q.shape[:3]
    index_heads = block_indices.shape[2]
    reads = torch.zeros(batch, heads, seqlen, k.shape[1], dtype=torch.bool)
    entries = torch.zeros(reads.shape, dtype=torch.int64)
    for b, t, head in ((b, t, head) for b in range(batch) for t in range(seqlen) for head in range(heads)):
        row = block_indices[b, t, head // (heads // index_heads)].tolist()
        if isinstance(block_counts, Tensor):
            count = int(block_counts[b, t, head // (heads // index_heads)])
        else:
            count = len(row) if block_counts is None else block_counts
        first, last = 0, k.shape[1]
        if segment_ids is not None:
            first, last = run_of(segment_ids[0].tolist(), t)
        position = t if segment_ids is not None else k.shape[1] - seqlen + t
        for entry in reversed(range(min(max(count, 0), len(row)))):
            for s in range(first, last):
                if (s - first) // BLOCK_SIZE == row[entry] and (s <= position or not causal):
                    reads[b, head, t, s] = True
                    entries[b, head, t, s] = entry
    group = heads // k.shape[2]
    k, v = (tensor.repeat_interleave(group, 2) for tensor in (k, v))
    logits = torch.einsum('bthd,bshd->bhts', q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if block_scale is not None:
        factors = block_scale.repeat_interleave(heads // index_heads, 2).transpose(1, 2)
        logits = logits * factors.gather(3, entries).where(reads, 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~reads, -torch.inf)
    some = reads.any(-1, keepdim=True)
    weights = torch.where(some, logits, 0).softmax(-1).where(some, 0)
    lse = torch.where(some, logits, 0).logsumexp(-1).where(some[..., 0], -torch.inf)
    return torch.einsum('bhts,bshd->bthd', weights, v), lse


def run_of(ids: list[int], t: int) -> tuple[int, int]:
    """Return the bounds of the run of equal ids around t; a run of padding has no keys."""
    first, last = t, t + 1
    while first and ids[first - 1] == ids[t]:
        first -= 1
    while last < len(ids) and ids[last] == ids[t]:
        last += 1
    return (first, last) if ids[t] >= 0 else (t, t)


def assert_is_dense(inputs: tuple[Tensor, ...], **settings: Any) -> None:
    """inputs: q, k, v, block_indices, and block_scale or nothing."""

    def selected(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, factors: Tensor | None = None) -> Any:
        return selected_attention(
            q, k, v, blocks, block_size=BLOCK_SIZE, block_scale=factors, **settings, backend='eager'
        )

    assert_agree(selected, lambda *tensors: dense(*tensors, **settings), *inputs)


def draw_indices(extents: Extents, index_heads: int, num_selected: int) -> Tensor:
    shape = (extents.batch, extents.seqlen_q, index_heads, num_selected)
    return torch.randint(-1, extents.seqlen_k // BLOCK_SIZE + 2, shape).int()


@given(
    extents=st.sampled_from([whole(7, batch=2), Extents(1, 4, 11, {}, [11])]),
    softcap=st.sampled_from([None, 0.3, 2, 50.0]),
    scale=st.sampled_from([None, 3.0, -0.7]),
    alone=st.booleans(),
    scaled=st.booleans(),
    causal=st.booleans(),
    counts=st.sampled_from([None, 'int', torch.int32, torch.int64]),
)
def test_definition(
    extents: Extents, softcap: float | None, scale: float | None, alone: bool, scaled: bool, causal: bool, counts: Any
) -> None:
    indices = draw_indices(extents, HEADS.heads if alone else HEADS.kv_heads, 4)
    tensors: tuple[Tensor, ...] = (*make_qkv(extents, HEADS), indices)
    if scaled:
        tensors = (*tensors, 1 + normal(*indices.shape))
    block_counts: int | Tensor | None = 2 if counts == 'int' else None
    if isinstance(counts, torch.dtype):
        block_counts = torch.randint(-2, 7, indices.shape[:3]).to(counts)
    settings: dict[str, Any] = {'softcap': softcap, 'block_counts': block_counts}
    assert_is_dense(tensors, scale=scale, causal=causal, **settings)


@pytest.mark.parametrize('softcap', [0.5, 4.0])
@pytest.mark.parametrize('share_group', [True, False])
def test_derivatives(softcap: float, share_group: bool) -> None:
    extents = whole(6)
    indices = draw_indices(extents, HEADS.kv_heads if share_group else HEADS.heads, 3)
    counts = torch.randint(0, 4, indices.shape[:3])
    leaves = [t.requires_grad_() for t in (*make_qkv(extents, HEADS), 1 + normal(*indices.shape))]

    def selected(q: Tensor, k: Tensor, v: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
        settings: dict[str, Any] = {'softcap': softcap, 'block_counts': counts, 'backend': 'eager'}
        out, lse = selected_attention(q, k, v, indices, block_size=BLOCK_SIZE, block_scale=factors, **settings)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(selected, leaves)


def test_a_cap_far_above_all_logits_changes_nothing() -> None:
    inputs = (*make_qkv(whole(9), HEADS), draw_indices(whole(9), 2, 3))
    capped, plain = (selected_attention(*inputs, block_size=BLOCK_SIZE, softcap=cap) for cap in (1e6, None))
    for result, expected in zip(capped, plain, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_overflowing_logits_are_capped(dtype: torch.dtype) -> None:
    """Products that overflow reach the cap, and a block below it keeps its weight."""
    q, k, v = (t.abs().to(dtype) for t in make_qkv(whole(6), Heads(1, 1, 4, 4)))
    k[:, :3] *= torch.finfo(dtype).max / 4
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 6, 1, 2)
    out, lse = selected_attention(1e3 * q, k, v, indices, block_size=3, softcap=3.0, scale=-1.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    torch.testing.assert_close(lse[0, 0, :3], torch.tensor([1.0, 2.0, 3.0], dtype=dtype).log() - 3)


@pytest.mark.parametrize('count', [-3, 0, 1, 3, 4, 99])
def test_one_count_equals_fewer_indices(count: int) -> None:
    indices = draw_indices(whole(9), 2, 4)
    inputs, factors = make_qkv(whole(9), HEADS), 1 + normal(1, 9, 2, 4)
    kept = max(0, count)
    expected = selected_attention(
        *inputs, indices[..., :kept], block_size=BLOCK_SIZE, block_scale=factors[..., :kept]
    )  # fmt: skip
    for counts in (count, torch.full((1, 9, 2), count), torch.tensor(count, dtype=torch.int32).expand(1, 9, 2)):
        settings: dict[str, Any] = {'block_scale': factors, 'block_counts': counts}
        results = selected_attention(*inputs, indices, block_size=BLOCK_SIZE, **settings)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    if count <= 0:
        assert expected[0].eq(0).all()
        assert expected[1].eq(-torch.inf).all()


@pytest.mark.parametrize('kind', ['int', 'tensor'])
def test_indices_behind_the_count_are_ignored(kind: str) -> None:
    """An index behind the count is not read, whatever its factor is, and the factor has no gradient."""
    q, k, v = make_qkv(whole(9), HEADS)
    indices = torch.tensor([1, 0, 1, 2], dtype=torch.int32).expand(1, 9, 2, 4)
    factors = torch.tensor([0.5, 2.0, torch.nan, torch.inf]).double().expand(1, 9, 2, 4).clone().requires_grad_()
    k[:, 6:], v[:, 6:] = torch.nan, torch.nan
    counts = 2 if kind == 'int' else torch.full((1, 9, 2), 2)
    out, lse = selected_attention(
        q, k, v, indices, block_size=BLOCK_SIZE, block_scale=factors, block_counts=counts
    )  # fmt: skip
    (out.sum() + lse.sum()).backward()
    assert out.isfinite().all()
    assert factors.grad is not None
    assert factors.grad[..., 2:].eq(0).all()
    assert factors.grad[..., 1].ne(0).any()


SEGMENTS = {
    'one': [5] * 12,
    'runs': [0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 1, 1],
    'an id twice': [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
    'padding': [-1, 2, 2, 2, 2, -1, -4, 0, 0, 0, 0, -2],
    'padding alone': [-1] * 12,
}


@pytest.mark.parametrize('ids', SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize('softcap', [None, 1.5])
def test_segments(ids: list[int], softcap: float | None) -> None:
    segment_ids = torch.tensor([ids], dtype=torch.int32 if softcap else torch.int64)
    indices = draw_indices(whole(12), 2, 3)
    inputs = (*make_qkv(whole(12), HEADS), indices, 1 + normal(*indices.shape))
    counts = torch.randint(0, 5, (1, 12, 2))
    assert_is_dense(inputs, softcap=softcap, segment_ids=segment_ids, block_counts=counts)


@pytest.mark.parametrize('softcap', [None, 2.0])
def test_padding_is_neither_read_nor_differentiated(softcap: float | None) -> None:
    segment_ids = torch.tensor([SEGMENTS['padding']])
    padding = segment_ids[0] < 0
    leaves = make_qkv(whole(12), HEADS)
    for leaf in leaves:
        leaf[:, padding] = torch.nan
        leaf.requires_grad_()
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 12, 2, 2)
    settings: dict[str, Any] = {'block_size': BLOCK_SIZE, 'segment_ids': segment_ids, 'softcap': softcap}
    out, lse = selected_attention(*leaves, indices, **settings)
    assert out[:, padding].eq(0).all()
    assert lse[..., padding].eq(-torch.inf).all()
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad[:, padding].eq(0).all()
        assert leaf.grad.isfinite().all()


COUNTS = torch.ones(1, 4, 2, dtype=torch.int32)
IDS = torch.zeros(1, 4, dtype=torch.int32)
BORDERS = torch.tensor([0, 4], dtype=torch.int32)
# Wrong arguments, the error, and valid arguments.
BAD: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({'softcap': 0}, r'softcap is 0, but must be a finite number above 0, or None', {'softcap': 1}),
    ({'softcap': -1.0}, r'softcap is -1.0, but must be', {'softcap': 1e-3}),
    ({'softcap': float('inf')}, r'softcap is inf, but must be', {'softcap': 1e30}),
    ({'softcap': float('nan')}, r'softcap is nan, but must be', {'softcap': None}),
    ({'softcap': True}, r'softcap is True, but must be', {'softcap': 1.0}),
    ({'softcap': '30'}, r"softcap is '30', but must be", {'softcap': 30}),
    ({'block_counts': 1.5}, r'block_counts is 1.5, but must be an int, an integer tensor or None', {'block_counts': 1}),
    ({'block_counts': True}, r'block_counts is True, but must be an int', {'block_counts': 0}),
    ({'block_counts': [1]}, r'block_counts is \[1\], but must be an int', {'block_counts': -1}),
    (
        {'block_counts': COUNTS.float()},
        r'block_counts has dtype torch.float32, but must be int32 or int64',
        {'block_counts': COUNTS.long()},
    ),
    (
        {'block_counts': COUNTS[..., None]},
        r'block_counts has shape \(1, 4, 2, 1\), but must have \(1, 4, 2\)',
        {'block_counts': COUNTS},
    ),
    ({'block_counts': COUNTS.repeat(1, 1, 2)}, r'has shape \(1, 4, 4\), but must have \(1, 4, 2\)', {}),
    ({'block_counts': COUNTS.to('meta')}, r'block_counts is on meta, but q is on cpu', {}),
    ({'segment_ids': IDS.float()}, r'segment_ids has dtype torch.float32, but must be', {'segment_ids': IDS.long()}),
    ({'segment_ids': IDS[0]}, r'segment_ids has shape \(4,\), but must have \(1, 4\)', {'segment_ids': IDS}),
    (
        {'segment_ids': IDS, 'cu_seqlens': BORDERS},
        r'cu_seqlens is given, but cannot be combined with segment_ids',
        {'cu_seqlens': BORDERS},
    ),
    (
        {'segment_ids': IDS, 'seqlens_k': BORDERS[1:]},
        r'seqlens_k is given, but cannot be combined with segment_ids',
        {'seqlens_k': BORDERS[1:]},
    ),
    (
        {'segment_ids': IDS, 'q_offset': 0},
        r'q_offset is given, but cannot be combined with segment_ids',
        {'q_offset': 0},
    ),
]


@pytest.mark.parametrize(('bad', 'message', 'good'), BAD, ids=lambda value: value if isinstance(value, str) else '')
def test_bad_arguments(bad: dict[str, Any], message: str, good: dict[str, Any]) -> None:
    inputs = (*make_qkv(whole(4), HEADS), torch.zeros(1, 4, 2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=message) as error:
        selected_attention(*inputs, block_size=2, **bad)
    assert '\n' not in str(error.value)
    selected_attention(*inputs, block_size=2, **good)


def test_segments_need_one_row_of_as_many_keys() -> None:
    inputs = (*make_qkv(whole(4, batch=2), HEADS), torch.zeros(2, 4, 2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r'q has batch size 2, but must have 1 where segment_ids is given'):
        selected_attention(*inputs, block_size=2, segment_ids=IDS.repeat(2, 1))
    q, k, v = make_qkv(Extents(1, 4, 6, {}, [6]), HEADS)
    with pytest.raises(ValueError, match=r'k has 6 tokens, but must have 4, as q, where segment_ids is given'):
        selected_attention(q, k, v, inputs[3][:1], block_size=2, segment_ids=IDS)


@pytest.mark.full
@pytest.mark.parametrize('scaled', [True, False])
@pytest.mark.parametrize('softcap', [0.5, 20.0])
def test_flex(softcap: float, scaled: bool) -> None:
    extents = whole(20, batch=2)
    indices = draw_indices(extents, 2, 3)
    settings: dict[str, Any] = {'softcap': softcap, 'block_counts': torch.randint(0, 4, indices.shape[:3])}
    if scaled:
        settings['block_scale'] = 1 + normal(*indices.shape)
    inputs = (*make_qkv(extents, HEADS), indices)
    flex, eager = (
        selected_attention(*inputs, block_size=BLOCK_SIZE, **settings, backend=name) for name in ('flex', 'eager')
    )
    for result, expected in zip(flex, eager, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
