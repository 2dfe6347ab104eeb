"""Window attention in Triton against eager, and what must hold bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import window_attention
from native_sparse_attention.ops._triton.interval import op
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.testing import LAYOUTS, assert_attention_matches, lay_out, outputs_and_gradients
from tests import problems
from tests.ops.triton.harness import (
    assert_close_to_eager,
    assert_same_bits,
    fence,
    fewer_examples,
    place,
    run_eager,
    run_triton,
)
from tests.problems import Extents, Heads, cumulative, drawn_extents, drawn_heads, packed, row_integers, whole

HEADS = Heads(2, 1, 16, 16)
TWO_GROUPS = Heads(4, 2, 16, 16)
HALF_AND_SINGLE = (torch.float32, torch.float16)
Tensors = dict[str, Any]

every_dtype = pytest.mark.parametrize('dtype', HALF_AND_SINGLE)


def make_inputs(
    extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype = torch.float32, layout: str = 'contiguous'
) -> Tensors:
    """NaN in every key that belongs to no sequence, and around every tensor."""
    tensors = dict(zip('qkv', problems.make_qkv(extents, heads), strict=True))
    return {name: fence(lay_out(t.to(device, dtype), layout)) for name, t in tensors.items()}


def make_grads(
    extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    batch, seqlen = extents.batch, extents.seqlen_q
    return [
        torch.randn(batch, seqlen, heads.heads, heads.value_dim, device=device, dtype=dtype),
        torch.randn(batch, heads.heads, seqlen, device=device),
    ]


def assert_matches(extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype, **settings: Any) -> None:
    """By the error rules."""
    tensors = make_inputs(extents, heads, device, dtype, settings.pop('layout', 'contiguous'))
    assert_attention_matches(window_attention, tensors, 'triton', **place(extents.where, device), **settings)


def assert_close(extents: Extents, heads: Heads, device: torch.device, window: tuple[int, int]) -> None:
    settings: dict[str, Any] = {'window_size': window, 'causal': window[1] == 0}
    tensors, grads = make_inputs(extents, heads, device), make_grads(extents, heads, device)
    assert_close_to_eager(window_attention, tensors, grads, **settings, **place(extents.where, device))


@pytest.mark.parametrize('seqlen', [15, 16, 17, 31, 32, 33, 63, 64, 65, 257])
def test_lengths(seqlen: int, device: torch.device) -> None:
    assert_matches(whole(seqlen), HEADS, device, torch.float16, window_size=(40, 0))
    assert_close(whole(seqlen), HEADS, device, (40, 0))


@pytest.mark.parametrize('seqlen', [1, 2, 3, 33, 64, 97])
@pytest.mark.parametrize('window', [(-1, 0), (-1, -1), (9, 5), (-1, 7), (33, -1), (32, 32)])
def test_windows(window: tuple[int, int], seqlen: int, device: torch.device) -> None:
    assert_close(whole(seqlen), HEADS, device, window)


@pytest.mark.parametrize('left', [1, 31, 32, 33, 63, 64, 65, 96])
def test_window_sizes_around_tiles(left: int, device: torch.device) -> None:
    assert_close(whole(100), Heads(1, 1, 16, 16), device, (left, 0))


@pytest.mark.parametrize('offset', [30, 31, 32])
@pytest.mark.parametrize('window', [(-1, 0), (33, 0), (-1, -1)])
def test_offsets_around_tiles(window: tuple[int, int], offset: int, device: torch.device) -> None:
    """The first query reads a whole tile of keys, or all but one, or one more."""
    assert_close(Extents(1, 40, 80, {'q_offset': offset}, [80]), HEADS, device, window)


@pytest.mark.parametrize('seqlen', [1, 40])
def test_a_window_of_one_returns_the_values(seqlen: int, device: torch.device) -> None:
    tensors = make_inputs(whole(seqlen), TWO_GROUPS, device)
    out, _ = window_attention(**tensors, window_size=(0, 0), backend='triton')
    assert torch.equal(out, tensors['v'].repeat_interleave(2, 2))
    assert_close(whole(seqlen), TWO_GROUPS, device, (0, 0))


@pytest.mark.parametrize('group', [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_groups(group: int, device: torch.device) -> None:
    kv_heads = 2 if group < 8 else 1
    assert_close(whole(12), Heads(kv_heads * group, kv_heads, 16, 16), device, (5, 0))


@pytest.mark.parametrize(('full_grid', 'parts'), [(1, 1), (5, 2), (9, 3), (1024, 6)])
def test_heads_of_a_group_are_added_in_parts(
    full_grid: int, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer parts where the grid is full without them, and where they would take too much memory."""
    monkeypatch.setattr(op, 'FULL_GRID', full_grid)
    heads = Heads(12, 2, 16, 16)
    assert op._count_parts(6, 4, 1) == parts
    assert op._count_parts(6, 4, op.WORKSPACE) == 1
    assert_close(whole(40), heads, device, (12, 0))


@pytest.mark.parametrize('rows', [1, 2])
def test_parts_of_some_rows_at_a_time(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those of all rows of the batch would take too much memory."""
    heads = Heads(6, 1, 16, 16)
    bytes_of_row = 6 * 40 * 4 * (16 + 16)
    monkeypatch.setattr(op, 'WORKSPACE', rows * bytes_of_row)
    assert_close(whole(40, batch=3), heads, device, (12, 0))


def test_parts_of_a_row_do_not_depend_on_the_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(6, 1, 16, 16)
    monkeypatch.setattr(op, 'WORKSPACE', 6 * 40 * 4 * (16 + 16))  # of the six parts of one row
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


@every_dtype
@pytest.mark.parametrize(
    ('head_dim', 'value_dim'),
    [(40, 40), (64, 80), (80, 64), (96, 16), (100, 128), (128, 100), (192, 128), (16, 256), (256, 256)],
)
def test_head_sizes(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_matches(whole(33), Heads(2, 1, head_dim, value_dim), device, dtype, window_size=(7, 0))


@pytest.mark.parametrize(('head_dim', 'value_dim'), [(1, 1), (3, 17), (7, 40), (17, 2), (255, 129)])
def test_odd_head_sizes(head_dim: int, value_dim: int, device: torch.device) -> None:
    assert_close(whole(18), Heads(2, 1, head_dim, value_dim), device, (7, 0))


EXTENTS = {
    'offset': Extents(2, 30, 90, {'q_offset': 35}, [90, 90]),
    'negative offset': Extents(1, 70, 40, {'q_offset': -11}, [40]),
    'offset beyond the keys': Extents(1, 40, 40, {'q_offset': 25}, [40]),
    'keys end': Extents(2, 9, 75, {}, [75, 75]),
    'row offsets': Extents(3, 40, 100, {'q_offset': row_integers([5, -35, 61])}, [100] * 3),
    'lengths': Extents(3, 33, 70, {'seqlens_k': row_integers([70, 33, 41])}, [70, 33, 41]),
    'lengths, row offsets': Extents(
        3, 40, 70, {'seqlens_k': row_integers([70, 30, 0]), 'q_offset': row_integers([20, -5, 3])}, [70, 30, 0]
    ),
    'packed': packed([0, 0, 33, 1, 64, 0, 30, 0], uncovered=5),
    'packed, one sequence': packed([70], uncovered=70),
    'packed, short sequences': packed([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    'packed, other keys': Extents(
        1,
        60,
        110,
        {'cu_seqlens': cumulative([0, 20, 1, 33, 0]), 'cu_seqlens_k': cumulative([7, 40, 0, 50, 9])},
        [7, 40, 0, 50, 9],
    ),
    'packed, offset': Extents(
        1, 60, 60, {'cu_seqlens': cumulative([20, 40]), 'cu_seqlens_k': cumulative([50, 10]), 'q_offset': 7}, [50, 10]
    ),
    'packed, offsets': Extents(
        1,
        50,
        90,
        {
            'cu_seqlens': cumulative([20, 0, 28]),
            'cu_seqlens_k': cumulative([50, 5, 30]),
            'q_offset': row_integers([25, 3, -4]),
        },
        [50, 5, 30],
    ),
}

every_extent = pytest.mark.parametrize('extents', EXTENTS.values(), ids=EXTENTS)


@pytest.mark.parametrize('name', ['row offsets', 'lengths', 'packed, offsets'])
def test_strides_of_lengths_and_offsets(name: str, device: torch.device) -> None:
    """Columns of a table, and one number for all rows."""
    extents = EXTENTS[name]
    columns = {key: torch.stack((t, t), 1)[:, 0] for key, t in extents.where.items()}
    assert_close(replace(extents, where=columns), HEADS, device, (12, 0))
    if name == 'row offsets':
        one = {'q_offset': torch.tensor([7], dtype=torch.int32).expand(3)}
        assert_close(replace(extents, where=one), HEADS, device, (12, 0))


@every_extent
@pytest.mark.parametrize('window', [(12, 0), (9, 6)])
def test_places_of_queries_among_keys(window: tuple[int, int], extents: Extents, device: torch.device) -> None:
    assert_close(extents, Heads(2, 1, 16, 24), device, window)


@fewer_examples(0.4)
@given(
    drawn_extents(),
    drawn_heads(),
    st.integers(-1, 12),
    st.integers(-1, 12),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    st.sampled_from(LAYOUTS),
)
def test_drawn_problems(
    extents: Extents, heads: Heads, left: int, right: int, causal: bool, scale: float | None, layout: str
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    settings: dict[str, Any] = {'window_size': (left, 0 if causal else right), 'causal': causal, 'scale': scale}
    tensors = make_inputs(extents, heads, device, layout=layout)
    grads = make_grads(extents, heads, device)
    assert_close_to_eager(window_attention, tensors, grads, **settings, **place(extents.where, device))


@every_dtype
@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_matches(whole(34, batch=2), TWO_GROUPS, device, dtype, window_size=(12, 0), layout=layout)


def test_a_last_dimension_apart_in_memory(device: torch.device) -> None:
    tensors = make_inputs(whole(34), HEADS, device)
    spread = {name: t.mT.contiguous().mT for name, t in tensors.items()}
    grads = make_grads(whole(34), HEADS, device)
    settings: dict[str, Any] = {'window_size': (12, 0)}
    expected = run_triton(window_attention, tensors, grads, **settings)
    assert_same_bits(
        run_triton(window_attention, spread, [grads[0].mT.contiguous().mT, grads[1]], **settings), expected
    )


def test_expanded_gradients(device: torch.device) -> None:
    leaves = [[t.detach().requires_grad_() for t in make_inputs(whole(40), HEADS, device).values()]]
    leaves.append([t.detach().requires_grad_() for t in leaves[0]])
    for backend, (q, k, v) in zip(('triton', 'eager'), leaves, strict=True):
        out, lse = window_attention(q, k, v, window_size=(12, 0), backend=backend)
        (out.sum() + lse.sum()).backward()
    for result, expected in zip(*leaves, strict=True):
        torch.testing.assert_close(result.grad, expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('index', [0, 1], ids=['out', 'lse'])
def test_the_gradient_of_one_output_alone(index: int, device: torch.device) -> None:
    tensors = make_inputs(whole(40), HEADS, device)
    grads = make_grads(whole(40), HEADS, device)[index : index + 1]
    results = [
        outputs_and_gradients(
            lambda b=backend, **t: window_attention(**t, window_size=(12, 0), backend=b)[index], tensors, grads
        )
        for backend in ('triton', 'eager')
    ]
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('needed', ['q', 'k', 'v', 'qk', 'kv', 'qv'])
def test_gradients_where_they_are_needed(needed: str, device: torch.device) -> None:
    tensors = make_inputs(whole(40), HEADS, device)
    grads = make_grads(whole(40), HEADS, device)
    expected = run_triton(window_attention, tensors, grads, window_size=(12, 0))
    leaves = {name: t.detach().requires_grad_(name in needed) for name, t in tensors.items()}
    outputs = window_attention(**leaves, window_size=(12, 0), backend='triton')
    torch.autograd.backward(outputs, grads)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed)
        assert leaf.grad is None or leaf.grad.equal(expected[f'grad of {name}'])


@every_dtype
@pytest.mark.parametrize('logit', [6e4, -6e4])
def test_large_logits(logit: float, dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_inputs(whole(70), HEADS, device, torch.float32)
    for name in 'qk':
        tensors[name] = tensors[name] / tensors[name].norm(dim=-1, keepdim=True) * 6e4**0.5
    # One key that every query agrees with, or is opposed to.
    tensors['q'] = tensors['q'].abs() * (1 if logit > 0 else -1)
    tensors['k'][:, 0] = tensors['k'][:, 0].abs()
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    for window in ((-1, 0), (20, 0)):
        settings: dict[str, Any] = {'window_size': window, 'scale': 1.0}
        result = run_triton(window_attention, tensors, **settings)
        assert all(t.isfinite().all() for t in result.values())
        assert result['out1'].abs().max() > 3e4
        gold = run_eager(window_attention, {name: t.double() for name, t in tensors.items()}, **settings)
        torch.testing.assert_close(result['out1'].double(), gold['out1'], rtol=1e-6, atol=1e-2)
        same = run_eager(window_attention, tensors, **settings)
        # A log-sum-exp of 6e4 is rounded by 0.002, and weights that are computed from it again are off by as much.
        for name, rounding in (('out0', 1e-4), ('grad of v', 0.03)):
            error, limit = ((r[name].double() - gold[name]).abs().max() for r in (result, same))
            assert error <= 2 * limit + rounding, name


@pytest.mark.parametrize('window', [(12, 0), (-1, 0), (9, 6), (-1, -1)])
def test_what_no_query_reads_changes_nothing(window: tuple[int, int], device: torch.device) -> None:
    """Positions 40 ... 59 of 100: what lies behind them, and before their windows, may be anything."""
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


@pytest.mark.parametrize('position', [0, 3, 30, 31, 32, 63, 64])
def test_the_future_changes_nothing(position: int, device: torch.device) -> None:
    tensors = make_inputs(whole(70), HEADS, device)
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


@pytest.mark.parametrize('names', ['k', 'v', 'kv'])
@pytest.mark.parametrize('key', [35, 64])
def test_what_is_not_finite_reaches_those_who_read_it(names: str, key: int, device: torch.device) -> None:
    tensors, grads = make_inputs(whole(70), TWO_GROUPS, device), make_grads(whole(70), TWO_GROUPS, device)
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


def test_a_query_that_is_not_finite_spoils_what_it_reads_alone(device: torch.device) -> None:
    tensors, grads = make_inputs(whole(70), TWO_GROUPS, device), make_grads(whole(70), TWO_GROUPS, device)
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
    """Bit for bit: a sequence begins a tile. The tokens behind the last one get 0."""
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
def test_chunks_of_queries_are_the_whole(window: tuple[int, int], device: torch.device) -> None:
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
    """NaN, as logaddexp of two such gives it, beside queries of the same tile that read something."""
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


@pytest.mark.parametrize('left', [39, 40, 1000, 2**31 - 1, 2**40])
@pytest.mark.parametrize('causal', [True, False])
def test_a_window_over_everything_is_dense_attention(left: int, causal: bool, device: torch.device) -> None:
    tensors, grads = make_inputs(whole(40), HEADS, device), make_grads(whole(40), HEADS, device)
    settings: dict[str, Any] = {'causal': causal}
    dense = run_triton(window_attention, tensors, grads, window_size=(-1, 0 if causal else -1), **settings)
    window = run_triton(window_attention, tensors, grads, window_size=(left, 0 if causal else left), **settings)
    for name in dense:
        torch.testing.assert_close(window[name], dense[name], rtol=1e-5, atol=1e-6)


NOTHING_TO_READ = {
    'no keys': Extents(2, 4, 0, {}, [0, 0]),
    'no keys but an offset': Extents(2, 4, 0, {'q_offset': 3}, [0, 0]),
    'before the first key': Extents(1, 4, 12, {'q_offset': -4}, [12]),
    'far before the first key': Extents(1, 4, 12, {'q_offset': -(2**40)}, [12]),
    'far behind the last key': Extents(1, 4, 12, {'q_offset': 2**40}, [12]),
    'empty rows': Extents(2, 4, 12, {'seqlens_k': row_integers([0, 0]), 'q_offset': 3}, [0, 0]),
    'empty sequences': packed([0, 0, 0], uncovered=4),
    'keys of other sequences': Extents(
        1, 6, 12, {'cu_seqlens': cumulative([6, 0]), 'cu_seqlens_k': cumulative([0, 12])}, [0, 12]
    ),
    'no tokens': whole(0),
    'no rows': whole(4, batch=0),
    'keys only': Extents(2, 0, 9, {}, [9, 9]),
}


@pytest.mark.parametrize('extents', NOTHING_TO_READ.values(), ids=NOTHING_TO_READ)
def test_rows_with_nothing_to_read(extents: Extents, device: torch.device) -> None:
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    results = run_triton(window_attention, tensors, grads, window_size=(8, 0), **place(extents.where, device))
    for name, t in results.items():
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name


def test_the_same_bits_twice(device: torch.device) -> None:
    extents = packed([33, 40], uncovered=2)
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    results = [
        run_triton(window_attention, tensors, grads, window_size=(12, 0), **place(extents.where, device))
        for _ in range(2)
    ]
    assert_same_bits(*results)


@pytest.mark.skipif(not is_interpreted(), reason='memory of gigabytes that nobody touches')
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'dout'])
@pytest.mark.parametrize('dim', [1, 2])
def test_offsets_beyond_int32(name: str, dim: int) -> None:
    """Tokens, or heads, that lie 2 ** 31 elements and more apart."""
    device = torch.device('cpu')
    tensors = make_inputs(whole(5), TWO_GROUPS, device, torch.float16)
    grads = make_grads(whole(5), TWO_GROUPS, device, torch.float16)
    expected = run_triton(window_attention, tensors, grads, window_size=(3, 0))
    tensors['dout'] = grads[0]
    tensors[name] = far_apart(tensors[name], dim)
    grads[0] = tensors.pop('dout')
    assert_same_bits(run_triton(window_attention, tensors, grads, window_size=(3, 0)), expected)


def far_apart(tensor: Tensor, dim: int) -> Tensor:
    """The same values, the last ones of a dimension more than 2 ** 31 elements behind the first."""
    strides = list(tensor.contiguous().stride())
    strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 16
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


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


@pytest.mark.parametrize('where', JUNK_BORDERS.values(), ids=JUNK_BORDERS)
def test_any_content_of_borders_stays_inside_memory(where: dict[str, Tensor], device: torch.device) -> None:
    """The op is called below the checks, which read values on CPU tensors alone."""
    from native_sparse_attention.geometry import Sequences
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
    outputs_and_gradients(lambda q, k, v: unchecked(q, k, v, sequences, 12, 0, 0.25), tensors)
