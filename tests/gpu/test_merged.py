"""Merged mode on a GPU, in every design of the selected part, by the error rules.

python -m pytest -m gpu -n 16 tests/gpu/test_merged.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.testing import make_block_indices, make_qkv
from tests.gpu.test_selected_features import (
    SEQLEN,
    designs,
    half_types,
    make_tensors,
    shared_gpu,  # noqa: F401, every test takes it
)
from tests.support.gpu_problems import Problem, assert_obeys_the_rules

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu


def assert_rules(tensors: dict[str, Tensor], **settings: Any) -> None:
    """The rules hold in memory full of NaN, and the first call gives the bits of the second."""
    # The gradients of one query's block_scale cancel each other, so a row of it is a row of the batch.
    row_dims = {'out1': 0, 'grad of block_scale': 3, 'grad of sinks': 1}
    dtypes = {'grad of block_scale': tensors['q'].dtype, 'grad of sinks': tensors['q'].dtype}
    problem = Problem(selected_attention, tensors, settings, row_dims, dtypes)
    grads = problem.draw_grads(torch.Generator(tensors['q'].device).manual_seed(1))
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads)
    harness.assert_same_bits(problem.run('triton', grads), result)


@half_types
@designs
@pytest.mark.parametrize('window', [16, 70])
@pytest.mark.parametrize('head_dim', [64, 128])
def test_rules(
    head_dim: int, window: int, design: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors(design, device, monkeypatch, dtype=dtype, head_dim=head_dim)
    assert_rules(tensors, block_size=32, window_size=(window - 1, 0))


@designs
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32], ids=['bfloat16', 'float32'])
def test_straight_through_scale(
    dtype: torch.dtype, design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of 1 have a gradient, also from tokens inside the window, under a soft cap and sinks."""
    block_size = 16 if design in ('block', 'fused') else 32
    tensors = make_tensors(design, device, monkeypatch, dtype=dtype, block_size=block_size, scaled=True)
    tensors['block_scale'] = torch.ones_like(tensors['block_scale'])
    tensors['sinks'] = torch.linspace(-1, 1, tensors['q'].shape[2], device=device)
    settings: dict[str, Any] = {'block_size': block_size, 'window_size': (40, 0), 'softcap': 3.0}
    assert_rules(tensors, unit_scale=True, **settings)


@designs
@pytest.mark.parametrize('kind', ['offset', 'lengths', 'packed'])
def test_extents(kind: str, design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(design, device, monkeypatch, kind='junk')
    where: dict[str, Any] = {'q_offset': -20}
    if kind == 'lengths':
        where = {'seqlens_k': torch.tensor([SEQLEN, 150], dtype=torch.int32, device=device)}
    if kind == 'packed':
        tensors = {name: tensor[:1] for name, tensor in tensors.items()}
        where = {'cu_seqlens': torch.tensor([0, 9, 9, 130, 220], dtype=torch.int32, device=device)}
    assert_rules(tensors, block_size=32, window_size=(30, 0), **where)


def test_values_that_drift(device: torch.device) -> None:
    """Weights are flat, so the outputs of window and selected part differ by more than either changes."""
    generator = torch.Generator(device).manual_seed(0)
    drawn: dict[str, Any] = {'device': device, 'generator': generator}
    q, k, v = make_qkv(2, 1024, 1024, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, **drawn)
    v = v + torch.linspace(-8, 8, 1024, device=device)[:, None, None].to(v)
    indices = make_block_indices('duplicates', 2, 1024, 2, 12, seqlen_k=1024, block_size=64, **drawn)
    tensors = {'q': 0.2 * q, 'k': k, 'v': v, 'block_indices': indices}
    assert_rules(tensors, block_size=64, window_size=(199, 0))


@designs
def test_equals_dense(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every block selected the result is dense attention, to 1e-5 in float32."""
    block_size = 16 if design == 'block' else 64
    tensors = make_tensors(design, device, monkeypatch, dtype=torch.float32, block_size=block_size)
    batch, seqlen, index_heads, _ = tensors['block_indices'].shape
    blocks = torch.arange(-(-seqlen // block_size), dtype=torch.int32, device=device)
    indices = blocks.expand(batch, seqlen, index_heads, -1)
    q, k, v = (tensors[name].requires_grad_() for name in 'qkv')
    out, _ = selected_attention(q, k, v, indices, block_size=block_size, window_size=(50, 0), backend='triton')
    groups = q.shape[2] // k.shape[2]
    keys, values = (t.double().repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dense = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(1, 2), keys, values, is_causal=True
        ).transpose(1, 2)
    dout = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(2), device=device)
    results = (out, *torch.autograd.grad(out, (q, k, v), dout))
    expected = (dense, *torch.autograd.grad(dense, (q, k, v), dout.double()))
    for result, gold in zip(results, expected, strict=True):
        assert ((result.double() - gold).norm() / gold.norm()).item() <= 1e-5
