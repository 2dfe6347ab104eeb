"""The decoding kernels against eager: sizes, settings, networks, rows of different lengths, pages, memory layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from native_sparse_attention.inference.paged_cache import PagedLayerCache
from native_sparse_attention.ops.decoding.triton import settings
from tests.support.decoding_problems import (
    Case,
    assert_hold_the_same,
    assert_rest_is_unused,
    check_step,
    check_steps,
    copy_cache,
    decode,
    decode_eagerly,
    make_cache,
    make_layer,
    make_tokens,
)
from tests.support.gpu_decoding_problems import Decoder, Shape, assert_obeys_the_rules
from tests.support.harness import fence
from tests.support.problems import Heads

ONE_HEAD = Heads(2, 1, 16, 16)


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('network', ['mean', 'linear', 'own'])
def test_networks(network: str, dtype: torch.dtype, device: torch.device) -> None:
    check_steps(Case(network=network, dtype=dtype), [23], (1, 3), device)


@pytest.mark.quick
@pytest.mark.parametrize('network', ['mean', 'own'])
def test_many_tokens(network: str, device: torch.device) -> None:
    check_steps(Case(network=network, heads=ONE_HEAD), [19], (16,), device)


@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(
    'heads',
    [Heads(2, 2, 16, 16), Heads(4, 1, 16, 24), Heads(6, 1, 40, 40), Heads(12, 1, 96, 16), Heads(20, 1, 16, 40)],
    ids=repr,
)
def test_heads(heads: Heads, share_group: bool, device: torch.device) -> None:
    if not share_group and heads.heads > 6:
        heads = Heads(6, 2, 16, 96)
    check_steps(Case(heads=heads, share_group=share_group), [34], (2,), device)


def test_rows_of_several_tiles(device: torch.device) -> None:
    check_steps(Case(heads=Heads(6, 1, 16, 16), num_selected=1), [17], (11,), device)


@pytest.mark.parametrize('independent', [False, True])
@pytest.mark.parametrize(
    'blocks',
    [(4, 4, 4), (16, 4, 4), (8, 2, 12), (6, 3, 6), (4, 1, 1), (5, 5, 5), (40, 8, 40), (1, 1, 2), (12, 4, 8)],
    ids=repr,
)
def test_block_sizes(blocks: tuple[int, int, int], independent: bool, device: torch.device) -> None:
    network = 'own' if independent else 'mean'
    case = Case(blocks=blocks, independent=independent, network=network, heads=ONE_HEAD, num_angles=0)
    check_steps(case, [41], (3,), device)


@pytest.mark.parametrize('lengths', [[0, 30], [7, 1], [8, 6], [31, 32]], ids=repr)
def test_rows_of_different_lengths(lengths: list[int], device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD), lengths, (1, 2), device)


def test_without_a_past(device: torch.device) -> None:
    """A prompt and the tokens that follow, without a past."""
    check_steps(Case(heads=ONE_HEAD, pairs=0, network='own'), [0], (1, 5, 2, 1), device)


@pytest.mark.parametrize('num_selected', [0, 1, 2, 20, 70])
def test_number_of_selected_blocks(num_selected: int, device: torch.device) -> None:
    """No selected block, some of the forced ones, all of them, and more than there are blocks."""
    check_steps(Case(heads=ONE_HEAD, num_selected=num_selected, num_local=1), [33], (2,), device)


@pytest.mark.parametrize('forced', [(0, 0), (0, 1), (3, 0), (2, 9)])
def test_forced_blocks(forced: tuple[int, int], device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, num_init=forced[0], num_local=forced[1], num_selected=4), [45], (2,), device)


@pytest.mark.parametrize('window_size', [1, 2, 8, 9, 1000])
@pytest.mark.parametrize('independent', [False, True])
def test_windows(window_size: int, independent: bool, device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, window_size=window_size, independent=independent), [29], (2,), device)


@pytest.mark.parametrize('pairs', [0, 1, 3, 40])
def test_memory_pairs(pairs: int, device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, pairs=pairs), [30, 3], (2,), device, num_splits=2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ('num_angles', 'is_half', 'factor'),
    [(0, False, 1.0), (5, False, 2.0), (5, True, 2.0), (None, False, 2.0), (None, True, 2.0)],
)
@pytest.mark.parametrize('independent', [False, True])
def test_rotary(num_angles: int | None, is_half: bool, factor: float, independent: bool, device: torch.device) -> None:
    pairs: dict[str, Any] = {'num_angles': num_angles, 'is_half': is_half, 'factor': factor}
    case = Case(heads=Heads(2, 1, 40, 16), independent=independent, **pairs)
    check_steps(case, [26], (2,), device)


@pytest.mark.quick
@pytest.mark.parametrize('page_size', [None, 8])
@pytest.mark.parametrize('share_group', [True, False])
def test_rotated_by_the_caller(share_group: bool, page_size: int | None, device: torch.device) -> None:
    case = Case(num_angles=0, rotated=True, share_group=share_group, page_size=page_size)
    check_steps(case, [26, 9], (1, 3), device, num_splits=2)


@pytest.mark.quick
@pytest.mark.parametrize('max_rollback', [0, 40])
def test_rings(max_rollback: int, device: torch.device) -> None:
    """Rings with fewer slots than new tokens, and with more than a row has tokens."""
    case = Case(heads=ONE_HEAD, independent=True, network='own', max_rollback=max_rollback, num_selected=1)
    check_steps(case, [13], (12, 1), device)


@pytest.mark.parametrize('pinned', [(1, 1), (3, 2), (64, 100)], ids=repr)
@pytest.mark.parametrize('blocks', [(8, 4, 8), (16, 4, 4)], ids=repr)
def test_numbers_of_programs(pinned: tuple[int, int], blocks: tuple[int, int, int], device: torch.device) -> None:
    """One program that reads all, several with several tiles, and more programs than tiles."""
    case = Case(heads=Heads(2, 1, 96, 16), blocks=blocks, capacity=300, window_size=70, num_selected=9)
    check_steps(case, [211], (2,), device, num_splits=pinned[0], tiles_of_program=pinned[1])


@pytest.mark.parametrize(
    ('chunk', 'candidates', 'num_selected'),
    [(64, 512, 3), (16, 512, 14), (16, 64, 16), (16, 30, 10), (256, 512, 3), (16, 8, 70)],
)
def test_chunks_of_the_selection(
    chunk: int, candidates: int, num_selected: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial top-k lists are merged at once or in several levels, the last of which may have one list. Chunks have so
    many blocks.
    """
    monkeypatch.setattr(settings, 'CHUNK', chunk)
    monkeypatch.setattr(settings, 'CANDIDATES', candidates)
    settings.make_plan.cache_clear()
    case = Case(heads=ONE_HEAD, blocks=(2, 2, 2), capacity=300, num_selected=num_selected, window_size=3)
    check_steps(case, [295, 90], (1, 1, 2), device)
    settings.make_plan.cache_clear()


@pytest.mark.quick
@pytest.mark.parametrize('page_size', [8, 32])
@pytest.mark.parametrize(
    'case',
    [
        Case(heads=ONE_HEAD),
        Case(heads=ONE_HEAD, num_angles=0, network='own'),
        Case(heads=ONE_HEAD, independent=True, network='own', dtype=torch.float16),
        Case(heads=ONE_HEAD, blocks=(16, 4, 4), capacity=50),
    ],
    ids=['mean', 'without rings', 'independent', 'overlapping far'],
)
def test_pages(case: Case, page_size: int, device: torch.device) -> None:
    """Scattered pages of two block tables, whose entries behind a row name no page."""
    cache = check_steps(Case(**{**vars(case), 'page_size': page_size}), [27, 6], (3, 1), device)
    assert isinstance(cache, PagedLayerCache)


def test_pages_that_do_not_exist(device: torch.device) -> None:
    """Writes to missing pages are dropped, and nothing else changes."""
    case = Case(heads=ONE_HEAD, page_size=8, independent=True)
    layer, cache = make_layer(case, device), make_cache(case, [24, 20], device)
    num_pages = cache.k.shape[0]
    for table, pages in ((cache.block_table, (num_pages, -1)), (cache.block_table_cmp, (2**31 - 1, -(2**31)))):
        assert table is not None
        table[:, 3] = torch.tensor(pages, device=device)
    tokens = make_tokens(case, 2, 6, device)
    before = {name: getattr(cache, name).clone() for name in ('k', 'v', 'k_window', 'v_window', 'k_cmp', 'v_cmp')}
    decode(cache, tokens, layer)
    assert cache.lengths.tolist() == [30, 26]
    # The first row has no page for its tokens; of the second four of six have one.
    changed = {
        name: int((getattr(cache, name).isnan() != t.isnan()).sum()) // t[0, 0].numel() for name, t in before.items()
    }
    assert changed == {'k': 4, 'v': 4, 'k_window': 4, 'v_window': 4, 'k_cmp': 2, 'v_cmp': 2}


@pytest.mark.parametrize('independent', [False, True])
def test_pools_of_any_strides(independent: bool, device: torch.device) -> None:
    """Pools as in serving engines: heads before tokens, keys and values of all branches interleaved, rows far apart."""
    case = Case(heads=Heads(4, 2, 16, 24), page_size=16, independent=independent, network='own')
    layer, cache = make_layer(case, device), make_cache(case, [21, 9], device)
    assert cache.v_cmp is not None
    cache.k = fence(cache.k.transpose(1, 2).contiguous().transpose(1, 2))
    cache.v_cmp = torch.cat((cache.v_cmp, cache.v_cmp * torch.nan), -1)[..., :24]
    if cache.v_window is not None:
        cache.v_window = fence(cache.v_window.transpose(0, 1).contiguous().transpose(0, 1))
    twin = copy_cache(cache)
    check_step(case, cache, twin, make_tokens(case, 2, 3, device), layer)
    assert_rest_is_unused(cache)


def test_pools_whose_last_dimension_is_not_contiguous(device: torch.device) -> None:
    case = Case(page_size=16)
    layer, cache = make_layer(case, device), make_cache(case, [21, 9], device)
    cache.v = torch.stack((cache.v, cache.v * torch.nan), -1)[..., 0]
    with pytest.raises(ValueError, match=r'v has strides .* need neighbours in the last dimension'):
        decode(cache, make_tokens(case, 2, 3, device), layer)
    assert cache.lengths.tolist() == [21, 9]


def test_slices_of_one_projection(device: torch.device) -> None:
    case = Case(independent=True)
    layer, cache = make_layer(case, device), make_cache(case, [26, 3], device)
    sizes = {'q': 4, 'k': 2, 'v': 2, 'raw_k': 2, 'raw_v': 2, 'k_window': 2, 'v_window': 2}
    parts = torch.randn(2, 3, 16 * sum(sizes.values()), device=device).split([16 * n for n in sizes.values()], -1)
    tokens = {name: part.unflatten(-1, (-1, 16)) for name, part in zip(sizes, parts, strict=True)}
    tokens['gates'] = torch.rand(2, 3, 3, 8, device=device)[..., ::2].transpose(2, 3)
    layer['positions'] = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in layer['positions'])
    layer['mem_kv'] = tuple(t.expand(2, 3, 16) for t in layer['mem_kv'])
    check_step(case, cache, copy_cache(cache), tokens, layer)


def test_freqs_of_any_stride(device: torch.device) -> None:
    case = Case(heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [26, 3], device)
    layer['freqs'] = torch.rand(16, device=device)[::2]
    check_step(case, cache, copy_cache(cache), make_tokens(case, 2, 3, device), layer)


def test_one_token_for_all_rows(device: torch.device) -> None:
    """Tokens expanded with stride 0, and features of q that are not contiguous."""
    case = Case(heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [26, 3], device)
    tokens = {name: t.expand(2, -1, -1, -1) for name, t in make_tokens(case, 1, 2, device).items()}
    tokens['q'] = tokens['q'].transpose(2, 3).contiguous().transpose(2, 3)
    check_step(case, cache, copy_cache(cache), tokens, layer)


@pytest.mark.parametrize('gate_dtype', [torch.float32, torch.float16])
def test_parameters_of_another_dtype(gate_dtype: torch.dtype, device: torch.device) -> None:
    """Parameters stay float32, as under autocast."""
    case = Case(heads=ONE_HEAD, dtype=torch.float16, pairs=2)
    layer, cache = make_layer(case, device), make_cache(case, [26], device)
    layer['positions'] = tuple(t.float() for t in layer['positions'])
    tokens = make_tokens(case, 1, 2, device)
    tokens['gates'] = tokens['gates'].to(gate_dtype)
    check_step(case, cache, copy_cache(cache), tokens, layer)


@pytest.mark.parametrize('num_angles', [0, None])
def test_cache_of_another_dtype(num_angles: int | None, device: torch.device) -> None:
    """With float32 tokens and parameters and a float16 cache, outputs match eager and have its dtype."""
    case = Case(heads=ONE_HEAD, dtype=torch.float16, network='linear', num_angles=num_angles)
    cache = make_cache(case, [26], device)
    twin = copy_cache(cache)
    case = Case(heads=ONE_HEAD, network='linear', num_angles=num_angles)
    layer, tokens = make_layer(case, device), make_tokens(case, 1, 2, device)
    layer['mem_kv'] = tuple(t.half() for t in layer['mem_kv'])
    expected = decode_eagerly(twin, tokens, layer)
    out, _ = decode(cache, tokens, layer)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
    assert_hold_the_same(Case(dtype=torch.float16, num_angles=num_angles), cache, twin)


@pytest.mark.parametrize('sign', [1, -1])
def test_large_logits(sign: int, device: torch.device) -> None:
    """Logits of ±6e4: all weights but the largest vanish, and nothing overflows."""
    case = Case(heads=ONE_HEAD, num_angles=0)
    layer, cache = make_layer(case, device), make_cache(case, [27, 4], device)
    tokens = make_tokens(case, 2, 2, device)
    assert cache.k_cmp is not None
    logits = torch.einsum('b t h d, b s k d -> b h t s k', tokens['q'], cache.k_cmp.nan_to_num())
    layer['scale'] = sign * 6e4 / float(logits.abs().max())
    check_step(case, cache, copy_cache(cache), tokens, layer, num_splits=2)


@pytest.mark.parametrize('page_size', [None, 16])
def test_rules_of_the_gpu_tests(page_size: int | None, device: torch.device) -> None:
    """The checks of the GPU tests run here too, so that their code is tested without a GPU."""
    sizes: dict[str, Any] = {'capacity': 64, 'num_tokens': 2, 'group': 2, 'kv_heads': 1, 'head_dim': 16, 'value_dim': 8}
    shape = Shape((40, 33, 0), **sizes, sizes=(8, 4, 8, 3, 10), dtype=torch.float32, page_size=page_size)
    assert_obeys_the_rules(Decoder(shape, device), steps=2)
