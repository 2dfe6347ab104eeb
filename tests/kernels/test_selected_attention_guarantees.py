"""Guarantees of selected attention in Triton: unchanged bits, memory bounds, the registered op, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.call import Call
from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton.inverse_index import InverseIndex, make_inverse_index
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.selected_attention.api import MAX_SELECTED, backend_of
from native_sparse_attention.ops.selected_attention.triton import op
from native_sparse_attention.ops.selected_attention.triton.by_block import backward as by_block_backward
from native_sparse_attention.ops.selected_attention.triton.by_block import forward as by_block
from native_sparse_attention.ops.selected_attention.triton.by_block import partials
from native_sparse_attention.ops.selected_attention.triton.dkv import launch as dkv
from native_sparse_attention.ops.selected_attention.triton.index import block_to_query
from native_sparse_attention.testing import make_block_indices, outputs_and_gradients
from tests.support import problems
from tests.support.harness import assert_same_bits, far_apart, make_grads, make_sequences, place, run_triton
from tests.support.problems import Extents, packed, row_integers, whole
from tests.support.selected_attention_problems import (
    HEADS,
    INT32,
    TWO_GROUPS,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
    per_block,
    per_tile,
)


@per_tile
def test_double_backward_is_refused(device: torch.device) -> None:
    tensors = make_inputs(whole(2), HEADS, device, torch.zeros(1, 2, 1, 1, dtype=torch.int32))
    q = tensors['q'].detach().requires_grad_()
    out, _ = selected_attention(q, *(tensors[n] for n in ('k', 'v', 'block_indices')), block_size=2, backend='triton')
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r'has no second derivative: use backend="eager"'):
        grad.sum().backward()


def test_unread_keys_change_nothing(device: torch.device) -> None:
    """Unread are blocks that no query selected, later keys inside the own block, and factors of unread blocks."""
    extents = Extents(1, 3, 40, {'q_offset': 16}, [40])
    settings: dict[str, Any] = {'block_size': 8, 'q_offset': 16}
    indices = torch.tensor([2, 0, 2, 4, -1, INT32.min, INT32.max, 0], dtype=torch.int32).expand(1, 3, 1, 8)
    tensors, grads = make_inputs(extents, HEADS, device, indices, scaled=True), make_grads(extents, HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    read = torch.zeros(40, dtype=torch.bool, device=device)
    read[:8] = read[16:19] = True
    for junk in (torch.nan, torch.inf):
        spoiled = {name: t.clone() for name, t in tensors.items()}
        for name in 'kv':
            spoiled[name][:, ~read] = junk
        spoiled['block_scale'][..., 2:] = junk
        assert_same_bits(run_triton(selected_attention, spoiled, grads, **settings), expected)
    assert (expected['grad of k'][:, ~read] == 0).all()
    assert (expected['grad of v'][:, ~read] == 0).all()
    assert (expected['grad of k'][:, read] != 0).any(-1).all()
    assert (expected['grad of block_scale'][..., 2:] == 0).all()
    assert (expected['grad of block_scale'][..., :2] != 0).all()


def test_the_gradient_of_a_log_sum_exp_of_nothing(device: torch.device) -> None:
    """The gradient is NaN, as from logaddexp of two such rows, beside queries of the same tile that read keys."""
    indices = torch.tensor([[0], [-1]], dtype=torch.int32).repeat(4, 1).view(1, 8, 1, 1)
    tensors, grads = make_inputs(whole(8), HEADS, device, indices, scaled=True), make_grads(whole(8), HEADS, device)
    grads[1][:, :, 1::2] = torch.nan
    result = run_triton(selected_attention, tensors, grads, block_size=4)
    assert all(t.isfinite().all() for name, t in result.items() if name != 'out1')
    assert (result['grad of q'][:, 1::2] == 0).all()


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_factors_of_the_future_change_nothing(junk: float, device: torch.device) -> None:
    """The factors are those of a block that a later query of the same tile reads."""
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 8, 1, 2)
    tensors, grads = make_inputs(whole(8), HEADS, device, indices, scaled=True), make_grads(whole(8), HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, block_size=4)
    tensors['block_scale'] = tensors['block_scale'].clone()
    tensors['block_scale'][:, :4, :, 1] = junk
    assert_same_bits(run_triton(selected_attention, tensors, grads, block_size=4), expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_full_blocks_of_other_queries_change_nothing(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    """Every other query of a tile reads a block with non-finite values."""
    extents, sequences = Extents(1, 14, 48, {'q_offset': 33}, [48]), {'block_size': 16, 'q_offset': 33}
    indices = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).repeat(7, 1).view(1, 14, 1, 2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=dtype), make_grads(extents, HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **sequences)
    for name in 'kv':
        spoiled = tensors | {name: tensors[name].clone()}
        spoiled[name][:, 20] = junk
        result = run_triton(selected_attention, spoiled, grads, **sequences)
        for output in ('out0', 'grad of q'):
            assert torch.equal(result[output][:, ::2], expected[output][:, ::2]), output
            assert not result[output][:, 1::2].isfinite().all(-1).any(), output
        for output in ('grad of k', 'grad of v'):
            assert torch.equal(result[output][:, :16], expected[output][:, :16]), output


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('names', ['q', 'k', 'v'])
def test_non_finite_keys_reach_their_readers_only(names: str, dtype: torch.dtype, device: torch.device) -> None:
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 8, 2, 2).clone()
    indices[:, 6:, 0, 0] = -1
    tensors, grads = (
        make_inputs(whole(8), TWO_GROUPS, device, indices, dtype=dtype),
        make_grads(whole(8), TWO_GROUPS, device),
    )
    expected = run_triton(selected_attention, tensors, grads, block_size=4)
    spoiled = {name: t.clone() for name, t in tensors.items()}
    for name in names:
        spoiled[name][:, 2, 0] = torch.nan
    result = run_triton(selected_attention, spoiled, grads, block_size=4)
    reads = torch.zeros(8, 4, dtype=torch.bool, device=device)
    if names == 'q':
        reads[2, 0] = True
    else:
        reads[2:6, :2] = True
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, ~reads], expected[name][:, ~reads]), name
        assert result[name][:, reads].isnan().any(-1).all(), name
    if names == 'v':
        assert torch.equal(result['out1'], expected['out1'])
    if names == 'q':
        read = torch.zeros(8, 2, dtype=torch.bool, device=device)
        read[:3, 0] = True
        for name in ('grad of k', 'grad of v'):
            assert torch.equal(result[name][:, ~read], expected[name][:, ~read])
            assert result[name][:, read].isnan().any(-1).all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_a_negative_scale_is_that_of_negative_queries(dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 9, 48, {'q_offset': 39}, [48])
    indices = torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32).repeat(3, 1).view(1, 9, 1, 2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=dtype), make_grads(extents, HEADS, device)
    expected = run_triton(
        selected_attention, tensors | {'q': -tensors['q']}, grads, block_size=16, q_offset=39, scale=0.3
    )
    result = run_triton(selected_attention, tensors, grads, block_size=16, q_offset=39, scale=-0.3)
    assert_same_bits(result | {'grad of q': -result['grad of q']}, expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_queries_that_read_nothing_may_be_anything(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    """Queries of the same tile that read full blocks keep their bits."""
    extents, sequences = Extents(1, 9, 48, {'q_offset': 39}, [48]), {'block_size': 16, 'q_offset': 39}
    indices = torch.tensor([[0, 2], [1, 2], [-1, 3]], dtype=torch.int32).repeat(3, 1).view(1, 9, 1, 2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=dtype), make_grads(extents, HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **sequences)
    for where in ('q', 'dout'):
        spoiled, spoiled_grads = tensors | {'q': tensors['q'].clone()}, [grad.clone() for grad in grads]
        (spoiled['q'] if where == 'q' else spoiled_grads[0])[:, 2::3] = junk
        assert_same_bits(run_triton(selected_attention, spoiled, spoiled_grads, **sequences), expected)


def test_overflowing_products_stay_with_their_readers(device: torch.device) -> None:
    """The second query of a tile reads keys whose product with the first query overflows."""
    extents, sequences = Extents(1, 2, 48, {'q_offset': 46}, [48]), {'block_size': 16, 'q_offset': 46, 'scale': 1e-20}
    indices = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).view(1, 2, 1, 2)
    dtype = torch.float32 if is_interpreted() else torch.bfloat16
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=dtype), make_grads(extents, HEADS, device)
    tensors['q'] = tensors['q'] * 1e20
    expected = run_triton(selected_attention, tensors, grads, **sequences)
    tensors['k'] = tensors['k'].clone()
    tensors['k'][:, 16:32] *= 1e30
    result = run_triton(selected_attention, tensors, grads, **sequences)
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, 0], expected[name][:, 0]), name


@pytest.mark.quick
def test_the_future_changes_nothing(device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 12, 1, 3, seqlen_k=12, block_size=4)
    tensors, grads = make_inputs(whole(12), HEADS, device, indices), make_grads(whole(12), HEADS, device)
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in 'qkv':
        changed[name][:, 6:] = torch.nan
    grads[0][:, 6:] = 0
    grads[1][..., 6:] = 0
    expected, result = (run_triton(selected_attention, t, grads, block_size=4) for t in (tensors, changed))
    for name in ('out0', 'grad of q'):
        assert torch.equal(result[name][:, :6], expected[name][:, :6])
    assert torch.equal(result['out1'][..., :6], expected['out1'][..., :6])


@per_block
@pytest.mark.parametrize('size', [1e4, 1e30])
def test_the_size_of_the_future_changes_nothing(
    size: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of float16 partial results, which bfloat16 inputs use, do not depend on later keys."""
    monkeypatch.setattr(partials, 'partial_dtype', lambda _: torch.float16)
    indices = make_block_indices('valid', 1, 12, 1, 3, seqlen_k=12, block_size=4)
    tensors, grads = make_inputs(whole(12), HEADS, device, indices), make_grads(whole(12), HEADS, device)
    grads[0][:, 7:] = 0
    grads[1][..., 7:] = 0
    expected = run_triton(selected_attention, tensors, grads, block_size=4)
    for name in 'kv':
        changed = tensors | {name: tensors[name].clone()}
        changed[name][:, 7] = size
        result = run_triton(selected_attention, changed, grads, block_size=4)
        for output in ('out0', 'grad of q'):
            assert torch.equal(result[output][:, :7], expected[output][:, :7]), (name, output)
        assert torch.equal(result['out1'][..., :7], expected['out1'][..., :7]), name


@per_block
@pytest.mark.parametrize('keys_are', ['0', 'not numbers'])
def test_nan_inputs_give_nan_gradients_by_block(
    keys_are: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of float16 partial results are the smallest possible there."""
    monkeypatch.setattr(partials, 'partial_dtype', lambda _: torch.float16)
    indices = make_block_indices('valid', 1, 12, 1, 3, seqlen_k=12, block_size=4)
    tensors, grads = make_inputs(whole(12), HEADS, device, indices), make_grads(whole(12), HEADS, device)
    grads[1].zero_()
    tensors['k'] = torch.full_like(tensors['k'], torch.nan if keys_are == 'not numbers' else 0.0)
    if keys_are == '0':
        tensors['q'] = tensors['q'].clone()
        tensors['q'][:, 9] = torch.nan
    result = run_triton(selected_attention, tensors, grads, block_size=4)['grad of q']
    assert result[:, 9].isnan().all()
    assert result.isnan().all() or keys_are == '0'


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dkv, 'CHUNK_ROWS', {4: 8})
    extents = Extents(3, 5, 14, {'seqlens_k': row_integers([14, 3, 9])}, [14, 3, 9])
    indices = make_indices(extents, 1, 3, 4)
    tensors, grads = make_inputs(extents, HEADS, device, indices, scaled=True), make_grads(extents, HEADS, device)
    lengths = extents.where['seqlens_k'].to(device)
    together = run_triton(selected_attention, tensors, grads, block_size=4, seqlens_k=lengths)
    for row in range(3):
        own = slice(row, row + 1)
        own_tensors = {name: t[own] for name, t in tensors.items()}
        own_grads = [grad[own] for grad in grads]
        alone = run_triton(selected_attention, own_tensors, own_grads, block_size=4, seqlens_k=lengths[own])
        assert_same_bits({name: t[own] for name, t in together.items()}, alone)


@pytest.mark.quick
def test_packed_is_alone(device: torch.device) -> None:
    lengths = [7, 0, 5]
    extents = packed(lengths, uncovered=2)
    tensors = make_inputs(extents, HEADS, device, make_indices(extents, 1, 3, 3), scaled=True)
    tensors['q'][:, 12:] = torch.nan
    grads = make_grads(extents, HEADS, device)
    together = run_triton(selected_attention, tensors, grads, block_size=3, **place(extents.where, device))
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        own = {name: t[:, start:stop] for name, t in tensors.items()}
        own_grads = [grads[0][:, start:stop], grads[1][..., start:stop]]
        alone = run_triton(selected_attention, own, own_grads, block_size=3)
        assert_same_bits(
            {n: t[..., start:stop] if n == 'out1' else t[:, start:stop] for n, t in together.items()}, alone
        )
    for name, t in together.items():
        rest = t[..., 12:] if name == 'out1' else t[:, 12:]
        assert rest.eq(-torch.inf if name == 'out1' else 0).all(), name


def test_the_same_bits_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dkv, 'CHUNK_ROWS', {4: 8})
    extents = packed([8, 4], uncovered=1)
    tensors = make_inputs(extents, HEADS, device, make_indices(extents, 1, 4, 3), scaled=True)
    grads = make_grads(extents, HEADS, device)
    settings: dict[str, Any] = {'block_size': 3, **place(extents.where, device)}
    assert_same_bits(*(run_triton(selected_attention, tensors, grads, **settings) for _ in range(2)))


@per_tile
def test_unsupported_calls(device: torch.device) -> None:
    q, k, v = problems.make_qkv(whole(2), HEADS)
    q, k, v = (t.float().to(device) for t in (q, k, v))
    assert backend_of(q, k, v, num_selected=MAX_SELECTED, backend='triton').name == 'triton'
    with pytest.raises(ValueError, match=r'selects 1025 blocks, but its kernels hold rows of up to 1024'):
        backend_of(q, k, v, num_selected=MAX_SELECTED + 1, backend='triton')
    many = q[:, :1].expand(1, 2**24, 2, 16)
    with pytest.raises(ValueError, match=r'are selected per KV head, but its kernels count up to'):
        backend_of(many, k, v, num_selected=64, backend='triton')
    with pytest.raises(ValueError, match=r'q has dtype torch.float64'):
        backend_of(q.double(), k.double(), v.double(), backend='triton')


@per_block
def test_the_backward_reuses_the_index_of_the_forward(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all tokens are processed at once, in any groups of heads, with the bits of an index of its own."""
    made = []

    def make(*args: Any, **settings: Any) -> InverseIndex:
        made.append(make_inverse_index(*args, **settings))
        return made[-1]

    monkeypatch.setattr(block_to_query, 'make_inverse_index', make)
    indices = make_indices(whole(12), 2, 3, 2)
    tensors = make_inputs(whole(12), TWO_GROUPS, device, indices, scaled=True)
    grads = make_grads(whole(12), TWO_GROUPS, device)
    kept = run_triton(selected_attention, tensors, grads, block_size=2)
    assert len(made) == 1
    with monkeypatch.context() as patch:
        for module in (by_block, by_block_backward):  # room for the parts of one kv head
            room = 12 * 3 * 2 * (4 * TWO_GROUPS.head_dim + 20) + 2 * 4 * 12 * TWO_GROUPS.heads
            patch.setattr(module, 'WORKSPACE', room)
        assert_same_bits(run_triton(selected_attention, tensors, grads, block_size=2), kept)
    assert len(made) == 2
    forward = op._forward
    with monkeypatch.context() as patch:
        patch.setattr(op, '_forward', lambda *args: forward(*args[:-2], False, args[-1]))
        assert_same_bits(run_triton(selected_attention, tensors, grads, block_size=2), kept)
    assert len(made) == 4
    monkeypatch.setattr(by_block, 'WORKSPACE', 1)
    apart = run_triton(selected_attention, tensors, grads, block_size=2)
    assert len(made) > 6
    assert_same_bits({'out0': apart['out0']}, {'out0': kept['out0']})


@pytest.mark.parametrize('softcap', [None, 2.0])
def test_factors_known_to_be_1(softcap: float | None, device: torch.device) -> None:
    """Factors of 1 that are not loaded have the gradient of loaded factors, and results have the same bits."""
    tensors = make_inputs(whole(12), TWO_GROUPS, device, make_indices(whole(12), 2, 3, 4))
    tensors['block_scale'] = torch.ones(tensors['block_indices'].shape, device=device)
    grads = make_grads(whole(12), TWO_GROUPS, device)

    def attend(unit_scale: bool) -> dict[str, Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
            call = Call(make_sequences(whole(12), device), True, 0.25, softcap)
            return op.selected_attention(q, k, v, block_indices, block_scale, 4, call, unit_scale=unit_scale)

        return outputs_and_gradients(run, tensors, grads)

    assert_same_bits(attend(True), attend(False))


@pytest.mark.plain_memory
def test_opcheck(device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 2, 2, 2, seqlen_k=2, block_size=1)
    tensors = make_inputs(whole(2), TWO_GROUPS, device, indices, scaled=True)
    q, k, v, factors = (tensors[name].detach().requires_grad_() for name in ('q', 'k', 'v', 'block_scale'))
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    for borders, softcap in ((None, None), (cu_seqlens, 3.0)):
        flat = (2, None, None, None, borders, borders)
        options = (1, True, 0.25, softcap, True, None, False, False)
        inputs = (q, k, v, tensors['block_indices'], factors, None, *flat, *options)
        torch.library.opcheck(op._forward, inputs)
        detached = [t.detach() if isinstance(t, Tensor) else t for t in inputs]
        out, *others = op._forward(*detached)
        arguments = (torch.ones_like(out), None, out, *others, *detached, True, True)
        torch.library.opcheck(op._backward, arguments, test_utils=('test_schema', 'test_faketensor'))


@pytest.mark.skipif(not is_interpreted(), reason='gigabytes of memory that nothing touches')
@pytest.mark.parametrize('name', ['q', 'k', 'v', 'dout', 'block_indices', 'block_scale'])
@pytest.mark.parametrize('dim', [1, 2])
def test_offsets_beyond_int32(name: str, dim: int) -> None:
    """Tokens or heads that are 2 ** 31 elements or more apart."""
    device = torch.device('cpu')
    indices = make_block_indices('valid', 1, 3, 2, 2, seqlen_k=3, block_size=2)
    tensors = make_inputs(whole(3), TWO_GROUPS, device, indices, scaled=True, dtype=torch.float16)
    tensors['block_scale'] = tensors['block_scale'].half()
    grads = make_grads(whole(3), TWO_GROUPS, device)
    expected = run_triton(selected_attention, tensors, grads, block_size=2)
    tensors['dout'] = grads[0].half()
    tensors[name] = far_apart(tensors[name], dim)
    grads[0] = tensors.pop('dout')
    assert_same_bits(run_triton(selected_attention, tensors, grads, block_size=2), expected)


JUNK_BORDERS = {
    'decreasing': {'cu_seqlens': row_integers([0, 5, 2, 7])},
    'beyond': {'cu_seqlens': row_integers([0, 3, 500, 2**31 - 1])},
    'negative': {'cu_seqlens': row_integers([-(2**31), -5, 3, 7])},
    'late': {'cu_seqlens': row_integers([5, 6, 7, 7])},
    'other keys': {'cu_seqlens': row_integers([0, 2, 4, 7]), 'cu_seqlens_k': row_integers([0, 100, -7, 90])},
    'lengths': {'seqlens_k': row_integers([2**31 - 1])},
    'negative lengths': {'seqlens_k': row_integers([-(2**31)])},
    'offsets': {'q_offset': row_integers([2**31 - 1])},
    'negative offsets': {'q_offset': torch.tensor([-(2**63)])},
}


@pytest.mark.parametrize('where', JUNK_BORDERS.values(), ids=JUNK_BORDERS)
def test_any_content_of_borders_stays_inside_memory(where: dict[str, Tensor], device: torch.device) -> None:
    """The op is called without the argument checks, which read values of CPU tensors."""
    from native_sparse_attention.core.geometry import Sequences
    from native_sparse_attention.ops.selected_attention.triton import selected_attention as unchecked

    tensors = make_inputs(whole(7), HEADS, device, make_indices(whole(7), 1, 3, 2))
    where = place(where, device)
    cu_seqlens = where.get('cu_seqlens')
    borders = (cu_seqlens, where.get('cu_seqlens_k', cu_seqlens))
    sequences = Sequences(1, 7, 7, device, where.get('q_offset'), where.get('seqlens_k'), *borders)
    call = Call(sequences, True, 0.25)
    outputs_and_gradients(lambda q, k, v, block_indices: unchecked(q, k, v, block_indices, None, 2, call), tensors)
