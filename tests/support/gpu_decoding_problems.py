"""Decoding steps for a GPU: caches of any lengths without a prefill, and checks by the error rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from native_sparse_attention import functional
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import PAIRS, TOKENS, LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.inference.paged_cache import PagedLayerCache, make_cache
from native_sparse_attention.inference.phi import Phi
from native_sparse_attention.nn.compress import CompressMLP, GroupedMLP, MeanPool
from native_sparse_attention.ops import chosen_scores, compressed_attention, select_blocks
from native_sparse_attention.testing import assert_matches
from tests.support.gate_problems import NUM_GATES
from tests.support.gpu_problems import DTYPES

GROUPS = (1, 4, 16, 64)
NUM_TOKENS = (1, 4, 16)
HEAD_DIMS = ((64, 64), (128, 128), (96, 80))
# (l, d, l', n, W); compressed blocks of the last reach beyond the next selection block, so nothing is carried over.
SIZES = ((32, 16, 64, 8, 128), (16, 8, 16, 5, 40), (64, 16, 32, 6, 100))
LENGTHS = (5000, 333, 31, 0)
# Rows of the output for which steps are repeated, so that chance does not decide, and the most steps.
NUM_ROWS, MAX_STEPS = 512, 32
VALUES = ('v', 'raw_v', 'v_window', 'v_cmp')
# Pages of a pool that no row has at first.
SPARE_PAGES = 4


@dataclass(frozen=True)
class Shape:
    """Shape of a cache, whose rows have `lengths` tokens, and of its steps. sizes: l, d, l', n, W. learned: φ is a
    network that is called. mlp: class of φ whose layers the kernels compute. has_window: branches have keys and values
    of their own. merged: one softmax for selected blocks and window, 'gate' beside a compressed output, 'output
    gate' with a gate of the sum too, 'scores' without a compressed output.
    """

    lengths: tuple[int, ...]
    capacity: int
    num_tokens: int = 1
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    sizes: tuple[int, int, int, int, int] = SIZES[0]
    dtype: torch.dtype = torch.bfloat16
    learned: bool = False
    mlp: type[nn.Module] | None = None
    page_size: int | None = None
    rotary: bool = True
    num_mem: int = 1
    has_window: bool = False
    merged: str = ''
    share_group: bool = True
    max_rollback: int = 32

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def layout(self) -> dict[str, Any]:
        return {
            'kv_heads': self.kv_heads,
            'head_dim': self.head_dim,
            'value_dim': self.value_dim,
            'compress': self.sizes[:2],
            'has_raw_k': self.rotary or self.has_window,
            'has_raw_v': self.has_window,
            'has_window': self.has_window,
            'has_v_cmp': self.merged != 'scores',
        }


def draw_shape(index: int) -> Shape:
    """Return the shape of random problem `index`: dtypes, groups and tokens per step alternate, the rest is random."""
    random = Random(f'decoding {index}')
    group, num_tokens = GROUPS[index % 4], NUM_TOKENS[index // 4 % 3]
    head_dim, value_dim = random.choice(HEAD_DIMS)
    sizes = random.choice((SIZES[0], *SIZES))
    return Shape(
        lengths=LENGTHS,
        capacity=max(LENGTHS) + num_tokens * MAX_STEPS,
        num_tokens=num_tokens,
        group=group,
        kv_heads={1: 4, 64: 1}.get(group, 2),
        head_dim=head_dim,
        value_dim=value_dim,
        sizes=sizes,
        dtype=DTYPES[(index + index // 12) % 3],
        learned=random.random() < 0.4,
        page_size=random.choice((None, sizes[2], 3 * sizes[2])),
        rotary=random.random() < 0.8,
        num_mem=random.choice((0, 1, 1, 3)),
        has_window=random.random() < 0.25,
        share_group=random.random() < 0.75,
    )


class InOnePiece(nn.Module):
    """A network whose products get contiguous operands, so that every backend computes the same bits.

    With other strides PyTorch may choose another order of summation.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, blocks: Tensor) -> Tensor:
        return self.network(blocks.contiguous())


class Decoder:
    """State that steps of a shape share: networks, positions, memory, frequencies, and contents of caches."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device, self.seed = shape, device, seed
        self.generator = torch.Generator(device).manual_seed(seed)
        block_size, stride = shape.sizes[:2]
        dims = shape.head_dim, shape.value_dim
        torch.manual_seed(seed)
        with device:
            networks = [self._network(dim) for dim in dims]
        of_branch = 1 if shape.merged == 'scores' else 2
        self.networks = [network.to(device, shape.dtype) for network in networks[:of_branch]]
        self._phi: dict[torch.dtype, Phi] = {}
        self.positions, self.mem_kv = (
            [self._normal(shape.kv_heads, count, dim) for dim in dims[:of_branch]]
            for count in (block_size, shape.num_mem)
        )
        self.freqs = 10000 ** -torch.linspace(0, 1, shape.head_dim // 2, device=device) if shape.rotary else None
        batch, ring = len(shape.lengths), block_size - 1 + shape.max_rollback
        blocks = num_compressed_blocks(shape.capacity, block_size, stride)
        names = [*TOKENS[: 4 if shape.has_window else 2], *PAIRS[:of_branch]]
        names += [name for name in ('raw_k', 'raw_v') if shape.layout[f'has_{name}']]
        slots = dict.fromkeys(TOKENS, shape.capacity) | dict.fromkeys(PAIRS, blocks) | {'raw_k': ring, 'raw_v': ring}
        self.contents = {name: self._normal(batch, slots[name], shape.kv_heads, dims[name in VALUES]) for name in names}

    def _network(self, dim: int) -> nn.Module:
        shape, block_size = self.shape, self.shape.sizes[0]
        if shape.mlp is None:
            return InOnePiece(CompressMLP(dim, block_size)) if shape.learned else MeanPool()
        network = shape.mlp(dim, block_size, *((shape.kv_heads,) if shape.mlp is GroupedMLP else ()))
        for parameter in network.parameters():
            if not parameter.any():
                nn.init.uniform_(parameter, -0.1, 0.1)
        return network

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.shape.dtype, device=self.device, generator=self.generator)

    def cache(
        self, dtype: torch.dtype | None = None, rows: slice = slice(None), background: float | None = None
    ) -> LayerCache:
        """Return a new cache of rows of the batch. background: content of unused memory, default random numbers."""
        shape, dtype = self.shape, dtype or self.shape.dtype
        lengths = torch.tensor(shape.lengths[rows], dtype=torch.int32, device=self.device)
        options: dict[str, Any] = {'max_rollback': shape.max_rollback, 'dtype': dtype, 'device': self.device}
        if shape.page_size is None:
            cache = make_cache(len(lengths), shape.capacity, **options, **shape.layout)
        else:
            pages = len(lengths) * -(-shape.capacity // shape.page_size)
            order = torch.Generator().manual_seed(self.seed)
            tables = [
                torch.randperm(pages + SPARE_PAGES, generator=order)[:pages].view(len(lengths), -1).int()
                for _ in range(2)
            ]
            cache = PagedLayerCache(
                len(lengths),
                shape.capacity,
                page_size=shape.page_size,
                selection_block_size=shape.sizes[2],
                num_pages=pages + SPARE_PAGES,
                block_table=tables[0].to(self.device),
                block_table_cmp=tables[1].to(self.device),
                **options,
                **shape.layout,
            )
        if background is not None:
            for tensor in cache._tensors():
                tensor.fill_(background)
        for name, whole in self.contents.items():
            fill(cache, name, whole[rows].to(dtype), lengths, background)
        set_lengths(cache, shape.lengths[rows])
        return cache

    def tokens(self, step: int, rows: slice = slice(None)) -> dict[str, Tensor]:
        """Return new tokens of a step, by the argument names of `nsa_decode`, with gates if there are any."""
        shape = self.shape
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + step)
        dims = shape.head_dim, shape.value_dim
        sizes = {'q': (shape.heads, shape.head_dim)}
        names = ('k', 'v', *(('raw_k', 'raw_v', 'k_window', 'v_window') if shape.has_window else ()))
        sizes |= {n: (shape.kv_heads, dims[n in VALUES]) for n in names}
        start = (len(shape.lengths), shape.num_tokens)
        tokens = {
            name: torch.randn(*start, *size, dtype=shape.dtype, device=self.device, generator=generator)
            for name, size in sizes.items()
        }
        if shape.merged != 'scores':
            size = (*start, shape.heads, NUM_GATES[shape.merged])
            tokens['gates'] = torch.rand(size, device=self.device, generator=generator)
        return {name: t[rows].contiguous() for name, t in tokens.items()}

    @torch.no_grad()
    def step(self, cache: LayerCache, tokens: dict[str, Tensor], backend: str = 'triton', **options: Any) -> Tensor:
        """Run `nsa_decode` in the dtype of the cache."""
        dtype, (_, _, selection_block_size, num_selected, window_size) = cache.dtype, self.shape.sizes
        if dtype != self.shape.dtype:
            tokens = {name: t.to(dtype) for name, t in tokens.items()}
        phi = self.phi(dtype)
        return nsa_decode(
            **{'gates': None} | tokens,
            cache=cache,
            merge_window=bool(self.shape.merged),
            networks=phi.networks,
            positions=phi.positions,
            freqs=self.freqs,
            mem_kv=self.memory(dtype),
            selection_block_size=selection_block_size,
            num_selected=num_selected,
            window_size=window_size,
            share_group=self.shape.share_group,
            backend=backend,
            **options,
        )

    def memory(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
        return _pair([t.to(dtype) for t in self.mem_kv]) if self.shape.num_mem else None

    def phi(self, dtype: torch.dtype) -> Phi:
        if dtype not in self._phi:
            networks = [deepcopy(network).to(dtype) for network in self.networks]
            positions = [position.to(dtype) for position in self.positions]
            self._phi[dtype] = Phi(_pair(networks), _pair(positions))
        return self._phi[dtype]


def _pair(items: list[Any]) -> tuple[Any, Any]:
    """Return the pair for keys and values, or for keys and None."""
    return items[0], items[1] if len(items) > 1 else None


def fill(cache: LayerCache, name: str, entries: Tensor, lengths: Tensor, background: float | None = None) -> None:
    """Fill a tensor of the cache with entries `[B, n, H, D or DV]`.

    background: replaces entries that rows of `lengths` `[B]` do not need.
    """
    assert cache.compress is not None
    index = torch.arange(entries.shape[1], device=entries.device).expand(entries.shape[:2])
    ends = lengths.long()
    is_ring = name.startswith('raw')
    if is_ring:
        # The latest position of every place; the next compressed blocks need those of the last l - 1.
        position = ends[:, None] - 1 - (ends[:, None] - 1 - index) % entries.shape[1]
        is_used = (position >= 0) & (position >= ends[:, None] - cache.compress[0] + 1)
    else:
        ends = num_compressed_blocks(ends, *cache.compress) if name in PAIRS else ends
        is_used = index < ends[:, None]
    if background is None:
        ends = torch.full_like(ends, entries.shape[1])
    else:
        entries = torch.where(is_used[..., None, None], entries, background)
    if is_ring:
        getattr(cache, name).copy_(entries)
    else:
        cache._write(name, index, entries, ends)


def set_lengths(cache: LayerCache, lengths: tuple[int, ...]) -> None:
    """Set the lengths of the rows, whose contents are there already."""
    for tensor in (cache.lengths, cache._peaks):
        tensor.copy_(torch.tensor(lengths, dtype=torch.int32))
    cache.max_length = cache._peak = max(lengths)


def state_of(cache: LayerCache) -> dict[str, Tensor]:
    """Return the content of the rows, zeros behind their ends, wherever pages lie; and the rings."""
    assert cache.compress is not None
    lengths = cache.lengths.long()
    state = {'lengths': cache.lengths.clone(), 'peaks': cache._peaks.clone()}
    for name in (*TOKENS, *PAIRS):
        if getattr(cache, name) is not None:
            ends = num_compressed_blocks(lengths, *cache.compress) if name in PAIRS else lengths
            count = int(ends.max())
            is_used = torch.arange(count, device=cache.device) < ends[:, None]
            state[name] = cache._read(name, count).masked_fill(~is_used[..., None, None], 0)
    rings = {'raw_k': cache.raw_k, 'raw_v': cache.raw_v}
    return state | {name: ring.clone() for name, ring in rings.items() if ring is not None}


def chosen_blocks(cache: LayerCache, num_tokens: int) -> Tensor:
    """Return int32 `[B, T, index_heads, n]`: the blocks that the last step selected, ascending, padded with -1."""
    (chosen,) = (
        t for (name, *_), t in cache.session.workspace.items() if name == 'chosen' and t.shape[1] == num_tokens
    )
    beyond = torch.iinfo(torch.int32).max
    ordered = chosen.masked_fill(chosen < 0, beyond).sort(-1).values
    return ordered.masked_fill(ordered == beyond, -1)


@contextmanager
def choosing(choose: Any) -> Iterator[None]:
    """Make steps by the ops of `nsa` select blocks by this function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, 'nsa', partial(functional.nsa, choose=choose))
        yield


def assert_chooses_as_well(
    blocks: Tensor, q: Tensor, k_cmp: Tensor, lse: Tensor, rtol: float = 1e-4, **settings: Any
) -> None:
    """Assert that ascending blocks `[B, T, index_heads, n]` score as high as those that eager selects in float64.

    Their number and the forced blocks are equal, so all blocks are equal where scores differ by more than rounding.
    """
    names = ('num_selected', 'num_init', 'num_local', 'num_recent', 'share_group', 'block_counts')
    selection = {name: settings.pop(name) for name in names if name in settings}
    settings |= {'backend': 'eager'}
    expected = select_blocks(q, k_cmp, lse, **settings, **selection)
    assert torch.equal(blocks >= 0, expected >= 0)
    assert ((blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] < 0)).all()
    forced = {name: selection.get(name, default) for name, default in (('num_init', 1), ('num_local', 2))}
    own = expected.amax(-1, keepdim=True)  # always among them, where local blocks are forced
    is_forced = (expected >= 0) & ((expected < forced['num_init']) | (expected > own - forced['num_local']))
    found = (expected[..., :, None] == blocks[..., None, :]).any(-1)
    assert (found | ~is_forced).all()
    scores = [
        chosen_scores(q, k_cmp, lse, chosen, **settings).masked_fill(chosen < 0, 0).sort(-1).values
        for chosen in (blocks, expected)
    ]
    torch.testing.assert_close(*scores, rtol=rtol, atol=rtol / 100)


def assert_obeys_the_rules(decoder: Decoder, steps: int | None = None, **options: Any) -> list[Tensor]:
    """Assert the error rules for steps of the kernels, for what they append, and for the blocks that they select.
    Returns the outputs.

    Eager reads the blocks that the kernels selected, so a selection between equal scores is no error of the output.
    """
    shape = decoder.shape
    rows = len(shape.lengths) * shape.num_tokens * shape.heads
    steps = steps or max(2, min(MAX_STEPS, -(-NUM_ROWS // rows)))
    dtypes = {'triton': shape.dtype, 'eager': shape.dtype, 'gold': torch.float64}
    caches = {name: decoder.cache(dtype) for name, dtype in dtypes.items()}
    outs: dict[str, list[Tensor]] = {name: [] for name in caches}
    for index in range(steps):
        tokens = decoder.tokens(index)
        outs['triton'].append(decoder.step(caches['triton'], tokens, **options))
        chosen = chosen_blocks(caches['triton'], shape.num_tokens)
        num_blocks = num_compressed_blocks(caches['triton'].max_length, *shape.sizes[:2])
        pairs = [t.double() for t in caches['triton'].read_compressed(num_blocks) if t is not None]

        for name, check in (('eager', None), ('gold', pairs)):
            with choosing(partial(_take, decoder=decoder, chosen=chosen, pairs=check)):
                outs[name].append(decoder.step(caches[name], tokens, 'eager'))
    assert_matches(*(torch.cat(outs[name], 1) for name in ('triton', 'gold', 'eager')), name='out')
    assert len({tuple(cache.lengths.tolist()) for cache in caches.values()}) == 1
    for name in (*TOKENS, *PAIRS):
        if getattr(caches['gold'], name) is not None:
            found = {kind: _appended(cache, name, shape) for kind, cache in caches.items()}
            if found['gold'].numel():
                assert_matches(found['triton'], found['gold'], found['eager'], name=name)
    return outs['triton']


def _take(
    q: Tensor, *_: Tensor, decoder: Decoder, chosen: Tensor, pairs: list[Tensor] | None, **settings: Any
) -> Tensor:
    """Return the selected blocks, which must score as high as those from the float64 pairs (k_cmp, v_cmp)."""
    if pairs is not None:
        block_size, stride = decoder.shape.sizes[:2]
        memory: Any = decoder.memory(torch.float64)
        if len(pairs) == 1:  # keys in place of values, on which the log-sum-exp does not depend
            memory = None if memory is None else (memory[0], memory[0])
        lse = compressed_attention(
            q.double(),
            pairs[0],
            pairs[-1],
            block_size=block_size,
            stride=stride,
            mem_kv=memory,
            backend='eager',
            **{name: settings[name] for name in ('q_offset', 'seqlens_k', 'seqlen_k', 'causal', 'scale')},
        )[1]
        assert_chooses_as_well(chosen, q.double(), pairs[0], lse, **settings)
    return chosen


def _appended(cache: LayerCache, name: str, shape: Shape) -> Tensor:
    """Return the entries that the steps have written, `[N, H, D or DV]`."""
    old = torch.tensor(shape.lengths, device=cache.device)
    new = cache.lengths.long()
    if name in PAIRS:
        old, new = (num_compressed_blocks(t, *shape.sizes[:2]) for t in (old, new))
    count = int(new.max())
    index = torch.arange(count, device=cache.device)
    return cache._read(name, count)[(index >= old[:, None]) & (index < new[:, None])]


def poison_workspace(cache: LayerCache, junk_of: Any) -> None:
    """Fill the workspace with NaN, except counts of programs, which are 0 between steps."""
    for (name, *_), tensor in cache.session.workspace.items():
        if name != 'counts':
            tensor.fill_(junk_of(tensor.dtype))


def move_page(cache: LayerCache, row: int, column: int) -> None:
    """Move a page of tokens and a page of compressed blocks, and leave NaN in their former places."""
    assert cache.block_table is not None
    assert cache.block_table_cmp is not None
    for names, table in ((TOKENS, cache.block_table), (PAIRS, cache.block_table_cmp)):
        old = int(table[row, column])
        taken = set(table.flatten().tolist())
        pools = [pool for pool in (getattr(cache, name) for name in names) if pool is not None]
        new = next(page for page in range(pools[0].shape[0]) if page not in taken)
        for pool in pools:
            pool[new] = pool[old]
            pool[old] = torch.nan
        table[row, column] = new
