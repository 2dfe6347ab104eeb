"""Decoding steps with replayed launches. Kernels of the interpreter stand in for compiled ones: they get addresses and
numbers alone, as Triton's launcher does.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from triton import knobs

from native_sparse_attention.inference import session
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.decoding.triton import launch_cache
from tests.support.decoding_problems import (
    MLPS,
    Case,
    assert_hold_the_same,
    assert_rest_is_unused,
    copy_cache,
    decode_eagerly,
    make_cache,
    make_layer,
    make_tokens,
)
from tests.support.harness import same_bits
from tests.support.played import STREAM, Played
from tests.support.problems import Heads

pytestmark = pytest.mark.skipif(not is_interpreted(), reason='a GPU has compiled kernels')

ONE_HEAD = Heads(2, 1, 16, 16)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of replayed kernels."""
    runs: list[str] = []
    launch = launch_cache.launch

    def launch_played(kernel: Any, grid: Any, *args: Any, device: torch.device, **meta: Any) -> Played:
        launch(kernel, grid, *args, device=device, **meta)
        return Played(kernel, args, meta, runs)

    active = SimpleNamespace(get_current_device=lambda: None, get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(launch_cache, 'launch', launch_played)
    monkeypatch.setattr(launch_cache.launcher, 'driver', SimpleNamespace(active=active))
    return runs


STEP = ['append_kernel', 'compressed_kernel', 'choose_kernel', 'attend_kernel', 'combine_kernel']


def step(cache: LayerCache, tokens: dict[str, Tensor], layer: dict[str, Any], **settings: Any) -> Tensor:
    return nsa_decode(**tokens, cache=cache, **layer, **settings, backend='triton')


class Beside:
    """A cache, and a copy of it whose launches are forgotten before every step."""

    def __init__(self, case: Case, lengths: list[int], runs: list[str]) -> None:
        self.case, self.batch, self.runs, self.device = case, len(lengths), runs, torch.device('cpu')
        self.layer = make_layer(case, self.device)
        self.cache = make_cache(case, lengths, self.device)
        self.twin = copy_cache(self.cache)

    def tokens(self, num_tokens: int = 1) -> dict[str, Tensor]:
        return make_tokens(self.case, self.batch, num_tokens, self.device)

    def check(self, *, repeats: bool, tokens: dict[str, Tensor] | None = None, **settings: Any) -> Tensor:
        """Check that both caches give the same bits, and whether the step of the first was replayed."""
        tokens = self.tokens() if tokens is None else tokens
        layer = self.layer | settings
        self.twin.session.launches.clear()
        self.twin.session.workspace.clear()
        expected = step(self.twin, tokens, layer)
        self.runs.clear()
        out = step(self.cache, tokens, layer)
        kernels = [name for name in STEP if layer['num_selected'] or name[:6] != 'choose']
        if not self.case.compresses[0]:
            kernels.remove('compressed_kernel')
        if self.case.network in MLPS:
            kernels[1:1] = ['linear_kernel'] * 2
        assert self.runs == kernels * repeats
        assert same_bits(out, expected)
        assert_hold_the_same(self.case, self.cache, self.twin)
        return out


CASES = {
    'mean': Case(),
    'learned': Case(heads=ONE_HEAD, network='linear', blocks=(6, 3, 6)),
    'no rotary': Case(heads=ONE_HEAD, num_angles=0, pairs=0),
    'rotated': Case(heads=ONE_HEAD, num_angles=0, rotated=True, network='own'),
    'merged': Case(heads=ONE_HEAD, merged='gate', network='linear'),
    'scores': Case(heads=ONE_HEAD, merged='scores', network='linear', page_size=8),
    'means of scores': Case(heads=ONE_HEAD, merged='scores', num_angles=0, rotated=True),
    'window': Case(heads=ONE_HEAD, merged='window', num_selected=0),
    'independent': Case(heads=ONE_HEAD, independent=True, share_group=False, dtype=torch.float16),
    'paged': Case(heads=ONE_HEAD, page_size=8, network='own'),
    'mlp': Case(heads=ONE_HEAD, network='mlp'),
    'mlp of each head': Case(network='mlp of each head', page_size=8, dtype=torch.float16),
    'scores of an mlp': Case(heads=ONE_HEAD, merged='scores', network='mean and mlp'),
    'nothing chosen': Case(num_selected=0, heads=ONE_HEAD),
}


@pytest.mark.quick
@pytest.mark.parametrize(('name', 'num_tokens'), [*((name, 1) for name in CASES), ('mean', 4), ('paged', 4)])
def test_a_step_again(name: str, num_tokens: int, runs: list[str]) -> None:
    """Repeated steps have the bits of a first step, and launches for several numbers of tokens coexist."""
    beside = Beside(CASES[name], [23, 6], runs)
    for count, repeats in ((num_tokens, False), (num_tokens, True), (2, False), (num_tokens, True)):
        beside.check(repeats=repeats, tokens=beside.tokens(count))
    assert_rest_is_unused(beside.cache)


SETTINGS: list[dict[str, Any]] = [
    {'scale': 0.3},
    {'interpolate_factor': 3.0},
    {'rotary_layout': 'half'},
    {'num_selected': 2},
    {'window_size': 5},
    {'num_init': 0},
    {'num_local': 1},
    {'num_recent': 3},
    {'share_group': False},
    {'num_splits': 3},
    {'tiles_of_program': 1},
    {'freqs': None},
    {'mem_kv': None},
]


@pytest.mark.parametrize('settings', SETTINGS, ids=lambda s: next(iter(s)))
def test_other_settings(settings: dict[str, Any], runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    beside.check(repeats=False)
    beside.check(repeats=False, **settings)
    beside.check(repeats=True)
    beside.check(repeats=True, **settings)


def slid(tensor: Tensor, count: int = 1) -> Tensor:
    """Return the same values in other memory, `count` elements behind an address that 16 divides."""
    buffer = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype)
    start = -(buffer.data_ptr() // tensor.element_size()) % 16 + count
    return buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


CHANGES: dict[str, Any] = {
    'strides': lambda t: torch.stack((t, t), 2)[:, :, 0],
    'alignment': slid,
    'neighbours that are none': lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.quick
@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', ['q', 'raw_k', 'v_window', 'gates', 'q_cmp'])
def test_tokens_of_other_alignment(name: str, change: str, runs: list[str]) -> None:
    kind: dict[str, Any] = {'rotated': True, 'num_angles': 0} if name == 'q_cmp' else {'independent': True}
    beside = Beside(Case(heads=Heads(2, 2, 16, 16), **kind), [29], runs)
    for repeats in (False, True):
        beside.check(repeats=repeats)
    for repeats in (False, change in ('strides', 'alignment')):  # otherwise each step copies it
        tokens = beside.tokens()
        beside.check(repeats=repeats, tokens=tokens | {name: CHANGES[change](tokens[name])})
    beside.check(repeats=True)


def test_gates_of_another_dtype(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    for repeats, dtype in (
        (False, torch.float32),
        (False, torch.float16),
        (True, torch.float32),
        (True, torch.float16),
    ):
        tokens = beside.tokens()
        beside.check(repeats=repeats, tokens=tokens | {'gates': tokens['gates'].to(dtype)})


@pytest.mark.parametrize(('name', 'repeats'), [('positions', False), ('freqs', False), ('mem_kv', True)])
def test_parameters_that_are_copied(name: str, repeats: bool, runs: list[str]) -> None:
    """Slices of other tensors, whose values change between steps, are copied in every step; memory pairs are copied
    before their properties are read.
    """
    beside = Beside(Case(heads=ONE_HEAD, pairs=2), [29], runs)
    whole = beside.layer[name]
    whole = tuple(torch.stack((t, t), -1) for t in (whole if isinstance(whole, tuple) else (whole,)))
    parts = tuple(t[..., 0] for t in whole)
    beside.layer[name] = parts[0] if name == 'freqs' else parts
    for index in range(3):
        beside.check(repeats=repeats and index > 0)
        for t in whole:
            t.mul_(0.5)


def test_memory_of_another_dtype(runs: list[str]) -> None:
    """Memory pairs of another dtype, as under autocast, are cast in every step."""
    beside = Beside(Case(heads=ONE_HEAD, dtype=torch.float16), [29], runs)
    beside.layer['mem_kv'] = tuple(t.float() for t in beside.layer['mem_kv'])
    for index in range(3):
        beside.check(repeats=index > 0)
        for t in beside.layer['mem_kv']:
            t.mul_(0.5)


@pytest.mark.parametrize('num_angles', [0, None])
def test_a_cache_of_another_dtype(num_angles: int | None, runs: list[str]) -> None:
    """Queries are cast in every step."""
    half = Case(heads=ONE_HEAD, dtype=torch.float16, num_angles=num_angles)
    beside = Beside(half, [26], runs)
    case = Case(heads=ONE_HEAD, num_angles=num_angles)
    beside.layer = make_layer(case, beside.device)
    for _ in range(3):
        beside.check(repeats=False, tokens=make_tokens(case, 1, 1, beside.device))


@pytest.mark.parametrize('num_angles', [0, None])
def test_raw_keys_that_are_keys_or_not(num_angles: int | None, runs: list[str]) -> None:
    """Steps are distinguished by which tensor is given, not by its properties alone."""
    beside = Beside(Case(heads=ONE_HEAD, num_angles=num_angles), [29], runs)
    beside.check(repeats=False)
    tokens = beside.tokens()
    beside.check(repeats=True, tokens=tokens | {'raw_k': tokens['k'], 'raw_v': tokens['v']})
    others = beside.tokens()
    if num_angles == 0:
        with pytest.raises(ValueError, match='cache has has_raw_k = False, but raw_k is given'):
            step(beside.cache, tokens | {'raw_k': others['k']}, beside.layer)
    else:
        for repeats in (False, True):
            tokens = beside.tokens()
            beside.check(repeats=repeats, tokens=tokens | {'raw_k': beside.tokens()['k']})


def test_compressed_queries_that_are_queries_or_not(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD, num_angles=0), [29], runs)
    for repeats, kind in ((False, 'none'), (False, 'other'), (True, 'q'), (True, 'other'), (True, 'none')):
        tokens = beside.tokens()
        given = {'none': {}, 'q': {'q_cmp': tokens['q']}, 'other': {'q_cmp': beside.tokens()['q']}}
        beside.check(repeats=repeats, tokens=tokens | given[kind])


def test_one_tensor_given_twice(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD, pairs=2), [29], runs)
    mem_k, mem_v = beside.layer['mem_kv']
    steps = ((mem_k, mem_k), False), ((mem_k, mem_v), False), ((mem_v, mem_v), True), ((mem_v, mem_k), True)
    for mem_kv, repeats in steps:
        beside.check(repeats=repeats, mem_kv=mem_kv)


@pytest.mark.parametrize('num_tokens', [2, 4])
def test_networks_of_changing_layouts(num_tokens: int, runs: list[str]) -> None:
    """Results of φ may have any address and any strides."""

    class Moody(torch.nn.Module):
        calls = 0

        def forward(self, blocks: Tensor) -> Tensor:
            self.calls += 1
            mean = blocks.mean(-2)
            if self.calls % 3 == 1:
                return mean
            return slid(mean) if self.calls % 3 == 2 else torch.stack((mean, mean), -1)[..., 0]

    beside = Beside(Case(heads=Heads(2, 2, 16, 16), network='own', blocks=(4, 2, 4)), [29], runs)
    for index in range(4):
        networks = Moody(), Moody()
        for network in networks:
            network.calls = index + 2  # after the step of the twin an aligned result, then another
        beside.check(repeats=index > 0, tokens=beside.tokens(num_tokens), networks=networks)


def test_networks_that_cannot_compress_blocks(runs: list[str]) -> None:
    """Unfit networks, too, are refused before anything is written."""
    beside = Beside(Case(heads=ONE_HEAD, network='own'), [29], runs)
    for repeats in (False, True):
        beside.check(repeats=repeats)
    runs.clear()
    with pytest.raises(ValueError, match='keys'):
        step(beside.cache, beside.tokens(), beside.layer | {'networks': (torch.nn.Identity(), torch.nn.Identity())})
    assert not runs
    assert_hold_the_same(beside.case, beside.cache, beside.twin)


def test_outputs_are_tensors_of_their_own(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    outs = [beside.check(repeats=index > 0) for index in range(3)]
    kept = [out.clone() for out in outs]
    beside.check(repeats=True)
    assert all(same_bits(out, copied) for out, copied in zip(outs, kept, strict=True))
    assert len({out.data_ptr() for out in outs}) == 3
    assert not any(out.requires_grad for out in outs)


@pytest.mark.parametrize('network', ['mean', 'own'])
def test_no_tensor_of_the_caller_is_kept(network: str, runs: list[str]) -> None:
    case = Case(heads=ONE_HEAD, independent=True, network=network)
    layer, cache = make_layer(case, torch.device('cpu')), make_cache(case, [29], torch.device('cpu'))
    for repeats in (0, 1):
        tokens = make_tokens(case, 1, 1, torch.device('cpu'))
        # Storages are compared, since a tensor may return as another object.
        given = [t.clone() for t in (*layer['positions'], *layer['mem_kv'], layer['freqs'])]
        replaced = {'positions': tuple(given[:2]), 'mem_kv': tuple(given[2:4]), 'freqs': given[4]}
        runs.clear()
        out = step(cache, tokens, layer | replaced)
        assert len(runs) == 5 * repeats
        watched = [weakref.ref(t) for t in (*tokens.values(), *given, out)]
        del tokens, given, replaced, out
        gc.collect()
        assert not any(ref() is not None for ref in watched)


def test_a_full_cache_is_left_alone(runs: list[str]) -> None:
    case = Case(heads=ONE_HEAD)
    beside = Beside(case, [case.capacity - 2], runs)
    for repeats in (False, True):
        beside.check(repeats=repeats)
    runs.clear()
    with pytest.raises(ValueError, match=f'holds up to {case.capacity} tokens a row and gets 1 more'):
        step(beside.cache, beside.tokens(), beside.layer)
    assert not runs
    assert_hold_the_same(case, beside.cache, beside.twin)
    assert_rest_is_unused(beside.cache)


def test_a_cache_that_grows(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD, capacity=16, network='own'), [13], runs)
    beside.cache.grows = beside.twin.grows = True
    for repeats in (False, True, True, False, True):
        beside.check(repeats=repeats)
    assert beside.cache.capacity == 32
    assert len(beside.cache.session.launches) == 1


@pytest.mark.parametrize('page_size', [None, 8])
@pytest.mark.parametrize(
    'duplicate', [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=['deepcopy', 'pickle']
)
def test_copies(duplicate: Any, page_size: int | None, runs: list[str]) -> None:
    """A copy and its original continue independently."""
    beside = Beside(Case(heads=ONE_HEAD, page_size=page_size), [29], runs)
    for repeats in (False, True):
        beside.check(repeats=repeats)
    other = Beside(beside.case, [29], runs)
    other.layer, other.cache, other.twin = beside.layer, duplicate(beside.cache), copy_cache(beside.twin)
    assert not other.cache.session.workspace
    other.check(repeats=False)
    beside.check(repeats=True)
    other.check(repeats=True)


def test_tensors_of_the_cache_that_are_replaced(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29, 13], runs)
    beside.check(repeats=False)
    beside.cache.k = beside.cache.k.clone()
    beside.check(repeats=False)
    beside.check(repeats=True)
    assert beside.cache.v_cmp is not None
    beside.cache.v_cmp.data = beside.cache.v_cmp.clone()
    beside.check(repeats=False)
    for cache in (beside.cache, beside.twin):
        cache.reorder(torch.tensor([1, 0]))
    beside.check(repeats=True)


def test_a_table_of_other_strides_at_the_same_address(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD, page_size=8), [29, 13], runs)
    beside.check(repeats=False)
    table = beside.cache.block_table
    assert table is not None
    wide = torch.full((2, 2 * table.shape[1]), -1, dtype=torch.int32)
    # Rows of the table lie apart, and then one after the other from the same address on.
    for other in (wide[:, : table.shape[1]], wide.flatten()[: table.numel()].view(table.shape)):
        beside.cache.block_table = other.copy_(table)
        beside.check(repeats=False)
        beside.check(repeats=True)


def test_a_workspace_that_is_lost(runs: list[str]) -> None:
    """Launches keep their scratch buffers alive."""
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    beside.check(repeats=False)
    held = [weakref.ref(t) for t in beside.cache.session.workspace.values()]
    beside.cache.session.workspace.clear()
    gc.collect()
    assert all(ref() is not None for ref in held)
    beside.check(repeats=True)


def test_the_least_recent_launches_are_dropped(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, 'MAX_LAUNCHES', 2)
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    for scale, repeats in (
        (0.1, False),
        (0.2, False),
        (0.1, True),
        (0.3, False),
        (0.3, True),
        (0.1, True),
        (0.2, False),
    ):
        beside.check(repeats=repeats, scale=scale)
        assert len(beside.cache.session.launches) <= 2


def test_watched_launches_are_those_of_triton(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    for repeats in (False, True):
        beside.check(repeats=repeats)

    def hook(metadata: Any) -> None: ...

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        beside.check(repeats=False)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    beside.check(repeats=True)


def test_interpreted_kernels_are_launched_by_triton(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    monkeypatch.undo()
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    for _ in range(2):
        beside.check(repeats=False)
    assert not beside.cache.session.launches


def test_refused_by_a_transform(runs: list[str]) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    beside.check(repeats=False)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r'torch\.func transforms'):
        step(beside.cache, beside.tokens(), beside.layer)
    assert beside.cache.max_length == 30


def test_other_ways_leave_launches_alone(runs: list[str]) -> None:
    """Steps by ops, with counts and on another backend leave recorded launches unchanged."""
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    beside.check(repeats=False, tokens=beside.tokens(2))
    for cache in (beside.cache, beside.twin):
        torch.manual_seed(1)
        decode_eagerly(cache, beside.tokens(2), beside.layer)
        step(cache, beside.tokens(2), beside.layer, counts=torch.ones(1, dtype=torch.int32))
        assert cache.lengths.tolist() == [34]
    beside.check(repeats=True, tokens=beside.tokens(2))


def test_nothing_is_replayed_by_a_triton_that_is_not_known(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, 'launcher', None)
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    for _ in range(2):
        beside.check(repeats=False)


def test_the_device_of_the_tensors_is_made_the_current_one(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(Case(heads=ONE_HEAD), [29], runs)
    beside.check(repeats=False)
    current, entered = [1], []

    def make_current(device: torch.device) -> Any:
        entered.append(device)
        current[0] = device.index  # type: ignore[call-overload]
        return nullcontext()

    monkeypatch.setattr(torch.cuda, 'device', make_current)
    monkeypatch.setattr(launch_cache.launcher.driver.active, 'get_current_device', lambda: current[0])  # type: ignore[union-attr]
    beside.check(repeats=True)
    assert entered == [torch.device('cpu')]


def test_recent_keys_after_changes() -> None:
    """The newest entry is found without a hash, also after entries were found, recorded, dropped or cleared."""
    recent = session.Recent()
    for number in range(session.MAX_LAUNCHES + 2):
        recent.record((number,), str(number))
    assert [recent.find(key) for key in ((0,), (2,))] == [None, '2']
    recent.record((99,), 'new')
    assert (3,) not in recent
    assert [recent.find(key) for key in ((99,), (2,), (2,), (4,))] == ['new', '2', '2', '4']
    recent.record((4,), 'other')
    assert recent.find((4,)) == 'other'
    recent.clear()
    assert [recent.find(key) for key in ((4,), (None,))] == [None, None]
