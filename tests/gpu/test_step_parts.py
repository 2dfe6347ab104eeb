"""Kernels of a real training step, as the profiler of a GPU lists them, belong to parts of the model.

python -m pytest -m gpu tests/gpu/test_step_parts.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kernel_parts
from benchmarks.kernel_parts import NOT_ASSIGNED, PARTS
from benchmarks.step_parts import VARIANTS, Profiled, sum_part
from benchmarks.timing import measure_kernels
from benchmarks.training_speed import make_config, make_run

pytest.importorskip('triton')

pytestmark = pytest.mark.gpu

SPARSE = {kernel_parts.PHI, kernel_parts.GATES, kernel_parts.COMPRESSED, kernel_parts.TOP_K_GRADIENT}
SPARSE |= {kernel_parts.GATED_SUM}
EXPECTED = {
    'long': {*SPARSE, kernel_parts.SELECTION, kernel_parts.MERGED, kernel_parts.BLOCK_LOSS},
    'separate': {*SPARSE, kernel_parts.SELECTION, kernel_parts.SELECTED, kernel_parts.WINDOW, kernel_parts.BLOCK_LOSS},
    'dense': {kernel_parts.DENSE},
}
COMMON = {kernel_parts.HEAD, kernel_parts.FEED_FORWARD, kernel_parts.PROJECTIONS, kernel_parts.NORMS}
COMMON |= {kernel_parts.OTHER, kernel_parts.OPTIMIZER, kernel_parts.BATCH}


@pytest.mark.parametrize('variant', EXPECTED)
def test_every_kernel_is_assigned(variant: str, tmp_path: Path) -> None:
    (tmp_path / 'text').write_bytes(bytes(range(256)) * 400)
    attention, flags = VARIANTS[variant]
    config = make_config([*flags, '--depth', '2'], attention, 4096, 8192)
    case = {'config': vars(config), 'device': 'cuda', 'data': str(tmp_path / 'text'), 'backend': variant, 'graph': True}
    result = Profiled(make_run(case), 2).measure('cuda', 0.2)
    parts = {part: sum(ms) for part, ms in result['parts'].items()}
    total = sum(parts.values())
    assert {part for part, ms in parts.items() if ms > 0} - {NOT_ASSIGNED} == EXPECTED[variant] | COMMON
    assert parts[NOT_ASSIGNED] <= 0.01 * total, result['kernels']
    # Kernels of one stream do not overlap, and those of both ways to run a step are the same.
    assert total <= 1.1 * min(result['forward_ms'], result['launched_ms'])
    backward = {part for part, (_, ms) in result['parts'].items() if ms > 0}
    assert backward >= {*EXPECTED[variant], kernel_parts.FEED_FORWARD, kernel_parts.HEAD} - {kernel_parts.SELECTION}
    assert result['replayed']


def test_kernels_are_counted_once() -> None:
    """The sum is that of the kernels and copies in a profile without ops, where nothing is linked."""
    config = make_config(['--preset', 'cpu'], 'sparse', 1024, 8192)
    case = {'config': vars(config), 'device': 'cuda', 'data': 'stdlib', 'backend': 'cpu', 'graph': False}
    profiled = Profiled(make_run(case), 5)
    kernels = profiled.profile('cuda')
    alone = measure_kernels(profiled, [], 'cuda', {})['forward_kernels_ms']  # type: ignore[arg-type]
    assert sum(kernel.ms for kernel in kernels) == pytest.approx(alone, rel=0.1)
    assert sum(sum(sum_part(kernels, part)) for part in PARTS) == pytest.approx(sum(kernel.ms for kernel in kernels))
