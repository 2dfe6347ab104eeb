"""The error rules: they pass a correct bf16 attention and catch every fault planted in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from native_sparse_attention.ops import compressed_attention, gated_sum, selected_attention, window_attention
from native_sparse_attention.testing import (
    INDEX_KINDS,
    LAYOUTS,
    NORM_LIMITS,
    ROW_LIMITS,
    assert_attention_matches,
    assert_matches,
    lay_out,
    make_block_indices,
    make_cu_seqlens,
    make_qkv,
    measure_errors,
    outputs_and_gradients,
    row_errors,
)

SEQLEN, HEADS, HEAD_DIM, TILE = 256, 2, 64, 64
CAUSAL = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril().expand(HEADS, -1, -1)
Results = dict[str, Tensor]


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    visible: Tensor = CAUSAL,
    scale: float = HEAD_DIM**-0.5,
    sums: torch.dtype = torch.float32,
) -> Results:
    """Compute attention as a kernel does: online softmax over tiles of keys, weights recomputed in the backward pass.

    q, k, v, grad_out: bf16 `[H, T, D]`; visible: `[H, T, T]`; sums: dtype of the running sums of the output. Weights
    and gradients of logits are rounded to bf16 before products with another tensor.
    """
    out = torch.zeros(q.shape, dtype=sums)
    row_max = torch.full((*q.shape[:2], 1), -torch.inf)
    row_sum = torch.zeros(*q.shape[:2], 1)
    for start in range(0, SEQLEN, TILE):
        tile = slice(start, start + TILE)
        logits = (q.float() @ k[:, tile].float().mT * scale).masked_fill(~visible[..., tile], -torch.inf)
        new_max = torch.maximum(row_max, logits.amax(-1, keepdim=True))
        weights, rescale = (logits - new_max).exp(), (row_max - new_max).exp()
        row_max, row_sum = new_max, row_sum * rescale + weights.sum(-1, keepdim=True)
        out = (out * rescale + weights.bfloat16().float() @ v[:, tile].float()).to(sums)
    out, lse = (out / row_sum).bfloat16(), row_max + row_sum.log()
    delta = (out.float() * grad_out.float()).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = (torch.zeros(t.shape) for t in (q, k, v))
    for start in range(0, SEQLEN, TILE):
        tile = slice(start, start + TILE)
        logits = (q.float() @ k[:, tile].float().mT * scale).masked_fill(~visible[..., tile], -torch.inf)
        weights = (logits - lse).exp()
        grad_logits = weights * (grad_out.float() @ v[:, tile].float().mT - delta)
        grad_logits = grad_logits.bfloat16().float() * scale
        grad_q += grad_logits @ k[:, tile].float()
        grad_k[:, tile] = grad_logits.mT @ q.float()
        grad_v[:, tile] = weights.bfloat16().float().mT @ grad_out.float()
    grads = {'dq': grad_q, 'dk': grad_k, 'dv': grad_v}
    return {'out': out, 'lse': lse.squeeze(-1)} | {name: grad.bfloat16() for name, grad in grads.items()}


def correct(*inputs: Tensor) -> Results:
    return tiled_attention(*inputs)


def scale_is_off_by_half_a_percent(*inputs: Tensor) -> Results:
    return tiled_attention(*inputs, scale=1.005 * HEAD_DIM**-0.5)


def one_key_leaks(*inputs: Tensor) -> Results:
    visible = CAUSAL.clone()
    visible[0, 200, 201] = True
    return tiled_attention(*inputs, visible=visible)


def one_key_is_missing(*inputs: Tensor) -> Results:
    visible = CAUSAL.clone()
    visible[1, 180, 90] = False
    return tiled_attention(*inputs, visible=visible)


def a_tile_is_dropped(*inputs: Tensor) -> Results:
    visible = CAUSAL.clone()
    visible[1, 3 * TILE :, TILE : 2 * TILE] = False
    return tiled_attention(*inputs, visible=visible)


def the_last_token_has_no_gradient(*inputs: Tensor) -> Results:
    results = tiled_attention(*inputs)
    for name in ('dk', 'dv'):
        results[name][:, -1] = 0
    return results


def log_sum_exp_is_a_binary_logarithm(*inputs: Tensor) -> Results:
    results = tiled_attention(*inputs)
    return results | {'lse': results['lse'] / torch.tensor(2.0).log()}


def one_row_is_not_normalised(*inputs: Tensor) -> Results:
    """The weights of the row add up to 1.04."""
    results = tiled_attention(*inputs)
    results['out'][0, 77] = (1.04 * results['out'][0, 77].float()).bfloat16()
    return results


def values_are_rounded_twice(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Results:
    """Values are rounded once more in another scale, as in a cache of scaled values."""
    return tiled_attention(q, k, ((v.float() / 3).bfloat16().float() * 3).bfloat16(), grad_out)


def sums_are_kept_in_bf16(*inputs: Tensor) -> Results:
    return tiled_attention(*inputs, sums=torch.bfloat16)


def one_row_is_stale(*inputs: Tensor) -> Results:
    results = tiled_attention(*inputs)
    results['out'][1, 250] = results['out'][1, 249]
    return results


def a_block_of_a_gradient_has_the_wrong_sign(*inputs: Tensor) -> Results:
    results = tiled_attention(*inputs)
    results['dq'][0, 240:, :16] *= -1
    return results


def one_value_is_nan(*inputs: Tensor) -> Results:
    results = tiled_attention(*inputs)
    results['dv'][1, 3, 5] = torch.nan
    return results


FAULTS = [
    scale_is_off_by_half_a_percent,
    one_key_leaks,
    one_key_is_missing,
    a_tile_is_dropped,
    the_last_token_has_no_gradient,
    log_sum_exp_is_a_binary_logarithm,
    one_row_is_not_normalised,
    values_are_rounded_twice,
    sums_are_kept_in_bf16,
    one_row_is_stale,
    a_block_of_a_gradient_has_the_wrong_sign,
    one_value_is_nan,
]


@cache
def problem() -> tuple[tuple[Tensor, ...], Results, Results]:
    """Return inputs, and the results of eager in float64 and in bf16."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, HEADS, SEQLEN, HEAD_DIM, generator=generator).bfloat16().unbind()

    def eager(dtype: torch.dtype) -> Results:
        q, k, v, grad_out = (t.to(dtype).transpose(0, 1)[None] for t in inputs)
        dense = partial(window_attention, window_size=(-1, 0), backend='eager')
        results = outputs_and_gradients(dense, {'q': q, 'k': k, 'v': v}, [grad_out, torch.zeros(1, HEADS, SEQLEN)])
        lse = results.pop('out1')
        out, *grads = (t[0].transpose(0, 1) for t in results.values())
        return {'out': out, 'lse': lse[0], **dict(zip(('dq', 'dk', 'dv'), grads, strict=True))}

    return inputs, eager(torch.float64), eager(torch.bfloat16)


def broken_rules(implementation: Callable[..., Results]) -> dict[str, list[str]]:
    inputs, gold, same_dtype = problem()
    results = implementation(*inputs)
    return {
        name: measure_errors(results[name], gold[name], same_dtype[name], row_dims=name != 'lse').broken_rules()
        for name in results
    }


def test_a_correct_implementation_passes() -> None:
    assert not any(broken_rules(correct).values())


@pytest.mark.parametrize('fault', FAULTS)
def test_a_planted_fault_is_caught(fault: Callable[..., Results]) -> None:
    # Rule 1 alone catches less: another rule catches each of its faults too.
    broken = [line for lines in broken_rules(fault).values() for line in lines]
    assert any(not line.startswith('rule 1') for line in broken)


def test_usual_tolerances_miss_faults() -> None:
    inputs, gold, _ = problem()
    missed = set()
    for fault in FAULTS:
        results = fault(*inputs)
        if all(torch.allclose(results[name].double(), gold[name], rtol=1e-2, atol=1e-2) for name in results):
            missed.add(fault)
    assert missed >= {one_key_leaks, values_are_rounded_twice}
    assert correct not in missed


def test_messages_name_the_rule_and_the_numbers() -> None:
    inputs, gold, same_dtype = problem()
    results = one_value_is_nan(*inputs)
    with pytest.raises(AssertionError, match=r'dv \(2, 256, 64\) torch.bfloat16\n  rule 4: 1 values'):
        assert_matches(results['dv'], gold['dv'], same_dtype['dv'], name='dv')
    results = a_tile_is_dropped(*inputs)
    with pytest.raises(AssertionError, match=r'rule 3: a row has error [0-9.e+-]+, but at most 3.125e-02 is allowed'):
        assert_matches(results['out'], gold['out'], same_dtype['out'], name='out')


def test_infinities_stand_where_the_gold_has_them() -> None:
    gold = torch.tensor([1.0, -torch.inf, 2.0]).double()
    for values, broken in (
        ([1, -torch.inf, 2], 0),
        ([1, torch.inf, 2], 1),
        ([-torch.inf, 0, 2], 2),
        ([1, torch.nan, 2], 1),
    ):
        result = torch.tensor(values, dtype=torch.float32)
        errors = measure_errors(result, gold, gold.float(), row_dims=0)
        assert errors.misplaced == broken
        assert bool(errors.broken_rules()) == bool(broken)


@pytest.mark.parametrize(('dtype', 'broken'), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)])
def test_a_bad_row_of_eager_excuses_none_in_bfloat16(dtype: torch.dtype, broken: bool) -> None:
    gold = torch.randn(100, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = gold.clone()
    result[7] *= 1 + 2.0**-4
    result = result.to(dtype)
    lines = measure_errors(result, gold, result).broken_rules()
    assert any(line.startswith('rule 3') for line in lines) == broken


@pytest.mark.parametrize('dtype', NORM_LIMITS)
def test_the_norm_of_eager_excuses_none(dtype: torch.dtype) -> None:
    gold = torch.randn(100, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = (gold * (1 + 1.5 * NORM_LIMITS[dtype])).to(dtype)
    broken = measure_errors(result, gold, result).broken_rules()
    assert [line.split(':')[0] for line in broken] == ['rule 5']


@pytest.mark.gpu
@pytest.mark.parametrize(('dtype', 'rows', 'rules'), [
    (torch.float32, 1000, ['rule 5']), (torch.bfloat16, 1000, ['rule 2', 'rule 5']),
    (torch.bfloat16, 8, ['rule 2', 'rule 5']), (torch.bfloat16, 7, ['rule 5']),
])  # fmt: skip
def test_the_norm_catches_small_errors_on_a_gpu(dtype: torch.dtype, rows: int, rules: list[str]):
    """An error of 0.6 % everywhere in half types, of 2e-5 in float32, where eager has nearly none."""
    gold = torch.randn(rows, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cuda()
    result = (gold * (1 + (2e-5 if dtype == torch.float32 else 6e-3))).to(dtype)
    broken = measure_errors(result, gold, gold.to(dtype)).broken_rules()
    assert [line.split(':')[0] for line in broken] == rules


def test_results_that_cannot_be_measured() -> None:
    gold = torch.ones(3, 2, dtype=torch.float64)
    half = gold.bfloat16()
    with pytest.raises(ValueError, match=r'result has dtype torch.float64, but must have'):
        measure_errors(gold, gold, gold)
    with pytest.raises(ValueError, match=r'gold has dtype torch.float32, but must have torch.float64'):
        measure_errors(half, gold.float(), half)
    with pytest.raises(ValueError, match=r'same_dtype has dtype torch.float32, but result has torch.bfloat16'):
        measure_errors(half, gold, gold.float())
    with pytest.raises(ValueError, match=r'same_dtype has shape \(2, 2\), but result has \(3, 2\)'):
        measure_errors(half, gold, half[:2])
    with pytest.raises(ValueError, match=r'same_dtype is not finite where gold is'):
        measure_errors(half, gold, half / 0)


def test_empty_results_match() -> None:
    empty = torch.zeros(0, 4, 2, 8)
    assert_matches(empty, empty.double(), empty, name='empty')
    assert_matches(empty[..., 0], empty[..., 0].double(), empty[..., 0], name='empty', row_dims=0)


def eager_row_errors(dtype: torch.dtype) -> dict[str, float]:
    """Return the worst row of every output and gradient of eager in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    sizes = {'heads': 4, 'kv_heads': 2, 'head_dim': 40, 'value_dim': 24, 'dtype': dtype, 'generator': generator}
    q, k, v = make_qkv(1, 257, 257, **sizes)
    _, k_cmp, v_cmp = make_qkv(1, 1, 15, **sizes)
    gates = torch.rand(1, 257, 4, 3, generator=generator)
    branches = make_qkv(1, 257, 257, heads=4, kv_heads=4, head_dim=24, dtype=dtype, generator=generator)
    blocks = make_block_indices('valid', 1, 257, 2, 6, seqlen_k=257, block_size=16, generator=generator)
    calls = {
        'window': (partial(window_attention, window_size=(63, 0)), {'q': q, 'k': k, 'v': v}),
        'dense': (partial(window_attention, window_size=(-1, 0)), {'q': q, 'k': k, 'v': v}),
        'selected': (
            partial(selected_attention, block_indices=blocks, block_size=16),
            {'q': q, 'k': k, 'v': v},
        ),
        'compressed': (
            partial(compressed_attention, block_size=32, stride=16),
            {'q': q, 'k_cmp': k_cmp, 'v_cmp': v_cmp},
        ),
        'gated': (
            gated_sum,
            dict(zip(('gates', 'out_compressed', 'out_selected', 'out_window'), (gates, *branches), strict=True)),
        ),
    }
    worst = {}
    for name, (function, tensors) in calls.items():
        outputs = function(**tensors)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
        results = outputs_and_gradients(function, tensors, grads)
        gold = outputs_and_gradients(function, {n: t.double() for n, t in tensors.items()}, grads)
        for key, result in results.items():
            # The log-sum-exp is float32 in half types too.
            if result.dtype == dtype:
                errors = row_errors(result, gold[key], row_dims=key != 'out1')
                worst[f'{name}: {key}'] = float(errors.max())
    return worst


@pytest.mark.parametrize('dtype', ROW_LIMITS)
def test_row_limits_are_a_few_times_the_worst_row_of_eager(dtype: torch.dtype) -> None:
    worst = eager_row_errors(dtype)
    name = max(worst, key=worst.__getitem__)
    assert ROW_LIMITS[dtype] / 16 <= worst[name] <= ROW_LIMITS[dtype] / 3, f'{name}: {worst[name]:.2e}'


@pytest.mark.parametrize('dtype', ROW_LIMITS)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_eager_matches_itself(layout: str, dtype: torch.dtype) -> None:
    sizes = {'heads': 4, 'kv_heads': 2, 'head_dim': 16, 'value_dim': 8, 'dtype': dtype, 'layout': layout}
    q, k, v = make_qkv(2, 33, 33, **sizes)
    tensors = {'q': q, 'k': k, 'v': v}
    assert_attention_matches(window_attention, tensors, 'eager', window_size=(7, 0))
    blocks = make_block_indices('junk', 2, 33, 2, 4, seqlen_k=33, block_size=4)
    scale = torch.rand(blocks.shape)
    tensors |= {'block_indices': blocks, 'block_scale': scale}
    assert_attention_matches(selected_attention, tensors, 'eager', block_size=4)


def test_layouts_hold_the_values_and_keep_the_last_dimension_contiguous() -> None:
    tensor = torch.randn(2, 5, 3, 4)
    for layout in LAYOUTS:
        laid_out = lay_out(tensor, layout)
        expected = tensor[:1].expand_as(tensor) if layout == 'expanded' else tensor
        assert torch.equal(laid_out, expected)
        assert laid_out.stride(-1) == 1
        assert laid_out.is_contiguous() == (layout == 'contiguous')
    with pytest.raises(ValueError, match=r"layout is 'tiled', but must be one of 'contiguous'"):
        lay_out(tensor, 'tiled')


def test_packed_borders_have_empty_sequences() -> None:
    for sequences in range(1, 7):
        borders = make_cu_seqlens(50, sequences, uncovered=3)
        assert borders.dtype == torch.int32
        assert borders.tolist() == sorted(borders.tolist())
        assert (len(borders), int(borders[0]), int(borders[-1])) == (sequences + 1, 0, 47)
        if sequences >= 3:
            assert borders.diff()[0] == borders.diff()[-1] == 0


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('kind', INDEX_KINDS)
def test_block_indices_are_what_their_kind_says(kind: str, causal: bool) -> None:
    offset, seqlen_k, block_size, num_selected = 9, 40, 4, 6
    blocks = make_block_indices(
        kind, 2, 31, 3, num_selected, seqlen_k=seqlen_k, block_size=block_size, q_offset=offset, causal=causal
    )
    assert blocks.shape == (2, 31, 3, num_selected)
    assert blocks.dtype == torch.int32
    rows = [(offset + t, row) for batch in blocks.tolist() for t, heads in enumerate(batch) for row in heads]
    allowed = [{j for j in range(10) if not causal or j * block_size <= position} for position, _ in rows]
    chosen = [[j for j in row if j != -1] for _, row in rows]
    in_range = all(set(row) <= blocks for row, blocks in zip(chosen, allowed, strict=True))
    full = all(len(row) == min(num_selected, len(blocks)) for row, blocks in zip(chosen, allowed, strict=True))
    distinct = all(len(row) == len(set(row)) for row in chosen)
    ascending = all(row == sorted(row, key=lambda j: (j == -1, j)) for _, row in rows)
    assert in_range == (kind != 'junk')
    assert full or kind not in ('valid', 'unordered')
    assert distinct == (kind in ('valid', 'unordered', 'none'))
    assert ascending == (kind in ('valid', 'none'))
    if kind == 'junk':
        extremes = torch.iinfo(torch.int32)
        assert {extremes.min, extremes.max, seqlen_k, 10} <= set(blocks.flatten().tolist())


def test_an_unknown_kind_of_indices() -> None:
    with pytest.raises(ValueError, match=r"kind is 'odd', but must be one of 'valid'"):
        make_block_indices('odd', 1, 1, 1, 1, seqlen_k=1, block_size=1)
