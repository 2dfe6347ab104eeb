"""Soft caps, counts of blocks and segments of selected attention in Triton, in every design."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops.selected_attention.triton.by_block import partials
from native_sparse_attention.testing import assert_attention_matches, make_block_indices
from tests.support.harness import (
    assert_close_to_eager,
    assert_same_bits,
    assert_slopes_at_the_cap,
    make_grads,
    place,
    run_eager,
    run_triton,
)
from tests.support.problems import Extents, Heads, packed, whole
from tests.support.selected_attention_problems import (
    HEADS,
    TWO_GROUPS,
    Tensors,
    kernels,  # noqa: F401, every test takes it
    make_indices,
    make_inputs,
    per_block,
    per_tile,
)


@pytest.mark.quick
@pytest.mark.parametrize(
    ('dtype', 'scaled', 'softcap'),
    [
        (torch.float32, True, 0.7),
        (torch.float32, False, 3.0),
        (torch.float16, True, 3.0),
        (torch.float16, False, 0.7),
    ],
)
def test_rules(dtype: torch.dtype, scaled: bool, softcap: float, device: torch.device) -> None:
    """Outputs and gradients, with logits far on both sides of the cap."""
    extents = Extents(1, 5, 30, {'q_offset': 17}, [30])
    indices = make_block_indices('duplicates', 1, 5, 2, 3, seqlen_k=30, block_size=7, q_offset=17)
    tensors = make_inputs(extents, Heads(16, 2, 32, 24), device, indices, scaled=scaled, dtype=dtype)
    settings: dict[str, Any] = {'block_size': 7, 'q_offset': 17, 'softcap': softcap}
    assert_attention_matches(selected_attention, tensors, 'triton', **settings)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize(('scaled', 'scale'), [(True, -0.9), (False, None)])
def test_whole_blocks(scaled: bool, scale: float | None, causal: bool, device: torch.device) -> None:
    """Masked and unmasked loops over blocks of one tile and more, also with a negative scale."""
    extents, heads = whole(43), Heads(2, 1, 16, 16)
    indices = make_indices(extents, 1, 3, 16)
    tensors = make_inputs(extents, heads, device, indices, scaled=scaled, dtype=torch.float16)
    settings: dict[str, Any] = {'block_size': 16, 'softcap': 1.5, 'scale': scale, 'causal': causal}
    assert_close_to_eager(selected_attention, tensors, make_grads(extents, heads, device), **settings)


def test_values_and_keys_with_a_mean(device: torch.device) -> None:
    """Outputs with a mean are rounded coarsely; the correction of dq must include the slope of the soft cap."""
    extents, heads = whole(32), Heads(8, 1, 32, 32)
    indices = make_block_indices('valid', 1, 32, 1, 2, seqlen_k=32, block_size=16)
    tensors = make_inputs(extents, heads, device, indices, dtype=torch.float16)
    tensors |= {'v': tensors['v'] + 30, 'k': tensors['k'] + 1}
    assert_attention_matches(selected_attention, tensors, 'triton', block_size=16, softcap=0.5)


@pytest.mark.parametrize(('index_heads', 'counts'), [(2, 2), (4, 'tensor')])
def test_packed_with_repeats_and_counts(index_heads: int, counts: Any, device: torch.device) -> None:
    """The heads of a group select together, or each selects alone."""
    extents = packed([0, 7, 1, 9, 0], uncovered=2)
    indices = make_indices(extents, index_heads, 4, 3)
    if counts == 'tensor':
        counts = torch.randint(-1, 6, indices.shape[:3], dtype=torch.int32)
    tensors = make_inputs(extents, TWO_GROUPS, device, indices, scaled=True)
    settings: dict[str, Any] = {'softcap': 0.8, **place(extents.where | {'block_counts': counts}, device)}
    assert_close_to_eager(
        selected_attention, tensors, make_grads(extents, TWO_GROUPS, device), block_size=3, **settings
    )  # fmt: skip


@pytest.mark.parametrize(
    ('sign', 'softcap', 'dtype'), [(1, 30.0, torch.float16), (-1, 30.0, torch.float32), (1, 1e5, torch.float32)]
)
def test_large_logits(sign: int, softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    """Logits of +-6e4: at the cap they are equal; below it the largest has all the weight."""
    indices = make_block_indices('valid', 1, 10, 1, 2, seqlen_k=10, block_size=4)
    tensors = make_inputs(whole(10), HEADS, device, indices)
    for name in 'qk':
        tensors[name] = tensors[name].abs() / tensors[name].norm(dim=-1, keepdim=True) * 6e4**0.5
    tensors['q'] = sign * tensors['q']
    tensors |= {name: tensors[name].to(dtype) for name in 'qkv'}
    grads = make_grads(whole(10), HEADS, device)
    settings: dict[str, Any] = {'block_size': 4, 'scale': 1.0, 'softcap': softcap}
    result = run_triton(selected_attention, tensors, grads, **settings)
    assert all(t.isfinite().all() for t in result.values())
    if softcap == 30:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        gold = run_eager(selected_attention, wide, grads, **settings)
        assert gold['out1'].abs().max() < 33
        for name in ('out0', 'out1', 'grad of v'):
            torch.testing.assert_close(result[name].double(), gold[name], rtol=2e-3, atol=2e-3)
    else:
        assert result['out1'].abs().max() > 3e4


@pytest.mark.parametrize('scaled', [True, False])
def test_logits_at_the_cap(scaled: bool, device: torch.device) -> None:
    indices = make_block_indices('valid', 1, 20, 1, 3, seqlen_k=20, block_size=4)
    tensors, grads = make_inputs(whole(20), HEADS, device, indices), make_grads(whole(20), HEADS, device)
    if scaled:
        tensors['block_scale'] = torch.linspace(0.9, 1.1, indices.numel(), device=device).view(indices.shape)
    assert_slopes_at_the_cap(selected_attention, tensors, grads, block_size=4)


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_unread_keys_change_nothing(junk: float, device: torch.device) -> None:
    """Unread are blocks that no query selected or that follow the count, later keys in the own block, and factors of
    both.
    """
    extents = Extents(1, 4, 40, {'q_offset': 16}, [40])
    settings: dict[str, Any] = {'block_size': 8, 'q_offset': 16, 'softcap': 2.0, 'block_counts': 3}
    indices = torch.tensor([2, 0, 2, 1, -1], dtype=torch.int32).expand(1, 4, 1, 5)
    tensors, grads = make_inputs(extents, HEADS, device, indices, scaled=True), make_grads(extents, HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    read = torch.zeros(40, dtype=torch.bool, device=device)
    read[:8] = read[16:20] = True
    spoiled = {name: t.clone() for name, t in tensors.items()}
    for name in 'kv':
        spoiled[name][:, ~read] = junk
    spoiled['block_scale'][..., 2:] = junk
    assert_same_bits(run_triton(selected_attention, spoiled, grads, **settings), expected)
    assert (expected['grad of k'][:, ~read] == 0).all()
    assert (expected['grad of block_scale'][..., 2:] == 0).all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_full_blocks_of_other_queries_change_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """Every other query of a tile reads a block that contains NaN or infinities."""
    extents = Extents(1, 14, 48, {'q_offset': 33}, [48])
    settings: dict[str, Any] = {'block_size': 16, 'q_offset': 33, 'softcap': 2.0}
    indices = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).repeat(7, 1).view(1, 14, 1, 2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=dtype), make_grads(extents, HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    for name in 'kv':
        spoiled: Tensors = tensors | {name: tensors[name].clone()}
        spoiled[name][:, 20] = torch.nan
        result = run_triton(selected_attention, spoiled, grads, **settings)
        for output in ('out0', 'grad of q'):
            assert torch.equal(result[output][:, ::2], expected[output][:, ::2]), output
            assert not result[output][:, 1::2].isfinite().all(-1).any(), output
        for output in ('grad of k', 'grad of v'):
            assert torch.equal(result[output][:, :16], expected[output][:, :16]), output


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_infinite_logits_reach_the_cap(dtype: torch.dtype, device: torch.device) -> None:
    """One index is repeated, so its second load is in vain."""
    indices = torch.tensor([0, 0, 1], dtype=torch.int32).expand(1, 32, 1, 3)
    settings: dict[str, Any] = {'block_size': 16, 'softcap': 2.0}
    for name, token in (('q', 20), ('k', 3)):
        tensors = make_inputs(whole(32), Heads(2, 1, 16, 16), device, indices, dtype=dtype)
        for other in 'qk':
            tensors[other] = tensors[other].abs() + 0.1
        tensors[name][:, token, :, 0] = torch.inf
        expected, found = (run(selected_attention, tensors, **settings) for run in (run_eager, run_triton))
        for result in ('out0', 'out1'):
            assert expected[result].isfinite().all()
            torch.testing.assert_close(found[result], expected[result], rtol=2e-3, atol=2e-3)


@per_block
@pytest.mark.parametrize(('heads', 'factor'), [(HEADS, None), (HEADS, 1e4), (Heads(2, 1, 64, 128), 1.0)])
@pytest.mark.parametrize('size', [1.0, 1e6])
def test_float16_partial_results(
    size: float, heads: Heads, factor: float | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 inputs use them: slopes do not take gradients beyond their units."""
    indices = make_indices(whole(12), 1, 3, 3)
    tensors = make_inputs(whole(12), heads, device, indices, scaled=factor is not None)
    grads = make_grads(whole(12), heads, device)
    tensors['v'] = tensors['v'] * size
    if factor is not None:
        tensors['q'] = tensors['q'] / factor
        tensors['block_scale'] = tensors['block_scale'] * factor
    settings: dict[str, Any] = {'block_size': 3, 'softcap': 1.0}
    expected = run_triton(selected_attention, tensors, grads, **settings)
    monkeypatch.setattr(partials, 'partial_dtype', lambda _: torch.float16)
    result = run_triton(selected_attention, tensors, grads, **settings)
    assert not torch.equal(result['out0'], expected['out0'])
    for name, t in expected.items():
        error = (result[name] - t).nan_to_num()  # log-sum-exps of nothing
        assert error.norm() <= 2.0**-11 * t.nan_to_num(neginf=0).norm(), name


@per_tile
def test_segments(device: torch.device) -> None:
    ids = torch.tensor([[-1, 2, 2, 2, 2, -1, -4, 0, 0, 0, 2, 2]], device=device)
    tensors = make_inputs(whole(12), TWO_GROUPS, device, make_indices(whole(12), 2, 3, 2), scaled=True)
    for name in 'qkv':
        tensors[name] = tensors[name].masked_fill((ids < 0)[:, :, None, None], torch.nan)
    grads = make_grads(whole(12), TWO_GROUPS, device)
    settings: dict[str, Any] = {'block_size': 2, 'segment_ids': ids, 'softcap': 2.0}
    assert_close_to_eager(selected_attention, tensors, grads, **settings)
    result = run_triton(selected_attention, tensors, grads, **settings)
    assert result['out0'][ids < 0].eq(0).all()
    for name in 'qkv':
        assert result[f'grad of {name}'][ids < 0].eq(0).all()
