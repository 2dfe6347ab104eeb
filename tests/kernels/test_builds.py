"""Every kernel compiles for every supported GPU, without one, and its shared memory fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from native_sparse_attention.ops._triton.launch import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
# Spilled bytes per thread for head size 128 in half precision. Kernels with a table entry or random number per weight
# are faster with more spills than with smaller tiles.
MAX_SPILLED = 1024
# Kernels that must be among the builds of an op.
KERNELS = {
    'interval': {'forward_kernel', 'dq_kernel', 'dkv_kernel', 'dbias_kernel'},
    'block_selection': {'select_kernel', 'forward_kernel', 'dq_kernel'},
    'selected_attention': {'forward_kernel', 'dq_kernel', 'dkv_kernel', 'union_kernel', 'block_kernel'},
    'dlogits': {'dq_from_dlogits_kernel'},
    'by_block': {'block_kernel', 'merge_kernel', 'block_dq_kernel', 'sum_kernel'},
    'gated_sum': {'forward_kernel', 'backward_kernel'},
    'rotary': {'rotary_kernel', 'sum_kernel'},
    'inverse_index': {'slot_kernel'},
    'counting_sort': {'place_kernel'},
}
# Kernels that are built with gates and without.
GATED = {
    'interval': {'dq_kernel', 'dkv_kernel', 'dbias_kernel'},
    'selected_attention': {
        'dq_kernel', 'union_dq_kernel', 'sum_kernel', 'dkv_kernel', 'delta_kernel',
    },
}  # fmt: skip

Builds = Callable[..., list[dict[str, Any]]]


def build(
    architecture: str, dtype: str, head_dim: int, variants: str, cache: Path, part: str = ''
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, '-m', 'tests.support.builds', architecture, dtype, str(head_dim), variants, part],
        cwd=ROOT,
        env=os.environ | {'TRITON_CACHE_DIR': str(cache), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope='module')
def builds(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Builds]:
    """Start `build` for all selected tests of this module, two at a time, and return its results."""
    wanted = [
        item for item in request.session.items if item.path == Path(__file__) and not item.get_closest_marker('skip')
    ]
    cases = dict.fromkeys(item.callspec.id for item in wanted if hasattr(item, 'callspec'))  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        running: dict[str, Future[list[dict[str, Any]]]] = {}
        for case in cases:
            architecture, dtype, head_dim, variants = case.split('-')
            cache = tmp_path_factory.mktemp('triton')
            running[case] = pool.submit(build, architecture, dtype, int(head_dim), variants, cache)
        yield lambda *case: running['-'.join(map(str, case))].result()


def assert_fits(reports: list[dict[str, Any]], architecture: str) -> None:
    built = {op: {r['kernel'].rsplit('.', 1)[1] for r in reports if op in r['kernel']} for op in KERNELS}
    assert all(built[op] >= KERNELS[op] for op in KERNELS), built
    for op, gated in GATED.items():
        for has_gate in (True, False):
            kernels = {
                r['kernel'].rsplit('.', 1)[1] for r in reports if op in r['kernel'] and r['is_gated'] == has_gate
            }
            assert kernels >= gated, (op, has_gate, kernels)
    too_large = [r for r in reports if r['shared'] > SHARED_MEMORY[architecture]]
    assert not too_large
    assert_no_scattered_reduction(reports)


def assert_no_scattered_reduction(reports: list[dict[str, Any]]) -> None:
    assert not [r for r in reports if r['scattered']]


@pytest.mark.parametrize(
    ('architecture', 'dtype', 'head_dim', 'variants'),
    [
        pytest.param(architecture, 'bfloat16', 128, variants, id=f'{architecture}-bfloat16-128-{variants}')
        for architecture, variants in (('sm90', 'kinds'), ('sm80', 'one'), ('sm100', 'one'), ('sm120', 'one'))
    ],
)
def test_every_kernel_builds(architecture: str, dtype: str, head_dim: int, variants: str, builds: Builds) -> None:
    reports = builds(architecture, dtype, head_dim, variants)
    assert_fits(reports, architecture)
    assert not [r for r in reports if r['spilled'] > MAX_SPILLED and not r['is_marked']]


def test_selection_loops_agree_in_all_threads(tmp_path: Path):
    """In float32, where heads are summed across threads, threads that disagree would never leave the loop."""
    reports = build('sm90', 'float32', 64, 'kinds', tmp_path, 'select_blocks')
    assert any(r['linear'] for r in reports if 'select_kernel' in r['kernel'])
    assert_no_scattered_reduction(reports)


@pytest.mark.slow
@pytest.mark.parametrize('variants', ['all'])
@pytest.mark.parametrize('head_dim', [64, 128, 256])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('architecture', ['sm80', 'sm86', 'sm90', 'sm100', 'sm120'])
def test_every_setting_builds(architecture: str, dtype: str, head_dim: int, variants: str, builds: Builds) -> None:
    assert_fits(builds(architecture, dtype, head_dim, variants), architecture)
