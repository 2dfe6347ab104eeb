"""The composition: its definition, gradients of differentiable selection, and the arguments of inner calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from native_sparse_attention import nsa
from native_sparse_attention.composition import backend_of
from native_sparse_attention.core.backend import choose_backend, serves
from native_sparse_attention.ops._triton import support
from native_sparse_attention.testing import ROW_LIMITS, row_errors
from tests.definition import definition
from tests.support.problems import (
    Extents,
    Heads,
    assert_agree,
    drawn_block_sizes,
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

Sizes = tuple[int, int, int]
SIZES: Sizes = (5, 2, 4)
HEADS = Heads(6, 2, 4, 3)
NAMES: tuple[str, ...] = ('q', 'k', 'v', 'k_cmp', 'v_cmp', 'gates')
OPTIONAL = ('q_cmp', 'q_window', 'k_window', 'v_window', 'mem_k', 'mem_v')


def make_inputs(
    extents: Extents, heads: Heads, sizes: Sizes, pairs: int = 1, shared: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of `nsa` by name. shared: the branches read the same queries, keys and values."""
    gates = torch.rand(extents.batch, extents.seqlen_q, heads.heads, 3).double()
    tensors = *make_qkv(extents, heads), *make_compressed(extents, heads, *sizes[:2], more=1), gates
    inputs: dict[str, Tensor] = dict(zip(NAMES, tensors, strict=True))
    if pairs:
        inputs |= dict(zip(('mem_k', 'mem_v'), make_mem_kv(heads, pairs), strict=True))
    if not shared:
        inputs |= dict(zip(('q_cmp', 'k_window', 'v_window'), make_qkv(extents, heads), strict=True))
        inputs['q_window'] = make_qkv(extents, heads)[0]
    return inputs


def settings_of(sizes: Sizes, **settings: Any) -> dict[str, Any]:
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    return {**dict(zip(names, sizes, strict=True)), 'num_selected': 3, 'window_size': (3, 0), **settings}


def call(function: Any, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    inputs = dict(inputs)
    mem_kv = (inputs.pop('mem_k'), inputs.pop('mem_v')) if 'mem_k' in inputs else None
    return function(**inputs, mem_kv=mem_kv, **settings)


def assert_is_its_definition(inputs: dict[str, Tensor], **settings: Any) -> None:
    op, by_definition = (
        lambda *tensors, f=f: call(f, dict(zip(inputs, tensors, strict=True)), **settings)
        for f in (nsa, definition.nsa)
    )
    assert_agree(op, by_definition, *inputs.values())


counts = st.integers(0, 3)


@given(
    extents=drawn_extents(max_seqlen=16),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    pairs=counts,
    shared=st.booleans(),
    num_selected=st.integers(0, 5),
    num_init=counts,
    num_local=counts,
    num_recent=st.integers(0, 9),
    window=st.integers(-1, 6),
    share_group=st.booleans(),
    use_diff_topk=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
)
def test_definition(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    pairs: int,
    shared: bool,
    num_selected: int,
    num_init: int,
    num_local: int,
    num_recent: int,
    window: int,
    share_group: bool,
    use_diff_topk: bool,
    causal: bool,
    scale: float | None,
) -> None:
    settings = settings_of(
        sizes,
        num_selected=num_selected,
        num_init=num_init,
        num_local=num_local,
        num_recent=num_recent if causal else 0,
        window_size=(window, 0 if causal else window),
        share_group=share_group,
        use_diff_topk=use_diff_topk,
        causal=causal,
        scale=scale,
        **extents.where,
    )
    assert_is_its_definition(make_inputs(extents, heads, sizes, pairs, shared), **settings)


ODD_PROBLEMS = {
    'shorter than a block': (whole(6), (7, 3, 6)),
    'one block': (whole(7), (7, 3, 6)),
    'one block and a rest': (whole(8), (7, 3, 6)),
    'blocks of one': (whole(9), (1, 1, 1)),
    'no overlap': (whole(17), (4, 4, 4)),
    'selection below compression': (whole(19), (9, 2, 4)),
    'one token': (whole(1), (5, 2, 4)),
    'one query at the end': (Extents(2, 1, 19, {}, [19, 19]), (5, 2, 4)),
    'a chunk in the middle': (Extents(1, 5, 21, {'q_offset': 8}, [21]), (5, 2, 4)),
    'rows of their own': (
        Extents(2, 4, 18, {'q_offset': row_integers([2, 11]), 'seqlens_k': row_integers([6, 15])}, [6, 15]),
        (5, 2, 4),
    ),
    'packed': (packed([0, 3, 11, 0, 8], uncovered=2), (5, 2, 4)),
}


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(('extents', 'sizes'), ODD_PROBLEMS.values(), ids=ODD_PROBLEMS)
def test_odd_shapes_in_groups_of_three(extents: Extents, sizes: Sizes, share_group: bool, causal: bool) -> None:
    settings = settings_of(
        sizes,
        window_size=(3, 0 if causal else 3),
        share_group=share_group,
        use_diff_topk=True,
        causal=causal,
        **extents.where,
    )
    assert_is_its_definition(make_inputs(extents, HEADS, sizes), **settings)


@pytest.mark.parametrize('use_diff_topk', [False, True])
def test_gradcheck(use_diff_topk: bool) -> None:
    extents, heads = Extents(1, 4, 14, {}, [14]), Heads(4, 2, 3, 2)
    inputs = make_inputs(extents, heads, SIZES)
    inputs['k_cmp'], inputs['v_cmp'] = inputs['k_cmp'][:, :-1], inputs['v_cmp'][:, :-1]
    # The factor 1 + (s - stop_gradient(s)) has a gradient that no difference of values shows: check inputs without it.
    checked = [name for name in inputs if not use_diff_topk or name not in ('q_cmp', 'k_cmp', 'mem_k')]

    def run(*tensors: Tensor) -> Tensor:
        settings = settings_of(SIZES, use_diff_topk=use_diff_topk)
        return call(nsa, inputs | dict(zip(checked, tensors, strict=True)), **settings)

    assert torch.autograd.gradcheck(run, [inputs[name].clone().requires_grad_() for name in checked], fast_mode=True)


def test_all_blocks_and_a_wide_window_are_dense_attention_twice() -> None:
    inputs = make_inputs(whole(21, batch=2), HEADS, SIZES, shared=True)
    inputs['gates'][..., 0] = 0
    for causal in (True, False):
        settings = settings_of(SIZES, num_selected=6, window_size=(21, 0 if causal else 21), causal=causal)
        q, k, v = (inputs[name].transpose(1, 2) for name in 'qkv')
        dense = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        expected = dense * inputs['gates'].sum(-1, keepdim=True)
        torch.testing.assert_close(call(nsa, inputs, **settings), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('branch', [0, 1, 2])
def test_a_closed_gate_hides_a_branch(branch: int) -> None:
    inputs = make_inputs(whole(21), HEADS, SIZES)
    inputs['gates'][..., branch] = 0
    out = call(nsa, inputs, **settings_of(SIZES))
    for name in (('v_cmp', 'mem_v'), ('v',), ('v_window',))[branch]:
        changed = call(nsa, inputs | {name: inputs[name] * -3}, **settings_of(SIZES))
        assert torch.equal(changed.nan_to_num(), out.nan_to_num())


def test_differentiable_selection_changes_no_value() -> None:
    inputs = make_inputs(whole(40), HEADS, SIZES)
    results = [call(nsa, inputs, **settings_of(SIZES, use_diff_topk=use, num_selected=5)) for use in (False, True)]
    assert torch.equal(*results)


def test_without_selected_blocks_the_second_gate_has_no_effect() -> None:
    inputs = make_inputs(whole(20), HEADS, SIZES)
    settings = settings_of(SIZES, num_selected=0, use_diff_topk=True)
    out = call(nsa, inputs, **settings)
    inputs['gates'][..., 1] = 5
    assert torch.equal(call(nsa, inputs, **settings), out)


def test_the_future_changes_nothing() -> None:
    extents = whole(30, batch=2)
    inputs = make_inputs(extents, HEADS, SIZES)
    out = call(nsa, inputs, **settings_of(SIZES))
    for position in (0, 4, 11, 28):
        changed = {name: t.clone() for name, t in inputs.items()}
        for name in ('q', 'k', 'v', 'q_cmp', 'k_window', 'v_window', 'gates'):
            changed[name][:, position + 1 :] = torch.nan
        for name in ('k_cmp', 'v_cmp'):
            changed[name][:, definition.count_compressed_blocks(position + 1, *SIZES[:2]) :] = torch.nan
        changed_out = call(nsa, changed, **settings_of(SIZES))
        assert torch.equal(changed_out[:, : position + 1], out[:, : position + 1])


@pytest.mark.parametrize('dtype', ROW_LIMITS)
def test_lower_precision(dtype: torch.dtype) -> None:
    # Every block is selected, so that rounding cannot change the selection.
    inputs = make_inputs(whole(60), Heads(4, 2, 16, 8), SIZES)
    inputs['k_cmp'], inputs['v_cmp'] = inputs['k_cmp'][:, :-1], inputs['v_cmp'][:, :-1]
    low = {name: t.float() if name == 'gates' else t.to(dtype) for name, t in inputs.items()}
    settings = settings_of(SIZES, num_selected=15)
    out = call(nsa, low, **settings)
    assert out.dtype == dtype
    gold = call(nsa, {name: t.double() for name, t in low.items()}, **settings)
    assert row_errors(out, gold).max() <= ROW_LIMITS[dtype]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'gates': normal(1, 12, 6, 2)}, r'gates has shape \(1, 12, 6, 2\), but must have \(1, 12, 6, 3\)'),
        ({'k_window': None}, r'k_window and v_window must be given together or not at all'),
        ({'selection_block_size': 5}, r'selection_block_size is 5, but must be a multiple of compress_stride, 2'),
        ({'compress_stride': 6}, r'compress_stride is 6, but must be at most compress_block_size, 5'),
        ({'num_selected': -1}, r'num_selected is -1, but must be an integer of at least 0'),
        ({'window_size': (3, 1)}, r'window_size is \(3, 1\), but right must be 0'),
        ({'backend': 'fast'}, r"backend is 'fast', but must be one of 'auto', 'triton', 'flex', 'eager'"),
        ({'k_cmp': normal(1, 3, 2, 4), 'v_cmp': normal(1, 3, 2, 3)}, r'k_cmp has 3 compressed blocks, but .* makes 4'),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = make_inputs(whole(12), HEADS, SIZES)
    settings = settings_of(SIZES)
    inputs |= {name: value for name, value in changes.items() if name in (*NAMES, *OPTIONAL)}
    settings |= {name: value for name, value in changes.items() if name not in (*NAMES, *OPTIONAL)}
    with pytest.raises(ValueError, match=message):
        call(nsa, inputs, **settings)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'k_window': torch.zeros(1, 9, 1, 4), 'v_window': torch.zeros(1, 9, 1, 3)},
            r'k_window has shape \(1, 9, 1, 4\)',
        ),
        ({'q_cmp': torch.zeros(1, 8, 3, 4)}, r'q_cmp has shape \(1, 8, 3, 4\)'),
        ({'v_cmp': torch.zeros(1, 3, 1, 4)}, r'v_cmp has head size 4, but v has 3'),
        ({'window_size': (3, 1)}, r'window_size is \(3, 1\)'),
        ({'k_window': torch.zeros(1, 8, 1, 4)}, 'must be given together'),
    ],
)
def test_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    tensors = {'q': (1, 8, 2, 4), 'k': (1, 8, 1, 4), 'v': (1, 8, 1, 3), 'k_cmp': (1, 3, 1, 4), 'v_cmp': (1, 3, 1, 3)}
    arguments: dict[str, Any] = {name: torch.zeros(shape) for name, shape in tensors.items()}
    arguments |= {'gates': torch.zeros(1, 8, 2, 3), 'window_size': (3, 0), 'num_selected': 4}
    arguments |= {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
    nsa(**arguments)
    with pytest.raises(ValueError, match=message):
        nsa(**arguments | changes)


@pytest.fixture
def float32_nsa() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and settings of the smallest call in which every op has work."""
    q, k, v = (torch.randn(1, 6, heads, 4) for heads in (2, 1, 1))
    tensors = {'q': q, 'k': k, 'v': v, 'k_cmp': k[:, ::2], 'v_cmp': v[:, ::2], 'gates': torch.rand(1, 6, 2, 3)}
    sizes = {'compress_block_size': 2, 'compress_stride': 2, 'selection_block_size': 2, 'window_size': (2, 0)}
    return tensors, {**sizes, 'num_selected': 2, 'num_init': 0, 'num_local': 1, 'use_diff_topk': True}


@pytest.mark.parametrize('reentrant', [True, False])
def test_activation_checkpointing(
    reentrant: bool, float32_nsa: tuple[dict[str, Any], dict[str, Any]], device: torch.device
) -> None:
    tensors, settings = float32_nsa
    tensors = {name: t.to(device).requires_grad_() for name, t in tensors.items()}

    def attend(*given: Tensor) -> Tensor:
        return nsa(*given, **settings, backend='triton')  # type: ignore[arg-type]

    results = []
    for run in (attend, partial(checkpoint, attend, use_reentrant=reentrant)):
        out = run(*tensors.values())
        out.sin().sum().backward()
        results.append([out, *(t.grad for t in tensors.values())])
        for t in tensors.values():
            t.grad = None
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize('transform', [torch.func.grad, torch.func.jacfwd, torch.func.vmap])
def test_torch_func_is_left_to_eager(
    transform: Callable[..., Any], float32_nsa: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """A registered op may drop a tangent silently, so the kernels refuse, and 'auto' takes eager."""
    tensors, settings = float32_nsa
    q = tensors.pop('q')

    def transformed(backend: str) -> Tensor:
        def total(q: Tensor) -> Tensor:
            return nsa(q, **tensors, **settings, backend=backend).sin().sum()

        return transform(total)(q[None] if transform is torch.func.vmap else q)

    torch.testing.assert_close(transformed('auto'), transformed('eager'))
    with pytest.raises(ValueError, match=r"'triton' cannot serve this call of \w+: torch.func transforms"):
        transformed('triton')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_torch_func_in_half_types(dtype: torch.dtype, float32_nsa: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Eager rounds gradients in half types, also under torch.func."""
    tensors, settings = float32_nsa
    tensors = {name: t.detach().to(dtype) for name, t in tensors.items()}
    q = tensors.pop('q').requires_grad_()

    def total(q: Tensor) -> Tensor:
        return nsa(q, **tensors, **settings).float().sin().sum()  # type: ignore[arg-type]

    (expected,) = torch.autograd.grad(total(q), q)
    assert torch.equal(torch.func.grad(total)(q.detach()), expected)
    assert torch.equal(torch.func.vmap(torch.func.grad(total))(q.detach()[None])[0], expected)
    tangent = torch.randn_like(q)
    derivative = torch.func.jvp(total, (q.detach(),), (tangent,))[1]
    torch.testing.assert_close(derivative, (expected.float() * tangent.float()).sum(), rtol=2e-2, atol=2e-2)


def test_the_backend_of_every_op(float32_nsa: tuple[dict[str, Any], dict[str, Any]], device: torch.device) -> None:
    """`backend_of` names the backend of each op that a call runs, and raises where an op cannot be served."""
    q, k, v = (float32_nsa[0][name].to(device) for name in 'qkv')
    ops = {'compressed_attention', 'window_attention', 'gated_sum'}
    choice = backend_of(q, k, v, num_selected=0, backend='triton')
    assert (str(choice), set(choice.ops)) == ('triton', ops)
    choice = backend_of(q, k, v, use_diff_topk=True, backend='triton')
    assert {op: each.name for op, each in choice.ops.items()} == dict.fromkeys(
        ops | {'selected_attention', 'select_blocks', 'straight_through_scale'}, 'triton'
    )
    with pytest.raises(ValueError, match='float64'):
        backend_of(q.double(), k.double(), v.double(), backend='triton')
    wide = torch.empty(1, 4, 1, 300, device=device)
    with pytest.raises(ValueError, match='the head size is 300, but its kernels fit head sizes up to 256'):
        backend_of(q, k, wide, backend='triton')
    many = torch.empty(1, 4, 65536, 16, device=device)
    with pytest.raises(ValueError, match='q has 65536 heads, but its kernels take up to 65535'):
        backend_of(many, many, many, backend='triton')


@pytest.mark.parametrize(
    ('capability', 'hip', 'expected'),
    [
        ((9, 0), None, 'triton'),
        ((8, 0), None, 'triton'),
        ((7, 5), None, r'not triton: the GPU has compute capability \(7, 5\)'),
        ((9, 4), '6.4', 'not triton: its kernels are tried on NVIDIA GPUs alone'),
    ],
)
def test_auto_by_the_gpu(
    capability: tuple[int, int], hip: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'auto' by the kind of GPU, without one."""
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: properties)
    monkeypatch.setattr(support, '_capability', support._find_capability)
    monkeypatch.setattr(torch.version, 'hip', hip)
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    candidates = {'triton': partial(support.unsupported, cast(Tensor, OnGpu)), 'eager': serves}
    assert re.search(expected, str(choose_backend('op', 'auto', torch.device('cuda'), candidates)))


class OnGpu:
    """The properties of a tensor that `unsupported` reads."""

    device, dtype, shape = torch.device('cuda'), torch.bfloat16, (1, 1, 1, 64)
