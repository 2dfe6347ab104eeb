"""The parts of `benchmarks.norm_rotary`: both methods compute the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip('triton')

from benchmarks import norm_rotary


def test_methods_compute_the_same() -> None:
    shape = (1, 70, 2, 1, 16)
    parts = norm_rotary.make_parts(shape, 'cpu', torch.float32)
    parts |= norm_rotary.make_layers(shape, 'cpu', torch.float16)
    assert len(parts) == 6
    for name, run in parts.items():
        if name.startswith('fused'):
            tolerance = 0.02 if 'layer' in name else 1e-4
            for result, expected in zip(run(), parts[name.replace('fused', 'called')](), strict=True):
                assert (result - expected).norm() <= tolerance * expected.norm()
