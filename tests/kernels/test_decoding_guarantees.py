"""Guarantees of decoding in Triton: block selection, bits, writes, and data that must not be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.ops import compressed_attention, select_blocks
from tests.support.decoding_problems import (
    Case,
    assert_hold_the_same,
    assert_rest_is_unused,
    check_step,
    copy_cache,
    decode,
    decode_eagerly,
    make_cache,
    make_layer,
    make_tokens,
)
from tests.support.harness import same_bits
from tests.support.problems import Heads

ONE_HEAD = Heads(2, 1, 16, 16)
# How the work is shared, so that it does not depend on the batch.
PINNED = {'num_splits': 2, 'tiles_of_program': 1}


def select(case: Case, cache: LayerCache, tokens: dict[str, Tensor], layer: dict[str, Any]) -> Tensor:
    """Return the blocks that `select_blocks` selects in float64 after a step: int32 `[B, T, H or HQ, n]`."""
    num_tokens = tokens['q'].shape[1]
    names = ('compress_block_size', 'compress_stride', 'selection_block_size')
    k_cmp, v_cmp = cache.read_compressed(num_compressed_blocks(cache.max_length, *case.blocks[:2]))
    q, k_cmp, v_cmp = tokens['q'].double(), k_cmp.double(), v_cmp.double()
    where = {'seqlen_k': cache.max_length, 'q_offset': cache.lengths - num_tokens, 'seqlens_k': cache.lengths}
    mem_kv = None if layer['mem_kv'] is None else tuple(t.double() for t in layer['mem_kv'])
    sizes = {'block_size': case.blocks[0], 'stride': case.blocks[1]}
    scale = layer.get('scale')
    _, lse = compressed_attention(q, k_cmp, v_cmp, **sizes, mem_kv=mem_kv, scale=scale, **where, backend='eager')
    forced = {name: layer[name] for name in ('num_selected', 'num_init', 'num_local', 'share_group')}
    blocks = dict(zip(names, case.blocks, strict=True))
    return select_blocks(q, k_cmp, lse, **blocks, **forced, scale=scale, **where, backend='eager')


@pytest.mark.quick
@pytest.mark.parametrize(
    'case',
    [
        Case(num_selected=4),
        Case(num_selected=4, share_group=False),
        Case(blocks=(16, 4, 4), num_selected=6, share_group=False),
        Case(blocks=(4, 4, 4), num_selected=5, pairs=0, num_init=0, num_local=1),
        Case(blocks=(6, 3, 6), num_selected=4, pairs=0, dtype=torch.float16),
        Case(heads=Heads(8, 1, 16, 16), blocks=(2, 2, 2), num_selected=12, capacity=200),
        Case(heads=Heads(8, 4, 16, 16), blocks=(4, 2, 2), num_selected=48, capacity=200, share_group=False),
        Case(heads=Heads(20, 1, 16, 16), num_selected=4, page_size=16),
    ],
    ids=[
        *('shared', 'of each head', 'overlapping far', 'one local block', 'float16', 'several chunks'),
        *('handed on between chunks', 'many heads'),
    ],
)
def test_selected_blocks(case: Case, device: torch.device) -> None:
    """Random scores differ by more than their roundings. Large logits give the parts of a row different weights."""
    lengths = [case.capacity - 3, 9]
    layer, cache = make_layer(case, device) | {'scale': 1.0}, make_cache(case, lengths, device)
    tokens = make_tokens(case, 2, 2, device)
    _, chosen = decode(cache, tokens, layer, num_splits=3)
    assert chosen is not None
    assert chosen.dtype == torch.int32
    expected = select(case, cache, tokens, layer)
    assert torch.equal(chosen.sort(-1).values, expected.sort(-1).values)
    ordered = chosen.sort(-1).values
    assert ((ordered[..., 1:] > ordered[..., :-1]) | (ordered[..., 1:] == -1)).all(), 'a block is chosen twice'


@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(
    ('blocks', 'capacity'), [((4, 4, 4), 80), ((8, 4, 8), 80), ((16, 4, 4), 80), ((2, 2, 2), 300)], ids=repr
)
def test_ties_go_to_the_lower_block(
    blocks: tuple[int, int, int], capacity: int, share_group: bool, device: torch.device
) -> None:
    """All keys are 0, so all logits are, and inner blocks have equal scores."""
    case = Case(blocks=blocks, capacity=capacity, num_selected=4, num_init=1, num_local=1, share_group=share_group)
    layer, cache = make_layer(case, device), make_cache(case, [capacity - 4], device)
    assert cache.k_cmp is not None
    cache.k_cmp.masked_fill_(~cache.k_cmp.isnan(), 0)
    tokens = make_tokens(case, 1, 1, device)
    tokens['q'].round_()  # products are exact in any order of summation
    _, chosen = decode(cache, tokens, layer, num_splits=2)
    assert chosen is not None
    own = (capacity - 4) // blocks[2]
    # Only blocks that overlap the start have another score; of the rest the lowest are selected.
    first = next(block for block in range(1, own) if block * blocks[2] >= blocks[0] - blocks[1])
    assert chosen.sort(-1).values.flatten(0, 2).tolist() == [[0, first, first + 1, own]] * chosen.shape[2]


@pytest.mark.parametrize('case', [Case(), Case(blocks=(16, 4, 4), independent=True, page_size=8)], ids=['', 'paged'])
def test_a_row_does_not_depend_on_its_neighbours(case: Case, device: torch.device) -> None:
    layer, cache = make_layer(case, device), make_cache(case, [31, 12, 45], device)
    tokens = make_tokens(case, 3, 2, device)
    alone = make_cache(Case(**{**vars(case), 'page_size': None}), [12], device)
    twin = copy_cache(cache)
    for name in ('k', 'v', 'k_window', 'v_window', 'k_cmp', 'v_cmp', 'raw_k', 'raw_v'):
        if getattr(twin, name) is not None:
            getattr(alone, name).copy_(getattr(twin, name)[1:2])
    together, _ = decode(cache, tokens, layer, **PINNED)
    out, _ = decode(alone, {name: t[1:2] for name, t in tokens.items()}, layer, **PINNED)
    assert same_bits(together[1:2], out)


def test_nan_stays_in_its_row(device: torch.device) -> None:
    case = Case()
    layer, cache = make_layer(case, device), make_cache(case, [31, 12], device)
    clean = copy_cache(cache)
    tokens = make_tokens(case, 2, 2, device)
    expected, _ = decode(clean, tokens, layer)
    for tensor in (cache.k, cache.v, cache.k_cmp, cache.v_cmp, cache.raw_k):
        assert tensor is not None
        tensor[0] = torch.nan
    out, _ = decode(cache, tokens, layer)
    assert same_bits(out[1], expected[1])
    assert out[0].isnan().all()


@pytest.mark.parametrize('case', [Case(), Case(independent=True, network='own')], ids=['', 'independent'])
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_later_tokens_change_nothing(case: Case, value: float, device: torch.device) -> None:
    """Non-finite later tokens that complete a compressed block change nothing either."""
    layer, cache = make_layer(case, device), make_cache(case, [29], device)
    other = copy_cache(cache)
    tokens = make_tokens(case, 1, 3, device)
    expected, _ = decode(cache, tokens, layer, **PINNED)
    changed = {name: t.clone() for name, t in tokens.items()}
    for name in changed:
        changed[name][:, 2] = value
    out, _ = decode(other, changed, layer, **PINNED)
    assert same_bits(out[:, :2], expected[:, :2])


@pytest.mark.quick
@pytest.mark.parametrize(
    'case',
    [Case(heads=ONE_HEAD), Case(heads=ONE_HEAD, independent=True), Case(heads=ONE_HEAD, page_size=16)],
    ids=['', 'own', 'paged'],
)
def test_tokens_beyond_the_capacity_are_dropped(case: Case, device: torch.device) -> None:
    """As in a graph replay, the host's bound reports room and the lengths on the device do not."""
    lengths = [case.capacity - 2, 20, case.capacity]
    layer, cache = make_layer(case, device), make_cache(case, lengths, device)
    twin, tokens = copy_cache(cache), make_tokens(case, 3, 4, device)
    cache.max_length = cache._peak = 0
    out, _ = decode(cache, tokens, layer)
    assert cache.lengths.tolist() == cache._peaks.tolist() == [case.capacity, 24, case.capacity]
    assert cache.max_length == 4
    assert_rest_is_unused(cache)
    # Tokens that fit have the results of a step without the others.
    for row, count in ((0, 2), (1, 4)):
        single = make_cache(Case(**{**vars(case), 'page_size': None}), [lengths[row]], device)
        for name in ('k', 'v', 'k_window', 'v_window', 'k_cmp', 'v_cmp', 'raw_k', 'raw_v'):
            if getattr(twin, name) is not None:
                getattr(single, name).copy_(getattr(twin, name)[row : row + 1])
        kept = {name: t[row : row + 1, :count] for name, t in tokens.items()}
        expected = decode_eagerly(single, kept, layer)
        torch.testing.assert_close(out[row : row + 1, :count], expected, rtol=1e-5, atol=1e-5)
        assert same_bits(copy_cache(cache).v[row : row + 1], single.v)
        for ring in ('raw_k', 'raw_v'):
            if getattr(cache, ring) is not None:
                assert same_bits(getattr(cache, ring)[row : row + 1], getattr(single, ring))


@pytest.mark.parametrize(
    'case',
    [Case(heads=ONE_HEAD, num_angles=0), Case(heads=ONE_HEAD, independent=True, network='own', page_size=8)],
    ids=['', 'independent'],
)
def test_decoding_again_after_a_rollback(case: Case, device: torch.device) -> None:
    layer, cache = make_layer(case, device), make_cache(case, [30, 13], device)
    draft, tokens = make_tokens(case, 2, 4, device), make_tokens(case, 2, 4, device)
    twin = copy_cache(cache)
    expected, _ = decode(twin, tokens, layer, **PINNED)
    decode(cache, draft, layer, **PINNED)
    cache.crop(cache.lengths - 4)
    out, _ = decode(cache, tokens, layer, **PINNED)
    assert same_bits(out, expected)
    assert_hold_the_same(case, cache, twin)
    assert cache._peaks.tolist() == [34, 17]
    cache.crop(cache.lengths - 2)
    decode(cache, make_tokens(case, 2, 1, device), layer, **PINNED)
    assert cache.lengths.tolist() == [33, 16]
    assert cache._peaks.tolist() == [34, 17]


def test_the_same_bits_every_time(device: torch.device) -> None:
    """The workspace of earlier steps, with other numbers of tokens, leaves no trace."""
    case = Case(blocks=(16, 4, 4), num_selected=5, pairs=0)
    layer, past = make_layer(case, device), make_cache(case, [21, 2], device)
    cache, tokens = copy_cache(past), make_tokens(case, 2, 2, device)
    expected, chosen = decode(cache, tokens, layer)
    assert chosen is not None
    for num_tokens in (3, 2):
        _restore(cache, past)
        other = make_tokens(case, 2, num_tokens, device)
        other['v'] *= torch.nan
        decode(cache, other, layer)
    _restore(cache, past)
    out, again = decode(cache, tokens, layer)
    assert again is not None
    assert same_bits(out, expected)
    assert torch.equal(again, chosen)


def _restore(cache: LayerCache, past: LayerCache) -> None:
    """Restore in place, so that the workspace stays."""
    pairs = zip((*cache._tensors(), cache.lengths), (*past._tensors(), past.lengths), strict=True)
    for tensor, source in pairs:
        tensor.copy_(source)
    cache.max_length = past.max_length


def test_a_cache_that_grows(device: torch.device) -> None:
    case = Case(heads=ONE_HEAD, capacity=16, network='own')
    layer, cache = make_layer(case, device), make_cache(case, [14, 9], device)
    twin = copy_cache(cache)
    cache.grows = twin.grows = True
    for num_tokens in (1, 3, 1):
        check_step(case, cache, twin, make_tokens(case, 2, num_tokens, device), layer)
    assert cache.capacity == 32


@pytest.mark.parametrize('num_tokens', [0, 17])
def test_numbers_of_tokens_that_the_kernels_do_not_take(num_tokens: int, device: torch.device) -> None:
    """Steps of such numbers of tokens run the ops of `nsa`."""
    case = Case(heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [13], device)
    twin, tokens = copy_cache(cache), make_tokens(case, 1, num_tokens, device)
    expected = decode_eagerly(twin, tokens, layer)
    with torch.no_grad():
        out = nsa_decode(**tokens, cache=cache, **layer, backend='triton')
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert_hold_the_same(case, cache, twin)


def test_counts_go_through_the_ops(device: torch.device) -> None:
    case = Case(heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [13, 0], device)
    twin, tokens = copy_cache(cache), make_tokens(case, 2, 3, device)
    counts = torch.tensor([3, 1], dtype=torch.int32, device=device)
    with torch.no_grad():
        expected, out = (
            nsa_decode(**tokens, cache=of, **layer, counts=counts, backend=backend)
            for of, backend in ((twin, 'eager'), (cache, 'triton'))
        )
    assert not cache.session.workspace
    torch.testing.assert_close(out[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[1, :1], expected[1, :1], rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [16, 1]


def test_a_full_cache_is_left_alone(device: torch.device) -> None:
    case = Case(heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [case.capacity - 1], device)
    twin = copy_cache(cache)
    with pytest.raises(ValueError, match=f'holds up to {case.capacity - 1} tokens a row and gets 2 more'):
        decode(cache, make_tokens(case, 1, 2, device), layer)
    assert_hold_the_same(case, cache, twin)
    assert_rest_is_unused(cache)
