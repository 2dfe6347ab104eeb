"""Window attention in Triton against eager: lengths, windows, groups, sizes, query positions, memory layouts,
gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_sparse_attention.ops import window_attention
from native_sparse_attention.ops._triton.interval import keys
from native_sparse_attention.testing import LAYOUTS, assert_attention_matches, outputs_and_gradients, rounding_term
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    fewer_examples,
    make_grads,
    place,
    run_eager,
    run_triton,
)
from tests.support.problems import Extents, Heads, cumulative, drawn_extents, drawn_heads, packed, row_integers, whole
from tests.support.window_attention_problems import HEADS, TWO_GROUPS, make_inputs

HALF_AND_SINGLE = (torch.float32, torch.float16)
every_dtype = pytest.mark.parametrize('dtype', HALF_AND_SINGLE)


def assert_matches(extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype, **settings: Any) -> None:
    """Assert equality by the error rules."""
    tensors = make_inputs(extents, heads, device, dtype, settings.pop('layout', 'contiguous'))
    assert_attention_matches(window_attention, tensors, 'triton', **place(extents.where, device), **settings)


def assert_close(
    extents: Extents,
    heads: Heads,
    device: torch.device,
    window: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> None:
    settings: dict[str, Any] = {'window_size': window, 'causal': window[1] == 0}
    tensors, grads = make_inputs(extents, heads, device, dtype), make_grads(extents, heads, device)
    assert_close_to_eager(window_attention, tensors, grads, **settings, **place(extents.where, device))


@pytest.mark.parametrize('seqlen', [15, 16, 17, 31, 32, 33, 63, 64, 65, 257])
def test_lengths(seqlen: int, device: torch.device) -> None:
    assert_matches(whole(seqlen), HEADS, device, torch.float16, window_size=(40, 0))
    assert_close(whole(seqlen), HEADS, device, (40, 0))


@pytest.mark.quick
@every_dtype
@pytest.mark.parametrize('seqlen', [1, 2, 3, 33, 64, 97])
@pytest.mark.parametrize('window', [(-1, 0), (-1, -1), (9, 5), (-1, 7), (33, -1), (32, 32)])
def test_windows(window: tuple[int, int], seqlen: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_close(whole(seqlen), HEADS, device, window, dtype)


@every_dtype
@pytest.mark.parametrize('left', [1, 31, 32, 33, 63, 64, 65, 96])
def test_window_sizes_around_tiles(left: int, dtype: torch.dtype, device: torch.device) -> None:
    assert_close(whole(100), Heads(1, 1, 16, 16), device, (left, 0), dtype)


@every_dtype
@pytest.mark.parametrize('offset', [30, 31, 32])
@pytest.mark.parametrize('window', [(-1, 0), (33, 0), (-1, -1)])
def test_offsets_around_tiles(window: tuple[int, int], offset: int, dtype: torch.dtype, device: torch.device) -> None:
    """The first query reads a whole key tile, or all but one key, or one more."""
    assert_close(Extents(1, 40, 80, {'q_offset': offset}, [80]), HEADS, device, window, dtype)


def test_rows_with_almost_all_weight_on_one_key(device: torch.device) -> None:
    """There the rounding of the output changes delta by as much as the logit gradients."""
    heads = Heads(2, 2, 64, 64)
    tensors = make_inputs(whole(80), heads, device)
    tensors['q'] = 0.85 * tensors['k']
    tensors['v'] = 8 * tensors['v']
    tensors = {name: t.half() for name, t in tensors.items()}
    assert_attention_matches(window_attention, tensors, 'triton', window_size=(39, 0))


@pytest.mark.parametrize('seqlen', [1, 40])
def test_a_window_of_one_returns_the_values(seqlen: int, device: torch.device) -> None:
    tensors = make_inputs(whole(seqlen), TWO_GROUPS, device)
    out, _ = window_attention(**tensors, window_size=(0, 0), backend='triton')
    assert torch.equal(out, tensors['v'].repeat_interleave(2, 2))
    assert_close(whole(seqlen), TWO_GROUPS, device, (0, 0))


@pytest.mark.parametrize('scale', [0.0, -0.7])
@pytest.mark.parametrize('window', [(5, 0), (-1, 0)])
def test_scales_that_turn_the_order_of_keys(scale: float, window: tuple[int, int], device: torch.device) -> None:
    extents = whole(80)
    tensors, grads = make_inputs(extents, TWO_GROUPS, device), make_grads(extents, TWO_GROUPS, device)
    assert_close_to_eager(window_attention, tensors, grads, window_size=window, scale=scale)


@pytest.mark.quick
@pytest.mark.parametrize('group', [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_groups(group: int, device: torch.device) -> None:
    kv_heads = 2 if group < 8 else 1
    assert_close(whole(12), Heads(kv_heads * group, kv_heads, 16, 16), device, (5, 0))


@every_dtype
@pytest.mark.parametrize(('full_grid', 'parts'), [(1, 1), (5, 2), (9, 3), (1024, 6)])
def test_heads_of_a_group_are_added_in_parts(
    full_grid: int, parts: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are fewer parts if the grid is full without them, or if they exceed the workspace."""
    monkeypatch.setattr(keys, 'FULL_GRID', full_grid)
    heads = Heads(12, 2, 16, 16)
    assert keys._count_parts(6, 4, 1) == parts
    assert keys._count_parts(6, 4, keys.WORKSPACE) == 1
    assert_close(whole(40), heads, device, (12, 0), dtype)


@pytest.mark.parametrize('rows', [1, 2])
def test_parts_of_some_rows_at_a_time(rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch rows at a time, where the partial sums of all rows exceed the workspace."""
    heads = Heads(6, 1, 16, 16)
    bytes_of_row = 6 * 40 * 4 * (16 + 16)
    monkeypatch.setattr(keys, 'WORKSPACE', rows * bytes_of_row)
    assert_close(whole(40, batch=3), heads, device, (12, 0))


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
    """Lengths and offsets are columns of a table, or one number for all rows."""
    extents = EXTENTS[name]
    columns = {key: torch.stack((t, t), 1)[:, 0] for key, t in extents.where.items()}
    assert_close(replace(extents, where=columns), HEADS, device, (12, 0))
    if name == 'row offsets':
        one = {'q_offset': torch.tensor([7], dtype=torch.int32).expand(3)}
        assert_close(replace(extents, where=one), HEADS, device, (12, 0))


@pytest.mark.quick
@every_extent
@pytest.mark.parametrize(('window', 'dtype'), [((12, 0), torch.float32), ((9, 6), torch.float16)])
def test_query_offsets_and_lengths(
    window: tuple[int, int], dtype: torch.dtype, extents: Extents, device: torch.device
) -> None:
    assert_close(extents, Heads(2, 1, 16, 24), device, window, dtype)


@every_dtype
@pytest.mark.parametrize(('window', 'where'), [((-1, -1), {}), ((-1, 0), {'q_offset': 50}), ((5, -1), {'q_offset': 3})])
def test_keys_past_the_length_of_their_row(
    window: tuple[int, int], where: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Whole tiles of keys behind seqlens_k, which queries would otherwise read."""
    where = {'seqlens_k': row_integers([9, 0]), **where}
    assert_close(Extents(2, 40, 80, where, [9, 0]), HEADS, device, window, dtype)


@fewer_examples(0.4)
@given(
    drawn_extents(max_seqlen=70),
    drawn_heads(),
    st.integers(-1, 12),
    st.integers(-1, 12),
    st.booleans(),
    st.sampled_from([None, 0.7, -0.7]),
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
    # One key that is parallel or opposite to every query.
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
            assert error <= 2 * limit + rounding_term(gold[name], dtype) + rounding, name


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


@pytest.mark.quick
@pytest.mark.parametrize('extents', NOTHING_TO_READ.values(), ids=NOTHING_TO_READ)
def test_rows_with_nothing_to_read(extents: Extents, device: torch.device) -> None:
    tensors, grads = make_inputs(extents, HEADS, device), make_grads(extents, HEADS, device)
    results = run_triton(window_attention, tensors, grads, window_size=(8, 0), **place(extents.where, device))
    for name, t in results.items():
        assert t.eq(-torch.inf if name == 'out1' else 0).all(), name
