"""Decoding kernels on a GPU in merged mode: one softmax reads selected blocks and window.

python -m pytest -m gpu -n 8 tests/gpu/test_decoding_merged.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from native_sparse_attention.testing import assert_matches
from tests.gpu.test_decoding import (
    COUNT,
    LAUNCHED,
    MIXED,
    NUM_TOKENS,
    PHI,
    STEPS,
    Replayed,
    harness,
    settings_of_decoding,
    shared_gpu,  # noqa: F401 - a fixture
)
from tests.support.gpu_decoding_problems import (
    Decoder,
    assert_obeys_the_rules,
    draw_shape,
    poison_workspace,
    set_lengths,
    state_of,
)

pytestmark = pytest.mark.gpu

MERGED = pytest.mark.parametrize('merged', ['gate', 'output gate', 'scores'])


@pytest.mark.parametrize('index', range(COUNT))
@MERGED
def test_rules(merged: str, index: int, device: torch.device):
    """Random problems, in workspace filled with NaN."""
    shape = replace(draw_shape(index), merged=merged, has_window=False)
    with harness.poisoned_allocations():
        assert_obeys_the_rules(Decoder(shape, device))


@pytest.mark.parametrize('num_selected', [0, 33])
@MERGED
def test_no_selected_blocks_and_more_than_exist(merged: str, num_selected: int, device: torch.device):
    sizes = (32, 16, 64, num_selected, 128)
    decoder = Decoder(replace(MIXED, lengths=(70, 0, 200), capacity=300, sizes=sizes, merged=merged), device)
    if num_selected:
        assert_obeys_the_rules(decoder)
        return
    kinds = ((MIXED.dtype, 'triton'), (torch.float64, 'eager'), (MIXED.dtype, 'eager'))
    assert_matches(*(decoder.step(decoder.cache(dtype), decoder.tokens(0), name) for dtype, name in kinds), name='out')


@pytest.mark.parametrize('tiles_of_program', [1, 4], ids=['attend_few', 'attend'])
@pytest.mark.parametrize(('dtype', 'head_dim'), LAUNCHED, ids=str)
@MERGED
def test_every_launch_setting(
    merged: str,
    dtype: torch.dtype,
    head_dim: int,
    tiles_of_program: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
):
    """Every launch setting passes the error rules; the first call and overlapping launches have the bits of later calls
    and of launches that wait.
    """
    shape = replace(MIXED, lengths=(1000, 127), dtype=dtype, head_dim=head_dim, value_dim=head_dim, kv_heads=1)
    decoder, outs = Decoder(replace(shape, merged=merged), device), []
    overlaps = settings_of_decoding.can_overlap(device)
    for overlapping in (overlaps, overlaps, False, False):
        monkeypatch.setattr(settings_of_decoding, 'can_overlap', lambda _, overlapping=overlapping: overlapping)
        outs.append(torch.cat(assert_obeys_the_rules(decoder, 20, num_splits=3, tiles_of_program=tiles_of_program)))
    assert all(harness.same_bits(out, outs[0]) for out in outs)


@PHI
@NUM_TOKENS
@pytest.mark.parametrize('page_size', [None, 128])
@MERGED
def test_a_replay_is_a_step(
    merged: str, page_size: int | None, num_tokens: int, phi: dict[str, Any], device: torch.device
):
    """A graph captured with short rows is replayed at later lengths of every row."""
    shape = replace(MIXED, lengths=(3, 0, 40), num_tokens=num_tokens, page_size=page_size, **phi)
    decoder = Decoder(replace(shape, merged=merged), device)
    caches = decoder.cache(), decoder.cache()
    replayed = Replayed(decoder, caches[0])
    for turn, lengths in enumerate((shape.lengths, (100, 31, 0), (1400, 63, 1000))):
        for cache in caches:
            set_lengths(cache, lengths)
        for step in range(STEPS):
            tokens = decoder.tokens(100 * turn + step)
            expected = decoder.step(caches[1], tokens)
            assert expected.isfinite().all()
            assert harness.same_bits(replayed(tokens), expected), (lengths, step)
            caches[0].advance(num_tokens)
        harness.assert_same_bits(*map(state_of, caches))


@pytest.mark.parametrize('batch', [1, 160])
@MERGED
@torch.no_grad()
def test_repeated_steps_give_the_same_bits(merged: str, batch: int, device: torch.device):
    lengths = (1023,) if batch == 1 else MIXED.lengths * (batch // 5)
    decoder = Decoder(replace(MIXED, lengths=lengths, num_tokens=2, merged=merged), device)
    cache, tokens = decoder.cache(), decoder.tokens(0)
    start = cache.lengths.clone()
    expected = decoder.step(cache, tokens)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(300):
        cache.lengths.copy_(start)
        cache.advance(-2)
        differs |= (decoder.step(cache, tokens) != expected).any()
    assert expected.isfinite().all()
    assert not differs


@NUM_TOKENS
@MERGED
def test_unused_memory_changes_nothing(merged: str, num_tokens: int, device: torch.device):
    """NaN behind every row and in the scratch buffers of steps."""
    decoder = Decoder(replace(MIXED, num_tokens=num_tokens, merged=merged), device)
    caches = [decoder.cache(background=background) for background in (0.0, torch.nan)]
    for step in range(STEPS):
        tokens = decoder.tokens(step)
        out, spoiled = (decoder.step(cache, tokens) for cache in caches)
        assert out.isfinite().all()
        assert harness.same_bits(out, spoiled), step
        poison_workspace(caches[1], harness.junk_of)
