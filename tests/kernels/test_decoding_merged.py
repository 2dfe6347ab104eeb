"""The decoding kernels in merged mode against eager: selected blocks and window in one softmax, each key once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.compress import MeanPool
from tests.support.decoding_problems import (
    Case,
    check_steps,
    copy_cache,
    decode,
    make_cache,
    make_layer,
    make_tokens,
)
from tests.support.gpu_decoding_problems import Decoder, Shape, assert_obeys_the_rules
from tests.support.harness import same_bits
from tests.support.problems import Heads

ONE_HEAD = Heads(2, 1, 16, 16)
MODES = pytest.mark.parametrize('merged', ['gate', 'scores'])


@pytest.mark.quick
@MODES
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('network', ['mean', 'linear', 'own'])
def test_networks(network: str, dtype: torch.dtype, merged: str, device: torch.device) -> None:
    check_steps(Case(network=network, dtype=dtype, merged=merged), [23], (1, 3), device)


@MODES
@pytest.mark.parametrize('share_group', [True, False])
@pytest.mark.parametrize(
    'heads',
    [Heads(2, 2, 16, 16), Heads(4, 1, 16, 24), Heads(6, 1, 40, 40), Heads(8, 1, 16, 16), Heads(20, 1, 96, 40)],
    ids=repr,
)
def test_heads(heads: Heads, share_group: bool, merged: str, device: torch.device) -> None:
    if not share_group and heads.heads > 8:
        heads = Heads(6, 2, 16, 96)
    check_steps(Case(heads=heads, share_group=share_group, merged=merged), [34], (2,), device)


@MODES
@pytest.mark.parametrize('num_tokens', [2, 16])
@pytest.mark.parametrize('lengths', [[0, 30], [7, 1], [31, 32]], ids=repr)
def test_rows_of_different_lengths(lengths: list[int], num_tokens: int, merged: str, device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, merged=merged, capacity=64), lengths, (1, num_tokens), device)


@MODES
@pytest.mark.parametrize('num_selected', [0, 1, 2, 20])
def test_number_of_selected_blocks(num_selected: int, merged: str, device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, num_selected=num_selected, num_local=1, merged=merged), [33], (2,), device)


@MODES
@pytest.mark.parametrize('forced', [(0, 0), (3, 0), (2, 9)])
@pytest.mark.parametrize('window_size', [1, 2, 8, 9, 1000])
def test_windows(window_size: int, forced: tuple[int, int], merged: str, device: torch.device) -> None:
    """Windows inside one block, over several blocks that are selected or not, and over everything."""
    settings: dict[str, Any] = {'num_init': forced[0], 'num_local': forced[1], 'num_selected': 4}
    check_steps(Case(heads=ONE_HEAD, window_size=window_size, merged=merged, **settings), [45], (2,), device)


@pytest.mark.quick
@pytest.mark.parametrize('merged', ['gate', 'scores', ''])
@pytest.mark.parametrize(('heads', 'num_recent'), [(ONE_HEAD, 11), (Heads(8, 1, 16, 16), 3), (ONE_HEAD, 2**31)])
def test_selection_before_a_window(heads: Heads, num_recent: int, merged: str, device: torch.device) -> None:
    """Rows with candidates, with candidates from the second token on, and without any."""
    for num_local in (0, 2):
        case = Case(heads=heads, merged=merged, num_recent=num_recent, num_local=num_local, num_selected=4)
        check_steps(case, [45, 10, 0], (2,), device)


@MODES
@pytest.mark.parametrize('blocks', [(4, 4, 4), (16, 4, 4), (6, 3, 6), (40, 8, 40), (12, 4, 8)], ids=repr)
def test_block_sizes(blocks: tuple[int, int, int], merged: str, device: torch.device) -> None:
    check_steps(Case(blocks=blocks, heads=ONE_HEAD, num_angles=0, merged=merged), [41], (3,), device)


@MODES
@pytest.mark.parametrize('pairs', [0, 3])
@pytest.mark.parametrize('rotated', [True, False])
def test_memory_pairs(rotated: bool, pairs: int, merged: str, device: torch.device) -> None:
    case = Case(heads=ONE_HEAD, pairs=pairs, merged=merged, rotated=rotated, num_angles=0 if rotated else None)
    check_steps(case, [30, 3], (2,), device, num_splits=2)


@MODES
@pytest.mark.parametrize('pinned', [(1, 1), (3, 2), (64, 100)], ids=repr)
@pytest.mark.parametrize('blocks', [(8, 4, 8), (16, 4, 4)], ids=repr)
def test_numbers_of_programs(
    pinned: tuple[int, int], blocks: tuple[int, int, int], merged: str, device: torch.device
) -> None:
    """One program that reads all, several with several tiles, and programs that find nothing to read."""
    case = Case(heads=Heads(2, 1, 96, 16), blocks=blocks, capacity=300, window_size=70, num_selected=9, merged=merged)
    check_steps(case, [211, 5], (2,), device, num_splits=pinned[0], tiles_of_program=pinned[1])


@MODES
@pytest.mark.parametrize('network', ['mean', 'own'])
def test_pages(network: str, merged: str, device: torch.device) -> None:
    check_steps(Case(heads=ONE_HEAD, network=network, merged=merged, page_size=8), [27, 6], (3, 1), device)


@pytest.mark.quick
@pytest.mark.parametrize('num_angles', [0, None])
@pytest.mark.parametrize('page_size', [None, 8])
@pytest.mark.parametrize('window_size', [11, 3])
def test_window_alone(window_size: int, page_size: int | None, num_angles: int | None, device: torch.device) -> None:
    """Without selected blocks and compressed keys, where three launches remain."""
    case = Case(merged='window', num_selected=0, window_size=window_size, page_size=page_size, num_angles=num_angles)
    check_steps(case, [29, 0], (1, 4), device, tiles_of_program=1)


@pytest.mark.parametrize(('num_selected', 'window_size'), [(20, 3), (2, 99), (20, 99)])
def test_dense_where_everything_is_read(num_selected: int, window_size: int, device: torch.device) -> None:
    """A key that is in the window and in a selected block counts once."""
    num_recent = window_size if num_selected == 20 else 0
    case = Case(
        merged='scores', num_angles=0, num_selected=num_selected, window_size=window_size, num_recent=num_recent
    )
    layer, cache = make_layer(case, device), make_cache(case, [37], device)
    tokens = make_tokens(case, 1, 1, device)
    out, _ = decode(cache, tokens, layer)
    k, v = (t[:, :38].transpose(1, 2) for t in (cache.k, cache.v))
    expected = F.scaled_dot_product_attention(tokens['q'].transpose(1, 2), k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize('page_size', [None, 8])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_output_gate(dtype: torch.dtype, page_size: int | None, device: torch.device) -> None:
    check_steps(Case(merged='output gate', dtype=dtype, page_size=page_size), [29, 3], (1, 3), device)


@MODES
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_later_tokens_change_nothing(merged: str, value: float, device: torch.device) -> None:
    case = Case(merged=merged)
    layer, cache = make_layer(case, device), make_cache(case, [29], device)
    other, tokens = copy_cache(cache), make_tokens(case, 1, 3, device)
    expected, _ = decode(cache, tokens, layer)
    changed = {name: t if t is None else t.clone() for name, t in tokens.items()}
    for t in changed.values():
        if t is not None:
            t[:, 2] = value
    out, _ = decode(other, changed, layer)
    assert same_bits(out[:, :2], expected[:, :2])


@MODES
@pytest.mark.parametrize('page_size', [None, 16])
def test_rules_of_the_gpu_tests(page_size: int | None, merged: str, device: torch.device) -> None:
    """The checks of the GPU tests run here too, so that their code is tested without a GPU."""
    sizes: dict[str, Any] = {'capacity': 64, 'num_tokens': 2, 'group': 2, 'kv_heads': 1, 'head_dim': 16, 'value_dim': 8}
    options: dict[str, Any] = {'dtype': torch.float32, 'page_size': page_size, 'merged': merged}
    shape = Shape((40, 33, 0), **sizes, sizes=(8, 4, 8, 3, 10), **options)
    assert_obeys_the_rules(Decoder(shape, device), steps=2)


@pytest.mark.quick
@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'compressed_output': False},
        {'compress_mlp': MeanPool()},
        {'select_before_window': True},
        {'output_gate': True},
    ],
    ids=str,
)
@torch.no_grad()
def test_layers_decode_by_the_kernels(settings: dict[str, Any], device: torch.device) -> None:
    """Steps of a layer equal its full forward."""
    sizes = (32, 16, 4, 6, 8, 4, 8, 4)
    layer = SparseAttention(*sizes, kv_heads=2, causal=True, merge_window=True, backend='triton', **settings)
    layer = layer.to(device)
    x = torch.randn(2, 30, 32, device=device)
    cache = layer.init_cache(2, 30)
    assert layer.decodes_fixed(cache, 1)
    parts = [layer(part, cache=cache) for part in x.split([20, 1, 3, 1, 5], 1)]
    layer.backend = 'eager'
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-4, atol=1e-5)
