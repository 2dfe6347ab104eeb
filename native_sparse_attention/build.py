"""Compile kernels side by side before a call needs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core.building import is_building
from native_sparse_attention.core.checks import check_positive
from native_sparse_attention.ops._triton import support


def build_kernels(function: Callable[..., Any], *args: Any, num_workers: int | None = None, **kwargs: Any) -> int:
    """Compile the Triton kernels of a call and of its backward pass side by side.

    The first training step of a layer compiles its kernels one after the other, each when it is launched. Here threads
    compile them and the code that launches them. Triton keeps both in its cache on disk (`TRITON_CACHE_DIR`), where
    other processes on GPUs of the same kind find them, and the kernels in memory.

        build_kernels(model, ids, return_loss=True)

    The function is called once, and its results are differentiated. The kernels are not launched, so the results hold
    uninitialised memory; they are dropped. All other operations run, so give a cache that is not used again, and set
    modules that update buffers, such as BatchNorm, to eval mode. `.grad` and the random state do not change. The
    kernels depend on shapes, dtypes and settings: give the arguments of a training step, in its autocast context, and
    call it before `torch.compile`, `fully_shard` or `DistributedDataParallel`. Under `torch.no_grad()` the kernels of
    inference are compiled.

    Args:
        function: a layer, a model, or a function that returns tensors, also in tuples, lists and dicts.
        args, kwargs: of the function, on the GPU.
        num_workers: threads; default: the CPU cores that the process may use.

    Returns:
        The number of kernels that are compiled or loaded from the cache on disk. 0 if this process has used all of them
        before, or with other backends than triton. Without a GPU, and in Triton's interpreter, the function is not
        called.

    Raises:
        ValueError: if num_workers is not positive, or inside another call.
    """
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    check_positive(num_workers=num_workers)
    if is_building.get():
        raise ValueError('build_kernels is called inside another call of it, but must not be nested')
    if not support.IS_INSTALLED or not torch.cuda.is_available():
        return 0
    from native_sparse_attention.ops._triton.compile_mode import build_launcher, compile_mode

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with _Pool(num_workers, build_launcher) as pool:
        mode = compile_mode(pool)
        if mode is None:
            return 0
        with mode, torch.random.fork_rng(devices):
            _call(function, args, kwargs)
        return pool.submitted


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the function and run the backward pass of its results. Launches compile kernels meanwhile."""
    token = is_building.set(True)
    try:
        # The backward pass runs in this thread, where launches see the setting.
        with torch.autograd.set_multithreading_enabled(False):
            _differentiate(function(*args, **kwargs))
    finally:
        is_building.reset(token)


class _Pool(ThreadPoolExecutor):
    """A pool that counts its tasks, and calls `finish` on the result of each in the same thread."""

    def __init__(self, num_workers: int, finish: Callable[[Any], None]) -> None:
        super().__init__(num_workers)
        self.submitted, self.finish = 0, finish

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.submitted += 1
        return super().submit(self._run, function, *args, **kwargs)

    def _run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self.finish(result)
        return result


def _differentiate(results: Any) -> None:
    """Run the backward pass of all tensors in the results, without adding to any `.grad`."""
    outputs = [t for t in _tensors(results) if t.grad_fn is not None]
    leaves = [*_leaves(outputs)]
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.zeros_like(t) for t in outputs], allow_unused=True)


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, dict | list | tuple):
        for result in results.values() if isinstance(results, dict) else results:
            yield from _tensors(result)


def _leaves(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of the graph of the outputs that require gradients."""
    nodes, seen = [t.grad_fn for t in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, 'variable', None)
        if leaf is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]
