"""Cases of `benchmarks.decode`: one token of one layer in a CUDA graph, and `Transformer.generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.judge import MAX_ERROR, row_errors
from benchmarks.peers import Problem
from benchmarks.runner import Case
from benchmarks.shapes import PAPER, SHAPES, Shape, make_settings
from benchmarks.timing import FLUSH_BYTES, MIN_REPEATS, Times, measure, seconds_of, synchronize
from native_sparse_attention import nsa
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import MAX_ROLLBACK, LayerCache
from native_sparse_attention.nn.compress import MeanPool
from native_sparse_attention.nn.compress.build import make_networks
from native_sparse_attention.nn.rotary import Rotary, rotate
from native_sparse_attention.nn.transformer import Transformer
from train_enwik8 import Config, build_model

MAX_REPLAYS = 100
WARM_UPS = 3
# Calls in a row whose host time is taken. As many as `crop` takes back, and few enough that their launches find room in
# the queue of the GPU, so that the host never waits for it.
HOST_CALLS = 16
HOST_LAPS = 10
# Tokens of a short and of a long call of `generate`. What the two have in common, the prompt and the capture of a
# graph, is not in their difference.
SHORT = 32
LENGTHS = {'8k': 2**13, '32k': 2**15, '64k': 2**16, '128k': 2**17, '1m': 2**20}
# ms to reach, with 4 kv heads.
TARGETS = {'8k-b1': 0.028, '8k-b256': 0.32, '64k-b1': 0.032, '64k-b8': 0.042, '64k-b32': 0.108, '1m-b1': 0.12}
# Bytes of the keys and values of the largest batch, and its most rows.
FULL_BYTES = 2**32
MAX_BATCH = 256
LENGTHS_OF_KV_HEADS = {4: ('8k', '64k', '32k', '128k', '1m'), 16: ('32k', '64k'), 64: ('32k', '64k')}


@dataclass(frozen=True)
class Setting:
    """A case. shape: seqlen counts the new token. target: ms."""

    shape: Shape
    target: float | None = None


def full_batch(shape: Shape) -> int:
    """Return the rows whose keys and values take FULL_BYTES, between 1 and MAX_BATCH."""
    row = shape.seqlen * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
    return max(1, min(MAX_BATCH, FULL_BYTES // row))


def make_shapes() -> Iterator[Shape]:
    """Return the shapes, those with targets first."""
    for kv_heads, lengths in LENGTHS_OF_KV_HEADS.items():
        group = '' if kv_heads == PAPER.kv_heads else f'-g{PAPER.heads // kv_heads}'
        for name in lengths:
            shape = replace(PAPER, seqlen=LENGTHS[name], kv_heads=kv_heads)
            batches = {1, full_batch(shape), *([8] if f'{name}{group}-b8' in TARGETS else [])}
            for batch in sorted(batches):
                yield replace(shape, name=f'{name}{group}-b{batch}', batch=batch)
    for batch in (1, 3):
        yield replace(SHAPES['tiny'], name=f'tiny-b{batch}', batch=batch, use_diff_topk=False)


SETTINGS = {shape.name: Setting(shape, TARGETS.get(shape.name)) for shape in make_shapes()}
SETTINGS['tiny-b1'] = replace(SETTINGS['tiny-b1'], target=1e4)


@dataclass(frozen=True)
class Step:
    """One new token per row. reset: takes back appended tokens. judge: returns the error of an output."""

    run: Callable[[], Tensor]
    reset: Callable[[], Any] = lambda: None
    judge: Callable[[Tensor], Case] = lambda out: {}

    def __call__(self) -> Tensor:
        return self.run()

    @torch.no_grad()
    def measure(self, device: str, seconds: float) -> Case:
        """forward_ms of a replay, spreads, host_us of a call without a graph, and what `judge` says of a replay."""
        replay = self.run if device == 'cpu' else self.capture()
        times = measure_replays(replay, self.reset, device, seconds)
        host_us = self.measure_host(device)
        self.reset()
        return {
            'forward_ms': round(times.median, 5),
            'spreads': {'forward': [round(times.low, 5), round(times.high, 5), times.runs]},
            'host_us': round(host_us, 1),
            **self.judge(replay()),
        }

    def capture(self) -> Callable[[], Tensor]:
        """Return a replay of the step, which returns its output."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.reset()
                self.run()
        main.wait_stream(side)
        self.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def measure_host(self, device: str) -> float:
        """Return microseconds of the host for a call without a graph: the median of laps."""
        laps = []
        for _ in range(HOST_LAPS):
            self.reset()
            synchronize(device)
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                self.run()
            laps.append((time.perf_counter() - began) / HOST_CALLS)
        synchronize(device)
        return 1e6 * median(laps)


def measure_replays(replay: Callable[[], Any], reset: Callable[[], Any], device: str, seconds: float) -> Times:
    """Times of replay() after reset() and with cold caches, up to MAX_REPLAYS in about so many seconds.

    The host queues all of it at once. While the GPU writes FLUSH_BYTES, which takes longer than to queue the rest, the
    host has queued both events and the replay between them: a launch is not in the time.
    """
    if device == 'cpu':
        return _clocked(replay, reset)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def queue() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        reset()
        flush.zero_()
        start.record()
        replay()
        stop.record()
        return start, stop

    def run(count: int) -> list[float]:
        events = [queue() for _ in range(count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]

    estimate = median(run(MIN_REPEATS))
    times = run(max(MIN_REPEATS, min(MAX_REPLAYS, int(1e3 * seconds / max(estimate, 1e-3)))))
    return Times(median(times), min(times), max(times), len(times))


def _clocked(run: Callable[[], Any], reset: Callable[[], Any]) -> Times:
    times = []
    for _ in range(MIN_REPEATS):
        reset()
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return Times(median(times), min(times), max(times), len(times))


@dataclass(frozen=True)
class Copy:
    """The rate of a copy, and the time of an empty replay."""

    device: str

    def __call__(self) -> Tensor:
        return self._make()[0]()

    def _make(self) -> tuple[Callable[[], Tensor], int]:
        from benchmarks import ceilings

        return ceilings.make_copy(Problem(PAPER, {'q': torch.empty(0, device=self.device)}))

    def measure(self, device: str, seconds: float) -> Case:
        """forward_ms, bytes that are read and written in it, and empty_ms of the replay of a kernel of one element."""
        copy, size = self._make()
        empty = Step(torch.zeros(1, device=device).zero_).measure(device, seconds)
        return {'forward_ms': measure(copy, device, seconds).median, 'bytes': size, 'empty_ms': empty['forward_ms']}


@dataclass(frozen=True)
class Row:
    """Inputs of the last of L tokens of a row: q with rotary embedding and q_cmp without `[HQ, D]`, k `[L, H, D]`,
    v `[L, H, DV]`, k_cmp `[C, H, D]`, v_cmp `[C, H, DV]`, gates `[HQ, 3]`. window: keys of the window.
    """

    q: Tensor
    q_cmp: Tensor
    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    gates: Tensor
    window: int
    mem_kv: tuple[Tensor, Tensor] | None = None

    def attend(self, shape: Shape) -> Tensor:
        """`[HQ, DV]` by eager in float32."""

        def widen(t: Tensor) -> Tensor:
            return t.float()[None]

        settings = make_settings(shape, 'cpu') | {'window_size': (self.window - 1, 0)}
        return nsa(
            widen(self.q)[None],
            *map(widen, (self.k, self.v, self.k_cmp, self.v_cmp)),
            gates=widen(self.gates)[None],
            q_cmp=widen(self.q_cmp)[None],
            mem_kv=None if self.mem_kv is None else (self.mem_kv[0].float(), self.mem_kv[1].float()),
            **settings,
            backend='eager',
        )[0, 0]


def judge_rows(shape: Shape, row: Callable[[int], Row], out: Tensor) -> Case:
    """Return the median error of the first and the last row of `[B, HQ, DV]`, and a note if it is too large.

    The median counts, since rounding decides which of two similar blocks is selected.
    """
    errors = [
        error
        for index in sorted({0, shape.batch - 1})
        for error in row_errors(Problem(shape, {}), out[index], row(index).attend(shape))
    ]
    # median returns NaN if an error is NaN.
    error = float(torch.tensor(errors).median())
    if not error <= MAX_ERROR:
        return {'error': error, 'wrong': True, 'note': f'wrong: a row is off by {error:.2g} of its norm'}
    return {'error': error}


def make_cache(shape: Shape, device: str) -> LayerCache:
    """Return a cache of a layer with rotary that holds random keys and values, one token short of shape.seqlen."""
    cache = LayerCache(
        shape.batch,
        shape.seqlen + MAX_ROLLBACK,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        compress=(shape.compress_block_size, shape.compress_stride),
        has_raw_k=True,
        dtype=shape.dtype,
        device=device,
    )
    for tensor in (cache.k, cache.v, cache.k_cmp, cache.v_cmp, cache.raw_k):
        if tensor is not None:
            tensor.normal_()
    cache.max_length = shape.seqlen - 1
    cache.lengths.fill_(cache.max_length)
    return cache


def make_ours(shape: Shape, device: str, learned: bool, is_called: bool = False) -> Step:
    """Return the step of ours. learned: the default compression network instead of a mean. is_called: it has a hook, so
    that the kernels do not compute it themselves.
    """
    from native_sparse_attention.inference.decode import nsa_decode

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device)

    heads, dim, value_dim = shape.kv_heads, shape.head_dim, shape.value_dim
    sizes = {'kv_heads': heads, 'head_dim': dim, 'value_dim': value_dim, 'block_size': shape.compress_block_size}
    phi_k, phi_v = (
        network.to(device, shape.dtype).eval()
        for network in make_networks(None if learned else (MeanPool(), MeanPool()), **sizes)
    )
    if is_called:
        for network in (phi_k, phi_v):
            network.register_forward_hook(lambda *_: None)
    q, k, v = random(shape.batch, 1, shape.heads, dim), *(random(shape.batch, 1, heads, d) for d in (dim, value_dim))
    gates = torch.rand(shape.batch, 1, shape.heads, 3, device=device)
    positions = tuple(random(heads, shape.compress_block_size, d) for d in (dim, value_dim))
    mem_kv = tuple(random(heads, 1, d) for d in (dim, value_dim))
    rotary, cache = Rotary(dim).to(device), make_cache(shape, device)
    run = partial(
        nsa_decode,
        *(q, k, v, gates, cache),
        networks=(phi_k, phi_v),
        positions=positions,
        freqs=rotary(q.device),
        mem_kv=mem_kv,
        selection_block_size=shape.selection_block_size,
        num_selected=shape.num_selected,
        window_size=shape.window,
    )
    last = torch.full((shape.batch, 1), shape.seqlen - 1, device=device)
    (q_rotated,) = rotate(rotary.tables(last), 'eager', q)
    compressed = num_compressed_blocks(shape.seqlen, shape.compress_block_size, shape.compress_stride)

    def row(index: int) -> Row:
        assert cache.k_cmp is not None
        assert cache.v_cmp is not None
        return Row(
            *(q_rotated[index, 0], q[index, 0], cache.k[index, : shape.seqlen], cache.v[index, : shape.seqlen]),
            *(cache.k_cmp[index, :compressed], cache.v_cmp[index, :compressed], gates[index, 0]),
            window=shape.window,
            mem_kv=(mem_kv[0], mem_kv[1]),
        )

    def judge(out: Tensor) -> Case:
        return judge_rows(shape, row, out[:, 0])

    return Step(run, partial(cache.crop, shape.seqlen - 1), judge)


@dataclass(frozen=True)
class Generation:
    """Two calls of `generate`. count: tokens that the long call generates beyond those of the short one."""

    model: Transformer
    prompt: Tensor
    count: int

    def __call__(self) -> Tensor:
        return self.model.generate(self.prompt, SHORT)

    def measure(self, device: str, seconds: float) -> Case:
        """forward_ms of a step, tokens_per_s of all rows, and start_ms of what is done once: prompt, capture."""
        self.timed(SHORT, device)
        short, long = (
            median(self.timed(count, device) for _ in range(MIN_REPEATS)) for count in (SHORT, SHORT + self.count)
        )
        step = (long - short) / self.count
        rate = len(self.prompt) / step if step > 0 else None
        return {'forward_ms': 1e3 * step, 'tokens_per_s': rate, 'start_ms': 1e3 * (short - SHORT * step)}

    def timed(self, count: int, device: str) -> float:
        return seconds_of(partial(self.model.generate, self.prompt, count), device)


def make_generation(case: Case) -> Generation:
    """Return the trainer's model, on a GPU in bfloat16, with a random prompt."""
    config, device = Config(**case['config']), torch.device(case['device'])
    model = build_model(config, 'auto', device).eval()
    if device.type == 'cuda':
        model = model.to(torch.bfloat16)
    prompt = torch.randint(256, (case['batch'], case['context']), device=device)
    return Generation(model, prompt, case['tokens'])
