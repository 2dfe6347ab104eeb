"""Gradient of the gate inside selected attention, in every design, against eager, which gates the output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton import inverse_index
from native_sparse_attention.ops.selected_attention.triton.by_block import backward as by_block_backward
from native_sparse_attention.ops.selected_attention.triton.dkv import launch as dkv
from native_sparse_attention.testing import make_block_indices
from tests.support.gate_problems import KINDS, assert_rules, every_dtype, every_kind, make_gate, multiplied
from tests.support.harness import Tensors, assert_close_to_eager, make_grads, place, run_triton, same_bits
from tests.support.problems import Extents, Heads, packed, row_integers, whole
from tests.support.selected_attention_problems import (
    HEADS,
    TWO_GROUPS,
    force_dlogits,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
    per_tile,
)

BLOCK_SIZE = 4
# Group sizes of 1, 4 and 16.
GROUPS = [Heads(2, 2, 16, 16), Heads(4, 1, 16, 24), Heads(16, 1, 16, 16)]


def make_problem(
    extents: Extents, heads: Heads, device: torch.device, kind: str = 'any', dtype: torch.dtype = torch.float32
) -> Tensors:
    """Return blocks of every kind, with invalid indices among them."""
    tensors = make_inputs(extents, heads, device, make_indices(extents, heads.kv_heads, 3, BLOCK_SIZE), dtype=dtype)
    return tensors | {'gate': make_gate(tensors['q'], kind)}


def assert_close(tensors: Tensors, extents: Extents, heads: Heads, device: torch.device, **settings: Any) -> None:
    settings = {'block_size': BLOCK_SIZE, **place(extents.where, device)} | settings
    assert_close_to_eager(multiplied(selected_attention), tensors, make_grads(extents, heads, device), **settings)


@pytest.mark.quick
@every_dtype
@every_kind
@pytest.mark.parametrize('heads', GROUPS, ids=str)
def test_groups(heads: Heads, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_close(make_problem(whole(9), heads, device, kind, dtype), whole(9), heads, device)


PLACES = {
    'packed': packed([0, 6, 1, 5], uncovered=2),
    'lengths, row offsets': Extents(
        2, 5, 20, {'seqlens_k': row_integers([13, 0]), 'q_offset': row_integers([-2, 3])}, [13, 0]
    ),
}


@every_dtype
@pytest.mark.parametrize('settings', [{}, {'causal': False}, {'softcap': 1.5}], ids=str)
@pytest.mark.parametrize('extents', PLACES.values(), ids=PLACES)
def test_extents(extents: Extents, settings: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Some queries read nothing."""
    assert_close(make_problem(extents, TWO_GROUPS, device, dtype=dtype), extents, TWO_GROUPS, device, **settings)


@every_dtype
def test_heads_that_select_alone(dtype: torch.dtype, device: torch.device) -> None:
    extents = whole(7)
    tensors = make_inputs(extents, TWO_GROUPS, device, make_indices(extents, 4, 3, BLOCK_SIZE), dtype=dtype)
    tensors['gate'] = make_gate(tensors['q'])
    assert_close(tensors, extents, TWO_GROUPS, device)


@every_dtype
@pytest.mark.parametrize('extents', [whole(7, batch=2), packed([4, 0, 5], uncovered=1)], ids=['whole', 'packed'])
def test_chunks_and_ranges(
    extents: Extents, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, groups of pairs and ranges of tokens, whose sums are added up."""
    tensors = make_problem(extents, TWO_GROUPS, device, dtype=dtype)
    tensors['block_indices'][..., 0] = 0
    monkeypatch.setattr(dkv, 'CHUNK_ROWS', {2: 6, 4: 6})
    monkeypatch.setattr(inverse_index, 'MAX_ENTRIES', 40)
    monkeypatch.setattr(by_block_backward, 'WORKSPACE', 4 * 3 * 2 * (4 * TWO_GROUPS.head_dim + 16))
    assert_close(tensors, extents, TWO_GROUPS, device)


@every_dtype
@pytest.mark.parametrize('kind', KINDS[1:])
def test_the_error_rules(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    extents = Extents(1, 5, 30, {'q_offset': 17}, [30])
    indices = make_block_indices('duplicates', 1, 5, 2, 3, seqlen_k=30, block_size=7, q_offset=17)
    tensors = make_inputs(extents, Heads(16, 2, 32, 24), device, indices, dtype=dtype)
    tensors['gate'] = make_gate(tensors['q'], kind)
    assert_rules(selected_attention, tensors, block_size=7, q_offset=17)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Store gradients of logits for any number of tokens. Returns the lengths of the ranges of tokens of dq."""
    return force_dlogits(monkeypatch)


@pytest.mark.quick
@per_tile
@every_kind
@pytest.mark.parametrize('settings', [{}, {'causal': False, 'softcap': 2.0}], ids=str)
@pytest.mark.parametrize('extents', [whole(21, batch=2), packed([5, 0, 21, 14], 3)], ids=['whole', 'packed'])
def test_stored_dlogits(
    extents: Extents, settings: dict[str, Any], kind: str, device: torch.device, passed: list[int]
) -> None:
    heads = Heads(32, 2, 16, 16)
    indices = make_indices(extents, 2, 3, 16)
    tensors = make_inputs(extents, heads, device, indices, dtype=torch.float16)
    tensors['gate'] = make_gate(tensors['q'], kind)
    assert_close(tensors, extents, heads, device, block_size=16, **settings)
    assert passed


@per_tile
@pytest.mark.parametrize('kind', KINDS[1:])
def test_the_error_rules_with_stored_dlogits(kind: str, device: torch.device, passed: list[int]) -> None:
    indices = make_block_indices('valid', 1, 40, 2, 3, seqlen_k=70, block_size=16, q_offset=30)
    extents = Extents(1, 40, 70, {}, [70])
    tensors = make_inputs(extents, Heads(32, 2, 32, 24), device, indices, dtype=torch.float16)
    tensors['gate'] = make_gate(tensors['q'], kind)
    for mean in (0, 4):
        tensors['v'] = tensors['v'] + mean
        assert_rules(selected_attention, tensors, block_size=16)
    assert passed


@every_dtype
def test_the_forward_has_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    tensors = make_problem(whole(8), TWO_GROUPS, device, dtype=dtype)
    gate = tensors['gate']
    leaves: dict[str, Any] = {name: t.requires_grad_() for name, t in tensors.items() if name in 'qkv'}
    leaves |= {'block_indices': tensors['block_indices'], 'block_size': BLOCK_SIZE}
    results = [selected_attention(**leaves, gate=given, backend='triton') for given in (None, gate)]
    for plain, gated in zip(*results, strict=True):
        assert same_bits(plain, gated)
    assert [t.requires_grad for result in results for t in result] == [True, True, True, False]


@every_dtype
@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_a_gate_that_is_not_finite(junk: float, dtype: torch.dtype, device: torch.device) -> None:
    """A non-finite gate affects its own query and the keys that this query reads, nothing else."""
    indices = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).repeat(6, 1).view(1, 12, 1, 2)
    tensors = make_inputs(whole(12), HEADS, device, indices, dtype=dtype)
    tensors['gate'] = make_gate(tensors['q'])
    tensors['gate'][:, 9] = junk
    grads = make_grads(whole(12), HEADS, device)
    result = run_triton(multiplied(selected_attention), tensors, grads, block_size=BLOCK_SIZE)
    for name, reached in (('grad of q', [9]), ('grad of k', [4, 5, 6, 7, 8, 9])):
        finite = result[name][0].isfinite().flatten(1).all(1)
        assert (~finite).nonzero().flatten().tolist() == reached, name
    assert result['grad of gate'].isfinite().all()


@every_dtype
def test_gates_of_queries_that_read_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """Gates of queries without keys may have any value."""
    tensors = make_problem(whole(12), HEADS, device, dtype=dtype)
    tensors['block_indices'][:, [2, 9]] = -1
    tensors['gate'][:, [2, 9]] = torch.nan
    grads = make_grads(whole(12), HEADS, device)
    result = run_triton(multiplied(selected_attention), tensors, grads, block_size=BLOCK_SIZE)
    assert all(t.isfinite().all() for name, t in result.items() if name.startswith('grad'))
    assert result['grad of q'][:, [2, 9]].eq(0).all()


@per_tile
@pytest.mark.parametrize('value', [-0.7, torch.nan])
def test_other_gates_change_no_bit(value: float, device: torch.device, passed: list[int]) -> None:
    """Gradients of other queries keep their bits where gradients of logits are stored."""
    extents, heads = whole(40), Heads(16, 1, 16, 16)
    tensors = make_inputs(extents, heads, device, make_indices(extents, 1, 3, 16), dtype=torch.float16)
    tensors['gate'] = make_gate(tensors['q'], 'above 0')
    changed = tensors | {'gate': tensors['gate'].clone()}
    changed['gate'][:, 39] = value
    grads, attend = make_grads(extents, heads, device), multiplied(selected_attention)
    expected, result = (run_triton(attend, t, grads, block_size=16) for t in (tensors, changed))
    assert passed
    for name in ('grad of q', 'grad of gate'):
        assert same_bits(result[name][:, :39], expected[name][:, :39]), name


@pytest.mark.parametrize('num_selected', [0, 2])
def test_no_block_is_selected(num_selected: int, device: torch.device) -> None:
    indices = torch.full((1, 5, 2, num_selected), -1, dtype=torch.int32)
    tensors = make_inputs(whole(5), TWO_GROUPS, device, indices)
    tensors['gate'] = make_gate(tensors['q'])
    result = run_triton(multiplied(selected_attention), tensors, make_grads(whole(5), TWO_GROUPS, device), block_size=4)
    assert result['out1'].eq(-torch.inf).all()
    assert all(t.eq(0).all() for name, t in result.items() if name != 'out1')


@pytest.mark.parametrize('gate_dtype', [torch.float16, torch.bfloat16])
def test_dtypes_and_strides_of_gates(gate_dtype: torch.dtype, device: torch.device) -> None:
    """A slice of the gates of all branches gives the bits of a contiguous gate, and its gradient is rounded once."""
    tensors = make_problem(whole(8), TWO_GROUPS, device, dtype=torch.float16)
    grads, attend = make_grads(whole(8), TWO_GROUPS, device), multiplied(selected_attention)
    gates = tensors['gate'].to(gate_dtype)[..., None].repeat(1, 1, 1, 3)
    gates[..., ::2] = torch.nan
    results = [
        run_triton(attend, {**tensors, 'gate': gate}, grads, block_size=BLOCK_SIZE)
        for gate in (gates[..., 1].float(), gates[..., 1])
    ]
    results[0]['grad of gate'] = results[0]['grad of gate'].to(gate_dtype)
    for name, t in results[0].items():
        assert same_bits(results[1][name], t), name
