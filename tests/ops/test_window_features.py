"""Features of window attention in eager, against dense attention written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core import random as _random
from native_sparse_attention.ops import _eager, window_attention
from native_sparse_attention.testing import ROW_LIMITS, outputs_and_gradients, row_errors
from tests.definition.definition import locate_queries
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    drawn_extents,
    drawn_heads,
    make_qkv,
    normal,
    packed,
    whole,
)

WINDOWS = [(3, 0), (-1, 0), (2, 3), (0, -1), (-1, -1)]
SEED = 2**40 + 7
MASK32 = 2**32 - 1


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    window_size: tuple[int, int],
    scale: float | None = None,
    softcap: float | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    causal: bool = True,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """Compute a softmax over the whole row in float64, from tables of queries by keys, with dropout per weight."""
    (batch, seqlen_q, heads, head_dim), (seqlen_k, kv_heads) = q.shape, k.shape[1:3]
    read = torch.zeros(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    left, right = window_size
    for query in locate_queries(q, seqlen_k, **where):
        for key in range(query.num_keys):
            distance = key - query.position
            inside = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            read[query.batch, 0, query.index, query.first_key + key] = inside and not (causal and distance > 0)
    if segment_ids is not None:
        of_query, of_key = segment_ids[0][:, None, :, None], segment_ids[1][:, None, None]
        read = read & (of_query == of_key) & (of_query >= 0)
    for allowed in (None if mask is None else mask[:, None, None], attn_mask):
        read = read if allowed is None else read & allowed
    if bias is not None:
        read = read & (bias != -torch.inf)
        bias = bias.masked_fill(~read, 0)
    # Keys that no query reads hold NaN.
    q, k, v = (t.double().nan_to_num() for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    logits = torch.einsum('bthd,bshd->bhts', q, k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits if bias is None else logits + bias).masked_fill(~read, -torch.inf)
    columns = torch.full((heads, 1), -torch.inf).double() if sinks is None else sinks.double().view(heads, -1)
    columns = columns[:, None].expand(batch, -1, seqlen_q, -1)
    logits = torch.cat((logits, columns), -1)
    # For a row without a logit the functions and their gradients are NaN.
    empty = (logits == -torch.inf).all(-1)
    logits = logits.masked_fill(empty[..., None], 0)
    lse = logits.logsumexp(-1).masked_fill(empty, -torch.inf)
    weights = logits.softmax(-1)[..., :seqlen_k].masked_fill(~read, 0)
    if dropout_p:
        places = itertools.product(*map(range, weights.shape))
        words = [philox_by_hand(dropout_seed, (s, t, h, b)) for b, h, t, s in places]
        kept = torch.tensor(words, dtype=torch.int64).view(weights.shape) >= round(dropout_p * 2**32)
        weights = weights * kept / (1 - dropout_p)
    return torch.einsum('bhts,bshd->bthd', weights, v), lse


def philox_by_hand(seed: int, counter: tuple[int, ...]) -> int:
    """Compute the first word of Philox4x32-10 in Python's integers."""
    c, key = list(counter), [seed & MASK32, seed >> 32 & MASK32]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ key[0], high & MASK32, low >> 32 ^ c[3] ^ key[1], low & MASK32]
        key = [(key[0] + 0x9E3779B9) & MASK32, (key[1] + 0xBB67AE85) & MASK32]
    return c[0]


def segments(extents: Extents, heads: Heads) -> dict[str, Any]:
    shapes = ((extents.batch, extents.seqlen_q), (extents.batch, extents.seqlen_k))
    return {'segment_ids': tuple(torch.randint(-1, 2, shape) for shape in shapes)}


def mask(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'mask': torch.rand(extents.batch, extents.seqlen_k) < 0.7}


def make_table(extents: Extents, heads: Heads) -> Tensor:
    """Return `[B or 1, HQ or 1, T, S]`."""
    rows, columns = torch.randint(2, (2,)).tolist()
    shape = (extents.batch if rows else 1, heads.heads if columns else 1, extents.seqlen_q, extents.seqlen_k)
    return normal(*shape)


def bias(extents: Extents, heads: Heads) -> dict[str, Any]:
    values = make_table(extents, heads)
    return {'bias': values.masked_fill(torch.rand_like(values) < 0.2, -torch.inf)}


def attn_mask(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'attn_mask': make_table(extents, heads) < 0.6}


def softcap(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'softcap': 0.9}


def sinks(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'sinks': normal(heads.heads)}


def several_sinks(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'sinks': normal(heads.heads, 3)}


def dropout(extents: Extents, heads: Heads) -> dict[str, Any]:
    return {'dropout_p': 0.4, 'dropout_seed': SEED}


Feature = Callable[[Extents, Heads], dict[str, Any]]
FEATURES: list[Feature] = [segments, mask, bias, attn_mask, softcap, sinks, several_sinks, dropout]
HEADS = Heads(4, 2, 3, 5)
TABLES = ('bias', 'sinks')


def everything(extents: Extents, heads: Heads) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for feature in FEATURES:
        settings |= feature(extents, heads)
    return settings


def assert_is_dense(extents: Extents, heads: Heads, features: dict[str, Any], **settings: Any) -> None:
    """Assert outputs and gradients, those of bias and sinks included."""
    settings = {**features, **extents.where, **settings}
    names = [name for name in TABLES if name in settings]
    tensors = [settings.pop(name) for name in names]

    def call(function: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return function(*inputs[:3], **dict(zip(names, inputs[3:], strict=True)), **settings)

    assert_agree(
        lambda *inputs: call(window_attention, *inputs),
        lambda *inputs: call(dense, *inputs),
        *make_qkv(extents, heads),
        *tensors,
    )


@pytest.mark.parametrize('feature', FEATURES)
@hypothesis.settings(max_examples=15)
@given(drawn_extents(max_seqlen=9), drawn_heads(), st.sampled_from(FEATURES), st.sampled_from(WINDOWS))
def test_definition_of_pairs(
    feature: Feature, extents: Extents, heads: Heads, other: Feature, window_size: tuple[int, int]
) -> None:
    features = feature(extents, heads) | other(extents, heads)
    assert_is_dense(extents, heads, features, window_size=window_size, causal=window_size[1] == 0)


@given(drawn_extents(max_seqlen=9), drawn_heads(), st.sampled_from(WINDOWS), st.sampled_from([None, 0.7]))
def test_definition_of_everything(
    extents: Extents, heads: Heads, window_size: tuple[int, int], scale: float | None
) -> None:
    features = everything(extents, heads)
    assert_is_dense(extents, heads, features, window_size=window_size, causal=window_size[1] == 0, scale=scale)


@pytest.mark.parametrize('heads', [Heads(2, 1, 256, 256), Heads(2, 2, 256, 40), Heads(3, 1, 16, 256)])
def test_long_heads(heads: Heads) -> None:
    extents = Extents(2, 5, 7, {}, [7, 7])
    assert_is_dense(extents, heads, everything(extents, heads), window_size=(4, 0))


def differentiable(features: dict[str, Any]) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """Return a function of q, k, v, bias and sinks whose log-sum-exp is finite, and its inputs."""
    extents = Extents(2, 4, 6, {}, [6, 6])
    names = [name for name in TABLES if name in features]
    rest = {name: value for name, value in features.items() if name not in names}

    def function(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(names, tables, strict=True))
        out, lse = window_attention(q, k, v, window_size=(3, 0), **given, **rest)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    inputs = [*make_qkv(extents, Heads(4, 2, 3, 2)), *(features[name] for name in names)]
    return function, [t.requires_grad_() for t in inputs]


@pytest.mark.full
@pytest.mark.parametrize('feature', [*FEATURES, everything])
def test_derivatives(feature: Feature) -> None:
    features = feature(Extents(2, 4, 6, {}, [6, 6]), Heads(4, 2, 3, 2))
    if 'bias' in features:
        features['bias'].nan_to_num_(neginf=0.0)  # finite differences of -inf are NaN
    function, inputs = differentiable(features)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize('feature', [*FEATURES, everything])
def test_small_chunks_give_the_same(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    for extents in (whole(13, batch=2), packed([0, 6, 1, 4], 1)):
        features = feature(extents, HEADS)
        tensors = dict(zip('qkv', make_qkv(extents, HEADS), strict=True))
        tensors |= {name: features.pop(name) for name in TABLES if name in features}

        def attend(**inputs: Any) -> tuple[Tensor, Tensor]:
            return window_attention(**inputs, **features, **extents.where, window_size=(4, 0))  # noqa: B023

        expected = outputs_and_gradients(attend, tensors)
        for elements in (1, 300):
            with monkeypatch.context() as patch:
                patch.setattr(_eager, 'CHUNK_ELEMENTS', elements)
                results = outputs_and_gradients(attend, tensors)
            for name in expected:
                torch.testing.assert_close(results[name], expected[name], rtol=1e-11, atol=1e-11)


def test_segments_are_sequences() -> None:
    extents = packed([3, 5, 4])
    inputs = make_qkv(extents, HEADS)
    ids = torch.tensor([[7] * 3 + [0] * 5 + [2] * 4])
    positions: list[dict[str, Any]] = [extents.where, {'segment_ids': ids}]
    results = [window_attention(*inputs, window_size=(2, 0), **where) for where in positions]
    for result, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    both = window_attention(*inputs, window_size=(2, 0), segment_ids=(ids.int(), ids.int()), mask=ids > -1)
    assert both[0].equal(results[1][0])


def test_large_and_negative_ids() -> None:
    inputs = make_qkv(whole(4), HEADS)
    ids = torch.tensor([[-(2**40), 2**31 - 1, -1, 2**31 - 1]])
    out, lse = window_attention(*inputs, window_size=(-1, 0), segment_ids=ids)
    expected, _ = window_attention(*(t[:, 1::2] for t in inputs), window_size=(-1, 0))
    torch.testing.assert_close(out[:, 1::2], expected, rtol=1e-12, atol=1e-12)
    assert not out[:, ::2].any()
    assert (lse[..., ::2] == -torch.inf).all()


def test_sinks_are_keys_without_values() -> None:
    """A sink of logit c equals a key whose product with every query is c and whose value is 0."""
    q, k, v = make_qkv(whole(6), Heads(2, 2, 3, 5))
    logits = normal(2)
    ones = torch.ones(1, 6, 2, 1).double()
    keys = torch.cat((torch.zeros(1, 1, 2, 3).double(), k), 1)
    of_sink = torch.cat((logits.view(1, 1, 2, 1), 0 * ones), 1)
    values = torch.cat((torch.zeros(1, 1, 2, 5).double(), v), 1)
    expected, expected_lse = window_attention(
        torch.cat((q, ones), 3), torch.cat((keys, of_sink), 3), values, window_size=(-1, 0), scale=1.0
    )
    out, lse = window_attention(q, k, v, window_size=(-1, 0), scale=1.0, sinks=logits)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('shape', [(4, 0), (4,), (4, 2)])
def test_sinks_of_no_weight(shape: tuple[int, ...]) -> None:
    tensors: dict[str, Any] = dict(zip('qkv', make_qkv(whole(6), HEADS), strict=True))
    tensors['sinks'] = torch.full(shape, -torch.inf)
    results = outputs_and_gradients(lambda **t: window_attention(**t, window_size=(3, 0)), tensors)
    assert not results.pop('grad of sinks').any()
    del tensors['sinks']
    for name, expected in outputs_and_gradients(lambda **t: window_attention(**t, window_size=(3, 0)), tensors).items():
        torch.testing.assert_close(results[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sinks_of_any_dtype(dtype: torch.dtype) -> None:
    q, k, v = (t.float() for t in make_qkv(whole(6), HEADS))
    given = normal(4, 2).to(dtype).requires_grad_()
    out, lse = window_attention(q, k, v, window_size=(3, 0), sinks=given)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    (out.sum() + lse.sum()).backward()
    assert given.grad is not None
    assert given.grad.dtype == dtype
    assert given.grad.all()


UNREAD: dict[str, dict[str, Any]] = {
    'segments': {'segment_ids': (torch.tensor([[0, -1, 1, -1, 0]]), torch.tensor([[0, -1, 2, -2, 0, 0]]))},
    'mask': {'mask': torch.zeros(1, 6, dtype=torch.bool)},
    'attn_mask': {'attn_mask': torch.zeros(1, 1, 5, 6, dtype=torch.bool)},
    'bias': {'bias': torch.full((1, 1, 5, 6), -torch.inf).double()},
}


@pytest.mark.parametrize('with_sinks', [False, True])
@pytest.mark.parametrize('name', UNREAD)
def test_rows_with_nothing_to_read(name: str, with_sinks: bool) -> None:
    settings = dict(UNREAD[name])
    tensors = dict(zip('qkv', make_qkv(Extents(1, 5, 6, {}, [6]), HEADS), strict=True))
    if name == 'bias':
        tensors['bias'] = settings.pop('bias')
    given = normal(4)
    if with_sinks:
        tensors['sinks'] = given
    settings |= {'softcap': 2.0, 'dropout_p': 0.3, 'dropout_seed': 1, 'window_size': (-1, -1), 'causal': False}
    grads = [normal(1, 5, 4, 5), normal(1, 4, 5)]
    results = outputs_and_gradients(lambda **t: window_attention(**t, **settings), tensors, grads)
    rows = torch.tensor([1, 2, 3]) if name == 'segments' else torch.arange(5)
    assert not results['out0'][:, rows].any()
    assert not results['grad of q'][:, rows].any()
    assert all(t.isfinite().all() for n, t in results.items() if n != 'out1')
    lse = results['out1'][..., rows]
    assert lse.equal(given[None, :, None].expand_as(lse) if with_sinks else torch.full_like(lse, -torch.inf))
    if name == 'segments':
        assert not results['grad of k'][:, 1:4].any()
    else:
        assert not any(results[f'grad of {n}'].any() for n in ('k', 'v', *(['bias'] if name == 'bias' else [])))
        if with_sinks:
            torch.testing.assert_close(results['grad of sinks'], grads[1].sum((0, 2)))


@pytest.mark.parametrize('poison', [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize('name', ['segments', 'mask', 'attn_mask', 'bias'])
def test_unread_keys_affect_no_query(name: str, poison: float) -> None:
    """Keys 2 and 3 and entries of bias outside the window are not read."""
    given: dict[str, Any] = {
        'segments': {'segment_ids': torch.tensor([[0, 0, 1, -1, 0, 0, 0]])},
        'mask': {'mask': torch.tensor([[True, True, False, False, True, True, True]])},
        'attn_mask': {'attn_mask': (torch.arange(7) // 2 != 1).expand(1, 1, 7, 7)},
        'bias': {'bias': normal(1, 4, 7, 7).masked_fill(torch.arange(7) // 2 == 1, -torch.inf)},
    }[name]
    tensors: dict[str, Any] = (
        dict(zip('qkv', make_qkv(whole(7), HEADS), strict=True)) | {'bias': normal(1, 4, 7, 7)} | given
    )
    settings: dict[str, Any] = {n: tensors.pop(n) for n in ('segment_ids', 'mask', 'attn_mask') if n in tensors}
    settings |= {'softcap': 2.0, 'sinks': normal(4), 'dropout_p': 0.3, 'dropout_seed': 1, 'window_size': (4, 0)}
    expected = outputs_and_gradients(lambda **t: window_attention(**t, **settings), tensors)
    poisoned = {n: t.clone() for n, t in tensors.items()}
    for n in 'kv':
        poisoned[n][:, 2:4] = poison
    poisoned['bias'].masked_fill_(torch.ones(7, 7, dtype=torch.bool).triu(1), poison)
    results = outputs_and_gradients(lambda **t: window_attention(**t, **settings), poisoned)
    # With segments query 2 reads key 2, its own.
    rows = torch.tensor([0, 1, 3, 4, 5, 6])
    for n in ('out0', 'out1', 'grad of q', 'grad of bias'):
        dim = {'out0': 1, 'out1': 2, 'grad of q': 1, 'grad of bias': 2}[n]
        assert results[n].index_select(dim, rows).equal(expected[n].index_select(dim, rows)), n
    others = torch.tensor([0, 1, 3, 4, 5, 6]) if name == 'segments' else torch.arange(7)
    for n in ('grad of k', 'grad of v'):
        assert results[n].index_select(1, others).equal(expected[n].index_select(1, others)), n


def test_not_finite_where_it_is_read() -> None:
    tensors: dict[str, Any] = dict(zip('qkv', make_qkv(whole(7), HEADS), strict=True))
    tensors['k'][:, 2, 0] = torch.nan
    allowed = torch.ones(1, 4, 7, 7, dtype=torch.bool)
    allowed[:, 0, 4] = False
    out, lse = window_attention(**tensors, window_size=(3, 0), attn_mask=allowed, softcap=1.0, sinks=normal(4))
    reads = torch.zeros(4, 7, dtype=torch.bool)
    reads[:2, 2:6] = True
    reads[0, 4] = False
    assert out[0].isnan().all(-1).T.equal(reads)
    assert lse[0].isnan().equal(reads)


@pytest.mark.parametrize('expand', [False, True])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_bias_is_added_up_where_it_is_shared(dtype: torch.dtype, expand: bool) -> None:
    extents = whole(9, batch=2)
    q, k, v = make_qkv(extents, HEADS)
    shared = normal(1, 1, 9, 9).to(dtype).requires_grad_()
    repeated = shared.detach().repeat(2, 4, 1, 1).requires_grad_()
    given = shared.expand(2, 4, -1, -1) if expand else shared
    grads = (normal(2, 9, 4, 5), normal(2, 4, 9))
    for one in (given, repeated):
        torch.autograd.backward(window_attention(q, k, v, window_size=(4, 0), bias=one), grads)
    assert shared.grad is not None
    assert repeated.grad is not None
    assert shared.grad.shape == (1, 1, 9, 9)
    assert shared.grad.dtype == dtype
    torch.testing.assert_close(shared.grad, repeated.grad.sum((0, 1), keepdim=True))


def test_bias_of_any_strides() -> None:
    extents = whole(9, batch=2)
    inputs = make_qkv(extents, HEADS)
    wide = normal(2, 4, 20, 9)
    transposed, sliced = wide.mT[..., 3:12].mT, wide[:, :, ::2][:, :, 1:10]
    for table in (transposed, sliced):
        results = [window_attention(*inputs, window_size=(4, 0), bias=b)[0] for b in (table, table.contiguous())]
        assert results[0].equal(results[1])


def test_known_random_numbers() -> None:
    """Values of Random123, the authors' library."""
    for word, counter, expected in (
        (0, 0, 0x6627E8D5),
        (-1, MASK32, 0x408F276D),
    ):
        numbers = _random.philox(torch.tensor([word]), *[torch.tensor([counter])] * 4)
        assert int(numbers) == expected == philox_by_hand(word & (2**64 - 1), (counter,) * 4)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype: torch.dtype) -> None:
    extents, heads = whole(150, batch=2), Heads(4, 2, 16, 8)
    features = everything(extents, heads)
    features['bias'] = normal(1, 4, 150, 150).to(dtype)
    tensors = dict(zip('qkv', make_qkv(extents, heads), strict=True)) | {n: features.pop(n) for n in TABLES}
    tensors = {n: t.to(dtype) for n, t in tensors.items()}
    grads = [normal(2, 150, 4, 8).to(dtype), normal(2, 4, 150).to(dtype)]

    def attend(**inputs: Any) -> tuple[Tensor, Tensor]:
        return window_attention(**inputs, **features, window_size=(-1, 0))

    results = outputs_and_gradients(attend, tensors, grads)
    gold = outputs_and_gradients(attend, {n: t.double() for n, t in tensors.items()}, grads)
    assert results['out0'].dtype == dtype
    assert results['out1'].dtype == torch.float32
    for name in gold:
        worst = float(row_errors(results[name], gold[name], row_dims=name not in ('out1', 'grad of sinks')).max())
        assert worst <= 2 * ROW_LIMITS[results[name].dtype], f'{name}: {worst:.2e}'


def test_autocast_changes_nothing() -> None:
    extents = whole(9, batch=2)
    features = everything(extents, HEADS)
    inputs = [t.float() for t in make_qkv(extents, HEADS)]
    features['bias'] = features['bias'].float()
    expected = window_attention(*inputs, window_size=(4, 0), **features)
    with torch.autocast('cpu', torch.bfloat16):
        results = window_attention(*inputs, window_size=(4, 0), **features)
    assert all(a.equal(b) for a, b in zip(results, expected, strict=True))
