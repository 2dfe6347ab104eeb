"""Selected attention on a GPU with soft caps, block counts and segments, in every design, by the error rules.

python -m pytest -m gpu -n 16 tests/gpu/test_selected_features.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.testing import make_block_indices, make_qkv
from tests.support.gpu_problems import Problem, assert_obeys_the_rules

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
selected_plan = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.plan')
dlogits = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.dlogits.storage')

pytestmark = pytest.mark.gpu

# Heads per group, and constants of plan.py that let a small problem take the design.
DESIGNS: dict[str, tuple[int, dict[str, Any]]] = {
    'query': (16, {'MIN_SEQLEN_MIXED': 10**9}),
    'union': (4, {'MAX_BLOCK_RATIO': 10**9}),
    'block': (2, {'MAX_BLOCK_RATIO': 0, 'MIN_SEQLEN_BY_BLOCK': 0, 'MAX_GROUP_FUSED': 0}),
    'fused': (2, {'MAX_BLOCK_RATIO': 0, 'MIN_SEQLEN_BY_BLOCK': 0}),
    'mixed': (
        16,
        {'MIN_SEQLEN_MIXED': 0, 'MAX_BLOCK_RATIO_LARGE': 0, 'MAX_UNION_PERCENT': {'forward': 75, 'backward': 75}},
    ),
}
# The same, with stored gradients of logits.
PASSED = 'passed'
DESIGNS[PASSED] = DESIGNS['mixed']
SEQLEN = 230
half_types = pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bfloat16', 'float16'])
designs = pytest.mark.parametrize('design', DESIGNS)


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    torch.cuda.empty_cache()


def make_tensors(
    design: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    block_size: int = 32,
    kind: str = 'duplicates',
    alone: bool = False,
    scaled: bool = False,
) -> dict[str, Tensor]:
    """Return a problem that takes the design forward and backward."""
    group, constants = DESIGNS[design]
    for name, value in constants.items():
        monkeypatch.setattr(selected_plan, name, value)
    monkeypatch.setattr(dlogits, 'MIN_TOKENS', 1 if design == PASSED else 10**9)
    monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 0)
    generator = torch.Generator(device).manual_seed(0)
    drawn: dict[str, Any] = {'device': device, 'generator': generator}
    heads = 2 if alone else 2 * group
    shape: dict[str, Any] = {'heads': heads, 'kv_heads': 1 if alone else 2, 'head_dim': head_dim, 'dtype': dtype}
    tensors = dict(zip('qkv', make_qkv(2, SEQLEN, SEQLEN, **shape, **drawn), strict=True))
    indices = make_block_indices(kind, 2, SEQLEN, 2, 4, seqlen_k=SEQLEN, block_size=block_size, **drawn)
    if design in ('mixed', PASSED):
        indices[:, 1::2] = indices[:, :-1:2]  # so that some tiles share
    expected = {PASSED: ('mixed', 'mixed'), 'fused': ('block', 'fused')}.get(design, (design, design))
    q, k, v = tensors.values()
    for backward in (False, True):
        assert selected_plan.choose_design(q, k, v, indices, block_size, backward=backward) == expected[backward]
    tensors['block_indices'] = indices
    if scaled:
        tensors['block_scale'] = 1 + 0.3 * torch.randn(indices.shape, **drawn)
    return tensors


def assert_rules(tensors: dict[str, Tensor], **settings: Any) -> None:
    """The rules hold in memory full of NaN, and the first call gives the bits of the second."""
    # The gradients of one query's block_scale cancel each other, so a row of it is a row of the batch.
    row_dims, dtypes = {'out1': 0, 'grad of block_scale': 3}, {'grad of block_scale': tensors['q'].dtype}
    problem = Problem(selected_attention, tensors, settings, row_dims, dtypes)
    grads = problem.draw_grads(torch.Generator(tensors['q'].device).manual_seed(1))
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads)
    harness.assert_same_bits(problem.run('triton', grads), result)


@half_types
@designs
@pytest.mark.parametrize('scaled', [False, True], ids=['', 'scaled'])
@pytest.mark.parametrize('head_dim', [64, 128, 256])
def test_soft_caps(
    head_dim: int, scaled: bool, design: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Logits lie on both sides of the cap."""
    tensors = make_tensors(design, device, monkeypatch, dtype=dtype, head_dim=head_dim, scaled=scaled)
    assert_rules(tensors, block_size=32, softcap=1.5, causal=design != 'union' or scaled)


@designs
def test_float32(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    block_size = 16 if design in ('block', 'fused') else 32
    tensors = make_tensors(design, device, monkeypatch, dtype=torch.float32, block_size=block_size, scaled=True)
    assert_rules(tensors, block_size=block_size, softcap=2.0)


@designs
@pytest.mark.parametrize('block_size', [16, 24, 64])
def test_block_sizes(block_size: int, design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Blocks that are a whole number of tiles and blocks that are not, with counts and a negative scale."""
    tensors = make_tensors(design, device, monkeypatch, block_size=block_size, kind='junk')
    counts = torch.randint(-1, 6, tensors['block_indices'].shape[:3], device=device, dtype=torch.int32)
    assert_rules(tensors, block_size=block_size, softcap=0.7, scale=-0.2, block_counts=counts)


@pytest.mark.parametrize('design', ['union', 'block'])
def test_heads_that_select_alone(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    tensors = make_tensors(design, device, monkeypatch, alone=True, scaled=True)
    assert_rules(tensors, block_size=32, softcap=1.0, block_counts=3)


@designs
def test_segments(design: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Padding contains NaN and reads nothing."""
    tensors = make_tensors(design, device, monkeypatch)
    tensors = {name: t[:1].clone() for name, t in tensors.items()}
    ids = torch.arange(SEQLEN, device=device)[None] // 70 - 1
    for name in 'qkv':
        tensors[name][ids < 0] = torch.nan
    assert_rules(tensors, block_size=32, softcap=1.5, segment_ids=ids)


@half_types
@designs
@pytest.mark.parametrize('softcap', [30.0, 1e5])
def test_large_logits(
    softcap: float, design: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Logits of +-6e4: at the cap they are equal; far below it the largest has all the weight."""
    tensors = make_tensors(design, device, monkeypatch, dtype=dtype, kind='valid')
    for name in 'qk':
        norms = tensors[name].float().norm(dim=-1, keepdim=True)
        tensors[name] = (tensors[name].abs().float() / norms * 6e4**0.5).to(dtype)
    tensors['q'][:, ::2] *= -1
    problem = Problem(selected_attention, tensors, {'block_size': 32, 'scale': 1.0, 'softcap': softcap})
    grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
    result = problem.run('triton', grads)
    assert all(t.isfinite().all() for t in result.values())
    if softcap == 30:
        gold = problem.run('eager', grads, torch.float64)
        for name in ('out0', 'out1', 'grad of v'):
            error = (result[name].double() - gold[name]).norm() / gold[name].norm()
            assert error < 2.0**-7, name


@half_types
def test_flex(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """The output is that of FlexAttention's arithmetic, and the gradients are close to eager."""
    tensors = make_tensors('union', device, monkeypatch, dtype=dtype, kind='valid', scaled=True)
    problem = Problem(selected_attention, tensors, {'block_size': 32, 'softcap': 1.5})
    grads = problem.draw_grads(torch.Generator(device).manual_seed(1))
    result, gold = problem.run('flex', grads), problem.run('eager', grads, torch.float64)
    for name, expected in gold.items():
        error = (result[name].double() - expected).norm() / expected.norm()
        assert error < (0.03 if name.startswith('grad') else 0.01), (name, error)
