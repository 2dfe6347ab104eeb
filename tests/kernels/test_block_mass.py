"""The kernels of `block_mass` against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from native_sparse_attention.losses import block_score_loss
from native_sparse_attention.ops.block_mass import block_mass
from native_sparse_attention.ops.block_mass.triton import op
from tests.support.harness import far_apart, fewer_examples, place, same_bits
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


def make_problem(
    extents: Extents, heads: Heads, device: torch.device, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    q, k, _ = (place(t, device, dtype) for t in make_qkv(extents, heads))
    return {'q': q, 'k': k}, {'block_size': 8, 'window_size': (5, 0), **place(extents.where, device), **settings}


def assert_equals_eager(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Tensor:
    """Check float32 and float16 inputs against eager in float64: only logits and sums are rounded, to float32."""
    mass = block_mass(**tensors, **settings, backend='triton')
    gold = block_mass(**{name: t.double() for name, t in tensors.items()}, **settings, backend='eager')
    torch.testing.assert_close(mass.double(), gold, rtol=1e-5, atol=1e-6, equal_nan=True)
    return mass


@pytest.mark.quick
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(
    ('extents', 'changes'),
    [
        (whole(29, batch=2), {}),
        (packed([0, 9, 1, 16, 0], uncovered=2), {}),
        (Extents(2, 5, 30, {'q_offset': row_integers([23, -3])}, [30, 30]), {'window_size': None}),
        (
            Extents(
                1, 9, 30, {'cu_seqlens': cumulative([0, 5, 3]), 'cu_seqlens_k': cumulative([5, 14, 9])}, [5, 14, 9]
            ),
            {'causal': False, 'window_size': (2, 3)},
        ),
    ],
)
def test_mass(extents: Extents, changes: dict[str, Any], share_group: bool, device: torch.device) -> None:
    assert_equals_eager(*make_problem(extents, SMALL, device, share_group=share_group, **changes))


@fewer_examples(0.6)
@given(
    extents=drawn_extents(max_seqlen=40),
    heads=drawn_heads(),
    block_size=st.sampled_from([1, 4, 7, 16, 100]),
    causal=st.booleans(),
    window=st.sampled_from([None, (0, 0), (3, 1), (20, -1), (-1, 2), (-1, -1)]),
    share_group=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.7, -0.3]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_mass_of_drawn_problems(
    extents: Extents, heads: Heads, causal: bool, window: tuple[int, int] | None, dtype: torch.dtype, **settings: Any
) -> None:
    """Packed rows, lengths, offsets, and head, group and block sizes of any value; padding holds NaN."""
    window = window and (window[0], 0 if causal else window[1])
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    assert_equals_eager(*make_problem(extents, heads, device, dtype, causal=causal, window_size=window, **settings))


@pytest.mark.parametrize('chunk_keys', [1, 64])
@pytest.mark.parametrize('block_size', [5, 64, 100])
def test_keys_of_several_programs(
    block_size: int, chunk_keys: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a block or more, queries in two passes, and blocks that exceed a key tile."""
    monkeypatch.setattr(op, 'CHUNK_KEYS', chunk_keys)
    monkeypatch.setattr(op, 'WORKSPACE', 4 * 4 * 7 * (-(-230 // block_size)))
    where = {'cu_seqlens': cumulative([4, 3, 4]), 'cu_seqlens_k': cumulative([70, 9, 150])}
    extents = Extents(1, 11, 230, where, [70, 9, 150])
    assert_equals_eager(*make_problem(extents, SMALL, device, block_size=block_size))


def test_queries_do_not_depend_on_others(device: torch.device) -> None:
    tensors, settings = make_problem(whole(70, batch=2), SMALL, device)
    every = block_mass(**tensors, **settings, backend='triton')
    some = {'q': tensors['q'][1:, 30:37], 'k': tensors['k'][1:]}
    assert same_bits(block_mass(**some, **settings, q_offset=30, backend='triton'), every[1:, 30:37])


def test_non_finite_keys_affect_their_readers_only(device: torch.device) -> None:
    """A NaN key affects the queries that read it, outside the window or in it, and no others."""
    tensors, settings = make_problem(whole(40), SMALL, device)
    expected = block_mass(**tensors, **settings, backend='triton')
    tensors['k'][:, 30, 0] = torch.nan
    mass = assert_equals_eager(tensors, settings)
    assert mass[:, 30:, 0, 0].isnan().all()
    assert same_bits(mass[:, :30], expected[:, :30])
    assert same_bits(mass[:, :, 1], expected[:, :, 1])


def test_far_logits(device: torch.device) -> None:
    """Logits of thousands, of either sign: a block far below the others has no mass."""
    tensors, settings = make_problem(whole(40), SMALL, device)
    for factor in (1e3, -1e3):
        scaled = {'q': tensors['q'] * factor, 'k': tensors['k']}
        mass = block_mass(**scaled, **settings, backend='triton')
        gold = block_mass(**{name: t.double() for name, t in scaled.items()}, **settings, backend='eager')
        torch.testing.assert_close(mass.double(), gold, rtol=1e-2, atol=1e-3)


def test_nothing_to_read(device: torch.device) -> None:
    for extents in (Extents(1, 3, 0, {}, [0]), Extents(1, 3, 9, {'q_offset': -20}, [9]), Extents(1, 0, 9, {}, [9])):
        mass = assert_equals_eager(*make_problem(extents, SMALL, device))
        assert (mass == 0).all()


def test_offsets_beyond_int32(device: torch.device) -> None:
    tensors, settings = make_problem(whole(33), SMALL, device)
    expected = block_mass(**tensors, **settings, backend='triton')
    for name in tensors:
        far = {**tensors, name: far_apart(tensors[name], 1)}
        assert same_bits(block_mass(**far, **settings, backend='triton'), expected), name


def test_layouts(device: torch.device) -> None:
    tensors, settings = make_problem(whole(21, batch=2), SMALL, device)
    expected = block_mass(**tensors, **settings, backend='triton')
    moved = {name: t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for name, t in tensors.items()}
    assert same_bits(block_mass(**moved, **settings, backend='triton'), expected)


@pytest.mark.quick
@pytest.mark.parametrize('extents', [whole(60, batch=2), packed([30, 0, 31], uncovered=2)])
def test_loss(extents: Extents, device: torch.device) -> None:
    """The loss of random queries, with NaN in the padding."""
    heads, sizes = SMALL, {'compress_block_size': 4, 'compress_stride': 2, 'selection_block_size': 4}
    q, k, _ = make_qkv(extents, heads)
    q_cmp, (k_cmp, _) = make_qkv(extents, heads)[0], make_compressed(extents, heads, 4, 2)
    if extents.packed:
        q[:, -2:], q_cmp[:, -2:] = torch.nan, torch.nan
    settings: dict[str, Any] = {'window_size': (5, 0), 'num_queries': 16, 'seed': 0, **place(extents.where, device)}
    found = {}
    for backend, dtype in (('triton', torch.float32), ('eager', torch.float64)):
        tensors = [place(t, device, dtype).requires_grad_() for t in (q, k, q_cmp, k_cmp)]
        loss = block_score_loss(*tensors, **sizes, **settings, backend=backend)
        found[backend] = [loss, *torch.autograd.grad(loss, tensors[2:])]
    for result, gold in zip(*found.values(), strict=True):
        torch.testing.assert_close(result.double(), gold, rtol=1e-4, atol=1e-6)
