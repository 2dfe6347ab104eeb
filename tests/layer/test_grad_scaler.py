"""float16 under `GradScaler`: overflowing gradients skip the step, and finite gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.dense import DenseAttention

SIZES: dict[str, Any] = {
    'sliding_window_size': 8,
    'compress_block_size': 8,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 8,
    'num_selected_blocks': 4,
}
# Gradients of the loss vanish in float16 without a scale.
REFERENCE = 2.0**12


def make_layer(features: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    if features is None:
        return DenseAttention(32, 16, 2, causal=True)
    return SparseAttention(32, 16, 2, **SIZES, **features, causal=True)


def gradients(layer: nn.Module, x: Tensor, scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    layer.zero_grad()
    with torch.autocast('cpu', torch.float16):
        out = layer(x)
    scaler.scale(out.float().square().mean()).backward()
    return {name: p.grad / scaler.get_scale() for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    'features',
    [
        None,
        {'use_diff_topk': True},
        {'use_diff_topk': True, 'recompute': True, 'independent_branch_kv': True},
        {'use_diff_topk': True, 'merge_window': True, 'num_sinks': 1},
    ],
    ids=['dense', 'sparse', 'recompute', 'merged'],
)
def test_a_step_is_right_or_skipped(features: dict[str, Any] | None) -> None:
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1))
    expected = gradients(make_layer(features), x, torch.amp.GradScaler('cpu', init_scale=REFERENCE))
    skipped = []
    for exponent in range(12, 42, 2):
        layer, scaler = make_layer(features), torch.amp.GradScaler('cpu', init_scale=2.0**exponent)
        before = [p.detach().clone() for p in layer.parameters()]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        results = gradients(layer, x, scaler)
        scaler.step(optimizer)
        scaler.update()
        assert results.keys() == expected.keys() == dict(layer.named_parameters()).keys()
        is_skipped = scaler.get_scale() < 2.0**exponent
        skipped.append(is_skipped)
        if is_skipped:
            assert all(p.equal(old) for p, old in zip(layer.parameters(), before, strict=True))
            continue
        for name, result in results.items():
            assert (result - expected[name]).norm() <= 0.01 * expected[name].norm(), (exponent, name)
    assert skipped[0] is False
    assert skipped == sorted(skipped)
    assert skipped[-1] is True
