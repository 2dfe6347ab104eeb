"""`DecodeStep`: a step equals a forward, and a replayed CUDA graph equals a step without one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from native_sparse_attention.core.plain import runs_hooks
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.generation import DecodeStep
from native_sparse_attention.inference.model_cache import ModelCache
from native_sparse_attention.nn.dense import DenseAttention, _sdpa
from native_sparse_attention.nn.padding import FrontOrder
from native_sparse_attention.nn.transformer import Transformer
from tests.layer.test_transformer import KINDS, assert_near, make_ids, make_model, pad


@KINDS
def test_a_step_is_a_forward(sparse):
    model, ids = make_model(sparse), make_ids(2, 30)
    cache = model.init_cache(2, 30)
    step, speculated = DecodeStep(model, cache), DecodeStep(model, cache, 3)
    assert not step.uses_graph
    model.prefill(ids[:, :9], cache)
    logits = [step(ids[:, t : t + 1]) for t in range(9, 12)]
    logits += [speculated(ids[:, t : t + 3]) for t in range(12, 30, 3)]
    assert_near(torch.cat(logits, dim=1), model(ids)[:, 9:])


def test_step_errors():
    model, ids = make_model(True), make_ids(2, 9)
    cache = model.init_cache(2, 10)
    step = DecodeStep(model, cache)
    model(ids, cache=cache)
    step(ids[:, :1])
    before = [layer.k.clone() for layer in cache]
    ids_list: Any = [[1], [2]]
    no: Any = 'no'
    for call, message in [
        (lambda: step(ids[:, :1]), 'holds up to 10 tokens a row and gets 1 more, but its capacity is 10'),
        (
            lambda: step(ids[:1, :1]),
            r'ids has shape \(1, 1\) and dtype torch.int64, but must be int32 or int64 \(2, 1\)',
        ),
        (lambda: step(ids[:, 0]), r'ids has shape \(2,\)'),
        (lambda: step(ids[:, :1].float()), r'ids has shape \(2, 1\) and dtype torch.float32'),
        (lambda: step(ids_list), 'ids is a list, but must be a tensor'),
        (lambda: DecodeStep(model, cache[0]), 'cache is a LayerCache, but must be a ModelCache'),
        (lambda: DecodeStep(model, cache, use_graph=no), "use_graph is 'no', but must be True or False"),
        (lambda: DecodeStep(model, cache, 0), 'num_tokens is 0'),
        (lambda: DecodeStep(model, cache, use_graph=True), 'use_graph is True'),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.lengths.tolist() == [10, 10]
    assert all(torch.equal(layer.k, kept) for layer, kept in zip(cache, before, strict=True))


class Recorded:
    """Stand in for a CUDA graph on a CPU: a replay changes tensors and leaves the host's bounds. It reads the weights
    of the capture.
    """

    def __init__(self, model: Transformer, ids: Tensor, cache: ModelCache) -> None:
        self.model, self.ids, self.cache = deepcopy(model), ids, cache
        self.logits = torch.empty(*ids.shape, model.num_tokens, dtype=torch.float64)
        self.replays = 0
        cache.advance(ids.shape[1])  # as the host does in a capture

    def replay(self) -> None:
        self.cache.advance(-self.ids.shape[1])
        self.logits.copy_(self.model(self.ids, cache=self.cache))
        self.replays += 1


def recorded_step(
    model: Transformer, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> tuple[DecodeStep, list[Recorded]]:
    """Return a step with a graph, and the list of its captures."""
    captured: list[Recorded] = []

    def capture(_: DecodeStep, buffer: Tensor) -> tuple[Any, Tensor]:
        captured.append(Recorded(model, buffer, cache))
        return captured[-1], captured[-1].logits

    monkeypatch.setattr(DecodeStep, '_capture', capture)
    monkeypatch.setattr(Transformer, 'decodes_fixed', lambda self, cache, num_tokens: not runs_hooks(self))
    step = DecodeStep(model, cache)
    step.uses_graph = True
    return step, captured


def test_bounds_and_buffers_of_replayed_steps(monkeypatch):
    model, ids = make_model(True), make_ids(2, 20)
    cache = model.init_cache(2, 15)
    step, captured = recorded_step(model, cache, monkeypatch)
    expected = model(ids)
    first = step(ids[:, :1])
    for t in range(1, 12):
        logits = step(ids[:, t : t + 1])
        assert logits is captured[0].logits
        assert_near(logits, expected[:, t : t + 1])
        assert [(layer.max_length, layer._peak) for layer in cache] == [(t + 1, t + 1)] * 2
    assert_near(first, expected[:, :1])
    cache.crop(9)
    for t in range(9, 15):
        assert_near(step(ids[:, t : t + 1]), expected[:, t : t + 1])
    with pytest.raises(ValueError, match='its capacity is 15'):
        step(ids[:, 15:16])
    assert [recorded.replays for recorded in captured] == [17]
    assert cache.lengths.tolist() == [15, 15]


def assign(module: nn.Module, other: nn.Module) -> None:
    module.load_state_dict(other.state_dict(), assign=True)


def replace_data(parameter: Tensor, other: Tensor) -> None:
    parameter.data = other.detach().clone()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    'assign': assign,
    'assign in a layer': lambda model, other: assign(model.layers[1], other.layers[1]),
    'cast': lambda model, other: model.float().double(),
    'new data': lambda model, other: replace_data(model.to_logits.weight, other.to_logits.weight),
    'a module replaced': lambda model, other: setattr(model, 'to_logits', other.to_logits),
    'parametrized': lambda model, other: parametrizations.weight_norm(model.to_logits),
    'pruned': lambda model, other: prune.l1_unstructured(model.to_logits, 'weight', 0.5),
    'a hook': lambda model, other: model.to_logits.register_forward_hook(lambda module, args, out: out.sin()),
    'a pre-hook': lambda model, other: model.norm.register_forward_pre_hook(lambda module, args: (args[0].sin(),)),
    'another forward': lambda model, other: setattr(model.norm, 'forward', lambda x: x),
}


@pytest.mark.parametrize(
    ('change', 'max_rollback'),
    [
        *((change, 32) for change in CHANGES.values()),
        *((CHANGES[name], max_rollback) for name in ('assign', 'a hook') for max_rollback in (0, None)),
    ],
)
def test_a_changed_model_is_captured_anew(
    change: Callable[[Any, Any], Any], max_rollback: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that has read the former weights is undone."""
    model, other, ids = make_model(True), make_model(True), make_ids(2, 20)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    cache = model.init_cache(2, 20, max_rollback)
    step, captured = recorded_step(model, cache, monkeypatch)
    for t in range(4):
        step(ids[:, t : t + 1])
    change(model, other)
    replays = [3 if max_rollback == 0 else 4]
    for t in range(4, 8):
        twin = deepcopy(cache)
        expected = model(ids[:, t : t + 1], cache=twin)
        assert_near(step(ids[:, t : t + 1]), expected)
        assert cache.lengths.tolist() == [t + 1, t + 1]
        for layer, wanted in zip(cache, twin, strict=True):
            assert (layer.max_length, layer._peak, layer._peaks.tolist()) == (t + 1, t + 1, wanted._peaks.tolist())
        again = [] if t == 4 or runs_hooks(model) else [t - 4]
        assert [recorded.replays for recorded in captured] == replays + again
    if runs_hooks(model):
        step.use_graph = True
        with pytest.raises(ValueError, match=r'^use_graph is True, but must be None or False where a step of 1 tokens'):
            step(ids[:, 8:9])
        assert cache.max_length == 8


class FixedAttention(DenseAttention):
    """Dense attention that reads the whole cache in a step, so it makes the same launches at every length."""

    def decodes_fixed(self, cache: LayerCache, num_tokens: int) -> bool:
        return num_tokens <= 4

    def _attend_cached(self, x: Tensor, order: FrontOrder | None, cache: LayerCache) -> Tensor:
        if not self.decodes_fixed(cache, x.shape[1]):
            return super()._attend_cached(x, order, cache)
        assert order is None
        cache.reserve(x.shape[1])
        positions = cache.positions(x.shape[1])
        q, k, v = self._project(x, positions)
        cache.append(k, v)
        visible = torch.arange(cache.capacity, device=x.device) <= positions[..., None]
        out = _sdpa(q.to(cache.dtype), cache.k, cache.v, visible[:, None])
        return self._combine(out.to(self.combine_heads.weight.dtype), self.norm(x))


def make_fixed_model(device: torch.device) -> Transformer:
    model = make_model(False)
    for block in model.blocks:
        block.attention = FixedAttention(24, 8, 4, 2).double().eval()
    return model.to(device)


def make_sparse_model(device: torch.device) -> Transformer:
    """Return a model that the decode kernels serve."""
    settings: dict[str, Any] = {
        'sliding_window_size': 32,
        'compress_block_size': 16,
        'compress_block_sliding_stride': 8,
        'selection_block_size': 16,
        'num_selected_blocks': 5,
    }
    torch.manual_seed(0)
    return (
        Transformer(256, 256, 2, 64, 8, 2, use_sparse_attn=True, sparse_attn_kwargs=settings)
        .to(device, torch.bfloat16)
        .eval()
    )


def state_of(cache: ModelCache) -> list[Tensor]:
    return [t for layer in cache for t in (layer.lengths, layer._peaks, *layer._tensors())]


GRAPHED = pytest.mark.parametrize('make', [make_fixed_model, make_sparse_model], ids=['fixed', 'sparse'])


@pytest.mark.gpu
@GRAPHED
@pytest.mark.parametrize('num_tokens', [1, 3])
def test_replayed_steps_are_eager_steps_bitwise(make, num_tokens):
    """Rows of different lengths, over many borders of blocks and windows, with cropped tokens and swapped rows."""
    device = torch.device('cuda')
    model = make(device)
    prompts = [make_ids(length, seed=length).to(device) for length in (70, 7, 33)]
    ids, mask = (t.to(device) for t in pad([p.cpu() for p in prompts], 'right'))
    new = make_ids(3, 150 * num_tokens).to(device)
    caches = [model.init_cache(3, 70 + 150 * num_tokens) for _ in range(2)]
    steps = [
        DecodeStep(model, cache, num_tokens, use_graph) for cache, use_graph in zip(caches, (None, False), strict=True)
    ]
    assert [step.uses_graph for step in steps] == [True, False]
    for cache in caches:
        model.prefill(ids, cache, mask=mask)
    for index, tokens in enumerate(new.split(num_tokens, dim=1)):
        replayed, eager = (step(tokens) for step in steps)
        assert torch.equal(replayed, eager), index
        if index in (40, 90):
            for cache in caches:
                cache.crop(cache.lengths - 5, max_length=cache.max_length - 5)
                cache.reorder(torch.tensor([1, 2, 0], device=device))
        bounds = [[(layer.max_length, layer._peak) for layer in cache] for cache in caches]
        assert bounds[0] == bounds[1]
    for one, other in zip(*map(state_of, caches), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@GRAPHED
def test_a_replayed_step_refuses_a_full_cache(make):
    model = make(torch.device('cuda'))
    cache = model.init_cache(2, 8)
    step, ids = DecodeStep(model, cache, use_graph=True), make_ids(2, 1).cuda()
    for _ in range(8):
        step(ids)
    before = [t.clone() for t in state_of(cache)]
    with pytest.raises(ValueError, match='its capacity is 8'):
        step(ids)
    assert all(torch.equal(one, other) for one, other in zip(state_of(cache), before, strict=True))
    cache.reset()
    assert torch.equal(step(ids), model(ids, cache=model.init_cache(2, 8)))


@pytest.mark.gpu
@GRAPHED
def test_text_of_replayed_steps_is_text_of_eager_steps(make):
    model = make(torch.device('cuda'))
    prompt = make_ids(2, 40).cuda()
    options: dict[str, Any] = {'temperature': 1.0, 'top_p': 0.9, 'seed': 3, 'stop_tokens': [1, 2]}
    for count in (1, 2, 3, 300):
        replayed, eager = (model.generate(prompt, count, **options, use_graph=use) for use in (True, False))
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
def test_a_graph_under_autocast_outlives_it():
    model = make_fixed_model(torch.device('cuda')).float()
    ids = make_ids(2, 20).cuda()
    with torch.autocast('cuda', torch.bfloat16):
        caches = [model.init_cache(2, 20) for _ in range(2)]
        step = DecodeStep(model, caches[0], use_graph=True)
        expected = [model(ids[:, t : t + 1], cache=caches[1]) for t in range(20)]
        logits = [step(ids[:, t : t + 1]).clone() for t in range(4)]
    junk = [torch.full((1 << 20,), float('nan'), device='cuda') for _ in range(8)]  # the memory of former cast weights
    logits += [step(ids[:, t : t + 1]).clone() for t in range(4, 20)]
    assert torch.equal(torch.cat(logits, 1), torch.cat(expected, 1))
    assert junk
