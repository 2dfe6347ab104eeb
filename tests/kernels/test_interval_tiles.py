"""Window and compressed attention in Triton with tiles that the tensor memory accelerator fetches: the same bits as
without it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, window_attention
from native_sparse_attention.ops._triton import launch
from tests.support.harness import assert_same_bits, make_grads, place, run_triton
from tests.support.problems import Extents, Heads, packed, whole
from tests.support.window_attention_problems import TWO_GROUPS, make_inputs


def attend(q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor, mem_v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    return compressed_attention(q, k, v, block_size=1, stride=1, mem_kv=(mem_k, mem_v), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('with_memory', [False, True])
@pytest.mark.parametrize(
    ('extents', 'heads', 'window'),
    [
        (whole(100), TWO_GROUPS, (-1, 0)),
        (whole(100, batch=2), Heads(3, 1, 16, 24), (-1, 0)),
        (packed([100, 0, 20], uncovered=2), TWO_GROUPS, (-1, 0)),
        (packed([100, 0, 20], uncovered=2), TWO_GROUPS, (30, 0)),
        (Extents(1, 5, 180, {'q_offset': 161}, [180]), TWO_GROUPS, (140, 0)),
    ],
    ids=['whole', 'a batch', 'packed', 'packed, a window', 'offset'],
)
def test_the_same_bits(
    extents: Extents, heads: Heads, window: tuple[int, int], with_memory: bool, described: list[Tensor],
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tensors = make_inputs(extents, heads, device, torch.float16)
    grads = make_grads(extents, heads, device)
    settings = place(extents.where, device)
    if with_memory:
        op: Any = attend
        tensors |= {f'mem_{name}': tensors[name][0, :3].transpose(0, 1).contiguous() for name in 'kv'}
    else:
        op, settings = window_attention, settings | {'window_size': window}
    result = run_triton(op, tensors, grads, **settings)
    # Other keys lie between memory and the keys of a packed sequence.
    assert bool(described) == (not with_memory or 'cu_seqlens' not in extents.where)
    monkeypatch.setattr(launch, 'WITH_TILES', ())
    del described[:]
    assert_same_bits(run_triton(op, tensors, grads, **settings), result)
    assert not described


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_the_future_changes_nothing(junk: float, described: list[Tensor], device: torch.device) -> None:
    tensors = make_inputs(whole(200), TWO_GROUPS, device, torch.float16)
    expected = run_triton(window_attention, tensors, window_size=(-1, 0))
    for name in 'kv':
        tensors[name] = tensors[name].clone()
        tensors[name][:, 190:] = junk
    result = run_triton(window_attention, tensors, window_size=(-1, 0))
    assert described
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, :190], expected[name][:, :190]), name


@pytest.mark.parametrize('dropout', [{}, {'dropout_p': 0.99, 'dropout_seed': 1}], ids=['', 'dropout'])
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_queries_behind_a_sequence_change_nothing(
    junk: float, dropout: dict[str, Any], described: list[Tensor], device: torch.device
) -> None:
    """Tiles at the end of a sequence are fetched with what follows it, unless weights are dropped."""
    extents = packed([100, 0, 20], uncovered=3)
    tensors, grads = make_inputs(extents, TWO_GROUPS, device, torch.float16), make_grads(extents, TWO_GROUPS, device)
    settings = place(extents.where, device) | {'window_size': (4, 0)} | dropout
    expected = run_triton(window_attention, tensors, grads, **settings)
    tensors['q'], grads = tensors['q'].clone(), [grad.clone() for grad in grads]
    for t in (tensors['q'], grads[0]):
        t[:, 120:] = junk
    result = run_triton(window_attention, tensors, grads, **settings)
    assert (tensors['q'].shape in [t.shape for t in described]) == (not dropout)
    for name in ('grad of k', 'grad of v'):
        assert torch.equal(result[name], expected[name]), name
