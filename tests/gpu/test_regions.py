"""Block selection and scores inside regions on a GPU: drawn problems, long rows, graphs, offsets beyond int32.

python -m pytest -m gpu -n 15 tests/gpu/test_regions.py
python -m pytest -m gpu -n 15 tests/gpu/test_rules.py -k 'every_launch and block_selection'      every launch setting
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import select_blocks
from native_sparse_attention.testing import make_qkv
from tests.support.gpu_problems import Problem, assert_obeys_the_rules, draw_problem, draw_select_blocks

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
region_problems = pytest.importorskip('tests.support.region_problems')

pytestmark = pytest.mark.gpu

BACKEND = 'triton'
COUNT = 60
Drawn = tuple[dict[str, Tensor], dict[str, Any]]


def draw_selection(index: int, device: torch.device, exact: bool, every: bool = False) -> Drawn:
    """Problems of `select_blocks` with regions of one to eight selection blocks."""
    tensors, settings, choice = draw_select_blocks(index, device, exact)
    random = Random(f'regions {index} {exact}')
    per_selection = settings['selection_block_size'] // settings['compress_stride']
    region_size, num_regions = per_selection * random.choice((1, 2, 3, 8)), random.choice((1, 3, 4, 9))
    index_heads = tensors['k_cmp' if choice['share_group'] else 'q'].shape[2]
    regions = region_problems.draw_regions((tensors, settings), region_size, num_regions, index_heads, every)
    return tensors | {'regions': regions}, settings | choice | {'region_size': region_size}


def select(problem: Drawn, backend: str = BACKEND) -> Tensor:
    return region_problems.select_in_regions(**problem[0], **problem[1], backend=backend)


@pytest.mark.parametrize('index', range(COUNT))
def test_selection_is_exact(index: int, device: torch.device) -> None:
    """Where scores are counts, the blocks equal those of the definition."""
    problem = draw_selection(index, device, exact=True)
    with harness.poisoned_allocations():
        blocks = select(problem)
    assert torch.equal(blocks, select(problem, 'eager')), problem[1]
    assert torch.equal(blocks, select(problem))


@pytest.mark.parametrize('index', range(COUNT))
def test_selection_has_the_highest_scores(index: int, device: torch.device) -> None:
    problem = draw_selection(index, device, exact=False)
    with harness.poisoned_allocations():
        blocks = select(problem)
    region_problems.assert_selects_as_well(blocks, problem)


@pytest.mark.parametrize('index', range(COUNT // 2))
def test_every_region_is_the_whole(index: int, device: torch.device) -> None:
    tensors, settings = problem = draw_selection(index, device, exact=True, every=True)
    whole = {name: t for name, t in tensors.items() if name != 'regions'}
    settings = {name: value for name, value in settings.items() if name != 'region_size'}
    assert torch.equal(select(problem), select_blocks(**whole, **settings, backend=BACKEND))


@pytest.mark.parametrize('index', range(COUNT))
def test_scores(index: int, device: torch.device) -> None:
    """Scores and gradients by the error rules; the first call gives the bits of the second."""
    drawn, generator = draw_problem('chosen_scores', index, device)
    random, settings = Random(f'scores in regions {index}'), drawn.settings
    per_selection = settings['selection_block_size'] // settings['compress_stride']
    region_size, num_regions = per_selection * random.choice((1, 2, 3, 8)), random.choice((1, 3, 4, 9))
    index_heads = drawn.tensors['block_indices'].shape[2]
    regions = region_problems.draw_regions((drawn.tensors, settings), region_size, num_regions, index_heads)
    tensors, settings = {**drawn.tensors, 'regions': regions}, {**settings, 'region_size': region_size}
    problem = Problem(region_problems.scores_in_regions, tensors, settings, drawn.row_dims)
    grads = problem.draw_grads(generator)
    with harness.poisoned_allocations():
        result = assert_obeys_the_rules(problem, grads, BACKEND)
    harness.assert_same_bits(problem.run(BACKEND, grads), result)


def make_long(seqlen: int, device: torch.device, last: int = 128) -> Drawn:
    """The last queries of a long row at the sizes of the paper, 32/2 heads of 128."""
    generator = torch.Generator(device).manual_seed(0)
    shape: dict[str, Any] = {'heads': 32, 'kv_heads': 2, 'head_dim': 128, 'dtype': torch.bfloat16, 'device': device}
    q, k_cmp, _ = make_qkv(1, last, (seqlen - 32) // 16 + 1, **shape, generator=generator)
    settings: dict[str, Any] = {'compress_block_size': 32, 'compress_stride': 16, 'selection_block_size': 64}
    settings |= {'seqlen_k': seqlen, 'q_offset': seqlen - last}
    tensors = {'q': q, 'k_cmp': k_cmp, 'lse': torch.full((1, 32, last), 9.0, device=device)}
    regions = region_problems.draw_regions((tensors, settings), 64, 16, 2)
    return tensors | {'regions': regions}, settings | {'region_size': 64, 'num_selected': 16}


@pytest.mark.parametrize('seqlen', [2**16, 2**18])
def test_long_rows(seqlen: int, device: torch.device) -> None:
    problem = make_long(seqlen, device)
    region_problems.assert_selects_as_well(select(problem), problem)


def test_keys_beyond_int32(device: torch.device) -> None:
    tensors, settings = make_long(2**16, device)
    expected = select((tensors, settings))
    k_cmp = tensors['k_cmp']
    stride = 2**31 // (k_cmp.shape[1] - 1) + 16
    buffer = torch.empty((k_cmp.shape[1] - 1) * stride + 256, dtype=k_cmp.dtype, device=device)
    far = buffer.as_strided(k_cmp.shape, (0, stride, 128, 1)).copy_(k_cmp)
    assert torch.equal(select((tensors | {'k_cmp': far}, settings)), expected)


def test_graphs_and_repetition(device: torch.device) -> None:
    problem = make_long(2**16, device)
    expected = select(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks = select(problem)
    for _ in range(20):
        blocks.fill_(-5)
        graph.replay()
        assert torch.equal(blocks, expected)
