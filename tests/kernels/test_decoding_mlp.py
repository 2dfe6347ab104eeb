"""φ of decoding steps where it is an MLP: the kernels against the networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import SparseAttention
from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP, MeanPool, MeanResidualMLP
from native_sparse_attention.ops._triton.support import is_interpreted
from native_sparse_attention.ops.decoding.triton import launch_cache, mlp, op, settings
from tests.support.decoding_problems import (
    MLPS,
    Case,
    check_step,
    check_steps,
    copy_cache,
    decode,
    make_cache,
    make_layer,
    make_tokens,
)
from tests.support.harness import fence, same_bits
from tests.support.mlp_problems import check_compress, make_mlps, weights_of
from tests.support.problems import Heads

ONE_HEAD, TWO_HEADS = Heads(2, 1, 16, 16), Heads(2, 2, 16, 24)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the launched kernels."""
    names: list[str] = []
    launch = launch_cache.launch

    def record(kernel: Any, *args: Any, **meta: Any) -> Any:
        names.append(kernel.fn.__name__)
        return launch(kernel, *args, **meta)

    monkeypatch.setattr(launch_cache, 'launch', record)
    return names


@pytest.mark.quick
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('network', MLPS)
def test_networks(network: str, dtype: torch.dtype, device: torch.device, launched: list[str]) -> None:
    """Steps that complete blocks of some rows, of none, and several blocks of a row."""
    check_steps(Case(network=network, dtype=dtype, heads=TWO_HEADS), [26, 11, 3], (1, 1, 6), device)
    assert launched.count('linear_kernel') == 6


@pytest.mark.quick
@pytest.mark.skipif(not is_interpreted(), reason='a compiled kernel cannot be watched')
@pytest.mark.parametrize(
    ('lengths', 'complete'), [([24, 12, 3], 0), ([24, 11, 3], 1), ([7, 27, 11], 3)], ids=['none', 'some', 'all']
)
def test_weights_are_read_only_for_complete_blocks(
    lengths: list[int], complete: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the complete blocks of which products are computed."""
    case = Case(network='mlp', heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, lengths, device)
    tokens, columns = make_tokens(case, 3, 1, device), []
    multiply = mlp._multiply

    def record(layer: Any, unit: Any, features: Any, of_tile: Any, *sizes: Any) -> Any:
        columns.append(int(of_tile[3].handle.data.sum()))
        return multiply(layer, unit, features, of_tile, *sizes)

    monkeypatch.setattr(mlp, '_multiply', record)
    check_step(case, cache, copy_cache(cache), tokens, layer)
    assert set(columns) == ({complete} if complete else set())


def test_a_step_that_completes_no_block_reads_no_weight(device: torch.device) -> None:
    case = Case(network='mlp', heads=ONE_HEAD)
    layer, caches = make_layer(case, device), [make_cache(case, [24, 12], device)]
    caches.append(copy_cache(caches[0]))
    tokens = make_tokens(case, 2, 1, device)
    expected, _ = decode(caches[0], tokens, layer)
    for network in layer['networks']:
        for parameter in network.parameters():
            parameter.fill_(torch.nan)
    out, _ = decode(caches[1], tokens, layer)
    assert out.isfinite().all()
    assert same_bits(out, expected)


def test_rows_of_several_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted 16 at a time, and their complete blocks fill more than one tile."""
    monkeypatch.setattr(op, 'ROWS_COUNTED', 16)
    monkeypatch.setattr(settings, 'LINEAR_ROWS_FLOAT32', 16)
    settings.linear_tile.cache_clear()
    case = Case(network='mlp', heads=Heads(1, 1, 16, 16), num_selected=1, window_size=3)
    check_steps(case, [(5 * row) % 29 for row in range(37)], (3,), device)
    settings.linear_tile.cache_clear()


@pytest.mark.parametrize('page_size', [None, 8])
@pytest.mark.parametrize(
    'case',
    [
        Case(network='mlp', heads=ONE_HEAD, num_angles=0),
        Case(network='mlp', heads=ONE_HEAD, independent=True),
        Case(network='mean and mlp', heads=ONE_HEAD, merged='scores'),
        Case(network='mlp of each head', heads=TWO_HEADS, merged='gate'),
        Case(network='mlp', heads=ONE_HEAD, blocks=(6, 1, 6), num_selected=2),
        Case(network='mlp', heads=ONE_HEAD, blocks=(5, 5, 5)),
    ],
    ids=['without rings', 'independent', 'scores', 'merged', 'stride 1', 'side by side'],
)
def test_caches(case: Case, page_size: int | None, device: torch.device, launched: list[str]) -> None:
    if page_size is not None:
        page_size = case.blocks[2] * 2
    check_steps(Case(**{**vars(case), 'page_size': page_size}), [27, 6], (3, 1), device)
    assert launched.count('linear_kernel') == 4


def test_one_network_for_keys_and_values(device: torch.device, launched: list[str]) -> None:
    case = Case(network='mlp', heads=ONE_HEAD)
    layer, cache = make_layer(case, device), make_cache(case, [27, 6], device)
    layer['networks'] = layer['networks'][:1] * 2
    check_step(case, cache, copy_cache(cache), make_tokens(case, 2, 2, device), layer)
    assert launched.count('linear_kernel') == 2


@pytest.mark.parametrize('network', ['mlp', 'mlp of each head'])
def test_weights_of_any_strides(network: str, device: torch.device, launched: list[str]) -> None:
    case = Case(network=network, heads=TWO_HEADS)
    layer, cache = make_layer(case, device), make_cache(case, [27, 6], device)
    for parameter in (p for network in layer['networks'] for p in network.parameters()):
        apart = torch.stack((parameter, parameter * torch.nan), -1)[..., 0]
        parameter.data = apart.transpose(-1, 0).contiguous().transpose(-1, 0) if parameter.dim() == 3 else apart
    check_step(case, cache, copy_cache(cache), make_tokens(case, 2, 2, device), layer)
    assert launched.count('linear_kernel') == 2


@torch.no_grad()
def test_steps_equal_the_full_forward(device: torch.device, launched: list[str]) -> None:
    """A layer with its default φ: one token at a time after prompts of different lengths."""
    sizes: dict[str, Any] = {
        'sliding_window_size': 5,
        'compress_block_size': 4,
        'compress_block_sliding_stride': 2,
        'selection_block_size': 4,
        'num_selected_blocks': 4,
    }
    layer = SparseAttention(16, 8, 2, kv_heads=1, causal=True, backend='eager', **sizes).to(device)
    x, lengths = torch.randn(2, 17, 16, device=device), torch.tensor([11, 8], device=device)
    cache, columns = layer.init_cache(2, 17), torch.arange(17, device=device)
    layer(x[:, :11], columns[:11] < lengths[:, None], cache=cache)
    index = lengths[:, None] + columns[:6]
    rows = torch.arange(2, device=device)[:, None]
    expected = layer(x)[rows, index]
    layer.backend = 'triton'
    out = torch.cat([layer(token, cache=cache) for token in x[rows, index].split(1, 1)], 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert launched.count('linear_kernel') == 12


SIZES = [(64, 32, 0.2), (24, 12, 1.7), (96, 40, 0.03)]


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize('make', [CompressMLP, MeanResidualMLP, GroupedMLP])
@pytest.mark.parametrize('sizes', SIZES, ids=repr)
@torch.no_grad()
def test_rules(
    sizes: tuple[int, int, float], make: Callable[..., nn.Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Layers of several tiles, whose last ones are partly filled, and rows that hold NaN or infinity, by the error
    rules.
    """
    dim, block_size, expand = sizes
    networks = make_mlps(make, (dim, dim + 8), block_size, 2, expand, dtype, device)
    lengths, num_tokens = [block_size - 1, 0, 2 * block_size - 1, 1, 3 * block_size - 2], block_size // 2 + 1
    blocks = tuple(fence(torch.randn(5, 2, 2, block_size, d).to(device, dtype)) for d in (dim, dim + 8))
    for b, spoiled in zip(blocks, (torch.nan, torch.inf), strict=True):
        b[2, 0, 0, 1, 3] = spoiled
        b[1], b[3] = torch.nan, torch.inf  # in blocks that are not complete
    check_compress(networks, blocks, lengths, num_tokens, [2, 0, 2, 0, 1])


class Derived(CompressMLP):
    def forward(self, blocks: Any) -> Tensor:
        return 2 * super().forward(blocks)


def hooked(dim: int) -> nn.Module:
    network = CompressMLP(dim, 4)
    network.to_hidden.register_forward_hook(lambda *_: None)
    return network


def without_a_bias(dim: int) -> nn.Module:
    network = CompressMLP(dim, 4)
    network.to_out = nn.Linear(4 * dim, dim, bias=False)
    return network


CALLED: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    'a mean beside': (lambda dim: CompressMLP(dim, 4), lambda dim: MeanPool()),
    'of two classes': (lambda dim: CompressMLP(dim, 4), lambda dim: MeanResidualMLP(dim, 4)),
    'weights of each head beside': (lambda dim: GroupedMLP(dim, 4, 2), lambda dim: CompressMLP(dim, 4)),
    'a subclass': (lambda dim: Derived(dim, 4), lambda dim: Derived(dim, 4)),
    'a hook': (lambda dim: CompressMLP(dim, 4), hooked),
    'no bias': (without_a_bias, without_a_bias),
    'another dtype': (lambda dim: CompressMLP(dim, 4), lambda dim: CompressMLP(dim, 4).half()),
    'another device': (lambda dim: CompressMLP(dim, 4), lambda dim: CompressMLP(dim, 4).to('meta')),
    'another block size': (lambda dim: CompressMLP(dim, 8), lambda dim: CompressMLP(dim, 8)),
    'another head size': (lambda dim: CompressMLP(dim, 4), lambda dim: CompressMLP(dim, 4, dim_out=2 * dim)),
    'another number of heads': (lambda dim: GroupedMLP(dim, 4, 3), lambda dim: GroupedMLP(dim, 4, 3)),
}


@pytest.mark.parametrize('name', CALLED)
def test_networks_that_are_called(name: str, device: torch.device) -> None:
    networks = tuple(make(8).to(None if name == 'another device' else device) for make in CALLED[name])
    blocks = (torch.zeros(1, 1, 2, 4, 8, device=device),) * 2
    assert weights_of(networks, blocks) is None


def test_networks_are_called_where_autocast_casts_their_weights(device: torch.device) -> None:
    networks = tuple(CompressMLP(8, 4).to(device) for _ in range(2))
    blocks = (torch.zeros(1, 1, 2, 4, 8, device=device),) * 2
    assert weights_of(networks, blocks) is not None
    with torch.autocast(device.type, torch.bfloat16):
        assert weights_of(networks, blocks) is None
    with torch.autocast(device.type, enabled=False):
        assert weights_of(networks, blocks) is not None


def test_a_hook_sees_every_step(device: torch.device, launched: list[str]) -> None:
    case, seen = Case(network='mlp', heads=ONE_HEAD), []
    layer, cache = make_layer(case, device), make_cache(case, [27, 6], device)
    twin = copy_cache(cache)
    decode(cache, make_tokens(case, 2, 1, device), layer)
    handle = layer['networks'][0].to_out.register_forward_hook(lambda *_: seen.append(1))
    decode(cache, make_tokens(case, 2, 1, device), layer)
    assert len(seen) == 2  # the networks are tried on zeros once
    assert launched.count('linear_kernel') == 2
    handle.remove()
    decode(cache, make_tokens(case, 2, 1, device), layer)
    assert launched.count('linear_kernel') == 4
    check_step(case, twin, copy_cache(twin), make_tokens(case, 2, 1, device), layer)


@pytest.mark.parametrize('index', [0, 1])
@torch.no_grad()
def test_a_hook_of_a_mean_changes_every_step(index: int, device: torch.device) -> None:
    sizes = {
        'sliding_window_size': 3,
        'compress_block_size': 4,
        'compress_block_sliding_stride': 2,
        'selection_block_size': 4,
        'num_selected_blocks': 4,
    }
    pair = MeanPool(), MeanPool()
    layer = SparseAttention(16, 8, 2, kv_heads=1, causal=True, compress_mlp=pair, **sizes).to(device)  # type: ignore[arg-type]
    nn.init.normal_(layer.to_strategy_combine.weight)  # type: ignore[arg-type]
    x = torch.randn(1, 15, 16, device=device)

    def step(backend: str) -> Tensor:
        layer.backend, cache = backend, layer.init_cache(1, 15)
        return torch.cat([layer(part, cache=cache) for part in x.split((9, *(1,) * 6), 1)], 1)[:, 9:]

    without_hook = step('triton')
    (layer.k_compress, layer.v_compress)[index].register_forward_hook(lambda module, args, out: (4 * out).sin())
    found = step('triton')
    assert not torch.allclose(found, without_hook, atol=1e-3)
    torch.testing.assert_close(found, step('eager'), rtol=1e-4, atol=1e-5)


def test_tokens_of_another_dtype_than_the_cache(device: torch.device, launched: list[str]) -> None:
    """The networks compute in the dtype of the tokens."""
    case = Case(network='mlp', heads=ONE_HEAD, dtype=torch.float16)
    cache = make_cache(case, [26], device)
    wide = Case(network='mlp', heads=ONE_HEAD)
    layer, tokens = make_layer(wide, device), make_tokens(wide, 1, 2, device)
    out, _ = decode(cache, tokens, layer | {'mem_kv': tuple(t.half() for t in layer['mem_kv'])})
    assert out.dtype == torch.float32
    assert 'linear_kernel' not in launched
