"""Restoration of caches after a call that raised or was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from native_sparse_attention.inference.cache import LayerCache
from native_sparse_attention.inference.lengths import is_captured

# Calls of more tokens copy the rings that they may overwrite; steps of fewer tokens are spared the copies.
MAX_STEP = 16


class _Rings(NamedTuple):
    raw_k: Tensor | None
    raw_v: Tensor | None
    peaks: Tensor
    peak: int


class Checkpoint:
    """The state of the caches of one or more layers before a call, which all hold the same tokens.

    Copies their lengths, once for all layers, and where the call appends more tokens than `max_rollback` allows to take
    back, the rings too. Keys and values are not copied: entries behind a length are never read.

    layers: caches that the call advances. num_tokens: T, the tokens per row of the call. lengths: a copy of their
    lengths, if there is one.
    """

    def __init__(self, layers: Sequence[LayerCache], num_tokens: int, lengths: Tensor | None = None) -> None:
        self._layers, self._num_tokens, first = layers, num_tokens, layers[0]
        self._max_length = first.max_length
        if lengths is None and not is_captured(first.lengths):
            lengths = first.lengths.clone()
        self._lengths = lengths
        saves = num_tokens > MAX_STEP and lengths is not None
        self._rings = [
            _copy_rings(layer) if saves and not can_retract(layer, self._max_length, num_tokens) else None
            for layer in layers
        ]

    def restore(self) -> None:
        """Give every cache back the tokens that it had, where that is possible.

        It is not during the capture of a CUDA graph, nor where a call of up to MAX_STEP tokens exceeds `max_rollback`;
        then some layers may hold more tokens than others.
        """
        if self._lengths is None:
            return
        for layer, rings in zip(self._layers, self._rings, strict=True):
            if rings is None and not can_retract(layer, self._max_length, self._num_tokens):
                continue
            layer.lengths.copy_(self._lengths)
            layer.max_length = self._max_length
            if rings is None:
                settle_peaks(layer, self._num_tokens)
            else:
                _put_back(layer, rings)


def retract(cache: LayerCache, num_tokens: int, counts: Tensor | None) -> None:
    """Take back the last append, of num_tokens tokens per row or counts `[B]` of them, where that is possible."""
    if can_retract(cache, cache.max_length - num_tokens, num_tokens):
        cache.lengths.sub_(num_tokens if counts is None else counts)
        cache.max_length -= num_tokens
        settle_peaks(cache, num_tokens)


def _has_ring(cache: LayerCache) -> bool:
    return cache.max_rollback is not None and (cache.raw_k is not None or cache.raw_v is not None)


def can_retract(cache: LayerCache, max_length: int, num_tokens: int) -> bool:
    """Return whether rows of max_length tokens can give num_tokens more back without a copy of the rings."""
    return max_length == 0 or not _has_ring(cache) or num_tokens <= (cache.max_rollback or 0)


def settle_peaks(cache: LayerCache, num_tokens: int) -> None:
    """Set the peaks after an append of up to num_tokens tokens that was interrupted or taken back."""
    if _has_ring(cache):  # which may be overwritten
        cache._peaks.copy_(torch.maximum(cache._peaks, cache.lengths + num_tokens))
        cache.set_bounds(cache.max_length, max(cache._peak, cache.max_length + num_tokens))
    else:
        cache._peaks.copy_(cache.lengths)
        cache.set_bounds(cache.max_length, cache.max_length)


def _copy_rings(layer: LayerCache) -> _Rings:
    raw_k, raw_v = (None if ring is None else ring.clone() for ring in (layer.raw_k, layer.raw_v))
    return _Rings(raw_k, raw_v, layer._peaks.clone(), layer._peak)


def _put_back(layer: LayerCache, rings: _Rings) -> None:
    for ring, saved in ((layer.raw_k, rings.raw_k), (layer.raw_v, rings.raw_v)):
        if ring is not None and saved is not None:
            ring.copy_(saved)
    layer._peaks.copy_(rings.peaks)
    layer._peak = rings.peak
