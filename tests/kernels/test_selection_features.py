"""Soft caps, block counts per query and segments in the kernels of block selection and of `chosen_scores`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from native_sparse_attention.ops import chosen_scores, select_blocks, straight_through_scale
from native_sparse_attention.testing import INDEX_KINDS
from tests.kernels import test_chosen_scores as scores
from tests.kernels.test_select_blocks import TILE, assert_as_good_as_eager, assert_equals_eager
from tests.support.harness import assert_close_to_eager, assert_same_bits, fence, fewer_examples, run_eager, run_triton
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    packed,
    row_integers,
    whole,
)
from tests.support.select_blocks_problems import HEADS, SIZES, Problem, Sizes, choose, make_counts, make_problem


def draw_counts(problem: Problem, share_group: bool, largest: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Draw a block count per row, some of them negative."""
    tensors, _ = problem
    q, k_cmp = tensors['q'], tensors['k_cmp']
    shape = (*q.shape[:2], k_cmp.shape[2] if share_group else q.shape[2])
    return fence(torch.randint(-2, largest + 1, shape, dtype=dtype, device=q.device))


def cap(problem: tuple[dict[str, Tensor], dict[str, Any]], softcap: float) -> Any:
    tensors, settings = problem
    return tensors, settings | {'softcap': softcap}


@pytest.mark.quick
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(
    'extents',
    [
        whole(29, batch=2),
        packed([0, 9, 1, 16, 0], uncovered=2),
        Extents(2, 5, 30, {'q_offset': row_integers([23, -3])}, [30, 30]),
        Extents(1, 9, 30, {'cu_seqlens': cumulative([0, 5, 3]), 'cu_seqlens_k': cumulative([5, 14, 9])}, [5, 14, 9]),
    ],
)
def test_counts(extents: Extents, causal: bool, share_group: bool, device: torch.device) -> None:
    """The scores are partly equal."""
    problem = make_counts(extents, Heads(4, 2, 4, 4), SIZES, device, causal=causal)
    counts = draw_counts(problem, share_group, 6, torch.int32 if causal else torch.int64)
    selection = {'num_selected': 4, 'num_init': 1, 'num_local': 1, 'share_group': share_group}
    assert_equals_eager(problem, block_counts=counts, **selection)


@pytest.mark.parametrize('count', [-1, 0, 1, 3, 4, 13])
def test_one_count_for_all(count: int, device: torch.device) -> None:
    problem = make_counts(packed([17, 0, 8]), HEADS, SIZES, device)
    blocks = assert_equals_eager(problem, num_selected=4, block_counts=count)
    every_row = torch.full((1, 25, 2), count, device=device)
    assert torch.equal(choose(problem, num_selected=4, block_counts=every_row), blocks)


@pytest.mark.parametrize('sizes', [(4, 4, 4), (4, 1, 1)])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('num_selected', [3, 17, 40])
def test_counts_of_rows_over_several_tiles(num_selected: int, causal: bool, sizes: Sizes, device: torch.device) -> None:
    """Queries at the end of five tiles: each tile holds some of the best blocks, and there are more
    slots than blocks.
    """
    seqlen_k = (5 * TILE + 3) * sizes[2]
    extents = Extents(1, 7, seqlen_k, {}, [seqlen_k])
    problem = make_counts(extents, Heads(2, 1, 4, 4), sizes, device, causal=causal)
    counts = draw_counts(problem, True, num_selected + 1)
    counts[0, 2] = 1
    assert_equals_eager(problem, num_selected=num_selected, num_init=1, num_local=2, block_counts=counts)


def test_the_best_blocks_of_a_row_in_its_last_tile(device: torch.device) -> None:
    seqlen = 4 * TILE
    tensors, settings = make_counts(whole(seqlen), Heads(1, 1, 4, 4), (1, 1, 1), device)
    ascending = torch.linspace(-4, 4, seqlen + 1, device=device)[:, None].expand(-1, 4)
    tensors['k_cmp'][0, :, 0] = ascending
    counts = (torch.arange(seqlen, device=device) % 4)[None, :, None]
    blocks = assert_equals_eager((tensors, settings), num_selected=4, num_init=0, num_local=0, block_counts=counts)
    a, b, c = range(seqlen - 3, seqlen)
    assert blocks[0, -3:, 0].tolist() == [[a, -1, -1, -1], [a, b, -1, -1], [a, b, c, -1]]


def test_layouts_of_counts(device: torch.device) -> None:
    problem = make_counts(whole(19, batch=2), HEADS, SIZES, device)
    counts = draw_counts(problem, True, 4)
    expected = assert_equals_eager(problem, num_selected=3, block_counts=counts)
    for layout in (counts.transpose(0, 2).contiguous().transpose(0, 2), counts.repeat(1, 2, 1)[:, :19]):
        assert torch.equal(choose(problem, num_selected=3, block_counts=layout), expected)
    one = counts[:, :1].expand(2, 19, 2)
    assert_equals_eager(problem, num_selected=3, block_counts=one)
    for huge in (2**40, -(2**40)):
        assert_equals_eager(problem, num_selected=3, block_counts=torch.full((2, 19, 2), huge, device=device))


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize('softcap', [0.5, 30.0])
def test_selection_with_a_soft_cap(softcap: float, share_group: bool, dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 21, 200, {'q_offset': 160}, [200])
    for causal in (True, False):
        problem = make_problem(extents, Heads(6, 2, 40, 16), (8, 4, 8), device, dtype=dtype, causal=causal)
        counts = draw_counts(problem, share_group, 7)
        selection = {'num_selected': 6, 'share_group': share_group, 'block_counts': counts}
        assert_as_good_as_eager(cap(problem, softcap), **selection)


def test_a_soft_cap_changes_the_selection(device: torch.device) -> None:
    """Without the cap a block with much mass of one head wins, with it a block with mass of both heads."""
    q = torch.eye(2, device=device).reshape(1, 1, 2, 2)
    k_cmp = torch.tensor([[6.0, -6.0], [5.0, 5.0]], device=device).reshape(1, 2, 1, 2)
    lse = torch.zeros(1, 2, 1, device=device)
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    settings: dict[str, Any] = {**dict.fromkeys(names, 1), 'seqlen_k': 2, 'scale': 1.0, 'backend': 'triton'}
    settings |= {'num_selected': 1, 'num_init': 0, 'num_local': 0}
    for softcap, expected in ((None, 0), (1e6, 0), (1.0, 1)):
        assert select_blocks(q, k_cmp, lse, softcap=softcap, **settings).item() == expected


def test_capped_logits_of_any_size(device: torch.device) -> None:
    """Products near the largest float have the largest possible logit, of either sign."""
    tensors, settings = make_problem(whole(41), HEADS, SIZES, device)
    tensors['q'].mul_(1e18)
    tensors['k_cmp'].mul_(1e18)
    tensors['lse'].fill_(5.0)
    settings |= {'softcap': 5.0}
    assert_as_good_as_eager((tensors, settings), num_selected=4)
    tensors['block_indices'] = torch.randint(0, 11, (1, 41, 2, 3), dtype=torch.int32, device=device)
    result, expected = (run(chosen_scores, tensors, **settings)['out0'] for run in (run_triton, run_eager))
    torch.testing.assert_close(result, expected)


@fewer_examples(0.2)
@given(
    extents=drawn_extents(),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    num_selected=st.integers(0, 6),
    forced=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    share_group=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([None, 0.4, 20.0]),
    counts=st.sampled_from([None, -1, 2, torch.int32, torch.int64]),
)
def test_any_selection(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    num_selected: int,
    forced: tuple[int, int],
    share_group: bool,
    causal: bool,
    softcap: float | None,
    counts: int | torch.dtype | None,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    tensors, settings = make_problem(extents, heads, sizes, device, causal=causal)
    problem = (tensors, settings | {'softcap': softcap})
    is_dtype = isinstance(counts, torch.dtype)
    block_counts = draw_counts(problem, share_group, num_selected + 1, counts) if is_dtype else counts
    num_init, num_local = forced
    selection = {'num_selected': num_selected, 'num_init': num_init, 'num_local': num_local, 'share_group': share_group}
    assert_as_good_as_eager(problem, **selection, block_counts=block_counts)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('softcap', [0.5, 3.0])
def test_error_rules_of_capped_scores(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 16, 150, {'q_offset': 100}, [150])
    heads = Heads(6, 2, 40, 1)
    problem = scores.make_problem(
        extents, device, heads=heads, sizes=(8, 4, 16), num_selected=5, dtype=dtype, kind='junk'
    )
    scores.check(cap(problem, softcap), by_rules=True)


@fewer_examples(0.1)
@given(
    extents=drawn_extents(max_seqlen=10),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    num_selected=st.integers(0, 4),
    kind=st.sampled_from(INDEX_KINDS),
    alone=st.booleans(),
    causal=st.booleans(),
    softcap=st.sampled_from([0.4, 20.0]),
)
def test_any_capped_scores(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    num_selected: int,
    kind: str,
    alone: bool,
    causal: bool,
    softcap: float,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    problem = scores.make_problem(
        extents, device, heads=heads, sizes=sizes, num_selected=num_selected, kind=kind, alone=alone, causal=causal
    )
    tensors, settings = cap(problem, softcap)
    assert_close_to_eager(chosen_scores, tensors, scores.make_grad(tensors), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('forced', [(0, 0), (1, 2)])
@pytest.mark.parametrize('causal', [True, False])
def test_capped_straight_through_scale(causal: bool, forced: tuple[int, int], device: torch.device) -> None:
    tensors, settings = cap(scores.make_problem(packed([5, 31]), device, num_selected=6, causal=causal), 0.5)
    tensors['block_indices'] = torch.randint_like(tensors['block_indices'], -1, 10)
    grads = scores.make_grad(tensors)
    settings |= dict(zip(('num_init', 'num_local'), forced, strict=True))
    expected = run_eager(straight_through_scale, tensors, grads, **settings)
    result = run_triton(straight_through_scale, tensors, grads, **settings)
    assert (result.pop('out0') == 1).all()
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)
    uncapped = run_eager(straight_through_scale, tensors, grads, **settings | {'softcap': None})
    assert not torch.allclose(expected['grad of q'], uncapped['grad of q'], rtol=1e-2)


def make_segmented(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Return tensors, settings and ids of four runs, one of which is padding full of NaN."""
    lengths = [9, 6, 1, 8]
    tensors, settings = scores.make_problem(packed(lengths), device, num_selected=3)
    ids = torch.tensor([4, -3, 0, 4], device=device).repeat_interleave(torch.tensor(lengths, device=device))[None]
    tensors['q'][:, 9:15] = torch.nan
    tensors['k_cmp'][:, 3:5] = torch.nan
    tensors['lse'][..., 9:15] = torch.nan
    del settings['cu_seqlens'], settings['seqlen_k']
    return tensors, settings | {'softcap': 2.0}, ids


def test_segments(device: torch.device) -> None:
    tensors, settings, ids = make_segmented(device)
    borders = cumulative([9, 6, 1, 8]).to(device)
    blocks = tensors.pop('block_indices')
    selection: dict[str, Any] = {'num_selected': 3, 'num_init': 0, 'num_local': 1}
    counts = draw_counts((tensors, settings), True, 3)
    chosen = assert_equals_eager((tensors, settings | {'segment_ids': ids}), **selection, block_counts=counts)
    same = choose((tensors, settings | {'cu_seqlens': borders}), **selection, block_counts=counts)
    assert torch.equal(chosen, same.masked_fill((ids < 0)[..., None, None], -1))

    grads = [torch.randn(blocks.shape, device=device)]
    tensors['block_indices'] = blocks
    packed_blocks = tensors | {'block_indices': blocks.masked_fill((ids < 0)[..., None, None], -1)}
    forced = {'num_init': 0, 'num_local': 0}
    for op, more in ((chosen_scores, {}), (straight_through_scale, forced)):
        result = run_triton(op, tensors, grads, **settings, **more, segment_ids=ids)
        expected = run_eager(op, tensors, grads, **settings, **more, segment_ids=ids)
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)
        assert not result['grad of q'][:, 9:15].any()
        assert not result['grad of lse'][..., 9:15].any()
        assert not result['grad of k_cmp'][:, 3:5].any()
        assert_same_bits(result, run_triton(op, packed_blocks, grads, **settings, **more, cu_seqlens=borders))


@pytest.mark.plain_memory
def test_opcheck_with_a_soft_cap(device: torch.device) -> None:
    tensors, settings = scores.make_problem(packed([1, 5]), device, heads=Heads(1, 1, 16, 1), num_selected=2)
    q, k_cmp, lse, block_indices = tensors.values()
    where = (6, None, None, None, settings['cu_seqlens'], settings['cu_seqlens'])
    leaves = tuple(t.detach().clone().requires_grad_() for t in (q, k_cmp, lse))
    arguments = (*leaves, block_indices, *where, *SIZES, True, 0.3, 1.5, 1, 2, 3)
    torch.library.opcheck(scores.scores._forward, (*arguments, False))
    torch.library.opcheck(scores.scores._forward, (*arguments, True))


@pytest.mark.plain_memory
def test_features_compile(device: torch.device) -> None:
    """One graph serves every length, and the gradients of the selected blocks equal those without compilation."""
    graphs = CompileCounterWithBackend('aot_eager')
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    fixed: dict[str, Any] = {**dict(zip(names, SIZES, strict=True)), 'backend': 'triton'}

    def learn(q: Tensor, k_cmp: Tensor, lse: Tensor, counts: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
        settings = fixed | {'seqlen_k': seqlen, 'softcap': 0.8}
        blocks = select_blocks(q, k_cmp, lse, num_selected=3, block_counts=counts, **settings)
        few = select_blocks(q, k_cmp, lse, num_selected=3, block_counts=2, **settings)
        return blocks + few, chosen_scores(q, k_cmp, lse, blocks, **settings)

    compiled = torch.compile(learn, fullgraph=True, backend=graphs, dynamic=True)
    for seqlen in (20, 26):
        problem = make_problem(whole(seqlen), HEADS, SIZES, device)
        tensors = [t.requires_grad_() for t in problem[0].values()]
        counts = draw_counts(problem, True, 4)
        q, k_cmp, lse = tensors
        results = [function(q, k_cmp, lse, counts, seqlen) for function in (compiled, learn)]
        (blocks, learned), (expected_blocks, expected) = results
        assert torch.equal(blocks, expected_blocks)
        assert torch.equal(learned, expected)
        for grad, other in zip(*(torch.autograd.grad(t.sum(), tensors) for t in (learned, expected)), strict=True):
            assert torch.equal(grad, other)
    assert graphs.frame_count == 1
