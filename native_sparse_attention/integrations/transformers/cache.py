"""One layer of a transformers cache, over the `LayerCache` of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from native_sparse_attention.core.checks import shown
from native_sparse_attention.inference.cache import FIRST_CAPACITY, LayerCache
from native_sparse_attention.inference.decode import nsa_decode
from native_sparse_attention.inference.lengths import repeated_rows
from native_sparse_attention.integrations.transformers.dense_start import replace_dense_start
from native_sparse_attention.integrations.transformers.layout import Layout, may_read

if TYPE_CHECKING:
    from native_sparse_attention.integrations.transformers.attention import Compressor, NSAAttention, Tokens


class NSACacheLayer(CacheLayerMixin):
    """Keys, values and compressed keys of one converted layer.

    Rows hold their real tokens alone, from the front; transformers counts padding too, here as columns. `crop` takes
    back any number of columns.

    Args:
        max_cache_len: columns for which memory is allocated once, or None for a layer that grows.

    Attributes:
        rows: the `LayerCache`, or None before the first tokens.
        min_length: at least so many tokens are in each row.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None) -> None:
        self.max_cache_len = max_cache_len
        self.rows: LayerCache | None = None
        self._clear()

    def _clear(self) -> None:
        self._columns = self.min_length = 0
        self._held = (0, 0)  # max_length and row_crops of rows, as this layer left them
        self._real: Tensor | None = None  # bool [B, columns]; None where no column has padding

    @property  # type: ignore[override]
    def is_initialized(self) -> bool:
        return self.rows is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch. Raises AttributeError before the first tokens, as transformers expects."""
        if self.rows is None:
            raise AttributeError('batch_size is unknown before the first tokens')
        return self.rows.batch_size

    max_batch_size = batch_size  # read by older versions of transformers, which use a static cache again

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """`[B, H, S, D]`, S the length of the longest row: rotated keys of each row from its first real token on."""
        return None if self.rows is None else self.rows.read(self.rows.max_length)[0].transpose(1, 2)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """`[B, H, S, D]`, as `keys`."""
        return None if self.rows is None else self.rows.read(self.rows.max_length)[1].transpose(1, 2)

    @property
    def device(self) -> torch.device | None:
        return None if self.rows is None else self.rows.device

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.rows is None else self.rows.dtype

    def start(
        self, attention: NSAAttention, tokens: Tokens, k_cmp: Tensor, v_cmp: Tensor | None, lengths: Tensor | None
    ) -> None:
        """Write the first tokens, detached. k_cmp, v_cmp `[B, C, H, D]`; lengths: int32 `[B]`, real tokens of rows."""
        rows = self._make_rows(attention, tokens)
        k, v, raw_k, k_cmp = (t.detach() for t in (tokens.k, tokens.v, tokens.raw_k, k_cmp))
        blocks = torch.arange(k_cmp.shape[1], device=k.device).expand(len(k), -1)
        with torch.no_grad():
            compressed = (blocks, k_cmp, None if v_cmp is None else v_cmp.detach())
            rows.append(k, v, counts=lengths, raw_k=raw_k, compressed=compressed)

    def decode(self, attention: NSAAttention, tokens: Tokens, lengths: Tensor | None) -> Tensor:
        """Append tokens after those of the cache and return their output `[B, T, HQ, D]`."""
        rows, nsa = self.rows, attention.nsa
        assert rows is not None
        q, k, v, q_cmp, raw_k, gates = tokens
        self._check_room(rows, q.shape[1])
        has_dense = self.min_length < nsa.dense_below
        offset = rows.lengths.clone() if has_dense else rows.lengths
        compress_k, compress_v = attention.k_compress, attention.v_compress
        plain = {} if nsa.block_scores == 'rotated' else {'q_cmp': q_cmp, 'raw_k': raw_k}
        with _loaded(compress_k, compress_v):
            out = nsa_decode(
                *(q, k, v, gates, rows),
                networks=(compress_k.network, None if compress_v is None else compress_v.network),
                positions=(compress_k.positions, None if compress_v is None else compress_v.positions),
                counts=lengths,
                window_size=nsa.sliding_window_size,
                **plain,
                **attention.sparse_settings,
                **attention.logit_settings,
            )
        if not has_dense:
            return out
        old_k, old_v, *_ = rows.read(min(rows.max_length, nsa.dense_below))
        held = (q, old_k.to(q.dtype), old_v.to(q.dtype))
        return replace_dense_start(out, held, nsa.dense_below, offset, rows.lengths, attention.logit_settings)

    def advance(self, layout: Layout, num_tokens: int) -> None:
        """Count the columns of tokens that were written."""
        mask = None if layout.order is None else layout.order.mask
        if mask is not None or self._real is not None:
            assert self.rows is not None
            ones = partial(torch.ones, dtype=torch.bool, device=self.rows.device)
            old = ones(self.rows.batch_size, self._columns) if self._real is None else self._real
            new = ones(self.rows.batch_size, num_tokens) if mask is None else mask
            self._real = torch.cat((old, new), 1)
        self._columns += num_tokens
        self.min_length += layout.min_count
        self._note_rows()

    def _note_rows(self) -> None:
        assert self.rows is not None
        self._held = self.rows.max_length, self.rows.row_crops

    @property
    def is_torn(self) -> bool:
        """Whether tokens of rows are not those of the columns: after an interrupted call, or a crop of rows alone."""
        return self.rows is not None and self._held != (self.rows.max_length, self.rows.row_crops)

    @property
    def padded_lengths(self) -> Tensor | None:
        """int32 `[B]`, real tokens of each row; None where no column has padding."""
        return None if self._real is None or self.rows is None else self.rows.lengths

    def check_past(self, attention_mask: Tensor) -> None:
        """Raise ValueError where a mask `[B, S]` on the CPU disagrees about the columns that are in the cache."""
        if not attention_mask.is_cpu or not may_read(attention_mask) or self._columns == 0:
            return
        past = attention_mask[:, : self._columns].bool()
        same = past if self._real is None else past == self._real
        if not bool(same.all()):
            raise ValueError(
                f'attention_mask differs from the masks with which its first {self._columns} columns were cached, but '
                f'padding in the cache cannot change'
            )

    def get_seq_length(self) -> int:
        """Return the number of columns."""
        return self._columns

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the mask that dense layers of the model need."""
        return (self._columns + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove -n columns for n below 0, as transformers does; a positive n is the number of columns to keep.

        Raises ValueError for anything but an integer: all rows lose the same columns.
        """
        if not isinstance(tokens_to_remove, Integral) or isinstance(tokens_to_remove, bool):
            raise ValueError(f'tokens_to_remove is {shown(tokens_to_remove)}, but must be an integer, for all rows')
        count = int(tokens_to_remove)
        keep = min(self._columns, count) if count > 0 else self._columns + count
        keep = max(0, keep)
        removed = self._columns - keep
        if self.rows is None or (removed == 0 and keep > 0):
            return
        was_torn = self.is_torn
        if self._real is None:
            self.rows.crop(keep)
        else:
            self._real = self._real[:, :keep]
            self.rows.crop(self._real.sum(1, dtype=torch.int32), max_length=min(keep, self.rows.max_length))
        self._columns, self.min_length = keep, max(0, self.min_length - removed)
        if not was_torn or keep == 0:  # rows without tokens are those of no columns
            self._note_rows()

    def reset(self) -> None:
        """Empty every row. A layer of fixed size keeps its memory."""
        if self.max_cache_len is None:
            self.rows = None
        elif self.rows is not None:
            self.rows.reset()
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row beam_idx[b]."""
        if self.rows is not None:
            self.rows.reorder(beam_idx.to(self.rows.device))
            self._real = None if self._real is None else self._real[beam_idx.to(self._real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, copies next to each other."""
        if self.rows is not None:
            self.batch_select_indices(repeated_rows(self.rows.batch_size, repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`, integers `[N]` or bool `[B]`."""
        if self.rows is not None:
            index = torch.arange(self.rows.batch_size, device=self.rows.device)[indices.to(self.rows.device)]
            self.rows = self.rows.select(index)
            self._real = None if self._real is None else self._real[index]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse, because the memory depends on the attention layer, which allocates it."""
        raise ValueError('the cache layer of sparse attention must be initialized by its attention layer')

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse, because keys of sparse attention are compressed too."""
        raise ValueError('the cache layer of sparse attention must be written by its attention layer, not by update')

    def offload(self) -> None:
        """Refuse."""
        raise ValueError('the cache is offloaded, but the cache of sparse attention must stay on its device')

    prefetch = offload

    def _make_rows(self, attention: NSAAttention, tokens: Tokens) -> LayerCache:
        """Return empty rows for such tokens, with room for them."""
        (batch, num_tokens, kv_heads, dim), k, nsa = tokens.k.shape, tokens.k, attention.nsa
        rows = self.rows
        if rows is None or (rows.batch_size, rows.dtype, rows.device) != (batch, k.dtype, k.device):
            rows = LayerCache(
                *(batch, self.max_cache_len or max(FIRST_CAPACITY, num_tokens)),
                kv_heads=kv_heads,
                head_dim=dim,
                value_dim=tokens.v.shape[3],
                max_rollback=None,
                compress=(nsa.compress_block_size, nsa.compress_block_sliding_stride),
                has_raw_k=nsa.block_scores == 'plain',
                has_v_cmp=attention.v_compress is not None,
                dtype=k.dtype,
                device=k.device,
                grows=self.max_cache_len is None,
            )
        self._check_room(rows, num_tokens)
        rows.reserve(num_tokens)
        self.rows = rows
        return rows

    def _check_room(self, rows: LayerCache, num_tokens: int) -> None:
        """Raise ValueError where `num_tokens` more columns do not fit a static cache."""
        if self.max_cache_len is not None and not rows.has_room(num_tokens):
            raise ValueError(
                f'max_cache_len of the cache is {self.max_cache_len}, but must be at least '
                f'{rows.max_length + num_tokens} for the {num_tokens} next tokens'
            )


@contextmanager
def _loaded(*compressors: Compressor | None) -> Iterator[None]:
    """Hold the weights of compressors on their device where accelerate offloads them.

    It loads the weights of a module for a call of it, but decoding reads weights without a call.
    """
    offloaded = [c for c in compressors if c is not None and c.positions.is_meta]
    with ExitStack() as stack:
        if offloaded:
            from accelerate.utils import align_module_device

            for module in nn.ModuleList(offloaded).modules():
                stack.enter_context(align_module_device(module))
        yield


def check_cache(cache: Any) -> None:
    """Raise ValueError for a cache that is not a transformers cache with layers of its own, or is offloaded."""
    if not isinstance(cache, Cache) or not hasattr(cache, 'layers'):
        raise ValueError(f'cache is a {type(cache).__name__}, but must be a DynamicCache or a StaticCache')
    if getattr(cache, 'offloading', False):
        raise ValueError('the cache is offloaded, but the cache of sparse attention must stay on its device')


def check_even(cache: Any, indices: Sequence[int]) -> None:
    """Raise ValueError where the layers at `indices`, with sparse attention, do not hold the same columns.

    An interrupted call leaves such a cache, and so does a crop of one layer or of its `rows`. A layer that no call has
    reached is still a dense one, or missing, and holds 0 columns.
    """
    layers = [cache.layers[i] if i < len(cache.layers) else None for i in indices]
    held = [layer.get_seq_length() if isinstance(layer, NSACacheLayer) else 0 for layer in layers]
    for index, layer, columns in zip(indices, layers, held, strict=True):
        if columns != held[0]:
            raise ValueError(
                f'cache is torn by an interrupted call or a crop of one layer: layer {index} holds {columns} columns, '
                f'but layer {indices[0]} holds {held[0]}. Use a new cache'
            )
        if isinstance(layer, NSACacheLayer) and layer.is_torn:
            raise ValueError(
                f'cache is torn by an interrupted call or a crop of rows: those of layer {index} do not hold its '
                f'{columns} columns. Use a new cache'
            )


def layer_of(cache: Any, index: int) -> NSACacheLayer:
    """Return the cache layer of the attention layer at `index`, which takes the place of an empty dense one.

    Raises ValueError for a layer that is quantised or holds dense keys.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer: Any = cache.layers[index]
    if isinstance(layer, NSACacheLayer):
        return layer
    if type(layer) not in (DynamicLayer, StaticLayer):
        kind = type(layer).__name__
        raise ValueError(f'layer {index} of the cache is a {kind}, but must be a DynamicLayer or a StaticLayer')
    if int(layer.get_seq_length()) > 0:
        raise ValueError(f'layer {index} of the cache holds dense keys, but must be empty before sparse attention')
    new = NSACacheLayer(getattr(layer, 'max_cache_len', None))
    cache.layers[index] = new
    return new
