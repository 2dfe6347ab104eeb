"""Block selection on a GPU: soft caps, block counts per query, segments and long compressed blocks, against
eager in float64.

python -m pytest -m gpu -n 16 tests/gpu/test_selection_features.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.ops import chosen_scores, select_blocks, straight_through_scale
from native_sparse_attention.testing import make_qkv, measure_errors
from tests.gpu.test_rules import assert_chooses_as_well
from tests.support.gpu_problems import (
    DTYPES,
    HEAD_DIMS,
    assert_obeys_the_rules,
    attention_lse,
    choose,
    draw_problem,
    draw_select_blocks,
)

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
SOFTCAPS = (0.7, 2.0, 15.0, 50.0)
SIZES = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}
Choosing = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    torch.cuda.empty_cache()


def cap(
    tensors: dict[str, Tensor], settings: dict[str, Any], softcap: float
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors for a soft cap, with the log-sum-exp of the capped logits."""
    settings = settings | {'softcap': softcap}
    return tensors | {'lse': attention_lse(tensors['q'], tensors['k_cmp'], tensors['k_cmp'], settings)}, settings


def draw_counts(problem: Choosing, index: int) -> Tensor:
    """Draw counts from -1 to n + 1; in some problems all queries of a row have the same."""
    tensors, _, selection = problem
    q, k_cmp = tensors['q'], tensors['k_cmp']
    generator = torch.Generator(q.device).manual_seed(index)
    shape = (*q.shape[:2], k_cmp.shape[2] if selection['share_group'] else q.shape[2])
    dtype = torch.int64 if index % 2 else torch.int32
    counts = torch.randint(-1, selection['num_selected'] + 2, shape, dtype=dtype, device=q.device, generator=generator)
    return counts[:, :1].expand(shape) if index % 5 == 4 else counts


def make_selection(
    seqlen: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    queries: int | None = None,
    head_dim: int = 64,
    group: int = 16,
    num_selected: int = 16,
    sizes: dict[str, int] = SIZES,
) -> Choosing:
    """Return tensors, settings of the scores and settings of the selection alone, for the last queries of seqlen
    tokens.
    """
    generator = torch.Generator(device).manual_seed(head_dim)
    queries = seqlen if queries is None else queries
    shape: dict[str, Any] = {'heads': 2 * group, 'kv_heads': 2, 'head_dim': head_dim, 'dtype': dtype}
    num_compressed = num_compressed_blocks(seqlen, sizes['compress_block_size'], sizes['compress_stride'])
    q, k_cmp, v_cmp = make_qkv(1, queries, num_compressed, **shape, device=device, generator=generator)
    settings: dict[str, Any] = {**sizes, 'seqlen_k': seqlen, 'q_offset': seqlen - queries, 'causal': True}
    lse = attention_lse(q, k_cmp, v_cmp, settings)
    selection = {'num_selected': num_selected, 'num_init': 1, 'num_local': 2, 'share_group': True}
    return {'q': q, 'k_cmp': k_cmp, 'lse': lse}, settings, selection


@pytest.mark.parametrize('index', range(30))
def test_counts_are_exact(index: int, device: torch.device):
    """Where scores are counts, many of them equal, the selected blocks equal those of eager."""
    problem = draw_select_blocks(index, device, exact=True)
    tensors, settings, selection = problem
    selection = selection | {'block_counts': draw_counts(problem, index)}
    with harness.poisoned_allocations():
        blocks = choose(BACKEND, tensors, settings, selection)
    assert torch.equal(blocks, choose('eager', tensors, settings, selection)), problem[1:]
    assert torch.equal(blocks, choose(BACKEND, tensors, settings, selection))


@pytest.mark.parametrize('index', range(30))
def test_capped_selections_have_the_highest_scores(index: int, device: torch.device):
    tensors, settings, selection = problem = draw_select_blocks(index, device, exact=False)
    tensors, settings = cap(tensors, settings, SOFTCAPS[index % 4])
    if index % 3:
        selection = selection | {'block_counts': draw_counts(problem, index)}
    with harness.poisoned_allocations():
        blocks = choose(BACKEND, tensors, settings, selection)
    assert_chooses_as_well(blocks, tensors, settings, selection)


@pytest.mark.parametrize('index', range(36))
def test_rules_of_capped_scores(index: int, device: torch.device):
    """Random problems by the error rules, in memory filled with NaN; the first call has the bits of the second."""
    problem, generator = draw_problem('chosen_scores', index, device)
    tensors, settings = cap(problem.tensors, problem.settings, SOFTCAPS[index % 4])
    problem = replace(problem, tensors=tensors, settings=settings)
    grads = problem.draw_grads(generator)
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads, BACKEND)
    harness.assert_same_bits(problem.run(BACKEND, grads), result)


@pytest.mark.parametrize('index', range(6))
def test_rules_of_the_capped_straight_through_scale(index: int, device: torch.device):
    problem, generator = draw_problem('chosen_scores', 100 + index, device)
    tensors, settings = cap(problem.tensors, problem.settings, SOFTCAPS[index % 4])
    settings |= {'num_init': 1, 'num_local': 1}
    problem = replace(problem, function=straight_through_scale, tensors=tensors, settings=settings)
    grads = problem.draw_grads(generator)
    with harness.poisoned_allocations():
        result = problem.run(BACKEND, grads)
    same_dtype, gold = problem.run('eager', grads), problem.run('eager', grads, torch.float64)
    assert (result['out0'] == 1).all()
    for name in ('grad of q', 'grad of k_cmp'):
        assert not measure_errors(result[name], gold[name], same_dtype[name]).broken_rules(), name


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('head_dim', HEAD_DIMS)
def test_every_head_size(head_dim: int, dtype: torch.dtype, device: torch.device):
    """Rows over several tiles of blocks; each query selects another number of blocks beyond the forced ones."""
    problem = make_selection(9000, dtype, device, queries=200, head_dim=head_dim, group=4)
    tensors, settings, selection = problem
    tensors, settings = cap(tensors, settings, 2.0)
    counts = draw_counts(problem, head_dim)
    selection = selection | {'block_counts': counts}
    blocks = choose(BACKEND, tensors, settings, selection)
    assert_chooses_as_well(blocks, tensors, settings, selection)
    assert torch.equal((blocks >= 0).sum(-1), counts.clamp(0, 16))
    assert torch.equal(choose(BACKEND, tensors, settings, selection), blocks)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('group', [1, 2, 3, 4, 6, 8, 16, 32])
@pytest.mark.parametrize('sizes', [(20, 4, 8), (64, 16, 32)])
def test_blocks_that_reach_beyond_the_next(
    sizes: tuple[int, int, int], group: int, dtype: torch.dtype, device: torch.device
):
    """A tile carries nothing over to the next one, and sums over heads in other threads; with 0 blocks, too."""
    for seqlen, num_selected in ((3000, 16), (300, 6), (sizes[0] - 1, 6)):
        for head_dim in (32, 128):
            tensors, settings, selection = make_selection(
                seqlen, dtype, device, queries=min(seqlen, 200), head_dim=head_dim, group=group,
                num_selected=num_selected, sizes=dict(zip(SIZES, sizes, strict=True)),
            )  # fmt: skip
            blocks = choose(BACKEND, tensors, settings, selection)
            assert_chooses_as_well(blocks, tensors, settings, selection)
            assert torch.equal(choose(BACKEND, tensors, settings, selection), blocks)


@pytest.mark.parametrize('group', [1, 3, 16])
def test_fewer_blocks_of_many(group: int, device: torch.device):
    """Every query selects the first of the blocks that it selects without a count."""
    problem = make_selection(40_000, torch.bfloat16, device, queries=64, group=group, num_selected=300)
    tensors, settings, selection = problem
    counts = (torch.arange(64, device=device) * 5)[None, :, None].expand(1, 64, 2)
    fewer = selection | {'block_counts': counts}
    blocks, every_one = choose(BACKEND, tensors, settings, fewer), choose(BACKEND, tensors, settings, selection)
    assert torch.equal((blocks >= 0).sum(-1), counts.clamp(max=300))
    assert_chooses_as_well(blocks, tensors, settings, fewer)
    taken = torch.zeros(1, 64, 2, 625, dtype=torch.bool, device=device).scatter_(-1, every_one.long(), True)
    assert (taken.gather(-1, blocks.long().clamp(min=0)) | (blocks < 0)).all()


def test_segments(device: torch.device):
    """Results equal those of packed sequences, and are empty at padding, whatever values it holds."""
    lengths, numbers = [300, 70, 1, 500], [4, -2, 4, 0]
    generator = torch.Generator(device).manual_seed(0)
    num_compressed = sum(max(0, (length - 32) // 16 + 1) for length in lengths)
    shape: dict[str, Any] = {'heads': 8, 'kv_heads': 2, 'head_dim': 64, 'dtype': torch.bfloat16, 'device': device}
    q, k_cmp, v_cmp = make_qkv(1, sum(lengths), num_compressed, **shape, generator=generator)
    ids = torch.tensor(numbers, device=device).repeat_interleave(torch.tensor(lengths, device=device))[None]
    borders = torch.tensor([0, 300, 370, 371, 871], dtype=torch.int32, device=device)
    lse = attention_lse(q, k_cmp, v_cmp, {**SIZES, 'cu_seqlens': borders})
    padding = (ids < 0)[..., None, None]
    counts = torch.randint(0, 6, (1, 871, 2), device=device, generator=generator)
    selection: dict[str, Any] = {**SIZES, 'num_selected': 5, 'softcap': 3.0, 'block_counts': counts, 'backend': BACKEND}
    expected = select_blocks(q, k_cmp, lse, **selection, cu_seqlens=borders).masked_fill(padding, -1)
    q[:, 300:370], lse[..., 300:370] = torch.nan, torch.nan
    blocks = select_blocks(q, k_cmp, lse, **selection, segment_ids=ids)
    assert torch.equal(blocks, expected)

    every_block = torch.arange(8, device=device).int().expand(1, 871, 2, 8)
    leaves = {name: t.requires_grad_() for name, t in {'q': q, 'k_cmp': k_cmp, 'lse': lse}.items()}
    for op in (chosen_scores, partial(straight_through_scale, num_init=0, num_local=0)):
        settings: dict[str, Any] = {**leaves, **SIZES, 'softcap': 3.0, 'backend': BACKEND}
        out = op(block_indices=every_block, **settings, segment_ids=ids)
        packed = op(block_indices=every_block.masked_fill(padding, -1), **settings, cu_seqlens=borders)
        assert torch.equal(out, packed)
        grads, others = (torch.autograd.grad(t.sum(), tuple(leaves.values())) for t in (out, packed))
        for grad, other in zip(grads, others, strict=True):
            assert torch.equal(grad, other)
            assert grad.isfinite().all()
            assert grad.any()


def test_counts_of_a_captured_selection(device: torch.device):
    """A replay with other counts equals a call; segment ids are refused in a graph."""
    tensors, settings, selection = make_selection(600, torch.bfloat16, device)
    counts = torch.full((1, 600, 2), 3, dtype=torch.int32, device=device)
    settings |= {'softcap': 20.0, 'backend': BACKEND, **selection}
    alone = {name: value for name, value in settings.items() if name != 'q_offset'}
    select_blocks(**tensors, **settings, block_counts=counts)
    torch.cuda.synchronize()
    graph, ids = torch.cuda.CUDAGraph(), torch.zeros(1, 600, dtype=torch.int32, device=device)
    with torch.cuda.graph(graph):
        blocks = select_blocks(**tensors, **settings, block_counts=counts)
        with pytest.raises(ValueError, match='segment_ids is given while a CUDA graph is captured'):
            select_blocks(**tensors, **alone, segment_ids=ids)
    for number in (0, 2, 7, 20):
        counts.fill_(number)
        graph.replay()
        assert torch.equal(blocks, select_blocks(**tensors, **settings, block_counts=counts))
        assert int((blocks >= 0).sum(-1).max()) == min(number, 10)


@pytest.mark.parametrize('changes', [{}, {'dynamic': True}])
def test_features_compile(changes: dict[str, Any], device: torch.device):
    """Selection and the gradients of its scores compile into one graph."""

    def learn(tensors: dict[str, Tensor], counts: Tensor) -> tuple[Tensor, Tensor]:
        common: dict[str, Any] = {**SIZES, 'softcap': 2.0, 'backend': BACKEND}
        blocks = select_blocks(**tensors, num_selected=6, block_counts=counts, **common)
        return blocks, straight_through_scale(**tensors, block_indices=blocks, num_init=1, num_local=1, **common)

    compiled = torch.compile(learn, fullgraph=True, **changes)
    for seqlen in (500, 620):
        tensors, _, _ = make_selection(seqlen, torch.bfloat16, device)
        tensors = {name: t.requires_grad_() for name, t in tensors.items()}
        counts = (torch.arange(seqlen, device=device) % 8)[None, :, None].expand(1, seqlen, 2)
        (blocks, scale), (expected, other) = compiled(tensors, counts), learn(tensors, counts)
        assert torch.equal(blocks, expected)
        weights = torch.randn(scale.shape, device=device)
        grads = (torch.autograd.grad((t * weights).sum(), tuple(tensors.values())) for t in (scale, other))
        for grad, same in zip(*grads, strict=True):
            assert torch.equal(grad, same)
