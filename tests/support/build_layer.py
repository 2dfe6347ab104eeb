"""Check that `build_kernels` compiles all kernels that a training step of a layer launches. Needs no GPU.

python -m tests.support.build_layer True       merged; False: three branches
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support import builds  # before Triton: it switches the interpreter off

# isort: split
import torch
from triton import knobs

from native_sparse_attention import SparseAttention, build_kernels
from tests.support.ptx import Recorder

ARCHITECTURE = 'sm90'
SIZES: dict[str, Any] = {
    'sliding_window_size': 64,
    'compress_block_size': 32,
    'compress_block_sliding_stride': 16,
    'selection_block_size': 64,
    'num_selected_blocks': 4,
    'use_diff_topk': True,
}
launches: list[tuple[Any, bool]] = []
launchers: list[Any] = []


def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """Record the launch of a kernel, or its warm-up, and compile it."""
    launches.append((self, warmup))
    return builds.run_jit(self, *args, grid=grid, warmup=True, **kwargs)


def count_compiled(kernels: set[Any]) -> int:
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def main(merged: str) -> None:
    builds.OPS.clear()
    builds.OPS['none'] = lambda *_: None
    builds.compile_only = run
    builds.main(ARCHITECTURE, 'bfloat16', '64')
    runtime: Any = knobs.runtime
    runtime.add_stages_inspection_hook = Recorder(builds, 'ttir', None).select_stages  # the rest takes long
    knobs.nvidia.dump_ptxas_log = False
    no_gpu: Any = builds.NoGpu
    no_gpu.launcher_cls = staticmethod(lambda src, metadata: launchers.append((src, metadata)))
    torch.cuda.is_available = lambda: True
    layer = SparseAttention(
        64, 64, heads=2, kv_heads=1, causal=True, merge_window=merged == 'True', backend='triton', **SIZES
    )
    x = torch.randn(2, 1024, 64)
    with torch.autocast('cpu', torch.bfloat16):
        built = build_kernels(layer, x)
        kernels = {kernel for kernel, _ in launches}
        assert built > 10, built
        assert {warmup for _, warmup in launches} == {True}
        assert count_compiled(kernels) == len(launchers) == built
        assert build_kernels(layer, x) == 0
        launches.clear()
        layer(x).sum().backward()
    assert {warmup for _, warmup in launches} == {False}
    assert count_compiled({kernel for kernel, _ in launches} | kernels) == built
    print(built)


if __name__ == '__main__':
    main(*sys.argv[1:])
