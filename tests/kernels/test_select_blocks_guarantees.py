"""Guarantees of block selection in Triton: bitwise invariance, memory safety, the registered op, unsupported calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from native_sparse_attention.core.call import Call, SelectionRules
from native_sparse_attention.core.geometry import Sequences
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.ops.block_selection import triton
from native_sparse_attention.ops.block_selection.api import backend_of
from tests.support.problems import Extents, Heads, cumulative, packed, row_integers, whole
from tests.support.select_blocks_problems import HEADS, SIZES, choose, make_counts, make_problem, settings_of


def test_unread_keys_change_nothing(device: torch.device) -> None:
    """Positions 20 ... 29 of 100: compressed blocks that end behind position 29 may hold anything."""
    extents = Extents(1, 10, 100, {'q_offset': 20}, [100])
    tensors, settings = make_problem(extents, HEADS, SIZES, device)
    expected = choose((tensors, settings), num_selected=4)
    for junk in (torch.nan, torch.inf, -torch.inf):
        spoiled = {**tensors, 'k_cmp': tensors['k_cmp'].clone()}
        spoiled['k_cmp'][:, 14:] = junk
        assert torch.equal(choose((spoiled, settings), num_selected=4), expected)


@pytest.mark.quick
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_the_future_changes_nothing(junk: float, device: torch.device) -> None:
    tensors, settings = make_problem(whole(40), Heads(2, 1, 16, 16), SIZES, device)
    expected = choose((tensors, settings), num_selected=4)
    for position in (0, 12, 31, 32):
        spoiled = {name: t.clone() for name, t in tensors.items()}
        spoiled['q'][:, position + 1 :] = junk
        spoiled['lse'][..., position + 1 :] = junk
        # The block that ends at `position` is the last that may be read.
        spoiled['k_cmp'][:, max(0, (position - 3 + 2) // 2) :] = junk
        result = choose((spoiled, settings), num_selected=4)
        assert torch.equal(result[:, : position + 1], expected[:, : position + 1])


@pytest.mark.parametrize('name', ['q', 'lse'])
@pytest.mark.parametrize('junk', [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_not_finite_changes_no_other(junk: float, name: str, device: torch.device) -> None:
    tensors, settings = make_problem(whole(40), HEADS, SIZES, device)
    expected = choose((tensors, settings), num_selected=4)
    spoiled = {name: t.clone() for name, t in tensors.items()}
    if name == 'q':
        spoiled['q'][:, 21, 0] = junk
    else:
        spoiled['lse'][:, 0, 21] = junk
    result = choose((spoiled, settings), num_selected=4)
    others = torch.ones_like(result, dtype=torch.bool)
    others[:, 21, 0] = False
    assert torch.equal(result[others], expected[others])
    row = result[0, 21, 0].tolist()
    assert row == sorted(set(row))
    assert {0, 4, 5} < set(row) <= set(range(6))


@pytest.mark.parametrize('share_group', [True, False])
def test_rows_do_not_depend_on_their_neighbours(share_group: bool, device: torch.device) -> None:
    tensors, settings = make_problem(whole(37, batch=3), Heads(2, 1, 16, 16), SIZES, device)
    selection: dict[str, Any] = {'num_selected': 5, 'share_group': share_group}
    together = choose((tensors, settings), **selection)
    assert torch.equal(choose((tensors, settings), **selection), together)
    for row in range(3):
        alone = choose(({name: t[row : row + 1] for name, t in tensors.items()}, settings), **selection)
        assert torch.equal(alone, together[row : row + 1])


def test_chunks_equal_the_full_forward(device: torch.device) -> None:
    tensors, settings = make_problem(whole(40), HEADS, SIZES, device)
    expected = choose((tensors, settings), num_selected=5)
    for start, stop in itertools.pairwise((0, 1, 2, 17, 40)):
        chunk = {
            'q': tensors['q'][:, start:stop],
            'k_cmp': tensors['k_cmp'],
            'lse': tensors['lse'][..., start:stop],
        }
        result = choose((chunk, {**settings, 'q_offset': start}), num_selected=5)
        assert torch.equal(result, expected[:, start:stop])


@pytest.mark.parametrize('lengths', [[33, 0, 1, 20, 7], [5, 5, 5, 5], [0, 0, 30]])
def test_packed_is_alone(lengths: list[int], device: torch.device) -> None:
    """The tokens behind the last sequence select nothing."""
    tensors, settings = make_problem(packed(lengths, uncovered=4), HEADS, SIZES, device)
    together = choose((tensors, settings), num_selected=4)
    start = first_block = 0
    for length in lengths:
        stop, blocks = start + length, max(0, (length - 4) // 2 + 1)
        alone = {
            'q': tensors['q'][:, start:stop],
            'k_cmp': tensors['k_cmp'][:, first_block : first_block + blocks],
            'lse': tensors['lse'][..., start:stop],
        }
        result = choose((alone, settings_of(SIZES, whole(length), device)), num_selected=4)
        assert torch.equal(together[:, start:stop], result)
        start, first_block = stop, first_block + blocks
    assert (together[:, start:] == -1).all()


@pytest.mark.quick
@pytest.mark.parametrize(
    'junk',
    [
        {'seqlens_k': [-5, 2**31 - 1]},
        {'q_offset': [2**31 - 1, -(2**31)]},
        {'cu_seqlens': [0, 50, 10, 2**31 - 1]},
        {'cu_seqlens': [-(2**31), 2**31 - 1, 0, 7]},
        {'cu_seqlens': [0, 5, 9, 12], 'cu_seqlens_k': [0, 2**31 - 1, -7, 30]},
        {'cu_seqlens': [0, 5, 9, 12], 'cu_seqlens_k': [2**30, 2**30, 2**30, 2**31 - 1]},
    ],
)
@pytest.mark.parametrize('causal', [True, False])
def test_any_content_stays_inside_memory(junk: dict[str, list[int]], causal: bool, device: torch.device) -> None:
    """Values that are checked on CPUs, where reading is free, are not checked on GPUs."""
    batch = 1 if 'cu_seqlens' in junk else 2
    tensors, _ = make_problem(whole(12, batch=batch), HEADS, SIZES, device)
    content = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in junk.items()}
    if 'cu_seqlens' in content:
        content.setdefault('cu_seqlens_k', content['cu_seqlens'])
    sequences = Sequences(batch, 12, 2**63 - 1, device, **content)
    q, k_cmp, lse = tensors.values()
    call, rules = Call(sequences, causal, 0.25), SelectionRules(3, 1, 2, 0, share_group=True)
    result = triton.select_blocks(q, k_cmp, lse, SIZES, call, rules)
    assert (result >= -1).all()


def test_selection_has_no_gradient(device: torch.device) -> None:
    tensors, settings = make_problem(whole(20), HEADS, SIZES, device)
    expected = choose((tensors, settings), num_selected=3)
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    result = choose((tensors, settings), num_selected=3)
    assert not result.requires_grad
    assert torch.equal(result, expected)


@pytest.mark.plain_memory
def test_it_passes_opcheck(device: torch.device) -> None:
    op = torch.ops.native_sparse_attention.select_blocks.default
    tensors, _ = make_problem(packed([3, 5]), HEADS, SIZES, device)
    cu_seqlens = cumulative([3, 5]).to(device)
    selection = (*SIZES, 3, 1, 2, 0)
    borders = (8, None, None, None, cu_seqlens, cu_seqlens)
    torch.library.opcheck(op, (*tensors.values(), *borders, *selection, False, True, 0.25, None, None))
    tensors, _ = make_problem(whole(6, batch=2), Heads(2, 1, 16, 16), SIZES, device)
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    lengths, offsets = row_integers([6, 3]).to(device), row_integers([2, 5]).to(device)
    borders = (6, None, offsets, lengths, None, None)
    counts = torch.arange(12, device=device).reshape(2, 6, 1) - 3
    torch.library.opcheck(op, (*tensors.values(), *borders, *selection, True, False, 0.25, 2.0, counts))


@pytest.mark.plain_memory
def test_it_compiles(device: torch.device) -> None:
    """One graph serves every length, with inputs that require gradients."""
    graphs = CompileCounterWithBackend('aot_eager')

    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    fixed: dict[str, Any] = {**dict(zip(names, SIZES, strict=True)), 'num_selected': 3, 'backend': 'triton'}

    @torch.compile(fullgraph=True, backend=graphs, dynamic=True)
    def compiled(q: Tensor, k_cmp: Tensor, lse: Tensor, seqlen: int) -> tuple[Tensor, Tensor]:
        blocks = select_blocks(q * 1.0, k_cmp, lse, seqlen_k=seqlen, **fixed)
        return blocks, (q * (blocks >= 0).float().sum()).sum()

    for seqlen in (20, 26, 33):
        tensors, settings = make_problem(whole(seqlen), HEADS, SIZES, device)
        expected = choose((tensors, settings), num_selected=3)
        q = tensors['q'].requires_grad_()
        blocks, total = compiled(q, tensors['k_cmp'], tensors['lse'], seqlen)
        total.backward()
        assert not blocks.requires_grad
        assert torch.equal(blocks, expected)
        assert q.grad is not None
        assert torch.equal(q.grad, torch.full_like(q, float((expected >= 0).sum())))
    assert graphs.frame_count == 1


def test_backends_of_a_selection(device: torch.device) -> None:
    q, k_cmp = torch.zeros(1, 4, 130, 4, device=device), torch.zeros(1, 4, 2, 4, device=device)
    with pytest.raises(ValueError, match=r'65 heads select together, but a tile of its kernel holds up to 64'):
        backend_of('select_blocks', q, k_cmp, group_size=65, backend='triton')
    with pytest.raises(ValueError, match=r'num_selected is 513, but its kernel keeps up to 512 blocks of a row'):
        backend_of('select_blocks', q, k_cmp, num_selected=513, backend='triton')
    with pytest.raises(ValueError, match=r'q has dtype torch.float64, but its kernels compute in float32'):
        backend_of('select_blocks', q.double(), k_cmp, backend='triton')
    many = q[:, :1].expand(1, 2**24, 130, 4)
    with pytest.raises(ValueError, match=r'are selected per KV head, but its kernels count up to'):
        backend_of('chosen_scores', many, k_cmp, num_selected=1, backend='triton')
    for op in ('select_blocks', 'chosen_scores'):
        assert backend_of(op, q, k_cmp, backend='triton').name == 'triton'
        auto = backend_of(op, q, k_cmp)
        assert auto.name == ('triton' if device.type == 'cuda' else 'eager')
    problem = make_counts(whole(8), Heads(65, 1, 4, 4), SIZES, device)
    with pytest.raises(ValueError, match=r'65 heads select together'):
        choose(problem, num_selected=2)
    assert choose(problem, num_selected=0, share_group=False).shape == (1, 8, 65, 0)
