"""Host time of `nsa` and of the layer by part, and of the loss of the block scores, in microseconds.

    python -m benchmarks.host_time              on a GPU if there is one
    python -m benchmarks.host_time --device cpu --laps 100

On a GPU calls are queued without waiting, and beside the host's time stands that of the kernels. On a CPU nothing is
computed by kernels: Triton's launchers are replaced by functions that do nothing, and the tensors are so small that
operations of PyTorch cost their overhead alone. Everything before Triton's launcher runs, with the designs that 8k
tokens of 64 query and 4 KV heads take on Hopper.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import JITFunction

from benchmarks.shapes import PAPER, Shape, make_inputs
from benchmarks.timing import measure_kernels, synchronize
from native_sparse_attention import SparseAttention, composition, functional, nsa
from native_sparse_attention.autograd import replay
from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops._triton import inverse_index, launch, support
from native_sparse_attention.ops._triton.interval import keys as interval_keys
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.dlogits import storage

# Laps that are not counted. Calls per lap: few enough that all their launches fit the queue of a GPU, so that the host
# never waits for it.
WARM_UPS, CALLS = 2, 16
# Sizes whose ratios, and so designs, are those of PAPER.
SMALL = replace(
    PAPER, seqlen=256, heads=16, kv_heads=1, head_dim=8, value_dim=8, compress_block_size=8, compress_stride=4,
    selection_block_size=16, num_selected=2, window=32,
)  # fmt: skip
# Limits on lengths and head sizes, scaled like SMALL.
SMALL_LIMITS = (
    (plan, 'MIN_SEQLEN_MIXED', 8),
    (plan, 'LARGE_HEAD', 64),
    (storage, 'MIN_TOKENS', 64),
    (inverse_index, 'MIN_COUNTED', 0),
    (interval_keys, 'FULL_GRID', 2),
)
# Functions that `nsa` calls, by the name of the part: (module, function).
OPS = {
    'compressed attention': (functional.compressed_attention, 'attend'),
    'block selection': (functional.block_selection, 'select'),
    'selected attention': (functional.selected_attention, 'attend'),
    'merged attention': (functional.selected_attention, 'attend_merged'),
    'window attention': (functional.window_attention, 'attend'),
    'gated sum': (functional.gated_sum, 'add'),
    'shared input': (composition, 'shared_input'),
}


class Call(NamedTuple):
    """A function that returns tensors, and the tensors that its backward pass differentiates."""

    run: Callable[[], Any]
    leaves: Sequence[Tensor]


class Launched:
    """Stands in for a compiled kernel of Triton; counts its launches."""

    function = packed_metadata = None
    count = 0

    def run(self, *args: Any) -> None:
        Launched.count += 1


def _support_all(device: torch.device) -> None: ...


def _find_hopper(device: torch.device) -> str:
    return 'sm90'


def _run(*args: Any, **meta: Any) -> Launched:
    return Launched()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run Triton backends on a CPU as on a Hopper GPU, without their kernels."""
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    patches: list[Any] = [
        mock.patch.object(support, '_unsupported_device', _support_all),
        mock.patch.object(launch, 'architecture_of', _find_hopper),
        mock.patch.object(launch.launcher, 'driver', SimpleNamespace(active=active)),
        mock.patch.object(launch.launcher, '_compiled', Launched),
        mock.patch.object(JITFunction, 'run', _run),
        mock.patch.object(replay, 'DEVICE_TYPES', ('cpu',)),
        *(mock.patch.object(*limit) for limit in SMALL_LIMITS),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def make_nsa(shape: Shape, device: str, merged: bool) -> Call:
    """Return a call of `nsa`: the separate form, or merged with block scores alone."""
    inputs, settings = make_inputs(shape, device)
    if merged:
        inputs |= {'v_cmp': None, 'gates': None}
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]
    call = partial(nsa, **inputs, **settings, merge_window=merged, backend='triton')
    return Call(call, [t for t in leaves if not (merged and t is inputs['k_cmp'])])


def make_layer(shape: Shape, device: str, merged: bool) -> Call:
    """Return a call of a layer with weights in the dtype of the shape."""
    dim = shape.heads * shape.head_dim // (1 if device == 'cuda' else 8)
    settings: dict[str, Any] = {'merge_window': True, 'compressed_output': False} if merged else {}
    layer = SparseAttention(
        dim, shape.head_dim, shape.heads, shape.window, shape.compress_block_size, shape.compress_stride,
        shape.selection_block_size, shape.num_selected, kv_heads=shape.kv_heads, causal=True, backend='triton',
        **settings,
    ).to(device, shape.dtype)  # fmt: skip
    x = torch.randn(shape.batch, shape.seqlen, dim, device=device, dtype=shape.dtype, requires_grad=True)
    return Call(partial(layer, x), [x, *layer.parameters()])


def make_block_loss(shape: Shape, device: str) -> Call:
    """Return a call of the loss of the block scores, of all queries of SMALL or 512 of longer rows."""
    inputs, settings = make_inputs(shape, device)
    q, k, k_cmp = (inputs[name] for name in ('q', 'k', 'k_cmp'))
    q_cmp, k_cmp = (t.detach().clone().requires_grad_() for t in (q, k_cmp))
    sizes = {name: settings[name] for name in ('compress_block_size', 'compress_stride', 'selection_block_size')}
    window: dict[str, Any] = {'window_size': (shape.window - 1, 0), 'backend': 'triton'}
    return Call(partial(block_score_loss, q, k, q_cmp, k_cmp, **sizes, **window), [q_cmp, k_cmp])


def record_ops(call: Call) -> Iterator[tuple[str, Call]]:
    """Run a call and yield each op of `OPS` in it, with its arguments."""
    recorded: list[tuple[str, Call]] = []

    def record(name: str, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        leaves: dict[int, Tensor] = {}

        def detached(arg: Any) -> Any:
            if type(arg) is tuple:
                return tuple(map(detached, arg))
            if not isinstance(arg, Tensor) or not arg.requires_grad:
                return arg
            return leaves.setdefault(id(arg), arg.detach().requires_grad_())

        own = [detached(arg) for arg in args], {key: detached(value) for key, value in settings.items()}
        recorded.append((name, Call(partial(function, *own[0], **own[1]), [*leaves.values()])))
        return function(*args, **settings)

    with ExitStack() as stack:
        for name, (module, attribute) in OPS.items():
            function = partial(record, name, getattr(module, attribute))
            stack.enter_context(mock.patch.object(module, attribute, function))
        call.run()
    yield from recorded


class Laps(NamedTuple):
    """Microseconds per call: the fastest lap, the median and the upper quartile of the laps."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f'{self.low:.0f} ({self.median:.0f}, {self.high:.0f})'


def measure(call: Call, device: str, laps: int) -> tuple[Laps, ...]:
    """Return the host time of a forward pass without gradients, of one that saves tensors, and of the backward pass."""
    # On a CPU the time of the thread, since other processes interrupt it. On a GPU backward passes run in another one.
    clock = time.thread_time if device == 'cpu' else time.perf_counter
    times: tuple[list[float], ...] = ([], [], [])
    outs: list[Any] = []
    for _ in range(WARM_UPS + laps):
        for index, saves in enumerate((False, True)):
            synchronize(device)
            with torch.set_grad_enabled(saves):
                began = clock()
                outs = [call.run() for _ in range(CALLS)]
                times[index].append(clock() - began)
        if outs := [out for out in map(_differentiable, outs) if out]:
            douts = [torch.ones_like(out) for out in outs[0]]
            synchronize(device)
            began = clock()
            for out in outs:
                torch.autograd.grad(out, call.leaves, douts, allow_unused=True)
            times[2].append(clock() - began)
    return tuple(_summary(found[WARM_UPS:]) for found in times if found)


def _differentiable(out: Any) -> list[Tensor]:
    outs = out if isinstance(out, tuple) else (out,)
    return [t for t in outs if t.grad_fn is not None][:1]


def _summary(times: list[float]) -> Laps:
    micros = [1e6 * t / CALLS for t in times]
    return Laps(min(micros), median(micros), quantiles(micros, n=4)[2])


def count_launches(call: Call) -> tuple[int, int]:
    """Return the launches of kernels of forward and backward pass, where `Launched` stands in for them."""
    counts = [Launched.count]
    outs = _differentiable(call.run())
    counts.append(Launched.count)
    torch.autograd.grad(outs, call.leaves, [torch.ones_like(out) for out in outs], allow_unused=True)
    counts.append(Launched.count)
    return counts[1] - counts[0], counts[2] - counts[1]


def report(name: str, call: Call, device: str, laps: int, parts: bool) -> None:
    totals = []
    for title, each in [(f'**{name}**', call), *(record_ops(call) if parts else ())]:
        times = measure(each, device, laps)
        totals.append([t.low for t in times] + [0] * (3 - len(times)))
        cells = [*map(str, times), *['–'] * (3 - len(times))]
        print(f'| {title} | {" | ".join(cells)} |', flush=True)
    if parts:
        rest = [whole - sum(others) for whole, *others in zip(*totals, strict=True)]
        print(f'| checks, backends, the rest | {" | ".join(f"{us:.0f}" for us in rest)} |')
    if device == 'cpu':
        print(f'| launches | – | {" | ".join(map(str, count_launches(call)))} |')
        return
    kernels = measure_kernels(call.run, call.leaves, device, {})
    forward, backward = (1e3 * kernels.get(f'{name}_kernels_ms', 0) for name in ('forward', 'backward'))
    print(f'| kernels | – | {forward:.0f} | {backward:.0f} |')


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=('cuda', 'cpu'))
    parser.add_argument(
        '--laps', type=int, default=50, help=f'laps of {CALLS} calls each; other processes slow most of them'
    )
    parser.add_argument('--seqlen', type=int, default=8192, help='tokens, on a GPU')
    parser.add_argument('--cases', default='nsa,merged,layer,merged layer,block loss')
    options = parser.parse_args()
    device, laps = options.device, max(2, options.laps)
    shape = SMALL if device == 'cpu' else replace(PAPER, seqlen=options.seqlen)
    cases = {
        'nsa': (partial(make_nsa, merged=False), True),
        'merged': (partial(make_nsa, merged=True), True),
        'layer': (partial(make_layer, merged=False), False),
        'merged layer': (partial(make_layer, merged=True), False),
        'block loss': (make_block_loss, False),
    }
    print('| µs: fastest lap (median, upper quartile) | forward, no gradients | forward | backward |')
    print('| --- | --- | --- | --- |')
    with without_kernels() if device == 'cpu' else nullcontext():
        for name in options.cases.split(','):
            make, parts = cases[name]
            gc.disable()
            report(name, make(shape, device), device, laps, parts)
            gc.enable()
            gc.collect()


if __name__ == '__main__':
    main()
