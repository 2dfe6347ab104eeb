"""Problems for decoding: a layer, a cache with a past, new tokens; and a step of one backend beside eager.

    case = Case(blocks=(16, 4, 4), num_selected=5)
    layer = make_layer(case, device)
    cache = make_cache(case, [37, 0], device)           # rows of 37 and 0 tokens, NaN in all memory that is not used
    tokens = make_tokens(case, 2, 3, device)            # 3 new tokens for each of 2 rows
    twin = copy_cache(cache)                            # the same contents, contiguous; of another dtype by name
    out, chosen = decode(cache, tokens, layer)          # by the kernels; chosen: int32 [B, T, H or HQ, n] or None
    out = decode_eagerly(twin, tokens, layer)
    check_step(case, cache, twin, tokens, layer)        # both, by the error rules, and what the caches hold afterwards
    assert_rest_is_unused(cache)                        # still NaN

A past is random: keys, compressed keys and rings do not come from the same tokens, so a read of the wrong one shows.
All of it takes a device, and dtypes of `Case.dtype`; nothing here asks for the interpreter or for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import PAIRS, TOKENS, LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.inference.paged_cache import PagedLayerCache
from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP, MeanPool, MeanResidualMLP
from native_sparse_attention.testing import assert_matches
from tests.support.gate_problems import NUM_GATES
from tests.support.harness import fence, same_bits
from tests.support.problems import Heads

HEADS = Heads(4, 2, 16, 16)
RINGS = ('raw_k', 'raw_v')
# Tolerance of keys that kernels rotate: cosines and sines have other roundings.
TURNED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Linear(nn.Module):
    """φ that is linear in the flattened block, shared by all heads."""

    def __init__(self, block_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, block_size * dim) / (block_size * dim) ** 0.5)

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks.flatten(-2) @ self.weight.T


class LastWeighsMost(nn.Module):
    """φ that depends on the order of the tokens of a block: the i-th token has weight i."""

    def forward(self, blocks: Tensor) -> Tensor:
        weights = torch.arange(1, blocks.shape[-2] + 1, device=blocks.device, dtype=blocks.dtype)
        return (blocks * (weights / weights.sum())[:, None]).sum(-2)


# MLPs by name, from head size, block size, KV heads. The numbers of hidden features fill no tile.
MLPS: dict[str, Callable[[int, int, int], nn.Module]] = {
    'mlp': lambda dim, block_size, heads: CompressMLP(dim, block_size, 1.1),
    'mean and mlp': lambda dim, block_size, heads: MeanResidualMLP(dim, block_size, 0.6),
    'mlp of each head': lambda dim, block_size, heads: GroupedMLP(dim, block_size, heads, 0.7),
    'mlp of one head': lambda dim, block_size, heads: GroupedMLP(dim, block_size, 1, 0.7),
}


@dataclass(frozen=True)
class Case:
    """A layer and the sizes of its cache.

    blocks: l, d, l'. num_angles: pairs of features that rotary turns, 0 for no rotary embedding, None for all. is_half:
    pairs are i and i + num_angles. network: 'mean', 'linear', 'own' or a name of MLPS. independent: k_window, v_window,
    raw_k and raw_v of their own. rotated: q_cmp and raw_k beside q and k, which the caller has rotated. merged: one
    softmax of selected blocks and window, 'gate' beside a compressed output, 'output gate' with a gate of the sum too,
    'scores' without a compressed output, 'window' without compressed keys. pairs: M. page_size: None for a contiguous
    cache; pages of a paged one lie scattered in pools that have `spare_pages` more than rows need.
    """

    heads: Heads = HEADS
    blocks: tuple[int, int, int] = (8, 4, 8)
    num_selected: int = 3
    window_size: int = 11
    num_init: int = 1
    num_local: int = 2
    num_recent: int = 0
    share_group: bool = True
    pairs: int = 1
    num_angles: int | None = None
    factor: float = 1.0
    is_half: bool = False
    network: str = 'mean'
    independent: bool = False
    rotated: bool = False
    merged: str = ''
    dtype: torch.dtype = torch.float32
    capacity: int = 56
    max_rollback: int = 4
    page_size: int | None = None
    spare_pages: int = 2

    @property
    def compresses(self) -> tuple[bool, bool]:
        """Return whether keys and values are compressed."""
        return self.merged != 'window', self.merged in NUM_GATES

    @property
    def angles(self) -> int:
        return self.heads.head_dim // 2 if self.num_angles is None else self.num_angles


def make_layer(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `nsa_decode` that a layer holds, fenced."""
    heads, (block_size, _, selection_block_size) = case.heads, case.blocks
    dims = (heads.head_dim, heads.value_dim)

    def pair(count: int) -> tuple[Tensor | None, ...]:
        made = (fence(torch.randn(heads.kv_heads, count, dim).to(device, case.dtype)) for dim in dims)
        return tuple(t if exists else None for t, exists in zip(made, case.compresses, strict=True))

    return {
        'networks': tuple(
            make_network(case, dim).to(device, case.dtype).requires_grad_(False) if exists else None
            for dim, exists in zip(dims, case.compresses, strict=True)
        ),
        'positions': pair(block_size),
        'freqs': fence(torch.rand(case.angles, device=device)) if case.angles else None,
        'interpolate_factor': case.factor,
        'rotary_layout': 'half' if case.is_half else 'interleaved',
        'mem_kv': pair(case.pairs) if case.pairs and case.compresses[0] else None,
        'merge_window': bool(case.merged),
        'selection_block_size': selection_block_size,
        'num_selected': case.num_selected,
        'window_size': case.window_size,
        'num_init': case.num_init,
        'num_local': case.num_local,
        'num_recent': case.num_recent,
        'share_group': case.share_group,
    }


def make_network(case: Case, dim: int) -> nn.Module:
    if case.network == 'mean':
        return MeanPool()
    if case.network == 'linear':
        return Linear(case.blocks[0], dim)
    if case.network not in MLPS:
        return LastWeighsMost()
    network = MLPS[case.network](dim, case.blocks[0], case.heads.kv_heads)
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.uniform_(parameter, -0.3, 0.3)
        parameter.data = fence(parameter.data)
    return network


def make_tokens(case: Case, batch: int, num_tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `nsa_decode` for new tokens, fenced; gates are float32, and None for scores alone."""
    heads, shape = case.heads, (batch, num_tokens)

    def normal(count: int, dim: int) -> Tensor:
        return fence(torch.randn(*shape, count, dim).to(device, case.dtype))

    names = [('k', 'v'), *([('raw_k', 'raw_v'), ('k_window', 'v_window')] if case.independent else [])]
    tokens: dict[str, Any] = {'q': normal(heads.heads, heads.head_dim), 'gates': None}
    if case.compresses[1]:
        tokens['gates'] = fence(torch.rand(*shape, heads.heads, NUM_GATES[case.merged]).to(device))
    for of_keys, of_values in names:
        tokens[of_keys] = normal(heads.kv_heads, heads.head_dim)
        tokens[of_values] = normal(heads.kv_heads, heads.value_dim)
    if case.rotated:
        tokens['q_cmp'] = normal(heads.heads, heads.head_dim)
        tokens['raw_k'] = normal(heads.kv_heads, heads.head_dim)
    return tokens


def make_cache(case: Case, lengths: Sequence[int], device: torch.device) -> LayerCache:
    """Return a cache of rows with random tokens, their compressed blocks and rings; NaN in all unused memory."""
    heads, (block_size, stride, selection_block_size) = case.heads, case.blocks
    layout = {
        'kv_heads': heads.kv_heads,
        'head_dim': heads.head_dim,
        'value_dim': heads.value_dim,
        'max_rollback': case.max_rollback,
        'compress': (block_size, stride) if case.compresses[0] else None,
        'has_v_cmp': case.compresses[1],
        'has_raw_k': case.angles > 0 or case.independent or case.rotated,
        'has_raw_v': case.independent,
        'has_window': case.independent,
        'dtype': case.dtype,
        'device': device,
    }
    batch = len(lengths)
    if case.page_size is None:
        cache = LayerCache(batch, case.capacity, **layout)
    else:
        pages = -(-case.capacity // case.page_size)
        num_pages = batch * pages + case.spare_pages
        cache = PagedLayerCache(
            batch,
            case.capacity,
            page_size=case.page_size,
            selection_block_size=selection_block_size,
            num_pages=num_pages,
            block_table=_scattered_table(lengths, pages, case.page_size, num_pages, device),
            block_table_cmp=_scattered_table(lengths, pages, case.page_size, num_pages, device),
            **layout,
        )
    for name in (*TOKENS, *PAIRS, *RINGS):
        tensor = getattr(cache, name)
        if tensor is not None:
            setattr(cache, name, fence(torch.full_like(tensor, torch.nan)))
    where = torch.arange(max(lengths), device=device).expand(batch, -1)
    ends = torch.tensor(lengths, dtype=torch.int32, device=device)
    for name in (*TOKENS, *PAIRS):
        if getattr(cache, name) is not None:
            count = ends if name in TOKENS else num_compressed_blocks(ends, block_size, stride)
            for row, end in enumerate(count.tolist()):
                _write(cache, name, row, where[:1, :end])
    for name in RINGS:
        ring = getattr(cache, name)
        if ring is None:
            continue
        for row, length in enumerate(lengths):
            kept = torch.arange(max(0, length - ring.shape[1]), length, device=device) % ring.shape[1]
            ring[row, kept] = torch.randn(len(kept), *ring.shape[2:]).to(ring)
    cache.lengths, cache._peaks = fence(ends), fence(ends)
    cache.max_length = cache._peak = max(lengths)
    return cache


def _scattered_table(
    lengths: Sequence[int], pages: int, page_size: int, num_pages: int, device: torch.device
) -> Tensor:
    """Return int32 `[B, pages + 1]`: pages in random order for 16 tokens more than a row has; the other entries name no
    page.
    """
    shuffled = torch.randperm(num_pages)[: len(lengths) * pages].view(len(lengths), pages)
    columns = torch.arange(pages + 1)
    needed = torch.tensor([-(-(length + 16) // page_size) for length in lengths])[:, None]
    none = torch.tensor([-1, num_pages, 2**31 - 1, -(2**31)])[columns % 4]
    table = torch.where(columns < needed, torch.nn.functional.pad(shuffled, (0, 1), value=-1), none)
    return fence(table.int().to(device))


def _write(cache: LayerCache, name: str, row: int, where: Tensor) -> None:
    """Write random entries at places `[1, n]` of a row."""
    tensor = getattr(cache, name)
    entries = torch.randn(where.shape[1], *tensor.shape[2:]).to(tensor)
    if isinstance(cache, PagedLayerCache):
        page, entry, exists = cache._locate(name, where.expand(cache.batch_size, -1))
        assert exists[row].all()
        tensor[page[row], entry[row]] = entries
    else:
        tensor[row, : where.shape[1]] = entries


def copy_cache(cache: LayerCache, dtype: torch.dtype | None = None) -> LayerCache:
    """Return a contiguous cache with the same content, and NaN elsewhere."""
    twin = LayerCache(
        cache.batch_size,
        cache.capacity,
        **cache.layout,
        max_rollback=cache.max_rollback,
        grows=cache.grows,
        dtype=dtype or cache.dtype,
        device=cache.device,
    )
    twin.lengths, twin._peaks = cache.lengths.clone(), cache._peaks.clone()
    twin.max_length, twin._peak = cache.max_length, cache._peak
    for name in RINGS:
        if getattr(cache, name) is not None:
            setattr(twin, name, getattr(cache, name).to(twin.dtype, copy=True))
    for name in (*TOKENS, *PAIRS):
        tensor = getattr(twin, name)
        if tensor is not None:
            tensor.fill_(torch.nan)
            for row, held in enumerate(held_entries(cache, name)):
                tensor[row, : len(held)] = held
    return twin


def held_entries(cache: LayerCache, name: str) -> list[Tensor]:
    """Return the tokens of every row, or for a name of PAIRS the complete compressed blocks, `[n, H, D or DV]`."""
    counts = cache.lengths
    if name in PAIRS:
        assert cache.compress is not None
        counts = num_compressed_blocks(cache.lengths.long(), *cache.compress)
    stored = cache._read(name, int(counts.max()))
    return [stored[row, :count] for row, count in enumerate(counts.tolist())]


def in_double(value: Any) -> Any:
    """Return tokens or a layer in float64; freqs stay float32, so that all compute the same angles."""
    if isinstance(value, dict):
        return {name: t if name == 'freqs' else in_double(t) for name, t in value.items()}
    if isinstance(value, tuple):
        return tuple(in_double(item) for item in value)
    if isinstance(value, nn.Module):
        return deepcopy(value).double()
    return value.double() if isinstance(value, Tensor) else value


def decode(
    cache: LayerCache, tokens: dict[str, Any], layer: dict[str, Any], **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Run a step by the kernels; return the output and the selected blocks."""
    with torch.no_grad():
        out = nsa_decode(**tokens, cache=cache, **layer, **settings, backend='triton')
    return out, chosen_blocks(cache, tokens['q'].shape[1], layer['num_selected'])


def chosen_blocks(cache: LayerCache, num_tokens: int, num_selected: int) -> Tensor | None:
    """Return a copy of the blocks that the last step by the kernels, of so many tokens, selected."""
    if num_selected == 0:
        return None
    (chosen,) = (
        t
        for (name, *_), t in cache.session.workspace.items()
        if name == 'chosen' and (t.shape[1], t.shape[3]) == (num_tokens, num_selected)
    )
    return chosen.clone()


def decode_eagerly(cache: LayerCache, tokens: dict[str, Any], layer: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return nsa_decode(**tokens, cache=cache, **layer, backend='eager')


def check_step(
    case: Case,
    cache: LayerCache,
    twin: LayerCache,
    tokens: dict[str, Any],
    layer: dict[str, Any],
    **settings: Any,
) -> Tensor | None:
    """Run a step by the kernels on `cache` and by eager on `twin`, which hold the same.

    Compare the output by the error rules, then the contents. Returns the blocks that the kernels selected.
    """
    exact = decode_eagerly(copy_cache(twin, torch.float64), in_double(tokens), in_double(layer))
    expected = decode_eagerly(twin, tokens, layer)
    out, chosen = decode(cache, tokens, layer, **settings)
    assert_matches(out, exact, expected, name='out')
    assert_hold_the_same(case, cache, twin)
    return chosen


def assert_hold_the_same(case: Case, cache: LayerCache, twin: LayerCache) -> None:
    """Assert equal lengths and bounds; equal bits of values and rings; rotated keys and compressed blocks up to
    roundings.
    """
    for name in ('lengths', '_peaks'):
        assert getattr(cache, name).tolist() == getattr(twin, name).tolist(), name
    assert (cache.max_length, cache._peak) == (twin.max_length, twin._peak)
    for name in RINGS:
        if getattr(twin, name) is not None:
            assert same_bits(getattr(cache, name), getattr(twin, name)), name
    tolerance = TURNED[case.dtype]
    for name in (*TOKENS, *PAIRS):
        if getattr(twin, name) is None:
            continue
        is_rounded = name in PAIRS or (name in ('k', 'k_window') and case.angles > 0)
        for row, (held, expected) in enumerate(zip(held_entries(cache, name), held_entries(twin, name), strict=True)):
            if is_rounded:
                message = f'{name} of row {row}'
                torch.testing.assert_close(held, expected, rtol=tolerance, atol=tolerance, msg=message)
            else:
                assert same_bits(held, expected), f'{name} of row {row}'


def assert_rest_is_unused(cache: LayerCache) -> None:
    """Assert that memory outside the rows is NaN."""
    for name in (*TOKENS, *PAIRS):
        tensor = getattr(cache, name)
        if tensor is None:
            continue
        rest = tensor.clone()
        for row, held in enumerate(held_entries(cache, name)):
            if isinstance(cache, PagedLayerCache):
                where = torch.arange(len(held), device=cache.device).expand(cache.batch_size, -1)
                page, entry, _ = cache._locate(name, where)
                rest[page[row], entry[row]] = torch.nan
            else:
                rest[row, : len(held)] = torch.nan
        assert rest.isnan().all(), f'{name} has been written where no row has anything'


def check_steps(
    case: Case, lengths: list[int], steps: tuple[int, ...], device: torch.device, **pinned: Any
) -> LayerCache:
    """Check steps of so many tokens each, and that nothing else is written; return the cache."""
    layer, cache = make_layer(case, device), make_cache(case, lengths, device)
    twin = copy_cache(cache)
    for num_tokens in steps:
        check_step(case, cache, twin, make_tokens(case, len(lengths), num_tokens, device), layer, **pinned)
    assert_rest_is_unused(cache)
    return cache
