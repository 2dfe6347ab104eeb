"""Selected attention whose kernel for dk and dv stores gradients of logits for dq: large groups, half types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from native_sparse_attention.ops import selected_attention
from native_sparse_attention.ops._triton import launch
from native_sparse_attention.ops.selected_attention.triton import plan
from native_sparse_attention.ops.selected_attention.triton.dlogits import storage as dlogits
from native_sparse_attention.testing import assert_attention_matches, make_block_indices, row_errors
from tests.support.harness import assert_same_bits, fewer_examples, make_grads, place, run_eager, run_triton
from tests.support.problems import Extents, Heads, drawn_extents, packed, whole
from tests.support.selected_attention_problems import force_dlogits, make_indices, make_inputs

HEADS = Heads(16, 1, 16, 16)
HALF = torch.float16


@pytest.fixture(autouse=True)
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Store gradients of logits for any number of tokens. Returns the lengths of the ranges of tokens of dq."""
    monkeypatch.setattr(plan, 'MIN_SEQLEN_MIXED', 1)
    return force_dlogits(monkeypatch)


def in_ranges(monkeypatch: pytest.MonkeyPatch, tokens: int, heads: Heads, num_selected: int, block_size: int) -> None:
    """Let the workspace hold this many tokens of a KV head."""
    bytes_of_token = heads.heads // heads.kv_heads * num_selected * block_size * 2
    monkeypatch.setattr(dlogits, 'MAX_BYTES', tokens * bytes_of_token)


def make_problem(
    extents: Extents, heads: Heads, device: torch.device, *, num_selected: int = 3, block_size: int = 16
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Any]]:
    indices = make_indices(extents, heads.kv_heads, num_selected, block_size)
    tensors = make_inputs(extents, heads, device, indices, dtype=HALF)
    return tensors, make_grads(extents, heads, device), {'block_size': block_size, **place(extents.where, device)}


def assert_close(extents: Extents, heads: Heads, device: torch.device, **settings: Any) -> None:
    sizes = {name: settings.pop(name) for name in ('num_selected', 'block_size') if name in settings}
    tensors, grads, more = make_problem(extents, heads, device, **sizes)
    assert_like_eager(tensors, grads, **more, **settings)


def assert_like_eager(tensors: dict[str, Tensor], grads: list[Tensor], **settings: Any) -> None:
    """Row errors against eager in float64 are at most 1.5 times those of eager in float16, plus a rounding."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    gold, eager = (run_eager(selected_attention, t, grads, **settings) for t in (wide, tensors))
    for name, t in run_triton(selected_attention, tensors, grads, **settings).items():
        finite = gold[name].isfinite()
        assert t[~finite].double().equal(gold[name][~finite]), name
        ours, theirs = (row_errors(x.where(finite, 0), gold[name].where(finite, 0)) for x in (t, eager[name]))
        assert t.numel() == 0 or ours.max() <= 1.5 * theirs.max() + (1e-6 if name == 'out1' else 2**-11), name


@pytest.mark.quick
@pytest.mark.parametrize('heads', [HEADS, Heads(32, 1, 16, 32), Heads(64, 1, 24, 16), Heads(32, 2, 16, 16)], ids=str)
@pytest.mark.parametrize('block_size', [16, 32])
def test_groups(heads: Heads, block_size: int, device: torch.device, passed: list[int]) -> None:
    assert_close(whole(40), heads, device, block_size=block_size)
    assert passed == [40]


def test_blocks_of_several_tiles(device: torch.device, passed: list[int]) -> None:
    assert_close(Extents(1, 12, 300, {}, [300]), HEADS, device, block_size=128)
    assert passed


@pytest.mark.parametrize('num_selected', [1, 2, 5])
@pytest.mark.parametrize('settings', [{}, {'causal': False}, {'softcap': 2.0}, {'scale': -0.3}], ids=str)
def test_settings(settings: dict[str, Any], num_selected: int, device: torch.device, passed: list[int]) -> None:
    assert_close(Extents(1, 21, 48, {}, [48]), HEADS, device, num_selected=num_selected, **settings)
    assert passed


@pytest.mark.parametrize('causal', [True, False])
@fewer_examples(0.4)
@given(extents=drawn_extents(max_seqlen=40))
def test_extents(causal: bool, extents: Extents) -> None:
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    assert_close(extents, HEADS, device, num_selected=2, causal=causal)


def test_the_error_rules(device: torch.device, passed: list[int]) -> None:
    indices = make_block_indices('valid', 1, 40, 2, 3, seqlen_k=70, block_size=16, q_offset=30)
    tensors = make_inputs(Extents(1, 40, 70, {}, [70]), Heads(32, 2, 32, 24), device, indices, dtype=HALF)
    for mean in (0, 4):
        tensors['v'] = tensors['v'] + mean
        assert_attention_matches(selected_attention, tensors, 'triton', block_size=16)
    assert passed


@pytest.mark.parametrize('extents', [whole(22, batch=2), packed([5, 0, 9, 6], 3)], ids=['whole', 'packed'])
@pytest.mark.parametrize('tokens', [1, 7, 20])
def test_ranges_of_tokens(
    tokens: int, extents: Extents, device: torch.device, passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of dq do not depend on the workspace, even where query tiles straddle two ranges."""
    heads = Heads(32, 2, 16, 16)
    tensors, grads, settings = make_problem(extents, heads, device, num_selected=2)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    assert passed == [extents.seqlen_q]
    in_ranges(monkeypatch, tokens, heads, 2, 16)
    result = run_triton(selected_attention, tensors, grads, **settings)
    assert max(passed[1:]) <= tokens
    for name in ('out0', 'out1', 'grad of q'):
        assert result[name].equal(expected[name])
    for name in ('grad of k', 'grad of v'):
        torch.testing.assert_close(result[name], expected[name], rtol=2e-3, atol=2e-3)


def test_groups_of_pairs(device: torch.device, passed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the KV heads of two rows at a time, so that a group spans both rows."""
    heads = Heads(32, 2, 16, 16)
    tensors, grads, settings = make_problem(whole(21, batch=3), heads, device, num_selected=2)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    in_ranges(monkeypatch, 3 * 21, heads, 2, 16)
    assert_same_bits(run_triton(selected_attention, tensors, grads, **settings), expected)
    assert passed == [21] * 3


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    tensors, grads, settings = make_problem(whole(37, batch=3), HEADS, device)
    expected = run_triton(selected_attention, tensors, grads, **settings)
    alone = {name: t[1:2] for name, t in tensors.items()}
    result = run_triton(selected_attention, alone, [grad[1:2] for grad in grads], **settings)
    assert_same_bits(result, {name: t[1:2] for name, t in expected.items()})


def test_the_same_bits_twice(device: torch.device) -> None:
    tensors, grads, settings = make_problem(whole(50), HEADS, device)
    results = [run_triton(selected_attention, tensors, grads, **settings) for _ in range(2)]
    assert_same_bits(*results)


def test_the_future_changes_nothing(device: torch.device) -> None:
    tensors, grads, settings = make_problem(whole(48), HEADS, device)
    first = 21  # in the middle of a tile, and of a block
    changed = {name: t.clone() for name, t in tensors.items()}
    for name in 'qkv':
        changed[name][:, first:] = torch.nan
    changed['block_indices'][:, first:] = 0
    grads[0][:, first:] = 0
    grads[1][..., first:] = 0
    expected, result = (run_triton(selected_attention, t, grads, **settings) for t in (tensors, changed))
    for name in ('out0', 'grad of q'):
        assert result[name][:, :first].equal(expected[name][:, :first])
    assert result['out1'][..., :first].equal(expected['out1'][..., :first])


@pytest.mark.parametrize('junk', [torch.nan, torch.inf])
def test_non_finite_keys_reach_their_readers_only(junk: float, device: torch.device) -> None:
    """Every other query of a tile reads a block with non-finite keys; all read the last block, which has a non-finite
    key behind them.
    """
    extents = Extents(1, 14, 48, {'q_offset': 33}, [48])
    indices = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32).repeat(7, 1).view(1, 14, 1, 2)
    tensors, grads = make_inputs(extents, HEADS, device, indices, dtype=HALF), make_grads(extents, HEADS, device)
    settings = {'block_size': 16, 'q_offset': 33}
    expected = run_triton(selected_attention, tensors, grads, **settings)
    for name in 'kv':
        spoiled = tensors | {name: tensors[name].clone()}
        spoiled[name][:, 20] = spoiled[name][:, 47] = junk
        result = run_triton(selected_attention, spoiled, grads, **settings)
        for output in ('out0', 'grad of q'):
            assert torch.equal(result[output][:, ::2], expected[output][:, ::2]), output
            assert not result[output][:, 1::2].isfinite().all(-1).any(), output
        for output in ('grad of k', 'grad of v'):
            assert torch.equal(result[output][:, :16], expected[output][:, :16]), output
    for where in range(2):
        spoiled, spoiled_grads = tensors | {'q': tensors['q'].clone()}, [grad.clone() for grad in grads]
        (spoiled['q'], spoiled_grads[0])[where][:, 3] = junk
        result = run_triton(selected_attention, spoiled, spoiled_grads, **settings)
        others = torch.arange(14) != 3
        assert torch.equal(result['grad of q'][:, others], expected['grad of q'][:, others])
        assert not result['grad of q'][:, 3].isfinite().all(-1).any()


def test_queries_that_read_nothing(device: torch.device) -> None:
    """A query of a tile reads nothing, and the gradient of its log-sum-exp is NaN."""
    indices = torch.tensor([[0], [-1]], dtype=torch.int32).repeat(12, 1).view(1, 24, 1, 1)
    tensors, grads = make_inputs(whole(24), HEADS, device, indices, dtype=HALF), make_grads(whole(24), HEADS, device)
    grads[1][:, :, 1::2] = torch.nan
    result = run_triton(selected_attention, tensors, grads, block_size=16)
    assert all(t.isfinite().all() for name, t in result.items() if name != 'out1')
    assert (result['grad of q'][:, 1::2] == 0).all()
    grads[1][:, :, 1::2] = 0
    assert_like_eager(tensors, grads, block_size=16)


@pytest.mark.parametrize('needed', ['q', 'k', 'v', 'qk'])
def test_only_needed_gradients(needed: str, device: torch.device) -> None:
    tensors, grads, settings = make_problem(whole(20), HEADS, device)
    whole_result = run_triton(selected_attention, tensors, grads, **settings)
    leaves = {name: t.detach().requires_grad_(name in needed) for name, t in tensors.items() if name in 'qkv'}
    rest = {name: t for name, t in tensors.items() if name not in 'qkv'}
    out, lse = selected_attention(**leaves, **rest, **settings, backend='triton')
    found = torch.autograd.grad([out, lse], [leaves[name] for name in needed], grads)
    for name, grad in zip(needed, found, strict=True):
        torch.testing.assert_close(grad, whole_result[f'grad of {name}'], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize('peak', [6.0, 12.0])
def test_rows_with_one_dominant_weight(peak: float, device: torch.device) -> None:
    """Gradients of logits are much smaller than delta there, so the rounding of the output must not show."""
    tensors, grads, settings = make_problem(whole(48), Heads(16, 1, 32, 32), device)
    tensors['q'] = tensors['q'] * peak
    grads[1].zero_()
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    gold = run_eager(selected_attention, wide, grads, **settings)['grad of q']
    eager = run_eager(selected_attention, tensors, grads, **settings)['grad of q'].double()
    ours = run_triton(selected_attention, tensors, grads, **settings)['grad of q'].double()
    assert (ours - gold).norm() <= 1.1 * (eager - gold).norm()


@pytest.mark.parametrize(
    ('changes', 'passes'),
    [
        ({}, True),
        ({'group': 4}, False),
        ({'group': 48}, False),
        ({'group': 64}, True),
        ({'group': 128}, False),
        ({'dtype': torch.float32}, False),
        ({'dtype': torch.float16}, True),
        ({'block_size': 8}, False),
        ({'block_size': 48}, False),
        ({'block_size': 128}, True),
        ({'seqlen': 2047}, False),
        ({'num_selected': 64, 'seqlen': 16384}, True),
        ({'num_selected': 64, 'group': 64, 'seqlen': 16384}, False),
        ({'num_selected': 65, 'seqlen': 16384}, False),
        ({'num_selected': 0}, False),
        ({'head_dim': 64}, True),
        ({'head_dim': 192}, False),
        ({'seqlen': 2**18}, True),
        ({'seqlen': 2**18, 'batch': 2}, True),
        ({'seqlen': 2**18, 'batch': 3}, False),
        ({'seqlen': 2**19}, False),
        ({'block_size': 1024, 'num_selected': 16, 'seqlen': 65536}, False),
        ({'seqlen': 3008}, False),
        ({'seqlen': 3072}, True),
        ({'seqlen': 65536, 'num_packed': 16}, True),
        ({'seqlen': 65536, 'num_packed': 64}, False),
        ({'seqlen': 2**17, 'block_size': 16, 'num_selected': 1, 'num_packed': 2**11}, True),
        ({'seqlen': 2**17, 'group': 16, 'block_size': 16, 'num_selected': 1, 'num_packed': 2**17}, False),
        ({'batch': 128}, True),
        ({'batch': 256}, False),
    ],
    ids=str,
)
def test_conditions_for_stored_dlogits(changes: dict[str, Any], passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlogits, 'MIN_TOKENS', 2048)
    monkeypatch.setattr(dlogits, 'MIN_BLOCK_RATIO', 3)
    monkeypatch.setattr(launch, 'architecture_of', lambda _: 'sm90')
    shape = {'seqlen': 8192, 'group': 16, 'num_selected': 16, 'block_size': 64, 'head_dim': 128, **changes}
    q, k, indices = (
        torch.empty(
            shape.get('batch', 1), shape['seqlen'], heads, size, dtype=shape.get('dtype', torch.bfloat16), device='meta'
        )
        for heads, size in ((2 * shape['group'], shape['head_dim']), (2, shape['head_dim']), (2, shape['num_selected']))
    )
    assert dlogits.stores_dlogits(q, k, k, indices, None, shape['block_size'], shape.get('num_packed', 0)) is passes
    assert not dlogits.stores_dlogits(q, k, k, indices, torch.empty_like(indices), shape['block_size'])
