"""Gates inside the attentions, against eager, and `gated_sum` with gate_in_attention.

Selected attention has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.autograd.recompute import recompute
from native_sparse_attention.ops import gated_sum, select_blocks, window_attention
from native_sparse_attention.ops._triton.interval import keys
from native_sparse_attention.ops.gated_sum.triton import op as sum_op
from native_sparse_attention.testing import outputs_and_gradients
from tests.kernels import test_compressed_attention as compressed
from tests.support import feature_problems, problems
from tests.support.gate_problems import KINDS, assert_rules, every_dtype, every_kind, make_gate, multiplied
from tests.support.harness import (
    Tensors,
    assert_close_to_eager,
    assert_same_bits,
    make_grads,
    place,
    run_triton,
    same_bits,
)
from tests.support.problems import Extents, Heads, packed, row_integers, whole
from tests.support.window_attention_problems import HEADS, TWO_GROUPS, make_inputs

PACKED = packed([0, 17, 1, 30], uncovered=5)
# Group sizes of 1, 4 and 16.
GROUPS = [Heads(2, 2, 16, 16), Heads(8, 2, 16, 24), Heads(16, 1, 16, 16)]
Settings = dict[str, Any]


def assert_close(extents: Extents, heads: Heads, device: torch.device, tensors: Tensors, **settings: Any) -> None:
    settings |= {'window_size': settings.get('window_size', (12, 0)), **place(extents.where, device)}
    assert_close_to_eager(multiplied(window_attention), tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.quick
@every_dtype
@every_kind
@pytest.mark.parametrize('heads', GROUPS, ids=str)
@pytest.mark.parametrize('window', [(12, 0), (-1, 0), (9, 5)])
def test_windows(window: tuple[int, int], heads: Heads, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    extents = whole(40) if window[0] < 0 else PACKED
    tensors = make_inputs(extents, heads, device, dtype)
    tensors['gate'] = make_gate(tensors['q'], kind)
    assert_close(extents, heads, device, tensors, window_size=window, causal=window[1] == 0)


@pytest.mark.quick
@every_dtype
@pytest.mark.parametrize('kind', KINDS[1:])
def test_the_error_rules(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    heads = Heads(4, 2, 32, 24)
    tensors = make_inputs(whole(70), heads, device, dtype)
    tensors['gate'] = make_gate(tensors['q'], kind)
    assert_rules(window_attention, tensors, window_size=(40, 0))
    tensors = compressed.make_inputs(whole(70), heads, device, 2, dtype=dtype)
    tensors['gate'] = make_gate(tensors['q'], kind)
    assert_rules(compressed.attend, tensors, **compressed.settings_of(whole(70), device))


FEATURES = [('softcap',), ('sinks',), ('bias',), ('dropout',), ('segments', 'attn_mask'), feature_problems.FEATURES]


@every_dtype
@pytest.mark.parametrize('kind', KINDS[1:])
@pytest.mark.parametrize('names', FEATURES, ids=str)
def test_features(names: tuple[str, ...], kind: str, dtype: torch.dtype, device: torch.device) -> None:
    extents = whole(35, batch=2)
    tensors = make_inputs(extents, TWO_GROUPS, device, dtype)
    features = feature_problems.make_features(names, (2, 4, 35, 35), dtype=dtype, device=device, table=(1, 1))
    learned, settings = feature_problems.split_features(features)
    tensors |= {**learned, 'gate': make_gate(tensors['q'], kind)}
    assert_close(extents, TWO_GROUPS, device, tensors, **settings)


@pytest.mark.quick
@every_dtype
@every_kind
@pytest.mark.parametrize('pairs', [0, 2])
@pytest.mark.parametrize('heads', GROUPS, ids=str)
def test_compressed(heads: Heads, pairs: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Without memory the first queries read nothing."""
    for extents, more in ((PACKED, {}), (whole(40), {'causal': False})):
        tensors = compressed.make_inputs(extents, heads, device, pairs, dtype=dtype)
        tensors['gate'] = make_gate(tensors['q'], kind)
        settings = compressed.settings_of(extents, device) | more
        assert_close_to_eager(multiplied(compressed.attend), tensors, make_grads(extents, heads, device), **settings)


@every_dtype
def test_compressed_features(dtype: torch.dtype, device: torch.device) -> None:
    """Batch rows one at a time, and memory whose queries are summed in splits."""
    extents = whole(40, batch=2)
    tensors = compressed.make_inputs(extents, TWO_GROUPS, device, 2, dtype=dtype)
    tensors |= {'gate': make_gate(tensors['q']), 'sinks': torch.randn(4, 2, device=device)}
    settings = compressed.settings_of(extents, device) | {'softcap': 1.5}
    grads = make_grads(extents, TWO_GROUPS, device)
    assert_close_to_eager(multiplied(compressed.attend), tensors, grads, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, 'SPLIT', 16)
        patch.setattr(keys, 'WORKSPACE', 1)
        assert_close_to_eager(multiplied(compressed.attend), tensors, grads, **settings)


@every_dtype
@pytest.mark.parametrize('value', [0.0, -0.5])
def test_queries_that_read_nothing(value: float, dtype: torch.dtype, device: torch.device) -> None:
    where = {'seqlens_k': row_integers([0, 30, 9]), 'q_offset': row_integers([20, -11, -40])}
    extents = Extents(3, 40, 40, where, [0, 30, 9])
    tensors = make_inputs(extents, TWO_GROUPS, device, dtype)
    tensors['gate'] = torch.full_like(make_gate(tensors['q']), value)
    settings: Settings = {'window_size': (8, 0), **place(extents.where, device)}
    grads = make_grads(extents, TWO_GROUPS, device)
    assert_close_to_eager(multiplied(window_attention), tensors, grads, **settings)
    result = run_triton(multiplied(window_attention), tensors, grads, **settings)
    assert result['out1'][1, :, :11].eq(-torch.inf).all()
    for name in ('grad of q', 'grad of gate'):
        assert result[name][[0, 2]].eq(0).all()
        assert result[name][1, :11].eq(0).all()
    assert all(t.isfinite().all() for name, t in result.items() if name.startswith('grad'))


@every_dtype
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_a_gate_that_is_not_finite(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    """A non-finite gate affects its own query and the keys that this query reads."""
    tensors = make_inputs(whole(40), HEADS, device, dtype)
    tensors['gate'] = make_gate(tensors['q'])
    tensors['gate'][:, 20] = junk
    grads = make_grads(whole(40), HEADS, device)
    result = run_triton(multiplied(window_attention), tensors, grads, window_size=(5, 0))
    for name, first in (('grad of q', 20), ('grad of k', 15)):
        finite = result[name][0].isfinite().flatten(1).all(1)
        assert (~finite).nonzero().flatten().tolist() == list(range(first, 21)), name
    assert result['grad of gate'].isfinite().all()


@every_dtype
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_gates_of_queries_that_read_nothing(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    """Gates of queries without keys may have any value, like those of tokens that no sequence covers."""
    tensors = make_inputs(PACKED, TWO_GROUPS, device, dtype)
    tensors['gate'] = make_gate(tensors['q'])
    tensors['gate'][:, 48:] = junk
    settings: Settings = {'window_size': (12, 0), **place(PACKED.where, device)}
    result = run_triton(multiplied(window_attention), tensors, make_grads(PACKED, TWO_GROUPS, device), **settings)
    assert all(t.isfinite().all() for name, t in result.items() if name.startswith('grad'))
    assert result['grad of q'][:, 48:].eq(0).all()


@every_dtype
@pytest.mark.parametrize('value', [-0.7, torch.nan])
def test_other_gates_change_no_bit(value: float, dtype: torch.dtype, device: torch.device) -> None:
    """Gradients of other queries, and of keys that the query does not read, keep their bits."""
    tensors = make_inputs(whole(64), HEADS, device, dtype)
    tensors['gate'] = make_gate(tensors['q'], 'above 0')
    changed = tensors | {'gate': tensors['gate'].clone()}
    changed['gate'][:, 63] = value
    grads = make_grads(whole(64), HEADS, device)
    expected, result = (
        run_triton(multiplied(window_attention), t, grads, window_size=(20, 0)) for t in (tensors, changed)
    )
    for name, stop in (('grad of q', 63), ('grad of k', 43), ('grad of v', 43), ('grad of gate', 64)):
        assert same_bits(result[name][:, :stop], expected[name][:, :stop]), name


def gates_of(gate: Tensor, layout: str) -> Tensor:
    """Return the values of a gate in other memory, with NaN around them."""
    if layout == 'transposed':
        return gate.transpose(1, 2).contiguous().transpose(1, 2)
    beside = gate.new_full((*gate.shape, 3), torch.nan)
    beside[..., 1] = gate
    return beside[..., 1]


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('layout', ['sliced', 'transposed'])
def test_dtypes_and_strides_of_gates(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    """A gate of another dtype or stride gives the bits of its values, and its gradient is rounded once."""
    tensors = make_inputs(whole(40, batch=2), TWO_GROUPS, device, torch.float16)
    gate = make_gate(tensors['q'], dtype=dtype)
    grads = make_grads(whole(40, batch=2), TWO_GROUPS, device)
    settings: Settings = {'window_size': (12, 0)}
    attend = multiplied(window_attention)
    expected = run_triton(attend, {**tensors, 'gate': gate.float()}, grads, **settings)
    expected['grad of gate'] = expected['grad of gate'].to(dtype)
    gate = gates_of(gate, layout)
    assert not gate.is_contiguous()
    result = run_triton(attend, {**tensors, 'gate': gate}, grads, **settings)
    for name in ('grad of q', 'grad of k', 'grad of v', 'grad of gate'):
        assert same_bits(result[name], expected[name]), name


@every_dtype
def test_the_forward_has_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_inputs(PACKED, HEADS, device, dtype)
    blocks = compressed.make_inputs(PACKED, HEADS, device, 1, dtype=dtype)
    window: Settings = {'window_size': (12, 0), **place(PACKED.where, device)}
    gate = make_gate(tensors['q'])
    cases: list[tuple[Callable[..., Any], Settings, Settings]] = [
        (window_attention, tensors, window),
        (compressed.attend, blocks, compressed.settings_of(PACKED, device)),
    ]
    for attend, inputs, settings in cases:
        leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        results = [attend(**leaves, **settings, backend='triton', **given) for given in ({}, {'gate': gate})]
        for plain, gated in zip(*results, strict=True):
            assert same_bits(plain, gated)
        assert [t.requires_grad for result in results for t in result] == [True, True, True, False]


def test_a_sum_with_gates_in_the_attentions(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum has the same bits, passes its gradient on, and launches no kernel for it."""
    names = ('out_compressed', 'out_selected', 'out_window')
    outs: Settings = {name: torch.randn(1, 9, 2, 16, device=device, requires_grad=True) for name in names}
    gates = torch.randn(1, 9, 2, 3, device=device, requires_grad=True)
    grad = torch.randn(1, 9, 2, 16, device=device)
    monkeypatch.setattr(sum_op, '_backward', refuse)
    out = gated_sum(gates, **outs, gate_in_attention=True, backend='triton')
    assert same_bits(out, gated_sum(gates, **outs, backend='triton'))
    none, *found = torch.autograd.grad(out, [gates, *outs.values()], grad, allow_unused=True)
    assert none is None
    assert all(same_bits(t, grad) for t in found)
    plain = gated_sum(gates, **outs, backend='triton')
    with pytest.raises(AssertionError, match='a kernel of the sum'):
        plain.backward(grad)


def refuse(*_: Any) -> Any:
    raise AssertionError('a kernel of the sum')


# The composition

NSA: Settings = {
    'compress_block_size': 4,
    'compress_stride': 2,
    'selection_block_size': 4,
    'num_selected': 3,
    'window_size': (5, 0),
}


def make_nsa(extents: Extents, heads: Heads, device: torch.device, kind: str = 'any') -> dict[str, Tensor]:
    """Return float32 tensors for `attend`, with sinks and a memory pair."""
    q, k, v = problems.make_qkv(extents, heads)
    k_cmp, v_cmp = problems.make_compressed(extents, heads, 4, 2)
    mem_k, mem_v = problems.make_mem_kv(heads, 1)
    tensors = {'q': q, 'k': k, 'v': v, 'k_cmp': k_cmp, 'v_cmp': v_cmp, 'mem_k': mem_k, 'mem_v': mem_v}
    tensors |= {'sinks': problems.normal(heads.heads), 'sinks_cmp': problems.normal(heads.heads)}
    tensors = place(tensors, device)
    return tensors | {f'gate_{branch}': make_gate(tensors['q'], kind) for branch in range(3)}


def attend(mem_k: Tensor, mem_v: Tensor, **arguments: Any) -> Tensor:
    gates = [arguments.pop(f'gate_{branch}', None) for branch in range(3)]
    if all(isinstance(gate, Tensor) for gate in gates):
        gates = torch.stack(gates, -1)
    return nsa(**arguments, gates=gates, mem_kv=(mem_k, mem_v), **NSA)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls of the kernel that differentiates a sum."""
    calls: list[Any] = []
    backward = sum_op._backward

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return backward(*arguments)

    monkeypatch.setattr(sum_op, '_backward', counted)
    return calls


@pytest.mark.quick
@every_kind
@pytest.mark.parametrize(
    ('extents', 'heads'),
    [(whole(13, batch=2), Heads(4, 1, 8, 8)), (packed([5, 0, 9], 2), Heads(4, 2, 8, 6))],
    ids=['whole', 'packed'],
)
def test_nsa(extents: Extents, heads: Heads, kind: str, device: torch.device, sums: list[Any]) -> None:
    tensors = make_nsa(extents, heads, device, kind)
    grads = make_grads(extents, heads, device)[:1]
    where = place(extents.where, device)
    assert_close_to_eager(attend, tensors, grads, softcap=2.0, dropout_p=0.2, dropout_seed=3, **where)
    assert not sums


@pytest.mark.parametrize('left_out', [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_branches_left_out(left_out: tuple[int, ...], device: torch.device, sums: list[Any]) -> None:
    tensors = make_nsa(whole(13), HEADS, device)
    for branch in left_out:
        tensors.pop(f'gate_{branch}')
    assert_close_to_eager(attend, tensors, make_grads(whole(13), HEADS, device)[:1])
    assert not sums


def test_where_attentions_take_no_gates(device: torch.device, sums: list[Any]) -> None:
    """Differentiable or custom selection needs gradients of log-sum-exps, and float16 has few bits for small products.
    Calls without gradients need no gates in the attentions.
    """
    tensors, grads = make_nsa(whole(13), HEADS, device), make_grads(whole(13), HEADS, device)[:1]
    assert_close_to_eager(attend, tensors, grads, use_diff_topk=True)
    assert len(sums) == 1
    halves = {name: t.half() for name, t in tensors.items()}
    run_triton(attend, halves, [grad.half() for grad in grads])
    assert len(sums) == 2
    learned: list[Tensor] = []

    def choose(q: Tensor, k_cmp: Tensor, lse: Tensor, **settings: Any) -> Tensor:
        learned.append(lse.sum())
        return select_blocks(q, k_cmp, lse, **settings)

    run_triton(attend, tensors, grads, choose=choose)
    assert len(sums) == 3
    assert learned[0].requires_grad
    expected = attend(**tensors, backend='triton')
    out = attend(**{name: t.requires_grad_() for name, t in tensors.items()}, backend='triton')
    assert out.requires_grad
    assert not expected.requires_grad
    assert same_bits(out, expected)


def test_gates_without_attentions(device: torch.device) -> None:
    """A branch without selected blocks has gradients of 0, as in eager."""
    q, k, v = (torch.randn(1, 9, heads, 8, device=device) for heads in (2, 1, 1))
    gate = torch.rand(1, 9, 2, device=device, requires_grad=True)
    settings: Settings = NSA | {'num_selected': 0, 'backend': 'triton'}
    out = nsa(q, k, v, None, None, (None, gate, None), **settings)
    out.sum().backward()
    assert gate.grad is not None
    assert not gate.grad.any()


def test_second_derivatives_of_nsa_are_refused(device: torch.device) -> None:
    tensors = {name: t.requires_grad_() for name, t in make_nsa(whole(9), HEADS, device).items()}
    for name in ('q', 'v', 'gate_0', 'gate_1', 'gate_2'):
        out = attend(**tensors, backend='triton')
        (grad,) = torch.autograd.grad(out.square().sum(), tensors[name], create_graph=True)
        with pytest.raises(RuntimeError, match='has no second derivative: use backend="eager"'):
            grad.square().sum().backward()


def test_recompute(device: torch.device, sums: list[Any]) -> None:
    """Recompute works with gates too."""
    tensors, grads = make_nsa(whole(13), HEADS, device), make_grads(whole(13), HEADS, device)[:1]

    def again(**leaves: Any) -> Tensor:
        return recompute(lambda choose: attend(**leaves, choose=choose))

    assert_same_bits(run_triton(again, tensors, grads), run_triton(attend, tensors, grads, choose=select_blocks))
    assert not sums


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.plain_memory  # the compiler traces allocations
def test_compiled(device: torch.device, sums: list[Any], fresh_graphs: None) -> None:
    tensors, grads = make_nsa(whole(9), HEADS, device), make_grads(whole(9), HEADS, device)[:1]
    run = partial(attend, backend='triton')
    compiled: Any = torch.compile(run, fullgraph=True, backend='aot_eager')
    result, expected = (outputs_and_gradients(function, tensors, grads) for function in (compiled, run))
    assert result.keys() == expected.keys()
    for name, t in result.items():
        torch.testing.assert_close(t, expected[name])
    assert not sums
