"""The Triton kernels of `chosen_scores` against eager, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.ops import chosen_scores, compressed_attention, straight_through_scale
from native_sparse_attention.ops.block_selection.triton import scores
from native_sparse_attention.testing import INDEX_KINDS, LAYOUTS, assert_matches, lay_out, make_block_indices
from tests.support.harness import assert_close_to_eager, assert_same_bits, fence, place, run_eager, run_triton
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_block_sizes,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_qkv,
    packed,
    row_integers,
    whole,
)

Sizes = tuple[int, int, int]
Problem = tuple[dict[str, Tensor], dict[str, Any]]
HEADS = Heads(4, 2, 16, 16)
SIZES = (4, 2, 4)


def make_problem(
    extents: Extents,
    device: torch.device,
    *,
    heads: Heads = HEADS,
    sizes: Sizes = SIZES,
    num_selected: int = 3,
    kind: str = 'valid',
    alone: bool = False,
    causal: bool = True,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = 'contiguous',
) -> Problem:
    """Return tensors and settings, with NaN in every compressed key that belongs to no sequence and around every
    tensor.
    """
    where = place(extents.where, device)
    common = {'seqlen_k': extents.seqlen_k, 'causal': causal, 'scale': scale, **where}
    q, _, _ = make_qkv(extents, heads)
    k_cmp, v_cmp = make_compressed(extents, heads, *sizes[:2], more=1)
    q, k_cmp, v_cmp = (lay_out(t.to(device, dtype), layout) for t in (q, k_cmp, v_cmp))
    _, lse = compressed_attention(
        q, k_cmp, v_cmp, block_size=sizes[0], stride=sizes[1], **common, backend='eager'
    )  # fmt: skip
    offset = where.get('q_offset', extents.seqlen_k - extents.seqlen_q)
    block_indices = make_block_indices(
        kind, extents.batch, extents.seqlen_q, heads.heads if alone else heads.kv_heads, num_selected,
        seqlen_k=extents.seqlen_k, block_size=sizes[2], q_offset=offset if isinstance(offset, int) else 0,
        causal=causal, device=device,
    )  # fmt: skip
    tensors = {'q': q, 'k_cmp': k_cmp, 'lse': lse, 'block_indices': block_indices}
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    return {name: fence(t) for name, t in tensors.items()}, {**dict(zip(names, sizes, strict=True)), **common}


def make_grad(tensors: dict[str, Tensor]) -> list[Tensor]:
    block_indices = tensors['block_indices']
    return [torch.randn(block_indices.shape, device=block_indices.device)]


def check(problem: Problem, grads: list[Tensor] | None = None, by_rules: bool = False) -> None:
    """Check the output and every gradient: half types by the error rules, float32 closely, since the errors of so few
    values are too uneven to measure. by_rules: float32 gradients of q and k_cmp by the rules too.
    """
    tensors, settings = problem
    grads = make_grad(tensors) if grads is None else grads
    exact = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    result = run_triton(chosen_scores, tensors, grads, **settings)
    same_dtype = run_eager(chosen_scores, tensors, grads, **settings)
    gold = run_eager(chosen_scores, exact, grads, **settings)
    assert result.keys() == {'out0', 'grad of q', 'grad of k_cmp', 'grad of lse'}
    for name, value in result.items():
        if value.dtype != torch.float32 or (by_rules and name in ('grad of q', 'grad of k_cmp')):
            assert_matches(value, gold[name], same_dtype[name], name=name)
        else:
            torch.testing.assert_close(value.double(), gold[name], rtol=1e-4, atol=2e-6)


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_error_rules(dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 16, 150, {'q_offset': 100}, [150])
    heads = Heads(6, 2, 40, 1)
    problem = make_problem(extents, device, heads=heads, sizes=(8, 4, 16), num_selected=5, dtype=dtype, kind='junk')
    check(problem, by_rules=True)


@pytest.mark.parametrize('kind', INDEX_KINDS)
def test_kinds_of_indices(kind: str, device: torch.device) -> None:
    check(make_problem(whole(11), device, kind=kind))


@pytest.mark.parametrize(
    ('heads', 'alone', 'dtype'),
    [
        (Heads(1, 1, 40, 1), False, torch.float32),
        (Heads(4, 2, 20, 1), False, torch.float16),
        (Heads(6, 2, 33, 1), False, torch.float32),
        (Heads(16, 1, 64, 1), False, torch.float16),
        (Heads(3, 1, 16, 1), True, torch.float32),
        (Heads(4, 2, 16, 1), True, torch.float16),
    ],
)
def test_groups_and_head_sizes(heads: Heads, alone: bool, dtype: torch.dtype, device: torch.device) -> None:
    check(make_problem(whole(9), device, heads=heads, alone=alone, dtype=dtype, kind='duplicates'))


@pytest.mark.parametrize(
    ('sizes', 'causal'),
    [
        ((32, 16, 64), True),
        ((4, 1, 4), False),
        ((6, 2, 8), True),
        ((5, 5, 5), False),
        ((8, 3, 6), True),
        ((1, 1, 1), True),
        ((9, 2, 2), False),
    ],
)
def test_block_sizes(sizes: Sizes, causal: bool, device: torch.device) -> None:
    # The queries are at the end of keys that fill several selection blocks.
    seqlen_k = 3 * max(sizes) + 5
    extents = Extents(1, 5, seqlen_k, {'q_offset': seqlen_k - 5}, [seqlen_k])
    check(make_problem(extents, device, sizes=sizes, causal=causal, num_selected=4))


def test_more_offsets_than_a_tile_has(device: torch.device) -> None:
    extents = Extents(1, 5, 200, {'q_offset': 195}, [200])
    check(make_problem(extents, device, sizes=(20, 1, 90), num_selected=3, kind='unordered'))


def test_more_heads_than_a_tile_has(device: torch.device) -> None:
    check(make_problem(whole(8), device, heads=Heads(70, 1, 16, 1), dtype=torch.float16))


@pytest.mark.parametrize('num_selected', [1, 17])
def test_numbers_of_blocks(num_selected: int, device: torch.device) -> None:
    check(make_problem(whole(9), device, num_selected=num_selected, kind='junk', scale=0.7))


@pytest.mark.quick
@pytest.mark.parametrize(
    ('extents', 'causal'),
    [
        (packed([0, 9, 1, 6, 0], uncovered=2), True),
        (packed([7, 8], uncovered=1), False),
        (
            Extents(
                1, 9, 30, {'cu_seqlens': cumulative([0, 5, 3]), 'cu_seqlens_k': cumulative([5, 14, 9])}, [5, 14, 9]
            ),
            True,
        ),
        (Extents(1, 7, 30, {'q_offset': 11}, [30]), True),
        (Extents(2, 4, 0, {'q_offset': 3}, [0, 0]), False),
        (Extents(2, 5, 30, {'q_offset': row_integers([23, -3])}, [30, 30]), True),
        (Extents(3, 4, 20, {'seqlens_k': row_integers([20, 11, 0])}, [20, 11, 0]), False),
        (Extents(2, 5, 20, {'seqlens_k': row_integers([20, 11]), 'q_offset': row_integers([9, 2])}, [20, 11]), True),
    ],
)
def test_sequence_layouts(extents: Extents, causal: bool, device: torch.device) -> None:
    check(make_problem(extents, device, causal=causal, kind='junk'))


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout: str, device: torch.device) -> None:
    tensors, settings = make_problem(whole(6, batch=2), device, layout=layout, kind='unordered')
    block_indices = tensors['block_indices']
    tensors['block_indices'] = block_indices.transpose(1, 3).contiguous().transpose(1, 3)
    tensors['lse'] = tensors['lse'].transpose(1, 2).contiguous().transpose(1, 2)
    check((tensors, settings), [torch.ones((), device=device).expand(block_indices.shape)])


def test_indices_of_64_bits(device: torch.device) -> None:
    tensors, settings = make_problem(whole(8), device, kind='junk')
    tensors['block_indices'] = tensors['block_indices'].long() * 2**31
    check((tensors, settings))


@settings(max_examples=8)
@given(
    extents=drawn_extents(max_seqlen=10),
    heads=drawn_heads(),
    sizes=drawn_block_sizes(),
    num_selected=st.integers(0, 4),
    kind=st.sampled_from(INDEX_KINDS),
    alone=st.booleans(),
    causal=st.booleans(),
    forced=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 3)),
)
def test_any_call(
    extents: Extents,
    heads: Heads,
    sizes: Sizes,
    num_selected: int,
    kind: str,
    alone: bool,
    causal: bool,
    forced: tuple[int, int] | None,
) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    tensors, settings = make_problem(
        extents, device, heads=heads, sizes=sizes, num_selected=num_selected, kind=kind, alone=alone, causal=causal
    )
    op: Any = chosen_scores
    if forced is not None:
        op, settings = straight_through_scale, settings | dict(zip(('num_init', 'num_local'), forced, strict=True))
    assert_close_to_eager(op, tensors, make_grad(tensors), **settings)


@pytest.mark.quick
@pytest.mark.parametrize('forced', [(0, 0), (1, 0), (0, 1), (1, 2), (3, 9)])
@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('extents', [Extents(2, 7, 40, {'q_offset': 21}, [40, 40]), packed([5, 31])])
def test_straight_through_scale(extents: Extents, causal: bool, forced: tuple[int, int], device: torch.device) -> None:
    """The value is 1, with the gradients of the scores of blocks that are not forced, whatever the
    position in the row.
    """
    tensors, settings = make_problem(extents, device, num_selected=6, causal=causal)
    tensors['block_indices'] = torch.randint_like(tensors['block_indices'], -1, 10)
    grads = make_grad(tensors)
    settings |= dict(zip(('num_init', 'num_local'), forced, strict=True))
    expected = run_eager(straight_through_scale, tensors, grads, **settings)
    result = run_triton(straight_through_scale, tensors, grads, **settings)
    assert (result.pop('out0') == 1).all()
    assert (expected.pop('out0') == 1).all()
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)
    assert expected['grad of k_cmp'].nan_to_num().any() == (forced != (3, 9))


def test_straight_through_scale_below_position_0(device: torch.device) -> None:
    """Positions below 0 are rounded down to an own block that does not exist."""
    extents = Extents(1, 9, 20, {'q_offset': -7}, [20])
    tensors, settings = make_problem(extents, device, num_selected=5, causal=False)
    settings |= {'num_init': 0, 'num_local': 1}
    grads = make_grad(tensors)
    expected = run_eager(straight_through_scale, tensors, grads, **settings)
    for name, value in run_triton(straight_through_scale, tensors, grads, **settings).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.quick
@pytest.mark.parametrize('num_recent', [5, 30, 2**31])
def test_straight_through_scale_before_a_window(num_recent: int, device: torch.device) -> None:
    """Blocks are forced as for an earlier query, also at positions where no block is forced."""
    tensors, settings = make_problem(packed([5, 31]), device, num_selected=6)
    tensors['block_indices'] = torch.randint_like(tensors['block_indices'], -1, 10)
    settings |= {'num_init': 0, 'num_local': 2, 'num_recent': num_recent}
    grads = make_grad(tensors)
    expected = run_eager(straight_through_scale, tensors, grads, **settings)
    for name, value in run_triton(straight_through_scale, tensors, grads, **settings).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize('alone', [False, True])
def test_index_rows_in_many_parts(alone: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (3, 1, 1)
    tensors, settings = make_problem(packed([3, 17]), device, heads=Heads(2, 1, 16, 1), sizes=sizes, alone=alone)
    # Long index rows: blocks that every query selected.
    tensors['block_indices'][..., 0] = 0
    tensors['block_indices'][..., 1] = 1
    grads = make_grad(tensors)
    q, k_cmp, lse, block_indices = tensors.values()
    where = (20, None, None, None, settings['cu_seqlens'], settings['cu_seqlens'])

    def gradient_of_keys() -> Tensor:
        arguments = (*grads, q, k_cmp, lse, block_indices, *where, *sizes, True, 0.25, None, 0, 0, 0, False, True)
        return scores._backward(*arguments)[1]

    expected = run_eager(chosen_scores, tensors, grads, **settings)['grad of k_cmp']
    monkeypatch.setattr(scores, 'CHUNK_ROWS', {4: 8})
    together = gradient_of_keys()
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=2e-6)
    # A workspace for 15 of the 23 block slots, so that two steps are needed.
    monkeypatch.setattr(scores, 'WORKSPACE', 15 * 3 * 16 * 4)
    assert torch.equal(gradient_of_keys(), together)


def test_unselected_keys_are_not_read(device: torch.device) -> None:
    tensors, settings = make_problem(whole(16), device)
    # Compressed blocks 3 ... 6 overlap selection blocks 2 and 3 of four tokens; the future is not read.
    tensors['block_indices'].fill_(2)
    expected = run_eager(chosen_scores, tensors, **settings)
    tensors['k_cmp'][:, :3] = torch.nan
    tensors['k_cmp'][:, 6:] = torch.nan
    result = run_triton(chosen_scores, tensors, **settings)
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_nan_reaches_the_queries_that_read_it(device: torch.device) -> None:
    tensors, settings = make_problem(whole(16), device, num_selected=2)
    tensors['q'][0, 12, 1] = torch.nan
    tensors['k_cmp'][0, 2, 1] = torch.nan
    assert_close_to_eager(chosen_scores, tensors, make_grad(tensors), **settings)


def test_large_logits(device: torch.device) -> None:
    tensors, settings = make_problem(whole(16), device, scale=1.0)
    tensors['q'].mul_(100)
    tensors['k_cmp'].mul_(100)
    _, lse = compressed_attention(
        tensors['q'], tensors['k_cmp'], tensors['k_cmp'], block_size=4, stride=2, scale=1.0, seqlen_k=16,
        backend='eager',
    )  # fmt: skip
    result = run_triton(chosen_scores, tensors | {'lse': lse}, **settings)
    assert all(t[:, :-1].isfinite().all() for t in result.values())
    expected = run_eager(chosen_scores, tensors | {'lse': lse}, **settings)
    torch.testing.assert_close(result['out0'], expected['out0'], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_same_bits_again_and_alone(dtype: torch.dtype, device: torch.device) -> None:
    tensors, settings = make_problem(whole(5, batch=2), device, dtype=dtype, kind='duplicates')
    grads = make_grad(tensors)
    result = run_triton(chosen_scores, tensors, grads, **settings)
    assert_same_bits(run_triton(chosen_scores, tensors, grads, **settings), result)
    alone = run_triton(chosen_scores, {name: t[1:] for name, t in tensors.items()}, [grads[0][1:]], **settings)
    assert_same_bits(alone, {name: t[1:] for name, t in result.items()})


def test_packed_equals_alone(device: torch.device) -> None:
    tensors, settings = make_problem(packed([5, 12]), device)
    result = run_triton(chosen_scores, tensors, **settings)['out0']
    # The first sequence has one compressed block, the second five.
    second = {name: t[:, 5:] for name, t in tensors.items()}
    second |= {'k_cmp': tensors['k_cmp'][:, 1:], 'lse': tensors['lse'][..., 5:]}
    alone = run_triton(chosen_scores, second, **settings | {'cu_seqlens': None, 'seqlen_k': 12})['out0']
    assert_same_bits({'out0': alone}, {'out0': result[:, 5:]})


@pytest.mark.parametrize('needed', [(), ('q',), ('k_cmp',), ('k_cmp', 'lse')])
def test_gradients_of_required_tensors_alone(needed: tuple[str, ...], device: torch.device) -> None:
    tensors, settings = make_problem(whole(8), device)
    grads = make_grad(tensors)
    expected = run_eager(chosen_scores, tensors, grads, **settings)
    leaves = {name: t.detach().requires_grad_(name in needed) for name, t in tensors.items()}
    out = chosen_scores(**leaves, **settings, backend='triton')
    assert out.requires_grad == bool(needed)
    if needed:
        out.backward(grads[0])
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in needed)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected[f'grad of {name}'], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('extents', [whole(0), whole(3), packed([2, 3, 0])])
def test_nothing_to_score(extents: Extents, device: torch.device) -> None:
    tensors, settings = make_problem(extents, device)
    for k_cmp in (tensors['k_cmp'], tensors['k_cmp'][:, :0]):
        assert_close_to_eager(chosen_scores, tensors | {'k_cmp': k_cmp}, **settings)


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    tensors, settings = make_problem(packed([1, 5]), device, heads=Heads(1, 1, 16, 1), num_selected=2)
    q, k_cmp, lse, block_indices = tensors.values()
    where = (6, None, None, None, settings['cu_seqlens'], settings['cu_seqlens'])
    leaves = tuple(t.detach().clone().requires_grad_() for t in (q, k_cmp, lse))
    arguments = (*leaves, block_indices, *where, *SIZES, True, 0.3, None)
    torch.library.opcheck(scores._forward, (*arguments, 0, 0, 0, False))
    torch.library.opcheck(scores._forward, (*arguments, 1, 2, 3, True))
    for needs in ((True, True), (True, False), (False, True)):
        arguments = (
            *make_grad(tensors),
            *(t.detach() for t in leaves),
            block_indices,
            *where,
            *SIZES,
            True,
            0.3,
            None,
            1,
            2,
            0,
            *needs,
        )
        torch.library.opcheck(scores._backward, arguments, test_utils=('test_schema', 'test_faketensor'))


def test_double_backward_is_refused(device: torch.device) -> None:
    tensors, settings = make_problem(whole(6), device)
    q = tensors['q'].detach().requires_grad_()
    out = chosen_scores(**(tensors | {'q': q}), **settings, backend='triton')
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="eager"'):
        grad.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('alone', [False, True])
def test_error_rules_on_a_gpu(alone: bool, dtype: torch.dtype, device: torch.device) -> None:
    for head_dim in (64, 128, 192):
        heads = Heads(8, 2, head_dim, 1)
        problem = make_problem(
            whole(700), device, heads=heads, sizes=(32, 16, 64), num_selected=6, alone=alone, dtype=dtype
        )
        check(problem, by_rules=True)
