"""Guarantees of window attention in Triton: bitwise invariance, chunks and caches, memory safety."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.core.modifiers import OFF
from native_sparse_attention.ops import window_attention
from native_sparse_attention.ops._triton.interval import keys
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.testing import outputs_and_gradients
from tests.support.harness import assert_same_bits, far_apart, make_grads, place, run_triton
from tests.support.problems import Extents, Heads, packed, row_integers, whole
from tests.support.window_attention_problems import HEADS, TWO_GROUPS, Tensors, make_inputs


@pytest.mark.parametrize(('group', 'left', 'seqlen'), [(1, 70, 66), (1, 70, 70), (6, 70, 97), (4, 40, 97)])
def test_queries_that_follow_change_no_bit(group: int, left: int, seqlen: int, device: torch.device) -> None:
    """The tiling must not change any bit either."""
    tensors = make_inputs(whole(100), Heads(group, 1, 16, 16), device)
    out, lse = window_attention(**tensors, window_size=(left, 0), backend='triton')
    prefix = {name: t[:, :seqlen] for name, t in tensors.items()}
    out_of_prefix, lse_of_prefix = window_attention(**prefix, window_size=(left, 0), backend='triton')
    assert torch.equal(out[:, :seqlen], out_of_prefix)
    assert torch.equal(lse[:, :, :seqlen], lse_of_prefix)


def test_parts_of_a_row_do_not_depend_on_the_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(6, 1, 16, 16)
    monkeypatch.setattr(keys, 'WORKSPACE', 6 * 40 * 4 * (16 + 16))  # of the six parts of one row
    tensors, grads = make_inputs(whole(40, batch=2), heads, device), make_grads(whole(40, batch=2), heads, device)
    together = run_triton(window_attention, tensors, grads, window_size=(12, 0))
    for row in (slice(1), slice(1, 2)):
        alone = run_triton(
            window_attention,
            {name: t[row] for name, t in tensors.items()},
            [g[row] for g in grads],
            window_size=(12, 0),
        )
        assert_same_bits({name: t[row] for name, t in together.items()}, alone)


@pytest.mark.parametrize('window', [(12, 0), (-1, 0), (9, 6), (-1, -1)])
def test_unread_keys_change_nothing(window: tuple[int, int], device: torch.device) -> None:
    """Positions 40 ... 59 of 100: keys behind them and before their windows may hold anything."""
    extents = Extents(2, 20, 100, {'q_offset': 40}, [100, 100])
    settings: dict[str, Any] = {'window_size': window, 'causal': window[1] == 0, 'q_offset': 40}
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    expected = run_triton(window_attention, tensors, grads, **settings)
    read = torch.zeros(100, dtype=torch.bool, device=device)
    read[40 - window[0] if window[0] >= 0 else 0 : 60 + window[1] if window[1] >= 0 else 100] = True
    for junk in (torch.nan, torch.inf):
        spoiled = dict(tensors)
        for name in 'kv':
            spoiled[name] = tensors[name].masked_fill(~read[:, None, None], junk)
        assert_same_bits(run_triton(window_attention, spoiled, grads, **settings), expected)
    assert (expected['grad of k'][:, ~read] == 0).all()
    assert (expected['grad of v'][:, ~read] == 0).all()
    assert (expected['grad of k'][:, read] != 0).any(-1).all()


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('position', [0, 3, 30, 31, 32, 63, 64])
def test_the_future_changes_nothing(position: int, dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_inputs(whole(70), HEADS, device, dtype)
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in 'qkv':
        changed[name][:, position + 1 :] = torch.nan
    grads = make_grads(whole(70), HEADS, device)
    grads[0][:, position + 1 :] = 0
    grads[1][..., position + 1 :] = 0
    expected, result = (run_triton(window_attention, t, grads, window_size=(20, 0)) for t in (tensors, changed))
    past = slice(position + 1)
    assert torch.equal(result['out0'][:, past], expected['out0'][:, past])
    assert torch.equal(result['out1'][..., past], expected['out1'][..., past])
    assert torch.equal(result['grad of q'][:, past], expected['grad of q'][:, past])


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('names', ['k', 'v', 'kv'])
@pytest.mark.parametrize('key', [35, 64])
def test_non_finite_keys_reach_their_readers_only(
    names: str, key: int, dtype: torch.dtype, device: torch.device
) -> None:
    tensors, grads = make_inputs(whole(70), TWO_GROUPS, device, dtype), make_grads(whole(70), TWO_GROUPS, device)
    expected = run_triton(window_attention, tensors, grads, window_size=(20, 0))
    for junk in (torch.nan, torch.inf):
        spoiled = {name: t.clone() for name, t in tensors.items()}
        for name in names:
            spoiled[name][:, key, 0] = junk
        result = run_triton(window_attention, spoiled, grads, window_size=(20, 0))
        reads = torch.zeros(70, 4, dtype=torch.bool, device=device)
        reads[key : key + 21, :2] = True
        for name in ('out0', 'grad of q'):
            assert torch.equal(result[name][:, ~reads], expected[name][:, ~reads]), name
        assert torch.equal(result['out1'].mT[:, ~reads], expected['out1'].mT[:, ~reads])
        if 'v' in names or junk != junk:
            assert not result['out0'][:, reads].isfinite().all(-1).any()
        if names == 'v':
            assert torch.equal(result['out1'], expected['out1'])


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_a_non_finite_query_reaches_only_its_keys(dtype: torch.dtype, device: torch.device) -> None:
    tensors, grads = make_inputs(whole(70), TWO_GROUPS, device, dtype), make_grads(whole(70), TWO_GROUPS, device)
    expected = run_triton(window_attention, tensors, grads, window_size=(20, 0))
    tensors['q'][:, 40, 0] = torch.nan
    result = run_triton(window_attention, tensors, grads, window_size=(20, 0))
    read = torch.zeros(70, 2, dtype=torch.bool, device=device)
    read[20:41, 0] = True
    for name in ('grad of k', 'grad of v'):
        assert torch.equal(result[name][:, ~read], expected[name][:, ~read])
        assert result[name][:, read].isnan().any(-1).all()


def cut(tensors: Tensors, queries: slice, keys: slice) -> Tensors:
    return {name: t[:, queries if name == 'q' else keys] for name, t in tensors.items()}


def cut_results(results: Tensors, queries: slice, keys: slice) -> Tensors:
    cuts = {'out0': queries, 'grad of q': queries, 'grad of k': keys, 'grad of v': keys}
    return {name: t[..., queries] if name == 'out1' else t[:, cuts[name]] for name, t in results.items()}


@pytest.mark.parametrize('window', [(12, 0), (-1, 0), (9, 6)])
@pytest.mark.parametrize('lengths', [[33, 0, 1, 64, 7], [5, 5, 5, 5], [0, 0, 40]])
def test_packed_is_alone(lengths: list[int], window: tuple[int, int], device: torch.device) -> None:
    """Equal bit for bit, since a sequence begins a tile. Tokens behind the last sequence get 0."""
    extents = packed(lengths, uncovered=3)
    settings: dict[str, Any] = {'window_size': window, 'causal': window[1] == 0}
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    tensors['q'][:, sum(lengths) :] = torch.nan
    together = run_triton(window_attention, tensors, grads, **settings, **place(extents.where, device))
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        own = slice(start, stop)
        alone = run_triton(window_attention, cut(tensors, own, own), [grads[0][:, own], grads[1][..., own]], **settings)
        assert_same_bits(cut_results(together, own, own), alone)
    rest = slice(sum(lengths), None)
    for name, t in cut_results(together, rest, rest).items():
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name


@pytest.mark.parametrize('window', [(12, 0), (-1, 0), (9, 6)])
def test_chunks_of_queries_equal_one_call(window: tuple[int, int], device: torch.device) -> None:
    settings: dict[str, Any] = {'window_size': window, 'causal': window[1] == 0}
    tensors = make_inputs(whole(45), HEADS, device)
    out, lse = window_attention(**tensors, **settings, backend='triton')
    for start, stop in itertools.pairwise([0, 1, 2, 3, 35, 36, 44, 45]):
        q = tensors['q'][:, start:stop]
        part, part_lse = window_attention(q, tensors['k'], tensors['v'], **settings, q_offset=start, backend='triton')
        torch.testing.assert_close(part, out[:, start:stop], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part_lse, lse[..., start:stop], rtol=1e-5, atol=1e-6)


def test_one_token_at_a_time_with_a_cache_that_is_not_yet_filled(device: torch.device) -> None:
    tensors = make_inputs(whole(36), HEADS, device)
    out, lse = window_attention(**tensors, window_size=(12, 0), backend='triton')
    k, v = (torch.full_like(tensors[name], torch.nan) for name in 'kv')
    for t in range(36):
        k[:, t], v[:, t] = tensors['k'][:, t], tensors['v'][:, t]
        lengths = torch.tensor([t + 1], dtype=torch.int32, device=device)
        q = tensors['q'][:, t : t + 1]
        step, step_lse = window_attention(q, k, v, window_size=(12, 0), seqlens_k=lengths, backend='triton')
        torch.testing.assert_close(step, out[:, t : t + 1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step_lse, lse[..., t : t + 1], rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_log_sum_exp_of_nothing(device: torch.device) -> None:
    """The gradient is NaN, as from logaddexp of two such rows, beside queries of the same tile that read keys."""
    tensors = {name: t.requires_grad_() for name, t in make_inputs(whole(12), HEADS, device).items()}
    out, lse = window_attention(**tensors, window_size=(4, 0), q_offset=-5, backend='triton')
    dlse = torch.where(lse == -torch.inf, torch.nan, 0.5)
    assert dlse.isnan().any()
    grads = torch.autograd.grad((out, lse), list(tensors.values()), (torch.ones_like(out), dlse))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :5] == 0).all()


@pytest.mark.parametrize('where', [{}, {'seqlens_k': row_integers([40, 9, 33])}])
def test_a_row_does_not_depend_on_its_neighbours(where: dict[str, Tensor], device: torch.device) -> None:
    lengths = where['seqlens_k'].tolist() if where else [40] * 3
    extents = Extents(3, 35, 40, where, lengths)
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    together = run_triton(window_attention, tensors, grads, window_size=(12, 0), **place(where, device))
    for row in range(3):
        own = slice(row, row + 1)
        own_where = {name: t[own].to(device) for name, t in where.items()}
        alone = run_triton(
            window_attention,
            {name: t[own] for name, t in tensors.items()},
            [grad[own] for grad in grads],
            window_size=(12, 0),
            **own_where,
        )
        assert_same_bits({name: t[own] for name, t in together.items()}, alone)
    spoiled = {name: t.clone() for name, t in tensors.items()}
    for t in spoiled.values():
        t[::2] = torch.nan
    result = run_triton(window_attention, spoiled, grads, window_size=(12, 0), **place(where, device))
    assert_same_bits({name: t[1] for name, t in result.items()}, {name: t[1] for name, t in together.items()})


def test_the_same_bits_twice(device: torch.device) -> None:
    extents = packed([33, 40], uncovered=2)
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    results = [
        run_triton(window_attention, tensors, grads, window_size=(12, 0), **place(extents.where, device))
        for _ in range(2)
    ]
    assert_same_bits(*results)


@pytest.mark.skipif(not is_interpreted(), reason='gigabytes of memory that nothing touches')
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'dout'])
@pytest.mark.parametrize('dim', [1, 2])
def test_offsets_beyond_int32(name: str, dim: int) -> None:
    """Tokens or heads that lie at least 2 ** 31 elements apart."""
    device = torch.device('cpu')
    tensors = make_inputs(whole(5), TWO_GROUPS, device, torch.float16)
    grads = make_grads(whole(5), TWO_GROUPS, device, torch.float16)
    expected = run_triton(window_attention, tensors, grads, window_size=(3, 0))
    tensors['dout'] = grads[0]
    tensors[name] = far_apart(tensors[name], dim)
    grads[0] = tensors.pop('dout')
    assert_same_bits(run_triton(window_attention, tensors, grads, window_size=(3, 0)), expected)


JUNK_BORDERS = {
    'decreasing': {'cu_seqlens': row_integers([0, 30, 10, 40])},
    'beyond': {'cu_seqlens': row_integers([0, 10, 500, 2**31 - 1])},
    'negative': {'cu_seqlens': row_integers([-(2**31), -5, 10, 40])},
    'other keys': {'cu_seqlens': row_integers([0, 10, 20, 40]), 'cu_seqlens_k': row_integers([0, 100, -7, 90])},
    'lengths': {'seqlens_k': row_integers([2**31 - 1])},
    'negative lengths': {'seqlens_k': row_integers([-(2**31)])},
    'offsets': {'q_offset': row_integers([2**31 - 1])},
    'negative offsets': {'q_offset': torch.tensor([-(2**63)])},
}


@pytest.mark.quick
@pytest.mark.parametrize('where', JUNK_BORDERS.values(), ids=JUNK_BORDERS)
def test_any_content_of_borders_stays_inside_memory(where: dict[str, Tensor], device: torch.device) -> None:
    """Call the op below the argument checks, which read values only on CPUs."""
    from native_sparse_attention.core.geometry import Sequences
    from native_sparse_attention.ops.window_attention.triton import window_attention as unchecked

    tensors = make_inputs(whole(40), HEADS, device)
    where = place(where, device)
    cu_seqlens = where.get('cu_seqlens')
    sequences = Sequences(
        1,
        40,
        40,
        device,
        where.get('q_offset'),
        where.get('seqlens_k'),
        cu_seqlens,
        where.get('cu_seqlens_k', cu_seqlens),
    )
    call = Call(sequences, True, 0.25)
    outputs_and_gradients(lambda q, k, v: unchecked(q, k, v, (12, 0), call, OFF, None), tensors)
