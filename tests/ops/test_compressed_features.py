"""Soft caps, sinks and segments of compressed attention, in eager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, select_blocks
from native_sparse_attention.testing import outputs_and_gradients
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    cumulative,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_mem_kv,
    make_qkv,
    normal,
    packed,
    row_integers,
    whole,
)

SIZES: dict[str, Any] = {'block_size': 4, 'stride': 2}
HEADS = Heads(4, 2, 3, 5)


@given(drawn_extents(), drawn_heads(), st.integers(0, 2), st.integers(1, 3), st.sampled_from([None, 0.8, 30]))
def test_definition(extents: Extents, heads: Heads, pairs: int, num_sinks: int, softcap: float | None) -> None:
    q, _, _ = make_qkv(extents, heads)
    settings: dict[str, Any] = {**SIZES, **extents.where, 'softcap': softcap}
    if not extents.packed:
        settings['seqlen_k'] = extents.seqlen_k
    names = ('sinks', 'mem_k', 'mem_v') if pairs else ('sinks',)
    tensors = (normal(heads.heads, num_sinks), *(make_mem_kv(heads, pairs) if pairs else ()))

    def call(function: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, rest, strict=True))
        mem_kv = (given['mem_k'], given['mem_v']) if pairs else None
        return function(q, k, v, sinks=given['sinks'], mem_kv=mem_kv, **settings)

    op, by_definition = (
        partial(call, function) for function in (compressed_attention, definition.compressed_attention)
    )
    covered = int(extents.where['cu_seqlens'][-1]) if extents.packed else extents.seqlen_q
    by_definition = partial(uncovered_too, by_definition, covered)
    assert_agree(op, by_definition, q, *make_compressed(extents, heads, 4, 2), *tensors)


def uncovered_too(function: Any, covered: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Tensor) -> Any:
    """Give queries without a sequence the log-sum-exp of the sinks, as other rows that read nothing have; the
    definition omits them.
    """
    out, lse = function(q, k, v, sinks, *rest)
    of_sinks = sinks.logsumexp(1)[None, :, None].expand(len(q), -1, q.shape[1] - covered)
    # The output is differentiable, also where nothing is read.
    return out + 0 * q.sum(), torch.cat((lse[..., :covered], of_sinks), -1)


def test_derivatives() -> None:
    extents = Extents(2, 5, 9, {'q_offset': row_integers([-1, 4]), 'seqlens_k': row_integers([9, 5])}, [9, 5])
    q, _, _ = make_qkv(extents, HEADS)
    compressed = [t.nan_to_num() for t in make_compressed(extents, HEADS, 4, 2)]
    inputs = [t.requires_grad_() for t in (q, *compressed, normal(4, 2))]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return compressed_attention(q, k, v, **SIZES, **extents.where, seqlen_k=9, softcap=0.8, sinks=sinks)

    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


@pytest.mark.parametrize('features', [{}, {'softcap': 0.8, 'sinks': normal(4)}], ids=['alone', 'with others'])
def test_segments_are_sequences_and_padding_is_nothing(features: dict[str, Any]) -> None:
    lengths = [5, 9, 3, 4]
    extents = packed(lengths)
    q, _, _ = make_qkv(extents, HEADS)
    k, v = make_compressed(extents, HEADS, 4, 2)
    ids = torch.tensor([[4] * 5 + [1] * 9 + [-2] * 3 + [1] * 4])
    tensors = {'q': q, 'k_cmp': k, 'v_cmp': v}
    grads = [normal(1, 21, 4, 5), normal(1, 4, 21)]
    padding = ids[0] < 0

    def expected_of(**inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = compressed_attention(**inputs, **SIZES, cu_seqlens=cumulative(lengths), **features)
        return out.masked_fill(padding[:, None, None], 0), lse.masked_fill(padding, -torch.inf)

    expected = outputs_and_gradients(expected_of, tensors, grads)
    assert expected['out0'][:, ~padding].any()
    for segment_ids in (ids, ids.int()):
        results = outputs_and_gradients(
            lambda **inputs: compressed_attention(**inputs, **SIZES, segment_ids=segment_ids, **features),  # noqa: B023
            tensors,
            grads,
        )
        for name, result in results.items():
            assert result.equal(expected[name]), name
    assert not expected['grad of q'][:, padding].any()


def test_sinks_leave_the_order_of_blocks() -> None:
    """Sinks reduce the weights of all blocks by one factor."""
    extents = whole(40)
    q, _, _ = make_qkv(extents, HEADS)
    k, v = make_compressed(extents, HEADS, 4, 2)
    sizes: dict[str, Any] = {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
    selections = []
    for sinks in (None, torch.full((4,), 2.0)):
        _, lse = compressed_attention(q, k, v, **SIZES, sinks=sinks)
        selections.append(select_blocks(q[:, :, :1], k[:, :, :1], lse[:, :1], **sizes, num_selected=4))
    assert selections[0].equal(selections[1])
