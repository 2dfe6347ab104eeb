"""Decoding kernels on a GPU: error rules, and equal bits wherever a step must be the same.

python -m pytest -m gpu -n 8 tests/gpu/test_decoding.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from native_sparse_attention import SparseAttention
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.cache import PAIRS, TOKENS, LayerCache
from native_sparse_attention.nn import attention
from native_sparse_attention.nn.compress import CompressMLP, MeanPool
from native_sparse_attention.nn.transformer import Transformer
from native_sparse_attention.ops import select_blocks
from native_sparse_attention.testing import assert_matches
from tests.support.gpu_decoding_problems import (
    Decoder,
    Shape,
    assert_chooses_as_well,
    assert_obeys_the_rules,
    chosen_blocks,
    draw_shape,
    fill,
    move_page,
    poison_workspace,
    set_lengths,
    state_of,
)

harness = pytest.importorskip('tests.support.harness', reason='triton is not installed')
settings_of_decoding = pytest.importorskip('native_sparse_attention.ops.decoding.triton.settings')

pytestmark = pytest.mark.gpu

COUNT = 24
# Rows beside and on the borders of compressed blocks of 32, selection blocks of 64 and windows of 128.
MIXED = Shape(lengths=(0, 31, 63, 1000, 127), capacity=1500)
# Steps that reach some of those borders in every row.
STEPS = 24
PHI = pytest.mark.parametrize('phi', [{}, {'learned': True}, {'mlp': CompressMLP}], ids=['mean', 'learned', 'mlp'])
NUM_TOKENS = pytest.mark.parametrize('num_tokens', [1, 4])


@pytest.fixture(autouse=True)
def shared_gpu() -> Iterator[None]:
    """Leave free GPU memory to other test processes."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize('index', range(COUNT))
def test_rules(index: int, device: torch.device):
    """Random problems, in workspace filled with NaN."""
    with harness.poisoned_allocations():
        assert_obeys_the_rules(Decoder(draw_shape(index), device))


def test_a_million_tokens(device: torch.device):
    lengths = (1_000_000, 17)
    shape = Shape(lengths, 1_000_100, group=16, kv_heads=1, head_dim=64, value_dim=64, sizes=(32, 16, 64, 16, 512))
    assert_obeys_the_rules(Decoder(shape, device), steps=3)


def test_more_blocks_requested_than_exist(device: torch.device):
    shape = replace(MIXED, lengths=(70, 0, 200), capacity=300, sizes=(32, 16, 64, 33, 128))
    with harness.poisoned_allocations():
        assert_obeys_the_rules(Decoder(shape, device))


LAUNCHED = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 128)]
LAUNCHED += [(torch.float32, 64), (torch.float32, 128), (torch.float32, 256)]


@pytest.mark.parametrize('tiles_of_program', [1, 4], ids=['attend_few', 'attend'])
@pytest.mark.parametrize(('dtype', 'head_dim'), LAUNCHED, ids=str)
def test_every_launch_setting(
    dtype: torch.dtype, head_dim: int, tiles_of_program: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Every launch setting passes the error rules. The first call, which compiles, has the bits of the second, and
    overlapping launches have the bits of launches that wait.
    """
    shape = replace(MIXED, lengths=(1000, 127), dtype=dtype, head_dim=head_dim, value_dim=head_dim, kv_heads=1)
    decoder, outs = Decoder(shape, device), []
    overlaps = settings_of_decoding.can_overlap(device)
    for overlapping in (overlaps, overlaps, False, False):
        monkeypatch.setattr(settings_of_decoding, 'can_overlap', lambda _, overlapping=overlapping: overlapping)
        outs.append(torch.cat(assert_obeys_the_rules(decoder, 20, num_splits=3, tiles_of_program=tiles_of_program)))
    assert all(harness.same_bits(out, outs[0]) for out in outs)


LAYER: dict[str, Any] = {
    'dim': 128,
    'dim_head': 32,
    'heads': 8,
    'kv_heads': 2,
    'sliding_window_size': 24,
    'compress_block_size': 8,
    'compress_block_sliding_stride': 4,
    'selection_block_size': 8,
    'num_selected_blocks': 6,
    'causal': True,
    'backend': 'triton',
}
WIDE_BLOCKS = {'compress_block_size': 20, 'compress_block_sliding_stride': 4, 'selection_block_size': 8}
EVERY_TOKEN = {'compress_block_size': 4, 'compress_block_sliding_stride': 4, 'selection_block_size': 4}
PAPER = {'compress_block_size': 32, 'compress_block_sliding_stride': 16, 'selection_block_size': 64}
LAYERS: dict[str, dict[str, Any]] = {
    'default': {},
    'mean': {'compress_mlp': MeanPool(), 'num_compressed_mem_kv': 3},
    'wide blocks': WIDE_BLOCKS,
    'blocks side by side': EVERY_TOKEN | {'sliding_window_size': 5, 'rotary_emb': False, 'num_compressed_mem_kv': 0},
    'branches of their own': {'independent_branch_kv': True},
    'qk norm': {'qk_norm': True},
    'heads alone': {'query_heads_share_selected_kv': False, 'heads': 4},
    'group of 16': PAPER | {'heads': 16, 'kv_heads': 1, 'dim_head': 64, 'sliding_window_size': 100},
    'bfloat16': {'compress_mlp': MeanPool()},
    'merged': {'merge_window': True},
    'halves': {'rotary_layout': 'half'},
    'scores alone': {'merge_window': True, 'compressed_output': False, 'compress_mlp': MeanPool()},
}
PREFILL, ONE_BY_ONE, CHUNKS = (13, 9), 512, (3, 7, 3, 7, 7)


@pytest.mark.parametrize('name', LAYERS)
@torch.no_grad()
def test_single_steps_equal_the_full_forward(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Decode rows of different lengths after a prefill, token by token and in chunks, against the full forward in
    float64.

    Outputs pass the error rules, and blocks are equal wherever scores differ by more than rounding.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == 'bfloat16' else torch.float32
    layer = SparseAttention(**LAYER | LAYERS[name]).to(device, dtype)
    for parameter in layer.parameters():
        if not parameter.any():
            parameter.normal_()
    sizes = (1,) * ONE_BY_ONE + CHUNKS
    decoded, prefill = sum(sizes), torch.tensor(PREFILL, device=device)
    x = torch.randn(len(PREFILL), max(PREFILL) + decoded, LAYER['dim'], dtype=dtype, device=device)
    index = prefill[:, None] + torch.arange(decoded, device=device)  # of the decoded part of each row
    cache = layer.init_cache(len(PREFILL), max(PREFILL) + decoded)
    assert all(layer.decodes_fixed(cache, size) for size in sizes)
    layer(x[:, : max(PREFILL)], torch.arange(max(PREFILL), device=device) < prefill[:, None], cache=cache)
    outs, selections = [], []
    for new in _rows_at(x, index).split(sizes, 1):
        outs.append(layer(new, cache=cache))
        selections.append(chosen_blocks(cache, new.shape[1]))
    assert cache.lengths.tolist() == [length + decoded for length in PREFILL]
    stepped, blocks = torch.cat(outs, 1), torch.cat(selections, 1)
    same: list[float] = []

    def choose(q: Tensor, k_cmp: Tensor, lse: Tensor, **settings: Any) -> Tensor:
        """Return the blocks that the steps have selected, preceded by those of the full forward."""
        chosen = select_blocks(q, k_cmp, lse, **settings)
        own = _rows_at(chosen, index)
        if q.dtype == torch.float64:
            same.append(float((own == blocks).all(-1).double().mean()))
            whole = chosen.clone()
            whole[torch.arange(len(PREFILL), device=device)[:, None], index] = blocks
            rtol = 2.0**-7 if dtype == torch.bfloat16 else 1e-4
            assert_chooses_as_well(whole, q, k_cmp, lse, rtol=rtol, **settings)
        chosen[torch.arange(len(PREFILL), device=device)[:, None], index] = blocks
        return chosen

    monkeypatch.setattr(attention, 'select_blocks', choose)
    layer.backend = 'eager'
    eager = _rows_at(layer(x), index)
    gold = _rows_at(layer.double()(x.double()), index)
    assert_matches(stepped, gold, eager, name=name)
    assert same[0] > (0.95 if dtype == torch.bfloat16 else 0.99)


def _rows_at(tensor: Tensor, index: Tensor) -> Tensor:
    """`[B, n, ...]` at index `[B, n]`."""
    return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], index]


@NUM_TOKENS
@pytest.mark.parametrize('pinned', [(4, 2), (3, 5)], ids=['attend_few', 'attend'])
def test_a_row_alone_is_the_row_of_a_batch(pinned: tuple[int, int], num_tokens: int, device: torch.device):
    """A row has the same bits alone and in a batch, where splits and tiles of a program are given. Learned networks are
    left out: products of PyTorch depend on the batch.
    """
    lengths = tuple((97 * row) % 1000 for row in range(32))
    decoder = Decoder(replace(MIXED, lengths=lengths, num_tokens=num_tokens), device)
    options: dict[str, Any] = {'num_splits': pinned[0], 'tiles_of_program': pinned[1]}
    together = decoder.cache()
    outs = [decoder.step(together, decoder.tokens(step), **options) for step in range(STEPS)]
    whole = state_of(together)
    for row in (0, 11, 31):
        rows = slice(row, row + 1)
        alone = decoder.cache(rows=rows)
        for step, out in enumerate(outs):
            result = decoder.step(alone, decoder.tokens(step, rows), **options)
            assert harness.same_bits(result, out[rows]), (row, step)
        for name, tensor in state_of(alone).items():
            expected = whole[name][rows]
            expected = expected[:, : tensor.shape[1]] if expected.dim() > 1 else expected
            assert harness.same_bits(tensor, expected), (row, name)


class Replayed:
    """A step on a cache as a CUDA graph. Neither its capture nor a replay moves the host's bounds."""

    def __init__(self, decoder: Decoder, cache: LayerCache) -> None:
        self.tokens = decoder.tokens(0)
        lengths = tuple(cache.lengths.tolist())
        cache.max_length = 0  # the host would refuse a step of full rows
        decoder.step(cache, self.tokens)  # compiles
        set_lengths(cache, lengths)
        cache.max_length = 0
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = decoder.step(cache, self.tokens)
        set_lengths(cache, lengths)

    def __call__(self, tokens: dict[str, Tensor]) -> Tensor:
        for name, tensor in tokens.items():
            self.tokens[name].copy_(tensor)
        self.out.fill_(torch.nan)
        self.graph.replay()
        return self.out


@pytest.fixture
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use small chunks, so that short rows have several and partial lists are merged in several levels."""
    if request.param == 'small chunks':
        monkeypatch.setattr(settings_of_decoding, 'CHUNK', 16)
        monkeypatch.setattr(settings_of_decoding, 'CANDIDATES', 32)
    settings_of_decoding.make_plan.cache_clear()
    yield
    settings_of_decoding.make_plan.cache_clear()


SMALL_CHUNKS = pytest.mark.parametrize('chunks', ['', 'small chunks'], indirect=True)


@SMALL_CHUNKS
@PHI
@pytest.mark.parametrize('page_size', [None, 128])
@NUM_TOKENS
@pytest.mark.usefixtures('chunks')
def test_a_replay_is_a_step(num_tokens: int, page_size: int | None, phi: dict[str, Any], device: torch.device):
    """A graph captured with short rows is replayed at later lengths of every row, over borders of blocks and windows;
    its pages move between replays.
    """
    shape = replace(MIXED, lengths=(3, 0, 40), num_tokens=num_tokens, page_size=page_size, **phi)
    decoder = Decoder(shape, device)
    caches = decoder.cache(), decoder.cache()
    replayed = Replayed(decoder, caches[0])
    for turn, lengths in enumerate((shape.lengths, (100, 31, 0), (1400, 63, 1000))):
        for cache in caches:
            # Blocks of earlier turns remain where steps have not written.
            for name, whole in decoder.contents.items():
                fill(cache, name, whole, cache.lengths)
            set_lengths(cache, lengths)
        for step in range(STEPS):
            tokens = decoder.tokens(100 * turn + step)
            caches[1].reserve(num_tokens)
            expected = decoder.step(caches[1], tokens)
            caches[0].reserve(num_tokens)
            assert expected.isfinite().all()
            assert harness.same_bits(replayed(tokens), expected), (lengths, step)
            caches[0].advance(num_tokens)
            if page_size is not None and step % 5 == 0:
                move_page(caches[0], row=step % 3, column=0)
                move_page(caches[0], row=0, column=lengths[0] // page_size)
        harness.assert_same_bits(state_of(caches[0]), state_of(caches[1]))
        assert (caches[0].max_length, caches[0]._peak) == (caches[1].max_length, caches[1]._peak)


@SMALL_CHUNKS
@pytest.mark.parametrize('num_selected', [0, 4])
@PHI
@pytest.mark.usefixtures('chunks')
def test_launches_that_begin_early(
    phi: dict[str, Any], num_selected: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Launches that begin early have the bits of launches that wait, whichever program writes last."""
    sizes = (*MIXED.sizes[:3], num_selected, MIXED.sizes[4])
    decoder = Decoder(replace(MIXED, sizes=sizes, **phi, lengths=(1000, 63, 0), capacity=1400), device)
    caches = decoder.cache(), decoder.cache()
    for step in range(300):
        tokens = decoder.tokens(step % 16)
        outs = []
        for cache, can_overlap in zip(caches, (True, False), strict=True):
            with monkeypatch.context() as patch:
                if not can_overlap:
                    patch.setattr(settings_of_decoding, 'can_overlap', lambda _: False)
                outs.append(decoder.step(cache, tokens))
        assert harness.same_bits(*outs), step
    harness.assert_same_bits(*map(state_of, caches))


@NUM_TOKENS
@pytest.mark.parametrize('page_size', [None, 64])
def test_a_replay_past_the_capacity_drops_the_write(page_size: int | None, num_tokens: int, device: torch.device):
    """Full rows stay unchanged, and so does the memory around the tensors of the cache."""
    capacity = 320
    shape = replace(MIXED, lengths=(capacity - 6, capacity, 40), capacity=capacity, num_tokens=num_tokens)
    decoder = Decoder(replace(shape, page_size=page_size, has_window=True), device)
    caches, margins = (decoder.cache(), decoder.cache()), []
    for name in (*TOKENS, *PAIRS, 'raw_k', 'raw_v'):
        tensor = getattr(caches[0], name)
        whole = torch.full((len(tensor) + 2, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype, device=device)
        whole[1:-1] = tensor
        setattr(caches[0], name, whole[1:-1])
        margins += [whole[0], whole[-1]]
    full = {name: t[1].clone() for name, t in state_of(caches[0]).items()}
    replayed = Replayed(decoder, caches[0])
    steps = 12
    for step in range(steps):
        replayed(decoder.tokens(step))
        # Tokens that fit, one at a time, equal those of a cache without full rows.
        lengths = caches[0].lengths.tolist()
        assert lengths == [min(length + (step + 1) * num_tokens, capacity) for length in shape.lengths]
    assert harness.same_bits(caches[0].lengths, caches[0]._peaks)
    assert all(margin.isnan().all() for margin in margins)
    state = state_of(caches[0])
    for name, tensor in full.items():
        assert harness.same_bits(state[name][1], tensor), name
    # The short row, and the row that fills up meanwhile, equal those of steps that fit.
    longer = replace(decoder.shape, lengths=(capacity - 6, 0, 40), capacity=capacity + 64)
    roomy = Decoder(longer, device)
    cache = roomy.cache()
    for name, tensor in decoder.contents.items():
        count = roomy.contents[name].shape[1]
        entries = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, count - tensor.shape[1]))
        fill(cache, name, entries, cache.lengths)
    for step in range(steps):
        roomy.step(cache, decoder.tokens(step))
    expected = state_of(cache)
    for name in TOKENS:
        for row in (0, 2):
            assert harness.same_bits(state[name][row], expected[name][row, :capacity]), (name, row)
    count = num_compressed_blocks(capacity, *shape.sizes[:2])
    for name in PAIRS:
        for row in (0, 2):
            assert harness.same_bits(state[name][row], expected[name][row, :count]), (name, row)


@PHI
@NUM_TOKENS
def test_a_step_neither_waits_nor_allocates(num_tokens: int, phi: dict[str, Any], device: torch.device):
    """Without a graph too: after the first step the output is the only allocation besides those of φ."""
    decoder = Decoder(replace(MIXED, num_tokens=num_tokens, **phi), device)
    cache, tokens = decoder.cache(), [decoder.tokens(step) for step in range(5)]
    decoder.step(cache, tokens[0])
    blocks = [
        cache.session.workspace[key].transpose(1, 2)
        for key in cache.session.workspace
        if key[0] in ('blocks_k', 'blocks_v')
    ]
    networks = decoder.phi(cache.dtype)
    for new in tokens[1:]:
        in_phi = 0
        if 'learned' in phi:
            with torch.no_grad():
                before = torch.cuda.memory_stats(device)['allocation.all.allocated']
                networks.aligned(blocks, cache.dtype)
                in_phi = torch.cuda.memory_stats(device)['allocation.all.allocated'] - before
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated(device)
        before = torch.cuda.memory_stats(device)['allocation.all.allocated']
        torch.cuda.set_sync_debug_mode('error')
        try:
            out = decoder.step(cache, new)
        finally:
            torch.cuda.set_sync_debug_mode('default')
        made = torch.cuda.memory_stats(device)['allocation.all.allocated'] - before
        assert made == in_phi + 1
        del out
        assert torch.cuda.memory_allocated(device) == held


@pytest.mark.parametrize('page_size', [None, 128])
@NUM_TOKENS
def test_unused_memory_changes_nothing(num_tokens: int, page_size: int | None, device: torch.device):
    """NaN behind every row, in unused ring slots, and in the scratch buffers of steps."""
    shape = replace(MIXED, num_tokens=num_tokens, page_size=page_size, has_window=True)
    decoder = Decoder(shape, device)
    caches = [decoder.cache(background=background) for background in (0.0, torch.nan)]
    for step in range(STEPS):
        tokens = decoder.tokens(step)
        out, spoiled = (decoder.step(cache, tokens) for cache in caches)
        assert out.isfinite().all()
        assert harness.same_bits(out, spoiled), step
        poison_workspace(caches[1], harness.junk_of)
    states = [state_of(cache) for cache in caches]
    for name in states[0]:
        if not name.startswith('raw'):
            assert harness.same_bits(states[0][name], states[1][name]), name


@NUM_TOKENS
@PHI
def test_cropped_tokens_leave_nothing_behind(phi: dict[str, Any], num_tokens: int, device: torch.device):
    """Decoding again after `crop` has the bits of a cache that never held the cropped tokens."""
    shape = replace(MIXED, num_tokens=num_tokens, **phi, has_window=True)
    decoder = Decoder(shape, device)
    straight, cropped = decoder.cache(), decoder.cache()
    further = shape.max_rollback // num_tokens
    for turn in range(3):
        for step in range(3):
            tokens = decoder.tokens(100 * turn + step)
            assert harness.same_bits(decoder.step(cropped, tokens), decoder.step(straight, tokens)), (turn, step)
        bound = cropped.max_length
        for step in range(further):
            decoder.step(cropped, decoder.tokens(1000 + step))
        cropped.crop(cropped.lengths - further * num_tokens, max_length=bound)
        assert torch.equal(cropped.lengths, straight.lengths)
    states = state_of(straight), state_of(cropped)
    for name in (*TOKENS, *PAIRS):
        assert harness.same_bits(states[0][name], states[1][name]), name


@pytest.mark.parametrize('num_selected', [5, 12])
def test_prompts_of_different_lengths_give_the_text_of_each_alone(num_selected: int, device: torch.device):
    """In float32, where the likeliest token does not depend on the order of sums."""
    settings: dict[str, Any] = {
        'sliding_window_size': 32,
        'compress_block_size': 16,
        'compress_block_sliding_stride': 8,
        'selection_block_size': 16,
        'num_selected_blocks': num_selected,
    }
    torch.manual_seed(0)
    model = Transformer(256, 128, 2, 32, 8, 2, use_sparse_attn=True, sparse_attn_kwargs=settings).to(device).eval()
    lengths = (150, 7, 33, 1)
    mask = torch.arange(max(lengths), device=device) >= max(lengths) - torch.tensor(lengths, device=device)[:, None]
    ids = torch.randint(0, 256, mask.shape, device=device)
    together = model.generate(ids, 100, 0, mask=mask)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, -length:], 100, 0)
        assert torch.equal(alone[0], together[row]), row
