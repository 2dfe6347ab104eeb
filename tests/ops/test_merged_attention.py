"""Selected blocks and window in one softmax: the definition, equality with dense attention, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from native_sparse_attention.ops import selected_attention, window_attention
from tests.definition import definition
from tests.support.problems import Extents, Heads, assert_agree, drawn_extents, drawn_heads, make_qkv, normal, whole


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *features: Tensor,
    names: tuple[str, ...],
    block_size: int,
    window_size: tuple[int, int],
    causal: bool = True,
    softcap: float | None = None,
    **where: Any,
) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of selected blocks and window, key by key. features: block_scale, sinks, as named."""
    given = dict(zip(names, features, strict=True))
    block_scale, sinks = given.get('block_scale'), given.get('sinks')
    left, right = window_size
    results: definition.Results = {}
    rows_q, rows_k, rows_v = map(definition.rows_of, (q, k, v))
    rows_scale = None if block_scale is None else definition.rows_of(block_scale)
    for query in definition.locate_queries(q, k.shape[1], **where):
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k.shape[2])
            index_head = head // (q.shape[2] // block_indices.shape[2])
            row = block_indices[query.batch, query.index, index_head].tolist()
            keys, values, factors = [], [], []
            for position in range(query.num_keys):
                distance = query.position - position
                is_near = (left < 0 or distance <= left) and (right < 0 or -distance <= right)
                is_selected = position // block_size in row and not (causal and distance < 0)
                if not (is_near or is_selected) or (causal and distance < 0):
                    continue
                keys.append(rows_k[query.batch][query.first_key + position][kv_head])
                values.append(rows_v[query.batch][query.first_key + position][kv_head])
                if rows_scale is not None:
                    factor = torch.ones((), dtype=torch.float64)
                    if position // block_size in row:
                        factor = rows_scale[query.batch][query.index][index_head][row.index(position // block_size)]
                    factors.append(factor)
            row_q, of_sinks = rows_q[query.batch][query.index][head], None if sinks is None else sinks[head]
            scale = q.shape[-1] ** -0.5
            results[query.batch, query.index, head] = definition.attend(
                row_q, keys, values, scale, factors, softcap, of_sinks
            )
    out, lse = definition.collect(q, v, results)
    if sinks is not None:  # a row that reads no key has the log-sum-exp of the sinks
        lse = lse.where(~lse.isneginf(), sinks[:, None].double())
    return out + q[:0].sum(), lse  # differentiable where no key exists, too


@given(
    extents=drawn_extents(max_seqlen=16),
    heads=drawn_heads(),
    block_size=st.integers(1, 6),
    num_selected=st.integers(0, 4),
    left=st.integers(-1, 9),
    right=st.integers(-1, 4),
    alone=st.booleans(),
    scaled=st.booleans(),
    with_sinks=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 0.8]),
)
def test_definition(
    extents: Extents,
    heads: Heads,
    block_size: int,
    num_selected: int,
    left: int,
    right: int,
    alone: bool,
    scaled: bool,
    with_sinks: bool,
    causal: bool,
    softcap: float | None,
) -> None:
    shape = (extents.batch, extents.seqlen_q, heads.heads if alone else heads.kv_heads, num_selected)
    indices = torch.randint(-1, extents.seqlen_k // block_size + 2, shape).int()
    features = {'block_scale': 1 + 0.5 * normal(*shape)} if scaled else {}
    if with_sinks:
        features['sinks'] = normal(heads.heads)
    settings: dict[str, Any] = {
        'block_size': block_size,
        'window_size': (left, 0 if causal else right),
        'causal': causal,
        'softcap': softcap,
        **extents.where,
    }
    names = tuple(features)

    def op(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        return selected_attention(q, k, v, blocks, **dict(zip(names, given, strict=True)), **settings)

    def expected(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, blocks, *given = inputs
        return by_definition(q, k, v, blocks, *given, names=names, **settings)

    assert_agree(op, expected, *make_qkv(extents, heads), indices, *features.values())


@pytest.mark.parametrize('window', [1, 7, 40])
def test_equals_dense_where_every_block_is_selected(window: int) -> None:
    q, k, v = make_qkv(whole(23, batch=2), Heads(4, 2, 8, 8))
    blocks = torch.arange(6, dtype=torch.int32).expand(2, 23, 2, 6)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return selected_attention(q, k, v, blocks, block_size=4, window_size=(window - 1, 0))[0]

    def dense(*qkv: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in qkv)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    assert_agree(merged, dense, q, k, v, atol=1e-12)


def test_without_blocks_it_is_the_window() -> None:
    q, k, v = make_qkv(whole(19), Heads(2, 1, 8, 6))
    blocks = torch.full((1, 19, 1, 3), -1, dtype=torch.int32)
    settings: dict[str, Any] = {'window_size': (4, 0), 'sinks': torch.tensor([0.3, -1.0]), 'softcap': 2.0}
    merged = selected_attention(q, k, v, blocks, block_size=4, **settings)
    for result, expected in zip(merged, window_attention(q, k, v, **settings), strict=True):
        torch.testing.assert_close(result, expected)


def test_dropout_is_that_of_the_window_branch() -> None:
    q, k, v = make_qkv(whole(19), Heads(2, 1, 8, 6))
    blocks = torch.arange(5, dtype=torch.int32).expand(1, 19, 1, 5)
    settings: dict[str, Any] = {'dropout_p': 0.4, 'dropout_seed': 3}
    merged, _ = selected_attention(q, k, v, blocks, block_size=4, window_size=(2, 0), **settings)
    torch.testing.assert_close(merged, window_attention(q, k, v, window_size=(-1, 0), **settings)[0])


def test_padding_of_segments_gives_nothing() -> None:
    q, k, v = (t.requires_grad_() for t in make_qkv(whole(12), Heads(2, 1, 8, 8)))
    ids = torch.tensor([[0] * 5 + [-1] * 3 + [1] * 4])
    blocks = torch.zeros(1, 12, 1, 1, dtype=torch.int32)
    with torch.no_grad():
        k[:, 5:8] = torch.nan
    out, lse = selected_attention(q, k, v, blocks, block_size=4, window_size=(2, 0), segment_ids=ids)
    assert (out[:, 5:8] == 0).all()
    assert (lse[:, :, 5:8] == -torch.inf).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'sinks': torch.zeros(2)}, 'sinks is given, but needs window_size beside it'),
        ({'dropout_p': 0.1}, 'dropout_p is given, but needs window_size beside it'),
        ({'dropout_seed': 1}, 'dropout_seed is given, but needs window_size beside it'),
        ({'window_size': (3, 0), 'gate': torch.ones(1, 8, 2)}, 'gate is given with window_size, but must be None'),
        ({'window_size': (3, 1)}, 'right must be 0'),
        ({'window_size': 3}, 'window_size is 3'),
        ({'unit_scale': 1}, 'unit_scale is 1'),
        ({'unit_scale': True}, 'unit_scale is given, but needs window_size beside it'),
        ({'window_size': (3, 0), 'backend': 'flex'}, "backend 'flex' cannot serve this call of selected_attention"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    q, k, v = make_qkv(whole(8), Heads(2, 1, 4, 4))
    blocks = torch.zeros(1, 8, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message.replace('(', r'\(').replace(')', r'\)')):
        selected_attention(q, k, v, blocks, block_size=4, **settings)
