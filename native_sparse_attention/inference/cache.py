"""The key/value cache of one layer: preallocated tensors that are written in place.

Each row of a batch has its own length. Lengths are on the device; the host keeps upper bounds only, so appending never
waits for the device. Entries behind the length of a row are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention.core import checks
from native_sparse_attention.core.autocast import concatenate
from native_sparse_attention.core.geometry import num_compressed_blocks
from native_sparse_attention.inference.lengths import RowLengths, checked_index, repeated_rows, zeros
from native_sparse_attention.inference.ring import read_ring, rows_of, write_ring
from native_sparse_attention.inference.session import Session
from native_sparse_attention.ops.decoding.step import Storage

FIRST_CAPACITY = 64  # tokens per row of a new cache that grows
MAX_ROLLBACK = 32  # default of max_rollback

TOKENS = ('k', 'v', 'k_window', 'v_window')  # tensors with one entry per token
PAIRS = ('k_cmp', 'v_cmp')  # tensors with one entry per compressed block
RINGS = ('raw_k', 'raw_v')  # tensors with one entry per recent token


class LayerCache(RowLengths):
    """Keys, values and lengths of the past tokens of one attention layer.

    Tensors: k `[B, capacity, H, D]` with rotary embedding, v `[B, capacity, H, DV]`. With compress=(l, d) also k_cmp
    and v_cmp `[B, C + 1, H, D or DV]` (the last slot takes the candidate of an incomplete block), and the rings raw_k
    and raw_v `[B, R, H, D or DV]` of the latest keys without rotary embedding and values, from which the next
    compressed block is computed. Position p is in slot p mod R, with R = l - 1 + max_rollback, or the capacity where
    max_rollback is None. Without a ring, k or v serve instead. k_window and v_window are those of has_window.

    Args:
        batch_size: number of rows.
        max_seq_len: tokens per row.
        kv_heads: H, number of KV heads.
        head_dim: D, size of a key head.
        value_dim: DV, size of a value head.
        max_rollback: tokens that `crop` can take back; None: all of them, for which the rings hold every token.
        compress: (l, d), or None for a layer without compressed keys.
        has_raw_k: keep a ring of keys without rotary embedding, from which blocks are compressed.
        has_raw_v: keep a ring of values, where those of the compressed branch differ from v.
        has_window: keep keys and values of its own for the window branch.
        has_v_cmp: keep compressed values.
        dtype: dtype of keys and values.
        device: device of the tensors.
        grows: where max_seq_len is exceeded, replace the tensors by others of twice the capacity instead of raising.

    Attributes:
        lengths: int32 `[B]` on the device, tokens of each row.
        max_length: int on the host; no row is longer.
        layout: the settings that a layer and its cache must agree on.
        session: scratch buffers and recorded launches of the decode kernels.
        page_size: of a `PagedLayerCache`; None here.
        page_size_cmp: of a `PagedLayerCache`; None here.
        block_table: of a `PagedLayerCache`; None here.
        block_table_cmp: of a `PagedLayerCache`; None here.
    """

    page_size: int | None = None
    page_size_cmp: int | None = None
    block_table: Tensor | None = None
    block_table_cmp: Tensor | None = None

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        max_rollback: int | None = MAX_ROLLBACK,
        compress: tuple[int, int] | None = None,
        has_raw_k: bool = False,
        has_raw_v: bool = False,
        has_window: bool = False,
        has_v_cmp: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        grows: bool = False,
    ) -> None:
        checks.check_positive(batch_size=batch_size, max_seq_len=max_seq_len)
        checks.check_positive(kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
        if max_rollback is not None:
            checks.check_not_negative(max_rollback=max_rollback)
        checks.check_flags(
            has_raw_k=has_raw_k, has_raw_v=has_raw_v, has_window=has_window, has_v_cmp=has_v_cmp, grows=grows
        )
        checks.check_float_dtype(dtype=dtype)
        check_compress(compress)
        RowLengths.__init__(self, batch_size, max_rollback, device)
        self.compress, self.grows = compress, grows
        self.layout = {
            'kv_heads': kv_heads,
            'head_dim': head_dim,
            'value_dim': value_dim,
            'compress': compress,
            'has_raw_k': has_raw_k,
            'has_raw_v': has_raw_v,
            'has_window': has_window,
            'has_v_cmp': has_v_cmp,
        }

        def stored(name: str, slots: int, dim: int) -> Tensor:
            return self._make(name, (batch_size, slots, kv_heads, dim), dtype, device)

        self.k, self.v = stored('k', max_seq_len, head_dim), stored('v', max_seq_len, value_dim)
        self.k_window = self.v_window = self.k_cmp = self.v_cmp = self.raw_k = self.raw_v = None
        if has_window:
            self.k_window = stored('k_window', max_seq_len, head_dim)
            self.v_window = stored('v_window', max_seq_len, value_dim)
        if compress is not None:
            block_size, stride = compress
            slots = num_compressed_blocks(max_seq_len, block_size, stride) + 1
            self.k_cmp = stored('k_cmp', slots, head_dim)
            self.v_cmp = stored('v_cmp', slots, value_dim) if has_v_cmp else None
            ring = max_seq_len if max_rollback is None else max(1, block_size - 1 + max_rollback)
            self.raw_k = zeros((batch_size, ring, kv_heads, head_dim), dtype, device) if has_raw_k else None
            self.raw_v = zeros((batch_size, ring, kv_heads, value_dim), dtype, device) if has_raw_v else None
        self.session = Session()

    def __repr__(self) -> str:
        return f'{type(self).__name__}({describe([self])})'

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, whole pools of pages included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def has_room(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more tokens per row fit without growing."""
        return self.max_length + num_tokens <= self.capacity

    def check_room(self, num_tokens: int, name: str = 'the cache') -> None:
        """Raise ValueError where `num_tokens` more tokens per row may not fit and the cache does not grow."""
        if not self.grows and not self.has_room(num_tokens):
            raise ValueError(
                f'{name} holds up to {self.max_length} tokens a row and gets {num_tokens} more, but its capacity is '
                f'{self.capacity}: pass a larger max_seq_len to init_cache'
            )

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens per row, or raise ValueError as `check_room` does."""
        if self.has_room(num_tokens):
            return
        self.check_room(num_tokens)
        capacity = self.capacity
        while capacity < self.max_length + num_tokens:
            capacity *= 2
        self._grow(capacity)

    def read(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return k, v, k_window, v_window `[B, num_tokens, H, D or DV]`: the first tokens of every row.

        Entries behind the end of a shorter row are undefined. The tensors are views where the cache is contiguous.
        """
        k, v, k_window, v_window = (self._read(name, num_tokens) for name in TOKENS)
        return k, v, k_window, v_window

    def read_compressed(self, num_blocks: int) -> tuple[Tensor, Any]:
        """Return k_cmp and v_cmp (or None) `[B, num_blocks, H, D or DV]`: the first compressed blocks, as `read`."""
        assert self.compress is not None
        return self._read('k_cmp', num_blocks), self._read('v_cmp', num_blocks)

    def storage(self) -> Storage:
        """Return the tensors as an argument of the decoding kernels."""
        return Storage(*self.owned_tensors(), self.capacity)  # type: ignore[call-arg]

    def owned_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors of `storage`, in its order."""
        return (
            *(self.k, self.v, self.k_window, self.v_window, self.k_cmp, self.v_cmp, self.raw_k, self.raw_v),
            *(self.lengths, self._peaks, self.block_table, self.block_table_cmp),
        )

    def positions(self, num_tokens: int) -> Tensor:
        """Return int64 `[B, num_tokens]`: the positions of the next tokens of every row."""
        return self.lengths.long()[:, None] + torch.arange(num_tokens, device=self.device)

    def block_candidates(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the compressed blocks that new tokens may complete; call it before `append`.

        k, v: `[B, T, H, D]`, `[B, T, H, DV]`: the new keys before rotary and the new values. Returns the block indices,
        int64 `[B, K]` with K the most blocks that T tokens can complete, and their tokens `[B, K, l, H, D]` and
        `[B, K, l, H, DV]`. Tokens of a block that stays incomplete are undefined.
        """
        assert self.compress is not None
        block_size, stride = self.compress
        num_tokens = k.shape[1]
        longest = num_compressed_blocks(self.max_length + num_tokens, block_size, stride)
        num_candidates = min(-(-num_tokens // stride), longest)
        old = self.lengths.long()
        first_block = num_compressed_blocks(old, block_size, stride)
        blocks = first_block[:, None] + torch.arange(num_candidates, device=self.device)
        # [B, K, l]: index of each token in the history, which has l - 1 old tokens and then the new ones.
        history_start = old - (block_size - 1)
        token = blocks[..., None] * stride + torch.arange(block_size, device=self.device) - history_start[:, None, None]
        token = token.clamp(0, block_size - 2 + num_tokens)
        row = torch.arange(self.batch_size, device=self.device)[:, None, None]
        history = history_start[:, None] + torch.arange(block_size - 1, device=self.device)
        raw_k, raw_v = (
            concatenate((self._recent(name, history), new.to(self.dtype)), 1)[row, token]
            for name, new in (('k', k), ('v', v))
        )
        return blocks, raw_k, raw_v

    def append(
        self,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        k_window: Tensor | None = None,
        v_window: Tensor | None = None,
        raw_k: Tensor | None = None,
        raw_v: Tensor | None = None,
        compressed: tuple[Tensor, Tensor, Tensor | None] | None = None,
    ) -> None:
        """Write new tokens behind every row and advance its length.

        k, k_window, raw_k: `[B, T, H, D]`; v, v_window, raw_v: `[B, T, H, DV]`. counts: int32 `[B]`, number of real
        tokens of each row, which stand first (default T). compressed: the indices that `block_candidates` returned,
        with the compressed keys `[B, K, H, D]` and values `[B, K, H, DV]` of those blocks (None without v_cmp).
        """
        num_tokens = k.shape[1]
        assert self.max_length + num_tokens <= self.capacity, 'reserve first'
        old = self.lengths.long()
        new = old + (num_tokens if counts is None else counts)
        position = self.positions(num_tokens)
        for name, tokens in zip(TOKENS, (k, v, k_window, v_window), strict=True):
            if tokens is not None and getattr(self, name) is not None:
                self._write(name, position, tokens.to(self.dtype), new)
        for ring, tokens in ((self.raw_k, raw_k), (self.raw_v, raw_v)):
            if ring is not None and tokens is not None:
                write_ring(ring, tokens.to(self.dtype), old, new)
        if compressed is not None and self.compress is not None:
            block, *pair = compressed
            num_blocks = num_compressed_blocks(new, *self.compress)
            for name, summaries in zip(PAIRS, pair, strict=True):
                if summaries is not None:
                    self._write(name, block, summaries.to(self.dtype), num_blocks)
        peaks = torch.maximum(self._peaks, new)
        self.lengths.copy_(new)
        self._peaks.copy_(peaks)
        self.advance(num_tokens)

    def reorder(self, index: Tensor) -> None:
        """Replace row b by row index[b] in place, as a step of beam search needs it. index: int32 or int64 `[B]`."""
        self._copy_rows(self, checked_index(index, self.batch_size, self.batch_size))

    def select(self, index: Tensor) -> LayerCache:
        """Return a new cache whose row i is a copy of row index[i]; this cache stays as it is.

        index: int32 or int64 `[N]`, N at least 1. Rows may be repeated, as where one prompt continues in N beams, and
        left out. A `DecodeStep` serves one cache: make another for the new one.
        """
        cache = self._empty_like(len(checked_index(index, self.batch_size)))
        cache._copy_rows(self, index)
        return cache

    def repeat_interleave(self, repeats: int) -> LayerCache:
        """Return a new cache with `repeats` copies of each row next to each other, like `torch.repeat_interleave`."""
        return self.select(repeated_rows(self.batch_size, repeats))

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (getattr(self, name) for name in (*TOKENS, *PAIRS, *RINGS)) if tensor is not None]

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Allocate the tensor `name`, of shape `[B, slots, H, D or DV]`."""
        return zeros(shape, dtype, device)

    def _empty_like(self, batch_size: int) -> LayerCache:
        """Return an empty cache with the same settings for batch_size rows."""
        options = {'max_rollback': self.max_rollback, 'dtype': self.dtype, 'device': self.device, 'grows': self.grows}
        return LayerCache(batch_size, self.capacity, **options, **self.layout)  # type: ignore[arg-type]

    def _read(self, name: str, count: int) -> Any:
        """Return the first `count` entries of every row, `[B, count, H, D or DV]`, or None without such a tensor."""
        tensor = getattr(self, name)
        return None if tensor is None else tensor[:, :count]

    def _read_at(self, name: str, index: Tensor) -> Tensor:
        """Return the entries at index `[B, n]` of each row; those out of range are undefined."""
        tensor = getattr(self, name)
        return tensor[rows_of(tensor), index.clamp(0, tensor.shape[1] - 1)]

    def _write(self, name: str, index: Tensor, entries: Tensor, ends: Tensor) -> None:
        """Write entries `[B, n, H, D or DV]` at index `[B, n]` of each row; those from ends `[B]` on may be lost."""
        tensor = getattr(self, name)
        tensor[rows_of(tensor), index] = entries

    def _copy_rows(self, source: LayerCache, index: Tensor) -> None:
        """Replace row b by row index[b] of source, which has the same settings or is this cache."""
        index = index.to(self.device)
        for name in ('lengths', '_peaks', *RINGS):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.copy_(getattr(source, name).index_select(0, index))
        self._copy_entries(source, TOKENS, index, source.max_length, self.lengths.long())
        if self.compress is not None:
            count, ends = (num_compressed_blocks(n, *self.compress) for n in (source.max_length, self.lengths.long()))
            self._copy_entries(source, PAIRS, index, count, ends)
        self.max_length, self._peak, self.row_crops = source.max_length, source._peak, source.row_crops

    def _copy_entries(self, source: LayerCache, names: Sequence[str], index: Tensor, count: Any, ends: Any) -> None:
        """Copy the first ends[b] entries of each row, none of which has more than `count`."""
        where = torch.arange(count, device=self.device).expand(self.batch_size, -1)
        for name in names:
            if getattr(self, name) is not None:
                self._write(name, where, source._read(name, count).index_select(0, index), ends)

    def _recent(self, name: str, position: Tensor) -> Tensor:
        """Return raw 'k' or 'v' at recent positions `[B, n]`, from the ring if there is one.

        Entries at negative positions are undefined.
        """
        ring = getattr(self, f'raw_{name}')
        return self._read_at(name, position) if ring is None else read_ring(ring, position)

    def _grow(self, capacity: int) -> None:
        self.session.clear_launches()
        for name in (*TOKENS, *(RINGS if self.max_rollback is None else ())):
            setattr(self, name, _longer(getattr(self, name), capacity))
        if self.compress is not None:
            slots = num_compressed_blocks(capacity, *self.compress) + 1
            self.k_cmp, self.v_cmp = _longer(self.k_cmp, slots), _longer(self.v_cmp, slots)


def check_compress(compress: Any) -> None:
    """Raise ValueError unless compress is a pair (l, d) with 1 <= d <= l, or None."""
    if compress is None:
        return
    if not isinstance(compress, tuple | list) or len(compress) != 2:
        raise ValueError(f'compress is {checks.shown(compress)}, but must be a pair (block size, stride) or None')
    checks.check_block_sizes(*compress)


def check_layer_cache(cache: Any) -> None:
    """Raise ValueError unless cache is the cache of one layer."""
    if not isinstance(cache, LayerCache):
        kind = type(cache).__name__
        raise ValueError(f'cache is a {kind}, but must be a LayerCache, as init_cache of the layer gives')


def describe(layers: Sequence[LayerCache], lengths: str | None = None) -> str:
    """Return rows, capacity, lengths, dtype, device and size of the caches of one or more layers, for `repr`.

    lengths: text in place of the lengths of the first layer, which are read from the device.
    """
    first, capacities = layers[0], sorted({layer.capacity for layer in layers})
    settings = {
        'rows': first.batch_size,
        'capacity': ' to '.join(map(str, capacities[:: max(1, len(capacities) - 1)])),
        'lengths': first._shown_lengths() if lengths is None else lengths,
        'max_rollback': first.max_rollback,
        'dtype': str(first.dtype).removeprefix('torch.'),
        'device': first.device,
    }
    if first.grows:
        settings['grows'] = True
    if first.page_size is not None:
        settings['page_size'] = first.page_size
    size = sum(layer.nbytes for layer in layers) / 2**30
    return ', '.join([*(f'{name}={value}' for name, value in settings.items()), f'{size:.3g} GiB'])


def _longer(tensor: Tensor | None, tokens: int) -> Tensor | None:
    if tensor is None:
        return None
    longer = zeros((tensor.shape[0], tokens, *tensor.shape[2:]), tensor.dtype, tensor.device)
    longer[:, : tensor.shape[1]] = tensor
    return longer
