"""Time and memory of calls: on a GPU by CUDA events, on a CPU by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# The backward of one forward runs many times, so torch.compile must not reuse saved tensors.
torch._functorch.config.donated_buffer = False

# Larger than the L2 cache of any GPU: a run after writing it reads its inputs from memory.
FLUSH_BYTES = 256 * 2**20
MAX_REPEATS = 50
MIN_REPEATS = 3
SECONDS = 1.0
# Runs of short passes before those that count: `nsa` replays its launches after 32 calls (docs/kernels.md, Host time).
WARM_RUNS = 40
PASSES = ('forward', 'backward')
# Names of kernel times. Passes longer than LONG_MS do not wait for the host.
KERNELS = ('forward_kernels', 'backward_kernels')
LONG_MS = 100.0
PROFILED_RUNS = 10


def pass_of(what: str) -> str:
    """Return the pass of a time: 'forward' for 'forward' and 'forward_kernels'."""
    return what.removesuffix('_kernels')


@dataclass(frozen=True)
class Times:
    """Milliseconds: median and extremes of a number of runs."""

    median: float
    low: float
    high: float
    runs: int


def measure(function: Callable[[], Any], device: str, seconds: float = SECONDS, compiles: bool = True) -> Times:
    """Measure function() for about `seconds`, after a warm-up, with cold caches.

    Runs are queued without waiting for one another, as in triton.testing.do_bench: the host may be ahead of the GPU, as
    in training. A run that takes longer than `seconds` is not repeated. compiles: the first run may compile and never
    counts. On a GPU the warm-up lasts WARM_RUNS runs, if these take less than `seconds`.
    """
    (first,) = run_times(function, device, None)
    if not compiles and first > 1e3 * seconds:
        return Times(first, first, first, 1)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device != 'cpu' else None
    (estimate,) = run_times(function, device, flush)
    if estimate > 1e3 * seconds:
        return Times(estimate, estimate, estimate, 1)
    if flush is not None and estimate * WARM_RUNS < 1e3 * seconds:
        run_times(function, device, None, WARM_RUNS)
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(1e3 * seconds / max(estimate, 1e-3))))
    times = run_times(function, device, flush, repeats)
    return Times(median(times), min(times), max(times), repeats)


def run_times(function: Callable[[], Any], device: str, flush: Tensor | None, repeats: int = 1) -> list[float]:
    """Return ms of each run."""
    if device == 'cpu':
        starts = []
        for _ in range(repeats):
            starts.append(time.perf_counter())
            function()
        return [1e3 * (stop - start) for start, stop in pairwise([*starts, time.perf_counter()])]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        if flush is not None:
            flush.zero_()
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def synchronize(device: str) -> None:
    if device != 'cpu':
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call, from an idle GPU to an idle GPU."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def run_once(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> None:
    """Run the passes that `measure_both` measures."""
    out = forward()
    if leaves:
        torch.autograd.grad(out, leaves, torch.randn_like(out))


def measure_both(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    device: str,
    seconds: float = SECONDS,
    compiles: bool = True,
) -> dict[str, Any]:
    """Return forward_ms, backward_ms, total_ms, spreads and peak_bytes beyond the inputs.

    leaves: tensors to differentiate; without them backward_ms and total_ms are None. The forward saves tensors for the
    backward. total_ms: both passes in one run, or the sum if that exceeds two seconds. A note tells of an output that
    is not finite.
    """
    base = reset_peak(device)
    times = {'forward': measure(forward, device, seconds, compiles)}
    total, note = None, {}
    if leaves:
        out = forward()
        # The sum shows a value that is not finite, and needs no memory.
        if not out.detach().sum(dtype=torch.float32).isfinite():
            note = {'note': 'the output is not finite'}
        dout = torch.randn_like(out)
        times['backward'] = measure(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, seconds, compiles
        )
        del out
        total = times['forward'].median + times['backward'].median
        if total < 2e3:
            times['total'] = measure(lambda: torch.autograd.grad(forward(), leaves, dout), device, seconds, compiles)
            total = times['total'].median
    return {
        **{f'{name}_ms': round(times[name].median, 4) if name in times else None for name in ('forward', 'backward')},
        'total_ms': None if total is None else round(total, 4),
        'spreads': {name: [round(t.low, 4), round(t.high, 4), t.runs] for name, t in times.items()},
        'peak_bytes': None if device == 'cpu' else peak(device) - base,
        **note,
    }


def measure_workspace(forward: Callable[[], Tensor], leaves: Sequence[Tensor], device: str) -> dict[str, Any]:
    """Return bytes: forward_workspace and backward_workspace, which a pass frees again, and saved, the tensors that the
    forward keeps beside its output.
    """
    if device == 'cpu':
        return {}
    base = reset_peak(device)
    out = forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    sizes = {'forward_workspace': peak(device) - kept, 'saved': kept - base - out.numel() * out.element_size()}
    dout = torch.randn_like(out)
    reset_peak(device)
    gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()
    sizes['backward_workspace'] = peak(device) - torch.cuda.memory_allocated()
    del gradients
    return sizes


def measure_kernels(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], device: str, measured: dict[str, Any]
) -> dict[str, Any]:
    """Return forward_kernels_ms and backward_kernels_ms: the kernels and copies of a pass, by PyTorch's profiler.

    Caches are warm. A short pass takes longer by cold caches and by waiting for the host. measured: from
    `measure_both`; long passes are left out, and passes in which the profiler sees nothing.
    """
    forward_ms, backward_ms = (measured.get(f'{name}_ms') or 0 for name in ('forward', 'backward'))
    if device == 'cpu' or forward_ms > LONG_MS:
        return {}
    found = {KERNELS[0]: _kernels_ms(forward)}
    if leaves and backward_ms <= LONG_MS:
        out = forward()
        dout = torch.randn_like(out)
        found[KERNELS[1]] = _kernels_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    return {f'{name}_ms': round(ms, 4) for name, ms in found.items() if ms > 0}


def measure_with_kernels(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    device: str,
    seconds: float = SECONDS,
    compiles: bool = True,
) -> dict[str, Any]:
    """Return the values of `measure_both` and of `measure_kernels`."""
    measured = measure_both(forward, leaves, device, seconds, compiles)
    return measured | measure_kernels(forward, leaves, device, measured)


def _kernels_ms(function: Callable[[], Any]) -> float:
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED_RUNS):
            function()
        torch.cuda.synchronize()
    events = profiler.events() or ()
    return sum(event.device_time for event in events if event.device_type == DeviceType.CUDA) / PROFILED_RUNS / 1e3


def reset_peak(device: str) -> int:
    """Return the allocated bytes, and start a new peak."""
    if device == 'cpu':
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str) -> int:
    return 0 if device == 'cpu' else torch.cuda.max_memory_allocated()
