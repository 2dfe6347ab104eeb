"""Soft caps, sinks, segments, masks, bias and dropout in the kernels of window and compressed attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.core.random import keep
from native_sparse_attention.ops import compressed_attention, window_attention
from native_sparse_attention.ops._triton.interval import keys, op, settings
from native_sparse_attention.ops._triton.launch import Settings
from native_sparse_attention.testing import assert_attention_matches, outputs_and_gradients
from tests.support.feature_problems import DIFFERENTIABLE, FEATURES, SEED, make_features, split_features
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    assert_slopes_at_the_cap,
    fence,
    fewer_examples,
    make_grads,
    place,
    run_triton,
)
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_extents,
    drawn_heads,
    make_compressed,
    packed,
    whole,
)
from tests.support.window_attention_problems import make_inputs

HEADS = Heads(4, 2, 16, 24)
every_dtype = pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
EXTENTS = {
    'offset': Extents(1, 30, 90, {'q_offset': 35}, [90]),
    'lengths': Extents(2, 33, 70, {'seqlens_k': torch.tensor([70, 41], dtype=torch.int32)}, [70, 41]),
    'row offsets': Extents(2, 20, 40, {'q_offset': torch.tensor([12, -5], dtype=torch.int32)}, [40, 40]),
    'packed': packed([20, 0, 33], uncovered=5),
    'packed, other keys': Extents(
        1, 50, 80, {'cu_seqlens': cumulative([20, 0, 25]), 'cu_seqlens_k': cumulative([33, 7, 38])}, [33, 7, 38]
    ),
    'packed, offset': Extents(
        1,
        40,
        60,
        {'cu_seqlens': cumulative([20, 20]), 'cu_seqlens_k': cumulative([50, 10]), 'q_offset': 7},
        [50, 10],
    ),
}


def make_problem(
    names: tuple[str, ...],
    extents: Extents,
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    table: tuple[int, int] | None = None,
    **given_settings: Any,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return differentiable tensors and settings, with NaN around them and in tokens without a sequence."""
    tensors = make_inputs(extents, heads, device, dtype)
    shape = (extents.batch, heads.heads, extents.seqlen_q, extents.seqlen_k)
    features = make_features(names, shape, dtype=dtype, device=device, table=table)
    given_settings.setdefault('window_size', (20, 0))
    given_settings['causal'] = given_settings['window_size'][1] == 0
    more, others = split_features(features)
    tensors |= {name: fence(t) for name, t in more.items()}
    return tensors, {**others, **place(extents.where, device), **given_settings}


def assert_matches(*problem: Any, **changes: Any) -> None:
    """Assert equality by the error rules."""
    tensors, given_settings = make_problem(*problem, **changes)
    assert_attention_matches(window_attention, tensors, 'triton', **given_settings)


@pytest.mark.quick
@every_dtype
@pytest.mark.parametrize('name', FEATURES)
def test_each_feature(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_matches((name,), whole(70, batch=2), HEADS, device, dtype)


@pytest.mark.parametrize('place_of_queries', EXTENTS)
def test_all_of_them(place_of_queries: str, device: torch.device) -> None:
    extents = EXTENTS[place_of_queries]
    dtype = torch.float16 if 'offset' in place_of_queries else torch.float32
    tensors, given_settings = make_problem(FEATURES, extents, HEADS, device, dtype, window_size=(12, 7))
    grads = make_grads(extents, HEADS, device)
    assert_close_to_eager(window_attention, tensors, grads, **given_settings)


@fewer_examples(0.5)
@given(
    drawn_extents(20),
    drawn_heads(),
    st.sampled_from(list(itertools.combinations(FEATURES, 2))),
    st.sampled_from([(5, 0), (-1, 0), (4, 3), (-1, -1), (-1, 2)]),
    st.sampled_from([(None, None), (1, None), (None, 1), (1, 1)]),
    st.sampled_from([None, -0.7, 0.0]),
)
def test_drawn_pairs(
    extents: Extents,
    heads: Heads,
    names: tuple[str, str],
    window: tuple[int, int],
    broadcast: tuple[int | None, int | None],
    scale: float | None,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    table = (broadcast[0] or extents.batch, broadcast[1] or heads.heads)
    tensors, given_settings = make_problem(
        names, extents, heads, device, table=table, window_size=window, scale=scale
    )  # fmt: skip
    assert_close_to_eager(window_attention, tensors, make_grads(extents, heads, device), **given_settings)


def test_logits_at_the_cap(device: torch.device) -> None:
    tensors, grads = make_inputs(whole(40), HEADS, device, torch.float32), make_grads(whole(40), HEADS, device)
    assert_slopes_at_the_cap(window_attention, tensors, grads, window_size=(-1, 0))


@pytest.mark.parametrize('window', [(-1, 0), (33, 32), (0, 0)])
def test_windows(window: tuple[int, int], device: torch.device) -> None:
    """Tiles in the middle of an interval need no mask for positions, but one for features."""
    assert_matches(FEATURES, whole(100), Heads(2, 1, 16, 16), device, torch.float16, window_size=window)


@pytest.mark.parametrize(('head_dim', 'value_dim', 'group'), [(80, 64, 1), (40, 100, 3), (256, 16, 6)])
def test_sizes(head_dim: int, value_dim: int, group: int, device: torch.device) -> None:
    assert_matches(FEATURES, whole(40), Heads(group, 1, head_dim, value_dim), device, torch.float16)


@pytest.mark.parametrize('table', [(1, 1), (1, 4), (2, 1)])
def test_tables_for_several_rows_and_heads(table: tuple[int, int], device: torch.device) -> None:
    names = ('bias', 'attn_mask')
    assert_matches(names, whole(20, batch=2), HEADS, device, table=table)


def test_strides_of_tables(device: torch.device) -> None:
    tensors, given_settings = make_problem(('bias', 'attn_mask'), whole(20, batch=2), HEADS, device, table=(1, 4))
    expected = run_triton(window_attention, tensors, None, **given_settings)
    bias, attn_mask = tensors['bias'], given_settings['attn_mask']
    for lay_out in (lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), 3).flatten(2, 3)[:, :, ::2]):
        settings = given_settings | {'attn_mask': lay_out(attn_mask)}
        result = run_triton(window_attention, tensors | {'bias': lay_out(bias)}, None, **settings)
        assert_same_bits(result, expected)


def test_the_gradient_of_a_bias_in_float32(device: torch.device) -> None:
    """A float32 bias with half tensors; its gradient is a sum over rows and heads, rounded once."""
    tensors, given_settings = make_problem(('bias',), whole(40, batch=2), HEADS, device, torch.float16, table=(1, 1))
    tensors['bias'] = tensors['bias'].float()
    assert_attention_matches(window_attention, tensors, 'triton', **given_settings)


def test_a_bias_reaches_keys_of_other_sequences_nowhere(device: torch.device) -> None:
    extents = EXTENTS['packed, other keys']
    tensors, given_settings = make_problem(('bias',), extents, HEADS, device, window_size=(-1, -1))
    grads = make_grads(extents, HEADS, device)
    dbias = run_triton(window_attention, tensors, grads, **given_settings)['grad of bias']
    own = torch.zeros(50, 80, dtype=torch.bool, device=device)
    own[:20, :33] = own[20:45, 40:78] = True
    assert (dbias[:, :, ~own] == 0).all()
    read = own & (tensors['bias'] != -torch.inf)
    assert (dbias[read] != 0).all()


@pytest.mark.parametrize('lowest', [-1e30, torch.finfo(torch.float32).min])
def test_a_bias_that_is_next_to_minus_infinity(lowest: float, device: torch.device) -> None:
    """As in mask tables: rows without other keys read the mean of the values, and no gradient is NaN."""
    tensors, given_settings = make_problem(('bias',), whole(20), HEADS, device, window_size=(-1, 0))
    tensors['bias'] = torch.zeros(1, 1, 20, 20, device=device)
    tensors['bias'][..., :7] = lowest
    result = run_triton(window_attention, tensors, make_grads(whole(20), HEADS, device), **given_settings)
    expected = tensors['v'][:, :7].cumsum(1) / torch.arange(1, 8, device=device)[:, None, None]
    torch.testing.assert_close(result['out0'][:, :7], expected.repeat_interleave(2, 2))
    assert (result['out1'][..., :7] < -9e29).all()
    assert all(t.isfinite().all() for t in result.values())
    assert (result['grad of v'][:, :7].abs() < 100).all()


@pytest.mark.parametrize(
    ('names', 'dtype'),
    [
        (('segments',), torch.float16),
        (('attn_mask',), torch.float16),
        (('bias', 'softcap'), torch.float16),
        (FEATURES, torch.float32),
    ],
)
def test_masked_keys_may_hold_anything(names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Keys that no query reads, and keys that some queries of a tile do not read."""
    extents = whole(70)
    tensors, given_settings = make_problem(names, extents, HEADS, device, dtype, window_size=(-1, -1))
    for table in (given_settings.get('attn_mask'), tensors.get('bias')):
        if table is not None:
            table[..., 30:34] = False if table.dtype == torch.bool else -torch.inf
            table[:, :, :50, 40] = False if table.dtype == torch.bool else -torch.inf
    if 'segment_ids' in given_settings:
        given_settings['segment_ids'][1][:, 30:34] = -1
        given_settings['segment_ids'][1][:, 40] = given_settings['segment_ids'][0][:, -1]
    grads = make_grads(extents, HEADS, device)
    expected = run_triton(window_attention, tensors, grads, **given_settings)
    spoiled = dict(tensors)
    for name in 'kv':
        assert (expected[f'grad of {name}'][:, 30:34] == 0).all()
        spoiled[name] = tensors[name].clone()
        spoiled[name][:, 30:34] = torch.nan
    assert_same_bits(run_triton(window_attention, spoiled, grads, **given_settings), expected)
    for name in 'kv':
        spoiled[name][:, 40] = torch.nan
    result = run_triton(window_attention, spoiled, grads, **given_settings)
    unread = result['out0'].isfinite().all(-1)
    assert unread.any()
    assert not unread.all()
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][unread], expected[name][unread]), name


@pytest.mark.parametrize('sink', [None, 0.5, -torch.inf])
def test_rows_with_nothing_to_read(sink: float | None, device: torch.device) -> None:
    extents = whole(32)
    names = ('segments', 'bias', 'attn_mask', 'softcap', 'dropout')
    for name in ('segments', 'bias', 'attn_mask'):
        tensors, given_settings = make_problem(names, extents, HEADS, device)
        if name == 'bias':
            tensors['bias'][:, :, 7:21] = -torch.inf
        elif name == 'attn_mask':
            given_settings['attn_mask'][:, :, 7:21] = False
        else:
            given_settings['segment_ids'][0][:, 7:21] = -2
        if sink is not None:
            tensors['sinks'] = torch.full((4,), sink, device=device)
        result = run_triton(window_attention, tensors, make_grads(extents, HEADS, device), **given_settings)
        assert (result['out0'][:, 7:21] == 0).all()
        assert (result['grad of q'][:, 7:21] == 0).all()
        assert (result['out1'][..., 7:21] == (-torch.inf if sink is None else sink)).all()
        assert (result['grad of bias'][:, :, 7:21] == 0).all()
        assert all(t.isfinite().all() for n, t in result.items() if n != 'out1')
        if sink == -torch.inf:
            assert (result['grad of sinks'] == 0).all()
            del tensors['sinks']
            without = run_triton(window_attention, tensors, make_grads(extents, HEADS, device), **given_settings)
            assert torch.equal(without['out1'], result['out1'])


def test_gradients_of_sinks_in_many_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient does not depend on how many queries are summed at a time; the last part has fewer."""
    extents = EXTENTS['lengths']
    tensors, given_settings = make_problem(('sinks',), extents, HEADS, device)
    grads = make_grads(extents, HEADS, device)
    at_once = run_triton(window_attention, tensors, grads, **given_settings)
    monkeypatch.setattr(op, 'SINK_ELEMENTS', extents.batch * HEADS.heads * 10)
    in_parts = run_triton(window_attention, tensors, grads, **given_settings)
    torch.testing.assert_close(in_parts['grad of sinks'], at_once['grad of sinks'])


@pytest.mark.parametrize('seqlen_k', [0, 30])
def test_sinks_alone(seqlen_k: int, device: torch.device) -> None:
    """There are no keys, or none within the window."""
    extents = Extents(2, 5, seqlen_k, {'q_offset': -50}, [seqlen_k] * 2)
    tensors, given_settings = make_problem(('sinks',), extents, HEADS, device)
    grads = make_grads(extents, HEADS, device)
    result = run_triton(window_attention, tensors, grads, **given_settings)
    expected = tensors['sinks'].logsumexp(1)[None, :, None].expand(2, 4, 5)
    assert (result['out0'] == 0).all()
    torch.testing.assert_close(result['out1'], expected)
    torch.testing.assert_close(result['grad of sinks'].sum(1), grads[1].sum((0, 2)))


@triton.jit
def philox_kernel(seed_ptr, out_ptr, heads, queries, KEYS: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    for query in range(queries):
        key = tl.arange(0, KEYS)
        numbers = tl.philox(tl.load(seed_ptr), key, query, head, row)[0]
        tl.store(out_ptr + ((row * heads + head) * queries + query) * KEYS + key, numbers.to(tl.int64))


def dropped_weights(device: torch.device, dropout_p: float, seed: int) -> Tensor:
    """Return `[B, HQ, T, S]`: True where the value of a single key does not arrive."""
    q, k = (torch.zeros(2, length, heads, 16, device=device) for length, heads in ((20, 4), (32, 2)))
    v = torch.eye(32, device=device)[None, :, None].expand(2, 32, 2, 32)
    given_settings: dict[str, Any] = {'window_size': (-1, -1), 'causal': False, 'dropout_p': dropout_p}
    out, _ = window_attention(q, k, v, **given_settings, dropout_seed=seed, backend='triton')
    return out.transpose(1, 2) == 0


@pytest.mark.quick
@pytest.mark.parametrize(('dropout_p', 'seed'), [(1e-3, 7), (0.25, 0), (0.5, SEED), (0.9, -1)])
def test_dropout_is_that_of_philox(dropout_p: float, seed: int, device: torch.device) -> None:
    dropped = dropped_weights(device, dropout_p, seed)
    numbers = torch.empty(2, 4, 20, 32, dtype=torch.int64, device=device)
    seeds = torch.tensor([seed], device=device)
    kernel: Any = philox_kernel
    kernel[(2, 4)](seeds, numbers, 4, 20, 32)
    assert torch.equal(dropped, numbers < round(dropout_p * 2**32))
    sizes = [torch.arange(size, device=device).view(-1, *(1,) * (3 - i)) for i, size in enumerate(numbers.shape)]
    assert torch.equal(~dropped, keep(seeds, dropout_p, *sizes))


def test_features_do_not_depend_on_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, given_settings = make_problem(FEATURES, whole(70), HEADS, device)
    grads = make_grads(whole(70), HEADS, device)
    first = run_triton(window_attention, tensors, grads, **given_settings)
    dropped = dropped_weights(device, 0.4, SEED)
    for name in ('FORWARD', 'DQ', 'DQ_WINDOW', 'DKV', 'DKV_WINDOW'):
        table = dict.fromkeys(getattr(settings, name), Settings(16, 16, 4, 1))
        monkeypatch.setattr(settings, name, table)
    second = run_triton(window_attention, tensors, grads, **given_settings)
    assert torch.equal(dropped, dropped_weights(device, 0.4, SEED))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-5)


def test_a_seed_is_a_number_or_a_tensor_or_drawn(device: torch.device) -> None:
    tensors, _ = make_problem((), whole(20), HEADS, device)

    def run(seed: Any) -> Tensor:
        call: Any = window_attention
        return call(**tensors, window_size=(-1, 0), dropout_p=0.5, dropout_seed=seed, backend='triton')[0]

    assert torch.equal(run(5), run(torch.tensor([5], device=device)))
    assert not torch.equal(run(5), run(6))
    torch.manual_seed(3)
    first, second = run(None), run(None)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(run(None), first)


@every_dtype
@pytest.mark.parametrize('position', [3, 31])
def test_the_future_changes_nothing(position: int, dtype: torch.dtype, device: torch.device) -> None:
    tensors, given_settings = make_problem(FEATURES, whole(70), HEADS, device, dtype)
    grads = make_grads(whole(70), HEADS, device)
    grads[0][:, position + 1 :] = 0
    grads[1][..., position + 1 :] = 0
    expected = run_triton(window_attention, tensors, grads, **given_settings)
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in 'qkv':
        changed[name][:, position + 1 :] = torch.nan
    for table in (changed['bias'], given_settings['attn_mask']):
        table[:, :, position + 1 :] = table[:, :, position + 1 :].flip(2)
        table[..., position + 1 :] = table[..., position + 1 :].flip(3)
    given_settings['mask'][:, position + 1 :] = True
    result = run_triton(window_attention, changed, grads, **given_settings)
    past = slice(position + 1)
    assert torch.equal(result['out0'][:, past], expected['out0'][:, past])
    assert torch.equal(result['out1'][..., past], expected['out1'][..., past])
    assert torch.equal(result['grad of q'][:, past], expected['grad of q'][:, past])
    assert torch.equal(result['grad of bias'][:, :, past, past], expected['grad of bias'][:, :, past, past])


def test_parts_of_some_rows_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part uses the tables and random numbers of its own batch rows."""
    heads = Heads(3, 1, 16, 16)
    tensors, given_settings = make_problem(FEATURES, whole(20, batch=3), heads, device)
    grads = make_grads(whole(20, batch=3), heads, device)
    expected = run_triton(window_attention, tensors, grads, **given_settings)
    monkeypatch.setattr(keys, 'WORKSPACE', 2 * 3 * 20 * 4 * (16 + 16))
    assert_same_bits(run_triton(window_attention, tensors, grads, **given_settings), expected)


@pytest.mark.parametrize('needed', [*'qkv', *DIFFERENTIABLE])
def test_each_gradient_alone(needed: str, device: torch.device) -> None:
    tensors, given_settings = make_problem(FEATURES, whole(40), HEADS, device)
    grads = make_grads(whole(40), HEADS, device)
    expected = run_triton(window_attention, tensors, grads, **given_settings)
    leaves = {name: t.detach().requires_grad_(name == needed) for name, t in tensors.items()}
    outputs = window_attention(**leaves, **given_settings, backend='triton')
    torch.autograd.backward(outputs, grads)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name == needed)
        assert leaf.grad is None or torch.equal(leaf.grad, expected[f'grad of {name}'])


def attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, mem_k: Tensor | None = None, mem_v: Tensor | None = None, **given_settings: Any
) -> tuple[Tensor, Tensor]:
    mem_kv = None if mem_k is None or mem_v is None else (mem_k, mem_v)
    return compressed_attention(q, k, v, mem_kv=mem_kv, block_size=4, stride=2, **given_settings)


@pytest.mark.quick
@every_dtype
@pytest.mark.parametrize(('names', 'pairs'), [(('softcap',), 0), (('sinks',), 2), (('softcap', 'sinks'), 2)])
@pytest.mark.parametrize('extents', [whole(70, batch=2), packed([20, 3, 33], uncovered=5)], ids=['whole', 'packed'])
def test_compressed_attention(
    extents: Extents, pairs: int, names: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    q = make_inputs(extents, HEADS, device, dtype)['q']
    k, v = (fence(t.to(device, dtype)) for t in make_compressed(extents, HEADS, 4, 2, more=1))
    tensors = {'q': q, 'k': k, 'v': v}
    if pairs:
        for name, dim in (('mem_k', HEADS.head_dim), ('mem_v', HEADS.value_dim)):
            tensors[name] = fence(torch.randn(HEADS.kv_heads, pairs, dim, device=device).to(dtype))
    more, others = split_features(make_features(names, (extents.batch, 4, 1, 1), device=device))
    where = place(extents.where, device) | ({} if extents.packed else {'seqlen_k': extents.seqlen_k})
    assert_attention_matches(attend_compressed, tensors | more, 'triton', **others, **where)


def test_torch_compile_takes_them_as_one_graph(device: torch.device) -> None:
    tensors, given_settings = make_problem(FEATURES, whole(20), Heads(2, 1, 16, 16), device)

    def attend(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        return window_attention(**leaves, **given_settings, backend='triton')

    compiled = torch.compile(attend, fullgraph=True, backend='inductor' if device.type == 'cuda' else 'aot_eager')
    results = [outputs_and_gradients(function, tensors) for function in (compiled, attend)]
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-5, atol=1e-5)
