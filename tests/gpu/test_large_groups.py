"""Kernels of large groups on a GPU: query tiles with and without block unions, stored gradients of logits.

python -m pytest -m gpu -n 4 tests/gpu/test_large_groups.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import nsa
from native_sparse_attention.ops import selected_attention
from tests.gpu.test_runtime import captured
from tests.support.gpu_problems import make_nsa

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
dlogits = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.dlogits.storage')
plan = pytest.importorskip('native_sparse_attention.ops.selected_attention.triton.plan')

pytestmark = pytest.mark.gpu

SEQLEN, BLOCK_SIZE = 8192, 64


def make_problem(batch: int, device: torch.device, group: int = 16, seed: int = 0) -> tuple[dict[str, Tensor], Any]:
    """Tensors and settings of `nsa` with two groups of so many heads, whose blocks are given: the first half of the
    queries select the same blocks, the others each for itself.
    """
    heads: dict[str, Any] = {'heads': 2 * group, 'kv_heads': 2, 'head_dim': 128}
    tensors, settings = make_nsa(batch, SEQLEN, device=device, seed=seed, **heads)
    generator = torch.Generator(device).manual_seed(seed)
    blocks = torch.rand(batch, SEQLEN, 2, SEQLEN // BLOCK_SIZE, device=device, generator=generator)
    blocks[:, : SEQLEN // 2] = blocks[:, : SEQLEN // 2 : 16].repeat_interleave(16, 1)
    own = torch.arange(SEQLEN, device=device)[:, None, None] // BLOCK_SIZE
    blocks = blocks.masked_fill(torch.arange(SEQLEN // BLOCK_SIZE, device=device) > own, -1.0)
    values, indices = blocks.topk(settings['num_selected'])
    indices = indices.masked_fill(values < 0, -1).sort(-1).values
    return tensors, {**settings, 'block_indices': indices.to(torch.int32)}


def step(tensors: dict[str, Tensor], settings: Any, dout: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = nsa(**leaves, **settings, backend='triton')
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]


def draw_dout(tensors: dict[str, Tensor], seed: int = 5) -> Tensor:
    q = tensors['q']
    return torch.randn(q.shape, dtype=q.dtype, device=q.device, generator=torch.Generator(q.device).manual_seed(seed))


@pytest.mark.parametrize('group', [16, 32, 64])
def test_design_of_large_groups(group: int, device: torch.device):
    """Groups of 16 have both kinds of tiles in one launch, and all groups store gradients of logits."""
    tensors, settings = make_problem(1, device, group)
    q, k, v, indices = tensors['q'], tensors['k'], tensors['v'], settings['block_indices']
    expected = {16: 'mixed', 32: 'union', 64: 'query'}[group]
    assert plan.choose_design(q, k, v, indices, BLOCK_SIZE) == expected
    assert dlogits.stores_dlogits(q, k, v, indices, None, BLOCK_SIZE)


@pytest.mark.parametrize('group', [16, 32, 64])
def test_no_synchronisation(group: int, device: torch.device):
    tensors, settings = make_problem(1, device, group)
    dout = draw_dout(tensors)
    step(tensors, settings, dout)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step(tensors, settings, dout)
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('group', [16, 32, 64])
def test_repeated_runs_give_the_same_bits(group: int, device: torch.device):
    tensors, settings = make_problem(2, device, group)
    dout = draw_dout(tensors)
    expected = step(tensors, settings, dout)
    assert all(t.isfinite().all() for t in expected)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(20):
        for tensor, other in zip(step(tensors, settings, dout), expected, strict=True):
            differs |= (tensor != other).any()
    assert not differs


@pytest.mark.parametrize('group', [16, 32, 64])
def test_a_row_does_not_depend_on_its_neighbours(group: int, device: torch.device):
    tensors, settings = make_problem(3, device, group)
    dout = draw_dout(tensors)
    together = step(tensors, settings, dout)
    for row in range(3):
        rows = slice(row, row + 1)
        alone = {name: t[rows] for name, t in tensors.items()}
        result = step(alone, {**settings, 'block_indices': settings['block_indices'][rows]}, dout[rows])
        for name, all_rows, own in zip(('out', *tensors), together, result, strict=True):
            same = harness.same_bits(all_rows[rows], own)
            assert same, f'row {row}: {name}'


def test_a_training_step_in_a_graph(device: torch.device):
    """Forward and backward are captured once and replayed with other tensors and selections."""
    tensors, settings = make_problem(1, device)
    dout = draw_dout(tensors)
    with captured(lambda: step(tensors, settings, dout)) as (graph, results):
        for seed in (1, 2):
            others, other_settings = make_problem(1, device, seed=seed)
            for name, tensor in tensors.items():
                tensor.copy_(others[name])
            settings['block_indices'].copy_(other_settings['block_indices'])
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            expected = step(others, other_settings, dout)
            for name, result, own in zip(('out', *tensors), results, expected, strict=True):
                same = harness.same_bits(result, own)
                assert same, f'{seed}: {name}'


def test_gradients_of_sampled_keys(device: torch.device):
    """dk and dv of some blocks and dq of some rows against float64 formulas, with stored gradients of logits."""
    tensors, settings = make_problem(1, device)
    q, k, v = (tensors[name].detach().requires_grad_() for name in 'qkv')
    indices = settings['block_indices']
    out, lse = selected_attention(q, k, v, indices, block_size=BLOCK_SIZE, backend='triton')
    dout = draw_dout(tensors)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    wide_q, wide_k, wide_v, wide_dout = (t.detach().double() for t in (q, k, v, dout))
    delta = (out.double() * wide_dout).sum(-1)
    scale = q.shape[-1] ** -0.5
    for block in (0, SEQLEN // BLOCK_SIZE // 3, SEQLEN // BLOCK_SIZE - 1):
        keys = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        for head in range(2):
            heads = slice(16 * head, 16 * head + 16)
            rows = (indices[0, :, head] == block).any(-1).nonzero()[:, 0]
            logits = torch.einsum('rgd,kd->rgk', wide_q[0, rows, heads], wide_k[0, keys, head]) * scale
            reads = rows[:, None] >= torch.arange(SEQLEN, device=device)[keys]
            weights = (logits - lse[0, heads, rows].T[..., None]).exp() * reads[:, None]
            dp = torch.einsum('rgd,kd->rgk', wide_dout[0, rows, heads], wide_v[0, keys, head])
            ds = weights * (dp - delta[0, rows, heads][..., None]) * scale
            for found, expected in (
                (dv, torch.einsum('rgk,rgd->kd', weights, wide_dout[0, rows, heads])),
                (dk, torch.einsum('rgk,rgd->kd', ds, wide_q[0, rows, heads])),
            ):
                error = (found[0, keys, head].double() - expected).norm() / expected.norm()
                assert error < 0.02, (block, head, float(error))
    for token in (100, SEQLEN // 3, SEQLEN - 1):
        for head in range(2):
            heads = slice(16 * head, 16 * head + 16)
            chosen = indices[0, token, head]
            keys = (chosen[chosen >= 0, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()
            keys = keys[keys <= token]
            logits = wide_q[0, token, heads] @ wide_k[0, keys, head].T * scale
            dp = wide_dout[0, token, heads] @ wide_v[0, keys, head].T
            weights = logits.softmax(-1)
            dlogits_of_row = weights * (dp - (weights * dp).sum(-1, keepdim=True))
            expected = dlogits_of_row @ wide_k[0, keys, head] * scale
            error = (dq[0, token, heads].double() - expected).norm() / expected.norm()
            assert error < 0.02, (token, head, float(error))
