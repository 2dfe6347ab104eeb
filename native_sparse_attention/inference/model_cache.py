"""The caches of all layers of a model, which the model's forward advances together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.inference.cache import LayerCache, describe
from native_sparse_attention.inference.lengths import check_crop, repeated_rows


class ModelCache(Sequence[LayerCache]):
    """The `LayerCache` of each layer of a model.

    Indexing returns the cache of a layer. Methods and properties are those of a `LayerCache`, for all layers. All
    layers hold the same tokens: `check_even` refuses a cache that an interrupted call or a crop of one layer has left
    torn, and `crop` repairs it.

    Args:
        layers: a `LayerCache` per layer, all with the same number of rows.

    Raises:
        ValueError: layers is empty, or has an entry that is no `LayerCache` or has another number of rows.
    """

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        if not layers:
            raise ValueError('layers is empty, but a model has at least one layer')
        for index, layer in enumerate(layers):
            if not isinstance(layer, LayerCache):
                raise ValueError(f'layers[{index}] is a {type(layer).__name__}, but must be a LayerCache')
            if layer.batch_size != layers[0].batch_size:
                rows, expected = layer.batch_size, layers[0].batch_size
                raise ValueError(f'layers[{index}] has {rows} rows, but must have {expected} as layers[0]')
        self.layers = list(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index):
        return self.layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)

    def __repr__(self) -> str:
        kind, torn = type(self.layers[0]).__name__, f'torn: {self._parts()}' if self._is_torn() else None
        return f'ModelCache(layers={len(self)} of {kind}, {describe(self.layers, torn)})'

    @property
    def lengths(self) -> Tensor:
        return self.layers[0].lengths

    @property
    def max_length(self) -> int:
        return self.layers[0].max_length

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold in every layer."""
        return min(layer.capacity for layer in self.layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def check_even(self) -> None:
        """Raise ValueError where layers hold different numbers of tokens, as far as the host knows."""
        if self._is_torn():
            shortest = min(layer.max_length for layer in self.layers)
            raise ValueError(
                f'cache is torn by an interrupted call or a crop of one layer: {self._parts()}; crop({shortest}) '
                f'repairs it, or crop(0) where max_rollback does not reach that far'
            )

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens in every layer.

        Raises ValueError for a torn cache and where a layer has no room, before any layer grows.
        """
        self.check_even()
        if all(layer.has_room(num_tokens) for layer in self.layers):
            return
        for index, layer in enumerate(self.layers):
            layer.check_room(num_tokens, f'cache[{index}]')
        for layer in self.layers:
            layer.reserve(num_tokens)

    def advance(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.advance(num_tokens)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def reorder(self, index: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(index)

    def select(self, index: Tensor) -> ModelCache:
        return ModelCache([layer.select(index) for layer in self.layers])

    def repeat_interleave(self, repeats: int) -> ModelCache:
        return self.select(repeated_rows(self.batch_size, repeats))

    def crop(self, length: int | Tensor, *, max_length: int | None = None) -> None:
        """Crop every layer as `LayerCache.crop` does, or none where one refuses.

        A torn cache is repaired: no row keeps more tokens than it has in every layer. That waits for the device.
        """
        torn = self._is_torn()
        if torn:
            length, max_length = self._common(length, max_length)
        crops = [layer.plan_crop(length, max_length, reads=torn) for layer in self.layers]
        row_crops = max(layer.row_crops for layer in self.layers)
        for layer, crop in zip(self.layers, crops, strict=True):
            layer.apply_crop(crop)
            if torn and layer.max_length:
                layer.row_crops = row_crops + 1

    def _is_torn(self) -> bool:
        first = self.layers[0]
        return any(layer.max_length != first.max_length for layer in self.layers) or self._crops_differ()

    def _crops_differ(self) -> bool:
        return any(layer.row_crops != self.layers[0].row_crops for layer in self.layers)

    def _parts(self) -> str:
        """Return which layers hold how many tokens, as in 'layers 0 to 2 hold up to 9, layer 3 holds up to 8 tokens a
        row', and where they differ the crops to a length per row.
        """
        parts, start, differ = [], 0, self._crops_differ()
        for (held, crops), group in groupby((layer.max_length, layer.row_crops) for layer in self.layers):
            end = start + len(list(group)) - 1
            name = f'layer {start} holds' if start == end else f'layers {start} to {end} hold'
            parts.append(f'{name} up to {held}' + (f' after {crops} crops by row' if differ else ''))
            start = end + 1
        return ', '.join(parts) + ' tokens a row'

    def _common(self, length: int | Tensor, max_length: int | None) -> tuple[Tensor, int]:
        """Return the lengths `[B]` that all layers can be cropped to, up to length, and the host's bound on them."""
        check_crop(self.batch_size, length, max_length)
        bounds = (
            length if not isinstance(length, Tensor) else max_length,
            *(layer.max_length for layer in self.layers),
        )
        bound = min(bound for bound in bounds if bound is not None)
        held = torch.stack([layer.lengths for layer in self.layers]).amin(0)
        return torch.minimum(held, torch.as_tensor(length, device=held.device)), bound


def check_model_cache(cache: Any) -> None:
    """Raise ValueError unless cache is the cache of a model."""
    if not isinstance(cache, ModelCache):
        kind = type(cache).__name__
        raise ValueError(f'cache is a {kind}, but must be a ModelCache, as init_cache of the model gives')
