"""Replayed ops, with kernels of the interpreter that play compiled ones: they get addresses and numbers alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from native_sparse_attention import nsa
from native_sparse_attention.core import remember
from native_sparse_attention.ops import (
    chosen_scores,
    compressed_attention,
    gated_sum,
    rotary,
    select_blocks,
    selected_attention,
    window_attention,
)
from native_sparse_attention.ops._triton import launch, replay
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.rotary import shared_input
from native_sparse_attention.ops.selected_attention.triton.plan import DESIGNS
from tests.support.harness import same_bits
from tests.support.played import STREAM, Played

pytestmark = [
    pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels'),
    pytest.mark.plain_memory(watched=False),
]

HEADS, KV_HEADS, DIM, SEQLEN = 2, 1, 16, 24
SIZES: dict[str, Any] = {'compress_block_size': 8, 'compress_stride': 4, 'selection_block_size': 8}
PACKED = torch.tensor([0, 9, 9, SEQLEN], dtype=torch.int32)
Make = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that have been launched again, by name."""
    runs: list[str] = []
    run = InterpretedFunction.__getitem__

    def getitem(kernel: Any, grid: Any) -> Any:
        def launched(*args: Any, **meta: Any) -> Played:
            with _disable_current_modes():
                run(kernel, grid)(*args, **meta)
            return Played(kernel, args, meta, runs)

        return launched

    monkeypatch.setattr(InterpretedFunction, '__getitem__', getitem)
    active = SimpleNamespace(get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(launch.launcher, 'driver', SimpleNamespace(active=active))
    monkeypatch.setattr(launch, '_COMPILED', {})
    monkeypatch.setattr(remember, 'DEVICES', {'cpu'})
    replay.forget()
    remember.forget()
    yield runs
    replay.forget()
    remember.forget()


def tokens(heads: int, dim: int = DIM, length: int = SEQLEN, batch: int = 1) -> Tensor:
    return torch.randn(batch, length, heads, dim, requires_grad=True)


def gate() -> Tensor:
    return torch.rand(1, SEQLEN, HEADS, requires_grad=True)


def indices(heads: int = KV_HEADS) -> Tensor:
    return torch.randint(-1, SEQLEN // 8, (1, SEQLEN, heads, 2), dtype=torch.int32)


def qkv() -> dict[str, Tensor]:
    """Return q, k and v as slices of one projection."""
    joined = tokens(HEADS + 2 * KV_HEADS)
    return dict(zip('qkv', joined.split((HEADS, KV_HEADS, KV_HEADS), 2), strict=True))


def compressed() -> dict[str, Any]:
    pairs = {'k_cmp': tokens(KV_HEADS, length=5), 'v_cmp': tokens(KV_HEADS, length=5)}
    memory = tuple(torch.randn(KV_HEADS, 1, DIM, requires_grad=True) for _ in range(2))
    return {'q': tokens(HEADS), **pairs, 'mem_kv': memory, 'block_size': 8, 'stride': 4}


def of_selected() -> dict[str, Any]:
    return {**qkv(), 'block_indices': indices(), 'block_size': 8}


def scored() -> dict[str, Any]:
    return {'q': tokens(HEADS), 'k_cmp': tokens(KV_HEADS, length=5), 'lse': torch.rand(1, HEADS, SEQLEN), **SIZES}


def features() -> dict[str, Any]:
    segments = torch.arange(SEQLEN)[None] // 10
    sinks = torch.randn(HEADS, requires_grad=True)
    bias = torch.randn(1, 1, SEQLEN, SEQLEN, requires_grad=True)
    return {'segment_ids': segments, 'sinks': sinks, 'bias': bias, 'softcap': 3.0, 'dropout_p': 0.2, 'dropout_seed': 5}


def of_nsa(**settings: Any) -> dict[str, Any]:
    gates = torch.rand(1, SEQLEN, HEADS, 3, requires_grad=True)
    blocks = {'k_cmp': tokens(KV_HEADS, length=5), 'v_cmp': tokens(KV_HEADS, length=5)}
    return {**qkv(), **blocks, 'gates': gates, **SIZES, 'num_selected': 2, 'window_size': (6, 0), **settings}


def of_scores() -> dict[str, Any]:
    return of_nsa(merge_window=True, k_cmp=tokens(KV_HEADS, length=5).detach(), v_cmp=None, gates=None)


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, SEQLEN, 4)
    return angles.cos(), angles.sin()


def shared(x: Tensor) -> tuple[Tensor, ...]:
    return shared_input(x, 1, 2, tables(), backend='triton')


OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    'compressed': (compressed_attention, compressed),
    'compressed with gate': (compressed_attention, lambda: {**compressed(), 'gate': gate()}),
    'window': (window_attention, lambda: {**qkv(), 'window_size': (6, 0)}),
    'window, packed': (window_attention, lambda: {**qkv(), 'window_size': (6, 0), 'cu_seqlens': PACKED}),
    'window, features': (window_attention, lambda: {**qkv(), 'window_size': (-1, 0), **features()}),
    'selection': (select_blocks, lambda: {**scored(), 'num_selected': 3}),
    'scores': (chosen_scores, lambda: {**scored(), 'block_indices': indices()}),
    **{
        design: (selected_attention, lambda d=design: {**of_selected(), '_design': d})
        for design in DESIGNS
    },
    'gated sum': (
        gated_sum,
        lambda: {
            'gates': torch.rand(1, SEQLEN, HEADS, 3, requires_grad=True),
            **{f'out_{name}': tokens(HEADS) for name in ('compressed', 'selected', 'window')},
        },
    ),
    'rotary': (rotary, lambda: {'x': tokens(HEADS), **dict(zip(('cos', 'sin'), tables(), strict=True))}),
    'nsa': (nsa, of_nsa),
    'nsa, packed': (nsa, lambda: of_nsa(cu_seqlens=PACKED)),
    'nsa, diff top-k': (nsa, lambda: of_nsa(use_diff_topk=True)),
    'merged': (nsa, of_scores),
}  # fmt: skip


def differentiate(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """Return outputs and gradients."""
    found = function(**arguments, backend='triton')
    outs = [out for out in (found if isinstance(found, tuple) else (found,)) if out.requires_grad]
    given = [t for value in arguments.values() for t in (value if isinstance(value, tuple) else (value,))]
    leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    torch.manual_seed(1)
    gradients = torch.autograd.grad(outs, leaves, [torch.randn_like(out) for out in outs]) if outs else []
    return [*(t.detach() for t in (outs or [found])), *gradients]


def records() -> list[Any]:
    return [*replay._RECORDS.values()]


@pytest.mark.parametrize('name', [pytest.param(n, marks=pytest.mark.quick) if n == 'nsa' else n for n in OPS])
def test_bits(name: str, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third call replays, with the bits of a call that does not."""
    function, make = OPS[name]
    for index in range(3):
        torch.manual_seed(10 + index)
        arguments = make()
        with monkeypatch.context() as patch:
            patch.setattr(remember, 'DEVICES', set())
            expected = differentiate(function, arguments)
        runs.clear()
        with monkeypatch.context() as patch:
            if index > 1:  # nothing but replays
                patch.setattr(launch, '_COMPILED', {})
            result = differentiate(function, arguments)
        assert all(same_bits(*pair) for pair in zip(result, expected, strict=True))
        assert bool(runs) or index < 1
    assert records()
    assert all(isinstance(record, replay.Record) for record in records())


def window(**changes: Any) -> Tensor:
    arguments = {**{name: t.detach() for name, t in qkv().items()}, 'window_size': (6, 0), **changes}
    return window_attention(**arguments, backend='triton')[0]


@pytest.mark.parametrize('name', ['length', 'strides', 'alignment', 'dtype', 'setting', 'one tensor twice'])
def test_other_calls_have_records_of_their_own(name: str, runs: list[str]) -> None:
    x = torch.randn(1, SEQLEN, KV_HEADS, DIM)
    changes: dict[str, dict[str, Any]] = {
        'length': {'q': tokens(HEADS, length=5).detach()},
        'strides': {'k': x.transpose(1, 2).contiguous().transpose(1, 2)},
        'alignment': {'k': torch.randn(x.numel() + 1)[1:].view(x.shape)},
        'dtype': {n: t.half() for n, t in (('q', tokens(HEADS).detach()), ('k', x), ('v', x.clone()))},
        'setting': {'window_size': (7, 0)},
        'one tensor twice': {'k': x, 'v': x},
    }
    fixed = {n: t.detach() for n, t in qkv().items()}
    for change in ({}, changes[name]):
        outs = [window(**{**fixed, **change}) for _ in range(3)]
        assert all(same_bits(out, outs[0]) for out in outs)
    assert len(records()) == 2
    assert all(isinstance(record, replay.Record) for record in records())


def test_no_tensor_is_kept_alive() -> None:
    for _ in range(4):
        arguments = of_nsa()
        out = nsa(**arguments, backend='triton')
        watched = [weakref.ref(t) for t in (*arguments.values(), out) if isinstance(t, Tensor)]
        out.sum().backward()
        del arguments, out
        gc.collect()
        assert not any(ref() is not None for ref in watched)


def test_workspace_is_freed_when_nothing_reads_it_any_more() -> None:
    arguments = {**of_selected(), '_design': 'union'}
    for _ in range(2):
        selected_attention(**arguments, backend='triton')
    (record,) = records()
    slots = [None] * record.num_slots
    freed = [slot for _, unused in record.steps for slot in unused]
    assert freed
    assert len({*freed}) == len(freed) < len(slots)


def test_hooks_of_triton_get_every_launch(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        window()
    monkeypatch.setattr(knobs.runtime, 'launch_enter_hook', lambda _: None)
    runs.clear()
    window()
    assert not runs


def test_modes_see_ops() -> None:
    """A dispatch mode gets an op whose records are known."""
    for _ in range(3):
        window()
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        window()
    assert 'native_sparse_attention.interval_attention.default' in seen


def test_calls_that_read_the_host_are_not_replayed() -> None:
    calls = []

    @replay.replayed
    def reads(x: Tensor) -> Tensor:
        calls.append(x)
        return x * int(x[0])

    for _ in range(4):
        assert reads(torch.full((2,), 3.0)).tolist() == [9.0, 9.0]
    assert len(calls) == 4
    assert records() == [None]


def test_few_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, 'MAX_RECORDS', 3)
    for length in range(1, 9):
        window(q=torch.randn(1, length, HEADS, DIM))
        assert len(records()) <= 3


def test_long_calls_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, 'MAX_STEPS', 2)
    for _ in range(3):
        window()
    assert records() == [None]


def test_operations_views_and_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of PyTorch's operations: views, several results, results in place, keyword tensors."""
    described: list[tuple[int, Any]] = []

    @replay.replayed
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part = x[:, 1:].t()
        values, order = part.sort(0)
        total = torch.empty(2, dtype=x.dtype)
        torch.add(y[1:], y[:-1], out=total)
        whole = torch.cat((values, part), 1)
        whole[0].zero_()
        whole.masked_fill_(order[:, :1] > 0, 2)
        return whole, order.t(), total[1:]

    for index in range(4):
        x, y = torch.randn(3, 4)[:, :3], torch.randn(5)[2:]
        result, expected = function(x, y), function.__wrapped__(x, y)  # type: ignore[attr-defined]
        assert all(same_bits(*pair) for pair in zip(result, expected, strict=True)), index
        assert [t.stride() for t in result] == [t.stride() for t in expected]
    assert all(isinstance(record, replay.Record) for record in records())
    descriptor = TensorDescriptor(torch.zeros(4, 16), [4, 16], [16, 1], [2, 16])
    recorder = replay.Recorder([descriptor.base])
    values = recorder._describe((descriptor, 3), [], in_bytes=True)
    made, number = values.fill(replay._point, [64])
    described.append((made.base.data_ptr(), number))
    assert described == [(64, 3)]
    assert (made.shape, made.strides, made.block_shape) == ([4, 16], [16, 1], [2, 16])


def test_settings_that_are_no_arguments_are_forgotten(runs: list[str]) -> None:
    for _ in range(3):
        window()
    replay.forget()
    runs.clear()
    window()
    assert not records() or records() == [replay.SEEN]


@pytest.mark.parametrize('change', ['shape', 'dtype', 'flag', 'number'])
def test_checks_are_not_skipped(change: str) -> None:
    """After a call that passed its checks, a wrong one raises its error."""
    arguments = of_nsa()
    for _ in range(2):
        nsa(**arguments, backend='triton')
    wrong: dict[str, dict[str, Any]] = {
        'shape': {'k_cmp': tokens(KV_HEADS, length=8)},
        'dtype': {'v': arguments['v'].half()},
        'flag': {'share_group': 1},
        'number': {'num_selected': 2.0},
    }
    with pytest.raises(ValueError, match='but'):
        nsa(**{**arguments, **wrong[change]}, backend='triton')
