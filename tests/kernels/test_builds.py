"""Every kernel compiles for every supported GPU, without one, and its shared memory fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from native_sparse_attention.ops._triton.launch import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
# Spilled bytes per thread for head size 128 in half precision. Kernels with a table entry or random number per weight
# are faster with more spills than with smaller tiles.
MAX_SPILLED = 1024
# Kernels that must be among the builds of some ops, by module.
INTERVAL, SELECTED, OTHERS = (
    'window_attention,compressed_attention,features',
    'selected_attention,CSR index',
    'select_blocks,block_mass,block_divergence,gated_sum,rotary,decoding',
)
KERNELS = {
    INTERVAL: {'interval': {'forward_kernel', 'dq_kernel', 'dkv_kernel', 'dbias_kernel'}},
    SELECTED: {
        'selected_attention': {'forward_kernel', 'dq_kernel', 'dkv_kernel', 'union_kernel', 'block_kernel'},
        'dlogits': {'dq_from_dlogits_kernel'},
        'by_block': {'block_kernel', 'merge_kernel', 'block_dq_kernel', 'sum_kernel'},
        'inverse_index': {'slot_kernel'},
        'counting_sort': {'place_kernel'},
    },
    OTHERS: {
        'block_selection': {'select_kernel', 'forward_kernel', 'dq_kernel'},
        'block_mass': {'block_lse_kernel', 'mass_kernel'},
        'block_divergence': {'block_lse_kernel', 'divergence_kernel', 'mean_kernel', 'dq_kernel', 'dk_kernel'},
        'gated_sum': {'forward_kernel', 'backward_kernel'},
        'rotary': {'rotary_kernel', 'sum_kernel', 'norm_rotary_kernel', 'norm_rotary_backward_kernel'},
    },
}
# Kernels that are built with gates and without.
GATED = {
    'interval': {'dq_kernel', 'dkv_kernel', 'dbias_kernel'},
    'selected_attention': {
        'dq_kernel', 'union_dq_kernel', 'sum_kernel', 'dkv_kernel', 'delta_kernel',
    },
}  # fmt: skip
EVERY_OP = ','.join(KERNELS)


def build(architecture: str, dtype: str, head_dim: int, variants: str, ops: str, cache: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, '-m', 'tests.support.builds', architecture, dtype, str(head_dim), variants, ops],
        cwd=ROOT,
        env=os.environ | {'TRITON_CACHE_DIR': str(cache), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(reports: list[dict[str, Any]], module: str, is_gated: bool | None = None) -> set[str]:
    return {
        report['kernel'].rsplit('.', 1)[1]
        for report in reports
        if module in report['kernel'] and is_gated in (None, report['is_gated'])
    }


def assert_fits(reports: list[dict[str, Any]], architecture: str, ops: str) -> None:
    expected = {module: kernels for build in KERNELS if build in ops for module, kernels in KERNELS[build].items()}
    for module, kernels in expected.items():
        assert names(reports, module) >= kernels, module
        for is_gated in (True, False):
            assert names(reports, module, is_gated) >= GATED.get(module, set()), (module, is_gated)
    too_large = [r for r in reports if r['shared'] > SHARED_MEMORY[architecture]]
    assert not too_large
    assert_no_scattered_reduction(reports)


def assert_no_scattered_reduction(reports: list[dict[str, Any]]) -> None:
    assert not [r for r in reports if r['scattered']]


@pytest.mark.quick
@pytest.mark.parametrize('kernels', KERNELS)
def test_every_kernel_builds(kernels: str, tmp_path: Path) -> None:
    """All kernels build for one architecture, in parts that processes share."""
    assert_builds('sm80', 'one', kernels, tmp_path)


@pytest.mark.parametrize(
    ('architecture', 'variants', 'ops'),
    [
        # Minutes each; GPU tests compile these kernels too.
        pytest.param('sm90', 'kinds', INTERVAL, marks=pytest.mark.combination),
        pytest.param('sm90', 'kinds', SELECTED, marks=pytest.mark.combination),
        ('sm90', 'kinds', OTHERS),
        pytest.param('sm100', 'one', EVERY_OP, marks=pytest.mark.combination),
        pytest.param('sm120', 'one', EVERY_OP, marks=pytest.mark.combination),
    ],
)
def test_builds_for_other_architectures(architecture: str, variants: str, ops: str, tmp_path: Path) -> None:
    assert_builds(architecture, variants, ops, tmp_path)


def assert_builds(architecture: str, variants: str, ops: str, cache: Path) -> None:
    reports = build(architecture, 'bfloat16', 128, variants, ops, cache)
    assert_fits(reports, architecture, ops)
    assert not [r for r in reports if r['spilled'] > MAX_SPILLED and not r['is_marked']]


def test_selection_loops_agree_in_all_threads(tmp_path: Path):
    """In float32, where heads are summed across threads, threads that disagree would never leave the loop."""
    reports = build('sm90', 'float32', 64, 'kinds', 'select_blocks', tmp_path)
    assert any(r['linear'] for r in reports if 'select_kernel' in r['kernel'])
    assert_no_scattered_reduction(reports)


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [64, 128, 256])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('architecture', ['sm80', 'sm86', 'sm90', 'sm100', 'sm120'])
def test_every_setting_builds(architecture: str, dtype: str, head_dim: int, tmp_path: Path) -> None:
    assert_fits(build(architecture, dtype, head_dim, 'all', EVERY_OP, tmp_path), architecture, EVERY_OP)
