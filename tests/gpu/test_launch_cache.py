"""Decoding steps with replayed launches on a GPU have the bits of steps that Triton launches.

python -m pytest -m gpu -n 8 tests/gpu/test_launch_cache.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP
from tests.support.gpu_decoding_problems import Decoder, Shape, poison_workspace, state_of

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
launch_cache = pytest.importorskip('native_sparse_attention.ops.decoding.triton.launch_cache')

pytestmark = pytest.mark.gpu

SHAPE = Shape(lengths=(0, 31, 63, 1000, 127), capacity=1500)
SHAPES = {
    'mean': SHAPE,
    'learned': replace(SHAPE, learned=True),
    'no rotary': replace(SHAPE, rotary=False, num_mem=0),
    'no rotary, learned': replace(SHAPE, rotary=False, learned=True, dtype=torch.float16),
    'paged': replace(SHAPE, page_size=128, num_mem=3),
    'window of its own': replace(SHAPE, has_window=True, page_size=64, learned=True),
    'of each head': replace(SHAPE, share_group=False, dtype=torch.float32, head_dim=96, value_dim=80),
    'mlp': replace(SHAPE, mlp=CompressMLP),
    'mlp of each head': replace(SHAPE, mlp=GroupedMLP, page_size=128),
    'many rows': replace(SHAPE, lengths=tuple(range(0, 1400, 7)), group=16),
    'nothing chosen': replace(SHAPE, sizes=(32, 16, 64, 0, 128)),
}
STEPS = 20


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the kernels that Triton launches."""
    names: list[str] = []
    launch = launch_cache.launch

    def record(kernel: Any, *args: Any, **meta: Any) -> Any:
        names.append(kernel.fn.__name__)
        return launch(kernel, *args, **meta)

    monkeypatch.setattr(launch_cache, 'launch', record)
    return names


def forget(cache: LayerCache) -> LayerCache:
    cache.session.launches.clear()
    cache.session.workspace.clear()
    return cache


@pytest.mark.parametrize('num_tokens', [1, 4])
@pytest.mark.parametrize('name', SHAPES)
def test_a_step_again(name: str, num_tokens: int, device: torch.device, launched: list[str]):
    """Steps are repeated in workspace filled with NaN, and after steps of other numbers of tokens."""
    decoder = Decoder(replace(SHAPES[name], num_tokens=num_tokens), device)
    cache, twin = decoder.cache(), decoder.cache()
    for index in range(STEPS):
        tokens = decoder.tokens(index)
        if index % 5 == 3:
            tokens = {name: t[:, :1] for name, t in tokens.items()}
        expected = decoder.step(forget(twin), tokens)
        launched.clear()
        out = decoder.step(cache, tokens)
        # Several tokens, and one whose strides differ because it was sliced.
        assert bool(launched) == (index == 0 or (index == 3 and num_tokens > 1)), index
        assert harness.same_bits(out, expected), index
        poison_workspace(cache, harness.junk_of)
    harness.assert_same_bits(state_of(cache), state_of(twin))
    assert (cache.max_length, cache._peak) == (twin.max_length, twin._peak)


@pytest.mark.parametrize('learned', [False, True], ids=['mean', 'learned'])
def test_a_replay_is_a_step(learned: bool, device: torch.device, launched: list[str]):
    """A graph captured from replayed launches equals one captured from launches by Triton."""
    decoder = Decoder(replace(SHAPE, learned=learned), device)
    caches = [decoder.cache() for _ in range(3)]
    tokens = [decoder.tokens(index) for index in range(12)]
    fixed = {name: t.clone() for name, t in tokens[0].items()}
    stream = torch.cuda.Stream(device)
    graphs, outs = [], []
    for cache, again in ((caches[0], True), (caches[1], False)):
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            decoder.step(cache, fixed)
        torch.cuda.current_stream(device).wait_stream(stream)
        if not again:
            cache.session.launches.clear()
        launched.clear()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(decoder.step(cache, fixed))
        assert bool(launched) == (not again)
        cache.advance(-1)
    decoder.step(caches[2], fixed)
    for new in tokens[1:]:
        expected = decoder.step(caches[2], new)
        for name, t in new.items():
            fixed[name].copy_(t)
        for graph, out in zip(graphs, outs, strict=True):
            out.fill_(torch.nan)
            graph.replay()
            assert harness.same_bits(out, expected)
    for cache in caches[:2]:
        harness.assert_same_bits(state_of(cache), state_of(caches[2]))


def test_another_stream(device: torch.device, launched: list[str]):
    """Launches wait for earlier work on their stream."""
    decoder = Decoder(SHAPE, device)
    cache, twin = decoder.cache(), decoder.cache()
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for index in range(8):
        tokens = decoder.tokens(index)
        expected = decoder.step(forget(twin), tokens)
        torch.cuda.synchronize(device)
        launched.clear()
        with torch.cuda.stream(streams[index % 2]):
            given = {name: torch.full_like(t, torch.nan) for name, t in tokens.items()}
            torch.cuda._sleep(20_000_000)
            for name, t in tokens.items():
                given[name].copy_(t)
            out = decoder.step(cache, given)
        assert bool(launched) == (index == 0)
        torch.cuda.synchronize(device)
        assert harness.same_bits(out, expected), index


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two GPUs')
@pytest.mark.parametrize('current', [0, 1])
def test_tensors_of_another_device(current: int, launched: list[str]):
    """Caches of two devices work whichever device is current, and the current device stays the same."""
    decoders = [Decoder(SHAPE, torch.device('cuda', index)) for index in range(2)]
    caches, twins = ([decoder.cache() for decoder in decoders] for _ in range(2))
    for step in range(4):
        for decoder, cache, twin in zip(decoders, caches, twins, strict=True):
            tokens = decoder.tokens(step)
            with torch.cuda.device(decoder.device):
                expected = decoder.step(forget(twin), tokens)
                torch.cuda.synchronize()
            launched.clear()
            with torch.cuda.device(current):
                out = decoder.step(cache, tokens)
                assert torch.cuda.current_device() == current
            assert bool(launched) == (step == 0)
            torch.cuda.synchronize(decoder.device)
            assert out.device == decoder.device
            assert harness.same_bits(out, expected)


def slid(tensor: Tensor) -> Tensor:
    """Return the same values, one element behind an address that 16 divides."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    'alignment': slid,
    'strides': lambda t: torch.stack((t, t), 2)[:, :, 0],
    'copied': lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize('look', LOOKS)
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'gates'])
def test_tokens_of_other_alignment(name: str, look: str, device: torch.device, launched: list[str]):
    """A kernel compiled for aligned addresses is not launched for an unaligned one."""
    decoder = Decoder(replace(SHAPE, learned=True), device)
    cache, twin = decoder.cache(), decoder.cache()
    for index in range(6):
        tokens = decoder.tokens(index)
        tokens |= {name: LOOKS[look](tokens[name])} if index % 2 else {}
        expected = decoder.step(forget(twin), tokens)
        launched.clear()
        out = decoder.step(cache, tokens)
        assert bool(launched) == (index < 2 or (index % 2 == 1 and look == 'copied'))
        assert harness.same_bits(out, expected), index
    harness.assert_same_bits(state_of(cache), state_of(twin))


def test_caches_that_are_copied_and_grow(device: torch.device, launched: list[str]):
    decoder = Decoder(replace(SHAPE, lengths=(90, 3), capacity=96), device)
    cache, twin = decoder.cache(), decoder.cache()
    cache.grows = twin.grows = True
    for index in range(12):
        if index == 3:
            cache = copy.deepcopy(cache)
        tokens = decoder.tokens(index)
        expected = decoder.step(forget(twin), tokens)
        launched.clear()
        out = decoder.step(cache, tokens)
        assert bool(launched) == (index in (0, 3, 6)), index
        assert harness.same_bits(out, expected), index
    assert cache.capacity == 192
    harness.assert_same_bits(state_of(cache), state_of(twin))


@pytest.mark.parametrize('learned', [False, True], ids=['mean', 'learned'])
def test_no_memory_of_the_caller_is_kept(learned: bool, device: torch.device):
    decoder = Decoder(replace(SHAPE, learned=learned), device)
    cache = decoder.cache()
    decoder.step(cache, decoder.tokens(0))
    decoder.step(cache, decoder.tokens(1))
    held = torch.cuda.memory_allocated(device)
    outs = [decoder.step(cache, decoder.tokens(index)) for index in range(2, 6)]
    assert len({out.data_ptr() for out in outs}) == len(outs)
    del outs
    assert torch.cuda.memory_allocated(device) == held


LAYER: dict[str, Any] = {
    'dim': 256,
    'dim_head': 64,
    'heads': 8,
    'kv_heads': 2,
    'sliding_window_size': 64,
    'compress_block_size': 16,
    'compress_block_sliding_stride': 8,
    'selection_block_size': 32,
    'num_selected_blocks': 6,
    'causal': True,
}
LAYERS: dict[str, dict[str, Any]] = {
    'default': {},
    'independent': {'independent_branch_kv': True},
    'without': {'rotary_emb': False, 'num_compressed_mem_kv': 0},
}


@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('backend', ['auto', 'triton'])
@pytest.mark.parametrize('name', LAYERS)
def test_layers(name: str, backend: str, autocast: bool, device: torch.device, launched: list[str]):
    """Every token after the first replays launches."""
    layer = SparseAttention(**LAYER, **LAYERS[name], backend=backend).to(device).eval()
    layer = layer if autocast else layer.to(torch.bfloat16)
    x = torch.randn(2, 120, 256, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast('cuda', dtype=torch.bfloat16) if autocast else nullcontext():
        cache, twin = (layer.init_cache(2, 200) for _ in range(2))
        for each in (cache, twin):
            layer(x[:, :100], cache=each)
        for index in range(100, 120):
            token = x[:, index : index + 1].clone()
            expected = layer(token, cache=forget(twin))
            launched.clear()
            out = layer(token, cache=cache)
            assert bool(launched) == (index == 100), index
            assert harness.same_bits(out, expected), index
    harness.assert_same_bits(state_of(cache), state_of(twin))
