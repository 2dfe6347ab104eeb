"""The kernels of `block_divergence` against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention import losses
from native_sparse_attention.core.call import Call, MassRules
from native_sparse_attention.core.geometry import num_selection_blocks
from native_sparse_attention.ops.block_divergence import block_divergence
from native_sparse_attention.ops.block_divergence.triton import op
from tests.support.harness import far_apart, fewer_examples, make_sequences, place, same_bits
from tests.support.problems import (
    Extents,
    Heads,
    cumulative,
    drawn_extents,
    drawn_heads,
    make_compressed,
    make_qkv,
    packed,
    row_integers,
    whole,
)

SMALL = Heads(4, 2, 16, 16)
SIZES = (4, 2, 4)
# Float16 gradients of a mean over many rows would be below the smallest normal number.
DLOSS = 100.0


def make_problem(
    extents: Extents,
    heads: Heads = SMALL,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    sizes: tuple[int, int, int] = SIZES,
    window_size: tuple[int, int] | None = (3, 0),
    share_group: bool = True,
    num_queries: int = 1000,
    causal: bool = True,
    scale: float = 0.25,
    softcap: float | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q_cmp, k_cmp and a mass, and the other arguments. Padding, and the mass of padding, are NaN."""
    device = device or torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    (block_size, stride, selection_block_size), batch = sizes, extents.batch
    q_cmp, k_cmp = make_qkv(extents, heads)[0], make_compressed(extents, heads, block_size, stride)[0]
    sequences = make_sequences(extents, device)
    rows = losses._draw_rows(batch, extents.seqlen_q, num_queries, torch.zeros(1, dtype=torch.int64, device=device))
    tokens, (compressed, _) = sequences.layout(rows), sequences.compressed_layout(block_size, stride, rows)
    index_heads = heads.kv_heads if share_group else heads.heads
    count = num_selection_blocks(extents.seqlen_k, selection_block_size)
    mass = torch.rand(batch, rows.shape[1], index_heads, count) ** 4
    mass = mass.where(torch.rand_like(mass) > 0.1, 0)
    every = sequences.layout()
    q_cmp[(every.position >= every.key_len).cpu()] = torch.nan
    mass[(tokens.position >= tokens.key_len).cpu()] = torch.nan
    arguments = {
        'rows': rows,
        'layouts': (tokens, compressed),
        'compress': (block_size, stride),
        'rules': MassRules(selection_block_size, window_size, share_group),
        'call': Call(sequences, causal, scale, softcap),
    }
    return [*place((q_cmp, k_cmp), device, dtype), place(mass, device)], arguments


def run(tensors: list[Tensor], arguments: dict[str, Any], backend: str = 'triton') -> list[Tensor]:
    """Return the loss and the gradients of q_cmp and k_cmp."""
    q_cmp, k_cmp = (t.detach().requires_grad_() for t in tensors[:2])
    loss = block_divergence(q_cmp, k_cmp, tensors[2], **arguments, backend=backend)
    if not loss.requires_grad:
        return [loss, torch.zeros_like(q_cmp), torch.zeros_like(k_cmp)]
    grads = torch.autograd.grad(loss, (q_cmp, k_cmp), torch.full_like(loss, DLOSS), allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors[:2], strict=True))]


def assert_equals_eager(tensors: list[Tensor], arguments: dict[str, Any], tolerance: float = 1e-5) -> list[Tensor]:
    """Check against eager in float64: only float16 gradients are rounded, and those to their own precision."""
    found = run(tensors, arguments)
    gold = run([t.double() for t in tensors], arguments, 'eager')
    for result, expected in zip(found, gold, strict=True):
        limit = 2**-10 if result.dtype == torch.float16 else tolerance
        atol = limit * float(expected.abs().amax()) / 10 if expected.numel() else 0
        torch.testing.assert_close(result.double(), expected, rtol=limit, atol=atol + 1e-6 * (result.dim() == 0))
    return found


@pytest.mark.quick
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(
    ('extents', 'changes'),
    [
        (whole(60, batch=2), {}),
        (packed([30, 1, 31, 0], uncovered=2), {}),
        (Extents(2, 5, 50, {'q_offset': row_integers([45, -3])}, [50, 50]), {'window_size': None}),
        (Extents(2, 30, 30, {'seqlens_k': row_integers([30, 17]), 'q_offset': 0}, [30, 17]), {'softcap': 2.0}),
        (
            Extents(
                1, 9, 60, {'cu_seqlens': cumulative([0, 5, 4]), 'cu_seqlens_k': cumulative([5, 34, 21])}, [5, 34, 21]
            ),
            {'causal': False, 'window_size': (2, 3)},
        ),
    ],
)
def test_divergence(extents: Extents, changes: dict[str, Any], share_group: bool) -> None:
    loss, *_ = assert_equals_eager(*make_problem(extents, share_group=share_group, **changes))
    assert loss > 0


@fewer_examples(0.8)
@given(
    extents=drawn_extents(max_seqlen=40),
    heads=drawn_heads(),
    sizes=st.sampled_from([(4, 2, 4), (8, 4, 8), (4, 4, 8), (6, 2, 2), (3, 1, 6), (2, 1, 1), (5, 3, 3)]),
    causal=st.booleans(),
    window=st.sampled_from([None, (0, 0), (3, 1), (20, -1), (-1, 2), (-1, -1)]),
    share_group=st.booleans(),
    num_queries=st.sampled_from([7, 1000]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([0.25, 0.7, -0.3]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_divergence_of_drawn_problems(
    extents: Extents, heads: Heads, causal: bool, window: tuple[int, int] | None, dtype: torch.dtype, **settings: Any
) -> None:
    """Packed rows, lengths, offsets, and head, group and block sizes of any value; padding holds NaN."""
    window = window and (window[0], 0 if causal else window[1])
    problem = make_problem(extents, heads, dtype=dtype, causal=causal, window_size=window, **settings)
    assert_equals_eager(*problem)


@pytest.mark.parametrize('group', [1, 2, 3, 16])
@pytest.mark.parametrize('head_dim', [16, 64, 96])
@pytest.mark.parametrize('sizes', [(32, 16, 64), (16, 8, 16), (8, 4, 8), (4, 4, 8), (6, 2, 2), (64, 16, 32)])
def test_sizes(sizes: tuple[int, int, int], head_dim: int, group: int) -> None:
    """Few queries of many keys: several parts of the blocks in the forward kernels, and several key tiles."""
    seqlen = 70 * sizes[2] if sizes[2] < 16 else 12 * sizes[2] + 5
    extents = Extents(1, 9, seqlen, {'q_offset': seqlen - 12}, [seqlen])
    problem = make_problem(extents, Heads(group, 1, head_dim, 16), sizes=sizes, scale=0.2)
    assert_equals_eager(*problem)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_queries_of_several_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for extents in (whole(50, batch=2), packed([20, 30])):
        problem = make_problem(extents, dtype=dtype)
        expected = assert_equals_eager(*problem)
        with monkeypatch.context() as patch:
            patch.setattr(op, 'WORKSPACE', 4 * 4 * 13 * 7 * extents.batch)
            for result, other in zip(run(*problem), expected, strict=True):
                assert same_bits(result, other)


@pytest.mark.quick
def test_rows_that_do_not_count() -> None:
    """Rows without mass, or with fewer than two candidates, have no part in the loss and no gradient."""
    tensors, arguments = make_problem(whole(40))
    tensors[2][:, 20:30] = 0
    _, dq, _ = assert_equals_eager(tensors, arguments)
    assert (dq[:, 20:30] == 0).all()
    assert (dq[:, :6] == 0).all()
    assert (dq[:, 31:] != 0).any()


def test_mass_that_is_no_number_does_not_count() -> None:
    tensors, arguments = make_problem(whole(40))
    expected = run(tensors, arguments)
    tensors[2][:, :2] = torch.nan  # queries without two candidates
    for result, other in zip(run(tensors, arguments), expected, strict=True):
        assert same_bits(result, other)


def test_nothing_to_rank() -> None:
    for extents in (whole(3), whole(0), Extents(1, 3, 0, {}, [0]), Extents(1, 3, 9, {'q_offset': -20}, [9])):
        loss, *grads = assert_equals_eager(*make_problem(extents))
        assert loss == 0
        assert all((grad == 0).all() for grad in grads)


def test_scores_that_underflow_stay_finite() -> None:
    tensors, arguments = make_problem(whole(40))
    for factor in (1e3, -1e3):
        scaled = [factor * tensors[0], *tensors[1:]]
        found = run(scaled, arguments)
        assert all(t.isfinite().all() for t in found)
        gold = run(scaled, arguments, 'eager')
        torch.testing.assert_close(found[0], gold[0], rtol=1e-3, atol=0)


def test_keys_behind_the_sequences_are_not_read() -> None:
    extents = packed([30, 25], uncovered=3)
    tensors, arguments = make_problem(extents)
    expected = run(tensors, arguments)
    longer = torch.cat((tensors[1], torch.full_like(tensors[1][:, :5], torch.nan)), 1)
    loss, dq, dk = run([tensors[0], longer, tensors[2]], arguments)
    assert same_bits(loss, expected[0])
    assert same_bits(dq, expected[1])
    assert same_bits(dk[:, :-5], expected[2])
    assert (dk[:, -5:] == 0).all()


def test_slopes_at_the_cap() -> None:
    """Slopes of 1e-6 keep their digits, which 1 - tanh ** 2 in float32 loses."""
    tensors, arguments = make_problem(whole(40), scale=1.0, softcap=1.0)
    q_cmp, k_cmp = ((1 + 0.1 * torch.randn_like(t)) for t in tensors[:2])
    assert_equals_eager([7 / q_cmp.shape[3] * q_cmp, k_cmp, tensors[2]], arguments, tolerance=1e-3)


def test_offsets_beyond_int32() -> None:
    tensors, arguments = make_problem(whole(33), num_queries=5)
    expected = run(tensors, arguments)
    for index in range(2):
        q_cmp, k_cmp, mass = (far_apart(t, 1) if index == place else t for place, t in enumerate(tensors))
        assert same_bits(block_divergence(q_cmp, k_cmp, mass, **arguments, backend='triton'), expected[0])


def test_layouts() -> None:
    tensors, arguments = make_problem(whole(41, batch=2))
    expected = run(tensors, arguments)
    moved = [t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for t in tensors]
    for result, other in zip(run(moved, arguments), expected, strict=True):
        assert same_bits(result, other)


def test_a_batch_row_does_not_depend_on_others() -> None:
    """Times their number, the gradients of rows equal those of each row alone."""
    tensors, arguments = make_problem(whole(40, batch=2))
    loss, *grads = run(tensors, arguments)
    alone = []
    for row in range(2):
        layouts = tuple(type(a)(*(t[row : row + 1] for t in vars(a).values())) for a in arguments['layouts'])
        some = {**arguments, 'rows': arguments['rows'][row : row + 1], 'layouts': layouts}
        alone.append(run([t[row : row + 1] for t in tensors], some))
    torch.testing.assert_close(loss, (alone[0][0] + alone[1][0]) / 2)
    for grad, first, second in zip(grads, *(found[1:] for found in alone), strict=True):
        assert same_bits(2 * grad, torch.cat((first, second)))
